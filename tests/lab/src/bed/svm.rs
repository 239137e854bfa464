//! `svm`: QEMU emulates an AMD processor with SVM, so kvm-amd runs in there, with nested paging or without.
//!
//! What it emulates wrongly, in 7.2 and in 10.0: VMRUN with an injected interrupt leaves that vector in QEMU's own
//! `exception_index` (target/i386/tcg/sysemu/svm_helper.c), and when the emulation of that CPU is interrupted before the
//! guest's next exit, it delivers it again, interrupt flag or no. In the first instructions of a handler, before the kernel has
//! its own GS base, that is the end of the guest. Time slices interrupt at any place: those of a clock that counts
//! instructions, and those of two CPUs that take turns. Without PV EOI the next exit comes with the interrupt's
//! acknowledgement, and it happens seldom. One CPU in real time has no slices, and Linux guests belong there.
//!
//! Two CPUs at once have no slices either, yet do not live long under load: while a guest's balloon was filled and
//! emptied without end it ended by a triple fault after 2 to 20 minutes, and once the host did so itself. And code that one CPU
//! patches while the other runs it: a host was seen to take breakpoints for ever, on both CPUs, at a static key in its
//! scheduler where the kernel had long put the instruction back (`text_poke_bp`; the translation that QEMU kept was of the
//! breakpoint). KVM switches that key with the first machine and with the last one, so `bed-init` holds machines of its own on
//! such hosts; once in a while it dies by that very switch (an opcode that is none, in `__schedule`), and is started again. They
//! are for races, and for short.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Pace, Request};
use crate::{Error, Result, tool};

/// Where the host's console goes.
pub enum Console<'a> {
    /// Into a log; the results line is the emulator's standard output.
    File(&'a Path),
    /// To the terminal.
    Terminal,
}

/// The oldest QEMU that this bed was seen to work with.
const QEMU: (u32, u32) = (7, 2);

/// QEMU, or how to get it.
pub fn emulator() -> Result<PathBuf> {
    let path = tool::need("qemu-system-x86_64")?;
    let said = version()?;
    match number(&said) {
        Some(number) if number >= QEMU => Ok(path),
        _ => Err(Error::Package(format!(
            "{} is {said:?}; this bed needs QEMU {}.{} or later: apt-get install qemu-system-x86",
            path.display(),
            QEMU.0,
            QEMU.1
        ))),
    }
}

/// `QEMU emulator version 7.2.22 (…)`.
pub fn version() -> Result<String> {
    let said = tool::text(Command::new(tool::need("qemu-system-x86_64")?).arg("--version"))?;
    Ok(said.lines().next().unwrap_or_default().to_owned())
}

fn number(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split("version ").nth(1)?.split(['.', ' ']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The whole command line.
pub fn command(emulator: &Path, request: &Request, initrd: &Path, console: &Console) -> Command {
    let mut command = Command::new(emulator);
    // 512 MiB of translated code: the default is flushed again and again by a kernel that runs a kernel.
    let accelerator = ["-accel", "tcg,tb-size=512"];
    let in_real_time = ["-accel", "tcg,tb-size=512,thread=multi"];
    match request.pace {
        Pace::Races => command.args(in_real_time).args(["-smp", "2"]),
        Pace::Real => command.args(in_real_time).args(["-smp", "1"]),
        Pace::Counted => {
            // One instruction is 2 ns. Idle time is skipped, except where a person would see the clock run away.
            let sleep = if matches!(console, Console::Terminal) { "on" } else { "off" };
            command.args(accelerator).args(["-smp", "1", "-icount", &format!("shift=1,sleep={sleep}")])
        }
    };
    command
        .args(["-cpu", "EPYC,+svm,+npt", "-nodefaults", "-no-reboot", "-display", "none"])
        .args(["-m", &format!("{}M", request.memory_mib)])
        .arg("-kernel")
        .arg(request.kernel.image())
        .arg("-initrd")
        .arg(initrd);
    match console {
        Console::File(log) => {
            command.args(["-serial", &format!("file:{}", log.display()), "-serial", "stdio"]);
        }
        Console::Terminal => {
            command.args(["-serial", "mon:stdio"]);
        }
    }
    command.args(["-append", &request.command_line()]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_qemu_is_told_from_a_new_one() {
        let said = |number| format!("QEMU emulator version {number} (Debian 1:7.2)\nCopyright");
        assert!(number(&said("7.1.0")).unwrap() < QEMU);
        assert!(number(&said("7.2.22")).unwrap() >= QEMU && number(&said("11.1.0")).unwrap() >= QEMU);
        assert_eq!(number("no number"), None);
    }
}
