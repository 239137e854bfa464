//! The control block: one for each vCPU, in memory shared by host and guest.
//!
//! The host writes the parameters before the vCPU runs, and the stop flag and the epoch at any
//! time. The guest writes its progress, which the host reads without an exit. The block is
//! `#[repr(C)]` and every field is a word, because the assembly in `program/` uses the offsets.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_sys::mmap::Mapping;

/// The base-2 logarithm of the sub-buckets of each power of two in the latency histogram: 16
/// sub-buckets, so within 6.25 %.
pub const SUB_BITS: u32 = 4;
/// Buckets of the latency histogram.
pub const BUCKETS: usize = (64 - SUB_BITS as usize + 1) << SUB_BITS;
/// The number of latest passes whose end is recorded.
pub const PASS_ENDS: usize = 256;

/// Time slices of the [journal](super::journal).
pub const SLICES: usize = 4096;

/// Values of [`Control::phase`].
pub mod phase {
    /// Since its start.
    pub const BEFORE: u64 = 0;
    /// Its writes are logged, because it is about to move to another process.
    pub const LOGGED: u64 = 1;
    /// It has arrived from another process.
    pub const MOVED: u64 = 2;
    /// The number of phases.
    pub const COUNT: usize = 3;
}

/// Values of [`Control::order`].
pub mod order {
    /// Page after page.
    pub(crate) const SEQUENTIAL: u64 = 0;
    /// A random page each time, so a pass misses about 37 % of them.
    pub const RANDOM: u64 = 1;
    /// Every page once a pass, in the order of a full-period congruential generator.
    pub(crate) const SHUFFLED: u64 = 2;
}

/// Values of [`Control::flags`].
pub mod flags {
    /// Measure the duration of each write.
    pub const LATENCY: u64 = 1;
    /// Draw random numbers: a policy below needs them.
    pub const DRAW: u64 = 2;
    /// Ring the doorbell after every pass.
    pub const LOCKSTEP: u64 = 4;
    /// Return after ringing the doorbell: the caller is not a guest but a process that calls the
    /// code as a function.
    pub const RETURN: u64 = 8;
    /// Keep the [journal](super::super::journal), and measure the duration of each write.
    pub const JOURNAL: u64 = 16;
}

/// Values that the guest writes to the doorbell.
pub mod doorbell {
    /// All passes are done.
    pub const DONE: u64 = 1;
    /// A pass is done (with [`super::flags::LOCKSTEP`]).
    pub const PASS: u64 = 2;
    /// The stop flag was seen.
    pub const STOPPED: u64 = 3;
}

/// The control block. All fields are words that either side may read at any time.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Control {
    // Parameters: the host writes them while the vCPU does not run.
    /// The guest-virtual address of the first page.
    pub region: AtomicU64,
    /// The number of pages; at least 1, below 2^32.
    pub pages: AtomicU64,
    /// Bytes from one page to the next.
    pub stride: AtomicU64,
    /// The page number of the first page, for stamps.
    pub first_page: AtomicU64,
    /// Passes until the doorbell is rung; 0 for no end.
    pub passes: AtomicU64,
    /// The [`order`] of the pages outside the hot set.
    pub order: AtomicU64,
    /// The [`flags`].
    pub flags: AtomicU64,
    /// An access is a write if a 32-bit draw is below this; 2^32 for always.
    pub write_below: AtomicU64,
    /// The number of pages in the hot set, the first pages of the region.
    pub hot_pages: AtomicU64,
    /// An access goes to the hot set if a 32-bit draw is below this.
    pub hot_below: AtomicU64,
    /// The generator of [`order::SHUFFLED`]: `s = (s * mul + add) & mask`, drawn again while `s` is
    /// out of range.
    pub shuffle_mul: AtomicU64,
    /// The generator's increment; odd.
    pub shuffle_add: AtomicU64,
    /// The generator's mask: a power of two minus one, at least the number of pages outside the hot
    /// set minus one.
    pub shuffle_mask: AtomicU64,
    /// The state of the xorshift generator; never 0. The guest stores its current state here at
    /// every doorbell.
    pub seed: AtomicU64,
    /// TSC ticks from one distinct page to the next; 0 for as fast as possible.
    pub interval: AtomicU64,
    /// TSC ticks that a late guest may catch up.
    pub burst: AtomicU64,
    /// [`super::stamp::writer`] of this vCPU.
    pub writer: AtomicU64,
    /// The guest-virtual address of the doorbell.
    pub doorbell: AtomicU64,
    // The host writes these at any time.
    /// Makes the guest ring the doorbell with [`doorbell::STOPPED`] before its next access.
    pub stop: AtomicU64,
    /// [`super::stamp::Stamp::epoch`].
    pub epoch: AtomicU64,
    /// The [`phase`].
    pub phase: AtomicU64,
    // More parameters.
    /// The base-2 logarithm of a journal slice in TSC ticks.
    pub slice_shift: AtomicU64,
    /// The number of passes before pages are paced.
    pub warm: AtomicU64,
    _gap: [u64; 1],
    // Progress: the guest writes it, on separate cache lines.
    /// Accesses done.
    pub done: AtomicU64,
    /// Writes done: [`super::stamp::Stamp::seq`] of the latest stamp.
    pub written: AtomicU64,
    /// First writes of a page in its pass.
    pub distinct: AtomicU64,
    /// Passes done.
    pub pass: AtomicU64,
    /// TSC at the start of the current run's first access.
    pub started: AtomicU64,
    /// TSC at the latest ring of the doorbell.
    pub ended: AtomicU64,
    /// The longest write of each phase in TSC ticks. The host may set it to 0. Without a journal
    /// all writes belong to the first phase.
    pub slowest: [AtomicU64; phase::COUNT],
    /// Accesses done at the start of the current pass.
    pub pass_start: AtomicU64,
    /// The shuffle's state, kept from pass to pass.
    pub shuffle: AtomicU64,
    /// TSC at the end of pass `n`, at `n % PASS_ENDS`.
    pub pass_ends: [AtomicU64; PASS_ENDS],
    // The journal.
    /// TSC at the end of the first write; 0 before.
    pub origin: AtomicU64,
    /// TSC at the end of the latest write.
    pub last: AtomicU64,
    /// TSC ticks between the ends of the previous two writes.
    pub gap_before: AtomicU64,
    /// The longest such gap.
    pub gap: AtomicU64,
    /// TSC at its end.
    pub gap_end: AtomicU64,
    /// The phase in which the latest write began.
    pub writing: AtomicU64,
    /// The latest phase that the guest has seen.
    pub seen: AtomicU64,
    /// The gap in which each phase began.
    pub entered_gap: [AtomicU64; phase::COUNT],
    /// TSC at the end of that gap; 0 if the phase has not begun.
    pub entered: [AtomicU64; phase::COUNT],
    /// Write latencies of each phase in TSC ticks, log-linear: see [`bucket_bound`]. Without a
    /// journal all writes belong to the first phase.
    pub latency: [[AtomicU64; BUCKETS]; phase::COUNT],
    /// [`Control::distinct`] at the last write of each slice since the origin, 0 if there was none.
    /// The last slice covers all later time.
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
        // SAFETY: in range and aligned (checked above; mappings start at a page). Every field is an
        // atomic word, for which any content is valid. The borrow keeps the mapping alive.
        Some(unsafe { &*mapping.as_ptr().add(offset as usize).cast::<Self>() })
    }

    /// Copies the latency histogram of all phases. Each bucket is exact; their sum may lag behind
    /// the writes.
    pub fn latency_snapshot(&self) -> Vec<u64> {
        let mut sum = self.latency_of(0);
        for phase in 1..phase::COUNT {
            sum.iter_mut().zip(self.latency_of(phase)).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// The latency histogram of one phase.
    pub fn latency_of(&self, phase: usize) -> Vec<u64> {
        self.latency[phase].iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect()
    }

    /// The longest write of all phases in TSC ticks.
    pub(crate) fn slowest_of_all(&self) -> u64 {
        self.slowest.iter().map(|ticks| ticks.load(Ordering::Relaxed)).max().unwrap_or(0)
    }
}

/// The largest number of ticks in bucket `index`: the inverse of the assembly's computation.
pub(crate) fn bucket_bound(index: usize) -> u64 {
    let sub = 1u64 << SUB_BITS;
    let (group, low) = ((index as u64) >> SUB_BITS, (index as u64) & (sub - 1));
    // Group 0 holds 0..16 exactly; group g holds [16, 32) << (g - 1) in 16 steps.
    if group == 0 { low } else { ((sub + low) << (group - 1)) + ((1 << (group - 1)) - 1) }
}

/// The bucket of `ticks`, as the assembly computes it.
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
