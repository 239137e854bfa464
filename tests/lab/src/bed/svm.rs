//! `svm`: QEMU emulates an AMD processor with SVM, so kvm-amd runs in there, with nested paging or without.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Request;
use crate::{Result, tool};

/// Where the host's console goes.
pub enum Console<'a> {
    /// Into a log; the results line is the emulator's standard output.
    File(&'a Path),
    /// To the terminal.
    Terminal,
}

/// QEMU, or how to get it.
pub fn emulator() -> Result<PathBuf> {
    tool::need("qemu-system-x86_64")
}

/// The whole command line.
pub fn command(emulator: &Path, request: &Request, initrd: &Path, console: &Console) -> Command {
    let mut command = Command::new(emulator);
    // 512 MiB of translated code: the default is flushed again and again by a kernel that runs a kernel.
    if request.races {
        command.args(["-accel", "tcg,tb-size=512,thread=multi", "-smp", "2"]);
    } else {
        // One instruction is 2 ns. Idle time is skipped, except where a person would see the clock run away.
        let sleep = if matches!(console, Console::Terminal) { "on" } else { "off" };
        command.args(["-accel", "tcg,tb-size=512", "-smp", "1"]);
        command.args(["-icount", &format!("shift=1,sleep={sleep}")]);
    }
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
