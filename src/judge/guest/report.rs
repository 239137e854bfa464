//! Faults, progress and the verdict.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Outcome;
use crate::arch;
use crate::console::{Item, last_line, line};
use crate::schedule::{PHASE, POISON};
use crate::words;

/// The kinds of fault: indices of [`words::KINDS`].
#[derive(Clone, Copy)]
#[allow(dead_code)] // Arm has no kvmclock.
pub(crate) enum Kind {
    LostWrite,
    OtherAddress,
    Future,
    Torn,
    Zeroes,
    Foreign,
    GeneralRegisters,
    VectorRegisters,
    Msrs,
    Position,
    Image,
    ClockBack,
    ClockJump,
    Processors,
    KvmclockBack,
    KvmclockJump,
    Timer,
    DiskData,
    DiskRing,
    DiskLost,
}

/// What the image can check on this machine.
#[derive(Clone, Copy)]
pub(crate) struct Checked {
    /// Whether there is a limit of a clock's steps.
    pub(crate) clock: bool,
    pub(crate) kvmclock: bool,
    pub(crate) timer: bool,
    pub(crate) disk: bool,
}

impl Checked {
    pub(crate) const NONE: Self = Self { clock: false, kvmclock: false, timer: false, disk: false };

    /// Why no fault of this kind can be found.
    fn skips(self, kind: usize) -> Option<&'static str> {
        let of = |kinds: &[Kind]| kinds.iter().any(|of| *of as usize == kind);
        if !self.kvmclock && of(&[Kind::KvmclockBack, Kind::KvmclockJump]) {
            return Some("there is no kvmclock");
        }
        if !self.clock && of(&[Kind::ClockJump, Kind::KvmclockJump]) {
            return Some("clock= is not given");
        }
        if !self.timer && of(&[Kind::Timer]) {
            return Some("there is no timer that counts");
        }
        (!self.disk && of(&[Kind::DiskData, Kind::DiskRing, Kind::DiskLost])).then_some("there is no disk")
    }
}

/// The number of faults of each kind that are printed individually.
const PRINTED: u64 = 16;

#[unsafe(link_section = ".bss.live")]
static COUNTS: [AtomicU64; words::KINDS.len()] = [const { AtomicU64::new(0) }; words::KINDS.len()];

/// Counts a fault. Prints the first faults of each kind.
pub(crate) fn fault(kind: Kind, vcpu: u64, address: u64, expected: u64, found: u64) {
    if COUNTS[kind as usize].fetch_add(1, Ordering::Relaxed) < PRINTED {
        line(&[
            Item::Text(words::FAULT),
            Item::Text(words::KINDS[kind as usize]),
            Item::Name(" vcpu="),
            Item::Number(vcpu),
            Item::Name(" address="),
            Item::Address(address),
            Item::Name(" expected="),
            Item::Address(expected),
            Item::Name(" found="),
            Item::Address(found),
        ]);
    }
}

/// Prints the progress of the first processor.
pub(crate) fn progress(position: u64, passes: u64) {
    let accesses = position & ((1 << PHASE) - 1);
    let phase = (position & ((1 << POISON) - 1)) >> PHASE;
    line(&[
        Item::Text(words::PASS),
        Item::Number(phase / 4),
        Item::Name(" of "),
        Item::Number(passes),
        Item::Name(" phase="),
        Item::Number(phase % 4),
        Item::Name(" accesses="),
        Item::Number(accesses),
        Item::Name(" faults="),
        Item::Number(total()),
    ]);
}

/// The number of faults.
pub(crate) fn total() -> u64 {
    COUNTS.iter().map(|count| count.load(Ordering::Relaxed)).sum()
}

/// Prints the test cases, the checksums and the verdict.
pub(crate) fn end<'a>(checked: Checked, outcomes: impl Iterator<Item = &'a Outcome>) {
    line(&[Item::Name("1.."), Item::Number(words::KINDS.len() as u64)]);
    for (at, kind) in words::KINDS.iter().enumerate() {
        let count = COUNTS[at].load(Ordering::Relaxed);
        let verdict = if count == 0 { "ok " } else { "not ok " };
        let skips = checked.skips(at).filter(|_| count == 0);
        let items = [
            Item::Text(verdict),
            Item::Number(at as u64 + 1),
            Item::Name(" "),
            Item::Text(kind),
            Item::Text(if skips.is_some() { words::SKIP } else { " # " }),
            skips.map_or(Item::Number(count), Item::Text),
            Item::Name(if skips.is_some() { "" } else { " found" }),
        ];
        line(if count == 0 && skips.is_none() { &items[..4] } else { &items });
    }
    let mut poisoned = false;
    for (number, outcome) in outcomes.enumerate() {
        poisoned |= outcome.position >> POISON & 1 == 1;
        line(&[
            Item::Text(words::SUM),
            Item::Name("vcpu="),
            Item::Number(number as u64),
            Item::Name(" position="),
            Item::Address(outcome.position),
            Item::Name(" checksum="),
            Item::Address(outcome.checksum),
            Item::Name(" interrupts="),
            Item::Number(outcome.interrupts),
        ]);
    }
    let lost = poisoned || total() != 0;
    line(&[Item::Text(words::END), Item::Text(if lost { "LOST" } else { "WHOLE" })]);
}

/// Prints an exception. The run ends with it.
pub(crate) fn exception(vector: u64, error: u64, address: u64, cr2: u64) {
    last_line(&[
        Item::Text(words::REFUSED),
        Item::Name("exception "),
        Item::Number(vector),
        Item::Name(" error "),
        Item::Address(error),
        Item::Name(" at "),
        Item::Address(address),
        Item::Name(", "),
        Item::Name(arch::FAULT_ADDRESS),
        Item::Name(" "),
        Item::Address(cr2),
    ]);
}
