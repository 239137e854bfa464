//! The command line: one file for each subcommand, with arguments only and no work.
//!
//! [`main`] parses it and dispatches. Subcommands do not use this file. What they share is in
//! modules of their own ([`failure`], `output`, `args`, `flags`, `client`). Bad input ends with
//! exit status 2 and one line that names the flag, the value and what would work (`refusal.rs`).
//! Other failures end with status 1 and their chain of reasons.

pub mod args;
pub mod bench;
mod client;
mod completions;
pub mod control;
pub mod devices;
pub mod disk;
pub mod doctor;
pub mod dump;
mod failure;
mod flags;
pub mod fleet;
pub mod fork;
mod habits;
mod help;
mod host;
pub mod image;
mod judge;
mod judged;
pub mod kernel;
mod launch;
mod line;
pub mod live_update;
mod login;
pub mod migrate;
mod output;
pub mod receive;
mod refusal;
pub mod report;
pub mod restore;
mod result;
pub mod run;
mod run_flags;
pub mod snapshot;
mod ssh;
mod starting;
mod take_over;
mod test;
mod upgrade;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

pub use self::failure::Failure;
use self::line::{CommandLine, VERSION, word};
use self::output::{print, say};
pub use self::result::{Form, origin};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use vellum_kvm::vm::lifecycle::Exit;
use vellum_sandbox as sandbox;
use vellum_share::process;
use vellum_sys::keyvalue;
use vellum_sys::plant::{self, Mistake, POSSIBLE, VARIABLE};

/// A lightweight VMM for KVM, for people who work on guest memory
#[derive(Debug, Parser)]
#[command(name = "vellum", version = VERSION, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "Start with `vellum doctor`, then `vellum run`: it needs no kernel image.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Doctor(doctor::DoctorArgs),
    Run(Box<run::RunArgs>),
    Migrate(migrate::MigrateArgs),
    Receive(Box<receive::ReceiveArgs>),
    Snapshot(snapshot::SnapshotArgs),
    Restore(Box<restore::RestoreArgs>),
    Fork(Box<fork::ForkArgs>),
    LiveUpdate(live_update::LiveUpdateArgs),
    Bench(Box<bench::BenchArgs>),
    Fleet(fleet::FleetArgs),
    Disk(disk::DiskArgs),
    Dump(dump::DumpArgs),
    Ctl(control::CtlArgs),
    /// Pause a machine's vCPUs and devices: the same as ctl NAME pause
    Pause(control::MachineArgs),
    /// Resume a paused machine: the same as ctl NAME resume
    Resume(control::MachineArgs),
    /// Print a machine's status as JSON: the same as ctl NAME status
    Status(control::MachineArgs),
    /// End a machine: the same as ctl NAME stop
    Stop(control::MachineArgs),
    List(control::ListArgs),
    Exec(control::ExecArgs),
    Ssh(ssh::SshArgs),
    Report(report::ReportArgs),
    Judge(judge::JudgeArgs),
    Test(test::TestArgs),
    /// The server of a shared directory: started by `vellum run --share`
    #[command(name = process::WORD, hide = true)]
    ServeShare,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// The command line, for code that checks one without running it.
const LINE: CommandLine = CommandLine { definition: command, parse: |words| read_from(words).map(drop) };

/// The command line, for generators of pages and completions.
pub fn command() -> clap::Command {
    help::shaped(Cli::command())
}

/// Runs the program.
pub fn main() -> ExitCode {
    // This program is also PID 1 of a guest that runs a command.
    if guest_agent::init::is_agent() {
        return guest_agent::init::main();
    }
    vellum_sys::heap::keep_to_one();
    vellum_sys::signal::fail_beyond_limits();
    say_panics();
    if let Some(line) = habits::other_program() {
        say(&line);
        return ExitCode::from(Exit::Usage.code());
    }
    if let Err(failure) = plant() {
        say(&failure.message);
        return ExitCode::from(failure.exit.code());
    }
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let exits = judged::exits_as(&words);
    let command = match quick().map_or_else(read, Ok) {
        Ok(command) => command,
        Err(error) => {
            let refused = refusal::refuse(LINE, &error);
            let status =
                exits.status(&refused.map_or(Ok(Exit::PowerOff), |exit| Err(Failure::ended(exit, ""))));
            return ExitCode::from(status);
        }
    };
    let result = match command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Run(args) => run::run(*args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Receive(args) => receive::run(*args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Restore(args) => restore::run(*args),
        Command::Fork(args) => fork::run(*args),
        Command::LiveUpdate(args) => live_update::run(args),
        Command::Bench(args) => bench::run(*args),
        Command::Fleet(args) => fleet::run(LINE, &args),
        Command::Disk(args) => disk::run(&args),
        Command::Dump(args) => dump::run(&args),
        Command::Ctl(args) => control::ctl(args),
        Command::Pause(args) => control::ctl(args.with(control::Ctl::Pause)),
        Command::Resume(args) => control::ctl(args.with(control::Ctl::Resume { force: false })),
        Command::Status(args) => control::ctl(args.with(control::Ctl::Status)),
        Command::Stop(args) => control::ctl(args.with(control::Ctl::Stop)),
        Command::List(args) => control::list(&args),
        Command::Exec(args) => control::exec(args),
        Command::Ssh(args) => ssh::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Judge(args) => judge::run(&args),
        Command::Test(args) => test::run(args),
        Command::ServeShare => process::serve().map(|()| Exit::PowerOff).map_err(Failure::host),
        Command::Completions { shell } => print(completions::script(shell)).map(|_| Exit::PowerOff),
    };
    if let Err(failure) = &result {
        say(&failure.message);
    }
    let status = exits.status(&result);
    crate::session::supervisor::report(status);
    ExitCode::from(status)
}

/// Plants the mistake that the environment variable names, in builds that can plant one. The
/// command and test programs call it.
///
/// # Errors
/// No mistake has that name.
pub fn plant() -> Result<(), Failure> {
    let Some(name) = std::env::var_os(VARIABLE).filter(|_| POSSIBLE) else { return Ok(()) };
    let name = name.to_string_lossy();
    let mistake = keyvalue::one_of("mistake", &name, &Mistake::NAMES);
    plant::plant(mistake.map_err(|error| Failure::usage(format!("{VARIABLE}: {error}")))?);
    Ok(())
}

/// Makes a panic visible in any thread.
pub fn say_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Raw mode would outlive the process and garble the message.
        vellum_sys::terminal::restore();
        if !sandbox::is_in_force() {
            return default(panic);
        }
        // The default hook opens files for a backtrace, and seccomp would end the process.
        let thread = std::thread::current();
        let (name, text) = (thread.name().unwrap_or("?"), panic.payload_as_str().unwrap_or("no message"));
        let place = panic.location().map_or(String::new(), |place| format!(" at {place}"));
        // Standard error may be closed, and a hook must not panic.
        let _ = writeln!(
            std::io::stderr(),
            "vellum: thread {name} panicked{place}: {text}; --sandbox off shows where it came from"
        );
    }));
}

/// Parses a command that must start fast, building only its own arguments. `None` for other
/// commands, for help and for errors. [`read`] handles those.
fn quick() -> Option<Command> {
    let name = word(1)?;
    let command = match name.as_str() {
        "run" => run::RunArgs::augment_args(clap::Command::new("run")),
        "restore" => restore::RestoreArgs::augment_args(clap::Command::new("restore")),
        "fork" => fork::ForkArgs::augment_args(clap::Command::new("fork")),
        "test" => test::TestArgs::augment_args(clap::Command::new("test")),
        _ => return None,
    };
    let matches = clap::Command::new("vellum").subcommand(command).try_get_matches().ok()?;
    refusal::check(LINE, &matches).ok()?;
    Command::from_arg_matches(&matches).ok()
}

/// Parses the command with all commands built.
fn read() -> Result<Command, clap::Error> {
    read_from(habits::ours(std::env::args_os().collect(), command, Path::new(".")))
}

fn read_from(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Command, clap::Error> {
    let matches = self::command().try_get_matches_from(words)?;
    refusal::check(LINE, &matches)?;
    Ok(Cli::from_arg_matches(&matches)?.command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    /// `-v -1` is answered with what -v accepts, and not with an unexpected argument '-1'.
    #[test]
    fn a_negative_number_is_a_value_wherever_numbers_are() {
        for name in ["run", "bench", "test"] {
            let cli = command();
            let outer = cli.find_subcommand(name).expect("it is there");
            let deaf = |command: &clap::Command| !command.is_allow_negative_numbers_set();
            let mut leaves: Vec<_> =
                outer.get_subcommands().filter(|inner| inner.get_name() != "help").collect();
            if leaves.is_empty() {
                leaves.push(outer);
            }
            let deaf: Vec<_> =
                leaves.into_iter().filter(|leaf| deaf(leaf)).map(clap::Command::get_name).collect();
            assert!(deaf.is_empty(), "{name}: {deaf:?}");
        }
    }
}
