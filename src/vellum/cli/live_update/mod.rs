//! `vellum live-update`: machines outlive a kexec of their host. `save` has the kernel preserve their
//! memory, and is the process that keeps it so until the kexec. `restore` runs them in the next
//! kernel. A *keeper* holds what was handed over until each machine has run or is given up.

mod checks;
mod host_side;
mod keeper;
mod note;
mod restore;
mod save;
mod status;

use std::path::Path;

use clap::{Args, Subcommand};

use super::failure::Failure;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::liveupdate::{MAX_NAME, Orchestrator};

/// Keep machines across a kexec of their host: a live update of its kernel
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct LiveUpdateArgs {
    #[command(subcommand)]
    command: LiveUpdate,
}

#[derive(Debug, Subcommand)]
enum LiveUpdate {
    Save(save::SaveArgs),
    Restore(Box<restore::RestoreArgs>),
    Status(status::StatusArgs),
}

const EXAMPLES: &str = "\
Examples:
  vellum live-update status                       can this kernel do it?
  kexec --kexec-file-syscall --load vmlinuz --initrd initrd.img --reuse-cmdline
  vellum live-update save --all --detach          memory and state stay in the kernel
  kexec --exec                                    the next kernel
  vellum live-update restore                      all machines run again
Both kernels are started with kho=on liveupdate=on. Memory must be a memfd:
vellum run --memory SIZE,backing=memfd.";

/// The session's name, unless another is given.
const SESSION: &str = "vellum";

/// Runs `vellum live-update`.
pub fn run(args: LiveUpdateArgs) -> Result<Exit, Failure> {
    match args.command {
        LiveUpdate::Save(args) => save::run(&args),
        LiveUpdate::Restore(args) => restore::run(*args),
        LiveUpdate::Status(args) => status::run(&args),
    }
}

/// The command that restores what was saved under this name.
fn restore_of(session: &str) -> String {
    match session {
        SESSION => "vellum live-update restore".into(),
        other => format!("vellum live-update restore --session {other}"),
    }
}

/// Parses a session's name. It is part of a file's name too.
fn session(text: &str) -> Result<String, String> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    // The kernel's name of it is a little longer.
    const MAX: usize = MAX_NAME - 8;
    match !text.is_empty() && text.len() <= MAX && text.bytes().all(sound) {
        true => Ok(text.into()),
        false => Err(format!("1 to {MAX} letters, digits, - and _ are a session's name")),
    }
}

/// Reads a kernel image or an initial RAM disk.
fn read_image(path: &Path) -> Result<Vec<u8>, String> {
    let about = std::fs::metadata(path).map_err(|error| error.to_string())?;
    match about.is_file() {
        true => std::fs::read(path).map_err(|error| error.to_string()),
        false => Err("not a file".into()),
    }
}

/// Opens the orchestrator.
///
/// # Errors
/// It is not there, with what would help, or another process has it open.
fn orchestrator() -> Result<Orchestrator, Failure> {
    Orchestrator::open().map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Failure::host("another process has /dev/liveupdate open, and one at a time can"),
        Some(libc::ENOENT) => {
            let check = vellum_host::live_update::examine();
            let remedy = check.remedy.map_or(String::new(), |remedy| format!("; {remedy}"));
            let why = format!(
                "this host cannot keep machines across a kexec: {}{remedy}",
                check.found.trim_start_matches("no: ")
            );
            Failure { lacking: true, ..Failure::host(why) }
        }
        Some(libc::EACCES) => Failure::usage("/dev/liveupdate: permission denied; run it as root"),
        _ => Failure::host(format!("/dev/liveupdate: {error}")),
    })
}
