//! `vellum live-update restore`: asks the [`keeper`] to start machines. The hidden
//! `--child` is one of them.

use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::super::failure::Failure;
use super::super::flags::Flags;
use super::super::host::{self, HostArgs};
use super::super::output::print;
use super::super::starting::{Starting, inherited, this_program};
use super::keeper::{self, Answer, Request};
use super::note::Note;
use super::{SESSION, orchestrator, session};
use crate::session::incoming::{Listen, Preserved};
use crate::session::log::{self, Beside};
use vellum_control::ChildDevice;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_migration::commit_flag::CommitFlag;
use vellum_migration::link::LIVENESS;
use vellum_migration::live_update;
use vellum_migration::loading::{self, Forked};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::diagnose::Field;
use vellum_sys::file::taken;
use vellum_sys::liveupdate::DEVICE;
use vellum_sys::quote;

/// Run the machines that were saved before the kexec
#[derive(Debug, Args)]
#[command(args_override_self = true)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct RestoreArgs {
    /// The machines, by the names that they had [default: all that have not run yet]
    #[arg(value_name = "MACHINE")]
    machines: Vec<String>,

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

    /// Succeed if nothing was saved before this boot, as after any other. What was saved and is lost
    /// is an error
    #[arg(long)]
    if_any: bool,

    /// Print the command line of each machine's process, and restore none
    #[arg(long, conflicts_with = "give_up")]
    print: bool,

    /// Free the machines' memory: they will not run again
    #[arg(long, requires = "machines")]
    give_up: bool,

    /// Be one of the machines, from the file of this descriptor
    #[arg(long, value_name = "N", hide = true)]
    child: Option<RawFd>,

    /// Be the keeper, which tells on a descriptor that it listens
    #[arg(long, hide = true, requires = "child")]
    keeper: bool,

    /// The words with which the machine was started first, as a JSON array
    #[arg(long, value_name = "WORDS", hide = true, requires = "child")]
    started_as: Option<String>,

    #[command(flatten)]
    host: HostArgs,
}

/// The flag of the words with which a machine was started first.
pub(super) const STARTED_AS: &str = "--started-as=";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Clock {
    Advance,
    StandStill,
}

const EXAMPLES: &str = "\
Examples:
  vellum live-update restore                       all, with the devices they had
  vellum live-update restore --print               how each was started
  vellum live-update restore web db                these two
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
    /// The file of its result.
    pub result: Option<PathBuf>,
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
    let Inherited { point, files, flag, waits, log, devices, result, limit, lock } = inherited(list)?;
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
    // What this command line does not name, the machine has named, which may have dropped root.
    let has_devices = !args.host.device_names().is_empty();
    let fork = host::Fork {
        waits,
        log,
        limit,
        devices_as_user: !has_devices,
        result_as_user: !args.host.has_result(),
        outlives_client: true,
        ..host::Fork::default()
    };
    let devices = if has_devices { Vec::new() } else { devices };
    let host = args.host.forked(fork).or_result(result).with_devices(devices, &[]).map_err(Failure::usage)?;
    host.run(listen, MemoryConfig { lock, ..MemoryConfig::new(0) }, LIVENESS, FLAGS)
}

/// Has the keeper restore the machines.
fn restore(args: &RestoreArgs) -> Result<Exit, Failure> {
    if args.machines.len() != 1
        && let Some(flag) = args.host.of_one_machine()
    {
        return Err(Failure::usage(format!(
            "{flag}: of which machine? name one: vellum live-update restore MACHINE"
        )));
    }
    let path = keeper::socket(&args.session)?;
    let stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(_) => {
            let started = match Path::new(DEVICE).exists() {
                true => start_keeper(&args.session, None),
                false => orchestrator().map(drop),
            };
            match started {
                Err(none) if none.exit == Exit::NotRun => {
                    return nothing_came(args, Failure { exit: Exit::Usage, ..none });
                }
                Err(none) if none.lacking => return nothing_came(args, none),
                started => started?,
            }
            UnixStream::connect(&path)
                .map_err(|error| Failure::host(format!("{}: {error}", path.display())))?
        }
    };
    let machines = args.machines.clone();
    let request = match (args.print, args.give_up) {
        (true, _) => Request::List { machines },
        (false, true) => Request::GiveUp { machines },
        (false, false) => {
            let directory = std::env::current_dir().map_err(Failure::host)?;
            Request::Restore { machines, name: args.host.name.clone(), words: words()?, directory }
        }
    };
    let (answers, kept, retrieved_us) = keeper::ask(&stream, &request)?;
    let mut failed: Option<Failure> = None;
    for answer in answers {
        match answer {
            Answer::Runs { name, pid, us } => {
                let ms = us as f64 / 1000.0;
                print(format_args!("{name} runs, process {pid}, after {ms:.1} ms\n"))?;
            }
            Answer::Saved { name, line } => drop(print(format_args!("{name}: {}\n", quote::line(&line)))?),
            Answer::GivenUp { name } => drop(print(format_args!("{name} was given up\n"))?),
            Answer::Failed { why, usage } => {
                let exit = if usage { Exit::Usage } else { Exit::Error };
                let before = failed.map_or(String::new(), |before| format!("{}; ", before.message));
                failed = Some(Failure::ended(exit, before + &why));
            }
            Answer::Over { .. } => {}
        }
    }
    match failed {
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
    }
}

/// This kernel has no such session. That is an error if one was saved.
fn nothing_came(args: &RestoreArgs, none: Failure) -> Result<Exit, Failure> {
    let Some(note) = Note::read(&args.session).filter(Note::is_of_another_boot) else {
        return if args.if_any { Ok(Exit::PowerOff) } else { Err(none) };
    };
    let machines = note.machines.join(", ");
    if note.format != live_update::VERSION {
        return Err(Failure::host(format!(
            "Vellum {} has saved {machines} in format {}, and this one reads {}: restore them with that one",
            note.vellum,
            note.format,
            live_update::VERSION
        )));
    }
    // It is told once.
    Note::remove(&args.session);
    Err(Failure::host(format!(
        "lost: {machines}: they were saved before this boot, and the last kernel has not handed them over: {}",
        none.message
    )))
}

/// The words of this command line after the subcommand.
fn words() -> Result<Vec<String>, Failure> {
    let words = std::env::args_os().skip(3).map(|word| {
        word.into_string().map_err(|word| Failure::usage(format!("{}: not UTF-8", word.display())))
    });
    words.collect()
}

/// Starts the keeper of a session, which outlives this process. It keeps what was saved in this
/// kernel, or retrieves what the last one has handed over. Returns when it listens.
///
/// # Errors
/// [`Exit::NotRun`] if nothing was handed over.
pub(super) fn start_keeper(session: &str, saved: Option<keeper::InKernel>) -> Result<(), Failure> {
    let words = ["live-update", "restore", "--session", session, "--keeper"];
    let descriptors = saved.iter().flat_map(|saved| saved.memory.iter().flatten().chain([&saved.record]));
    let descriptors = descriptors.copied().collect();
    let inherit = |waits: RawFd, _| (keeper::Inherited { waits, saved }, descriptors);
    let command = this_program(words.map(Into::into), [Stdio::null(), Stdio::piped()])?;
    Starting::spawn("the keeper", command, inherit, None)?.ready()
}
