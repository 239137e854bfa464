//! Switching tasks in a Linux guest on this host, or on this host itself: the guest agent's
//! workloads, two readers of a disk, and processes that change their memory and check it. The
//! result has a time for each workload and, for a guest, its exits. It runs inside emulated hosts,
//! for `cargo lab compare`.
//!
//! Each workload runs twice: once counted by KVM's trace points, which cost time themselves, then
//! timed without them. Idle time is judged over the timed part only, because starting a guest is
//! waiting.

mod checks;
mod guest;
mod trace_point;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use guest::Guest;
use serde_json::Value;
use vellum_host::{Facts, idle};
use vellum_report::{Label, Premise, Report, Sample, json};

/// The host may be idle for this share of the timed part, as in all of the laboratory's
/// measurements.
const IDLE_LIMIT: f64 = 0.01;
/// The agent's `argv[0]`, by which it recognises itself.
const AGENT: &str = "/init";
/// What is counted of a guest's exits and of KVM's shadow pages: the suffix of a figure, a trace
/// point, and a filter of its events. Exit reasons are from the Intel SDM, Appendix C: a load of
/// CR3 is a control-register access. Without page table isolation, Linux flushes all entries,
/// global ones included, by INVPCID, or by CR4.PGE on a processor without it. It flushes a single
/// page by INVLPG.
const COUNTED: [(&str, &str, Option<&str>); 8] = [
    ("_cr_exits", "kvm/kvm_exit", Some("exit_reason==28")),
    ("_exits", "kvm/kvm_exit", None),
    ("_invlpg_exits", "kvm/kvm_exit", Some("exit_reason==14")),
    ("_invpcid_exits", "kvm/kvm_exit", Some("exit_reason==58")),
    ("_cr4_exits", "kvm/kvm_cr", Some("rw==1 && cr==4")),
    // KVM looks a root up among the shadow pages. Bit 2 of role.level is set for four-level page
    // tables only.
    ("_root_loads", "kvmmmu/kvm_mmu_get_page", Some("role & 4")),
    ("_resyncs", "kvmmmu/kvm_mmu_sync_page", None),
    // A page of the CR3 cache is registered or unregistered: a trial or a pause begins.
    ("_cr3_cache_calls", "kvm/kvm_hypercall", Some("nr==120")),
];
/// On the command line of every Linux guest that is measured here. Page table isolation loads CR3
/// itself.
const UNHINDERED: &str = "pti=off mitigations=off";
/// The workloads: the name in figures, the request, and how often it is timed. Short ones are timed
/// more often.
const WORKLOADS: [(&str, &str, u32); 8] = [
    ("lat_ctx[2]", r#"{"do":"lat-ctx","tasks":2,"rounds":1000,"repeat":1}"#, 3),
    ("lat_ctx[4]", r#"{"do":"lat-ctx","tasks":4,"rounds":500,"repeat":1}"#, 3),
    // The disk comes before the workloads that hardly hit. After such a workload a guest does not
    // use the cache for up to 16,384 loads of CR3, more than the disk's readers do.
    ("disk", READERS, 3),
    ("lat_ctx[8]", r#"{"do":"lat-ctx","tasks":8,"rounds":250,"repeat":1}"#, 3),
    ("lat_ctx[20]", r#"{"do":"lat-ctx","tasks":20,"rounds":100,"repeat":1}"#, 3),
    ("hackbench[1]", r#"{"do":"hackbench","groups":1,"messages":5}"#, 3),
    ("hackbench[5]", r#"{"do":"hackbench","groups":5,"messages":2}"#, 1),
    (PROCESSES, r#"{"do":"processes","processes":12,"steps":30}"#, 1),
];

/// Processes that change their memory. Their result must be the same everywhere.
const PROCESSES: &str = "processes";

/// Two processes read the disk a page at a time. Each waits for its page while the other runs.
const READERS: &str = r#"{"do":"exec","command":["sh","-c","for n in 0 1; do dd if=/dev/vda of=/dev/null bs=4096 count=500 skip=$((n * 500)) iflag=direct 2>/dev/null & done; wait"]}"#;

/// Tasks that switch: timed, and what the guest left for.
#[derive(Parser)]
#[command(name = "guest-tasks")]
struct Cli {
    /// The guest's kernel; without one, this host's own tasks are timed
    #[arg(long, requires = "initrd")]
    kernel: Option<PathBuf>,
    /// Its initramfs, with the guest agent
    #[arg(long, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// The guest may use the CR3 cache
    #[arg(long, requires = "kernel")]
    cr3_cache: bool,
    /// Instead of measuring: a guest with page table isolation refuses the cache, and says so; with
    /// pti=off it uses it
    #[arg(long, requires = "cr3_cache", conflicts_with_all = ["only", "json"])]
    isolation: bool,
    /// Instead of measuring: check that a guest unregisters the page of a CPU that goes offline or
    /// a kernel that is replaced
    #[arg(long, requires = "cr3_cache", conflicts_with_all = ["only", "json", "isolation"])]
    teardown: bool,
    /// The guest has no PCIDs
    #[arg(long, requires = "kernel")]
    no_pcid: bool,
    /// The guest's memory in MiB
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u32).range(32..=4096))]
    memory: u32,
    /// Only workloads whose name contains this
    #[arg(long)]
    only: Vec<String>,
    /// Where the result goes
    #[arg(long, required_unless_present_any = ["isolation", "teardown"])]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-tasks: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> io::Result<()> {
    if cli.isolation {
        return checks::isolation(cli);
    }
    if cli.teardown {
        return checks::teardown(cli);
    }
    let mut report = Report::new("guest-tasks", Facts::collect("as the guest's own".into()));
    report.ask("guest", if cli.kernel.is_some() { "linux" } else { "none: the host itself" });
    report.ask("cr3_cache", cli.cr3_cache);
    report.ask("pcid", !cli.no_pcid);
    report.ask("memory_mib", cli.memory);
    let guest = cli.kernel.as_ref().map(|_| Guest::start(cli, 1, UNHINDERED)).transpose()?;
    for (name, request, times) in WORKLOADS {
        let wanted = cli.only.is_empty() || cli.only.iter().any(|part| name.contains(part.as_str()));
        // The emulated host has no disk.
        if !wanted || (guest.is_none() && name == "disk") {
            continue;
        }
        let label = label(name);
        let figure = |kind: &str| Label { name: format!("{}{kind}", label.name), index: label.index.clone() };
        match &guest {
            Some(guest) => {
                let counted = guest.counted(request)?;
                for ((kind, ..), times) in COUNTED.iter().zip(&counted.times) {
                    report.figure(figure(kind), "times/switch", times / counted.switches);
                }
                report.figure(figure("_ticks"), "ticks/switch", counted.ticks / counted.switches);
            }
            // A first run is not timed.
            None => drop(alone(request)?),
        }
        let (idle_before, before) = (idled()?, Instant::now());
        let mut samples = Vec::new();
        let mut events = Vec::new();
        for round in 0..times {
            let began = Instant::now();
            events = match &guest {
                Some(guest) => guest.asked(request)?,
                None => alone(request)?,
            };
            let value = time(&events, began.elapsed()).ok_or_else(|| {
                io::Error::other(format!("{name}: no time in what the agent says: {events:?}"))
            })?;
            samples.push(Sample { value, round, ..Sample::default() });
        }
        let share = (idled()? - idle_before).as_secs_f64() / before.elapsed().as_secs_f64();
        if share > IDLE_LIMIT {
            report.fail(Some(name.into()), Premise::HostIdled { share, limit: IDLE_LIMIT });
        }
        report.samples(label, "ns", samples);
        if name == PROCESSES {
            let found = found(&events).ok_or_else(|| {
                io::Error::other(format!("{name}: memory was not as it should be: {events:?}"))
            })?;
            report.figure("processes_found", "", found);
        }
    }
    if let Some(guest) = guest {
        guest.end()?;
    }
    let text = json::text(&[report]).map_err(io::Error::other)?;
    cli.json.as_ref().map_or(Ok(()), |path| fs::write(path, text))
}

/// Splits a workload's name such as `lat_ctx[2]` into a figure's label.
fn label(name: &str) -> Label {
    match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
        Some((name, index)) => Label::of(name, index),
        None => name.into(),
    }
}

/// Nanoseconds: of a switch where the agent counts switches, of the run where the agent times it,
/// or else of the request.
fn time(events: &[Value], elapsed: Duration) -> Option<f64> {
    events.iter().find_map(|event| {
        let number = |field: &str| event.get(field)?.as_f64();
        match event.get("event")?.as_str()? {
            "lat-ctx" => Some((number("ring_ns")? - number("own_ns")?) / number("switches")?),
            "hackbench" => number("ns"),
            "processes" => Some(elapsed.as_nanos() as f64),
            "exit" => (number("code")? == 0.0).then_some(elapsed.as_nanos() as f64),
            _ => None,
        }
    })
}

/// The sum over what the processes found, cut to the bits that a figure holds exactly. None if
/// memory was wrong.
fn found(events: &[Value]) -> Option<f64> {
    let event = events.iter().find(|event| event["event"] == "processes")?;
    let sum = event.get("sum")?.as_u64()? & ((1 << 48) - 1);
    (event.get("wrong")?.as_u64()? == 0).then_some(sum as f64)
}

fn idled() -> io::Result<Duration> {
    idle::since_boot()
        .ok_or_else(|| io::Error::other("neither /proc/timer_list nor /proc/stat has idle times"))
}

/// The agent's events when this host itself does a request.
fn alone(request: &str) -> io::Result<Vec<Value>> {
    said(Command::new("/bin/vellum").arg0(AGENT).arg(request))
}

/// Runs a command that prints one event per line.
fn said(command: &mut Command) -> io::Result<Vec<Value>> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        return Err(io::Error::other(format!("{:?}: {}: {said}", command.get_program(), output.status)));
    }
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    lines.lines().map(|line| serde_json::from_str(line).map_err(io::Error::other)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_name_and_a_request_of_the_agents() {
        for (name, request, _) in WORKLOADS {
            assert_eq!(label(name).to_string(), name);
            assert!(serde_json::from_str::<Value>(request).unwrap()["do"].is_string(), "{request}");
        }
    }

    #[test]
    fn a_switch_has_the_time_of_the_ring_without_the_agents_own() {
        let event =
            serde_json::json!({"event":"lat-ctx","repeat":1,"switches":10,"ring_ns":1500,"own_ns":500});
        assert_eq!(time(&[event], Duration::ZERO), Some(100.0));
        let processes = |wrong: u64| serde_json::json!({"event":"processes","wrong":wrong,"sum":u64::MAX});
        assert_eq!((found(&[processes(0)]), found(&[processes(1)])), (Some(((1u64 << 48) - 1) as f64), None));
        let failed = serde_json::json!({"event":"exit","code":1});
        assert_eq!(time(&[failed], Duration::from_secs(1)), None);
    }
}
