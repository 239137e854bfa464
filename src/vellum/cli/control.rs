//! `vellum ctl`, `vellum list` and `vellum exec`: clients of running machines.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use guest_agent::{Argument, Event, Launch, Request};
use serde_json::{Value, json};

use super::client::failure;
use super::failure::Failure;
use super::output::{print, say};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, Status, agent, names};
use vellum_devices::console::{Opened, Target};
use vellum_kvm::memory::short_size;
use vellum_kvm::vm::counters;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_launch::streams::{self, Ended, Has, Outcome, Streams};
use vellum_sys::keyvalue;
use vellum_sys::socket::Name;

/// Control a running machine
#[derive(Debug, Args)]
pub struct CtlArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
    #[command(subcommand)]
    what: Ctl,
}

/// The argument of `vellum pause`, `resume`, `status` and `stop`.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
}

impl MachineArgs {
    /// The same arguments for `ctl`.
    pub(super) fn with(self, what: Ctl) -> CtlArgs {
        CtlArgs { machine: self.machine, what }
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum Ctl {
    /// Pause its vCPUs and devices
    Pause,
    /// Resume its vCPUs and devices
    Resume {
        /// Resume it even if the guest may run elsewhere, after a migration that was cut off: you
        /// assert that the target does not run it
        #[arg(long)]
        force: bool,
    },
    /// Print its status as JSON
    Status,
    /// End it
    Stop,
    /// Ask the guest to give memory back, as in 512m
    Balloon {
        /// How much memory
        #[arg(value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
        size: u64,
    },
    /// Cancel a migration; the guest stays here
    MigrateCancel,
    /// Change the limits of a running migration
    MigrateSet {
        /// The longest downtime, as in 300ms
        #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
        downtime: Option<Duration>,
        /// The highest bandwidth in bytes per second, as in 400m
        #[arg(long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
        bandwidth: Option<u64>,
    },
    /// Continue it in another build of Vellum, in a new process. Its name and open files stay. Its
    /// memory is handed over and must have a descriptor (--memory SIZE,backing=memfd). The old
    /// process waits for the new one and exits with its status
    Upgrade {
        /// The other build, as in ./vellum
        binary: PathBuf,
        /// The longest downtime
        #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, default_value = "5s")]
        downtime: Duration,
    },
    /// Send a non-maskable interrupt; a kernel with unknown_nmi_panic panics
    Nmi,
    /// Send a magic SysRq key by a break on the serial line, as in `sysrq t`. It works if user
    /// space hangs. The kernel's serial port must be its console and open
    Sysrq {
        /// The key: a letter or a digit, as in c for a crash
        #[arg(value_parser = key)]
        key: char,
    },
    /// Print its events, a JSON line each, until it ends
    Events,
    /// Redirect the output of its serial port: file=PATH, which is truncated, or null
    Serial {
        /// The new target
        to: Elsewhere,
    },
}

fn key(text: &str) -> Result<char, &'static str> {
    let mut chars = text.chars();
    let key = chars.next().filter(|key| key.is_ascii_alphanumeric() && chars.next().is_none());
    key.ok_or(
        "a letter or a digit is expected, as in t for all tasks, c for a crash; h has the kernel list them",
    )
}

/// A target for output that this process opens for the machine.
#[derive(Clone, Debug)]
pub(super) enum Elsewhere {
    File(PathBuf),
    Null,
}

impl FromStr for Elsewhere {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            None if text == "null" => Ok(Self::Null),
            _ => Err("use file=PATH or null".into()),
        }
    }
}

impl Elsewhere {
    /// Opens the target. A file is truncated when the machine takes it over.
    fn open(&self) -> Result<Opened, Failure> {
        let path = match self {
            Self::File(path) => path,
            Self::Null => Path::new("/dev/null"),
        };
        Target::File(path.into()).open().map_err(|error| Failure::usage(format!("serial file={error}")))
    }
}

/// How long `list` waits for each machine.
const GLANCE: Duration = Duration::from_secs(2);

/// List the running machines of this user
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print JSON, a line each
    #[arg(long)]
    json: bool,
    /// Print what of each machine's memory is there: SHARED, which other processes map too, such as
    /// the pages that it has in common with its forks; PRIVATE, which it alone has; and PART, the
    /// private pages and of each shared one the part that falls to it. All mappings of its process
    /// count: the guest's memory, and some MiB of Vellum's own
    #[arg(long)]
    memory: bool,
}

/// Run a command in a guest through its agent; the exit status is the command's
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
    /// Send this request to the agent instead, in JSON, as in {"do":"facts"}; its answers are
    /// printed as they come
    #[arg(long, value_name = "JSON", value_parser = request, conflicts_with = "command")]
    request: Option<Request>,
    /// Give the command this terminal. Without a command, root's shell in the guest runs on it.
    /// Ctrl-a x leaves, Ctrl-a Ctrl-a sends a Ctrl-a
    #[arg(short, long, conflicts_with = "request")]
    terminal: bool,
    /// Start the command without streams and return; it runs on
    #[arg(short, long, conflicts_with_all = ["request", "terminal"])]
    detach: bool,
    /// The command and its arguments. It has this process's standard streams. If this process ends
    /// first, the command gets SIGHUP and later SIGKILL
    #[arg(last = true, required_unless_present_any = ["request", "terminal"])]
    command: Vec<OsString>,
}

fn request(text: &str) -> Result<Request, String> {
    serde_json::from_str(text).map_err(|error| format!("{error}; guest-agent/src/lib.rs lists the requests"))
}

fn connect(machine: &str) -> Result<Client, Failure> {
    Client::connect(&names::find(machine).map_err(failure)?).map_err(failure)
}

/// `vellum ctl`
pub fn ctl(args: CtlArgs) -> Result<Exit, Failure> {
    if let Ctl::Upgrade { binary, downtime } = &args.what {
        return super::upgrade::run(&args.machine, binary, *downtime);
    }
    let mut client = connect(&args.machine)?;
    let mut outputs = Vec::new();
    let what = match args.what {
        // Handled above.
        Ctl::Upgrade { .. } => return Ok(Exit::PowerOff),
        Ctl::Pause => Do::Pause {},
        Ctl::Resume { force } => Do::Resume { force },
        Ctl::Status => Do::Status {},
        Ctl::Stop => Do::Stop {},
        Ctl::Balloon { size } => Do::Balloon { bytes: size },
        Ctl::MigrateCancel => Do::MigrateCancel { of: None },
        Ctl::MigrateSet { downtime, bandwidth } => {
            Do::MigrateSet { downtime_ms: downtime.map(|time| time.as_millis() as u64), bandwidth }
        }
        Ctl::Nmi => Do::Nmi {},
        Ctl::Sysrq { key } => Do::Sysrq { key },
        Ctl::Events => Do::Events {},
        Ctl::Serial { to } => {
            outputs.push(to.open()?);
            Do::Serial { truncate: true }
        }
    };
    let descriptors: Vec<_> = outputs.iter().flat_map(|opened| &opened.output).map(File::as_fd).collect();
    let mut answer = client.ask_with(&what, &descriptors).map_err(failure)?;
    if what == (Do::Status {}) {
        count(&mut answer);
    }
    outputs.iter().for_each(Opened::hand_over);
    if let (Do::Pause {}, Some(took)) = (&what, answer["us"].as_u64()) {
        print(format_args!("paused after {took} µs\n"))?;
    } else if answer.as_object().is_some_and(|fields| !fields.is_empty()) {
        print(format_args!("{answer}\n"))?;
    }
    client.wait_for_ever();
    match what {
        Do::Events {} => return events(&mut client),
        // The machine closes the connection when it ends. Callers that wait for that may use its
        // name, disks and tap again.
        Do::Stop {} => while client.line().is_ok() {},
        _ => {}
    }
    Ok(Exit::PowerOff)
}

/// Prints events until the machine ends. A connection that closes before the last event is an
/// error.
fn events(machine: &mut Client) -> Result<Exit, Failure> {
    let mut ended = false;
    loop {
        let event = match machine.line() {
            Ok(event) => event,
            Err(Error::Closed { .. }) if ended => return Ok(Exit::PowerOff),
            Err(Error::Closed { .. }) => {
                let why = "the machine has closed the connection before it said how it ended: what happened since is not told";
                return Err(Failure::host(why));
            }
            Err(error) => return Err(failure(error)),
        };
        ended |= event["event"] == "ended";
        if !print(format_args!("{event}\n"))? {
            return Ok(Exit::PowerOff);
        }
    }
}

/// Adds KVM's counters of the CR3 cache, or the reason that they cannot be read.
fn count(status: &mut Value) {
    let Some(name) = status["cr3_cache"]["debugfs"].as_str() else { return };
    status["cr3_cache"]["counters"] = match counters::of_other(name, "cr3_cache_") {
        Ok(counters) => counters.into_iter().collect(),
        Err(error) => format!("debugfs cannot be read ({error})").into(),
    };
}

/// The number of machines by state, as in `3 machines: 2 running, 1 paused`.
fn counted<'a>(states: impl Iterator<Item = &'a str>) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for state in states {
        match counts.iter_mut().find(|(known, _)| *known == state) {
            Some((_, count)) => *count += 1,
            None => counts.push((state, 1)),
        }
    }
    let all = counts.iter().map(|(_, count)| count).sum::<usize>();
    let each: Vec<_> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("{all} {}: {}", if all == 1 { "machine" } else { "machines" }, each.join(", "))
}

/// `vellum list`
pub fn list(args: &ListArgs) -> Result<Exit, Failure> {
    let mut lines = Vec::new();
    let machines = names::all().map_err(failure)?;
    let ask = |path: &Path| Client::connect_within(path, GLANCE)?.ask(&Do::Status {});
    // All are asked at once, so that several silent machines take no longer than one.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = machines.iter().map(|(_, path)| scope.spawn(move || ask(path))).collect();
        asked.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
    });
    for ((name, path), status) in machines.into_iter().zip(answers) {
        match status {
            Ok(status) if args.json => {
                let mut status = status;
                status["name"] = name.into();
                if let Some(pages) = status["pid"].as_u64().filter(|_| args.memory).and_then(Resident::of) {
                    let Resident { shared, private, part, .. } = pages;
                    status["resident"] = json!({ "shared": shared, "private": private, "part": part });
                }
                print(format_args!("{status}\n"))?;
            }
            Ok(status) => {
                let status: Status = serde_json::from_value(status).map_err(Failure::host)?;
                let pages = if args.memory { Resident::columns(status.pid) } else { Vec::new() };
                lines.push(Line {
                    name,
                    pid: status.pid.to_string(),
                    from: status.forked_from.map(|pid| pid.to_string()),
                    state: status.state.to_string(),
                    vcpus: status.vcpus.to_string(),
                    memory: short_size(status.memory),
                    pages,
                    under_way: status.operation.map(|operation| operation.to_string()).unwrap_or_default(),
                });
            }
            // A machine leaves its socket behind if its guard was killed too.
            Err(Error::Connect { source, .. }) if source.kind() == ErrorKind::ConnectionRefused => {
                let _ = Name::new(&path).map(|name| name.remove_stale());
            }
            // The machine ended in between and removed its socket.
            Err(Error::Connect { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(Error::Closed { .. }) => {}
            Err(Error::Silent { pid, .. }) if !args.json => {
                let pid = pid.map_or("?".into(), |pid| pid.to_string());
                let unknown = || "?".to_owned();
                lines.push(Line {
                    name,
                    pid,
                    from: None,
                    state: "silent".into(),
                    vcpus: unknown(),
                    memory: unknown(),
                    pages: if args.memory { vec![unknown(); 3] } else { Vec::new() },
                    under_way: String::new(),
                });
            }
            Err(error) => say(&format!("{name}: {error}")),
        }
    }
    if !args.json && !lines.is_empty() {
        print(format_args!("{}\n", counted(lines.iter().map(|line| line.state.as_str()))))?;
        let pages =
            if args.memory { vec!["SHARED".into(), "PRIVATE".into(), "PART".into()] } else { Vec::new() };
        let [name, pid, state, vcpus, memory, under_way] =
            ["NAME", "PID", "STATE", "VCPUS", "MEMORY", "UNDER WAY"].map(str::to_owned);
        let head = Line { name, pid, from: None, state, vcpus, memory, pages, under_way };
        for Line { name, pid, state, vcpus, memory, pages, under_way, .. } in
            std::iter::once(head).chain(tree(lines))
        {
            let pages: String = pages.iter().map(|figure| format!(" {figure:>9}")).collect();
            let line = format!("{name:<20} {pid:>8} {state:<20} {vcpus:>5} {memory:>8}{pages}  {under_way}");
            print(format_args!("{}\n", line.trim_end()))?;
        }
    }
    Ok(Exit::PowerOff)
}

/// A line of `vellum list`.
struct Line {
    name: String,
    pid: String,
    /// The process of the machine that this one was forked from.
    from: Option<String>,
    state: String,
    vcpus: String,
    memory: String,
    /// The figures of [`Resident`], if they are asked for.
    pages: Vec<String>,
    under_way: String,
}

/// Puts each machine below the one that it was forked from, if that still runs, and indents its name.
fn tree(lines: Vec<Line>) -> Vec<Line> {
    let runs: Vec<String> = lines.iter().map(|line| line.pid.clone()).collect();
    let is_below =
        |line: &Line| line.from.as_ref().is_some_and(|from| *from != line.pid && runs.contains(from));
    let (mut below, roots): (Vec<Line>, Vec<Line>) = lines.into_iter().partition(is_below);
    let mut ordered = Vec::new();
    // Those that come next are at the end.
    let mut next: Vec<(usize, Line)> = roots.into_iter().rev().map(|line| (0, line)).collect();
    while let Some((depth, mut line)) = next.pop() {
        let of_it = |other: &Line| other.from.as_ref() == Some(&line.pid);
        let (children, others): (Vec<Line>, Vec<Line>) = below.into_iter().partition(of_it);
        below = others;
        next.extend(children.into_iter().rev().map(|child| (depth + 1, child)));
        line.name.insert_str(0, &"  ".repeat(depth));
        ordered.push(line);
    }
    // Process numbers are used again. So those that are each other's children are possible.
    ordered.extend(below);
    ordered
}

/// The pages of a process that are in memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resident {
    shared: u64,
    pub private: u64,
    part: u64,
    pub swapped: u64,
}

impl Resident {
    /// Of process `pid`. `None` if it is gone, or another user's.
    pub fn of(pid: u64) -> Option<Self> {
        Some(Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?))
    }

    /// Sums the fields of a smaps_rollup (Documentation/filesystems/proc.rst).
    fn parse(text: &str) -> Self {
        let kib = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
        };
        let [shared_huge, private_huge] = ["Shared_Hugetlb", "Private_Hugetlb"].map(kib);
        Self {
            shared: kib("Shared_Clean") + kib("Shared_Dirty") + shared_huge,
            private: kib("Private_Clean") + kib("Private_Dirty") + private_huge,
            // The kernel counts no huge pages of the pool in it, and does not tell how many processes
            // share them.
            part: kib("Pss") + private_huge,
            swapped: kib("Swap"),
        }
    }

    /// The columns of process `pid`.
    fn columns(pid: u32) -> Vec<String> {
        let mib = |bytes: u64| format!("{:.1}m", bytes as f64 / f64::from(1 << 20));
        match Self::of(pid.into()) {
            Some(Self { shared, private, part, .. }) => [shared, private, part].map(mib).to_vec(),
            None => vec!["?".to_owned(); 3],
        }
    }
}

/// `vellum exec`
pub fn exec(args: ExecArgs) -> Result<Exit, Failure> {
    let status = connect(&args.machine)?.ask(&Do::Status {}).map_err(failure)?;
    guest_agent::check_arguments(&args.command)
        .map_err(|why| Failure::usage(format!("-- COMMAND: {why}")))?;
    let path = status["vsock"].as_str();
    let path = path.ok_or_else(|| Failure::usage("this machine has no vsock: start it with --vsock PATH"))?;
    match args.request {
        Some(request) => ask(path.as_ref(), &request),
        None => launch(path.as_ref(), args),
    }
}

/// `vellum exec --request`
fn ask(vsock: &Path, request: &Request) -> Result<Exit, Failure> {
    let failed = |error: agent::Error| match error {
        agent::Error::Refused(message) => Failure::ended(Exit::AgentCommand, message),
        other => failure(other),
    };
    let mut exit = Exit::PowerOff;
    for event in agent::ask(vsock, request, agent::ANSWER_TIMEOUT).map_err(failed)? {
        let event = event.map_err(failed)?;
        let line = serde_json::to_string(&event).map_err(Failure::host)?;
        let wanted = print(format_args!("{line}\n"))?;
        if let Event::Exit { code } = event {
            exit = Exit::Guest(code.clamp(0, 255) as u8);
        }
        if !wanted {
            break;
        }
    }
    Ok(exit)
}

/// Runs the command of `vellum exec`.
fn launch(vsock: &Path, args: ExecArgs) -> Result<Exit, Failure> {
    let terminal = if args.terminal { streams::own_terminal() } else { None };
    let has = match () {
        () if args.detach => Has::Nothing,
        () if args.terminal => Has::Terminal,
        () => Has::Streams,
    };
    if args.terminal && terminal.is_none() {
        return Err(Failure::usage(
            "--terminal: standard input or output is not a terminal; leave --terminal out, and a COMMAND needs none",
        ));
    }
    let command = args.command.into_iter().map(Argument::from).collect();
    let request = Request::Launch(Launch { command, terminal, detached: args.detach, ..Launch::default() });
    let request = serde_json::to_string(&request).map_err(Failure::host)?;
    let host = |error: std::io::Error| Failure::host(format!("the guest's connection: {error}"));
    let streams = Streams::new(has).map_err(host)?;
    let stream = agent::connect(vsock, agent::ANSWER_TIMEOUT).map_err(failure)?;
    let Outcome { ended, unwritten } = streams.converse(stream, &request).map_err(host)?;
    match (ended, unwritten) {
        (Some(Ended::Command { .. }), Some(why)) => Err(Failure::host(why)),
        (Some(Ended::Command { status }), None) => Ok(Exit::Guest(status)),
        (Some(Ended::NotStarted { reason }), _) => Err(Failure::ended(Exit::AgentCommand, reason)),
        (Some(Ended::Machine { .. }) | None, _) => Err(failure(agent::Error::Closed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_stands_below_the_machine_that_it_came_from() {
        let line = |name: &str, pid: &str, from: Option<&str>| Line {
            name: name.into(),
            pid: pid.into(),
            from: from.map(str::to_owned),
            state: String::new(),
            vcpus: String::new(),
            memory: String::new(),
            pages: Vec::new(),
            under_way: String::new(),
        };
        let lines = vec![
            line("a", "3", Some("2")),
            line("b", "2", Some("1")),
            line("c", "1", None),
            line("d", "4", Some("1")),
            line("e", "5", Some("99")),
            line("f", "6", Some("7")),
            line("g", "7", Some("6")),
        ];
        let names: Vec<String> = tree(lines).into_iter().map(|line| line.name).collect();
        assert_eq!(names, ["c", "  b", "    a", "  d", "e", "f", "g"]);
    }

    #[test]
    fn what_is_in_memory_is_the_sum_of_the_kernels_figures() {
        let text = "55e0-7ffd ---p 00000000 00:00 0    [rollup]\nRss:   100 kB\nPss:    30 kB\nPss_Dirty:  1 kB\n\
            Shared_Clean:  8 kB\nShared_Dirty:  4 kB\nPrivate_Clean:  2 kB\nPrivate_Dirty:  1 kB\n\
            Shared_Hugetlb:  2048 kB\nPrivate_Hugetlb:  4096 kB\nSwap:  5 kB\nSwapPss:  2 kB\n";
        let expected =
            Resident { shared: 2060 << 10, private: 4099 << 10, part: 4126 << 10, swapped: 5 << 10 };
        assert_eq!(Resident::parse(text), expected);
    }
}
