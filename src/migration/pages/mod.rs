//! Pages between guest memory and the wire: a [`Block`] makes frames of harvested runs, and
//! [`Incoming`] writes arriving pages.
//!
//! vCPUs write to memory while it is sent. So each page is copied into the block first, and the
//! copy is checksummed and sent. A checksum over guest memory itself could differ from what the
//! kernel copies a moment later. Copy and checksum alternate page by page, so that the checksum
//! finds the page in the cache. A page that changes during its copy is in the next harvest, because
//! its dirty bit was cleared before.
//!
//! A zero page is sent as its number only. If the target's memory began empty, zero pages that the
//! target was never sent are not sent at all. Once a page was sent, its return to zero is sent too
//! ([`Outgoing`] keeps track).
//!
//! No function here waits or locks. None allocates once its buffers exist. Several connections can
//! share one [`Outgoing`] or [`Incoming`] if no page is sent on two of them in one pass.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use super::bits::Bits;
use super::pack::Packer;
use super::postcopy_memory::PostcopyMemory;
use super::wire::{Encoder, HEADER, Kind, MAX_PAGES, PACKED, RUN, Run, Sum};
use vellum_kvm::memory::Slot;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::plant::{self, Mistake};

const PAGE: usize = PAGE_SIZE as usize;
/// The size of a frame of pages without the pages.
const HEAD: usize = HEADER + RUN;

/// Which memslots are all zero in a newly created machine: those of RAM, which comes first. Other
/// memory may have been written already: a built-in guest's own memory contains its code.
pub fn fresh(memory: &[Slot]) -> Vec<bool> {
    memory.iter().map(|slot| Arc::ptr_eq(slot.mapping(), memory[0].mapping())).collect()
}

/// The minimum number of pages for which one populate call is faster than a fault per page.
const WORTH_A_CALL: u32 = 4;

/// What the target has been sent of one memslot.
#[derive(Debug)]
pub struct Outgoing {
    slot: Slot,
    region: u32,
    /// The pages that the target has been sent, and those that were not zero there at first.
    sent: Bits,
}

impl Outgoing {
    /// `slot` as region `region` of the machine, before anything is sent. `fresh` says that the
    /// target's memory is all zero at first. A page that has always been zero is then not sent.
    pub fn new(slot: Slot, region: u32, fresh: bool) -> Self {
        let sent = Bits::new(slot.pages());
        if !fresh {
            sent.set(0..slot.pages());
        }
        Self { slot, region, sent }
    }

    /// The region's index in the machine.
    pub fn region(&self) -> u32 {
        self.region
    }

    /// The memslot.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// From now on, zero pages among `pages` are sent too.
    pub fn tell(&self, pages: Range<u64>) {
        self.sent.set(pages);
    }

    /// Whether the first page of `run` is zero, and the range from there in which all pages agree
    /// with it.
    fn alike(&self, run: Range<u64>) -> (bool, Range<u64>) {
        let zero = self.is_zero(run.start);
        let end = (run.start + 1..run.end).find(|page| self.is_zero(*page) != zero).unwrap_or(run.end);
        (zero, run.start..end)
    }

    fn is_zero(&self, page: u64) -> bool {
        let start = (self.slot.offset() + page * PAGE_SIZE) as usize / 8;
        // One cache line per step: a non-zero page mostly shows in the first.
        let (lines, _) = self.slot.mapping().words()[start..start + PAGE / 8].as_chunks::<8>();
        lines.iter().all(|line| line.iter().fold(0, |all, word| all | word.load(Ordering::Relaxed)) == 0)
    }
}

/// What a block has taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Pages with their content.
    pub pages: u64,
    /// Pages that are sent as zero.
    pub zeroes: u64,
    /// Pages that are not sent.
    pub skipped: u64,
    /// Bytes saved by compression.
    pub spared: u64,
}

impl std::ops::AddAssign for Taken {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.zeroes += other.zeroes;
        self.skipped += other.skipped;
        self.spared += other.spared;
    }
}

/// Frames waiting to be written to a link. One block serves a connection for its whole life.
#[derive(Debug)]
pub struct Block {
    buffer: Vec<u8>,
    /// Where the frames begin. The first frame's pages then start at a page boundary, which makes
    /// their copy faster.
    start: usize,
    end: usize,
    packer: Option<Packer>,
}

impl Block {
    /// The maximum size of the frames in bytes. If every other page is zero, each of the rest has
    /// its own frame.
    const BYTES: usize = MAX_PAGES as usize * (HEAD + PAGE);

    /// An empty block.
    pub fn new() -> Self {
        let buffer = vec![0; Self::BYTES + PAGE];
        let address = buffer.as_ptr() as usize;
        let start = (address + HEAD).next_multiple_of(PAGE) - HEAD - address;
        Self { buffer, start, end: start, packer: None }
    }

    /// The same block with compression where that saves enough.
    pub(crate) fn packing(mut self, packs: bool) -> Self {
        self.packer = packs.then(Packer::new);
        self
    }

    /// Complete frames, to be written to the link.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Empties the block after its frames have been written.
    pub fn clear(&mut self) {
        self.end = self.start;
    }

    /// How many pages can be added, whatever their content.
    pub fn room(&self) -> u64 {
        ((self.start + Self::BYTES - self.end) / (HEAD + PAGE)) as u64
    }

    /// Makes frames of only the pages `run` of `from`: [`Self::clear`] and [`Self::add`].
    ///
    /// # Panics
    /// As [`Self::add`].
    pub fn fill(&mut self, from: &Outgoing, run: Range<u64>, pass: u32, encoder: &mut Encoder) -> Taken {
        self.clear();
        self.add(from, run, pass, encoder)
    }

    /// Appends frames of the pages `run` of `from`. `encoder` belongs to the link that sends them.
    ///
    /// # Panics
    /// `run` is not inside the memslot, or is longer than the [room](Self::room).
    pub fn add(&mut self, from: &Outgoing, run: Range<u64>, pass: u32, encoder: &mut Encoder) -> Taken {
        assert!(run.end <= from.slot.pages(), "pages {run:?} of {:?}", from.slot);
        assert!(
            run.end.saturating_sub(run.start) <= self.room(),
            "pages {run:?} in room for {}",
            self.room()
        );
        let mut taken = Taken::default();
        let mut rest = run;
        while !rest.is_empty() {
            let (zero, alike) = from.alike(rest.clone());
            let count = alike.end - alike.start;
            rest.start = alike.end;
            if zero {
                taken.skipped += count;
                let mut known = if plant::is(Mistake::ZeroSkipped) { 0..0 } else { alike };
                while let Some(stale) = from.sent.first_run(known.clone()) {
                    taken.zeroes += stale.end - stale.start;
                    taken.skipped -= stale.end - stale.start;
                    known.start = stale.end;
                    taken.spared += self.frame(from, stale, pass, Kind::Zeroes, encoder);
                }
                continue;
            }
            taken.pages += count;
            from.sent.set(alike.clone());
            taken.spared += self.frame(from, alike, pass, Kind::Pages, encoder);
        }
        taken
    }

    /// Appends a frame. Returns how many bytes compression has saved.
    fn frame(
        &mut self,
        from: &Outgoing,
        pages: Range<u64>,
        pass: u32,
        mut kind: Kind,
        encoder: &mut Encoder,
    ) -> u64 {
        let count = (pages.end - pages.start) as u32;
        let run = Run { region: from.region, pass, first: pages.start, pages: count }.bytes();
        let mut sum = Sum::new();
        sum.add(&run);
        let all = if kind == Kind::Pages { count as usize * PAGE } else { 0 };
        let mut data = all;
        let (head, rest) = self.buffer[self.end..].split_at_mut(HEAD);
        let offset = from.slot.offset() + pages.start * PAGE_SIZE;
        let (copies, _) = rest[..data].as_chunks_mut::<PAGE>();
        for (offset, page) in (offset..).step_by(PAGE).zip(&mut *copies) {
            from.slot.mapping().copy_to(offset, page);
            sum.add(page);
        }
        if plant::is(Mistake::SumOfLiveMemory) {
            // A vCPU is sure to write meanwhile.
            std::thread::sleep(std::time::Duration::from_millis(20));
            copies
                .iter_mut()
                .zip((offset..).step_by(PAGE))
                .for_each(|(page, at)| from.slot.mapping().copy_to(at, page));
        }
        if let Some(packed) = self.packer.as_mut().and_then(|packer| packer.pack(&rest[..all])) {
            // The inner checksum covers the uncompressed payload, the outer one the bytes that are
            // sent.
            rest[..PACKED].copy_from_slice(&[sum.finish().to_le_bytes(), [0; 4]].concat());
            (kind, data) = (Kind::Packed, PACKED + packed.len());
            rest[PACKED..data].copy_from_slice(packed);
            sum = Sum::new();
            [&run[..], &rest[..data]].into_iter().for_each(|part| sum.add(part));
        }
        let (header, own) = head.split_at_mut(HEADER);
        own.copy_from_slice(&run);
        header.copy_from_slice(&encoder.header_of(kind, (RUN + data) as u32, &sum));
        self.end += HEAD + data;
        (all - data) as u64
    }
}

impl Default for Block {
    fn default() -> Self {
        Self::new()
    }
}

/// One memslot of the target, and which of its pages have arrived.
#[derive(Debug)]
pub struct Incoming {
    slot: Slot,
    /// The pages that may be non-zero.
    written: Bits,
    /// Where pages go once the guest runs here while some are still missing.
    postcopy: OnceLock<Arc<PostcopyMemory>>,
}

impl Incoming {
    /// `slot`, before anything has arrived. `fresh` says that it is all zero. Then a page that is
    /// sent as zero is not touched unless its content arrived earlier.
    pub fn new(slot: Slot, fresh: bool) -> Self {
        let written = Bits::new(slot.pages());
        if !fresh {
            written.set(0..slot.pages());
        }
        Self { slot, written, postcopy: OnceLock::new() }
    }

    /// From now on, arriving pages go to `postcopy`, which does not overwrite pages that are
    /// present.
    pub(crate) fn divert_to(&self, postcopy: &Arc<PostcopyMemory>) {
        // No other caller sets it.
        let _ = self.postcopy.set(postcopy.clone());
    }

    /// Writes the pages of `run`, which has been checked ([`Run::check`]): `data`, or zeroes
    /// without it.
    ///
    /// # Panics
    /// The pages are not inside the memslot, or `data` has another length.
    pub fn take(&self, run: &Run, data: Option<&[u8]>) {
        let pages = run.first..run.first + u64::from(run.pages);
        let offset = |page: u64| self.slot.offset() + page * PAGE_SIZE;
        assert!(pages.end <= self.slot.pages(), "{run:?} of {:?}", self.slot);
        if let Some(postcopy) = self.postcopy.get() {
            let first = offset(pages.start) / PAGE_SIZE;
            if let Err(why) = postcopy.take(first..first + u64::from(run.pages), data) {
                super::fetching::end(&why);
            }
            return;
        }
        if let Some(data) = data {
            assert_eq!(data.len() as u64, u64::from(run.pages) * PAGE_SIZE, "{run:?}");
            if run.pages >= WORTH_A_CALL && self.written.first_run(pages.clone()).is_none() {
                // If it fails, each page faults instead.
                let _ = self.slot.mapping().populate(offset(pages.start), data.len() as u64);
            }
            self.slot.mapping().copy_from(offset(pages.start), data);
            self.written.set(pages);
            return;
        }
        let mut rest = pages;
        while let Some(stale) = self.written.first_run(rest.clone()) {
            let word = |page: u64| offset(page) as usize / 8;
            let words = &self.slot.mapping().words()[word(stale.start)..word(stale.end)];
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            rest.start = stale.end;
        }
    }
}

#[cfg(test)]
mod tests;
