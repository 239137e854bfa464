//! What a workload leaves on every page that it writes.
//!
//! Three aligned words at the start of the page say who wrote it and the how-manieth write of that vCPU it was, when,
//! and which page it is. Whoever reads the page later, on this host or another, can tell a lost or stale page from a
//! right one. Who and how-manieth share a word, so that two vCPUs that write one page at the same time cannot leave a
//! writer with the other's number.

use std::sync::atomic::{AtomicU64, Ordering};

/// The words, lowest address first. All zero: never written.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// [`writer`] of the vCPU, plus its writes so far, this one included.
    pub writer: u64,
    /// The epoch that the control block showed: the collection under way.
    pub epoch: u64,
    /// The page's index in guest RAM, counted in strides from the start of RAM.
    pub page: u64,
}

/// How many there are.
pub const WORDS: u64 = (size_of::<Stamp>() / 8) as u64;

/// The bits of [`Stamp::writer`] that count writes.
pub const SEQ_BITS: u32 = 48;

/// A vCPU's [`Stamp::writer`] before its first write.
pub fn writer(vcpu: usize) -> u64 {
    (vcpu as u64 + 1) << SEQ_BITS
}

impl Stamp {
    /// The vCPU that wrote it; `None` where there is no stamp.
    pub fn vcpu(&self) -> Option<usize> {
        (self.writer >> SEQ_BITS).checked_sub(1).map(|vcpu| vcpu as usize)
    }

    /// The vCPU's writes up to and including this one.
    pub fn seq(&self) -> u64 {
        self.writer & ((1 << SEQ_BITS) - 1)
    }

    /// Reads the stamp at word `index` of `words`. While the guest writes, the words may be of two writes: the guest
    /// stores the epoch first and the writer last.
    pub fn read(words: &[AtomicU64], index: usize) -> Self {
        let word = |n: usize| words[index + n].load(Ordering::Relaxed);
        let writer = words[index].load(Ordering::Acquire);
        Self { writer, epoch: word(1), page: word(2) }
    }
}
