//! `arm64`: QEMU emulates an Arm board with EL2, so KVM runs in there: with the Virtualization Host Extensions on a Cortex-A76, where the
//! host's kernel itself is at EL2, or without on a Cortex-A72. That is what this bed has instead of a second stage that can be left out: the
//! switch for nested paging chooses between the two.

use std::path::PathBuf;
use std::process::Command;

use super::qemu::{self, Idle};
use super::{Emulated, Emulator, Pace, Ports, Results, Start, image};
use crate::architecture::Architecture;
use crate::{Error, Result, tool};

/// The bed.
pub const HOST: Emulated = Emulated(&Arm64);

struct Arm64;

impl Emulator for Arm64 {
    fn name(&self) -> &'static str {
        "arm64"
    }

    fn about(&self) -> &'static str {
        "QEMU emulating Arm with EL2"
    }

    fn purpose(&self) -> &'static str {
        "emulated Arm host: built-in and Linux guests, with VHE (--npt 1) and without (--npt 0)"
    }

    fn programs(&self) -> &'static [&'static str] {
        &["qemu-system-aarch64", "busybox", "xz", "apt-get", "dpkg-deb"]
    }

    fn architecture(&self) -> Architecture {
        Architecture::Arm
    }

    /// KVM is no module on Arm.
    fn modules(&self) -> &'static [&'static str] {
        &[]
    }

    fn mode(&self, second_stage: bool) -> String {
        if second_stage { "vhe" } else { "nvhe" }.into()
    }

    fn parameters(&self, _second_stage: bool) -> Vec<String> {
        Vec::new()
    }

    /// The board has one serial port that the host's kernel may use. The other line is a serial port behind PCI.
    fn ports(&self) -> Ports {
        Ports { console: "ttyAMA0", results: "ttyS0" }
    }

    fn nanoseconds_per_instruction(&self) -> f64 {
        qemu::nanoseconds_per_instruction()
    }

    fn has_pml(&self) -> std::result::Result<(), &'static str> {
        Err("page-modification logging is Intel's; use vmx")
    }

    fn has_pace(&self, _: Pace) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    fn ready(&self) -> Result<()> {
        emulator().and_then(|_| image::busybox()).map(drop)
    }

    fn version(&self) -> Result<String> {
        qemu::version(QEMU)
    }

    fn command(&self, start: &Start) -> Result<(Command, Results)> {
        let mut command = command(start, Idle::Skipped)?;
        command.args(["-serial", &format!("file:{}", start.console().display())]);
        command.args(["-chardev", "stdio,id=results,signal=off"]);
        command.args(["-device", "pci-serial,chardev=results"]);
        Ok((command, Results::Stdout))
    }

    fn shell(&self, start: &Start) -> Result<Command> {
        let mut command = command(start, Idle::Waited)?;
        command.args(["-serial", "mon:stdio"]);
        Ok(command)
    }
}

const QEMU: &str = "qemu-system-aarch64";

fn emulator() -> Result<PathBuf> {
    tool::need(QEMU)
}

/// The command line but for the serial ports.
fn command(start: &Start, idle: Idle) -> Result<Command> {
    let request = start.request;
    let mut command = qemu::command(&emulator()?, start, idle);
    let gic = if request.gicv2 { 2 } else { 3 };
    let own = if request.second_stage { "cortex-a76" } else { "cortex-a72" };
    let processor = request.cpu.as_deref().unwrap_or(own);
    let board = format!("virt,virtualization=on,gic-version={gic}");
    command.args(["-M", &board, "-cpu", processor]);
    if request.wire.is_some() {
        return Err(Error::Usage("networks of two hosts are for svm".into()));
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_named_by_where_the_host_kernel_is() {
        assert_eq!(
            (HOST.label(true, false), HOST.label(false, false)),
            ("arm64 vhe".into(), "arm64 nvhe".into())
        );
    }
}
