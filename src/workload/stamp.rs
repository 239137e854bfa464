//! What a workload leaves on every page that it writes.
//!
//! Four aligned words at the start of the page say who wrote it, when, which page it is, and the how-manieth write of
//! that vCPU it was. Whoever reads the page later, on this host or another, can tell a lost or stale page from a
//! right one.

use std::sync::atomic::{AtomicU64, Ordering};

/// The words, as the guest writes them, lowest address first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// [`WHO`] plus the number of the vCPU.
    pub who: u64,
    /// The epoch that the control block showed: the collection under way.
    pub epoch: u64,
    /// The page's index in guest RAM, counted in strides from the start of RAM.
    pub page: u64,
    /// The vCPU's writes so far, this one included: never 0.
    pub seq: u64,
}

/// Marks a stamp as one: "VELLUM" in ASCII above a 16-bit vCPU number.
pub const WHO: u64 = 0x5645_4c4c_554d_0000;

impl Stamp {
    /// The vCPU that wrote it; `None` where there is no stamp.
    pub fn vcpu(&self) -> Option<usize> {
        (self.who & !0xffff == WHO && self.seq != 0).then_some((self.who & 0xffff) as usize)
    }

    /// Reads the stamp at word `index` of `words`. While the guest writes, the words may be of two writes.
    pub fn read(words: &[AtomicU64], index: usize) -> Self {
        let word = |n: usize| words[index + n].load(Ordering::Relaxed);
        // The guest writes the words in rising order; reading them in falling order never sees a new sequence number
        // over an old owner.
        let seq = words[index + 3].load(Ordering::Acquire);
        Self { seq, page: word(2), epoch: word(1), who: word(0) }
    }
}
