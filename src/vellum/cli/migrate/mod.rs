//! `vellum migrate`: the client of a migration. It connects to the target, hands the connection to
//! the machine, and prints progress. The machine opens no path itself. If a signal ends the client
//! before the hand-over, the migration is cancelled. If the client is killed, the migration goes
//! on, and another client can follow it with --attach.

pub mod address;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use clap::Args;

use self::address::{Connection, Target, connect};
use super::args;
use super::client::{check, failure, has_a_descriptor, heard, listen, loses, may_leave, status};
use super::failure::Failure;
use super::output::{print, say};
use vellum_control::client::Client;
use vellum_control::{
    Compression, Do, Event, Left, Link, Loses, MachineState, MigrateRequest, Mode, Phase, Status, Then,
    Throttling, Waited, names,
};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::commit_flag::CommitFlag;
use vellum_migration::link::LIVENESS;
use vellum_sys::{keyvalue, signal};

/// Move a running machine to another process or host: `vellum receive` waits there
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct MigrateArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,

    /// Where `vellum receive` listens: `unix:PATH`, `tcp:HOST:PORT`, `ssh:[USER@]HOST:NAME`, or
    /// `exec:COMMAND`, whose standard input and output lead there
    #[arg(long, value_name = "ADDRESS", required_unless_present = "attach")]
    to: Option<Target>,

    /// Follow a migration that another `vellum migrate` has started; with --to, reconnect after a
    /// cut
    #[arg(long)]
    attach: bool,

    /// How memory gets there: stream, pages are sent; memfd, a process on this host gets a
    /// descriptor by --to unix:PATH, and nothing is copied. memfd needs memory with a descriptor:
    /// vellum run --memory SIZE,backing=memfd
    #[arg(long, value_name = "HOW", value_parser = args::LINK, default_value = "stream", hide_possible_values = true)]
    link: Link,

    /// When memory is sent: precopy, before the guest runs on the target; postcopy, after that,
    /// each page on demand and the rest in the background; hybrid, one pass before and what was
    /// written during it after. While the guest runs there without all of its memory, it is lost if
    /// either process dies
    #[arg(long, value_name = "WHEN", value_parser = args::MODE, default_value = "precopy", hide_possible_values = true)]
    mode: Mode,

    /// Resume a postcopy whose link was cut: reconnect, and send what the target lacks, over one
    /// connection
    #[arg(long, requires = "to", conflicts_with = "attach")]
    recover: bool,

    /// The longest downtime. Values below the time that a pause takes, some 5 ms, are raised to
    /// that
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, default_value = "300ms")]
    downtime: Duration,

    /// How long the migration may take, and what happens then: `TIME[,then=cancel|force|postcopy]`
    #[arg(long, value_name = "TIME", value_parser = timeout)]
    timeout: Option<(Duration, Then)>,

    /// The highest bandwidth in bytes per second, as in 400m
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
    bandwidth: Option<u64>,

    /// Send pages over this many connections, 1 to 16; for ssh: and exec: each is a process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16), default_value_t = 1)]
    connections: u32,

    /// Slow down a guest that writes faster than the link sends: off; steps, one more step after
    /// each pass that leaves too much; dirty-limit, to half of the link's rate, and on machines
    /// with dirty rings only the vCPUs that write more than their share
    #[arg(long, value_name = "HOW", value_parser = args::THROTTLING, default_value = "off", hide_possible_values = true)]
    throttle: Throttling,

    /// Compress pages if that makes them shorter: zstd. For links that are slower than a CPU
    /// compresses
    #[arg(long, value_name = "HOW", value_parser = args::COMPRESSION, hide_possible_values = true)]
    compress: Option<Compression>,

    /// How dirty pages are collected: manual-protect, initially-set, bitmap; or ring, which
    /// machines of `vellum run --dirty-ring` require and others do not have. The default is
    /// initially-set, unless this kernel is known to lose pages with it
    #[arg(long, value_name = "NAME", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: Option<args::Tracker>,

    /// How long the target may be silent before it counts as gone
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    liveness: Option<Duration>,

    /// Pause the guest first, so that it moves in one pass; it arrives paused
    #[arg(long)]
    paused: bool,

    /// Compare every page of memory before the hand-over; the guest is paused meanwhile, which
    /// --downtime does not count
    #[arg(long)]
    verify: bool,

    /// Allow guest memory to cross a network unencrypted; anyone on the path can read and change it
    #[arg(long)]
    insecure_network: bool,

    /// Print events as JSON, a line each
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  vellum receive --listen unix:/tmp/there.sock --name there &
  vellum migrate web --to unix:/tmp/there.sock
  vellum migrate web --to ssh:other.example:web --downtime 100ms --timeout 5m,then=force
  vellum migrate web --to ssh:other.example:web --mode hybrid
  vellum migrate web --to ssh:other.example:web --recover      after a link that was cut in a postcopy

Exit status: 0 the guest has moved, 1 it stays where it was, 2 usage.";

fn timeout(text: &str) -> Result<(Duration, Then), String> {
    let kv = keyvalue::KeyValues::parse(text, Some("time"), &["time", "then"]).map_err(|e| e.to_string())?;
    let names = [("cancel", Then::Cancel), ("force", Then::Force), ("postcopy", Then::Postcopy)];
    let read = || -> Result<_, keyvalue::Error> {
        let then = kv.with("then", |text| keyvalue::one_of("then", text, &names))?;
        Ok((kv.required("time", keyvalue::duration)?, then.unwrap_or_default()))
    };
    read().map_err(|e| e.to_string())
}

/// How to avoid that a target lacks CPU features.
const AVOIDS: &str =
    "\nvellum run --cpu x86-64-v2, or --cpu FILE of vellum doctor --cpu-common, shows a guest what both have";

/// The interval of attempts to reconnect after a cut, and how long they go on.
const AGAIN: Duration = Duration::from_secs(1);
const PERSEVERANCE: Duration = Duration::from_secs(60);

impl MigrateArgs {
    /// The migration request. The caller adds `loses`, what the host's dirty log loses.
    fn request(&self) -> MigrateRequest {
        let liveness = self.liveness.unwrap_or(LIVENESS);
        MigrateRequest {
            timeout_ms: self.timeout.map(|(time, _)| time.as_millis() as u64),
            then: self.timeout.map(|(_, then)| then).unwrap_or_default(),
            bandwidth: self.bandwidth,
            throttle: self.throttle,
            compress: self.compress,
            tracker: self.tracker.map(|tracker| tracker.method.name().to_owned()),
            verify: self.verify,
            connections: self.connections,
            mode: self.mode,
            fence: true,
            link: self.link,
            ..MigrateRequest::new(self.downtime.as_millis() as u64, liveness.as_millis() as u64)
        }
    }
}

/// Runs `vellum migrate`.
pub fn run(args: &MigrateArgs) -> Result<Exit, Failure> {
    let path = names::find(&args.machine).map_err(failure)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let mut machine = listen(&path)?;
    let mut connections = Vec::new();
    let has = status(&mut machine)?;
    let under_way = has.operation.and_then(|operation| operation.id);
    let of = if args.recover {
        if has.state != MachineState::PostcopyPaused {
            return Err(Failure::usage(format!(
                "--recover: {} is {}: nothing to recover",
                args.machine, has.state
            )));
        }
        recover(args, &mut machine, &mut connections)?;
        under_way
    } else if args.attach {
        match has.state {
            MachineState::Migrating | MachineState::Postcopy => {}
            MachineState::HandoverUnconfirmed => connections.push(again(args, &mut machine)?),
            state => {
                return Err(Failure::usage(format!("{} is {state}: nothing to attach to", args.machine)));
            }
        }
        under_way
    } else {
        may_leave(&has)?;
        if let Some(tracker) = args.tracker {
            check(tracker.method, &has)?;
        }
        let chooses = args.tracker.is_none() && has.dirty_ring.is_none() && args.link == Link::Stream;
        if args.link == Link::Memfd {
            check_memfd(args, &has)?;
        }
        let target = args.to.as_ref().ok_or_else(|| Failure::usage("--to ADDRESS says where to"))?;
        let mut request = args.request();
        let follows = request.postcopies();
        if follows && args.link == Link::Memfd {
            return Err(Failure::usage(
                "--link memfd: all memory is there at once, and none can follow by --mode postcopy or hybrid, or then=postcopy",
            ));
        }
        if follows && args.verify {
            return Err(Failure::usage(
                "--verify: memory is compared before the guest is handed over, and by --mode postcopy or hybrid, or then=postcopy, it \
                 comes after that",
            ));
        }
        // Postcopy sends pages that are waited for on a connection of their own.
        for _ in 0..args.connections + u32::from(follows) {
            connections.push(connect(target, args.insecure_network)?);
        }
        if args.paused {
            machine.ask(&Do::Pause {}).map_err(failure)?;
        }
        request.loses = if chooses { loses() } else { Loses::Nothing };
        let asked = Do::Migrate(request);
        let fence = CommitFlag::file().map_err(Failure::host)?;
        let sockets = connections.iter().map(|connection| connection.socket.as_fd());
        let sockets: Vec<_> = sockets.chain([fence.as_fd()]).collect();
        machine.ask_with(&asked, &sockets).map_err(failure)?;
        if let Some(left) = has.limit_ms {
            let (name, left) = (&args.machine, Duration::from_millis(left).as_secs());
            say(&format!(
                "{name} was to end in {left} s, by --duration or --timeout; that limit does not move with it: vellum ctl NAME stop ends \
                 it there"
            ));
        }
        Some(machine.last_id())
    };
    follow(args, &mut machine, of, has.numbered, &mut connections)
}

/// Checks that the machine with this `status` can be migrated by memfd.
fn check_memfd(args: &MigrateArgs, status: &Status) -> Result<(), Failure> {
    let wrong = |why: String| Err(Failure::usage(format!("--link memfd: {why}")));
    let others = [
        (args.connections > 1, "--connections"),
        (args.compress.is_some(), "--compress"),
        (args.bandwidth.is_some(), "--bandwidth"),
        (args.throttle != Throttling::Off, "--throttle"),
        (args.tracker.is_some(), "--tracker"),
    ];
    if let Some((_, flag)) = others.into_iter().find(|(given, _)| *given) {
        return wrong(format!("no page is sent, so {flag} says nothing; leave it out"));
    }
    if !matches!(args.to, Some(Target::Unix(_)) | None) {
        return wrong("descriptors come only over --to unix:PATH".into());
    }
    has_a_descriptor(&args.machine, status).or_else(wrong)
}

/// Prints progress until the outcome is known.
fn follow(
    args: &MigrateArgs,
    machine: &mut Client,
    of: Option<u64>,
    numbered: bool,
    connections: &mut Vec<Connection>,
) -> Result<Exit, Failure> {
    let bar = indicatif::ProgressBar::new(0);
    let style = indicatif::ProgressStyle::with_template("{bar:30} {msg}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    let mut ended: Option<Exit> = None;
    let mut judged = args.json || args.mode == Mode::Postcopy;
    loop {
        if signal::take().is_some() {
            // Before the hand-over the migration is cancelled. After it the target is asked first.
            // An event tells the outcome.
            let _ = machine.ask(&Do::MigrateCancel { of: of.filter(|_| numbered) });
        }
        let line = match heard(machine, of, "the migration was over") {
            Ok(Some(line)) => line,
            Ok(None) => continue,
            // A machine that has moved ends and closes the connection.
            Err(failed) => {
                bar.finish_and_clear();
                return ended.ok_or(failed);
            }
        };
        if args.json {
            print(format_args!("{line}\n"))?;
        }
        let Ok(event) = serde_json::from_value::<Event>(line) else { continue };
        match event {
            Event::Migrating {
                pass,
                sent,
                left,
                expected_downtime_ms,
                dirty_rate,
                bandwidth,
                throttle_percent,
                phase,
                ..
            } => {
                if phase == Phase::Copying
                    && pass > PASSES_TO_JUDGE
                    && !std::mem::replace(&mut judged, true)
                    && let Some((written, carried)) = dirty_rate.zip(bandwidth)
                {
                    let outlook = outlook(args, written, carried, expected_downtime_ms);
                    bar.suspend(|| say(&outlook));
                }
                bar.set_length(sent + left);
                bar.set_position(sent);
                bar.set_message(describe(
                    pass,
                    sent,
                    left,
                    bandwidth,
                    (expected_downtime_ms, throttle_percent),
                ));
            }
            Event::Unconfirmed {} => {
                bar.finish_and_clear();
                say("the link was cut in the hand-over: the target is asked what became of it");
                connections.clear();
                connections.push(again(args, machine)?);
            }
            Event::Ahead { us } => {
                bar.finish_and_clear();
                let ms = us as f64 / 1000.0;
                say(&format!("{} runs there after {ms:.1} ms; the rest of its memory follows", args.machine));
            }
            Event::Severed { why } => {
                bar.finish_and_clear();
                let why = if why.is_empty() { why } else { format!(" ({why})") };
                return Err(Failure::host(format!(
                    "the link was cut{why}, and some of the guest's memory is here alone: it waits there for what it lacks; `vellum \
                     migrate {} --recover --to ADDRESS` goes on",
                    args.machine
                )));
            }
            Event::Stayed { why } => {
                bar.finish_and_clear();
                let hint = if why.contains("CPU feature") { AVOIDS } else { "" };
                return Err(Failure::host(format!("{} stays where it is: {why}{hint}", args.machine)));
            }
            Event::Moved { us, compared, tracker, tracker_why, waited, left, .. } => {
                bar.finish_and_clear();
                if let (Some(tracker), Some(why)) = (tracker, tracker_why) {
                    say(&format!("dirty pages were collected by {tracker}: {why}"));
                }
                if !args.json {
                    print(moved(args, us, compared, waited.as_ref(), &left))?;
                }
                ended = Some(Exit::PowerOff);
            }
            Event::Ended { .. } if ended.is_some() => {
                // `exec:` and `ssh:` have delivered everything by now.
                return Ok(Exit::PowerOff);
            }
            _ => {}
        }
    }
}

/// The number of passes after which a migration is judged. The first pass sends all memory. The
/// third is the first that shows whether passes get shorter.
const PASSES_TO_JUDGE: u32 = 3;

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Whether the migration converges within its limits, and what would help if it does not.
fn outlook(args: &MigrateArgs, written: u64, carried: u64, expected_ms: Option<u64>) -> String {
    let limit = args.downtime.as_millis() as u64;
    let rates =
        format!("the guest writes {:.0} MiB/s, the link carries {:.0} MiB/s", mib(written), mib(carried));
    let seen = format!("after {PASSES_TO_JUDGE} passes: {rates}");
    if expected_ms.is_some_and(|expected| expected <= limit) || written < carried {
        return format!("{seen}: it converges");
    }
    let name = &args.machine;
    let mut helps = Vec::new();
    if let Some(cap) = args.bandwidth.filter(|cap| carried >= cap / 10 * 9) {
        let cap = mib(cap);
        helps.push(format!("vellum ctl {name} migrate-set --bandwidth SIZE (now {cap:.0} MiB/s)"));
    }
    let expected = expected_ms.map_or(String::new(), |ms| format!(" (it would stand still for {ms} ms now)"));
    helps.push(format!("vellum ctl {name} migrate-set --downtime TIME{expected}"));
    let again =
        format!("or vellum ctl {name} migrate-cancel, and again with --throttle steps or --mode hybrid");
    helps.push(if args.mode == Mode::Precopy {
        again
    } else {
        format!("or vellum ctl {name} migrate-cancel")
    });
    let ends = match args.timeout {
        Some((time, Then::Cancel)) => format!("it will be given up after {} s", time.as_secs()),
        Some((time, _)) => format!("--timeout ends that after {} s", time.as_secs()),
        None => "nothing ends it, for want of a --timeout".into(),
    };
    format!("{seen}: it does not converge, and {ends}. What helps: {}", helps.join(", "))
}

/// The summary after a migration.
fn moved(args: &MigrateArgs, us: u64, compared: Option<u64>, waited: Option<&Waited>, left: &Left) -> String {
    let copied = left.sent.max(left.saved).max(left.served);
    let took = copied.max(left.compared).saturating_sub(left.began);
    let (took, still, limit) = (took as f64 / 1e6, us as f64 / 1e3, args.downtime.as_millis());
    let total = if took < 10.0 { format!("{:.0} ms", took * 1e3) } else { format!("{took:.1} s") };
    let passes = if left.passes == 1 { "1 pass".into() } else { format!("{} passes", left.passes) };
    let copying = copied.saturating_sub(left.began) as f64 / 1e6;
    let (sent, rate) = (mib(left.bytes), mib(left.bytes) / copying.max(1e-6));
    let mut text = format!(
        "MIGRATED  {total}, still for {still:.1} ms (limit {limit}), {passes}, {sent:.0} MiB at {rate:.0} MiB/s\n"
    );
    if let Some(waited) = waited {
        let most = waited.vcpus_us.iter().max().copied().unwrap_or(0) as f64 / 1e3;
        let faults = waited.faults;
        text += &format!("  waited for pages there   {faults} times, no vCPU for more than {most:.1} ms\n");
    }
    if args.compress.is_some() {
        let all = mib(left.bytes + left.spared);
        text += &format!("  saved by compression     {:.1} of {all:.1} MiB\n", mib(left.spared));
    }
    if let Some(pages) = compared {
        text += &format!("  compared                 {pages} pages, all alike");
        // A machine of an earlier Vellum does not say when it was done.
        if left.compared > 0 {
            let ms = left.compared.saturating_sub(copied) as f64 / 1e3;
            text += &format!(", in {ms:.0} ms of standing still");
        }
        text.push('\n');
    }
    text
}

fn describe(
    pass: u32,
    sent: u64,
    left: u64,
    bandwidth: Option<u64>,
    (downtime, taken): (Option<u64>, u32),
) -> String {
    let mut text = format!("pass {pass}, {:.0} MiB sent, {:.0} left", mib(sent), mib(left));
    if let Some(bandwidth) = bandwidth {
        text = format!("{text}, {:.0} MiB/s", mib(bandwidth));
    }
    if taken > 0 {
        text = format!("{text}, {taken} % of the guest's time taken");
    }
    if let Some(downtime) = downtime {
        text = format!("{text}, would stand still for {downtime} ms");
    }
    text
}

/// Adds two connections to a target that lacks memory.
fn recover(
    args: &MigrateArgs,
    machine: &mut Client,
    connections: &mut Vec<Connection>,
) -> Result<(), Failure> {
    let Some(target) = &args.to else { return Err(Failure::usage("--to ADDRESS says where to")) };
    for _ in 0..2 {
        connections.push(connect(target, args.insecure_network)?);
    }
    let sockets: Vec<_> = connections.iter().map(|connection| connection.socket.as_fd()).collect();
    machine.ask_with(&Do::MigrateRecover {}, &sockets).map_err(failure)?;
    Ok(())
}

/// Reconnects after a cut.
fn again(args: &MigrateArgs, machine: &mut Client) -> Result<Connection, Failure> {
    let since = Instant::now();
    let Some(target) = &args.to else {
        return Err(Failure::usage("the link was cut: --attach --to ADDRESS connects again"));
    };
    loop {
        match connect(target, args.insecure_network) {
            Ok(connection) => {
                machine.ask_with(&Do::MigrateLink {}, &[connection.socket.as_fd()]).map_err(failure)?;
                return Ok(connection);
            }
            Err(failed) if since.elapsed() > PERSEVERANCE || signal::last().is_some() => {
                let message = format!(
                    "{}; the guest may run there or nowhere: `vellum migrate {} --attach --to …` asks again, \
                     `vellum ctl {} resume --force` takes it back",
                    failed.message, args.machine, args.machine
                );
                return Err(Failure { message, ..failed });
            }
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches as _;

    fn args(line: &str) -> MigrateArgs {
        let command = MigrateArgs::augment_args(clap::Command::new("migrate"));
        let words = format!("migrate web --to unix:x {line}");
        MigrateArgs::from_arg_matches(&command.get_matches_from(words.split_whitespace())).unwrap()
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_link_carries_is_told_what_helps() {
        let line = outlook(&args("--bandwidth 50m"), 78 << 20, 50 << 20, Some(1700));
        for part in [
            "after 3 passes: the guest writes 78 MiB/s, the link carries 50 MiB/s: it does not converge",
            "nothing ends it",
            "vellum ctl web migrate-set --bandwidth SIZE (now 50 MiB/s)",
            "migrate-set --downtime TIME (it would stand still for 1700 ms now)",
            "--throttle steps or --mode hybrid",
        ] {
            assert!(line.contains(part), "{part} is missing in {line}");
        }
        let ends = outlook(&args("--timeout 5m,then=force"), 78 << 20, 50 << 20, None);
        assert!(ends.contains("--timeout ends that after 300 s") && !ends.contains("--bandwidth"), "{ends}");
        assert!(outlook(&args(""), 10 << 20, 50 << 20, Some(1700)).ends_with("it converges"));
    }

    #[test]
    fn the_last_line_begins_with_the_verdict() {
        let left =
            Left { began: 0, saved: 649_000, sent: 656_000, passes: 4, bytes: 540 << 20, ..Left::default() };
        let text = moved(&args(""), 6_800, None, None, &left);
        assert_eq!(text, "MIGRATED  656 ms, still for 6.8 ms (limit 300), 4 passes, 540 MiB at 823 MiB/s\n");
        // The comparison is in the total, and no part of the rate.
        let left = Left { compared: 1_256_000, ..left };
        let text = moved(&args("--verify"), 606_800, Some(131_072), None, &left);
        let first = "MIGRATED  1256 ms, still for 606.8 ms (limit 300), 4 passes, 540 MiB at 823 MiB/s";
        assert_eq!(text.lines().next(), Some(first));
        assert!(text.contains("131072 pages, all alike, in 600 ms"), "{text}");
        let text = moved(&args("--verify"), 606_800, Some(131_072), None, &Left { compared: 0, ..left });
        assert!(text.ends_with("131072 pages, all alike\n"), "{text}");
        // What followed the guest is in the total and in the rate.
        let left = Left { sent: 18_000, saved: 17_000, served: 1_080_000, compared: 0, ..left };
        let text = moved(&args("--mode postcopy"), 15_800, None, Some(&Waited::default()), &left);
        let first = "MIGRATED  1080 ms, still for 15.8 ms (limit 300), 4 passes, 540 MiB at 500 MiB/s";
        assert_eq!(text.lines().next(), Some(first));
    }
}
