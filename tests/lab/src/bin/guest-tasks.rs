//! Tasks that switch, in a Linux guest on this host or on this host itself: the guest agent's own, and two readers of a disk; and processes
//! that change their memory, whose contents are checked. Its result
//! has a time for each, and of a guest's what it left for. It runs inside emulated hosts, for `cargo lab compare`.
//!
//! Each is done twice: once counted, by KVM's trace points, which cost time themselves and are gone again when the other is timed. Idle is
//! judged over what is timed, for starting a guest is waiting.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::Value;
use vellum::host::{Facts, idle};
use vellum::report::{Label, Premise, Report, Sample, json};

/// The share of what is timed that the host may idle, as of everything that the laboratory measures.
const IDLE_LIMIT: f64 = 0.01;
/// How often a guest that boots is asked whether it is there, five times a second.
const PATIENCE: usize = 3000;
/// `vellum`'s own name for its guest here.
const NAME: &str = "tasks";
/// What the agent is called, by which it knows itself.
const AGENT: &str = "/init";
/// What a guest left for and what KVM's shadow pages had of it: a figure's ending, a trace point, and which of its events. Reasons are
/// of the Intel SDM, Appendix C: a load of CR3 is a control-register access. Without page table isolation Linux flushes everything,
/// global pages too, by INVPCID or by CR4.PGE where the processor lacks that, and a page of its own by INVLPG.
const COUNTED: [(&str, &str, Option<&str>); 7] = [
    ("_cr_exits", "kvm/kvm_exit", Some("exit_reason==28")),
    ("_exits", "kvm/kvm_exit", None),
    ("_invlpg_exits", "kvm/kvm_exit", Some("exit_reason==14")),
    ("_invpcid_exits", "kvm/kvm_exit", Some("exit_reason==58")),
    ("_cr4_exits", "kvm/kvm_cr", Some("rw==1 && cr==4")),
    // A root is looked for among the shadow pages; role.level of page tables of four levels alone has this bit.
    ("_root_loads", "kvmmmu/kvm_mmu_get_page", Some("role & 4")),
    ("_resyncs", "kvmmmu/kvm_mmu_sync_page", None),
];
/// Of the command line of every Linux guest that is measured here; page table isolation loads CR3 by itself.
const UNHINDERED: &str = "pti=off mitigations=off";
/// What a guest that has page table isolation is started with, and what its log then has of that and of the cache.
const ISOLATION: [(&str, &str, &str); 2] = [
    (
        "pti=on",
        "page tables isolation: enabled",
        "CR3 cache: not with page table isolation (pti=off allows it)",
    ),
    ("pti=off", "page tables isolation: disabled on command line", "CR3 cache: on"),
];
/// How often KVM's guests that are there now have loaded CR3 without an exit.
const HITS: &str = "/sys/kernel/debug/kvm/cr3_cache_switches";
/// What the guest's disk holds.
const DISK_BYTES: u64 = 8 << 20;

/// What is done, by the names that figures have, and how often it is timed: what is short is.
const WORKLOADS: [(&str, &str, u32); 8] = [
    ("lat_ctx[2]", r#"{"do":"lat-ctx","tasks":2,"rounds":1000,"repeat":1}"#, 3),
    ("lat_ctx[4]", r#"{"do":"lat-ctx","tasks":4,"rounds":500,"repeat":1}"#, 3),
    // Before what hardly hits: a guest does without the cache for up to 16,384 loads of CR3 after that, which is more than these have.
    ("disk", READERS, 3),
    ("lat_ctx[8]", r#"{"do":"lat-ctx","tasks":8,"rounds":250,"repeat":1}"#, 3),
    ("lat_ctx[20]", r#"{"do":"lat-ctx","tasks":20,"rounds":100,"repeat":1}"#, 3),
    ("hackbench[1]", r#"{"do":"hackbench","groups":1,"messages":5}"#, 3),
    ("hackbench[5]", r#"{"do":"hackbench","groups":5,"messages":2}"#, 1),
    (PROCESSES, r#"{"do":"processes","processes":12,"steps":30}"#, 1),
];

/// Processes that change their memory; what they found has to be the same everywhere.
const PROCESSES: &str = "processes";

/// Two processes that read the disk, a page at a time, in turn: each waits for its page while the other runs.
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
    /// Instead of measuring: a guest with page table isolation refuses the cache, and says so; with pti=off it uses it
    #[arg(long, requires = "cr3_cache", conflicts_with_all = ["only", "json"])]
    isolation: bool,
    /// The guest has no PCIDs
    #[arg(long, requires = "kernel")]
    no_pcid: bool,
    /// The guest's memory in MiB
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u32).range(32..=4096))]
    memory: u32,
    /// These alone: parts of names
    #[arg(long)]
    only: Vec<String>,
    /// Where the result goes
    #[arg(long, required_unless_present = "isolation")]
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
        return ISOLATION.iter().try_for_each(|(parameter, isolation, cache)| {
            isolated(cli, parameter, &[isolation, cache], *parameter == "pti=off")
        });
    }
    let mut report = Report::new("guest-tasks", Facts::collect("as the guest's own".into()));
    report.ask("guest", if cli.kernel.is_some() { "linux" } else { "none: the host itself" });
    report.ask("cr3_cache", cli.cr3_cache);
    report.ask("pcid", !cli.no_pcid);
    report.ask("memory_mib", cli.memory);
    let guest = cli.kernel.as_ref().map(|_| Guest::start(cli, UNHINDERED)).transpose()?;
    for (name, request, times) in WORKLOADS {
        let wanted = cli.only.is_empty() || cli.only.iter().any(|part| name.contains(part.as_str()));
        // The host has no disk of its own.
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
            // What is timed is not the first of its kind.
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

/// A guest that is started with `parameter` says all of `says` in its log; its tasks switch, with hits or without.
fn isolated(cli: &Cli, parameter: &str, says: &[&str], hits: bool) -> io::Result<()> {
    let guest = Guest::start(cli, parameter)?;
    let log = guest.text(&["dmesg"])?;
    let of_it = log.lines().filter(|line| line.contains("CR3 cache") || line.contains("isolation:"));
    let of_it = of_it.collect::<Vec<_>>().join("\n");
    eprintln!("guest-tasks: {parameter}: the guest's log has\n{of_it}");
    if let Some(missing) = says.iter().find(|line| !of_it.contains(**line)) {
        return Err(io::Error::other(format!("{parameter}: the guest's log lacks {missing:?}")));
    }
    let (_, switch, _) = WORKLOADS[0];
    guest.asked(switch)?;
    let hit = fs::read_to_string(HITS).map_err(|error| io::Error::other(format!("{HITS}: {error}")))?;
    eprintln!("guest-tasks: {parameter}: {} loads of CR3 without an exit", hit.trim());
    if (hit.trim() != "0") != hits {
        let wrong = if hits { "the guest does not use the cache" } else { "the guest uses the cache" };
        return Err(io::Error::other(format!("{parameter}: {wrong}: {HITS} is {}", hit.trim())));
    }
    guest.end()
}

/// `lat_ctx[2]` as what a figure is called.
fn label(name: &str) -> Label {
    match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
        Some((name, index)) => Label::of(name, index),
        None => name.into(),
    }
}

/// Nanoseconds: of a switch, where the agent counts them; of all, where it times that; of the request, where the agent does neither.
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

/// The sum over all that the processes found, as far as a figure is exact; nothing where something was wrong.
fn found(events: &[Value]) -> Option<f64> {
    let event = events.iter().find(|event| event["event"] == "processes")?;
    let sum = event.get("sum")?.as_u64()? & ((1 << 48) - 1);
    (event.get("wrong")?.as_u64()? == 0).then_some(sum as f64)
}

fn idled() -> io::Result<Duration> {
    idle::since_boot()
        .ok_or_else(|| io::Error::other("neither /proc/timer_list nor /proc/stat has idle times"))
}

/// The agent's events of a request that this host itself does.
fn alone(request: &str) -> io::Result<Vec<Value>> {
    said(Command::new("/bin/vellum").arg0(AGENT).arg(request))
}

/// The events, a line each, that a command prints.
fn said(command: &mut Command) -> io::Result<Vec<Value>> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        return Err(io::Error::other(format!("{:?}: {}: {said}", command.get_program(), output.status)));
    }
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    lines.lines().map(|line| serde_json::from_str(line).map_err(io::Error::other)).collect()
}

/// A Linux guest with the agent.
struct Guest(Child);

/// What a request did that was counted.
struct Counted {
    switches: f64,
    /// Of [`COUNTED`].
    times: Vec<f64>,
    ticks: f64,
}

impl Guest {
    fn start(cli: &Cli, parameters: &str) -> io::Result<Self> {
        let disk = "/tmp/tasks-disk";
        fs::write(disk, vec![0; DISK_BYTES as usize])?;
        let mut line = format!("{parameters} nokaslr pci=off noxsave quiet panic=-1 reboot=t");
        if cli.no_pcid {
            line += " nopcid";
        }
        let mut command = Command::new("/bin/vellum");
        command.arg("run").arg("--kernel").arg(cli.kernel.as_ref().ok_or_else(none)?);
        command.arg("--initrd").arg(cli.initrd.as_ref().ok_or_else(none)?);
        command.args(["--name", NAME, "--vsock", "/tmp/tasks-vsock", "--disk", disk, "--params", &line]);
        command.args(["--memory", &format!("{}m", cli.memory), "--serial", "file=/tmp/tasks-console"]);
        command.args(["--cr3-cache", if cli.cr3_cache { "on" } else { "off" }]);
        let mut guest = Self(command.stdin(Stdio::null()).spawn()?);
        for _ in 0..PATIENCE {
            if guest.asked(r#"{"do":"facts"}"#).is_ok() {
                // In little memory a kernel allows fewer tasks than five groups have.
                guest.asked(
                    r#"{"do":"exec","command":["sh","-c","echo 2000 > /proc/sys/kernel/threads-max"]}"#,
                )?;
                return Ok(guest);
            }
            if let Some(status) = guest.0.try_wait()? {
                return Err(io::Error::other(format!("the guest ended: {status}: {}", console())));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(io::Error::other(format!("no agent came up: {}", console())))
    }

    fn asked(&self, request: &str) -> io::Result<Vec<Value>> {
        said(Command::new("/bin/vellum").args(["exec", NAME, "--request", request]))
    }

    /// Does `request`, and counts what the guest did for it.
    fn counted(&self, request: &str) -> io::Result<Counted> {
        let before = self.seen()?;
        let points = COUNTED.iter().map(|(_, name, filter)| TracePoint::count(name, *filter));
        let points = points.collect::<io::Result<Vec<_>>>()?;
        self.asked(request)?;
        let times = points.iter().map(TracePoint::so_far).collect::<io::Result<_>>()?;
        drop(points);
        let after = self.seen()?;
        Ok(Counted { switches: after.0 - before.0, times, ticks: after.1 - before.1 })
    }

    /// What a command in there prints.
    fn text(&self, command: &[&str]) -> io::Result<String> {
        let events = self.asked(&serde_json::json!({"do": "exec", "command": command}).to_string())?;
        Ok(events.iter().filter_map(|event| event.get("text")?.as_str()).collect())
    }

    /// Context switches and timer interrupts of the guest since it has booted.
    fn seen(&self) -> io::Result<(f64, f64)> {
        let text = self.text(&["cat", "/proc/stat", "/proc/interrupts"])?;
        let number = |word: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix(word))?;
            line.split_whitespace().next()?.parse::<f64>().ok()
        };
        number("ctxt")
            .zip(number("LOC:"))
            .ok_or_else(|| io::Error::other(format!("no ctxt or LOC in: {text}")))
    }

    fn end(mut self) -> io::Result<()> {
        self.asked(r#"{"do":"power-off"}"#).ok();
        let status = self.0.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("the guest ended: {status}: {}", console())))
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // After `end` it is gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn none() -> io::Error {
    io::Error::other("no guest was asked for")
}

fn console() -> String {
    fs::read_to_string("/tmp/tasks-console").unwrap_or_default()
}

/// A trace point that is counted on the only CPU, until this is dropped.
struct TracePoint(File);

/// perf_event_open(2): struct perf_event_attr as of its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint: u32,
    address: u64,
}

impl TracePoint {
    fn count(name: &str, filter: Option<&str>) -> io::Result<Self> {
        const TRACE_POINT: u32 = 2;
        // _IOW('$', 6, char *)
        const SET_FILTER: libc::c_ulong = 0x4008_2406;
        let path = format!("/sys/kernel/tracing/events/{name}/id");
        let id = fs::read_to_string(&path).map_err(|error| io::Error::other(format!("{path}: {error}")))?;
        let size = size_of::<Attributes>() as u32;
        let config = id.trim().parse().map_err(io::Error::other)?;
        let attributes = Attributes { kind: TRACE_POINT, size, config, ..Attributes::default() };
        // SAFETY: `attributes` outlives the call and says how long it is; all of every process on CPU 0.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, -1, 0, -1, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let counter = Self(unsafe { File::from_raw_fd(fd as i32) });
        if let Some(filter) = filter {
            let filter = std::ffi::CString::new(filter)?;
            // SAFETY: the string ends in a zero and outlives the call.
            let result = unsafe { libc::ioctl(counter.0.as_raw_fd(), SET_FILTER as _, filter.as_ptr()) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(counter)
    }

    fn so_far(&self) -> io::Result<f64> {
        let mut bytes = [0; 8];
        (&self.0).read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes) as f64)
    }
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
