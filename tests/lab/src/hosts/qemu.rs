//! QEMU as an emulator. Each of its hosts is a [`Qemu`]: [`super::svm`] and [`super::arm64`].

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Emulator, Pace, Ports, Request, Results, Start, image};
use crate::architecture::Architecture;
use crate::{Error, Result, tool};

/// log2 of the nanoseconds per instruction.
const ICOUNT_SHIFT: u32 = 1;

/// An emulated host.
pub struct Qemu {
    pub name: &'static str,
    pub about: &'static str,
    pub purpose: &'static str,
    pub architecture: Architecture,
    /// The emulator's program.
    pub program: &'static str,
    /// The programs on this machine that the bed needs.
    pub programs: &'static [&'static str],
    /// The oldest QEMU known to work, and the package that has it or a later one.
    pub oldest: Option<((u32, u32), &'static str)>,
    /// KVM's modules. Each takes the mode as a parameter.
    pub modules: &'static [&'static str],
    /// The modes without and with the second stage.
    pub modes: [&'static str; 2],
    pub ports: Ports,
    /// Why no processor has page-modification logging, and an alternative.
    pub no_pml: &'static str,
    /// Adds the board, the processor, and the request's devices.
    pub add_board: fn(&mut Command, &Request) -> Result<()>,
    /// Adds serial ports: the console writes to the file, the results line to standard output.
    pub add_ports: fn(&mut Command, &Path),
    /// Lines of QEMU's standard error that contain this say nothing about a failure.
    pub noise: Option<&'static str>,
}

impl Qemu {
    /// The path of QEMU. An error says how to get it.
    fn emulator(&self) -> Result<PathBuf> {
        let path = tool::need(self.program)?;
        let Some((oldest, package)) = self.oldest else { return Ok(path) };
        let said = self.version()?;
        match number(&said) {
            Some(number) if number >= oldest => Ok(path),
            _ => Err(Error::Package(format!(
                "{} is {said:?}; this bed needs QEMU {}.{} or later: apt-get install {package}",
                path.display(),
                oldest.0,
                oldest.1
            ))),
        }
    }

    /// The command line without the serial ports.
    fn start(&self, start: &Start, idle: Idle) -> Result<Command> {
        let mut command = command(&self.emulator()?, start, idle);
        (self.add_board)(&mut command, start.request)?;
        add_disks(&mut command, start.request);
        Ok(command)
    }
}

impl Emulator for Qemu {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn purpose(&self) -> &'static str {
        self.purpose
    }

    fn programs(&self) -> &'static [&'static str] {
        self.programs
    }

    fn architecture(&self) -> Architecture {
        self.architecture
    }

    fn modules(&self) -> &'static [&'static str] {
        self.modules
    }

    fn mode(&self, second_stage: bool) -> String {
        self.modes[usize::from(second_stage)].into()
    }

    fn parameters(&self, second_stage: bool) -> Vec<String> {
        self.modules.iter().map(|module| format!("{module}.{}", self.mode(second_stage))).collect()
    }

    fn ports(&self) -> Ports {
        self.ports
    }

    fn nanoseconds_per_instruction(&self) -> f64 {
        f64::from(1 << ICOUNT_SHIFT)
    }

    fn has_pml(&self) -> std::result::Result<(), &'static str> {
        Err(self.no_pml)
    }

    fn has_pace(&self, _: Pace) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    fn ready(&self) -> Result<()> {
        self.emulator().and_then(|_| image::busybox()).map(drop)
    }

    /// The version line: `QEMU emulator version 7.2.22 (…)`.
    fn version(&self) -> Result<String> {
        let said = tool::text(Command::new(tool::need(self.program)?).arg("--version"))?;
        Ok(said.lines().next().unwrap_or_default().to_owned())
    }

    fn command(&self, start: &Start) -> Result<(Command, Results)> {
        let mut command = self.start(start, Idle::Skipped)?;
        (self.add_ports)(&mut command, &start.console());
        Ok((command, Results::Stdout))
    }

    fn shell(&self, start: &Start) -> Result<Command> {
        let mut command = self.start(start, Idle::Waited)?;
        command.args(["-serial", "mon:stdio"]);
        Ok(command)
    }

    fn is_noise(&self, line: &str) -> bool {
        self.noise.is_some_and(|noise| line.contains(noise))
    }
}

fn number(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split("version ").nth(1)?.split(['.', ' ']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Whether a clock that counts instructions waits while its host idles.
#[derive(Clone, Copy)]
enum Idle {
    /// Idle time is skipped.
    Skipped,
    /// Idle time passes in real time, as a person at a shell expects.
    Waited,
}

/// The command line without the board, the processor and the serial ports.
fn command(program: &Path, start: &Start, idle: Idle) -> Command {
    let Start { request, initrd, .. } = start;
    let mut command = Command::new(program);
    // 512 MiB for translated code. A kernel that runs another kernel would flush the default size
    // again and again.
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
        .args(["-nodefaults", "-display", "none"])
        .args(["-m", &format!("{}M", request.memory_mib)])
        .arg("-kernel")
        .arg(request.kernel.image())
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", &request.command_line()]);
    if !request.systemd {
        command.arg("-no-reboot");
    }
    command
}

/// Adds the root and the other disks. Writes go to the emulator's memory.
fn add_disks(command: &mut Command, request: &Request) {
    for (number, disk) in request.root.iter().chain(&request.disks).enumerate() {
        let drive = format!("file={},format=raw,if=none,id=disk{number},snapshot=on", disk.display());
        command.args(["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=disk{number}")]);
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn an_old_qemu_is_told_from_a_new_one() {
        let said = |number| format!("QEMU emulator version {number} (Debian 1:7.2)\nCopyright");
        assert!(number(&said("7.1.0")).unwrap() < (7, 2));
        assert!(number(&said("7.2.22")).unwrap() >= (7, 2) && number(&said("11.1.0")).unwrap() >= (7, 2));
        assert_eq!(number("no number"), None);
    }
}
