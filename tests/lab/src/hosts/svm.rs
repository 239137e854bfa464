//! `svm`: QEMU emulates an AMD processor with SVM, so kvm-amd runs in there, with nested paging or
//! without.
//!
//! What it emulates wrongly, in 7.2 and in 10.0: VMRUN with an injected interrupt leaves that
//! vector in QEMU's own `exception_index` (target/i386/tcg/sysemu/svm_helper.c), and when the
//! emulation of that CPU is interrupted before the guest's next exit, it delivers it again,
//! interrupt flag or no. In the first instructions of a handler, before the kernel has its own GS
//! base, that is the end of the guest. Time slices interrupt at any place: those of a clock that
//! counts instructions, and those of two CPUs that take turns. Without PV EOI the next exit comes
//! with the interrupt's acknowledgement, and it happens seldom. One CPU in real time has no slices,
//! and Linux guests belong there.
//!
//! Two CPUs at once have no slices either, yet do not live long under load: while a guest's balloon
//! was filled and emptied without end it ended by a triple fault after 2 to 20 minutes, and once
//! the host did so itself. And code that one CPU patches while the other runs it: a host was seen
//! to take breakpoints for ever, on both CPUs, at a static key in its scheduler where the kernel
//! had long put the instruction back (`text_poke_bp`; the translation that QEMU kept was of the
//! breakpoint). KVM switches that key with the first machine and with the last one, so `bed-init`
//! holds machines of its own on such hosts; once in a while it dies by that very switch (an opcode
//! that is none, in `__schedule`), and is started again. They are for races, and for short.

use std::path::Path;
use std::process::Command;

use super::qemu::Qemu;
use super::{Emulated, Ports, Request};
use crate::Result;
use crate::architecture::Architecture;

/// The bed.
pub const HOST: Emulated = Emulated(&Qemu {
    name: "svm",
    about: "QEMU emulating AMD's SVM",
    purpose: "emulated AMD host: Linux guests, NPT and shadow paging",
    architecture: Architecture::X86,
    program: "qemu-system-x86_64",
    programs: &["qemu-system-x86_64", "busybox", "xz", "apt-get", "dpkg-deb"],
    oldest: Some(((7, 2), "qemu-system-x86")),
    modules: &["kvm_amd"],
    modes: ["npt=0", "npt=1"],
    ports: Ports { console: "ttyS0", results: "ttyS1" },
    no_pml: "QEMU emulates AMD's processors, which have none; use vmx",
    add_board,
    add_ports,
    noise: Some("TCG doesn't support requested feature"),
});

fn add_board(command: &mut Command, request: &Request) -> Result<()> {
    let processor = format!("{},+svm,+npt", request.cpu.as_deref().unwrap_or("EPYC"));
    command.args(["-cpu", &processor]);
    for (number, disk) in request.root.iter().chain(&request.disks).enumerate() {
        let drive = format!("file={},format=raw,if=none,id=disk{number},snapshot=on", disk.display());
        command.args(["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=disk{number}")]);
    }
    if let Some(wire) = &request.wire {
        let [here, there] = [wire.end, 1 - wire.end].map(|end| wire.ends[end].display());
        let ends = format!("local.type=unix,local.path={here},remote.type=unix,remote.path={there}");
        command.args(["-netdev", &format!("dgram,id=wire,{ends}")]);
        command.args(["-device", &format!("virtio-net-pci,netdev=wire,mac={}", wire.mac())]);
    }
    Ok(())
}

fn add_ports(command: &mut Command, console: &Path) {
    command.args(["-serial", &format!("file:{}", console.display()), "-serial", "stdio"]);
}
