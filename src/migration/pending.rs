//! The pages that the target or a snapshot still has to get.
//!
//! A page is *owed* from the collection that names it until it is sent. If a pass is given up, the
//! rest stays owed, so no page is lost.
//!
//! Between the two, KVM's dirty log is cleared chunk by chunk by the first thread that reaches a
//! chunk. [`PendingPages::next`] returns no page before the log of its chunk is clear. If a page
//! has been named but neither cleared nor sent when a pass ends, the next collection names it
//! again.
//!
//! With INITIALLY_SET, the bits of a chunk mean nothing before its first clear, and an untouched
//! chunk is never cleared. For such memory [`UnclearedPages`] finds the pages that have changed.

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

/// One memslot of the machine, and a bitmap of its owed pages.
struct Region {
    outgoing: Outgoing,
    pages: Bits,
}

/// The pages of one memslot about which its log says nothing. Touched pages there are new: in a
/// chunk that was never cleared, every page has been owed since it was first touched, or is zero on
/// both sides.
struct UnclearedPages {
    /// The pages about which the log says nothing yet.
    unsaid: Bits,
    /// The value of `unsaid` at the last query of touched pages. Pages that were touched between
    /// this query and the clear of their chunk are in no log.
    due: Bits,
    /// The pages that were untouched at the last query.
    untouched: Bits,
}

impl UnclearedPages {
    /// All pages of `slot` are unsaid.
    fn new(slot: &Slot) -> Self {
        let all = || {
            let bits = Bits::new(slot.pages());
            bits.set(0..slot.pages());
            bits
        };
        Self { unsaid: all(), due: all(), untouched: all() }
    }

    /// Sets in `news` the due pages that were touched since the last query. Returns whether the log
    /// covers all pages from now on.
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

/// The dirty log.
#[derive(Default)]
struct Log {
    tracker: Option<Box<dyn DirtyTracker>>,
    /// One entry per memslot, as long as the log does not cover all pages.
    silence: Option<Vec<UnclearedPages>>,
    /// How long the longest clear took.
    longest: Duration,
}

/// The memslots of a machine and their owed pages.
pub(crate) struct PendingPages {
    regions: Vec<Region>,
    log: Mutex<Log>,
}

/// The position of a pass: memslot and page, and the page up to which the memslot's log has been
/// cleared for it.
#[derive(Default)]
pub(crate) struct At {
    region: usize,
    page: u64,
    cleared: u64,
}

impl PendingPages {
    /// Nothing of `memory` is owed, and dirty tracking is off.
    pub fn new(memory: Vec<Slot>) -> Self {
        let fresh = fresh(&memory);
        let regions = (0u32..).zip(memory).zip(fresh).map(|((region, slot), fresh)| Region {
            pages: Bits::new(slot.pages()),
            outgoing: Outgoing::new(slot, region, fresh),
        });
        Self { regions: regions.collect(), log: Mutex::default() }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A thread that panicked with the lock has ended its pass, and its unsent pages stay owed.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memslots.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.regions.iter().map(|region| region.outgoing.slot())
    }

    /// Whether dirty tracking is on.
    pub fn is_followed(&self) -> bool {
        self.log().tracker.is_some()
    }

    /// Enables `tracker`'s log. Pages touched until now are owed. Later, the pages that each
    /// [collection](Self::collect) names are owed too. `pagemap` tells which pages of `ram` were
    /// ever touched.
    ///
    /// # Errors
    /// KVM refuses.
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
            // Needed to clear the chunks one by one. The set bits do not make pages owed.
            tracker.get()?;
        }
        // Queried after the log is on, so that it contains every later write.
        let silence: Vec<_> = self.slots().map(UnclearedPages::new).collect();
        self.ask(&silence, ram, pagemap);
        if !all_set {
            tracker.collect_deferred()?;
            self.regions.iter().zip(tracker.logs()).for_each(|(region, log)| region.pages.add(&log.words));
        }
        log.silence = all_set.then_some(silence);
        Ok(())
    }

    /// Owes the touched pages about which the log says nothing. Returns whether the log covers all
    /// pages from now on.
    fn ask(&self, silence: &[UnclearedPages], ram: &Memory, pagemap: Option<&Pagemap>) -> bool {
        let asked = self
            .regions
            .iter()
            .zip(silence)
            .map(|(region, silence)| silence.ask(ram, pagemap, region.outgoing.slot(), &region.pages));
        asked.fold(true, |all, said| all & said)
    }

    /// Also owes the pages written since the last collection.
    ///
    /// # Errors
    /// KVM refuses.
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
                // The bits of these pages are set until their chunk is cleared.
                Some(silence) => region.pages.add_but(&log.words, &silence[at].unsaid),
                None => region.pages.add(&log.words),
            }
        }
        Ok(())
    }

    /// Owes all memory except `ram`.
    pub fn owe_all_but(&self, ram: &Memory) {
        let others = self.regions.iter().filter(|region| !ram.holds(region.outgoing.slot()));
        others.for_each(|region| region.pages.set(0..region.outgoing.slot().pages()));
    }

    /// Stops dirty tracking: switches KVM's log off.
    pub fn unfollow(&self) {
        let log = std::mem::take(&mut *self.log());
        if let Some(mut tracker) = log.tracker
            && let Err(error) = tracker.enable(false)
        {
            tracing::warn!("the dirty log cannot be switched off: {error}");
        }
    }

    /// How many pages each vCPU has written, if the tracker knows ([`DirtyTracker::written`]).
    pub fn written(&self) -> Vec<u64> {
        self.log().tracker.as_ref().map_or_else(Vec::new, |tracker| tracker.written())
    }

    /// The longest clear since the last call.
    pub fn longest_clear(&self) -> Duration {
        std::mem::take(&mut self.log().longest)
    }

    /// A memslot, and what the target has been sent of it.
    pub fn outgoing(&self, region: usize) -> &Outgoing {
        &self.regions[region].outgoing
    }

    /// Owes every page that was ever touched. For memory without dirty tracking while the guest is
    /// paused.
    pub fn owe_touched(&self, ram: &Memory, pagemap: Option<&Pagemap>) {
        for region in &self.regions {
            let slot = region.outgoing.slot();
            ram.perhaps_touched(pagemap, slot, 0..slot.pages(), |run| region.pages.set(run));
        }
    }

    /// Takes RAM's pages from those owed and returns them, a bitmap per memslot. Postcopy sends
    /// each of them later, even if it is zero.
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

    /// Owes the pages of memslot `region` that are set in `bits`, and no others.
    pub fn owe(&self, region: u32, bits: &Bits) {
        let Region { outgoing, pages } = &self.regions[region as usize];
        pages.copy_from(bits);
        let mut rest = 0..outgoing.slot().pages();
        while let Some(run) = bits.first_run(rest.clone()) {
            rest.start = run.end;
            outgoing.tell(run);
        }
    }

    /// Also owes the pages of memslot `region` that are set in `words`.
    pub fn add(&self, region: usize, words: &[u64]) {
        self.regions[region].pages.add(words);
    }

    /// How many pages are owed.
    pub fn count(&self) -> u64 {
        self.regions.iter().map(|region| region.pages.count()).sum()
    }

    /// The next owed pages of `share` from `at` on, at most a frame of them. Moves `at` behind
    /// them. `None` at the end. Their log is clear on return: the caller may [settle](Self::settle)
    /// and then read them.
    ///
    /// # Errors
    /// KVM cannot clear the log.
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

    /// Clears the log of the chunks that contain `pages`, unless it is clear. Returns the page up
    /// to which it is clear.
    fn clear(&self, region: usize, pages: Range<u64>) -> Result<u64, dirty::Error> {
        let mut log = self.log();
        let Log { tracker: Some(tracker), silence, longest } = &mut *log else { return Ok(u64::MAX) };
        let since = Instant::now();
        let cleared = match plant::is(Mistake::ReadBeforeClear) {
            false => tracker.clear_chunks(region, pages)?,
            true => {
                // Clears the log of the memslot before, whose pages have been sent.
                region.checked_sub(1).map(|before| tracker.clear_chunks(before, 0..u64::MAX)).transpose()?;
                0..u64::MAX
            }
        };
        let said = cleared.start..cleared.end.min(self.regions[region].outgoing.slot().pages());
        silence.iter().for_each(|silence| silence[region].unsaid.clear(said.clone()));
        *longest = since.elapsed().max(*longest);
        Ok(cleared.end)
    }

    /// Empty bitmaps for the same memory.
    pub fn none(&self) -> Vec<Bits> {
        self.regions.iter().map(|region| Bits::new(region.outgoing.slot().pages())).collect()
    }

    /// Marks pages as sent. Call this before they are read, because a later collection must owe
    /// them again.
    pub fn settle(&self, outgoing: &Outgoing, run: Range<u64>) {
        self.regions[outgoing.region() as usize].pages.clear(run);
    }
}
