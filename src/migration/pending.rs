//! Which pages the target, or a snapshot, has still to get.
//!
//! A page is *owed* from the moment that a collection names it until it has been sent. A pass that is given up in its middle leaves the
//! rest owed, so that nothing is lost with it.
//!
//! What KVM's log has of a page is cleared between the two, chunk by chunk, by whoever comes to the chunk first: [`PendingPages::next`] hands out
//! no page of which that has not been done. What is named and neither cleared nor sent when a pass ends is named again by the next
//! collection.
//!
//! A log in which all is set at first says nothing of a chunk until that is cleared for the first time, and a chunk that nobody has
//! touched is never cleared. Of such memory [`UnclearedPages`] tells what is news.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bits::Bits;
use crate::pages::{Outgoing, fresh};
use crate::share::Share;
use crate::wire::MAX_PAGES;
use vellum_kvm::dirty::{self, DirtyTracker, Method, SlotLog};
use vellum_kvm::memory::{Memory, Slot};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};

/// One memslot of the machine, and which of its pages are owed.
struct Region {
    outgoing: Outgoing,
    pages: Bits,
}

/// Of one memslot, what its log does not say. What is touched there is news: in a chunk that was never cleared, every page has been
/// owed since it was first touched, or is zero as the target's is.
struct UnclearedPages {
    /// The pages of which the log says nothing yet.
    unsaid: Bits,
    /// Those that were so when it was last asked what has been touched: what was touched between that and the clear of their chunk
    /// is in no log either.
    due: Bits,
    /// Those that nobody had touched by then.
    untouched: Bits,
}

impl UnclearedPages {
    /// Nothing is known of `slot`.
    fn new(slot: &Slot) -> Self {
        let all = || {
            let bits = Bits::new(slot.pages());
            bits.set(0..slot.pages());
            bits
        };
        Self { unsaid: all(), due: all(), untouched: all() }
    }

    /// Tells `news` which of the pages that are due were touched since it was last asked; whether the log says everything from now on.
    fn ask(&self, ram: &Memory, pagemap: Option<&Pagemap>, slot: &Slot, news: &Bits) -> bool {
        let mut rest = 0..slot.pages();
        while let Some(due) = self.due.first_run(rest.clone()) {
            rest.start = due.end;
            ram.perhaps_touched(pagemap, slot, due, |mut touched| {
                while let Some(run) = self.untouched.first_run(touched.clone()) {
                    touched.start = run.end;
                    self.untouched.clear(run.clone());
                    news.set(run);
                }
            });
        }
        self.due.copy_from(&self.unsaid);
        self.unsaid.first_run(0..slot.pages()).is_none()
    }
}

/// Who says what has been written.
#[derive(Default)]
struct Log {
    tracker: Option<Box<dyn DirtyTracker>>,
    /// Memslot by memslot, as long as there is something that the log does not say.
    silence: Option<Vec<UnclearedPages>>,
    /// How long the longest clear took.
    longest: Duration,
}

/// The memslots of a machine.
pub(crate) struct PendingPages {
    regions: Vec<Region>,
    log: Mutex<Log>,
}

/// Where a pass is: memslot and page, and the page up to which that memslot's log has been cleared for it.
#[derive(Default)]
pub(crate) struct At {
    region: usize,
    page: u64,
    cleared: u64,
}

impl PendingPages {
    /// Nothing of `memory` is owed, and nobody follows who writes to it.
    pub fn new(memory: Vec<Slot>) -> Self {
        let fresh = fresh(&memory);
        let regions = (0u32..).zip(memory).zip(fresh).map(|((region, slot), fresh)| Region {
            pages: Bits::new(slot.pages()),
            outgoing: Outgoing::new(slot, region, fresh),
        });
        Self { regions: regions.collect(), log: Mutex::default() }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // Whoever panicked while it was held has ended its pass: what it had not sent is owed.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its memslots.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.regions.iter().map(|region| region.outgoing.slot())
    }

    /// Whether somebody follows who writes.
    pub fn is_followed(&self) -> bool {
        self.log().tracker.is_some()
    }

    /// Switches `tracker`'s log on: what has been touched until now is owed, and from now on what each [collection](Self::collect) names.
    /// `pagemap` tells what of `ram` was ever touched.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn follow(
        &self,
        tracker: Box<dyn DirtyTracker>,
        ram: &Memory,
        pagemap: Option<&Pagemap>,
    ) -> Result<(), dirty::Error> {
        let mut log = self.log();
        let tracker = log.tracker.insert(tracker);
        tracker.enable(true)?;
        let all_set = tracker.method() == Method::InitiallySet;
        if all_set {
            // For the chunks to be cleared one by one. No page of it is owed for that.
            tracker.get()?;
        }
        // Asked after the log is on: what is touched from now on is in that.
        let silence: Vec<_> = self.slots().map(UnclearedPages::new).collect();
        self.ask(&silence, ram, pagemap);
        if !all_set {
            tracker.collect_deferred()?;
            self.regions.iter().zip(tracker.logs()).for_each(|(region, log)| region.pages.add(&log.words));
        }
        log.silence = all_set.then_some(silence);
        Ok(())
    }

    /// Owes what was touched of memory of which the log says nothing; whether the log says everything from now on.
    fn ask(&self, silence: &[UnclearedPages], ram: &Memory, pagemap: Option<&Pagemap>) -> bool {
        let asked = self
            .regions
            .iter()
            .zip(silence)
            .map(|(region, silence)| silence.ask(ram, pagemap, region.outgoing.slot(), &region.pages));
        asked.fold(true, |all, said| all & said)
    }

    /// Owes what has been written since the last collection, too.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn collect(&self, ram: &Memory, pagemap: Option<&Pagemap>) -> Result<(), dirty::Error> {
        let mut log = self.log();
        let Log { tracker: Some(tracker), silence, .. } = &mut *log else { return Ok(()) };
        silence.take_if(|silence| !plant::is(Mistake::SilenceLeftOut) && self.ask(silence, ram, pagemap));
        tracker.collect_deferred()?;
        if plant::is(Mistake::DroppedBit) {
            let first = |log: &mut SlotLog| {
                log.words.iter_mut().find(|word| **word != 0).map(|word| *word &= *word - 1)
            };
            let _ = tracker.logs_mut().iter_mut().filter_map(first).count();
        }
        for (at, (region, log)) in self.regions.iter().zip(tracker.logs()).enumerate() {
            match silence {
                // There all bits are set, and stay so until their chunk is cleared.
                Some(silence) => region.pages.add_but(&log.words, &silence[at].unsaid),
                None => region.pages.add(&log.words),
            }
        }
        Ok(())
    }

    /// All memory but `ram` is owed.
    pub fn owe_all_but(&self, ram: &Memory) {
        let others = self.regions.iter().filter(|region| !ram.holds(region.outgoing.slot()));
        others.for_each(|region| region.pages.set(0..region.outgoing.slot().pages()));
    }

    /// Nobody follows any more who writes; KVM's log is switched off.
    pub fn unfollow(&self) {
        let log = std::mem::take(&mut *self.log());
        if let Some(mut tracker) = log.tracker
            && let Err(error) = tracker.enable(false)
        {
            tracing::warn!("the dirty log cannot be switched off: {error}");
        }
    }

    /// How many pages each vCPU has written, where the tracker knows ([`DirtyTracker::written`]).
    pub fn written(&self) -> Vec<u64> {
        self.log().tracker.as_ref().map_or_else(Vec::new, |tracker| tracker.written())
    }

    /// How long the longest clear has taken since this was last asked.
    pub fn longest_clear(&self) -> Duration {
        std::mem::take(&mut self.log().longest)
    }

    /// A memslot, as the target knows it.
    pub fn outgoing(&self, region: usize) -> &Outgoing {
        &self.regions[region].outgoing
    }

    /// Owes what was ever touched of memory that nobody has followed, and that stands still.
    pub fn owe_touched(&self, ram: &Memory, pagemap: Option<&Pagemap>) {
        for region in &self.regions {
            let slot = region.outgoing.slot();
            ram.perhaps_touched(pagemap, slot, 0..slot.pages(), |run| region.pages.set(run));
        }
    }

    /// Owes nothing of RAM for the moment: which of its pages were owed, a bit each, by their memslots. The target is told of each of
    /// them then, those too that are zero.
    pub fn defer(&self) -> Vec<(u32, Bits)> {
        let mut deferred = Vec::new();
        let fresh = fresh(&self.slots().cloned().collect::<Vec<_>>());
        for (region, _) in self.regions.iter().zip(fresh).filter(|(_, fresh)| *fresh) {
            let pages = region.outgoing.slot().pages();
            let bits = Bits::new(pages);
            bits.add(&region.pages.words());
            region.pages.clear(0..pages);
            deferred.push((region.outgoing.region(), bits));
        }
        deferred
    }

    /// Of memslot `region` those are owed that are set in `bits`, and no others.
    pub fn owe(&self, region: u32, bits: &Bits) {
        let Region { outgoing, pages } = &self.regions[region as usize];
        pages.copy_from(bits);
        let mut rest = 0..outgoing.slot().pages();
        while let Some(run) = bits.first_run(rest.clone()) {
            rest.start = run.end;
            outgoing.tell(run);
        }
    }

    /// From now on those of memslot `region` are owed that are set in `words`, too.
    pub fn add(&self, region: usize, words: &[u64]) {
        self.regions[region].pages.add(words);
    }

    /// How many pages are owed.
    pub fn count(&self) -> u64 {
        self.regions.iter().map(|region| region.pages.count()).sum()
    }

    /// The next pages of `share` from `at` on that are owed, as many as a frame takes; `at` is behind them then. `None` where there is
    /// none. The log of them is clear when this returns: they may be [settled](Self::settle) and read.
    ///
    /// # Errors
    /// Where KVM does not clear it.
    pub fn next(&self, at: &mut At, share: &Share) -> Result<Option<(&Outgoing, Range<u64>)>, dirty::Error> {
        while let Some(region) = self.regions.get(at.region) {
            let pages = region.outgoing.slot().pages();
            let Some(own) = share.next(at.region as u32, at.page, pages) else {
                *at = At { region: at.region + 1, ..At::default() };
                continue;
            };
            at.page = own.end;
            if let Some(run) = region.pages.first_run_of(own, MAX_PAGES.into()) {
                at.page = run.end;
                if at.cleared < run.end {
                    at.cleared = self.clear(at.region, run.clone())?;
                }
                return Ok(Some((&region.outgoing, run)));
            }
        }
        Ok(None)
    }

    /// Clears the log of the chunks that hold `pages`, unless it is clear; up to which page it is then.
    fn clear(&self, region: usize, pages: Range<u64>) -> Result<u64, dirty::Error> {
        let mut log = self.log();
        let Log { tracker: Some(tracker), silence, longest } = &mut *log else { return Ok(u64::MAX) };
        let since = Instant::now();
        let cleared = match plant::is(Mistake::ReadBeforeClear) {
            false => tracker.clear_chunks(region, pages)?,
            true => {
                // That of the memslot before, whose pages have been sent.
                region.checked_sub(1).map(|before| tracker.clear_chunks(before, 0..u64::MAX)).transpose()?;
                0..u64::MAX
            }
        };
        let said = cleared.start..cleared.end.min(self.regions[region].outgoing.slot().pages());
        silence.iter().for_each(|silence| silence[region].unsaid.clear(said.clone()));
        *longest = since.elapsed().max(*longest);
        Ok(cleared.end)
    }

    /// Nothing of the same memory is owed.
    pub fn none(&self) -> Vec<Bits> {
        self.regions.iter().map(|region| Bits::new(region.outgoing.slot().pages())).collect()
    }

    /// They are being sent. Said before they are read: what a collection names from then on is owed again.
    pub fn settle(&self, outgoing: &Outgoing, run: Range<u64>) {
        self.regions[outgoing.region() as usize].pages.clear(run);
    }
}
