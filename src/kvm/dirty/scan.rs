//! Reads bitmaps, a bit a page, at the speed of memory.
//!
//! A clean bitmap is read many words at a time without a branch, which the compiler vectorizes. For
//! a block that is not clean, a mask tells which words have bits, again without a branch: with
//! sparse dirty pages, a test of each word would be mispredicted at every page. Dirty pages are
//! returned as runs, so users work on ranges instead of bits.

use std::cmp::Ordering;
use std::ops::Range;

/// Words tested at once: a cache line.
const LINE: usize = 8;

/// Words of a block: as many as a mask has bits.
const BLOCK: usize = 64;

/// The number of words of a bitmap for `pages`.
pub fn words_for(pages: u64) -> usize {
    pages.div_ceil(64) as usize
}

/// Whether no bit is set.
pub fn is_clean(words: &[u64]) -> bool {
    first_other(words, 0).is_none()
}

/// The first run of dirty pages in `pages`, for a reader that changes the bitmap on the way.
pub fn first_run(words: &[u64], pages: Range<u64>) -> Option<Range<u64>> {
    let start = first_page(words, pages.clone(), 0)?;
    Some(start..first_page(words, start..pages.end, u64::MAX).unwrap_or(pages.end))
}

/// The first of `pages` whose bit differs from those of `same`, which is all zeroes or all ones.
fn first_page(words: &[u64], pages: Range<u64>, same: u64) -> Option<u64> {
    let index = (pages.start / 64) as usize;
    let rest = (words.get(index)? ^ same) >> (pages.start % 64);
    let page = if rest != 0 {
        pages.start + u64::from(rest.trailing_zeros())
    } else {
        let index = index + 1 + first_other(&words[index + 1..], same)?;
        index as u64 * 64 + u64::from((words[index] ^ same).trailing_zeros())
    };
    (page < pages.end).then_some(page)
}

/// Clears the bits of `pages`.
pub fn clear(words: &mut [u64], pages: Range<u64>) {
    let mut at = pages.start;
    while at < pages.end {
        let count = (64 - at % 64).min(pages.end - at);
        words[(at / 64) as usize] &= !(u64::MAX >> (64 - count) << (at % 64));
        at += count;
    }
}

/// The index of the first word that is not `same`, which is all zeroes or all ones.
fn first_other(words: &[u64], same: u64) -> Option<usize> {
    let differs = |line: &[u64]| line.iter().fold(0, |seen, word| seen | (word ^ same)) != 0;
    let mut at = 0;
    // Test several lines at once, because a test costs more than a line. The rest is tested in
    // finer steps.
    for step in [BLOCK, LINE, 1] {
        at += words[at..].chunks_exact(step).take_while(|part| !differs(part)).count() * step;
    }
    (at < words.len()).then_some(at)
}

/// The dirty pages of a bitmap as maximal runs, in rising order.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    pages: u64,
    /// The current word, and its bits that no run has covered yet.
    index: usize,
    bits: u64,
    /// The later words of the current block that have bits.
    others: u64,
}

/// The words with bits in the block that begins at `first`.
fn occupied(words: &[u64], first: usize) -> u64 {
    let mask = |words: &[u64]| {
        words.iter().enumerate().fold(0, |mask, (index, word)| mask | u64::from(*word != 0) << index)
    };
    // Line by line, with a known length: two short dependency chains take half the time of one long
    // chain.
    let lines = |block: &[u64; BLOCK]| {
        let lines = block.as_chunks::<LINE>().0.iter().enumerate();
        lines.fold(0, |all, (index, line)| all | mask(line) << (index * LINE))
    };
    match words[first..].first_chunk::<BLOCK>() {
        Some(block) => lines(block),
        None => mask(&words[first..]),
    }
}

impl Runs<'_> {
    /// Moves to the word at `index`, or beyond the last.
    fn go_to(&mut self, index: usize) {
        let block = index / BLOCK * BLOCK;
        if block != self.index / BLOCK * BLOCK {
            self.others = if index < self.words.len() { occupied(self.words, block) } else { 0 };
        }
        // Shifted twice: a shift by 64 is undefined.
        self.others &= u64::MAX << (index - block) << 1;
        self.index = index;
        self.bits = self.words.get(index).copied().unwrap_or(0);
    }
}

/// The runs among the first `pages` bits of `words`.
pub fn runs(words: &[u64], pages: u64) -> Runs<'_> {
    let bits = words.first().copied().unwrap_or(0);
    let others = occupied(words, 0) & (u64::MAX << 1);
    Runs { words, pages: pages.min(words.len() as u64 * 64), index: 0, bits, others }
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    // A call would double the time to find a run of one page.
    #[inline(always)]
    fn next(&mut self) -> Option<Range<u64>> {
        if self.bits == 0 {
            if self.others != 0 {
                self.index = self.index / BLOCK * BLOCK + self.others.trailing_zeros() as usize;
                self.others &= self.others - 1;
                self.bits = self.words[self.index];
            } else {
                let rest = (self.index / BLOCK + 1) * BLOCK;
                self.go_to(rest + first_other(self.words.get(rest..)?, 0)?);
            }
        }
        let low = self.bits.trailing_zeros();
        let start = self.index as u64 * 64 + u64::from(low);
        let high = low + (!(self.bits >> low)).trailing_zeros();
        let end = if high < 64 {
            self.bits &= u64::MAX << high;
            self.index as u64 * 64 + u64::from(high)
        } else {
            // The run continues in the next word, and ends in the first word that is not full.
            let rest = self.index + 1;
            self.go_to(first_other(&self.words[rest..], u64::MAX).map_or(self.words.len(), |at| rest + at));
            let taken = (!self.bits).trailing_zeros();
            self.bits &= u64::MAX << taken;
            self.index as u64 * 64 + u64::from(taken)
        };
        // Bits beyond the last page are ignored.
        (start < self.pages).then(|| start..end.min(self.pages))
    }

    /// Used by `for_each` and `sum`. Works word by word, without state between runs. With sparse
    /// dirty pages that takes a quarter less time.
    #[inline]
    fn fold<B, F: FnMut(B, Range<u64>) -> B>(self, init: B, mut f: F) -> B {
        let Runs { words, pages, index, bits, .. } = self;
        // The start of a run that reaches the end of its word.
        let mut open = None;
        let mut word = |mut all: B, base: u64, mut bits: u64| {
            if let Some(start) = open {
                if bits == u64::MAX {
                    return all;
                }
                let taken = (!bits).trailing_zeros();
                bits &= u64::MAX << taken;
                open = None;
                all = f(all, start..base + u64::from(taken));
            }
            // A page alone in its word, the usual case of sparse pages. This shortcut saves a third
            // of the time.
            if bits.is_power_of_two() && bits >> 63 == 0 {
                let page = base + u64::from(bits.trailing_zeros());
                return f(all, page..page + 1);
            }
            while bits != 0 {
                let low = bits.trailing_zeros();
                let high = low + (!(bits >> low)).trailing_zeros();
                if high == 64 {
                    open = Some(base + u64::from(low));
                    break;
                }
                bits &= u64::MAX << high;
                all = f(all, base + u64::from(low)..base + u64::from(high));
            }
            all
        };
        // The last word may have bits beyond the last page.
        let (whole, last) = ((pages / 64) as usize, !(u64::MAX << (pages % 64)));
        let valid = |index: usize, bits: u64| match index.cmp(&whole) {
            Ordering::Less => bits,
            Ordering::Equal => bits & last,
            Ordering::Greater => 0,
        };
        let mut base = index as u64 * 64;
        let mut all = word(init, base, valid(index, bits));
        base += 64;
        for block in words[..whole].get(index + 1..).unwrap_or_default().chunks(BLOCK) {
            if first_other(block, 0).is_none() {
                // Ends a run that reached the end of the previous block.
                all = word(all, base, 0);
                base += block.len() as u64 * 64;
                continue;
            }
            for &bits in block {
                all = word(all, base, bits);
                base += 64;
            }
        }
        if last != 0 && index < whole {
            all = word(all, base, words[whole] & last);
        }
        match open {
            Some(start) => f(all, start..pages),
            None => all,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bits(words: &[u64], pages: u64) -> Vec<u64> {
        (0..pages).filter(|page| words[(page / 64) as usize] >> (page % 64) & 1 == 1).collect()
    }

    /// Words as in real bitmaps: clean, full, or random.
    fn bitmap() -> impl Strategy<Value = Vec<u64>> {
        let word = prop_oneof![6 => Just(0), 3 => Just(u64::MAX), 2 => any::<u64>(), 1 => (0..64).prop_map(|n| 1u64 << n), 1 => Just(1u64 << 63)];
        let stretch = (word, prop_oneof![1..80usize, 1..4usize, Just(BLOCK), Just(2 * BLOCK)])
            .prop_map(|(word, times)| vec![word; times]);
        prop::collection::vec(stretch, 1..6).prop_map(|stretches| stretches.concat())
    }

    proptest! {
        #[test]
        fn runs_are_the_set_bits(words in bitmap(), cut in 0..64u64) {
            let pages = words.len() as u64 * 64 - cut;
            let found: Vec<_> = std::iter::from_fn({
                let mut each = runs(&words, pages);
                move || each.next()
            }).collect();
            // Fold after some calls of `next`.
            for taken in 0..=found.len().min(3) {
                let (mut some, mut rest) = (runs(&words, pages), Vec::new());
                (0..taken).for_each(|_| _ = some.next());
                some.for_each(|run| rest.push(run));
                prop_assert_eq!(&rest, &found[taken..]);
            }
            let mut none = runs(&words, pages);
            while none.next().is_some() {}
            prop_assert_eq!(none.count(), 0);
            prop_assert!(found.windows(2).all(|two| two[0].end < two[1].start), "runs touch or fall: {:?}", found);
            prop_assert!(found.iter().all(|run| run.start < run.end));
            prop_assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), bits(&words, pages));
        }

        /// A reader that clears what it has read.
        #[test]
        fn runs_one_by_one_are_the_same(words in bitmap(), cut in 0..64u64, most in 1..100u64) {
            let pages = words.len() as u64 * 64 - cut;
            let (mut left, mut at, mut found) = (words.clone(), 0, Vec::new());
            while let Some(run) = first_run(&left, at..pages) {
                let run = run.start..run.end.min(run.start + most);
                clear(&mut left, run.clone());
                at = run.end;
                found.extend(run);
            }
            prop_assert_eq!(found, bits(&words, pages));
            prop_assert!(bits(&left, pages).is_empty());
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
