//! The log of the VMM's own writes to guest memory.
//!
//! KVM logs only the guest's writes. Writes of devices and loaders through `vm-memory` are marked
//! here, and a [collection](crate::dirty) merges both logs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

/// The log of one region, with a bit per page, and the mapping that backs the region.
///
/// It holds the mapping because `vm-memory` regions over foreign mappings do not. Every clone of a
/// region keeps its bitmap alive, and the bitmap keeps the memory mapped.
#[derive(Debug)]
pub struct WriteLog {
    /// Mapped rather than allocated: an unused log costs only address space.
    words: Mapping,
    on: AtomicBool,
    /// Whether a word may have a bit set. Most collections find none and skip the words.
    marked: AtomicBool,
    mapping: Arc<Mapping>,
}

/// The log of a part of a region. It borrows, because each slice of guest memory has one.
#[derive(Clone, Copy, Debug)]
pub struct WriteLogSlice<'a> {
    log: &'a WriteLog,
    /// The start of the part, in bytes from the region's start.
    base: usize,
}

impl WriteLog {
    /// A log that is off, for a region of `len` bytes inside `mapping`.
    pub fn new(mapping: Arc<Mapping>, len: u64) -> io::Result<Self> {
        let bytes = len.div_ceil(PAGE_SIZE).div_ceil(64) * 8;
        let words = Mapping::new(bytes, PAGE_SIZE, Source::Anonymous)?;
        Ok(Self { words, on: AtomicBool::new(false), marked: AtomicBool::new(false), mapping })
    }

    /// Switches the log on. Returns whether it was off before.
    ///
    /// Nothing in the VMM may write to the region meanwhile. A writer checks after its write
    /// whether the log is on. Because a CPU may execute a load before an earlier store, it might
    /// find the log off although the caller's next read of memory does not see the write yet. The
    /// write would then be neither in the log nor in what was read.
    #[must_use]
    pub fn start(&self) -> bool {
        let was_off = !self.on.swap(true, Ordering::SeqCst);
        if was_off {
            self.drain(|_| ());
        }
        was_off
    }

    /// Switches the log off.
    pub fn stop(&self) {
        self.on.store(false, Ordering::SeqCst);
    }

    /// Calls `page` with every marked page, counted from the region's start, and clears the log.
    pub fn drain(&self, mut page: impl FnMut(u64)) {
        // A later mark sets the flag again. An earlier one is visible here together with its bits.
        if !self.marked.swap(false, Ordering::AcqRel) {
            return;
        }
        for (index, word) in self.words.words().iter().enumerate() {
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

impl WriteLog {
    /// Whether pages of the region must not be discarded ([`Mapping::is_kept`]).
    pub fn keeps(&self) -> bool {
        self.mapping.is_kept()
    }
}

impl<'a> WriteLogSlice<'a> {
    /// The log of the whole region.
    pub fn log(&self) -> &'a WriteLog {
        self.log
    }
}

impl Bitmap for WriteLogSlice<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        // Relaxed is enough, because the log is switched on while nothing writes
        // (`WriteLog::start`).
        if len == 0 || !self.log.on.load(Ordering::Relaxed) {
            return;
        }
        let page = PAGE_SIZE as usize;
        let first = self.base.saturating_add(offset) / page;
        let last = self.base.saturating_add(offset).saturating_add(len - 1) / page;
        let words = self.log.words.words();
        for page in first..=last.min(words.len() * 64 - 1) {
            words[page / 64].fetch_or(1 << (page % 64), Ordering::Release);
        }
        // Always stored without a test: a test could read the value that a collection is about to
        // clear.
        self.log.marked.store(true, Ordering::Release);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.base.saturating_add(offset) / PAGE_SIZE as usize;
        let word = self.log.words.words().get(page / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { log: self.log, base: self.base.saturating_add(offset) }
    }
}

impl WithBitmapSlice<'_> for WriteLogSlice<'_> {
    type S = Self;
}

impl BitmapSlice for WriteLogSlice<'_> {}

impl Bitmap for WriteLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.slice_at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> WriteLogSlice<'_> {
        WriteLogSlice { log: self, base: offset }
    }
}

impl<'a> WithBitmapSlice<'a> for WriteLog {
    type S = WriteLogSlice<'a>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_cross_pages_and_drain_once() {
        let mapping = Arc::new(Mapping::new(256 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let log = WriteLog::new(mapping, 256 * PAGE_SIZE).unwrap();
        log.mark_dirty(0, 1);
        assert!(!log.dirty_at(0), "marked while off");
        assert!(log.start());
        assert!(!log.start(), "switched on twice");
        log.slice_at(64 * 4096).slice_at(4095).mark_dirty(0, 2);
        log.mark_dirty(0, 0);
        let mut pages = Vec::new();
        log.drain(|page| pages.push(page));
        assert_eq!(pages, [64, 65]);
        log.drain(|page| panic!("page {page} drained twice"));
        log.mark_dirty(0, 1);
        log.stop();
        assert!(log.start());
        log.drain(|page| panic!("page {page} was marked before the log was switched on"));
    }

    #[test]
    fn slices_of_guest_memory_count_no_reference() {
        let mapping = Arc::new(Mapping::new(4 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let log = WriteLog::new(mapping.clone(), 4 * PAGE_SIZE).unwrap();
        let slices: Vec<_> = (0..100).map(|at| log.slice_at(at)).collect();
        assert_eq!((Arc::strong_count(&mapping), slices.len()), (2, 100));
    }
}
