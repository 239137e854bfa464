//! Starts the other processors one after the other, by INIT and SIPI.

use core::sync::atomic::{AtomicU32, Ordering};

use super::boot::boot_of;
use super::{POWER, TRAMPOLINE, acpi, address, now, read, read_msr, write, write_msr};
use crate::refuse;
use crate::report::{Kind, fault};
use crate::schedule::MAX_VCPUS;

/// The number of processors that run, and that the tables list.
pub(crate) struct Started {
    pub(crate) running: u64,
    pub(crate) given: u64,
}

const MAX_GIVEN: usize = 256;
const APIC_BASE: u32 = 0x1b;
const X2APIC_ID: u32 = 0x802;
const X2APIC_SVR: u32 = 0x80f;
/// The spurious interrupt vector register: enabled, vector 255.
const SVR_ENABLED: u32 = 0x1ff;
const X2APIC_ICR: u32 = 0x830;

/// The IDs of local APICs, without duplicates.
struct Ids {
    ids: [u32; MAX_GIVEN],
    count: usize,
}

impl Ids {
    fn add(&mut self, id: u32) {
        if self.count < MAX_GIVEN && !self.ids[..self.count].contains(&id) {
            self.ids[self.count] = id;
            self.count += 1;
        }
    }
}

/// Starts all processors that the tables list, up to [`MAX_VCPUS`]. Each adds one to `started`.
pub(crate) fn start(started: &AtomicU32) -> Started {
    let mut ids = Ids { ids: [0; MAX_GIVEN], count: 0 };
    let boot = boot_of();
    if let Some(power) = acpi::processors(boot.rsdp, |id| ids.add(id)) {
        // SAFETY: only this processor runs.
        unsafe { *POWER.get() = power }
    }
    if ids.count == 0 {
        acpi::mp_processors(|id| ids.add(id));
    }
    let given = ids.count;
    let own = own_id();
    // Without x2APIC, an interrupt command has eight bits for the ID. With more, it would reach
    // another processor.
    let reaches = |id: u32| is_x2apic() || id < 0xff;
    let others = ids.ids[..given].iter().filter(|id| **id != own && reaches(**id));
    let mut running = 1;
    for id in others.take(MAX_VCPUS - 1) {
        if running == 1 && !boot.has_trampoline() {
            refuse("there is no RAM at 0x8000, where other processors start");
        }
        let [from, to] = [address!(trampoline), address!(trampoline_end)];
        for at in 0..to - from {
            write(TRAMPOLINE + at, read::<u8>(from + at));
        }
        write(address!(ap_index), running as u32);
        if !start_one(*id, started, running as u32) {
            fault(Kind::Processors, 0, (*id).into(), running + 1, running);
            break;
        }
        running += 1;
    }
    Started { running, given: given.max(1) as u64 }
}

fn is_x2apic() -> bool {
    read_msr(APIC_BASE) >> 10 & 1 == 1
}

/// The page of the local APIC's registers.
fn registers() -> u64 {
    read_msr(APIC_BASE) & 0xf_ffff_f000
}

/// The ID of this processor's local APIC.
fn own_id() -> u32 {
    match is_x2apic() {
        true => read_msr(X2APIC_ID) as u32,
        false => read::<u32>(registers() + 0x20) >> 24,
    }
}

fn start_one(id: u32, started: &AtomicU32, count: u32) -> bool {
    let (page, is_x2apic) = (registers(), is_x2apic());
    // A disabled local APIC need not deliver interrupts.
    if is_x2apic {
        write_msr(X2APIC_SVR, SVR_ENABLED.into());
    } else {
        write(page + 0xf0, SVR_ENABLED);
    }
    let send = |command: u32| {
        if is_x2apic {
            write_msr(X2APIC_ICR, u64::from(id) << 32 | u64::from(command));
        } else {
            write(page + 0x310, id << 24);
            write(page + 0x300, command);
        }
    };
    // INIT, asserted. Then SIPI with the page's number, up to twice (MultiProcessor Specification,
    // B.4).
    send(0x4500);
    wait(20_000_000, || false);
    for _ in 0..2 {
        send(0x4600 | (TRAMPOLINE >> 12) as u32);
        if wait(10_000_000_000, || started.load(Ordering::SeqCst) == count) {
            return true;
        }
    }
    false
}

/// A step of the clock counts for at most so many ticks, some milliseconds. So the time in which this
/// processor did not run does not count as waiting.
const MAX_STEP: u64 = 20_000_000;

/// Waits until `done` or for `ticks`. Returns whether it is done.
fn wait(ticks: u64, done: impl Fn() -> bool) -> bool {
    let (mut last, mut spent) = (now(), 0);
    while !done() {
        let time = now();
        spent += time.saturating_sub(last).min(MAX_STEP);
        last = time;
        if spent > ticks {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}
