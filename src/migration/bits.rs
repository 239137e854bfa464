//! A bitmap of pages that several threads may set and clear. Each thread of a connection touches
//! only that connection's pages.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_kvm::dirty::scan;

/// The bitmap.
#[derive(Debug)]
pub(crate) struct Bits(Vec<AtomicU64>);

impl Bits {
    /// A bitmap of `pages` pages with no bit set.
    pub fn new(pages: u64) -> Self {
        Self((0..scan::words_for(pages)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Sets the bits of `pages`.
    pub fn set(&self, pages: Range<u64>) {
        each_word(pages, |word, mask| {
            self.0[word].fetch_or(mask, Ordering::Relaxed);
        });
    }

    /// Clears the bits of `pages`.
    pub fn clear(&self, pages: Range<u64>) {
        each_word(pages, |word, mask| {
            self.0[word].fetch_and(!mask, Ordering::Relaxed);
        });
    }

    /// Clears the bits of `pages`. Returns how many were set.
    pub fn take(&self, pages: Range<u64>) -> u64 {
        let mut set = 0;
        each_word(pages, |word, mask| {
            set += u64::from((self.0[word].fetch_and(!mask, Ordering::Relaxed) & mask).count_ones());
        });
        set
    }

    /// Sets the bits that are set in `words`.
    pub fn add(&self, words: &[u64]) {
        for (mine, word) in self.0.iter().zip(words).filter(|(_, word)| **word != 0) {
            mine.fetch_or(*word, Ordering::Relaxed);
        }
    }

    /// Sets the bits that are set in `words`. The first word begins at page `first`, a multiple of
    /// 64.
    pub(crate) fn add_at(&self, first: u64, words: &[u64]) {
        let from = (first / 64) as usize;
        for (mine, word) in self.0[from..].iter().zip(words) {
            mine.fetch_or(*word, Ordering::Relaxed);
        }
    }

    /// Sets the bits that are set in `words` and not in `but`.
    pub(crate) fn add_but(&self, words: &[u64], but: &Self) {
        for ((mine, word), but) in self.0.iter().zip(words).zip(&but.0) {
            let word = word & !but.load(Ordering::Relaxed);
            if word != 0 {
                mine.fetch_or(word, Ordering::Relaxed);
            }
        }
    }

    /// Copies the bits of `other`.
    pub(crate) fn copy_from(&self, other: &Self) {
        let words = self.0.iter().zip(&other.0);
        words.for_each(|(mine, other)| mine.store(other.load(Ordering::Relaxed), Ordering::Relaxed));
    }

    /// The bitmap as words.
    pub fn words(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// How many bits are set.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// The first run of pages in `pages` whose bits are set. It is never empty, even if other threads
    /// clear bits meanwhile.
    pub(crate) fn first_run(&self, pages: Range<u64>) -> Option<Range<u64>> {
        self.first_run_of(pages, u64::MAX)
    }

    /// The first run, cut to `most` pages. Later bits are not read.
    pub(crate) fn first_run_of(&self, pages: Range<u64>, most: u64) -> Option<Range<u64>> {
        let start = self.first(pages.clone(), 0)?;
        let end = pages.end.min(start.saturating_add(most));
        // Another thread may have cleared the first bit meanwhile. It was set, so the run has its page.
        Some(start..self.first(start + 1..end, u64::MAX).unwrap_or(end))
    }

    /// The first of `pages` whose bit differs from `same`, which is all zeroes or all ones.
    fn first(&self, pages: Range<u64>, same: u64) -> Option<u64> {
        let mut at = pages.start;
        while at < pages.end {
            let word = (self.0[(at / 64) as usize].load(Ordering::Relaxed) ^ same) >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros())).filter(|at| *at < pages.end);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

/// Calls `each` with each word that has bits of `pages`, and with the mask of these bits.
fn each_word(pages: Range<u64>, mut each: impl FnMut(usize, u64)) {
    let mut at = pages.start;
    while at < pages.end {
        let count = (64 - at % 64).min(pages.end - at);
        each((at / 64) as usize, u64::MAX >> (64 - count) << (at % 64));
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn runs_are_set_found_and_cleared() {
        let bits = Bits::new(300);
        bits.set(3..200);
        bits.clear(64..70);
        bits.add(&[0, 0, 0, 0, 1 << 43]);
        assert_eq!(bits.count(), 197 - 6 + 1);
        assert_eq!((bits.take(250..280), bits.count()), (0, 192));
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(run) = bits.first_run(at..300) {
            at = run.end;
            found.push(run);
        }
        assert_eq!(found, [3..64, 70..200, 299..300]);
        assert_eq!(bits.first_run(5..20), Some(5..20));
        assert_eq!(bits.first_run(200..299), None);
        assert_eq!(bits.first_run_of(60..300, 8), Some(60..64));
        assert_eq!(bits.first_run_of(64..300, 8), Some(70..78));
    }

    /// Two connections may bring the same page. With an empty run, UFFDIO_COPY would fail.
    #[test]
    fn a_run_has_a_page_although_others_clear_it() {
        let (bits, done) = (Bits::new(64), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    bits.set(5..6);
                    bits.clear(5..6);
                }
            });
            let runs = std::iter::repeat_with(|| bits.first_run(0..64)).flatten();
            let empty = runs.take(100_000).filter(Range::is_empty).count();
            done.store(true, Ordering::Relaxed);
            assert_eq!(empty, 0);
        });
    }
}
