//! `vellum dump`: the client of a dump. It creates the file and hands it to the machine, which
//! opens no path itself. When the dump is written and synced, the client names the file. If the
//! client is killed, the dump ends with its connection: no file is left, and the guest goes on.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use clap::Args;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

use super::client::{failure, heard, listen};
use super::failure::Failure;
use super::output::print;
use vellum_control::{Do, Event, names};
use vellum_kvm::memory::short_size;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::file;
use vellum_sys::guard::Naming;
use vellum_sys::signal;

/// Write a machine's memory into a core dump: for crash, makedumpfile, drgn and GDB
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DumpArgs {
    /// The machine: its name (--name), or the path of its control socket
    machine: String,

    /// The new file; zero pages are holes in it
    file: PathBuf,
}

const EXAMPLES: &str = "\
The guest stands still while it is written. A Linux kernel's VMCOREINFO goes into the dump once the guest's page tables have confirmed it.
Examples:
  vellum dump web web.core && crash vmlinux web.core
  makedumpfile --dump-dmesg web.core web.log         the kernel's log
  vellum run … --on-panic dump=panic.core            and when the guest panics";

/// An unnamed file that will get the name `path`. Only this user may read it.
fn unnamed(path: &Path) -> Result<File, Failure> {
    let refused = |why: String| Failure::usage(format!("{}: {why}", path.display()));
    if path.symlink_metadata().is_ok() {
        return Err(refused("it is there already: a dump is written over nothing".into()));
    }
    if path.file_name().is_none() {
        return Err(refused("the name of a file is expected".into()));
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    file::unnamed(directory).map_err(|error| refused(error.to_string()))
}

/// A file for the dump of a guest that panics, and what the guard of its process needs to name it.
pub(super) fn on_panic(path: &Path) -> Result<(File, EventFd, Naming), Failure> {
    let file = unnamed(path)?;
    let mut beside = path.file_name().unwrap_or_default().to_owned();
    beside.push(".new");
    let written = EventFd::new(EFD_CLOEXEC).map_err(Failure::host)?;
    let naming = Naming::new(&file, &written, &path.with_file_name(beside), path).map_err(Failure::host)?;
    Ok((file, written, naming))
}

/// Runs `vellum dump`.
pub fn run(args: &DumpArgs) -> Result<Exit, Failure> {
    let path = names::find(&args.machine).map_err(failure)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let file = unnamed(&args.file)?;
    let mut machine = listen(&path)?;
    machine.ask_with(&Do::Dump {}, &[file.as_fd()]).map_err(failure)?;
    let of = machine.last_id();
    let failed = |what: &str, error| Failure::host(format!("{}: {what}: {error}", args.file.display()));
    loop {
        if let Some(signal) = signal::take() {
            return Err(Failure::ended(Exit::Signal(signal), "the dump is given up"));
        }
        let Some(line) = heard(&mut machine, Some(of), "the dump was written")? else { continue };
        match serde_json::from_value::<Event>(line) {
            Ok(Event::Dumped { bytes, content, release, kaslr, phys_base }) => {
                file.sync_all().map_err(|error| failed("the disk", error))?;
                file::name(&file, &args.file).map_err(|error| failed("naming it", error))?;
                let kernel = match (release, kaslr, phys_base) {
                    (Some(release), Some(kaslr), Some(base)) => {
                        let sign = if base < 0 { "-" } else { "" };
                        let base = base.unsigned_abs();
                        format!("Linux {release}, KASLR {kaslr:#x}, phys_base {sign}{base:#x}")
                    }
                    _ => "without VMCOREINFO, which was not found in its memory".into(),
                };
                let [bytes, content] = [bytes, content].map(short_size);
                let path = args.file.display();
                print(format_args!("{path}: {bytes}, {content} without holes; {kernel}\n"))?;
                return Ok(Exit::PowerOff);
            }
            Ok(Event::NotDumped { why }) => {
                return Err(Failure::host(format!("no dump of {}: {why}", args.machine)));
            }
            _ => {}
        }
    }
}
