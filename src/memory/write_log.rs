//! The log of what the VMM itself writes into guest memory.
//!
//! KVM logs the guest's writes only. Whatever devices and loaders write through `vm-memory` is marked here, and a
//! [collection](crate::dirty) merges both.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

use crate::sys::mmap::{Mapping, PAGE_SIZE, Source};

/// One region's log, a bit a page, and the mapping that backs the region.
///
/// It holds the mapping because `vm-memory` regions over foreign mappings do not: a region, wherever it was cloned
/// to, keeps its bitmap alive, and the bitmap keeps the memory mapped.
#[derive(Clone, Debug)]
pub struct WriteLog {
    shared: Arc<Shared>,
    /// Where this slice of the log starts, in bytes from the region's start.
    base: usize,
}

#[derive(Debug)]
struct Shared {
    /// Mapped rather than allocated: a log that is never used costs address space only.
    words: Mapping,
    enabled: AtomicBool,
    /// Whether a word may have a bit: most collections find none, and need not look at the words.
    marked: AtomicBool,
    _mapping: Arc<Mapping>,
}

impl WriteLog {
    /// A log that is off, for a region of `len` bytes inside `mapping`.
    pub fn new(mapping: Arc<Mapping>, len: u64) -> io::Result<Self> {
        let bytes = len.div_ceil(PAGE_SIZE).div_ceil(64) * 8;
        let words = Mapping::new(bytes, PAGE_SIZE, Source::Anonymous)?;
        let shared = Shared {
            words,
            enabled: AtomicBool::new(false),
            marked: AtomicBool::new(false),
            _mapping: mapping,
        };
        Ok(Self { shared: Arc::new(shared), base: 0 })
    }

    /// Switches logging on (all clean) or off.
    pub fn enable(&self, on: bool) {
        if on {
            self.shared.words.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        self.shared.enabled.store(on, Ordering::SeqCst);
    }

    /// Hands every marked page, counted from the region's start, to `page`, and clears the log.
    pub fn drain(&self, mut page: impl FnMut(u64)) {
        // A mark made later sets this again; one made before is seen, bits and all.
        if !self.shared.marked.swap(false, Ordering::AcqRel) {
            return;
        }
        for (index, word) in self.shared.words.words().iter().enumerate() {
            if word.load(Ordering::Relaxed) != 0 {
                let mut bits = word.swap(0, Ordering::AcqRel);
                while bits != 0 {
                    page(index as u64 * 64 + u64::from(bits.trailing_zeros()));
                    bits &= bits - 1;
                }
            }
        }
    }
}

impl Bitmap for WriteLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 || !self.shared.enabled.load(Ordering::Relaxed) {
            return;
        }
        let page = PAGE_SIZE as usize;
        let first = self.base.saturating_add(offset) / page;
        let last = self.base.saturating_add(offset).saturating_add(len - 1) / page;
        for page in first..=last.min(self.shared.words.words().len() * 64 - 1) {
            self.shared.words.words()[page / 64].fetch_or(1 << (page % 64), Ordering::Release);
        }
        // Always stored, never tested first: a test could read what a collection has just taken back.
        self.shared.marked.store(true, Ordering::Release);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.base.saturating_add(offset) / PAGE_SIZE as usize;
        self.shared
            .words
            .words()
            .get(page / 64)
            .is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { shared: self.shared.clone(), base: self.base.saturating_add(offset) }
    }
}

impl WithBitmapSlice<'_> for WriteLog {
    type S = Self;
}

impl BitmapSlice for WriteLog {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_cross_pages_and_drain_once() {
        let mapping = Arc::new(Mapping::new(256 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let log = WriteLog::new(mapping, 256 * PAGE_SIZE).unwrap();
        log.mark_dirty(0, 1);
        assert!(!log.dirty_at(0), "marked while off");
        log.enable(true);
        log.slice_at(64 * 4096).mark_dirty(4095, 2);
        log.mark_dirty(0, 0);
        let mut pages = Vec::new();
        log.drain(|page| pages.push(page));
        assert_eq!(pages, [64, 65]);
        log.drain(|page| panic!("page {page} drained twice"));
    }
}
