//! A sender and a receiver with only bytes between them.

use std::iter::once;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::prelude::*;

use super::*;
use crate::message::SessionId;
use crate::wire::{Decoder, Frame};
use vellum_kvm::dirty::scan;
use vellum_sys::mmap::{Mapping, Source};

const SESSION: SessionId = SessionId(*b"pages of a guest");
/// More than one frame holds, and no multiple of 64 bits.
const PAGES: u64 = 150;
const WORDS: usize = PAGE / 8;

/// A slot that does not begin where its mapping does.
fn slot() -> Slot {
    let mapping = Mapping::new((PAGES + 2) * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap();
    Slot::new(0, 0, &Arc::new(mapping), PAGE_SIZE..(PAGES + 1) * PAGE_SIZE).unwrap()
}

fn page(slot: &Slot, page: u64) -> &[AtomicU64] {
    &slot.mapping().words()[(slot.offset() / 8) as usize + page as usize * WORDS..][..WORDS]
}

fn words(slot: &Slot) -> Vec<u64> {
    slot.mapping().words().iter().map(|word| word.load(Ordering::Relaxed)).collect()
}

/// Both sides of one connection.
struct Pair {
    from: Outgoing,
    to: Incoming,
    encoder: Encoder,
    decoder: Decoder,
    block: Block,
}

impl Pair {
    fn new(fresh: bool) -> Self {
        let (from, to) = (Outgoing::new(slot(), 0, fresh), Incoming::new(slot(), fresh));
        let encoder = Encoder::new(SESSION);
        let decoder = Decoder::new(Some(SESSION), PAGE_SIZE as u32);
        Self { from, to, encoder, decoder, block: Block::new() }
    }

    fn target(&self) -> &Slot {
        &self.to.slot
    }

    /// Sends `runs`. Returns the received frames, and what the block has taken.
    fn send(
        &mut self,
        pass: u32,
        runs: impl IntoIterator<Item = Range<u64>>,
    ) -> (Vec<(u64, u32, bool)>, Taken) {
        let (mut frames, mut taken) = (Vec::new(), Taken::default());
        for mut run in runs {
            while !run.is_empty() {
                let end = run.end.min(run.start + u64::from(MAX_PAGES));
                if self.block.room() < end - run.start {
                    self.receive(&mut frames);
                }
                taken += self.block.add(&self.from, run.start..end, pass, &mut self.encoder);
                run.start = end;
            }
        }
        self.receive(&mut frames);
        (frames, taken)
    }

    fn receive(&mut self, frames: &mut Vec<(u64, u32, bool)>) {
        let mut bytes = self.block.bytes();
        while let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() {
            let header = self.decoder.header(header).unwrap();
            let (payload, rest) = rest.split_at(header.len as usize);
            let Frame::Run(run, data) = self.decoder.payload(&header, payload).unwrap() else {
                panic!("{header:?}")
            };
            run.check(&[PAGES]).unwrap();
            self.to.take(&run, data);
            frames.push((run.first, run.pages, data.is_some()));
            bytes = rest;
        }
        self.block.clear();
    }
}

#[test]
fn frames_end_where_they_are_full_or_zeroes_begin_and_end() {
    let mut pair = Pair::new(true);
    let set = |pair: &Pair, pages: Range<u64>, value: u64| {
        // Only the last word, so that the whole page must be read to find it non-zero.
        pages.for_each(|at| page(pair.from.slot(), at)[WORDS - 1].store(value, Ordering::Relaxed));
    };
    set(&pair, 0..70, 1);
    set(&pair, 73..74, 1);
    let (frames, taken) = pair.send(1, once(0..PAGES));
    // No frame is longer than 64 pages, and no block exceeds its room.
    assert_eq!(frames, [(0, 64, true), (64, 6, true), (73, 1, true)]);
    assert_eq!(taken, Taken { pages: 71, skipped: 79, ..Taken::default() });
    // Pages that were sent and are zero now are sent as zero. Pages that were never sent are
    // skipped.
    set(&pair, 60..80, 0);
    let (frames, taken) = pair.send(2, once(50..PAGES));
    assert_eq!(frames, [(50, 10, true), (60, 10, false), (73, 1, false)]);
    assert_eq!(taken, Taken { pages: 10, zeroes: 11, skipped: 79, spared: 0 });
    assert_eq!(words(pair.from.slot()), words(pair.target()));
}

#[test]
fn nothing_is_skipped_where_the_target_does_not_begin_empty() {
    let mut pair = Pair::new(false);
    pair.target().mapping().words().iter().for_each(|word| word.store(7, Ordering::Relaxed));
    let (frames, taken) = pair.send(1, once(0..PAGES));
    assert!(frames.iter().all(|(.., data)| !data), "{frames:?}");
    assert_eq!(taken, Taken { zeroes: PAGES, ..Taken::default() });
    assert!(
        (0..PAGES).all(|at| page(pair.target(), at).iter().all(|word| word.load(Ordering::Relaxed) == 0))
    );
    // The pages around the slot do not belong to it.
    assert_eq!([0, words(pair.target()).len() - 1].map(|at| words(pair.target())[at]), [7, 7]);
}

/// How many pages of `slot` are resident.
fn resident(slot: &Slot) -> usize {
    let mut there = vec![0u8; PAGES as usize];
    // SAFETY: the range is the slot's, and there is a byte for each of its pages.
    let result = unsafe { libc::mincore(slot.hva() as *mut _, slot.bytes() as usize, there.as_mut_ptr()) };
    assert_eq!(result, 0);
    there.iter().filter(|byte| **byte & 1 == 1).count()
}

#[test]
fn zeroes_of_pages_that_never_came_touch_no_memory() {
    let to = Incoming::new(slot(), true);
    let run = Run { region: 0, pass: 1, first: 0, pages: PAGES as u32 };
    to.take(&run, None);
    assert_eq!(resident(&to.slot), 0);
    to.take(&Run { first: 5, pages: 2, ..run }, Some(&[1; 2 * PAGE]));
    to.take(&run, None);
    assert_eq!(resident(&to.slot), 2);
    assert!(words(&to.slot).iter().all(|word| *word == 0));
}

#[test]
fn ram_is_fresh_and_what_else_there_is_may_not_be() {
    let (ram, own) = (slot(), slot());
    let second = ram.at(1, 1 << 32).unwrap();
    assert_eq!(fresh(&[ram, second, own]), [true, true, false]);
    assert!(fresh(&[]).is_empty());
}

#[test]
fn a_block_holds_the_worst_that_its_room_promises() {
    let mut pair = Pair::new(false);
    // Every other page is zero, so each of the rest is a frame.
    (0..PAGES).step_by(2).for_each(|at| page(pair.from.slot(), at)[0].store(1, Ordering::Relaxed));
    assert_eq!(pair.block.room(), u64::from(MAX_PAGES));
    pair.block.add(&pair.from, 0..u64::from(MAX_PAGES), 1, &mut pair.encoder);
    let mut frames = Vec::new();
    pair.receive(&mut frames);
    assert_eq!(frames.len(), MAX_PAGES as usize);
    // Small frames leave room for more.
    pair.block.add(&pair.from, 1..2, 1, &mut pair.encoder);
    assert_eq!(pair.block.room(), u64::from(MAX_PAGES) - 1);
    pair.send(2, once(0..PAGES));
    assert_eq!(words(pair.from.slot()), words(pair.target()));
}

/// The writes before a pass: page, word and value.
type Writes = Vec<(u64, usize, u64)>;

fn writes() -> impl Strategy<Value = Writes> {
    let value = prop_oneof![3 => Just(0u64), 2 => any::<u64>()];
    let near = (0..PAGES, 1..30u64).prop_flat_map(|(at, len)| at..(at + len).min(PAGES));
    prop::collection::vec((near, 0..WORDS, value), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn memory_arrives_as_it_is(
        passes in prop::collection::vec((writes(), prop::collection::vec(0..PAGES, 0..9)), 1..6),
        fresh in any::<bool>(),
    ) {
        let mut pair = Pair::new(fresh);
        for (pass, (writes, more)) in (1..).zip(&passes) {
            let mut dirty = vec![0u64; scan::words_for(PAGES)];
            let mut mark = |page: u64| dirty[(page / 64) as usize] |= 1 << (page % 64);
            // The first pass covers all of memory.
            if pass == 1 {
                (0..PAGES).for_each(&mut mark);
            }
            more.iter().copied().for_each(&mut mark);
            for (at, word, value) in writes {
                // A zero clears the whole page, so pages become zero again.
                let words = page(pair.from.slot(), *at);
                if *value == 0 {
                    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
                }
                words[*word].store(*value, Ordering::Relaxed);
                mark(*at);
            }
            let (_, taken) = pair.send(pass, scan::runs(&dirty, PAGES));
            let dirty: u64 = dirty.iter().map(|word| u64::from(word.count_ones())).sum();
            prop_assert_eq!(taken.pages + taken.zeroes + taken.skipped, dirty);
            prop_assert_eq!(words(pair.from.slot()), words(pair.target()));
        }
    }

    #[test]
    fn runs_of_bits_are_those_of_the_bits(
        set in prop::collection::vec((0..PAGES, 1..70u64), 0..6), within in (0..PAGES, 0..PAGES),
    ) {
        let bits = Bits::new(PAGES);
        let mut model = vec![false; PAGES as usize];
        for (first, len) in set {
            let pages = first..(first + len).min(PAGES);
            pages.clone().for_each(|page| model[page as usize] = true);
            bits.set(pages);
        }
        let within = within.0.min(within.1)..within.0.max(within.1);
        let start = within.clone().find(|page| model[*page as usize]);
        let run = start.map(|start| start..(start..within.end).find(|page| !model[*page as usize]).unwrap_or(within.end));
        prop_assert_eq!(bits.first_run(within), run);
    }
}

/// Ends the writer, even if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_is_written_meanwhile_makes_no_sum_wrong() {
    let mut pair = Pair::new(true);
    let slot = pair.from.slot().clone();
    let over = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Zero and non-zero values alternate, so that a page can become either between two
            // reads.
            let mut value = 0u64;
            while !over.load(Ordering::Relaxed) {
                value = if value == 0 { rounds.load(Ordering::Relaxed) + 1 } else { 0 };
                (0..PAGES)
                    .flat_map(|at| page(&slot, at))
                    .for_each(|word| word.store(value, Ordering::Relaxed));
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _over = Over(&over);
        let mut pass = 0;
        // `receive` fails on a wrong checksum. The loop lasts until the writer has been over all of
        // memory often enough to have met the copy.
        while rounds.load(Ordering::Relaxed) < 200 || pass < 50 {
            pass += 1;
            pair.send(pass, once(0..PAGES));
        }
    });
    // The last writes are in the pass after them.
    pair.send(u32::MAX, once(0..PAGES));
    assert_eq!(words(pair.from.slot()), words(pair.target()));
}
