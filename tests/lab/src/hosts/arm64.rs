//! `arm64`: QEMU emulates an Arm board with EL2, so KVM runs in it. With the Virtualization Host
//! Extensions, on a Cortex-A76, the host's kernel runs at EL2. Without them, on a Cortex-A72, it
//! runs at EL1. This bed always has a second stage, so the switch for nested paging chooses between
//! these two.

use std::path::Path;
use std::process::Command;

use super::qemu::Qemu;
use super::{Emulated, Ports, Request};
use crate::architecture::Architecture;
use crate::{Error, Result};

/// The bed.
pub const HOST: Emulated = Emulated(&Qemu {
    name: "arm64",
    about: "QEMU emulating Arm with EL2",
    purpose: "emulated Arm host: built-in and Linux guests, with VHE (--npt 1) and without (--npt 0)",
    architecture: Architecture::Arm,
    program: "qemu-system-aarch64",
    programs: &["qemu-system-aarch64", "busybox", "xz", "apt-get", "dpkg-deb"],
    oldest: None,
    // KVM is not a module on Arm.
    modules: &[],
    modes: ["nvhe", "vhe"],
    // The board has one serial port that the host's kernel can use. The other is a PCI device.
    ports: Ports { console: "ttyAMA0", results: "ttyS0" },
    no_pml: "page-modification logging is Intel's; use vmx",
    add_board,
    add_ports,
    noise: None,
});

fn add_board(command: &mut Command, request: &Request) -> Result<()> {
    let gic = if request.gicv2 { 2 } else { 3 };
    let own = if request.second_stage { "cortex-a76" } else { "cortex-a72" };
    let processor = request.cpu.as_deref().unwrap_or(own);
    let board = format!("virt,virtualization=on,gic-version={gic}");
    command.args(["-M", &board, "-cpu", processor]);
    if request.wire.is_some() {
        return Err(Error::Usage("networks of two hosts are for svm".into()));
    }
    Ok(())
}

fn add_ports(command: &mut Command, console: &Path) {
    command.args(["-serial", &format!("file:{}", console.display())]);
    command.args(["-chardev", "stdio,id=results,signal=off", "-device", "pci-serial,chardev=results"]);
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
