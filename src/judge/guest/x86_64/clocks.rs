//! Checks kvmclock and the local APIC's timer of each processor.

use super::{Service, address, cpuid, fired_address, load, now, out, read_msr, service, store, write_msr};
use crate::report::{Kind, fault};
use crate::schedule::MAX_VCPUS;
use crate::{Patience, Shared};

/// KVM_FEATURE_CLOCKSOURCE2 (arch/x86/include/uapi/asm/kvm_para.h in Linux), and its MSR.
const CLOCKSOURCE2: u32 = 1 << 3;
const MSR_SYSTEM_TIME: u32 = 0x4b56_4d01;
/// A step back of this many nanoseconds is not a fault. KVM sometimes sets a new base for the
/// clock, from a host clock that is slewed.
const SLACK: u64 = 1_000_000;

const APIC_BASE: u32 = 0x1b;
const SPURIOUS: u64 = 0xf0;
const TIMER: u64 = 0x320;
const INITIAL: u64 = 0x380;
const CURRENT: u64 = 0x390;
const DIVIDE: u64 = 0x3e0;
const MASKED: u32 = 1 << 16;
const VECTOR: u32 = 0x20;
/// The milliseconds from setting the timer to its interrupt.
const SHOT: u64 = 20;

/// `struct pvclock_vcpu_time_info`, which KVM writes for each processor.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct SystemTime {
    version: u32,
    padding: u32,
    tsc: u64,
    nanoseconds: u64,
    multiplier: u32,
    shift: i8,
    flags: u8,
    rest: [u8; 34],
}

const NO_TIME: SystemTime = SystemTime {
    version: 0,
    padding: 0,
    tsc: 0,
    nanoseconds: 0,
    multiplier: 0,
    shift: 0,
    flags: 0,
    rest: [0; 34],
};

#[unsafe(link_section = ".bss.live")]
static TIMES: Shared<[SystemTime; MAX_VCPUS]> = Shared::new([NO_TIME; MAX_VCPUS]);

/// The last values of a processor's clock and timer.
#[derive(Clone, Copy)]
struct Readings {
    nanoseconds: u64,
    interrupts: u64,
    deadline: u64,
    patience: Patience,
}

#[unsafe(link_section = ".bss.live")]
static READINGS: Shared<[Readings; MAX_VCPUS]> =
    Shared::new([Readings { nanoseconds: 0, interrupts: 0, deadline: 0, patience: Patience::NONE }; MAX_VCPUS]);
/// The timer's ticks in [`SHOT`]. 0 without a timer.
#[unsafe(link_section = ".bss.sealed")]
static COUNT: Shared<u32> = Shared::new(0);
#[unsafe(link_section = ".bss.sealed")]
static HAS_CLOCK: Shared<bool> = Shared::new(false);

fn apic_write(base: u64, register: u64, value: u32) {
    match base >> 10 & 1 == 1 {
        true => write_msr(0x800 + (register >> 4) as u32, value.into()),
        false => store((base & 0xf_ffff_f000) + register, value),
    }
}

fn apic_read(base: u64, register: u64) -> u32 {
    match base >> 10 & 1 == 1 {
        true => read_msr(0x800 + (register >> 4) as u32) as u32,
        false => load((base & 0xf_ffff_f000) + register),
    }
}

/// Finds kvmclock and the timer, and measures the timer's frequency. Called on the first processor.
/// Returns whether each exists.
pub(crate) fn find_clocks(ticks: u64) -> (bool, bool) {
    let [_, b, c, d] = cpuid(0x4000_0000, 0);
    let is_kvm = [b, c, d] == [0x4b4d_564b, 0x564b_4d56, 0x4d] && cpuid(1, 0)[2] >> 31 == 1;
    let has_clock = is_kvm && cpuid(0x4000_0001, 0)[0] & CLOCKSOURCE2 != 0;
    // SAFETY: the others wait for GO.
    unsafe { *HAS_CLOCK.get() = has_clock };
    if cpuid(1, 0)[3] >> 9 & 1 == 0 {
        return (has_clock, false);
    }
    // Masks the interrupts of the 8259s.
    out(0x21, 0xff);
    out(0xa1, 0xff);
    let base = read_msr(APIC_BASE);
    apic_write(base, SPURIOUS, 0x1ff);
    apic_write(base, TIMER, MASKED | VECTOR);
    apic_write(base, DIVIDE, 0xb);
    apic_write(base, INITIAL, u32::MAX);
    let begun = now();
    while now() - begun < ticks / 100 {
        core::hint::spin_loop();
    }
    let passed = u32::MAX - apic_read(base, CURRENT);
    apic_write(base, INITIAL, 0);
    let count = (u64::from(passed) * SHOT / 10).min(u32::MAX.into()) as u32;
    // SAFETY: as above.
    unsafe { *COUNT.get() = count };
    (has_clock, count != 0)
}

/// Starts kvmclock and the timer on this processor.
pub(crate) fn start_clocks(cpu: u64) {
    // SAFETY: constant since `find_clocks`.
    let (has_clock, count) = unsafe { (*HAS_CLOCK.get(), *COUNT.get()) };
    if has_clock {
        write_msr(MSR_SYSTEM_TIME, time_address(cpu) | 1);
    }
    if count != 0 {
        let base = read_msr(APIC_BASE);
        let registers = if base >> 10 & 1 == 1 { 0 } else { base & 0xf_ffff_f000 };
        store(address!(local_apics) + 8 * cpu, registers);
        apic_write(base, SPURIOUS, 0x1ff);
        apic_write(base, DIVIDE, 0xb);
        apic_write(base, TIMER, VECTOR);
        shoot(cpu);
        service(Service::Interrupts, 0, 0);
    }
}

fn time_address(cpu: u64) -> u64 {
    TIMES.get() as u64 + size_of::<SystemTime>() as u64 * cpu
}

fn seen(cpu: u64) -> &'static mut Readings {
    // SAFETY: each processor has its own.
    unsafe { &mut (*READINGS.get())[cpu as usize & 7] }
}

/// Sets the timer for one interrupt after [`SHOT`].
pub(crate) fn shoot(cpu: u64) {
    let seen = seen(cpu);
    seen.interrupts = interrupts(cpu);
    seen.deadline = now() + crate::ticks() * SHOT / 1000;
    seen.patience = Patience::NONE;
    let registers = load::<u64>(address!(local_apics) + 8 * cpu);
    // SAFETY: constant since `find_clocks`.
    let count = unsafe { *COUNT.get() };
    apic_write(if registers == 0 { 1 << 10 } else { registers }, INITIAL, count);
}

/// The timer interrupts of this processor.
pub(crate) fn interrupts(cpu: u64) -> u64 {
    load(fired_address(cpu))
}

/// The timer interrupts of this processor before its last shot.
pub(crate) fn outstanding(cpu: u64) -> u64 {
    seen(cpu).interrupts
}

/// Checks kvmclock and the timer. `limit` is the largest step of the clock in nanoseconds. Returns
/// whether something is wrong.
pub(crate) fn look_at_clocks(cpu: u64, limit: u64) -> bool {
    // SAFETY: constant since `find_clocks`.
    let (has_clock, count) = unsafe { (*HAS_CLOCK.get(), *COUNT.get()) };
    let mut wrong = false;
    if has_clock {
        let (seen, now) = (seen(cpu), nanoseconds(cpu));
        let before = core::mem::replace(&mut seen.nanoseconds, now);
        let kind = if now + SLACK < before {
            Some(Kind::KvmclockBack)
        } else if before != 0 && now.saturating_sub(before) > limit {
            Some(Kind::KvmclockJump)
        } else {
            None
        };
        if let Some(kind) = kind {
            fault(kind, cpu, time_address(cpu), before, now);
            wrong = true;
        }
    }
    if count != 0 {
        let seen = seen(cpu);
        let interrupts = interrupts(cpu);
        if interrupts != seen.interrupts {
            shoot(cpu);
        } else if now() > seen.deadline && seen.patience.is_over() {
            fault(Kind::Timer, cpu, fired_address(cpu), interrupts + 1, interrupts);
            shoot(cpu);
            wrong = true;
        }
    }
    wrong
}

/// Reads kvmclock like Linux's __pvclock_read_cycles().
fn nanoseconds(cpu: u64) -> u64 {
    loop {
        let time = load::<SystemTime>(time_address(cpu));
        let passed = now().wrapping_sub(time.tsc);
        if time.version & 1 == 0 && load::<u32>(time_address(cpu)) == time.version {
            let shifted = if time.shift < 0 { passed >> -time.shift } else { passed << time.shift };
            let scaled = u128::from(shifted) * u128::from(time.multiplier) >> 32;
            return time.nanoseconds.wrapping_add(scaled as u64);
        }
        core::hint::spin_loop();
    }
}
