//! Caches the file offsets of a qcow2 image's recently read or written clusters. The tables have
//! them too, but a lookup there takes as long as the 4 KiB read that follows.

use std::ops::Range;

/// The number of cached clusters. At 64 KiB each they cover 1 GiB.
const SLOTS: usize = 1 << 14;

/// A direct-mapped cache.
pub(crate) struct Extents {
    /// The binary logarithm of the cluster size in bytes. Every read looks up, and shifts are cheaper
    /// than divisions.
    bits: u32,
    /// The cluster's number on the disk plus one, and its offset. Empty slots are zeroes, so the
    /// kernel allocates memory only for used ones.
    slots: Vec<(u64, u64)>,
}

impl Extents {
    /// An empty cache for clusters of `cluster` bytes, a power of two.
    pub(crate) fn new(cluster: u64) -> Self {
        Self { bits: cluster.trailing_zeros(), slots: vec![(0, 0); SLOTS] }
    }

    /// The number of the cluster with the byte `at`, and the byte's offset in it.
    fn place(&self, at: u64) -> (u64, u64) {
        (at >> self.bits, at & ((1 << self.bits) - 1))
    }

    /// The offset of `len` bytes from `at` of the disk on, if they are in one cached cluster.
    pub(crate) fn find(&self, at: u64, len: usize) -> Option<u64> {
        let (number, within) = self.place(at);
        let (key, offset) = self.slots[number as usize % SLOTS];
        (key == number + 1 && len as u64 <= (1 << self.bits) - within).then_some(offset + within)
    }

    /// Caches that `len` bytes from `at` of the disk on are at `offset`, along with the rest of
    /// their clusters.
    pub(crate) fn note(&mut self, at: u64, len: u64, offset: u64) {
        let begin = offset - self.place(at).1;
        for (number, offset) in self.numbers(at, len).zip((begin..).step_by(1 << self.bits)) {
            self.slots[number as usize % SLOTS] = (number + 1, offset);
        }
    }

    /// Drops the clusters of `len` bytes from `at` on, whose offsets may change.
    pub(crate) fn forget(&mut self, at: u64, len: u64) {
        let numbers = self.numbers(at, len);
        if numbers.end - numbers.start >= SLOTS as u64 {
            self.slots.fill((0, 0));
            return;
        }
        for number in numbers {
            let slot = &mut self.slots[number as usize % SLOTS];
            if slot.0 == number + 1 {
                *slot = (0, 0);
            }
        }
    }

    /// The numbers of the clusters that hold `len` bytes from `at` on.
    fn numbers(&self, at: u64, len: u64) -> Range<u64> {
        let (last, within) = self.place(at.saturating_add(len));
        self.place(at).0..last + u64::from(within > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_found_until_it_may_lie_elsewhere() {
        let mut extents = Extents::new(512);
        // From the middle of cluster 2 to the first byte of cluster 4.
        extents.note(2 * 512 + 100, 512 + 413, 8292);
        assert_eq!(extents.find(2 * 512, 512), Some(8192));
        assert_eq!(extents.find(4 * 512 + 7, 505), Some(8192 + 1024 + 7));
        assert_eq!((extents.find(2 * 512, 513), extents.find(5 * 512, 1)), (None, None));
        // Another cluster with the same slot.
        assert_eq!(extents.find((2 + SLOTS as u64) * 512, 1), None);
        extents.forget((3 + SLOTS as u64) * 512, 1);
        extents.forget(3 * 512 + 511, 1);
        assert_eq!((extents.find(3 * 512, 1), extents.find(2 * 512, 1)), (None, Some(8192)));
        extents.forget(0, u64::MAX);
        assert_eq!(extents.find(2 * 512, 1), None);
    }
}
