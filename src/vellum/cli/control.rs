//! `vellum ctl`, `vellum list` and `vellum exec`: running machines.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use guest_agent::{Argument, Event, Launch, Request};
use serde_json::Value;

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

/// Tell a running machine what to do
#[derive(Debug, Args)]
pub struct CtlArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
    #[command(subcommand)]
    what: Ctl,
}

/// What is common to `vellum pause`, `resume`, `status` and `stop`.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
}

impl MachineArgs {
    /// The same as an argument of `ctl`.
    pub(super) fn with(self, what: Ctl) -> CtlArgs {
        CtlArgs { machine: self.machine, what }
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum Ctl {
    /// Stop its vCPUs and devices
    Pause,
    /// Let them go on
    Resume {
        /// Also where the guest may run elsewhere, after a migration that was cut off: you know that it does not
        #[arg(long)]
        force: bool,
    },
    /// Print what it is and does, as JSON
    Status,
    /// End it
    Stop,
    /// Ask the guest to lend memory, as in 512m
    Balloon {
        /// How much
        #[arg(value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
        size: u64,
    },
    /// Give a migration up: the guest stays
    MigrateCancel,
    /// Change the limits of a migration that is under way
    MigrateSet {
        /// How long the guest may stand still, as in 300ms
        #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
        downtime: Option<Duration>,
        /// At most so much a second, as in 400m
        #[arg(long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
        bandwidth: Option<u64>,
    },
    /// Let it go on in another build of Vellum, in a new process, under the same name and with all that it has open; its memory is handed
    /// over and must have a descriptor (--memory SIZE,backing=memfd). Whoever started it notices nothing: its process waits for the new one
    Upgrade {
        /// The other build, as in ./vellum
        binary: PathBuf,
        /// How long the guest may stand still: a limit
        #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, default_value = "5s")]
        downtime: Duration,
    },
    /// Give its guest a non-maskable interrupt, by which a kernel with unknown_nmi_panic panics
    Nmi,
    /// Have its kernel obey a magic SysRq key, by a break of the serial line and that key, as in `sysrq t`: it works where user space hangs,
    /// on a kernel whose serial port is its console and is open
    Sysrq {
        /// The key: a letter or a digit, as in c for a crash
        #[arg(value_parser = key)]
        key: char,
    },
    /// Print what happens to it, a JSON line each, until it ends
    Events,
    /// Let its serial port's output go elsewhere: file=PATH, which is truncated, or null
    Serial {
        /// Where to
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

/// A place for output that this process can open for the machine.
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
    /// Opens it. What a file holds is lost when the machine takes it.
    fn open(&self) -> Result<Opened, Failure> {
        let path = match self {
            Self::File(path) => path,
            Self::Null => Path::new("/dev/null"),
        };
        Target::File(path.into()).open().map_err(|error| Failure::usage(format!("serial file={error}")))
    }
}

/// How long `list` waits for a machine.
const GLANCE: Duration = Duration::from_secs(2);

/// List the machines of this user that run
#[derive(Debug, Args)]
pub struct ListArgs {
    /// As JSON, a line each
    #[arg(long)]
    json: bool,
}

/// Run a command in a guest, by its agent: the exit status is the command's
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,
    /// Any request of the agent's instead, in JSON, as in {"do":"facts"}; what it answers is printed as it comes
    #[arg(long, value_name = "JSON", value_parser = request, conflicts_with = "command")]
    request: Option<Request>,
    /// With a terminal, which this one is to the command, and without a command to the shell of the guest's root: Ctrl-a x leaves it,
    /// Ctrl-a Ctrl-a is one Ctrl-a
    #[arg(short, long, conflicts_with = "request")]
    terminal: bool,
    /// Start the command without streams, and leave it: it runs on when this ends
    #[arg(short, long, conflicts_with_all = ["request", "terminal"])]
    detach: bool,
    /// The command and its arguments, run with this process's standard streams. It gets SIGHUP, and later SIGKILL, where this ends
    /// before it
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
        // Above.
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
        // Its end closes the connection: whoever waited for it here may use the name, the disks and the tap again.
        Do::Stop {} => while client.line().is_ok() {},
        _ => {}
    }
    Ok(Exit::PowerOff)
}

/// Prints what happens until the machine ends. A connection that is cut before is not its end.
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

/// Adds KVM's counters of the CR3 cache, or why they cannot be read.
fn count(status: &mut Value) {
    let Some(name) = status["cr3_cache"]["debugfs"].as_str() else { return };
    status["cr3_cache"]["counters"] = match counters::of_other(name, "cr3_cache_") {
        Ok(counters) => counters.into_iter().collect(),
        Err(error) => format!("debugfs cannot be read ({error})").into(),
    };
}

/// How many machines there are, and what they do: `3 machines: 2 running, 1 paused`.
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
    // All at once, so that several that do not answer take no longer than one.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = machines.iter().map(|(_, path)| scope.spawn(move || ask(path))).collect();
        asked.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
    });
    for ((name, path), status) in machines.into_iter().zip(answers) {
        match status {
            Ok(status) if args.json => {
                let mut status = status;
                status["name"] = name.into();
                print(format_args!("{status}\n"))?;
            }
            Ok(status) => {
                let status: Status = serde_json::from_value(status).map_err(Failure::host)?;
                lines.push([
                    name,
                    status.pid.to_string(),
                    status.state.to_string(),
                    status.vcpus.to_string(),
                    short_size(status.memory),
                    status.operation.map(|operation| operation.to_string()).unwrap_or_default(),
                ]);
            }
            // A machine whose guard was killed with it leaves its socket.
            Err(Error::Connect { source, .. }) if source.kind() == ErrorKind::ConnectionRefused => {
                let _ = Name::new(&path).map(|name| name.remove_stale());
            }
            // And one that ends takes it away.
            Err(Error::Connect { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(Error::Closed { .. }) => {}
            Err(Error::Silent { pid, .. }) if !args.json => {
                let pid = pid.map_or("?".into(), |pid| pid.to_string());
                lines.push([name, pid, "silent".into(), "?".into(), "?".into(), String::new()]);
            }
            Err(error) => say(&format!("{name}: {error}")),
        }
    }
    if !args.json && !lines.is_empty() {
        print(format_args!("{}\n", counted(lines.iter().map(|line| line[2].as_str()))))?;
        let head = ["NAME", "PID", "STATE", "VCPUS", "MEMORY", "UNDER WAY"].map(str::to_owned);
        for [name, pid, state, vcpus, memory, under_way] in std::iter::once(head).chain(lines) {
            let line = format!("{name:<20} {pid:>8} {state:<20} {vcpus:>5} {memory:>8}  {under_way}");
            print(format_args!("{}\n", line.trim_end()))?;
        }
    }
    Ok(Exit::PowerOff)
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

/// `vellum exec` of a command.
fn launch(vsock: &Path, args: ExecArgs) -> Result<Exit, Failure> {
    let terminal = if args.terminal { streams::own_terminal() } else { None };
    let has = match () {
        () if args.detach => Has::Nothing,
        () if args.terminal => Has::Terminal,
        () => Has::Streams,
    };
    if args.terminal && terminal.is_none() {
        return Err(Failure::usage(
            "--terminal: standard input or output is none; without --terminal a COMMAND needs none",
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
