//! The stamp that a workload leaves on every page that it writes.
//!
//! Three aligned words at the start of the page tell the writing vCPU with the number of its write,
//! the epoch, and the page. A later reader, on this host or another, can tell a lost or stale page
//! from a correct one. vCPU and write number share a word. So two vCPUs that write a page at the
//! same time cannot combine one's identity with the other's number.

use std::sync::atomic::{AtomicU64, Ordering};

/// The words, lowest address first. All zero: never written.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// [`writer`] of the vCPU, plus its writes so far, including this one.
    pub writer: u64,
    /// The epoch in the control block: the collection in progress.
    pub epoch: u64,
    /// The page's index in guest RAM, in strides from the start of RAM.
    pub page: u64,
}

/// Words of a stamp.
pub const WORDS: u64 = (size_of::<Stamp>() / 8) as u64;

/// The bits of [`Stamp::writer`] that count writes.
pub(crate) const SEQ_BITS: u32 = 48;

/// A vCPU's [`Stamp::writer`] before its first write.
pub fn writer(vcpu: usize) -> u64 {
    (vcpu as u64 + 1) << SEQ_BITS
}

impl Stamp {
    /// The vCPU that wrote it; `None` if there is no stamp.
    pub fn vcpu(&self) -> Option<usize> {
        (self.writer >> SEQ_BITS).checked_sub(1).map(|vcpu| vcpu as usize)
    }

    /// The vCPU's number of writes, including this one.
    pub fn seq(&self) -> u64 {
        self.writer & ((1 << SEQ_BITS) - 1)
    }

    /// Reads the stamp at word `index` of `words`. While the guest writes, the words may come from
    /// two writes: the guest stores the epoch first and the writer last.
    pub fn read(words: &[AtomicU64], index: usize) -> Self {
        let word = |n: usize| words[index + n].load(Ordering::Relaxed);
        let writer = words[index].load(Ordering::Acquire);
        Self { writer, epoch: word(1), page: word(2) }
    }
}
