//! A Linux guest with a debugger: Debian's GDB on its vCPUs, with its kernel's symbols.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::hosts::breakpoints;
use support::{Failed, Need, Scratch, ensure, test};

use crate::VELLUM;
use crate::guest::{Guest, Image, scratch};
use crate::whole_matrix;

/// Requires the oldest guest's symbols, and a GDB.
fn gdb() -> Need {
    whole_matrix()?;
    support::tools::program("gdb")?;
    Image::oldest()?.symbols().map(drop)
}

/// Commands for GDB, each with the expected output.
type Script<'a> = &'a [(&'a str, &'a str)];

/// Stops at the first instruction, and detaches.
const AWAY: Script<'_> = &[("info threads", "(vCPU 1)"), ("detach", "detached")];

/// Wherever the guest is when it is interrupted.
const THERE: Script<'_> = &[
    ("info threads", "(vCPU 1)"),
    ("backtrace", "#1  0xffffffff"),
    ("set $before = $rip", ""),
    ("stepi", ""),
    ("printf \"stepped %d\\n\", $rip != $before", "stepped 1"),
    ("info registers cr3 gs_base", "gs_base"),
    ("printf \"%s\", (char *)&linux_banner", "Linux version"),
    ("detach", "detached"),
];

/// A software breakpoint in a system call of user space.
const IN_CODE: Script<'_> = &[
    ("break do_sys_openat2", "Breakpoint 1 at"),
    ("continue", "in do_sys_openat2 ()"),
    ("backtrace", "in do_syscall_64 ()"),
    ("delete", ""),
    ("detach", "detached"),
];

/// A hardware breakpoint before the kernel's own tables map anything, and a watchpoint.
const IN_THE_PROCESSOR: Script<'_> = &[
    ("hbreak start_kernel", "Hardware assisted breakpoint 1"),
    ("continue", "Breakpoint 1, 0x"),
    ("backtrace", "#0  0x"),
    ("delete", ""),
    ("watch *(unsigned long *)&jiffies_64", "Hardware watchpoint 2"),
    ("continue", "New value = "),
    ("printf \"counted %d\\n\", *(unsigned long *)&jiffies_64 != 0", "counted 1"),
    ("delete", ""),
    ("detach", "detached"),
];

/// Runs `script` in GDB on `socket`.
fn debug(image: &Image, socket: &Path, script: Script<'_>) -> Result<(), Failed> {
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-ex", "set pagination off", "-ex", "set confirm off"]);
    gdb.args(["-ex", &format!("target remote {}", socket.display())]);
    // The command is printed before its output.
    for (line, _) in script {
        gdb.args(["-ex", &format!("echo >>> {line}\\n"), "-ex", line]);
    }
    let output = gdb.arg(image.symbols()?).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    let mut answers = said.split(">>> ").skip(1);
    for (line, wanted) in script {
        let answer = answers.next().unwrap_or_default();
        ensure(answer.contains(wanted), || format!("{line:?}: no {wanted:?} in:\n{said}\n{complaints}"))?;
    }
    Ok(())
}

/// A guest that waits for its debugger, and the path of the socket.
fn waiting(image: &Image, scratch: &Scratch) -> Result<(Guest, PathBuf), Failed> {
    let socket = scratch.path("gdb");
    let guest = Guest::start(image, "", &["--cpus", "2", "--gdb", &format!("{},wait", socket.display())])?;
    guest.status_when(|status| status["state"] == "debugged")?;
    Ok((guest, socket))
}

#[test(gdb(), breakpoints())]
fn gdb_breaks_and_watches() -> Result<(), Failed> {
    let (image, scratch) = (Image::oldest()?, scratch()?);
    let (mut guest, socket) = waiting(&image, &scratch)?;
    debug(&image, &socket, IN_THE_PROCESSOR)?;
    guest.ready()?;
    // A process in the guest opens files until the end.
    let mut busy = Command::new(VELLUM);
    busy.args(["exec", guest.name(), "--", "sh", "-c", "while cat /proc/uptime; do :; done"]);
    let mut busy = busy.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let debugged = debug(&image, &socket, IN_CODE);
    busy.kill()?;
    busy.wait()?;
    debugged?;
    guest.status_when(|status| status["state"] == "running")?;
    ensure(guest.power_off()?.code == Some(0), || "its end".into())
}

#[test(gdb())]
fn gdb_looks_steps_unwinds_and_detaches() -> Result<(), Failed> {
    let (image, scratch) = (Image::oldest()?, scratch()?);
    let (mut guest, socket) = waiting(&image, &scratch)?;
    debug(&image, &socket, AWAY)?;
    guest.ready()?;
    debug(&image, &socket, THERE)?;
    // The guest runs on after the debugger has left.
    guest.status_when(|status| status["state"] == "running")?;
    let told = guest.shell("cat /proc/cmdline")?;
    ensure(told.split_whitespace().any(|word| word == "nokaslr"), || told.clone())?;
    let output = guest.vellum(&["snapshot", guest.name(), &scratch.path("s").display().to_string()])?;
    let refused = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(2) && refused.contains("--gdb"), || format!("{output:?}"))?;
    let ended = guest.power_off()?;
    let command = format!("gdb {} -ex 'target remote {}'", image.symbols()?, socket.display());
    ensure(ended.code == Some(0) && ended.errors.contains("target remote"), || {
        format!("{:?}, and no {command:?} in {}", ended.code, ended.errors)
    })?;
    ensure(!socket.exists(), || "its socket is left behind".into())
}
