//! Which pages of a memory that began empty somebody has touched: the others are zero, and nobody needs to read them to know it.
//!
//! Where content came from elsewhere that is not so: what shows the files of a snapshot counts as touched. Asked after the
//! log of writes is on, the answer and the log together name every page that is not zero.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{Backing, Memory, Slot};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::{self, Pagemap};
use vellum_sys::plant::{self, Mistake};

impl Memory {
    /// Tells `found` which of the pages `pages` of `slot`, which is of this memory or an alias, may be other than zero, as runs; false
    /// where nobody can tell, as with huge pages and with shared memory that has no descriptor, or where `pagemap` is missing.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn touched(
        &self,
        pagemap: Option<&Pagemap>,
        slot: &Slot,
        pages: Range<u64>,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<bool> {
        let (first, count) = (pages.start, pages.end - pages.start);
        let offset = slot.offset() + first * PAGE_SIZE;
        // What shows a file is what that has, whoever has looked at it.
        let shown = self.shown.get().filter(|_| !plant::is(Mistake::ShownLeftOut));
        for shown in shown.into_iter().flatten() {
            let (start, end) = (shown.start.max(offset), shown.end.min(offset + count * PAGE_SIZE));
            if start < end {
                found((start - slot.offset()) / PAGE_SIZE..(end - slot.offset()) / PAGE_SIZE);
            }
        }
        let found = |run: Range<u64>| found(first + run.start..first + run.end);
        match (self.config.backing, pagemap, &self.file) {
            (Backing::Anonymous | Backing::Thp, Some(pagemap), _) => {
                pagemap.there(slot.mapping(), offset, count, found)?;
            }
            (Backing::Memfd, _, Some(file)) => pagemap::data(file, offset, count, found)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Tells `found` which of the pages `pages` of `slot`, of this memory or another, may be other than zero, as runs: all of them
    /// where nobody can tell.
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
    use std::sync::atomic::Ordering;

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
                    // A huge page is there as a whole.
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
