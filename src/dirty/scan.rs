//! Reading bitmaps, a bit a page, at the speed of memory.
//!
//! A clean bitmap is read eight words at a time without a branch inside, which the compiler turns into vector
//! instructions; dirty pages come out as runs, so that their user works on ranges and not on bits.

use std::ops::Range;

/// Words looked at at once: a cache line.
const LINE: usize = 8;

/// Words that a bitmap of `pages` has.
pub fn words_for(pages: u64) -> usize {
    pages.div_ceil(64) as usize
}

/// Whether none is.
pub fn is_clean(words: &[u64]) -> bool {
    first_other(words, 0).is_none()
}

/// The index of the first word that is not `same`, which is all zeroes or all ones.
fn first_other(words: &[u64], same: u64) -> Option<usize> {
    let differs = |line: &[u64]| line.iter().fold(0, |seen, word| seen | (word ^ same)) != 0;
    // Several lines a test: the test costs more than a line.
    let (coarse, fine) = (LINE * 8, LINE);
    let mut at = 0;
    for step in [coarse, fine, 1] {
        at += words[at..].chunks_exact(step).take_while(|part| !differs(part)).count() * step;
        // What is left of a coarse step is searched in finer ones.
    }
    (at < words.len()).then_some(at)
}

/// The dirty pages of a bitmap as maximal runs, rising.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    pages: u64,
    next: u64,
}

/// The runs among the first `pages` bits of `words`.
pub fn runs(words: &[u64], pages: u64) -> Runs<'_> {
    Runs { words, pages: pages.min(words.len() as u64 * 64), next: 0 }
}

impl Runs<'_> {
    /// The first page from `from` on whose bit differs from `same` (all zeroes or all ones).
    fn seek(&self, from: u64, same: u64) -> Option<u64> {
        let index = (from / 64) as usize;
        let first = (self.words.get(index)? ^ same) >> (from % 64);
        let page = if first != 0 {
            from + u64::from(first.trailing_zeros())
        } else {
            let rest = index + 1;
            let index = rest + first_other(&self.words[rest..], same)?;
            index as u64 * 64 + u64::from((self.words[index] ^ same).trailing_zeros())
        };
        (page < self.pages).then_some(page)
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.seek(self.next, 0)?;
        let end = self.seek(start, u64::MAX).unwrap_or(self.pages);
        self.next = end;
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bits(words: &[u64], pages: u64) -> Vec<u64> {
        (0..pages).filter(|page| words[(page / 64) as usize] >> (page % 64) & 1 == 1).collect()
    }

    /// Words as bitmaps have them: clean, full, or anything.
    fn bitmap() -> impl Strategy<Value = Vec<u64>> {
        let word = prop_oneof![6 => Just(0), 3 => Just(u64::MAX), 2 => any::<u64>(), 1 => (0..64).prop_map(|n| 1u64 << n)];
        let stretch = (word, 1..80usize).prop_map(|(word, times)| vec![word; times]);
        prop::collection::vec(stretch, 1..6).prop_map(|stretches| stretches.concat())
    }

    proptest! {
        #[test]
        fn runs_are_the_set_bits(words in bitmap(), cut in 0..64u64) {
            let pages = words.len() as u64 * 64 - cut;
            let found: Vec<_> = runs(&words, pages).collect();
            prop_assert!(found.windows(2).all(|two| two[0].end < two[1].start), "runs touch or fall: {:?}", found);
            prop_assert!(found.iter().all(|run| run.start < run.end));
            prop_assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), bits(&words, pages));
        }

        #[test]
        fn clean_is_without_a_bit(words in bitmap()) {
            prop_assert_eq!(is_clean(&words), bits(&words, words.len() as u64 * 64).is_empty());
        }
    }

    #[test]
    fn the_ends_of_a_bitmap() {
        assert_eq!(runs(&[], 0).next(), None);
        assert_eq!(runs(&[u64::MAX], 1).next(), Some(0..1));
        assert_eq!(runs(&[1 << 63, 1], 65).next(), Some(63..65));
        assert_eq!(runs(&[0, u64::MAX], 64).next(), None, "a bit beyond the last page is none");
    }
}
