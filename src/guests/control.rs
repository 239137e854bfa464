//! The control block: one for each vCPU, in memory that host and guest share.
//!
//! The host writes the parameters before the vCPU runs, and the stop flag and the epoch whenever it likes; the guest
//! writes its progress, which the host reads without an exit. `#[repr(C)]`, every field a word: the assembly in `arch/`
//! takes the offsets from here.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_sys::mmap::Mapping;

/// Sub-buckets of each power of two in the latency histogram, as a base-2 logarithm: 16, so within 6.25 %.
pub const SUB_BITS: u32 = 4;
/// Buckets of the latency histogram.
pub const BUCKETS: usize = (64 - SUB_BITS as usize + 1) << SUB_BITS;
/// How many of the latest passes have their end recorded.
pub const PASS_ENDS: usize = 256;

/// Slices of time in the [journal](super::journal).
pub const SLICES: usize = 4096;

/// Values of [`Control::phase`].
pub mod phase {
    /// As it was started.
    pub const BEFORE: u64 = 0;
    /// Its writes have been logged since, for it is to move to another process.
    pub const LOGGED: u64 = 1;
    /// It has come from another process.
    pub const MOVED: u64 = 2;
    /// How many there are.
    pub const COUNT: usize = 3;
}

/// Values of [`Control::order`].
pub mod order {
    /// Page after page.
    pub const SEQUENTIAL: u64 = 0;
    /// Any page each time, so that a pass misses about 37 % of them.
    pub const RANDOM: u64 = 1;
    /// Every page once a pass, in an order that a full-period congruential generator gives.
    pub const SHUFFLED: u64 = 2;
}

/// Values of [`Control::flags`].
pub mod flags {
    /// Measure how long each write takes.
    pub const LATENCY: u64 = 1;
    /// Draw random numbers: some policy below needs them.
    pub const DRAW: u64 = 2;
    /// Ring the doorbell after every pass.
    pub const LOCKSTEP: u64 = 4;
    /// Return after ringing the doorbell: the caller is no guest but a process that calls the code as a function.
    pub const RETURN: u64 = 8;
    /// Keep the [journal](super::super::journal), and measure how long each write takes.
    pub const JOURNAL: u64 = 16;
}

/// What the guest writes to the doorbell.
pub mod doorbell {
    /// All passes are done.
    pub const DONE: u64 = 1;
    /// A pass is done (with [`super::flags::LOCKSTEP`]).
    pub const PASS: u64 = 2;
    /// The stop flag was seen.
    pub const STOPPED: u64 = 3;
}

/// The block. All fields are words that either side may read at any time.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Control {
    // Parameters: written by the host while the vCPU does not run.
    /// Guest-virtual address of the first page.
    pub region: AtomicU64,
    /// How many pages; at least 1, below 2^32.
    pub pages: AtomicU64,
    /// Bytes from one page to the next.
    pub stride: AtomicU64,
    /// The stamp's page number of the first page.
    pub first_page: AtomicU64,
    /// Passes until the doorbell is rung; 0 for no end.
    pub passes: AtomicU64,
    /// [`order`] of the pages outside the hot set.
    pub order: AtomicU64,
    /// [`flags`].
    pub flags: AtomicU64,
    /// An access writes where a 32-bit draw is below this; 2^32 for always.
    pub write_below: AtomicU64,
    /// The first so many pages are the hot set.
    pub hot_pages: AtomicU64,
    /// An access goes to the hot set where a 32-bit draw is below this.
    pub hot_below: AtomicU64,
    /// The generator of [`order::SHUFFLED`]: `s = (s * mul + add) & mask`, drawn again while `s` is out of range.
    pub shuffle_mul: AtomicU64,
    /// As above; odd.
    pub shuffle_add: AtomicU64,
    /// As above; a power of two minus one, at least the number of pages outside the hot set minus one.
    pub shuffle_mask: AtomicU64,
    /// The state of the xorshift generator; never 0. The guest leaves its current state here at every doorbell.
    pub seed: AtomicU64,
    /// TSC ticks from one distinct page to the next; 0 for as fast as possible.
    pub interval: AtomicU64,
    /// TSC ticks that a late guest may catch up.
    pub burst: AtomicU64,
    /// [`super::stamp::writer`] of this vCPU.
    pub writer: AtomicU64,
    /// Guest-virtual address of the doorbell.
    pub doorbell: AtomicU64,
    // Written by the host at any time.
    /// Makes the guest ring the doorbell with [`doorbell::STOPPED`] before its next access.
    pub stop: AtomicU64,
    /// [`super::stamp::Stamp::epoch`].
    pub epoch: AtomicU64,
    /// [`phase`].
    pub phase: AtomicU64,
    // Parameters again.
    /// A slice of the journal is two to the power of this in TSC ticks.
    pub slice_shift: AtomicU64,
    /// So many passes are done before pages are paced.
    pub warm: AtomicU64,
    _gap: [u64; 1],
    // Progress: written by the guest, on cache lines of its own.
    /// Accesses done.
    pub done: AtomicU64,
    /// Writes done: [`super::stamp::Stamp::seq`] of the latest stamp.
    pub written: AtomicU64,
    /// First writes of a page in its pass.
    pub distinct: AtomicU64,
    /// Passes done.
    pub pass: AtomicU64,
    /// TSC when the first access of the current run began.
    pub started: AtomicU64,
    /// TSC at the latest ring of the doorbell.
    pub ended: AtomicU64,
    /// The longest write of each phase in TSC ticks; the host may set it to 0. Without a journal all is of the first phase.
    pub slowest: [AtomicU64; phase::COUNT],
    /// Accesses done at the start of the current pass.
    pub pass_start: AtomicU64,
    /// State of the shuffle, carried over from pass to pass.
    pub shuffle: AtomicU64,
    /// TSC at the end of pass `n`, at `n % PASS_ENDS`.
    pub pass_ends: [AtomicU64; PASS_ENDS],
    // The journal.
    /// TSC at the end of the first write; 0 before.
    pub origin: AtomicU64,
    /// TSC at the end of the latest write.
    pub last: AtomicU64,
    /// TSC ticks from the end of the write before that one to its end.
    pub gap_before: AtomicU64,
    /// The longest such gap of all.
    pub gap: AtomicU64,
    /// TSC at its end.
    pub gap_end: AtomicU64,
    /// The phase in which the latest write began.
    pub writing: AtomicU64,
    /// The phase that the guest knows of.
    pub seen: AtomicU64,
    /// The gap in which each phase began.
    pub entered_gap: [AtomicU64; phase::COUNT],
    /// TSC at its end; 0 where it has not begun.
    pub entered: [AtomicU64; phase::COUNT],
    /// Write latencies of each phase in TSC ticks, log-linear: see [`bucket_bound`]. Without a journal all are of the first.
    pub latency: [[AtomicU64; BUCKETS]; phase::COUNT],
    /// [`Control::distinct`] at the last write in each slice since the origin, 0 where there was none; all that is later is in
    /// the last.
    pub slices: [AtomicU64; SLICES],
}

const _: () = assert!(offset_of!(Control, done) == 192, "progress starts on a cache line of its own");

impl Control {
    /// The control block at `offset` (a multiple of its alignment) of shared memory.
    pub fn at(mapping: &Mapping, offset: u64) -> Option<&Self> {
        let room = mapping.len().checked_sub(offset)? >= size_of::<Self>() as u64;
        if !room || !offset.is_multiple_of(align_of::<Self>() as u64) {
            return None;
        }
        // SAFETY: in range and aligned (checked above; mappings start at a page); every field is an atomic word, for
        // which any content is valid, and the borrow keeps the mapping alive.
        Some(unsafe { &*mapping.as_ptr().add(offset as usize).cast::<Self>() })
    }

    /// A consistent enough copy of the latency histogram of all phases: each bucket is exact, their sum may lag the writes.
    pub fn latency_snapshot(&self) -> Vec<u64> {
        let mut sum = self.latency_of(0);
        for phase in 1..phase::COUNT {
            sum.iter_mut().zip(self.latency_of(phase)).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// That of one phase.
    pub fn latency_of(&self, phase: usize) -> Vec<u64> {
        self.latency[phase].iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect()
    }

    /// The longest write of all phases in TSC ticks.
    pub fn slowest_of_all(&self) -> u64 {
        self.slowest.iter().map(|ticks| ticks.load(Ordering::Relaxed)).max().unwrap_or(0)
    }
}

/// The largest number of ticks that falls into bucket `index`: inverse of what the assembly computes.
pub fn bucket_bound(index: usize) -> u64 {
    let sub = 1u64 << SUB_BITS;
    let (group, low) = ((index as u64) >> SUB_BITS, (index as u64) & (sub - 1));
    // Group 0 holds 0..16 exactly; group g holds [16, 32) << (g - 1) in 16 steps.
    if group == 0 { low } else { ((sub + low) << (group - 1)) + ((1 << (group - 1)) - 1) }
}

/// The bucket of `ticks`: what the assembly computes.
pub fn bucket_of(ticks: u64) -> usize {
    let sub = 1u64 << SUB_BITS;
    if ticks < sub {
        return ticks as usize;
    }
    let shift = ticks.ilog2() - SUB_BITS;
    ((((shift + 1) as u64) << SUB_BITS) + (ticks >> shift) - sub) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_and_buckets_agree() {
        let mut last = None;
        for index in 0..BUCKETS {
            let bound = bucket_bound(index);
            assert_eq!(bucket_of(bound), index, "bound {bound}");
            assert!(last.is_none_or(|last| bucket_of(last + 1) == index));
            last = Some(bound);
        }
        assert_eq!(last, Some(u64::MAX));
    }
}
