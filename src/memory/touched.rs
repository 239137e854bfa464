//! Which pages of a memory that began empty somebody has touched: the others are zero, and nobody needs to read them to know it.
//!
//! Where content came from elsewhere that is not so: what shows the files of a snapshot counts as touched. Asked after the
//! log of writes is on, the answer and the log together name every page that is not zero.

use std::io;
use std::sync::Arc;

use super::{Backing, Memory, Slot};
use crate::plant::{self, Mistake};
use crate::sys::mmap::PAGE_SIZE;
use crate::sys::pagemap::{self, Pagemap};

impl Memory {
    /// The pages of `slot`, which is of this memory or an alias, that may be other than zero, a bit a page; `None` where nobody can
    /// tell, as with huge pages and with shared memory that has no descriptor, or where `pagemap` is missing.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn touched(&self, pagemap: Option<&Pagemap>, slot: &Slot) -> io::Result<Option<Vec<u64>>> {
        let mut words = vec![0u64; slot.bitmap_words()];
        let mut mark = |run: std::ops::Range<u64>| {
            for page in run {
                words[(page / 64) as usize] |= 1 << (page % 64);
            }
        };
        // What shows a file is what that has, whoever has looked at it.
        let shown = self.shown.get().filter(|_| !plant::is(Mistake::ShownLeftOut));
        for shown in shown.into_iter().flatten() {
            let (start, end) = (shown.start.max(slot.offset()), shown.end.min(slot.range().end));
            if start < end {
                mark((start - slot.offset()) / PAGE_SIZE..(end - slot.offset()) / PAGE_SIZE);
            }
        }
        match (self.config.backing, pagemap, &self.file) {
            (Backing::Anonymous | Backing::Thp, Some(pagemap), _) => {
                pagemap.there(slot.mapping(), slot.offset(), slot.pages(), &mut mark)?;
            }
            (Backing::Memfd, _, Some(file)) => pagemap::data(file, slot.offset(), slot.pages(), &mut mark)?,
            _ => return Ok(None),
        }
        Ok(Some(words))
    }

    /// The pages of `slot`, of this memory or another, that may be other than zero, a bit a page: all of them where nobody can tell.
    pub fn perhaps_touched(&self, pagemap: Option<&Pagemap>, slot: &Slot) -> Vec<u64> {
        let is_ram = Arc::ptr_eq(slot.mapping(), &self.mapping);
        let known = is_ram.then(|| self.touched(pagemap, slot).ok().flatten()).flatten();
        known.unwrap_or_else(|| {
            let mut words = vec![u64::MAX; slot.bitmap_words()];
            let rest = slot.pages() % 64;
            if let (Some(last), 1..) = (words.last_mut(), rest) {
                *last = (1 << rest) - 1;
            }
            words
        })
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
                    let Some(words) = memory.touched(Some(&pagemap), slot).unwrap() else {
                        assert_eq!(backing, Backing::Shmem);
                        let all = memory.perhaps_touched(Some(&pagemap), slot);
                        let count: u32 = all.iter().map(|word| word.count_ones()).sum();
                        assert_eq!(u64::from(count), slot.pages());
                        continue;
                    };
                    let page = page - slot.offset() / PAGE_SIZE;
                    assert_eq!(words[page as usize / 64] >> (page % 64) & 1, 1, "{backing}: page {page}");
                    // A huge page is there as a whole.
                    let most = if backing == Backing::Thp { 512 } else { 1 };
                    let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                    assert!((1..=most).contains(&count), "{backing}: {count} pages");
                }
            }
            let private = matches!(backing, Backing::Anonymous | Backing::Thp);
            assert_eq!(
                memory.touched(None, &memory.slots()[0]).unwrap().is_none(),
                private || backing == Backing::Shmem
            );
        }
    }
}
