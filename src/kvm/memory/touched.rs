//! Finds the touched pages of memory that began empty. The others are zero, which is known without
//! reading them.
//!
//! Ranges with content from elsewhere are different: those that map a snapshot's files count as
//! touched. If this is queried after the log of writes is on, the result and the log together
//! contain every non-zero page.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Backing, Memory, Slot};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::{self, Pagemap};
use vellum_sys::plant::{self, Mistake};

/// [`Memory::fetch_missing`] asks whether it is to go on after so many bytes.
const STEP: u64 = 2 << 20;

impl Memory {
    /// Calls `found` with runs of the pages in `pages` that may be non-zero. `slot` is in this
    /// memory or an alias of it. Returns false if this is unknown: with huge pages of a pool, for
    /// shared memory without a descriptor, or without `pagemap`.
    ///
    /// # Errors
    /// A system call fails.
    pub fn touched(
        &self,
        pagemap: Option<&Pagemap>,
        slot: &Slot,
        pages: Range<u64>,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<bool> {
        let (first, count) = (pages.start, pages.end - pages.start);
        let offset = slot.offset() + first * PAGE_SIZE;
        // A range that maps a file has its contents even if no page was accessed.
        let shown = self.shown.get().filter(|_| !plant::is(Mistake::ShownLeftOut));
        for shown in shown.into_iter().flatten() {
            let (start, end) = (shown.start.max(offset), shown.end.min(offset + count * PAGE_SIZE));
            if start < end {
                found((start - slot.offset()) / PAGE_SIZE..(end - slot.offset()) / PAGE_SIZE);
            }
        }
        let mut found = |run: Range<u64>| found(first + run.start..first + run.end);
        match (self.config.backing, pagemap, self.file()) {
            // A page with content is in a file, or it was written after the fork, or both.
            (Backing::Memfd | Backing::Anonymous | Backing::Thp, Some(pagemap), _) if self.is_forked() => {
                for layer in self.layers(slot) {
                    let run = layer.start.max(pages.start)..layer.end.min(pages.end);
                    if !run.is_empty() {
                        found(run.start - first..run.end - first);
                    }
                }
                for (range, file) in self.files() {
                    let (start, end) = (range.start.max(offset), range.end.min(offset + count * PAGE_SIZE));
                    if start < end {
                        let first = (start - offset) / PAGE_SIZE;
                        let found = |run: Range<u64>| found(first + run.start..first + run.end);
                        pagemap::data(&file, start, (end - start) / PAGE_SIZE, found)?;
                    }
                }
                pagemap.there(slot.mapping(), offset, count, found)?;
            }
            _ if self.is_forked() => return Ok(false),
            (Backing::Anonymous | Backing::Thp, Some(pagemap), _) => {
                pagemap.there(slot.mapping(), offset, count, found)?;
            }
            (Backing::Memfd, _, Some(file)) => pagemap::data(&file, offset, count, found)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Has all missing pages fetched, by reading one word of each. `go_on` is asked now and then,
    /// and false ends it early. Returns whether it has not.
    ///
    /// # Errors
    /// That of `go_on`.
    pub fn fetch_missing<E>(&self, mut go_on: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        if self.mapping.is_complete() {
            return Ok(true);
        }
        for range in self.shown.get().into_iter().flatten() {
            for at in (range.start..range.end).step_by(STEP as usize) {
                if !go_on()? {
                    return Ok(false);
                }
                let step = at as usize / 8..(at + STEP).min(range.end) as usize / 8;
                self.mapping.words()[step].iter().step_by(PAGE_SIZE as usize / 8).for_each(|word| {
                    word.load(Ordering::Relaxed);
                });
            }
        }
        Ok(true)
    }

    /// Calls `found` with runs of the pages in `pages` that may be non-zero. `slot` may be in other
    /// memory too. If this is unknown, reports all pages.
    pub fn perhaps_touched(
        &self,
        pagemap: Option<&Pagemap>,
        slot: &Slot,
        pages: Range<u64>,
        mut found: impl FnMut(Range<u64>),
    ) {
        let is_ram = Arc::ptr_eq(slot.mapping(), &self.mapping);
        if !is_ram || !matches!(self.touched(pagemap, slot, pages.clone(), &mut found), Ok(true)) {
            found(pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryConfig;
    use crate::memory::plan::Space;

    const SIZE: u64 = 64 << 20;

    #[test]
    fn what_is_touched_is_known_slot_by_slot_and_asking_touches_nothing() {
        let pagemap = Pagemap::open().unwrap();
        for backing in [Backing::Anonymous, Backing::Thp, Backing::Memfd, Backing::Shmem] {
            let config = MemoryConfig { backing, slots: 2, ..MemoryConfig::new(SIZE) };
            let memory = Memory::map(Space(&[0..1 << 30, 1 << 31..1 << 32]), config).unwrap();
            let pages = [3, SIZE / PAGE_SIZE / 2 + 700];
            for page in pages {
                memory.mapping.words()[page as usize * 512].store(1, Ordering::Relaxed);
            }
            for _ in 0..2 {
                for (slot, page) in memory.slots().iter().zip(pages) {
                    let page = page - slot.offset() / PAGE_SIZE;
                    let told = |within: Range<u64>| {
                        let mut told = Vec::new();
                        let known = memory.touched(Some(&pagemap), slot, within, |run| told.extend(run));
                        (known.unwrap(), told)
                    };
                    let (known, told_of) = told(0..slot.pages());
                    assert_eq!(known, backing != Backing::Shmem);
                    if !known {
                        let mut all = 0;
                        let count = |run: Range<u64>| all += run.end - run.start;
                        memory.perhaps_touched(Some(&pagemap), slot, 0..slot.pages(), count);
                        assert_eq!(all, slot.pages());
                        continue;
                    }
                    assert!(told_of.contains(&page), "{backing}: page {page}");
                    // A huge page is resident as a whole.
                    let most = if backing == Backing::Thp { 512 } else { 1 };
                    assert!((1..=most).contains(&told_of.len()), "{backing}: {told_of:?}");
                    assert_eq!(told(page..page + 1).1, [page], "{backing}");
                    assert!(told(page + 1024..page + 1100).1.is_empty(), "{backing}");
                }
            }
            let private = matches!(backing, Backing::Anonymous | Backing::Thp);
            assert_eq!(
                !memory.touched(None, &memory.slots()[0], 0..1, |_| ()).unwrap(),
                private || backing == Backing::Shmem
            );
        }
    }
}
