//! The image for 64-bit Arm under QEMU, which emulates the processors of its machine `virt`. Under
//! Vellum on an Arm host, `tests/run.rs` boots it.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;

use support::env::TestEnv;
use support::{Completion, Failed, LIMIT, Need, ensure, eventually, test, tools};
use vellum_judge::image::{Arch, Format, image};
use vellum_judge::read::{Log, Verdict, read};

use crate::qemu::{arrives, names_a_device_s_writes, names_old_registers, names_what_is_planted, source};
use crate::stream::{PAGE, Stream};
use crate::{disk, is_long, whole};

const PROGRAM: &str = "qemu-system-aarch64";
/// The start of RAM.
const RAM: u64 = 0x4000_0000;

fn emulator() -> Need {
    tools::program(PROGRAM)
}

fn kernel(env: &TestEnv) -> Result<PathBuf, Failed> {
    let path = env.path("judge.image");
    fs::write(&path, image(Format::Image))?;
    Ok(path)
}

/// A QEMU of this machine and processor, without its memory, command line and console.
pub(crate) fn command(env: &TestEnv, machine: &str, processor: &str) -> Result<Command, Failed> {
    let mut command = Command::new(PROGRAM);
    command.args(["-M", &format!("virt,{machine}"), "-accel", "tcg", "-cpu", processor]);
    command.args(["-nodefaults", "-display", "none", "-kernel"]).arg(kernel(env)?);
    Ok(command)
}

/// Boots the image in this machine, with a disk. `more` has the console. Returns what it printed on
/// the standard output.
fn boots(
    machine: &str,
    processor: &str,
    cpus: u32,
    memory: &str,
    transport: &str,
    more: &[&str],
) -> Result<Log, Failed> {
    let env = TestEnv::new()?;
    disk(&env)?;
    let drive = format!("if=none,id=d,format=raw,readonly=on,file={}", env.path("judge.raw").display());
    let mut qemu = command(&env, machine, processor)?;
    qemu.args(["-smp", &cpus.to_string(), "-m", memory, "-no-reboot"]);
    qemu.args([
        "-drive",
        &drive,
        "-device",
        if transport == "pci" { "virtio-blk-pci,drive=d" } else { "virtio-blk-device,drive=d" },
    ]);
    let output = qemu.args(more).output()?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let log = read(&output.stdout);
    whole(&log)?;
    let start = log.start.as_ref().ok_or("no first line")?;
    let is_asked = start.arch == "aarch64" && (start.vcpus, start.given) == (cpus.into(), cpus.into());
    ensure(is_asked && start.timer, || format!("{start:?}"))?;
    ensure(log.disks == [(transport.into(), 2048)], || format!("{:?}", log.disks))?;
    Ok(log)
}

/// The serial port and the command line.
const USUAL: [&str; 4] = ["-serial", "stdio", "-append", "passes=2 seed=7 clock=60s"];

/// Both interrupt controllers, entered at EL1 and at EL2, on processors with and without the
/// Virtualization Host Extensions.
#[test(emulator())]
fn machines_of_qemu_s_virt_are_whole() -> Result<(), Failed> {
    for (machine, processor, cpus, memory, transport) in [
        ("gic-version=2", "cortex-a57", 1, "64M", "mmio"),
        ("gic-version=2,virtualization=on", "cortex-a57", 2, "64M", "pci"),
        ("gic-version=3", "cortex-a76", 4, "64M", "mmio"),
        ("gic-version=3,virtualization=on,highmem=off", "max", 4, "65M", "pci"),
    ] {
        boots(machine, processor, cpus, memory, transport, &USUAL)
            .map_err(|why| format!("{machine}, {cpus}: {why:?}"))?;
    }
    Ok(())
}

#[test(emulator())]
fn two_gib_of_an_arm_machine_are_whole() -> Result<Completion, Failed> {
    if !is_long() {
        return Ok(Completion::ignored_with("fills 2 GiB on TCG; VELLUM_JUDGE=all has it run"));
    }
    let log = boots("gic-version=3", "cortex-a57", 2, "2G", "mmio", &USUAL)?;
    let judged: u64 = log.ranges.iter().map(|range| range.end - range.start).sum();
    ensure(judged > 0x7f00_0000, || format!("{judged:x}"))?;
    Ok(Completion::Completed)
}

/// A virtio console on PCI, and in both versions of virtio-mmio. The PL011 that the machine always
/// has prints nothing then.
#[test(emulator())]
fn an_arm_image_prints_on_a_virtio_console() -> Result<(), Failed> {
    for (transport, legacy) in [("mmio", "on"), ("mmio", "off"), ("pci", "off")] {
        let global = format!("virtio-mmio.force-legacy={legacy}");
        let serial = if transport == "pci" { "virtio-serial-pci" } else { "virtio-serial-device" };
        let console = ["-chardev", "stdio,id=c", "-device", serial, "-device", "virtconsole,chardev=c"];
        let more =
            [&["-serial", "null", "-global", &global][..], &console, &["-append", "passes=1 console=hvc0"]];
        boots("gic-version=2", "cortex-a57", 2, "64M", transport, &more.concat())?;
    }
    Ok(())
}

#[test(emulator())]
fn pages_that_a_migration_of_an_arm_machine_loses_are_named() -> Result<(), Failed> {
    names_what_is_planted(Arch::Aarch64, RAM)
}

#[test(emulator())]
fn what_a_device_writes_and_a_migration_of_an_arm_machine_loses_is_named() -> Result<(), Failed> {
    names_a_device_s_writes(Arch::Aarch64, RAM)
}

#[test(emulator())]
fn registers_of_an_older_stream_of_an_arm_machine_are_named() -> Result<(), Failed> {
    names_old_registers(Arch::Aarch64, has_same_stack)
}

/// Whether the stack of vCPU 1 in `old` is also in `new`. Otherwise the image may crash before it
/// judges, because it returns to where it never was.
fn has_same_stack(old: &Stream, new: &Stream) -> Result<bool, Failed> {
    // 16 registers of 32 bits, 32 of 64 bits, of which the last one is SP (vmstate_arm_cpu in QEMU).
    let registers = &old.bytes[old.device("cpu", 1)?];
    let sp = u64::from_be_bytes(registers[16 * 4 + 31 * 8..][..8].try_into()?);
    let page = (sp & !(PAGE as u64 - 1)).checked_sub(RAM).ok_or_else(|| format!("SP {sp:x}"))?;
    let at = sp as usize % PAGE;
    Ok(old.newest(page)?[at..] == new.newest(page)?[at..])
}

/// The driver emulates the machine, and the options of a real one are not asked for.
#[test(emulator())]
fn an_arm_machine_that_qemu_saves_is_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let scenarios = "--scenario boot --scenario pause --scenario snapshot --scenario restore";
    let output = env.vellum(&format!("judge run --vmm qemu --arch aarch64 --memory 16m {scenarios}"))?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// An architecture that the VMM cannot emulate, or a format that the architecture does not have.
#[test]
fn an_architecture_that_does_not_fit_is_refused() -> Result<(), Failed> {
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    for line in [
        format!("judge run --vmm vellum --arch {other}"),
        "judge image --out - --arch aarch64 --format elf".into(),
        "judge image --out - --arch x86_64 --format image".into(),
        "judge image --out - --arch riscv64".into(),
    ] {
        let output = TestEnv::new()?.vellum(&line)?;
        ensure(output.status.code() == Some(2) && output.stdout.is_empty(), || {
            format!("{line}: {output:?}")
        })?;
    }
    Ok(())
}

/// One of the three copies of vCPU 1's position is a boundary older than the others. The image names
/// the kind of register that has it.
#[test(emulator())]
fn an_old_copy_of_a_position_is_named_on_arm() -> Result<(), Failed> {
    let (bed, mut source) = source(Arch::Aarch64, false, false)?;
    let (mut stream, before, places) = eventually(LIMIT, "a processor in the loop", || {
        let (stream, before) = source.moves_whole(&bed)?;
        Ok(copies(&stream)?.map(|places| (stream, before, places)))
    })?;
    for (kind, place) in ["general-registers", "msrs", "vector-registers"].into_iter().zip(places) {
        stream.changes.clear();
        let older = number(&stream.bytes[place.clone()])? - 64;
        stream.change(place, older.to_be_bytes().to_vec());
        let log = arrives(&bed, &stream, &before)?;
        let is_named = log.faults.iter().all(|fault| (fault.kind, fault.vcpu) == (kind, 1));
        ensure(is_named && log.verdict() == Verdict::Lost, || format!("{kind}: {log:x?}"))?;
    }
    Ok(())
}

fn number(bytes: &[u8]) -> Result<u64, Failed> {
    Ok(u64::from_be_bytes(bytes.try_into()?))
}

/// The bits of a position that count the accesses of a phase (`PHASE` in the image's schedule).
const ACCESSES: u64 = (1 << 26) - 1;

/// Where a stream has X20, TPIDR_EL0 and V15 of vCPU 1. `None` if other registers have the same, as
/// while it prints, and where a phase begins: an older position is in the phase before, of which the
/// image then finds all pages changed.
fn copies(stream: &Stream) -> Result<Option<[Range<usize>; 3]>, Failed> {
    let cpu = stream.device("cpu", 1)?;
    // As in `has_same_stack`. The system registers and the vectors come behind.
    let general = cpu.start + 16 * 4 + 20 * 8;
    let boundary = number(&stream.bytes[general..general + 8])? & !63;
    let behind = cpu.start + 16 * 4 + 32 * 8..cpu.end - 7;
    let places: Vec<usize> =
        behind.filter(|at| stream.bytes[*at..at + 8] == boundary.to_be_bytes()).collect();
    let range = |at: usize| at..at + 8;
    Ok(match places[..] {
        [system, vector] if boundary & ACCESSES != 0 => Some([range(general), range(system), range(vector)]),
        _ => None,
    })
}
