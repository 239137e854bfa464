//! The oracle: checks a collection of dirty pages against the stamps that the guest leaves.
//!
//! A workload stamps every page that it writes with the writer, the number of its write, and the
//! epoch ([`Stamp`]). After each collection the oracle reads the stamps and compares them with the
//! previous ones. If a page changed, it was written, and if it was written, it must have a bit. The
//! rest of this comment shows why the verdicts hold while guest, processor and KVM race.
//!
//! # When a bit is due
//!
//! For collection N, G(N) is the time at which a page's bit is read. C(N) is the return from the
//! call that clears and protects (with the TLBs flushed). R(N) is the time at which the oracle
//! reads the page's stamp. The caller keeps them in that order, and sets the guest's epoch to N + 1
//! between C(N) and R(N).
//!
//! * *The stamp differs between R(N-1) and R(N)*: there was a write after R(N-1), so after C(N-1).
//!   If it came before G(N), its bit is in N. If it came between G(N) and R(N), and the page was
//!   already dirty in N (cleared only at C(N), and read later), its bit is in N too. Otherwise it
//!   faults or stays marked, and its bit is in N + 1. So the bit is in N or N + 1. If the vCPUs are
//!   out of `KVM_RUN` from before G(N) until after R(N), only N remains. That mode is called
//!   *quiesced*, the other *running*.
//! * *A stamp of epoch N + 1 is seen at R(N)*: the guest loaded the epoch after C(N), so it wrote
//!   after C(N). The bit is due in N + 1, whether or not N has one. This detects a second write to
//!   a page that is in N. Without the epoch it would look like the first one.
//!
//! # What may delay a bit
//!
//! * A stamp is three stores, and the page may be protected between any two. The oracle compares
//!   all of them, so each visible store counts as a separate write, with the bit that its own fault
//!   sets.
//! * KVM's `fast_page_fault` first makes a page writable and then marks it dirty. Another vCPU can
//!   write in between. If the first vCPU is preempted there, the mark can come at any later time.
//!   With PML the processor itself keeps up to 512 addresses until the next exit. Therefore
//!   [`flush_all`](vellum_kvm::vm::vcpu::flush_all) precedes every running collection. Each vCPU
//!   has then been out of `KVM_RUN` after R(N-1) and before G(N), so everything in progress at
//!   R(N-1) is marked by G(N). A grace of one collection is therefore exact, however slow the host
//!   is.
//! * Two vCPUs that write the same page may leave words of both. Writer and number share one word,
//!   and no two writes share its value. Any mixture therefore differs from the previous content. A
//!   loss is attributed to the writer in it.
//!
//! # Bits without a stamp
//!
//! A bit is also a claim. A bit without an explanation is a fault of the log (or of this
//! reasoning). The explanations are:
//!
//! * A page that changed at R(N-1) in running mode: its write may have come after C(N-1), with the
//!   bit in N.
//! * At most one page per vCPU and collection: a fault marks the page, and the faulting store comes
//!   after R(N). A vCPU has one store in flight, so more such pages than vCPUs are unexplained. The
//!   ring's duplicate around `KVM_EXIT_DIRTY_RING_FULL` is such a case.
//! * After the log was enabled: pages written before the first reading. With initially-set: all
//!   pages.
//!
//! If the host's pages are larger, KVM has one bit for each of them. An explanation for one guest
//! page in it then explains its bit.
//!
//! A read that maps a page may mark it too, because KVM maps pages writable if it can. So guests
//! for this oracle write wherever they go.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use vellum_guests::stamp::Stamp;
use vellum_kvm::dirty::{SlotLog, scan};
use vellum_sys::dirty;
use vellum_sys::mmap::PAGE_SIZE;

/// Whether vCPUs were in the guest during a collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They were, and were flushed just before it.
    Running,
    /// They were out of `KVM_RUN` from before the collection until after its check.
    Quiesced,
}

/// The page's bit must be in the next collection.
const MUST: u8 = 1;
/// The page's bit may be in it without a new stamp.
const MAY: u8 = 2;

/// The oracle's knowledge of a page.
#[derive(Clone, Copy, Debug, Default)]
struct SeenPage {
    stamp: Stamp,
    flags: u8,
}

/// A page in host and guest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page's index in guest RAM.
    pub page: u64,
    /// Its guest frame number.
    pub gfn: u64,
    /// Its memslot.
    pub slot: u32,
    /// Its index in the memslot.
    pub in_slot: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfn {:#x} (memslot {}, page {})", self.gfn, self.slot, self.in_slot)
    }
}

/// A page that was written but is in no collection that had to contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The page.
    pub place: Place,
    /// The stamp found on it.
    pub stamp: Stamp,
    /// The writer's pass when it was found.
    pub pass: u64,
    /// The collection that lacks it.
    pub collection: u64,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, stamp, pass, collection } = self;
        match stamp.vcpu() {
            Some(vcpu) => write!(f, "LOST {place}: written by vCPU {vcpu} in pass {pass} ")?,
            None => write!(f, "LOST {place}: written by an unknown vCPU ")?,
        }
        write!(f, "(its write {} in epoch {}), absent from collection {collection}", stamp.seq(), stamp.epoch)
    }
}

/// The result of checking a collection.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogVerdict {
    /// Pages with a bit.
    pub dirty: u64,
    /// Pages whose write the stamps prove and whose bit is set: the events checked.
    pub checked: u64,
    /// Pages whose bit is due in the next collection.
    pub late: u64,
    /// Bits without a new stamp that the rules above explain.
    pub explained: u64,
    /// Lost pages.
    pub lost: Vec<Lost>,
    /// Bits without an explanation.
    pub unexplained: Vec<Place>,
    /// Pages that hold another page's stamp.
    pub misplaced: Vec<(Place, Stamp)>,
}

/// The oracle for one guest's RAM.
#[derive(Debug)]
pub(crate) struct Oracle {
    seen: Vec<SeenPage>,
    collection: u64,
    vcpus: usize,
}

impl Oracle {
    /// Creates an oracle for `pages` of RAM. Call [`Oracle::baseline`] first.
    pub fn new(pages: u64, vcpus: usize) -> Self {
        Self { seen: vec![SeenPage::default(); pages as usize], collection: 1, vcpus }
    }

    /// Reads the `pages` of RAM just after logging was enabled, and expects nothing from before.
    /// With `all_set` the log began with all bits set.
    pub(crate) fn baseline(&mut self, words: &[AtomicU64], pages: Range<u64>, mode: Mode, all_set: bool) {
        let flags = if all_set || mode == Mode::Running { MAY } else { 0 };
        for page in pages {
            self.seen[page as usize] = SeenPage { stamp: stamp(words, page), flags };
        }
    }

    /// Allows any of `pages` in the next collection, because their log restarted with all bits set.
    pub fn allow(&mut self, pages: Range<u64>) {
        self.seen[pages.start as usize..pages.end as usize].iter_mut().for_each(|seen| seen.flags |= MAY);
    }

    /// Whether `page` was stamped in the epoch of the current collection. Then its bit must be in
    /// that collection.
    pub(crate) fn is_due(&self, words: &[AtomicU64], page: u64) -> bool {
        stamp(words, page).epoch == self.collection
    }

    /// Ends the epoch. Call it after the collection is cleared and before it is checked. Returns
    /// the next epoch for the guest.
    pub(crate) fn next_epoch(&self) -> u64 {
        self.collection + 1
    }

    /// Checks the collection in `logs` against the stamps in `words` (all of RAM). A slot's
    /// `offset` is its place in RAM. Word `w` of log `l` (64 pages) is skipped unless `examined(l,
    /// w)`, because KVM still holds its bits. `pass` returns a vCPU's current pass.
    pub fn judge(
        &mut self,
        logs: &[SlotLog],
        words: &[AtomicU64],
        mode: Mode,
        examined: impl Fn(usize, usize) -> bool,
        pass: impl Fn(usize) -> u64,
    ) -> LogVerdict {
        self.judge_by(dirty::in_one(), logs, words, mode, examined, pass)
    }

    /// As [`Oracle::judge`], with one KVM bit for `in_one` pages.
    fn judge_by(
        &mut self,
        in_one: u64,
        logs: &[SlotLog],
        words: &[AtomicU64],
        mode: Mode,
        examined: impl Fn(usize, usize) -> bool,
        pass: impl Fn(usize) -> u64,
    ) -> LogVerdict {
        let mut verdict = LogVerdict::default();
        let collection = self.collection;
        let mut unstamped = Vec::new();
        for (index, log) in logs.iter().enumerate() {
            let (first, gfn, slot) =
                (log.slot().offset() / PAGE_SIZE, log.slot().gpa() / PAGE_SIZE, log.slot().id());
            // For the current host page: a page without a new stamp, the number of such pages, and
            // whether anything explains its bit.
            let (mut silent, mut silents, mut explained) = (None, 0, false);
            for in_slot in 0..log.pages() {
                let word = (in_slot / 64) as usize;
                if !examined(index, word) {
                    continue;
                }
                let bit = log.words[word] >> (in_slot % 64) & 1 == 1;
                let page = first + in_slot;
                let place = || Place { page, gfn: gfn + in_slot, slot, in_slot };
                let now = stamp(words, page);
                let seen = &mut self.seen[page as usize];
                let changed = now != seen.stamp;
                let lost = !bit && (seen.flags & MUST != 0 || changed && mode == Mode::Quiesced);
                verdict.dirty += u64::from(bit);
                verdict.checked += u64::from(bit && (changed || seen.flags & MUST != 0));
                if lost {
                    let stamp = if seen.flags & MUST != 0 { seen.stamp } else { now };
                    let pass = stamp.vcpu().map_or(0, &pass);
                    verdict.lost.push(Lost { place: place(), stamp, pass, collection });
                }
                if bit && !changed && seen.flags == 0 {
                    silent = silent.or_else(|| Some(place()));
                    silents += 1;
                } else if bit && !changed && seen.flags == MAY {
                    verdict.explained += 1;
                }
                explained |= changed || seen.flags != 0;
                if (in_slot + 1).is_multiple_of(in_one) || in_slot + 1 == log.pages() {
                    match silent.take() {
                        Some(_) if explained => verdict.explained += silents,
                        silent => unstamped.extend(silent),
                    }
                    (silents, explained) = (0, false);
                }
                if changed && now.vcpu().is_some() && now.page != page {
                    verdict.misplaced.push((place(), now));
                }
                let owed = now.epoch > collection || changed && !bit && !lost;
                verdict.late += u64::from(owed && !bit);
                let flags = match mode {
                    Mode::Quiesced => 0,
                    Mode::Running => (u8::from(owed) * MUST) | (u8::from(changed) * MAY),
                };
                *seen = SeenPage { stamp: now, flags };
            }
        }
        if unstamped.len() > self.vcpus {
            verdict.unexplained = unstamped;
        } else {
            verdict.explained += unstamped.len() as u64;
        }
        self.collection += 1;
        verdict
    }
}

fn stamp(words: &[AtomicU64], page: u64) -> Stamp {
    Stamp::read(words, (page * (PAGE_SIZE / 8)) as usize)
}

/// The places of all dirty pages in `logs`.
pub fn places(logs: &[SlotLog]) -> impl Iterator<Item = Place> + '_ {
    logs.iter().flat_map(|log| {
        let (first, gfn, slot) =
            (log.slot().offset() / PAGE_SIZE, log.slot().gpa() / PAGE_SIZE, log.slot().id());
        let place = move |in_slot| Place { page: first + in_slot, gfn: gfn + in_slot, slot, in_slot };
        scan::runs(&log.words, log.pages()).flatten().map(place)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::*;
    use vellum_guests::stamp::writer;
    use vellum_kvm::memory::Slot;
    use vellum_sys::mmap::{Mapping, Source};

    const PAGES: u64 = 8;
    /// The slot's first page in RAM.
    const FIRST: u64 = 2;

    /// RAM of eight pages, a slot over the last six, and an oracle that knows them as clean.
    struct Bench {
        ram: Arc<Mapping>,
        log: SlotLog,
        oracle: Oracle,
        seq: u64,
    }

    impl Bench {
        fn new() -> Self {
            let ram = Arc::new(Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
            let slot = Slot::new(7, 0x1000_0000, &ram, FIRST * PAGE_SIZE..PAGES * PAGE_SIZE).unwrap();
            let log = SlotLog::new(slot);
            let mut oracle = Oracle::new(PAGES, 1);
            oracle.baseline(ram.words(), 0..PAGES, Mode::Quiesced, false);
            Self { ram, log, oracle, seq: 0 }
        }

        /// vCPU 3 writes to a page of the slot in epoch `epoch`.
        fn write(&mut self, page: u64, epoch: u64) {
            self.seq += 1;
            let stamp = [writer(3) + self.seq, epoch, FIRST + page];
            for (word, value) in self.ram.words()[(FIRST + page) as usize * 512..].iter().zip(stamp) {
                word.store(value, Ordering::Relaxed);
            }
        }

        fn judge(&mut self, bits: u64, mode: Mode) -> LogVerdict {
            self.log.words[0] = bits;
            let logs = std::slice::from_ref(&self.log);
            self.oracle.judge(logs, self.ram.words(), mode, |_, _| true, |_| 5)
        }
    }

    #[test]
    fn a_write_with_its_bit_is_checked() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        let verdict = bench.judge(0b10, Mode::Quiesced);
        assert_eq!((verdict.dirty, verdict.checked, verdict.lost.len()), (1, 1, 0));
    }

    #[test]
    fn a_quiesced_collection_grants_no_grace() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        let verdict = bench.judge(0, Mode::Quiesced);
        let line = verdict.lost[0].to_string();
        assert_eq!(
            line,
            "LOST gfn 0x10001 (memslot 7, page 1): written by vCPU 3 in pass 5 (its write 1 in epoch 1), absent from \
             collection 1"
        );
    }

    #[test]
    fn a_running_collection_grants_one_and_no_more() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        bench.write(2, 1);
        let verdict = bench.judge(0, Mode::Running);
        assert_eq!((verdict.late, verdict.lost.len()), (2, 0));
        let verdict = bench.judge(0b10, Mode::Running);
        assert_eq!(verdict.checked, 1);
        assert_eq!(verdict.lost.iter().map(|lost| lost.place.in_slot).collect::<Vec<_>>(), [2]);
        assert!(bench.judge(0, Mode::Running).lost.is_empty(), "reported once");
    }

    #[test]
    fn a_second_write_after_the_clear_is_told_by_its_epoch() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        // Written again before the oracle reads, by a guest that has seen the next epoch.
        bench.write(1, 2);
        let verdict = bench.judge(0b10, Mode::Running);
        assert_eq!((verdict.checked, verdict.lost.len()), (1, 0));
        assert_eq!(bench.judge(0, Mode::Running).lost.len(), 1, "only the epoch shows the second write");
    }

    #[test]
    fn half_a_stamp_is_a_write() {
        let mut bench = Bench::new();
        bench.ram.words()[(FIRST as usize + 1) * 512 + 1].store(1, Ordering::Relaxed);
        assert_eq!(bench.judge(0, Mode::Quiesced).lost.len(), 1);
    }

    #[test]
    fn bits_without_a_stamp_need_a_reason() {
        let mut bench = Bench::new();
        // With one vCPU, one store may be in flight.
        let verdict = bench.judge(0b1, Mode::Quiesced);
        assert_eq!((verdict.explained, verdict.unexplained.len()), (1, 0));
        let verdict = bench.judge(0b101, Mode::Quiesced);
        assert_eq!(verdict.unexplained.len(), 2);
        // Written between clear and reading, so the bit appears again.
        bench.write(0, 3);
        bench.write(1, 3);
        bench.judge(0b11, Mode::Running);
        assert!(bench.judge(0b11, Mode::Running).unexplained.is_empty());
        assert_eq!(bench.judge(0b11, Mode::Running).unexplained.len(), 2);
        bench.oracle.allow(0..PAGES);
        assert_eq!(bench.judge(0b111111, Mode::Quiesced).explained, 6);
    }

    #[test]
    fn a_larger_page_of_the_host_is_explained_by_one_write() {
        let mut bench = Bench::new();
        let judge = |bench: &mut Bench, bits| {
            bench.log.words[0] = bits;
            let logs = std::slice::from_ref(&bench.log);
            bench.oracle.judge_by(4, logs, bench.ram.words(), Mode::Quiesced, |_, _| true, |_| 5)
        };
        bench.write(1, 1);
        let verdict = judge(&mut bench, 0b1111);
        assert_eq!((verdict.checked, verdict.explained, verdict.unexplained.len()), (1, 3, 0));
        // One vCPU has one store in flight, so one host page is explained, not two.
        assert!(judge(&mut bench, 0b11_0000).unexplained.is_empty());
        let verdict = judge(&mut bench, 0b11_1111);
        assert_eq!(verdict.unexplained.iter().map(|place| place.in_slot).collect::<Vec<_>>(), [0, 4]);
        bench.write(2, 2);
        assert_eq!(judge(&mut bench, 0).lost.len(), 1);
    }

    #[test]
    fn what_is_not_examined_is_judged_later() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        let logs = std::slice::from_ref(&bench.log);
        let verdict = bench.oracle.judge(logs, bench.ram.words(), Mode::Quiesced, |_, _| false, |_| 0);
        assert!(verdict.lost.is_empty());
        assert_eq!(bench.judge(0, Mode::Quiesced).lost.len(), 1);
    }

    #[test]
    fn a_stamp_of_another_page_is_told() {
        let mut bench = Bench::new();
        bench.write(1, 1);
        bench.ram.words()[(FIRST as usize + 1) * 512 + 2].store(6, Ordering::Relaxed);
        assert_eq!(bench.judge(0b10, Mode::Quiesced).misplaced.len(), 1);
    }
}
