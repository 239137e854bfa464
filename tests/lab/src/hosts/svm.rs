//! `svm`: QEMU emulates an AMD processor with SVM, so kvm-amd runs in it, with or without nested
//! paging.
//!
//! QEMU 7.2 and 10.0 emulate this wrongly: VMRUN with an injected interrupt leaves the vector in
//! QEMU's own `exception_index` (target/i386/tcg/sysemu/svm_helper.c). If the emulation of that CPU
//! is interrupted before the guest's next exit, QEMU delivers the vector again, even with
//! interrupts disabled. In the first instructions of a handler, before the kernel has its own GS
//! base, this crashes the guest. Time slices interrupt at any instruction: those of a clock that
//! counts instructions, and those of two CPUs that take turns. Without PV EOI, acknowledging the
//! interrupt causes the next exit, so this is rare. One CPU in real time has no time slices, so
//! Linux guests run there.
//!
//! QEMU 7.2 also loses interrupts of a host in real time. VMRUN and #VMEXIT change the CPU's
//! `interrupt_request` without a lock and not atomically (`CPU_INTERRUPT_VIRQ` in svm_helper.c), while
//! the emulator's main thread sets a bit in it for the local APIC. If that is the timer's interrupt, it
//! stays in the APIC's IRR, and no timer of the host is armed any more: its guests run on without
//! timers, and nothing else does. This was seen once in some fifteen minutes of guests with two vCPUs:
//! the vector of the timer in IRR, nothing in ISR, `interrupt_request` 0, and the host went on when the
//! bit was set from outside. Any other interrupt has the APIC look again, so a silent host gets a byte
//! on its results line each second (`hosts/run.rs`).
//!
//! Two CPUs in parallel have no time slices either, but do not live long under load. While a
//! guest's balloon was filled and emptied in a loop, the guest ended by a triple fault after 2 to
//! 20 minutes, and once the host did. Code patching also fails while the other CPU runs the code: a
//! host took breakpoints for ever, on both CPUs, at a static key in its scheduler, although the
//! kernel had long restored the instruction (`text_poke_bp`; QEMU kept the translation of the
//! breakpoint). KVM switches that key with the first VM and with the last one, so `bed-init` holds
//! VMs on such hosts. Occasionally the host dies by that very switch (an invalid opcode in
//! `__schedule`) and is started again. Use these hosts for races only, and for short runs.

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
