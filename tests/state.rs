//! The whole state of a machine on real KVM: saved in one machine and restored in another of the
//! same process. The tests of each part check the state of that part. These tests check that the
//! machine continues.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, Msrs, kvm_irqchip, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use support::faults;
use support::guests::Code;
use support::hosts::kvm;
use support::pc::{Pc, copy, hand_over, written};
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_devices::bus::BusDevice;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_guests::guest::GuestConfig;
use vellum_guests::run::{BuiltinMachine, RunConfig};
use vellum_guests::{self as guests, Guest, Order, WriteConfig};
use vellum_host::Facts;
use vellum_kvm::arch::clocks::{Clock, ClockPolicy, Tsc};
use vellum_kvm::arch::irqchip::Mode;
use vellum_kvm::arch::layout;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_kvm::vm::Vm;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux::{self as machine, BootConfig, Image, Origin};
use vellum_machine::state::cut_like;
use vellum_machine::{Inspect, Machine, RestoreState, SaveState, Section};
use vellum_sandbox::{self as sandbox, Sandbox, ThreadKind};
use vellum_sys::kvm_vcpu::{set_tsc_offset, tsc_offset};
use vm_memory::{Bytes, GuestAddress};

fn main() -> ExitCode {
    faults::plant();
    let mut tests = Tests::from_args();
    for (name, irqchip) in [("split", Mode::Split), ("kernel", Mode::Kernel)] {
        tests.add(format!("a_pc_goes_on_with_a_{name}_irqchip"), kvm(), move || pc_goes_on(irqchip));
    }
    for (name, irqchip) in [("split", Mode::Split), ("kernel", Mode::Kernel)] {
        let name = format!("interrupts_and_deadlines_are_not_forgotten_with_a_{name}_irqchip");
        tests.add(name, kvm(), move || interrupts_stay(irqchip));
    }
    for (name, order, shared) in [
        ("a_region_each", Order::Sequential, false),
        ("a_shared_region", Order::Random, true),
        ("a_shuffled_one", Order::Shuffled, false),
    ] {
        let name = format!("a_built_in_guest_goes_on_with_{name}");
        tests.add(name, kvm(), move || {
            built_in_goes_on(WriteConfig { order, shared, passes: 40, ..WriteConfig::default() })
        });
    }
    let interrupts = "interrupts_and_deadlines_are_not_forgotten_with_a_split_irqchip";
    for (mistake, test, says) in [
        ("devices-before-lapics", interrupts, "the serial port's interrupt is requested"),
        ("deadline-before-lapic", interrupts, "the deadline 0x"),
        ("no-clock", "clocks_go_on", "Clock { nanoseconds: "),
        (
            "vmgenid-unchanged",
            "a_restored_pc_has_another_generation_id_and_is_told",
            "it has the ID of another",
        ),
        ("kvmclock-ctrl-left-out", "a_guest_is_told_that_it_stood_still", "the flag is set"),
        (
            "writing-msrs-early",
            "kvm_writes_to_memory_after_the_commit_alone",
            "it was written before the commit",
        ),
    ] {
        tests.add(format!("planted_{mistake}_is_caught"), kvm(), move || faults::caught(mistake, test, says));
    }
    tests.run()
}

/// The guest keeps one byte in a register and one in an MSR. It prints both after the host has
/// written to its memory. By then it runs in another machine.
fn pc_goes_on(irqchip: Mode) -> Result<(), Failed> {
    const FLAG: u32 = 0x18_0000;
    let code = Code::default()
        // mov ecx, IA32_STAR; mov eax, '7'; xor edx, edx; wrmsr; mov ebx, '4'
        .bytes(&[0xb9, 0x81, 0, 0, 0xc0, 0xb8, b'7', 0, 0, 0, 0x31, 0xd2, 0x0f, 0x30, 0xbb, b'4', 0, 0, 0])
        .print("A")
        // cmp byte [FLAG], 0; je back
        .bytes(&[0x80, 0x3c, 0x25])
        .bytes(&FLAG.to_le_bytes())
        .bytes(&[0, 0x74, 0xf6])
        // mov al, bl; mov dx, 0x3f8; out dx, al
        .bytes(&[0x88, 0xd8, 0x66, 0xba, 0xf8, 0x03, 0xee])
        // mov ecx, IA32_STAR; rdmsr; mov dx, 0x3f8; out dx, al
        .bytes(&[0xb9, 0x81, 0, 0, 0xc0, 0x0f, 0x32, 0x66, 0xba, 0xf8, 0x03, 0xee])
        .power_off();
    let mut source = Pc::boot(&code.elf64(), |config| (config.irqchip, config.cpus) = (irqchip, 2))?;
    source.machine.start()?;
    eventually(LIMIT, "the guest says A", || Ok((source.said()? == b"A").then_some(())))?;
    source.machine.pause()?;
    let mut target = Pc::like(source.machine.describe(), |_| ())?;
    source.machine.vm.memory.guest.write_obj(1u8, GuestAddress(FLAG.into()))?;
    hand_over(&mut source.machine, &mut target.machine, |sections| sections)?;
    let (was, is) = (source.machine.description(), target.machine.description());
    for (was, is) in was.cpuid.iter().zip(&is.cpuid) {
        ensure(was == is, || format!("CPUID: {was:x?} became {is:x?}"))?;
    }
    ensure(was == is, || "it is another machine".into())?;
    let exit = target.end()?;
    let said = target.said()?;
    ensure((said.as_slice(), exit) == (b"47", Exit::PowerOff), || format!("{said:?} {exit:?}"))
}

fn guest(config: &RunConfig, memory: Memory) -> Result<Guest, Failed> {
    let kvm = vellum_kvm::vm::open()?;
    let guest =
        GuestConfig { page: config.page, cpuid: config.cpuid.clone(), ..GuestConfig::new(config.vcpus) };
    Ok(Guest::start(&kvm, memory, guest)?)
}

/// A built-in guest with 8 MiB in 3 slots. It is paused in the middle of its passes.
fn in_the_middle(write: WriteConfig) -> Result<BuiltinMachine, Failed> {
    let memory = MemoryConfig { slots: 3, ..MemoryConfig::new(8 << 20) };
    let config = RunConfig {
        vcpus: 2,
        pins: None,
        memory,
        write,
        page: vellum_guests::program::GuestPage::Large,
        cpuid: Default::default(),
        dirty_ring: None,
        duration: None,
        fill: false,
    };
    let mut run = BuiltinMachine::new(guest(&config, Memory::map(layout::RAM, memory)?)?, config)?;
    run.start()?;
    let halfway =
        |run: &BuiltinMachine| run.progress().is_some_and(|p| p.of.is_some_and(|of| p.done > of / 4));
    eventually(LIMIT, "the guest is halfway", || Ok(halfway(&run).then_some(())))?;
    run.pause()?;
    Ok(run)
}

/// A machine with the configuration of `run`, which has never run.
fn like(run: &BuiltinMachine) -> Result<BuiltinMachine, Failed> {
    let description = guests::state::Description::from_json(run.describe())?;
    let config = description.run(MemoryConfig::new(1 << 20))?;
    let mut memory = Memory::map(layout::RAM, config.memory)?;
    cut_like(&mut memory, description.ram())?;
    let run = BuiltinMachine::new(guest(&config, memory)?, config)?;
    ensure(run.description() == description, || "it is another guest".into())?;
    Ok(run)
}

fn built_in_goes_on(write: WriteConfig) -> Result<(), Failed> {
    let mut source = in_the_middle(write)?;
    let mut target = like(&source)?;
    hand_over(&mut source, &mut target, |sections| sections)?;
    let before = source.progress();
    let exit = eventually(LIMIT, "the guest ends", || Ok(target.poll()?))?;
    ensure(source.progress() == before, || "the source has run on".into())?;
    let progress = target.progress();
    ensure(progress.is_some_and(|p| Some(p.done) == p.of), || format!("it has come to {progress:?}"))?;
    let (_, right) = target.report(Facts::collect(String::new()));
    ensure(right && exit == Exit::PowerOff, || format!("{exit:?}"))
}

#[test(kvm())]
fn a_vcpu_that_was_done_stays_done() -> Result<(), Failed> {
    let mut source = in_the_middle(WriteConfig { passes: 1, ..WriteConfig::default() })?;
    source.resume();
    eventually(LIMIT, "the guest is done", || Ok(source.guest.all_rung()?.then_some(())))?;
    source.pause()?;
    let mut target = like(&source)?;
    hand_over(&mut source, &mut target, |sections| sections)?;
    let exit = eventually(LIMIT, "the guest ends", || Ok(target.poll()?))?;
    let (_, right) = target.report(Facts::collect(String::new()));
    ensure(right && exit == Exit::PowerOff, || format!("{exit:?}"))
}

/// Sections with faults. Each is refused with one line that names the section, and the machine
/// stays as if unused.
#[test(kvm())]
fn sections_that_are_wrong_are_refused_by_name() -> Result<(), Failed> {
    type Diagnose = (&'static str, fn(&mut Vec<Section>), &'static str);
    let faults: [Diagnose; 7] = [
        ("missing", |all| all.retain(|s| s.name != "clock"), "no section clock"),
        ("twice", |all| all.push(all[0].clone()), "two sections \"vcpu0\""),
        ("unknown", |all| all.push(Section::new("fan", 1, &0)), "a section \"fan\""),
        ("version", |all| all[0].version = 9, "section vcpu0 of the saved state has version 9"),
        ("cut", |all| all[1].body.truncate(100), "section vcpu1 of the saved state: EOF"),
        ("vcpus", |all| all.retain(|s| s.name != "vcpu1"), "no section vcpu1"),
        (
            "models",
            |all| {
                let run = all.iter_mut().find(|s| s.name == "run").expect("it has one");
                let mut fields: serde_json::Value = serde_json::from_slice(&run.body).expect("it is JSON");
                fields["models"][0]["first_page"] = serde_json::json!(u64::MAX);
                *run = Section::new("run", 1, &fields);
            },
            "section run of the saved state has a model of other memory",
        ),
    ];
    let mut source = in_the_middle(WriteConfig { passes: 20, ..WriteConfig::default() })?;
    for (what, change, expected) in faults {
        let mut sections = source.save()?;
        change(&mut sections);
        let mut target = like(&source)?;
        let said = target.restore(sections, ClockPolicy::Passes).err().map(|error| error.to_string());
        let right = said.as_ref().is_some_and(|said| said.contains(expected) && !said.contains('\n'));
        ensure(right, || format!("{what}: it says {said:?}, not {expected:?}"))?;
        ensure(target.commit(false).is_err(), || format!("{what}: what was refused can be committed"))?;
    }
    Ok(())
}

fn get_msr(vcpu: &VcpuFd, index: u32) -> Result<u64, Failed> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }])?;
    ensure(vcpu.get_msrs(&mut msrs)? == 1, || format!("MSR {index:#x} cannot be read"))?;
    Ok(msrs.as_slice()[0].data)
}

fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) -> Result<(), Failed> {
    let msrs = Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }])?;
    ensure(vcpu.set_msrs(&msrs)? == 1, || format!("MSR {index:#x} cannot be set to {data:#x}"))
}

/// A PC whose guest spins. It is paused.
fn paused(change: impl FnOnce(&mut machine::Config)) -> Result<Pc, Failed> {
    let mut pc = Pc::boot(&Code::default().spin().elf64(), change)?;
    pc.machine.start()?;
    pc.machine.pause()?;
    Ok(pc)
}

/// A PC with the state of `source`, not yet committed.
fn restored(source: &mut Pc) -> Result<Pc, Failed> {
    let mut target = Pc::like(source.machine.describe(), |_| ())?;
    let sections = source.machine.save()?;
    copy(&source.machine.memory(), &target.machine.memory())?;
    target.machine.restore(sections, ClockPolicy::Passes)?;
    Ok(target)
}

/// A device has raised an interrupt, but KVM has not injected it when the local APIC is saved. It
/// must be raised again in the target. A timer that waits for a TSC value must wait for the same
/// value there.
fn interrupts_stay(irqchip: Mode) -> Result<(), Failed> {
    const TSC_DEADLINE: u32 = 0x6e0;
    const VECTOR: u8 = 0x24;
    let mut source = paused(|config| config.irqchip = irqchip)?;
    unmask(&source, 4, VECTOR)?;
    let machine = &source.machine;
    // Enables the receive interrupt, and sends a byte.
    machine.serial.write(1, &[1]);
    machine.serial.receive(b"x");
    let far = machine.vcpus[0].with(move |fd| -> Result<u64, Failed> {
        let mut lapic = fd.get_lapic()?;
        let mut set = |at: usize, value: u32| {
            lapic.regs[at..at + 4].iter_mut().zip(value.to_le_bytes()).for_each(|(to, byte)| *to = byte as _);
        };
        // The APIC is enabled, nothing is requested, and the timer is in deadline mode.
        set(0xf0, 0x1ff);
        (0x200..0x280).step_by(0x10).for_each(|at| set(at, 0));
        set(0x320, 0x4_0030);
        fd.set_lapic(&lapic)?;
        let far = get_msr(fd, 0x10)? + (1 << 45);
        set_msr(fd, TSC_DEADLINE, far)?;
        Ok(far)
    })??;
    // KVM may have injected the first request already. The test does not depend on that.
    let sections = source.machine.save()?;
    let mut target = Pc::like(source.machine.describe(), |_| ())?;
    target.machine.restore(without_requests(sections)?, ClockPolicy::Passes)?;
    is_requested(&target, VECTOR, "the serial port's interrupt is requested")?;
    let vcpu = &target.machine.vcpus[0];
    let deadline = vcpu.with(|fd| get_msr(fd, TSC_DEADLINE))??;
    ensure(deadline == far, || format!("the deadline {far:#x} became {deadline:#x}"))
}

/// Unmasks a pin of the I/O APIC, edge triggered, to vCPU 0.
fn unmask(pc: &Pc, pin: u8, vector: u8) -> Result<(), Failed> {
    match pc.machine.irqchip.ioapic() {
        Some(ioapic) => {
            let register = 0x10 + 2 * u32::from(pin);
            for (register, value) in [(register + 1, 0u32), (register, vector.into())] {
                ioapic.write(0, &register.to_le_bytes());
                ioapic.write(0x10, &value.to_le_bytes());
            }
        }
        None => {
            let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
            pc.machine.vm.fd.get_irqchip(&mut chip)?;
            // SAFETY: this chip is the I/O APIC, and it may have any content.
            unsafe { chip.chip.ioapic.redirtbl[usize::from(pin)].bits = vector.into() };
            pc.machine.vm.fd.set_irqchip(&chip)?;
        }
    }
    Ok(())
}

/// Waits until the local APIC of vCPU 0 has a request for `vector`.
fn is_requested(pc: &Pc, vector: u8, what: &str) -> Result<(), Failed> {
    let (word, bit) = (0x200 + 0x10 * usize::from(vector / 32) + usize::from(vector % 32 / 8), vector % 8);
    eventually(faults::limit(), what, || {
        let lapic = pc.machine.vcpus[0].with(move |fd| fd.get_lapic())??;
        Ok((lapic.regs[word] as u8 & 1 << bit != 0).then_some(()))
    })
}

/// A machine that moves keeps its VM generation ID. A machine that is restored gets a new one in
/// guest memory, and its guest is notified.
#[test(kvm())]
fn a_restored_pc_has_another_generation_id_and_is_told() -> Result<(), Failed> {
    const VECTOR: u8 = 0x25;
    let id = |pc: &Pc| pc.machine.vm.memory.guest.read_obj::<[u8; 16]>(GuestAddress(layout::VMGENID));
    for irqchip in [Mode::Split, Mode::Kernel] {
        let mut source = paused(|config| config.irqchip = irqchip)?;
        unmask(&source, 9, VECTOR)?;
        enable_lapic(&source)?;
        let sections = source.machine.save()?;
        let mut seen = vec![id(&source)?];
        ensure(seen[0] != [0; 16], || "it has no ID".into())?;
        for renew in [false, true, true] {
            let mut target = Pc::like(source.machine.describe(), |_| ())?;
            copy(&source.machine.memory(), &target.machine.memory())?;
            target.machine.restore(sections.clone(), ClockPolicy::Passes)?;
            target.machine.commit(false)?;
            ensure(id(&target)? == seen[0], || "it has another ID without being restored".into())?;
            if renew {
                target.machine.renew()?;
                let id = id(&target)?;
                ensure(!seen.contains(&id), || format!("it has the ID of another: {id:x?}"))?;
                seen.push(id);
                is_requested(&target, VECTOR, "the guest is told")?;
            }
        }
    }
    Ok(())
}

/// Older versions made machines without a generation ID. Such a machine has none after a restore,
/// and machines made from it have none either.
#[test(kvm())]
fn a_pc_without_a_generation_id_stays_without() -> Result<(), Failed> {
    let mut source = paused(|config| config.vmgenid = None)?;
    let described = source.machine.describe();
    ensure(described.get("vmgenid").is_none(), || described.to_string())?;
    let mut target = restored(&mut source)?;
    target.machine.commit(false)?;
    target.machine.renew()?;
    ensure(target.machine.describe().get("vmgenid").is_none(), || "it has one".into())?;
    let page = target.machine.vm.memory.guest.read_obj::<[u8; 16]>(GuestAddress(layout::VMGENID))?;
    ensure(page == [0; 16], || format!("{page:x?} in its memory"))
}

/// Enables the local APIC of vCPU 0, with nothing requested.
fn enable_lapic(pc: &Pc) -> Result<(), Failed> {
    pc.machine.vcpus[0].with(|fd| -> Result<(), Failed> {
        let mut lapic = fd.get_lapic()?;
        for (at, byte) in (0xf0..).zip(0x1ffu32.to_le_bytes()) {
            lapic.regs[at] = byte as _;
        }
        Ok(fd.set_lapic(&lapic)?)
    })?
}

/// Removes all requests from the saved local APICs.
fn without_requests(mut sections: Vec<Section>) -> Result<Vec<Section>, Failed> {
    for section in sections.iter_mut().filter(|section| section.name.starts_with("vcpu")) {
        let mut fields: serde_json::Value = serde_json::from_slice(&section.body)?;
        let lapic = fields["lapic"].as_array_mut().ok_or("it has no local APIC")?;
        lapic[0x200..0x280].fill(0.into());
        section.body = serde_json::to_vec(&fields)?;
    }
    Ok(sections)
}

/// Needs a KVM that keeps the TSC offset that was set. A KVM that gives guests the host's own TSC
/// has no offset.
fn tsc_offsets() -> Need {
    let kept = || -> Result<bool, vellum_kvm::vm::Error> {
        let kvm = vellum_kvm::vm::open()?;
        let memory = Memory::map(layout::RAM, MemoryConfig::new(1 << 20))?;
        let vcpu = Vm::new(&kvm, memory)?.create_vcpu(0)?;
        Ok(set_tsc_offset(&vcpu, 1 << 40).is_ok() && tsc_offset(&vcpu).is_ok_and(|offset| offset == 1 << 40))
    };
    match kept() {
        Ok(true) => Ok(()),
        Ok(false) => Err("needs a KVM that keeps a TSC's offset".into()),
        Err(error) => Err(format!("needs KVM: {error}")),
    }
}

fn tsc(pc: &Pc, vcpu: usize) -> Result<Tsc, Failed> {
    Ok(pc.machine.vcpus[vcpu].with(Tsc::save)??)
}

/// The ticks that should have passed since `was`, the ticks that did pass up to `is`, and the ticks
/// in a second.
fn ticks(pc: &Pc, was: Tsc, is: Tsc) -> Result<[u128; 3], Failed> {
    let khz = pc.machine.description().tsc_khz.ok_or("this KVM does not tell a TSC's frequency")?;
    let due = u128::from(is.realtime - was.realtime) * u128::from(khz) / 1_000_000;
    Ok([due, u128::from(is.value.wrapping_sub(was.value)), u128::from(khz) * 1000])
}

#[test(kvm())]
fn clocks_go_on() -> Result<(), Failed> {
    const HOUR: u64 = 3600 * 1_000_000_000;
    let mut source = paused(|_| ())?;
    let thousand = Clock { nanoseconds: 1000 * HOUR, realtime: 0, host_tsc: None };
    thousand.restore(&source.machine.vm.fd, ClockPolicy::Stands)?;
    let was = tsc(&source, 0)?;
    let target = restored(&mut source)?;
    let is = tsc(&target, 0)?;
    // A busy host may take up to a second between two reads.
    let [due, ticks, second] = ticks(&target, was, is)?;
    ensure(ticks.abs_diff(due) < second, || format!("{was:?} became {is:?}"))?;
    let clock = Clock::save(&target.machine.vm.fd)?;
    ensure((1000 * HOUR..1001 * HOUR).contains(&clock.nanoseconds), || format!("{clock:?}"))
}

/// The errors of a clock in each move must not add up. No clock may go back.
#[test(kvm())]
fn a_clock_is_right_after_twenty_moves() -> Result<(), Failed> {
    const MAX_STEPS: u64 = 50_000_000;
    let read = |pc: &Pc| Ok::<_, Failed>(Clock::save(&pc.machine.vm.fd)?.nanoseconds);
    let mut pc = paused(|_| ())?;
    let (before, first) = (Instant::now(), read(&pc)?);
    let within = Instant::now();
    let mut last = first;
    for hop in 1..=20 {
        let mut next = restored(&mut pc)?;
        next.machine.commit(false)?;
        next.machine.start()?;
        next.machine.pause()?;
        let now = read(&next)?;
        ensure(now > last, || format!("move {hop}: it went from {last} back to {now}"))?;
        (last, pc) = (now, next);
    }
    let after = Instant::now();
    let last = read(&pc)?;
    let (least, most) = ((after - within).as_nanos() as u64, before.elapsed().as_nanos() as u64);
    let passed = last - first;
    eprintln!("{passed} ns passed there, {least} to {most} here");
    ensure((least.saturating_sub(MAX_STEPS)..=most + MAX_STEPS).contains(&passed), || {
        format!("{passed} ns passed there, {least} to {most} here")
    })
}

#[test(tsc_offsets())]
fn tscs_stay_as_far_from_each_other_as_they_were() -> Result<(), Failed> {
    /// How many ticks the TSC of each vCPU is ahead of the host's.
    const AHEAD: [u64; 2] = [1 << 41, 1 << 40];
    let mut source = paused(|config| config.cpus = 2)?;
    for (vcpu, ahead) in source.machine.vcpus.iter().zip(AHEAD) {
        vcpu.with(move |fd| set_tsc_offset(fd, ahead))??;
    }
    let was = tsc(&source, 0)?;
    let target = restored(&mut source)?;
    let [first, second] = [tsc(&target, 0)?, tsc(&target, 1)?];
    let [due, ticks, a_second] = ticks(&target, was, first)?;
    ensure(ticks.abs_diff(due) < a_second, || format!("{was:?} became {first:?}"))?;
    let apart = |tsc: Tsc| tsc.offset.unwrap_or(0);
    let apart = apart(first).wrapping_sub(apart(second));
    ensure(apart == AHEAD[0] - AHEAD[1], || format!("they are {apart} ticks apart"))
}

/// Before the commit, the other process may still run on the restored memory.
#[test(kvm())]
fn kvm_writes_to_memory_after_the_commit_alone() -> Result<(), Failed> {
    const MSR_KVM_WALL_CLOCK_NEW: u32 = 0x4b56_4d00;
    const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
    const WALL: u64 = 0x18_0000;
    const TIME: u64 = 0x18_1000;
    let mut source = paused(|_| ())?;
    source.machine.vcpus[0].with(|fd| {
        set_msr(fd, MSR_KVM_WALL_CLOCK_NEW, WALL)?;
        set_msr(fd, MSR_KVM_SYSTEM_TIME_NEW, TIME | 1)
    })??;
    let wall = |pc: &Pc| pc.machine.vm.memory.guest.read_obj::<[u8; 12]>(GuestAddress(WALL));
    ensure(wall(&source)? != [0; 12], || "KVM did not write the wall clock".into())?;
    source.machine.vm.memory.guest.write_obj([0u8; 12], GuestAddress(WALL))?;
    let mut target = restored(&mut source)?;
    ensure(wall(&target)? == [0; 12], || "it was written before the commit".into())?;
    target.machine.commit(false)?;
    ensure(wall(&target)? != [0; 12], || "it was forgotten".into())?;
    let time = target.machine.vcpus[0].with(|fd| get_msr(fd, MSR_KVM_SYSTEM_TIME_NEW))??;
    ensure(time == TIME | 1, || format!("the system time's page is {time:#x}"))
}

/// KVM_KVMCLOCK_CTRL itself writes nothing. The flag is in the guest's clock page after the guest
/// is entered again: after a pause, and in the target of a restore.
#[test(kvm())]
fn a_guest_is_told_that_it_stood_still() -> Result<(), Failed> {
    const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
    const TIME: u64 = 0x18_1000;
    /// The offset of the flags in `struct pvclock_vcpu_time_info`, and PVCLOCK_GUEST_STOPPED
    /// (Documentation/virt/kvm/x86/msr.rst).
    const FLAGS: GuestAddress = GuestAddress(TIME + 29);
    const STOPPED: u8 = 1 << 1;
    let mut source = paused(|_| ())?;
    source.machine.vcpus[0].with(|fd| set_msr(fd, MSR_KVM_SYSTEM_TIME_NEW, TIME | 1))??;
    let told = |pc: &Pc| -> Result<(), Failed> {
        let flags = || pc.machine.vm.memory.guest.read_obj::<u8>(FLAGS);
        let limit = faults::limit();
        eventually(limit, "the flag is set", || Ok((flags()? & STOPPED != 0).then_some(())))
    };
    source.machine.start()?;
    told(&source)?;
    source.machine.pause()?;
    // A guest that has seen the flag clears it.
    source.machine.vm.memory.guest.write_obj(0u8, FLAGS)?;
    let mut target = restored(&mut source)?;
    target.machine.commit(false)?;
    target.machine.start()?;
    told(&target)
}

/// Moving a machine opens nothing new: main and the vCPU threads do everything in their sandboxes.
#[test(kvm())]
fn the_sandbox_allows_all_of_it() -> Result<(), Failed> {
    // A separate thread, because it stays confined, as do the threads that it starts. None of them
    // can remove its files.
    let mut files = vec![written(&[0; 512])?, written(&Code::default().spin().elf64())?];
    let confined = |files: &mut Vec<PathBuf>| -> Result<(), Failed> {
        let (disk, kernel) = (files[0].clone(), files[1].clone());
        let devices = |config: &mut machine::Config| {
            config.cpus = 2;
            config.virtio.0.push(Arc::new(BlkConfig::new(disk.clone())));
        };
        let described = paused(devices)?.machine.describe();
        let mut image = Image::open(BootConfig::new(kernel))?;
        let (source, said) = Pc::board(devices)?;
        files.push(said);
        let entry = source.boot(&mut image)?;
        let source_serial = source.open_serial()?;
        let (target, said, origin) = Pc::board_like(described, devices)?;
        files.push(said);
        let target_serial = target.open_serial()?;
        let mut sandbox = Sandbox::new(sandbox::Mode::On);
        sandbox.process()?;
        let mut source = source.start(Origin::Boot(&entry), source_serial, sandbox)?;
        let mut target = target.start(origin, target_serial, sandbox)?;
        sandbox.enter(ThreadKind::Main, "main")?;
        source.start()?;
        source.pause()?;
        for method in [Method::Bitmap, Method::InitiallySet, Method::ManualProtect] {
            let mut tracker = source.track(method)?;
            tracker.enable(true)?;
            tracker.collect()?;
            tracker.enable(false)?;
        }
        hand_over(&mut source, &mut target, |sections| sections)?;
        let refused = source.retake().err().map(|error| error.to_string());
        ensure(refused.is_some_and(|said| said.contains("in use")), || "the disk has two writers".into())?;
        target.pause()?;
        target.release();
        source.retake()?;
        Ok(())
    };
    let ended = std::thread::scope(|scope| scope.spawn(|| confined(&mut files)).join());
    files.iter().try_for_each(std::fs::remove_file)?;
    ended.map_err(|_| "it panicked")?
}
