//! Which pages the target has still to be sent.
//!
//! A page is *owed* from the moment that a collection names it until it has been sent. A pass that is given up in its middle leaves the
//! rest owed, so that nothing is lost with it.

use std::ops::Range;

use crate::dirty::SlotLog;
use crate::memory::Slot;
use crate::migration::bits::Bits;
use crate::migration::pages::{Outgoing, fresh};
use crate::migration::share::Share;
use crate::migration::wire::MOST_PAGES;

/// One memslot of the machine, and which of its pages are owed.
struct Region {
    outgoing: Outgoing,
    pages: Bits,
}

/// The memslots of a machine.
pub(in crate::migration) struct Owed(Vec<Region>);

/// Where a pass is: memslot and page.
#[derive(Clone, Copy, Default)]
pub(in crate::migration) struct At(usize, u64);

impl Owed {
    /// Nothing of `memory` is owed.
    pub fn new(memory: Vec<Slot>) -> Self {
        let fresh = fresh(&memory);
        let regions = (0u32..).zip(memory).zip(fresh).map(|((region, slot), fresh)| Region {
            pages: Bits::new(slot.pages()),
            outgoing: Outgoing::new(slot, region, fresh),
        });
        Self(regions.collect())
    }

    /// Its memslots.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.0.iter().map(|region| region.outgoing.slot())
    }

    /// From now on those of memslot `region` are owed that are set in `words`, too.
    pub fn add(&self, region: usize, words: &[u64]) {
        self.0[region].pages.add(words);
    }

    /// The same of every memslot, by its log.
    pub fn add_all(&self, logs: &[SlotLog]) {
        self.0.iter().zip(logs).for_each(|(region, log)| region.pages.add(&log.words));
    }

    /// How many pages are owed.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|region| region.pages.count()).sum()
    }

    /// The next pages of `share` from `at` on that are owed, as many as a frame takes; `at` is behind them then. `None` where there is
    /// none.
    pub fn next(&self, at: &mut At, share: &Share) -> Option<(&Outgoing, Range<u64>)> {
        loop {
            let region = self.0.get(at.0)?;
            let Some(own) = share.next(at.0 as u32, at.1, region.outgoing.slot().pages()) else {
                *at = At(at.0 + 1, 0);
                continue;
            };
            at.1 = own.end;
            if let Some(run) = region.pages.first_run_of(own, MOST_PAGES.into()) {
                at.1 = run.end;
                return Some((&region.outgoing, run));
            }
        }
    }

    /// Nothing of the same memory is owed.
    pub fn none(&self) -> Vec<Bits> {
        self.0.iter().map(|region| Bits::new(region.outgoing.slot().pages())).collect()
    }

    /// They are being sent. Said before they are read: what a collection names from then on is owed again.
    pub fn settle(&self, outgoing: &Outgoing, run: Range<u64>) {
        self.0[outgoing.region() as usize].pages.clear(run);
    }
}
