//! Kernels of a few bytes on real KVM: every boot protocol up to a byte on the serial port, and
//! every way in which a guest ends.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde_json::{Value, json};
use support::faults;
use support::guests::Code;
use support::hosts::kvm;
use support::{Failed, LIMIT, Tests, ensure, eventually, test};
use vellum::session;
use vellum::session::kernel::{Outcome, Ready};
use vellum_devices::console::Target;
use vellum_kvm::arch::clocks::{Clock, ClockPolicy};
use vellum_kvm::arch::irqchip::Mode;
use vellum_kvm::arch::state::{Context, State};
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux::{self as machine, BootConfig};
use vellum_machine::Machine;
use vm_memory::{Bytes, GuestAddress};

fn main() -> ExitCode {
    faults::plant();
    let mut tests = Tests::from_args();
    let mut case = |name: &str, image: Vec<u8>, irqchip, says: &'static str, exit: Exit| {
        tests.add(name, kvm(), move || {
            let (outcome, said) = boot(&image, |config, _| config.irqchip = irqchip)?;
            ensure(said == says, || format!("it said {said:?}, not {says:?}"))?;
            ensure(outcome.exit == exit, || format!("it ended by {:?}, not {exit:?}", outcome.exit))?;
            let failed = matches!(exit, Exit::Panic | Exit::TripleFault | Exit::Kvm);
            let trace = outcome.ended.and_then(|(_, ended)| ended.trace);
            ensure(trace.is_some() == failed, || format!("registers and last exits: {trace:?}"))
        });
    };
    let code = || Code::default().print("V");
    for (name, irqchip) in [("split", Mode::Split), ("kernel", Mode::Kernel)] {
        let done = code().power_off();
        case(&format!("elf64_says_a_byte_{name}_irqchip"), done.elf64(), irqchip, "V", Exit::PowerOff);
        case(&format!("pvh_says_a_byte_{name}_irqchip"), done.pvh(), irqchip, "V", Exit::PowerOff);
        case(
            &format!("multiboot_says_a_byte_{name}_irqchip"),
            done.multiboot(),
            irqchip,
            "V",
            Exit::PowerOff,
        );
    }
    case("reset_by_the_keyboard_controller", code().out(0x64, 0xfe).elf64(), Mode::Split, "V", Exit::Reset);
    case("panic_by_pvpanic", code().out(0x505, 1).elf64(), Mode::Split, "V", Exit::Panic);
    // lidt [rip + 2]; ud2; an IDT without a single gate.
    let fault = code().bytes(&[0x0f, 0x01, 0x1d, 2, 0, 0, 0, 0x0f, 0x0b]).bytes(&[0; 10]);
    case("triple_fault", fault.elf64(), Mode::Split, "V", Exit::TripleFault);
    let test_passes = code().out(0xf4, 0);
    case("multiboot_ends_by_the_debug_port", test_passes.multiboot(), Mode::Split, "V", Exit::Guest(1));
    // Only multiboot guests have that port. This guest goes on.
    case("others_have_no_debug_port", test_passes.power_off().elf64(), Mode::Split, "V", Exit::PowerOff);
    tests.add("planted_no-mtrrs_is_caught", kvm(), || {
        faults::caught("no-mtrrs", "every_part_of_a_vcpu_moves", "MTRRs are missing")
    });
    tests.run()
}

#[test(kvm())]
fn a_timeout_ends_a_guest_that_spins() -> Result<(), Failed> {
    let limit = Duration::from_millis(50);
    let outcome = build(&code_that_spins().elf64(), limit, |_, _| ())?.0.run()?;
    ensure(outcome.exit == Exit::Timeout, || format!("{:?}", outcome.exit))
}

#[test(kvm())]
fn two_vcpus_of_which_one_waits() -> Result<(), Failed> {
    let image = Code::default().print("2").power_off().elf64();
    let (outcome, said) = boot(&image, |config, _| config.cpus = 2)?;
    ensure((said.as_str(), outcome.exit) == ("2", Exit::PowerOff), || format!("{said:?} {outcome:?}"))
}

fn code_that_spins() -> Code {
    Code::default().spin()
}

/// mov esi, [rbx + 24] (`hvm_start_info.cmdline_paddr`); then lodsb, out to the serial port, until
/// a NUL.
#[test(kvm())]
fn the_command_line_reaches_a_pvh_guest() -> Result<(), Failed> {
    let code = Code::default()
        .bytes(&[0x8b, 0x73, 24, 0x66, 0xba, 0xf8, 0x03])
        .bytes(&[0xac, 0x84, 0xc0, 0x74, 3, 0xee, 0xeb, 0xf8])
        .power_off();
    let (_, said) = boot(&code.pvh(), |_, boot| boot.cmdline = "hello, guest".into())?;
    ensure(said == "hello, guest", || format!("it said {said:?}"))
}

/// Much longer than any of these guests takes.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);

fn build(
    image: &[u8],
    limit: Duration,
    change: impl FnOnce(&mut machine::Config, &mut BootConfig),
) -> Result<(Ready, PathBuf), Failed> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("boot-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let base = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (kernel, serial) = (base.with_extension("elf"), base.with_extension("serial"));
    std::fs::write(&kernel, image)?;
    let mut config = machine::Config { serial: Target::File(serial.clone()), ..machine::Config::default() };
    let mut boot = BootConfig::new(kernel.clone());
    change(&mut config, &mut boot);
    let process = session::Config { limit: Some(limit), ..session::Config::default() };
    let ready = session::kernel::ready(&process, MemoryConfig::new(16 << 20), config, boot, None)?;
    std::fs::remove_file(kernel)?;
    Ok((ready, serial))
}

/// Runs `image` to its end. Returns also its output.
fn boot(
    image: &[u8],
    change: impl FnOnce(&mut machine::Config, &mut BootConfig),
) -> Result<(Outcome, String), Failed> {
    let (ready, serial) = build(image, BOOT_TIMEOUT, change)?;
    let outcome = ready.run()?;
    let said = std::fs::read_to_string(&serial)?;
    std::fs::remove_file(serial)?;
    Ok((outcome, said))
}

const MTRRS: [(u32, u64); 3] = [(0x250, 0x0606_0606_0606_0606), (0x200, 0xc000_0000), (0x2ff, 0xc06)];

fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) -> Result<(), Failed> {
    let msrs = Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }])?;
    ensure(vcpu.set_msrs(&msrs)? == 1, || format!("MSR {index:#x} cannot be set to {data:#x}"))
}

#[test(kvm())]
fn the_clock_goes_on_in_another_machine() -> Result<(), Failed> {
    const HOUR: u64 = 3600 * 1_000_000_000;
    let image = code_that_spins().elf64();
    let (source, said) = build(&image, BOOT_TIMEOUT, |_, _| ())?;
    std::fs::remove_file(said)?;
    let (destination, said) = build(&image, BOOT_TIMEOUT, |_, _| ())?;
    std::fs::remove_file(said)?;
    let [source, destination] = [source, destination].map(|ready| ready.machine.machine.vm.fd.clone());
    let start = Clock { nanoseconds: 1000 * HOUR, realtime: 0, host_tsc: None };
    start.restore(&source, ClockPolicy::Stands)?;
    let saved = Clock::save(&source)?;
    saved.restore(&destination, ClockPolicy::Stands)?;
    let arrived = Clock::save(&destination)?;
    let goes_on = saved.nanoseconds..saved.nanoseconds + HOUR;
    ensure(saved.nanoseconds >= start.nanoseconds && goes_on.contains(&arrived.nanoseconds), || {
        format!("{saved:?} became {arrived:?}")
    })?;
    // An hour between saving and restoring passes for the guest, or it does not, depending on the
    // policy.
    let earlier = Clock { realtime: saved.realtime - HOUR, ..saved };
    for (meanwhile, passed) in [(ClockPolicy::Passes, HOUR), (ClockPolicy::Stands, 0)] {
        earlier.restore(&destination, meanwhile)?;
        let now = Clock::save(&destination)?.nanoseconds;
        let expected = saved.nanoseconds + passed;
        ensure((expected..expected + HOUR).contains(&now), || format!("{meanwhile:?}: {now} of {expected}"))?;
    }
    // If this host's clock is behind the other's, no time passes, and the guest's clock does not go
    // back.
    Clock { realtime: saved.realtime + 9000 * HOUR, ..saved }.restore(&destination, ClockPolicy::Passes)?;
    let now = Clock::save(&destination)?.nanoseconds;
    ensure((saved.nanoseconds..saved.nanoseconds + HOUR).contains(&now), || format!("{saved:?}: {now}"))
}

#[test(kvm())]
fn a_guest_with_kvmclock_is_told_that_it_stood_still() -> Result<(), Failed> {
    /// The address of the guest's clock page, a `struct pvclock_vcpu_time_info`. Its flags are the
    /// 30th byte.
    const PAGE: u64 = 0x18_0000;
    const FLAGS: u64 = PAGE + 29;
    const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
    const GUEST_STOPPED: u8 = 1 << 1;
    let (ready, said) = build(&code_that_spins().elf64(), BOOT_TIMEOUT, |_, _| ())?;
    std::fs::remove_file(said)?;
    let mut machine = ready.machine.machine;
    machine.start()?;
    machine.pause()?;
    machine.vcpus[0].with(|fd| set_msr(fd, MSR_KVM_SYSTEM_TIME_NEW, PAGE | 1))??;
    let memory = machine.vm.memory.guest.clone();
    let flags = move || memory.read_obj::<u8>(GuestAddress(FLAGS));
    ensure(flags()? & GUEST_STOPPED == 0, || "it has been told already".into())?;
    machine.resume();
    eventually(LIMIT, "the guest is told", || Ok((flags()? & GUEST_STOPPED != 0).then_some(())))
}

/// An MSR that no hypervisor has: between those of KVM and those of Hyper-V.
const UNKNOWN_MSR: u32 = 0x1234_5678;

/// State that a few bytes of guest code would not show: debug and vector registers, the local APIC,
/// pending events.
#[test(kvm())]
fn every_part_of_a_vcpu_moves() -> Result<(), Failed> {
    let image = code_that_spins().elf64();
    let kvm = vellum_kvm::vm::open()?;
    let (source, said) = build(&image, BOOT_TIMEOUT, |_, _| ())?;
    let source = source.machine.machine;
    std::fs::remove_file(said)?;
    let context = Context::new(&kvm, &source.vm.fd, true)?;
    let saved = source.vcpus[0].with(move |fd| -> Result<State, Failed> {
        let mut debug = fd.get_debug_regs()?;
        (debug.db[0], debug.db[3]) = (0x1234, 0x5678);
        fd.set_debug_regs(&debug)?;
        let mut lapic = fd.get_lapic()?;
        // The timer's divide configuration, and the vector and mask of its local interrupt 1.
        (lapic.regs[0x3e0], lapic.regs[0x360]) = (0xb, 0x42);
        fd.set_lapic(&lapic)?;
        let mut events = fd.get_vcpu_events()?;
        events.nmi.masked = 1;
        fd.set_vcpu_events(&events)?;
        let mut xsave = fd.get_xsave()?;
        // XMM0, and its component in XSTATE_BV.
        xsave.region[40] = 0xabcd;
        xsave.region[128] |= 2;
        // SAFETY: no dynamic feature is on, so that the area has the size of this structure.
        unsafe { fd.set_xsave(&xsave)? };
        // The first fixed MTRR and the first variable one, and both kinds enabled.
        for (index, value) in MTRRS {
            set_msr(fd, index, value)?;
        }
        Ok(State::save(fd, &context)?)
    })??;
    let (destination, said) = build(&image, BOOT_TIMEOUT, |_, _| ())?;
    let destination = destination.machine.machine;
    std::fs::remove_file(said)?;
    let context = Context::new(&kvm, &destination.vm.fd, true)?;
    // An MSR that another kernel lists and this one does not have is no loss to the guest if it was
    // zero.
    let ignored = std::fs::read_to_string("/sys/module/kvm/parameters/ignore_msrs");
    let kept = ignored.is_ok_and(|ignored| ignored.trim() == "N");
    for (value, fits) in [(0, true), (1, !kept)] {
        let mut other = serde_json::to_value(&saved)?;
        other["msrs"].as_array_mut().ok_or("no MSRs")?.push(json!([UNKNOWN_MSR, value]));
        let other: State = serde_json::from_value(other)?;
        let context = Context::new(&kvm, &destination.vm.fd, true)?;
        let restored = destination.vcpus[0].with(move |fd| {
            let onward = other.onward(fd, &context, ClockPolicy::Passes)?;
            other.restore(fd, &context, onward, ClockPolicy::Passes)
        })?;
        ensure(restored.is_ok() == fits, || format!("an unknown MSR of {value}: {restored:?}"))?;
    }
    let copy = saved.clone();
    let arrived = destination.vcpus[0].with(move |fd| {
        let onward = copy.onward(fd, &context, ClockPolicy::Passes)?;
        copy.restore(fd, &context, onward, ClockPolicy::Passes)?;
        State::save(fd, &context)
    })??;
    let (saved, arrived) = (serde_json::to_value(saved)?, serde_json::to_value(arrived)?);
    let set = saved["xsave"][40] == 0xabcd;
    ensure(set, || format!("the vector register was never set: {}", saved["xsave"]))?;
    let has = |msr: &(u32, u64)| saved["msrs"].as_array().is_some_and(|all| all.contains(&json!(msr)));
    ensure(MTRRS.iter().all(has), || format!("MTRRs are missing: {}", saved["msrs"]))?;
    let mtrrs = |state: &Value| -> Vec<Value> {
        let of = |msr: &&Value| msr[0].as_u64().is_some_and(|index| (0x200..0x300).contains(&index));
        state["msrs"].as_array().into_iter().flatten().filter(of).cloned().collect()
    };
    ensure(mtrrs(&saved) == mtrrs(&arrived), || format!("MTRRs became {:?}", mtrrs(&arrived)))?;
    for part in ["cpuid", "mp_state", "regs", "sregs", "xcrs", "xsave", "debugregs", "lapic", "events"] {
        ensure(saved[part] == arrived[part], || format!("{part}: {} became {}", saved[part], arrived[part]))?;
    }
    Ok(())
}
