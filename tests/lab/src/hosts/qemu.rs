//! What [`super::svm`] and [`super::arm64`] share: QEMU, its version, and the part of its command line that no board changes.

use std::path::Path;
use std::process::Command;

use super::{Pace, Start};
use crate::{Result, tool};

/// An instruction takes two to the power of this in nanoseconds.
const ICOUNT_SHIFT: u32 = 1;

/// What a counting clock takes for one instruction.
pub fn nanoseconds_per_instruction() -> f64 {
    f64::from(1 << ICOUNT_SHIFT)
}

/// Whether a counting clock waits while its host idles.
#[derive(Clone, Copy)]
pub enum Idle {
    /// It does not: idle time is skipped.
    Skipped,
    /// It does: a person would see the clock run away.
    Waited,
}

/// `QEMU emulator version 7.2.22 (…)`.
pub fn version(program: &str) -> Result<String> {
    let said = tool::text(Command::new(tool::need(program)?).arg("--version"))?;
    Ok(said.lines().next().unwrap_or_default().to_owned())
}

/// The command line but for the board, the processor and the serial ports.
pub fn command(program: &Path, start: &Start, idle: Idle) -> Command {
    let Start { request, initrd, .. } = start;
    let mut command = Command::new(program);
    // 512 MiB of translated code: the default is flushed again and again by a kernel that runs a kernel.
    let in_real_time = ["-accel", "tcg,tb-size=512,thread=multi"];
    let sleep = match idle {
        Idle::Skipped => "off",
        Idle::Waited => "on",
    };
    let count = format!("shift={ICOUNT_SHIFT},sleep={sleep}");
    match request.pace {
        Pace::Races => command.args(in_real_time).args(["-smp", "2"]),
        Pace::Real => command.args(in_real_time).args(["-smp", "1"]),
        Pace::Counted => command.args(["-accel", "tcg,tb-size=512", "-smp", "1", "-icount", &count]),
    };
    command
        .args(["-nodefaults", "-no-reboot", "-display", "none"])
        .args(["-m", &format!("{}M", request.memory_mib)])
        .arg("-kernel")
        .arg(request.kernel.image())
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", &request.command_line()]);
    command
}
