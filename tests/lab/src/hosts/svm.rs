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

use std::path::PathBuf;
use std::process::Command;

use super::qemu::{self, Idle};
use super::{Emulated, Emulator, Pace, Ports, Results, Start, image};
use crate::{Error, Result, tool};

/// The bed.
pub const HOST: Emulated = Emulated(&Svm);

struct Svm;

impl Emulator for Svm {
    fn name(&self) -> &'static str {
        "svm"
    }

    fn about(&self) -> &'static str {
        "QEMU emulating AMD's SVM"
    }

    fn purpose(&self) -> &'static str {
        "emulated AMD host: Linux guests, NPT and shadow paging"
    }

    fn programs(&self) -> &'static [&'static str] {
        &["qemu-system-x86_64", "busybox", "xz", "apt-get", "dpkg-deb"]
    }

    fn modules(&self) -> &'static [&'static str] {
        &["kvm_amd"]
    }

    fn mode(&self, second_stage: bool) -> String {
        format!("npt={}", u8::from(second_stage))
    }

    fn parameters(&self, second_stage: bool) -> Vec<String> {
        vec![format!("kvm_amd.{}", self.mode(second_stage))]
    }

    fn ports(&self) -> Ports {
        Ports { console: "ttyS0", results: "ttyS1" }
    }

    fn nanoseconds_per_instruction(&self) -> f64 {
        qemu::nanoseconds_per_instruction()
    }

    fn has_pml(&self) -> std::result::Result<(), &'static str> {
        Err("QEMU emulates AMD's processors, which have none; use vmx")
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
        command.args(["-serial", &format!("file:{}", start.console().display()), "-serial", "stdio"]);
        Ok((command, Results::Stdout))
    }

    fn shell(&self, start: &Start) -> Result<Command> {
        let mut command = command(start, Idle::Waited)?;
        command.args(["-serial", "mon:stdio"]);
        Ok(command)
    }

    fn is_noise(&self, line: &str) -> bool {
        line.contains("TCG doesn't support requested feature")
    }
}

const QEMU: &str = "qemu-system-x86_64";

/// The oldest QEMU that this bed was seen to work with.
const OLDEST: (u32, u32) = (7, 2);

/// QEMU, or how to get it.
fn emulator() -> Result<PathBuf> {
    let path = tool::need(QEMU)?;
    let said = Svm.version()?;
    match number(&said) {
        Some(number) if number >= OLDEST => Ok(path),
        _ => Err(Error::Package(format!(
            "{} is {said:?}; this bed needs QEMU {}.{} or later: apt-get install qemu-system-x86",
            path.display(),
            OLDEST.0,
            OLDEST.1
        ))),
    }
}

fn number(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split("version ").nth(1)?.split(['.', ' ']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The command line but for the serial ports.
fn command(start: &Start, idle: Idle) -> Result<Command> {
    let request = start.request;
    let mut command = qemu::command(&emulator()?, start, idle);
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
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_qemu_is_told_from_a_new_one() {
        let said = |number| format!("QEMU emulator version {number} (Debian 1:7.2)\nCopyright");
        assert!(number(&said("7.1.0")).unwrap() < OLDEST);
        assert!(number(&said("7.2.22")).unwrap() >= OLDEST && number(&said("11.1.0")).unwrap() >= OLDEST);
        assert_eq!(number("no number"), None);
    }
}
