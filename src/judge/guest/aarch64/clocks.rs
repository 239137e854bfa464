//! Checks the virtual timer of each processor, by its interrupt from a GICv2 or GICv3.

use core::arch::asm;

use super::boot::boot_of;
use super::processors::own_affinity;
use super::{address, fired_address, load, now, store};
use crate::dtb::Gic;
use crate::report::{Kind, fault};
use crate::schedule::MAX_VCPUS;
use crate::{Patience, Shared};

/// The milliseconds from setting the timer to its interrupt.
const SHOT: u64 = 20;
/// Registers of the distributor (Arm GIC Architecture Specification). Those of private interrupts
/// have these offsets in the second half of a redistributor, too.
const CONTROL: u64 = 0;
const GROUP: u64 = 0x80;
const ENABLE: u64 = 0x100;
const PRIORITY: u64 = 0x400;
/// Registers of a redistributor: GICR_TYPER and GICR_WAKER.
const TYPER: u64 = 8;
const WAKER: u64 = 0x14;
/// Registers of GICv2's processor interface.
const CPU_CONTROL: u64 = 0;
const CPU_MASK: u64 = 4;

/// The last values of a processor's timer.
#[derive(Clone, Copy)]
struct Readings {
    interrupts: u64,
    deadline: u64,
    patience: Patience,
}

#[unsafe(link_section = ".bss.live")]
static READINGS: Shared<[Readings; MAX_VCPUS]> =
    Shared::new([Readings { interrupts: 0, deadline: 0, patience: Patience::NONE }; MAX_VCPUS]);
#[unsafe(link_section = ".bss.sealed")]
static HAS_TIMER: Shared<bool> = Shared::new(false);

/// Finds the timer and the GIC. Called on the first processor. There is no kvmclock on Arm.
pub(crate) fn find_clocks(_ticks: u64) -> (bool, bool) {
    let tree = &boot_of().tree;
    let (Some(gic), Some(interrupt)) = (&tree.gic, tree.timer) else { return (false, false) };
    store(address!(timer_interrupt), u64::from(interrupt));
    match gic {
        Gic::V2 { distributor, cpu } => {
            store(address!(gic_cpu), *cpu);
            store(distributor + CONTROL, 1u32);
        }
        // Affinity routing, and both groups.
        Gic::V3 { distributor, .. } => store(distributor + CONTROL, 0x13u32),
    }
    // SAFETY: the others wait for GO.
    unsafe { *HAS_TIMER.get() = true };
    (false, true)
}

/// Starts the timer on this processor.
pub(crate) fn start_clocks(cpu: u64) {
    let tree = &boot_of().tree;
    let (Some(gic), Some(interrupt)) = (&tree.gic, tree.timer) else { return };
    match gic {
        Gic::V2 { distributor, cpu } => {
            enable(*distributor, interrupt);
            store(cpu + CPU_MASK, 0xffu32);
            store(cpu + CPU_CONTROL, 1u32);
        }
        Gic::V3 { redistributors, .. } => {
            let own = own_affinity();
            let own = (own >> 32 << 24 | own & 0xff_ffff) as u32;
            let Some(base) = redistributors.iter().find_map(|range| redistributor(range.start, range.end, own)) else {
                return fault(Kind::Timer, cpu, 0, u64::from(own), 0);
            };
            store(base + WAKER, load::<u32>(base + WAKER) & !2);
            let begun = now();
            while load::<u32>(base + WAKER) & 4 != 0 && now() - begun < crate::ticks() {
                core::hint::spin_loop();
            }
            store(base + 0x1_0000 + GROUP, u32::MAX);
            enable(base + 0x1_0000, interrupt);
            // SAFETY: the processor interface of a GICv3.
            unsafe {
                asm!(
                    "mrs {0}, icc_sre_el1", "orr {0}, {0}, #1", "msr icc_sre_el1, {0}", "isb",
                    "msr icc_pmr_el1, {1}", "msr icc_igrpen1_el1, {2}", "isb",
                    out(reg) _, in(reg) 0xffu64, in(reg) 1u64
                );
            }
        }
    }
    shoot(cpu);
    // SAFETY: the handler is in boot.s.
    unsafe { asm!("msr daifclr, #2") }
}

fn enable(registers: u64, interrupt: u32) {
    store(registers + PRIORITY + u64::from(interrupt), 0xa0u8);
    store(registers + ENABLE, 1u32 << interrupt);
}

/// The redistributor of the processor with this affinity.
fn redistributor(start: u64, end: u64, affinity: u32) -> Option<u64> {
    let mut at = start;
    while at < end {
        let low = load::<u32>(at + TYPER);
        if load::<u32>(at + TYPER + 4) == affinity {
            return Some(at);
        }
        // The last one of its region.
        if low >> 4 & 1 == 1 {
            break;
        }
        // With frames for virtual LPIs it has four pages of 64 KiB.
        at += if low >> 1 & 1 == 1 { 0x4_0000 } else { 0x2_0000 };
    }
    None
}

fn seen(cpu: u64) -> &'static mut Readings {
    // SAFETY: each processor has its own.
    unsafe { &mut (*READINGS.get())[cpu as usize & 7] }
}

/// The timer interrupts of this processor.
pub(crate) fn interrupts(cpu: u64) -> u64 {
    load(fired_address(cpu))
}

/// The timer interrupts of this processor before its last shot.
pub(crate) fn outstanding(cpu: u64) -> u64 {
    seen(cpu).interrupts
}

/// Sets the timer for one interrupt after [`SHOT`].
pub(crate) fn shoot(cpu: u64) {
    let seen = seen(cpu);
    seen.interrupts = interrupts(cpu);
    seen.deadline = now() + crate::ticks() * SHOT / 1000;
    seen.patience = Patience::NONE;
    // SAFETY: the virtual timer is the image's.
    unsafe { asm!("msr cntv_cval_el0, {}", "msr cntv_ctl_el0, {}", "isb", in(reg) seen.deadline, in(reg) 1u64) }
}

/// Checks the timer. Returns whether something is wrong.
pub(crate) fn look_at_clocks(cpu: u64, _limit: u64) -> bool {
    // SAFETY: constant since `find_clocks`.
    if !unsafe { *HAS_TIMER.get() } {
        return false;
    }
    let seen = seen(cpu);
    let interrupts = interrupts(cpu);
    if interrupts != seen.interrupts {
        shoot(cpu);
    } else if now() > seen.deadline && seen.patience.is_over() {
        fault(Kind::Timer, cpu, fired_address(cpu), interrupts + 1, interrupts);
        shoot(cpu);
        return true;
    }
    false
}
