//! `vellum live-update restore`: asks the [`keeper`] to start machines. The hidden
//! `--child` is one of them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::super::failure::Failure;
use super::super::flags::Flags;
use super::super::host::{self, HostArgs};
use super::super::output::print;
use super::super::starting::{Starting, inherited};
use super::keeper::{self, Answer, Request};
use super::{SESSION, session};
use crate::session::incoming::{Listen, Preserved};
use crate::session::log::{self, Beside};
use vellum_control::ChildDevice;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_migration::commit_flag::CommitFlag;
use vellum_migration::link::LIVENESS;
use vellum_migration::loading::{self, Forked};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::diagnose::Field;
use vellum_sys::file::taken;

/// Run the machines that were saved before the kexec
#[derive(Debug, Args)]
#[command(args_override_self = true)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct RestoreArgs {
    /// The machine, by the name that it had [default: all that have not run yet]
    #[arg(value_name = "MACHINE")]
    machine: Option<String>,

    /// The name under which they were saved
    #[arg(long, value_name = "NAME", default_value = SESSION, value_parser = session)]
    session: String,

    /// What the guests' clocks do about the time since the save: advance, by the host's real time;
    /// stand-still, as if none had passed
    #[arg(long, value_name = "HOW", default_value = "advance", hide_possible_values = true)]
    clock: Clock,

    /// Let the machines wait for `vellum resume NAME`
    #[arg(long)]
    paused: bool,

    /// Accept disks that were written to since, have another size or are others; the guest does not
    /// expect what it finds on them
    #[arg(long)]
    disk_changed: bool,

    /// Do nothing if the last kernel has handed over no such session, as after any other boot
    #[arg(long)]
    if_any: bool,

    /// Print the command line of each machine's process, and restore none
    #[arg(long, conflicts_with = "give_up")]
    print: bool,

    /// Free the machine's memory: it will not run again
    #[arg(long, requires = "machine")]
    give_up: bool,

    /// Be one of the machines, from the file of this descriptor
    #[arg(long, value_name = "N", hide = true)]
    child: Option<RawFd>,

    /// Be the keeper, which tells on a descriptor that it listens
    #[arg(long, hide = true, requires = "child")]
    keeper: bool,

    #[command(flatten)]
    host: HostArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Clock {
    Advance,
    StandStill,
}

const EXAMPLES: &str = "\
Examples:
  vellum live-update restore                       all, with the devices they had
  vellum live-update restore --print               how each was started
  vellum live-update restore web --disk /new/web.img --net user
  vellum live-update restore web --give-up         free its memory
Each machine gets the name and the devices that it had. Flags replace what they
name; with a device among them, the command line has all of a machine's devices.
What cannot be restored yet is kept: restore it again with what was wrong changed.";

/// The flag of each field.
const FLAGS: Flags = &[host::FLAGS, &[(Field::DiskChanged, "--disk-changed accepts it:")]];

/// The contents of the file behind the hidden argument.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Inherited {
    pub point: Point,
    /// Pages, map, state and RAM.
    pub files: [RawFd; 4],
    /// The file of a [`CommitFlag`].
    pub flag: RawFd,
    /// The socket to the keeper, which waits for the machine to run.
    pub waits: RawFd,
    /// The file that standard error goes to.
    pub log: Option<PathBuf>,
    /// The devices that it had.
    pub devices: Vec<ChildDevice>,
    /// The time after which the machine ends.
    pub limit: Option<Duration>,
    /// Whether its memory is locked.
    pub lock: bool,
}

/// Runs the command: as the client, as the keeper, or as one of the machines.
pub fn run(args: RestoreArgs) -> Result<Exit, Failure> {
    match args.child {
        Some(list) if args.keeper => keeper::run(&args.session, list),
        Some(list) => be(args, list),
        None => restore(&args),
    }
}

/// Runs one of the machines.
fn be(args: RestoreArgs, list: RawFd) -> Result<Exit, Failure> {
    log::start(tracing::Level::INFO, Beside::Console);
    let Inherited { point, files, flag, waits, log, devices, limit, lock } = inherited(list)?;
    let own = |fd: RawFd| taken(fd).ok_or_else(|| Failure::usage(format!("descriptor {fd} is not open")));
    let [ram, map, state, base] = files;
    let [ram, map, state, base] = [own(ram)?, own(map)?, own(state)?, own(base)?].map(File::from);
    let forked = Forked { point, files: Files { ram, map, state, clones: Vec::new() }, base };
    let preserved = loading::Preserved { forked, flag: CommitFlag::new(own(flag)?).map_err(Failure::host)? };
    let meanwhile = match args.clock {
        Clock::Advance => ClockPolicy::Passes,
        Clock::StandStill => ClockPolicy::Stands,
    };
    let listen = Listen::Preserved(Preserved {
        preserved: Box::new(preserved),
        meanwhile,
        paused: args.paused,
        disk_changed: args.disk_changed,
    });
    let waits = Some(Arc::new(own(waits)?));
    let fork = host::Fork { waits, log, limit, outlives_client: true, ..host::Fork::default() };
    let devices = if args.host.device_names().is_empty() { devices } else { Vec::new() };
    let host = args.host.forked(fork).with_devices(devices, &[]).map_err(Failure::usage)?;
    host.run(listen, MemoryConfig { lock, ..MemoryConfig::new(0) }, LIVENESS, FLAGS)
}

/// Has the keeper restore the machines.
fn restore(args: &RestoreArgs) -> Result<Exit, Failure> {
    if args.machine.is_none() && (args.host.name.is_some() || !args.host.device_names().is_empty()) {
        let flag = if args.host.name.is_some() { "--name" } else { "devices" };
        return Err(Failure::usage(format!("{flag}: of which machine? vellum live-update restore MACHINE")));
    }
    let path = keeper::socket(&args.session)?;
    let stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(_) => {
            match start_keeper(&args.session) {
                Err(none) if none.exit == Exit::NotRun && args.if_any => return Ok(Exit::PowerOff),
                Err(none) if none.exit == Exit::NotRun => return Err(Failure { exit: Exit::Usage, ..none }),
                started => started?,
            }
            UnixStream::connect(&path)
                .map_err(|error| Failure::host(format!("{}: {error}", path.display())))?
        }
    };
    let machine = args.machine.clone();
    let request = match (args.print, args.give_up) {
        (true, _) => Request::List { machine },
        (false, true) => Request::GiveUp { machine: machine.unwrap_or_default() },
        (false, false) => Request::Restore { machine, words: words()? },
    };
    let mut line = serde_json::to_vec(&request).map_err(Failure::host)?;
    line.push(b'\n');
    (&stream).write_all(&line).map_err(Failure::host)?;
    let mut failed: Option<Failure> = None;
    for line in BufReader::new(&stream).lines() {
        let line = line.map_err(|error| Failure::host(format!("the keeper: {error}")))?;
        let answer = serde_json::from_str(&line).map_err(Failure::host)?;
        match answer {
            Answer::Runs { name, pid, us } => {
                let ms = us as f64 / 1000.0;
                print(format_args!("{name} runs, process {pid}, after {ms:.1} ms\n"))?;
            }
            Answer::Saved { name, line } => drop(print(format_args!("{name}: {line}\n"))?),
            Answer::GivenUp { name } => drop(print(format_args!("{name} was given up\n"))?),
            Answer::Failed { why, usage } => {
                let exit = if usage { Exit::Usage } else { Exit::Error };
                let before = failed.map_or(String::new(), |before| format!("{}; ", before.message));
                failed = Some(Failure::ended(exit, before + &why));
            }
            Answer::Over { kept, retrieved_us } => {
                return match failed {
                    None if args.print || args.give_up => Ok(Exit::PowerOff),
                    None => {
                        let ms = retrieved_us as f64 / 1000.0;
                        print(format_args!("all memory was retrieved in {ms:.1} ms\n"))?;
                        Ok(Exit::PowerOff)
                    }
                    Some(failed) if kept.is_empty() => Err(failed),
                    Some(failed) => {
                        let message = format!("{}; kept: {}", failed.message, kept.join(", "));
                        Err(Failure { message, ..failed })
                    }
                };
            }
        }
    }
    Err(Failure::host("the keeper has ended before it answered; what had not run is lost"))
}

/// The words of this command line after the subcommand.
fn words() -> Result<Vec<String>, Failure> {
    let words = std::env::args_os().skip(3).map(|word| {
        word.into_string().map_err(|word| Failure::usage(format!("{}: not UTF-8", word.display())))
    });
    words.collect()
}

/// Starts the keeper of a session, which outlives this process. Returns when it listens.
///
/// # Errors
/// [`Exit::NotRun`] if nothing was handed over.
fn start_keeper(session: &str) -> Result<(), Failure> {
    let words = ["live-update", "restore", "--session", session, "--keeper"];
    let inherit = |waits: RawFd, _| (waits, Vec::new());
    let outputs = [Stdio::null(), Stdio::piped()];
    let mut keeper = Starting::spawn("keeper", words.map(Into::into), inherit, outputs, None)?;
    if matches!((&keeper.waits).read(&mut [0]), Ok(1)) {
        return Ok(());
    }
    let mut why = String::new();
    if let Some(mut said) = keeper.child.stderr.take() {
        let _ = said.read_to_string(&mut why);
    }
    let ended = keeper.child.wait().map_err(Failure::host)?;
    let why = why.lines().last().map_or(format!("it ended by {ended}"), str::to_owned);
    let mut known = [Exit::Usage, Exit::NotRun].into_iter();
    let exit = known.find(|exit| ended.code() == Some(exit.code().into())).unwrap_or(Exit::Error);
    Err(Failure::ended(exit, why.trim_start_matches("vellum: ")))
}
