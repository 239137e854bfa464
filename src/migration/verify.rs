//! `--verify`: compares both sides' memory while both are paused.
//!
//! The source checksums every page that may be non-zero ([`Sums`]). The target compares them with
//! its own ([`Comparison`]). A page that the source does not mention is zero there and must be zero
//! here. Untouched pages are known to be zero, and neither side reads them. Each side learns from
//! its own kernel which pages are untouched, not from harvested or sent pages. So a page that was
//! lost in between differs.
//!
//! The checksum is CRC-64/NVME: 8 bytes. It detects every error burst of up to 64 bits, and misses
//! one in 2^64 of other changes.

use crc_fast::CrcAlgorithm::Crc64Nvme;
use crc_fast::checksum;

use super::bits::Bits;
use super::wire::{MAX_SUMS, Run, SUM};
use vellum_kvm::dirty::scan;
use vellum_kvm::memory::{Memory, Slot};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::Pagemap;

const PAGE: usize = PAGE_SIZE as usize;
/// The maximum number of differing pages whose addresses are reported.
pub const MAX_TOLD: usize = 16;

/// A memslot, and a bitmap of its pages that may be non-zero.
pub type Touched = (Slot, Vec<u64>);

/// Which pages of `slots` may be non-zero. The guest must be paused.
pub fn touched<'a>(
    ram: &Memory,
    pagemap: Option<&Pagemap>,
    slots: impl Iterator<Item = &'a Slot>,
) -> Vec<Touched> {
    let touched = |slot: &Slot| {
        let pages = Bits::new(slot.pages());
        ram.perhaps_touched(pagemap, slot, 0..slot.pages(), |run| pages.set(run));
        (slot.clone(), pages.words())
    };
    slots.map(touched).collect()
}

/// Checksums pages, one at a time.
struct Summer(Box<[u8; PAGE]>);

impl Summer {
    fn new() -> Self {
        Self(Box::new([0; PAGE]))
    }

    fn sum(&mut self, slot: &Slot, page: u64) -> u64 {
        slot.mapping().copy_to(slot.offset() + page * PAGE_SIZE, &mut self.0[..]);
        checksum(Crc64Nvme, &self.0[..])
    }
}

/// The source's side: the checksums to send, frame by frame.
pub struct Sums {
    memory: Vec<Touched>,
    /// The next memslot and page.
    at: (usize, u64),
    summer: Summer,
    payload: Vec<u8>,
    /// How many pages have been checksummed.
    pub pages: u64,
}

impl Sums {
    /// Checksums of `memory`, which must not change meanwhile.
    pub fn new(memory: Vec<Touched>) -> Self {
        let payload = Vec::with_capacity(MAX_SUMS as usize * SUM);
        Self { memory, at: (0, 0), summer: Summer::new(), payload, pages: 0 }
    }

    /// The next run and the checksums of its pages. None at the end.
    pub(crate) fn next_run(&mut self) -> Option<(Run, &[u8])> {
        loop {
            let (slot, words) = self.memory.get(self.at.0)?;
            let Some(found) = scan::first_run(words, self.at.1..slot.pages()) else {
                self.at = (self.at.0 + 1, 0);
                continue;
            };
            let end = found.end.min(found.start + u64::from(MAX_SUMS));
            self.payload.clear();
            for page in found.start..end {
                self.payload.extend_from_slice(&self.summer.sum(slot, page).to_le_bytes());
            }
            let pages = (end - found.start) as u32;
            let run = Run { region: self.at.0 as u32, pass: 1, first: found.start, pages };
            self.at.1 = end;
            self.pages += u64::from(pages);
            return Some((run, &self.payload));
        }
    }
}

/// The target's side: the result so far.
pub struct Comparison {
    memory: Vec<Touched>,
    /// A bitmap of the pages that the source has checksummed.
    said: Vec<Vec<u64>>,
    summer: Summer,
    zero: u64,
    /// How many pages the source has checksummed.
    pub pages: u64,
    /// How many pages differ.
    pub wrong: u64,
    /// The guest addresses of the first pages that differ, at most [`MAX_TOLD`].
    pub first: Vec<u64>,
}

impl Comparison {
    /// A comparison with `memory`, which must not change meanwhile.
    pub fn new(memory: Vec<Touched>) -> Self {
        let said = memory.iter().map(|(_, words)| vec![0; words.len()]).collect();
        let zero = checksum(Crc64Nvme, &[0; PAGE]);
        Self { memory, said, summer: Summer::new(), zero, pages: 0, wrong: 0, first: Vec::new() }
    }

    /// Compares the pages of `run`, which has been checked ([`Run::check`]), with `sums`.
    ///
    /// # Panics
    /// The pages are not inside the memslot.
    pub fn take(&mut self, run: &Run, sums: &[u8]) {
        let region = run.region as usize;
        for (page, sum) in (run.first..).zip(sums.as_chunks::<SUM>().0) {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            self.said[region][word] |= bit;
            let (slot, touched) = &self.memory[region];
            let own = if touched[word] & bit == 0 { self.zero } else { self.summer.sum(slot, page) };
            if own != u64::from_le_bytes(*sum) {
                self.differs(region, page);
            }
        }
        self.pages += u64::from(run.pages);
    }

    /// Checks the pages that the source has not mentioned.
    pub fn finish(&mut self) {
        for region in 0..self.memory.len() {
            for word in 0..self.said[region].len() {
                let mut rest = self.memory[region].1[word] & !self.said[region][word];
                while rest != 0 {
                    let page = word as u64 * 64 + u64::from(rest.trailing_zeros());
                    rest &= rest - 1;
                    let slot = &self.memory[region].0;
                    if page < slot.pages() && self.summer.sum(slot, page) != self.zero {
                        self.differs(region, page);
                    }
                }
            }
        }
    }

    fn differs(&mut self, region: usize, page: u64) {
        self.wrong += 1;
        if self.first.len() < MAX_TOLD {
            self.first.push(self.memory[region].0.gpa() + page * PAGE_SIZE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::*;
    use vellum_sys::mmap::{Mapping, Source};

    const GPA: u64 = 1 << 20;

    fn slot(pages: u64) -> Slot {
        let mapping = Arc::new(Mapping::new(pages * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        Slot::new(0, GPA, &mapping, 0..pages * PAGE_SIZE).unwrap()
    }

    fn write(slot: &Slot, page: u64, value: u64) {
        slot.mapping().words()[(page * PAGE_SIZE / 8 + 9) as usize].store(value, Ordering::Relaxed);
    }

    fn compare(from: Vec<Touched>, to: Vec<Touched>) -> (u64, u64, Vec<u64>) {
        let (mut sums, mut comparison) = (Sums::new(from), Comparison::new(to));
        while let Some((run, payload)) = sums.next_run() {
            assert_eq!(payload.len(), run.pages as usize * SUM);
            comparison.take(&run, payload);
        }
        comparison.finish();
        assert_eq!(sums.pages, comparison.pages);
        (comparison.pages, comparison.wrong, comparison.first)
    }

    #[test]
    fn what_differs_is_told_by_its_address_and_what_is_alike_is_not() {
        let pages = 2000;
        let (here, there) = (slot(pages), slot(pages));
        let all = vec![u64::MAX; here.bitmap_words()];
        let known = |page: u64| {
            let mut words = vec![0; here.bitmap_words()];
            words[(page / 64) as usize] = 1 << (page % 64);
            words
        };
        for slot in [&here, &there] {
            write(slot, 700, 5);
        }
        for (from, to) in [(all.clone(), all.clone()), (known(700), known(700)), (known(700), all.clone())] {
            let summed = from.iter().map(|word| u64::from(word.count_ones())).sum::<u64>().min(pages);
            assert_eq!(compare(vec![(here.clone(), from)], vec![(there.clone(), to)]), (summed, 0, vec![]));
        }
        // A page that never arrived, one that arrived wrong, and one that was never sent.
        write(&here, 3, 1);
        write(&there, 700, 6);
        write(&there, 1999, 1);
        let mut mine = known(700);
        mine[0] |= 1 << 3;
        let mut theirs = known(700);
        theirs[1999 / 64] |= 1 << (1999 % 64);
        let (_, wrong, first) = compare(vec![(here, mine)], vec![(there, theirs)]);
        assert_eq!((wrong, first), (3, [3, 700, 1999].map(|page| GPA + page * PAGE_SIZE).to_vec()));
    }
}
