//! Starts the other processors one after the other, by PSCI.

use core::sync::atomic::{AtomicU32, Ordering};

use super::boot::boot_of;
use super::{address, now, psci, ticks_per_second};
use crate::report::{Kind, fault};
use crate::schedule::MAX_VCPUS;

/// The number of processors that run, and that the device tree lists.
pub(crate) struct Started {
    pub(crate) running: u64,
    pub(crate) given: u64,
}

/// The affinities in MPIDR_EL1.
const AFFINITY: u64 = 0xff_00ff_ffff;

/// Starts all processors that the device tree lists, up to [`MAX_VCPUS`]. Each adds one to
/// `started`.
pub(crate) fn start(started: &AtomicU32) -> Started {
    let tree = &boot_of().tree;
    let own = own_affinity();
    let mut running = 1;
    let others = tree.cpus.iter().filter(|affinity| **affinity != own);
    for affinity in others.take(MAX_VCPUS - 1) {
        let result = psci(tree.cpu_on, [*affinity, address!(secondary), running]);
        if result != 0 || !waits(|| started.load(Ordering::SeqCst) == running as u32) {
            fault(Kind::Processors, 0, *affinity, running + 1, running);
            break;
        }
        running += 1;
    }
    Started { running, given: tree.given.max(1) }
}

pub(super) fn own_affinity() -> u64 {
    let mpidr: u64;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mrs {}, mpidr_el1", out(reg) mpidr) }
    mpidr & AFFINITY
}

/// Waits until `done`, for ten seconds. Returns whether it is done.
fn waits(done: impl Fn() -> bool) -> bool {
    let begun = now();
    while !done() {
        if now() - begun > 10 * ticks_per_second() {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}
