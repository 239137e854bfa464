//! The thread that forks a machine. The machine's memory file becomes a read-only base, which this
//! machine and the new ones map privately ([`vellum_kvm::memory`]). The state, and the pages that
//! differ from the base at the pause, go into files in the form of a
//! [`snapshot`](crate::snapshot)'s point.
//!
//! Memory that is still being fetched from a snapshot is fetched first.
//!
//! On the first fork, the mapping parts from the file while the guest runs. Pages that the guest
//! writes in parted pieces are private to this machine. Each fork copies all pages written since the
//! base.
//!
//! Few pages are copied during the pause. Many are copied while the guest runs. The dirty log tells
//! what the guest writes meanwhile, and only that is copied during the pause. If a snapshot needs
//! the log ([`Since`]), all pages are copied during the pause.
//!
//! If more than a quarter of memory differs, the fork makes a new base: it copies the old base and
//! the pages that differ. Then memory is mapped anew, part by part: for each part the machine is
//! paused, what it has written since the last one is copied, and it runs again. Pages that it writes
//! in parts that show the new base differ from that. Memory without a file is copied into the first
//! base in the same way. If a snapshot needs the log, all is done in one pause. A fork that is
//! cancelled meanwhile ends when all of memory shows the new base: the next one would have to copy
//! memory that shows two.
//!
//! Parted memory stays parted, even if the fork fails. The guest does not notice.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::events::{Demand, Done, Moving, Said, SenderCommand, SenderEvent, Written};
use crate::pending::{At, PendingPages};
use crate::saving::{End, WrittenDown, failed, write_down};
use crate::share::Share;
use crate::since::Since;
use crate::snapshot::layer::Writer;
use crate::snapshot::{Files, disk};
use crate::threads::Mine;
use vellum_kvm::arch::clocks;
use vellum_kvm::memory::{Memory, NewBase, Slot, short_size};
use vellum_machine as machine;
use vellum_sys::mmap::{PAGE_SIZE, host_page};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};
use vellum_sys::poll::Poll;

/// The thread.
pub(crate) struct Forking {
    machine: Mine<Said, SenderCommand>,
    describe: Value,
    ram: Memory,
    memory: Vec<Slot>,
    /// Finds the pages that differ from the base.
    pagemap: Arc<Pagemap>,
    files: Files,
    /// A file that can become the next base.
    next: File,
    /// The bytes of memory that it may take, if that is known.
    available: Option<u64>,
    /// Whether nobody else needs the log of dirty pages.
    may_log: bool,
    disks: Vec<machine::Disk>,
    /// Whether memory shows two bases.
    is_between: Cell<bool>,
    /// Why the fork was cancelled meanwhile.
    cancelled: RefCell<Option<String>>,
}

/// A new base is made if more than one page in this many differs from the base. Each fork copies
/// these pages, and no two machines share the copies, so beyond this a new base costs less.
const NEW_BASE_DIVISOR: u64 = 4;

/// So few pages that were copied while the guest ran may be copied again in the pause. That takes
/// some hundreds of microseconds.
const MAX_PAUSE_PAGES: u64 = 100;

/// So few pages are copied in the pause alone. A log of dirty pages would cost the guest more.
const MAX_UNLOGGED_PAGES: u64 = 2000;

/// The pages that are copied before it is checked again whether the fork is wanted.
const PIECE: u64 = 512;

/// The bytes that show a new base after a pause. With pages of 4 KiB they are mapped in about a
/// millisecond.
const SHOWN_AT_ONCE: u64 = 16 << 20;

/// A search for the pages that differ may take so long in the pause. If it takes longer, the log of
/// dirty pages says what the guest writes from then on.
const MAX_PAUSE_SEARCH: Duration = Duration::from_micros(500);

/// How often it is checked whether memory is complete.
const LOOK: Duration = Duration::from_millis(1);

impl Forking {
    /// A fork of `what` into the empty `files`.
    ///
    /// # Errors
    /// Its memory cannot be forked. The message is for the user.
    pub fn new(
        what: Moving,
        files: Files,
        next: File,
        available: Option<u64>,
        may_log: bool,
        disks: Vec<machine::Disk>,
        machine: Mine<Said, SenderCommand>,
    ) -> Result<Self, String> {
        what.ram.can_be_forked()?;
        let pagemap = what.pagemap.ok_or(
            "this process cannot read its /proc/self/pagemap, which tells what differs from the base",
        )?;
        Ok(Self {
            machine,
            describe: what.describe,
            ram: what.ram,
            memory: what.memory,
            pagemap,
            files,
            next,
            available,
            may_log,
            disks,
            is_between: Cell::new(false),
            cancelled: RefCell::default(),
        })
    }

    /// Runs until the machine has resumed or the event loop's thread has ended.
    pub fn run(self) {
        let word = match self.fork() {
            Ok(forked) => forked,
            Err(End::Failed(why)) => SenderEvent::Stayed(why),
            Err(End::Orphaned) => return,
        };
        // This fails only if the event loop has ended.
        let _ = self.machine.say(Said::SenderEvent(word));
    }

    fn fork(&self) -> Result<SenderEvent, End> {
        self.wait_until_complete()?;
        // The guest still runs, so that the pause is short.
        disk::flush(&self.disks).map_err(End::Failed)?;
        while self.ram.part().map_err(|error| End::Failed(self.why_whole(&error)))? {
            self.hear()?;
        }
        let first = self.ram.is_without_file();
        if !first {
            self.ram.freeze_base().map_err(|error| End::Failed(why_writable(&error)))?;
        }
        let mut next = None;
        let begun = Instant::now();
        let differ = if first { 0 } else { self.differ()? };
        let many = differ > MAX_UNLOGGED_PAGES || begun.elapsed() > MAX_PAUSE_SEARCH;
        if first || self.is_new_base_due(differ)? {
            let file = self.next.try_clone().map_err(failed("another descriptor of a file"))?;
            next = match self.ram.new_base(file, || self.is_wanted()) {
                Ok(next) => next,
                Err(error) if first => return Err(failed("a base")(error)),
                Err(error) => {
                    self.hear()?;
                    // The pages that differ are copied instead.
                    tracing::warn!("no new base: {error}");
                    None
                }
            };
        }
        if next.is_none() {
            self.check_available("the pages that differ from what it shares are", differ)?;
        }
        let ram = self.files.ram.try_clone().map_err(failed("another descriptor of a file"))?;
        let mut writer = Writer::new(ram, &self.memory).map_err(failed("the file for pages"))?;
        let log = match first || self.may_log && (next.is_some() || many) {
            true => Some(self.copy_ahead(first, next.as_mut(), &mut writer)?),
            false => None,
        };
        self.hear()?;
        let mut parts = (0, Duration::ZERO);
        if let (Some(log), Some(new)) = (&log, next.take_if(|_| log.is_some())) {
            parts = self.show(log, new, &mut writer)?;
            self.copy_until_few(log, None, &mut writer)?;
        }
        self.hear()?;
        let sections = self.machine.save()?;
        let taken = clocks::now();
        let disks = disk::forked(&self.disks, &self.files.clones).map_err(End::Failed)?;
        let early = plant::is(Mistake::CopiedAfterResume);
        if early {
            self.machine.demand(Demand::Resume)?;
        }
        // After the state: saving a vCPU makes KVM write to guest memory.
        let is_copied = log.is_some() || next.is_some();
        if let Some(log) = &log {
            log.owed.collect(&self.ram, Some(&self.pagemap))?;
            self.copy_owed(log, None, &mut writer)?;
        } else if let Some(mut next) = next {
            let copied = self.ram.copy_parted(&self.pagemap, &mut next, || self.is_wanted());
            copied.map_err(failed("a new base"))?;
            let shown = self.ram.show(&mut next, u64::MAX).and_then(|()| self.ram.shows(next));
            shown.map_err(failed("a new base"))?;
        }
        self.copy(&mut writer, is_copied)?;
        if !early {
            self.machine.demand(Demand::Resume)?;
        }
        let WrittenDown { layer, state_bytes, state_crc } =
            write_down(&self.files, &self.describe, &sections, writer)?;
        let written = Written { full: false, taken, passes: 1, layer, state_bytes, state_crc, disks };
        let (_, base) = self.ram.base().map_err(failed("its base"))?;
        Ok(SenderEvent::Forked { parts, base, written })
    }

    /// Waits until no page of RAM is missing. The mapping that parts from the file is not the one
    /// that pages are fetched into.
    fn wait_until_complete(&self) -> Result<(), End> {
        self.ram.fetch_missing(|| self.hear().map(|()| true))?;
        // The thread that fetches pages notices soon.
        while !self.ram.mapping.is_complete() {
            self.hear()?;
            let mut poll = Poll::default();
            poll.readable(&**self.machine.descriptor());
            poll.wait(Some(LOOK)).map_err(failed("poll"))?;
        }
        Ok(())
    }

    /// Ends the fork if it was cancelled, unless memory shows two bases.
    fn hear(&self) -> Result<(), End> {
        match self.machine.is_wanted() {
            Err(End::Failed(why)) => self.cancel(why),
            other => other,
        }
    }

    fn cancel(&self, why: String) -> Result<(), End> {
        if !self.is_between.get() {
            return Err(End::Failed(why));
        }
        self.cancelled.borrow_mut().get_or_insert(why);
        Ok(())
    }

    /// Has the event loop's thread do something that the cancelled fork still needs.
    fn demand(&self, what: Demand) -> Result<(), End> {
        self.machine.say(Said::Demand(what))?;
        loop {
            match self.machine.wait()? {
                SenderCommand::Cancel(why) => self.cancel(why)?,
                SenderCommand::Done(Done::Failed(why)) => return Err(End::Failed(why)),
                SenderCommand::Done(_) => return Ok(()),
                _ => {}
            }
        }
    }

    /// Whether the fork is wanted, for what is done piece by piece.
    fn is_wanted(&self) -> io::Result<()> {
        self.hear().map_err(|end| match end {
            End::Failed(why) => io::Error::other(why),
            End::Orphaned => io::Error::other("its machine is gone"),
        })
    }

    /// The number of pages of RAM.
    fn pages(&self) -> u64 {
        self.ram.config.size / PAGE_SIZE
    }

    /// Whether so much differs that another base costs less than copies, and there is memory for it.
    fn is_new_base_due(&self, differ: u64) -> Result<bool, End> {
        if differ * NEW_BASE_DIVISOR <= self.pages() {
            return Ok(false);
        }
        let base = self.ram.base().and_then(|(base, _)| base.metadata()).map_err(failed("its base"))?;
        // The old base stays as long as a machine maps it. Blocks have 512 bytes (stat(2)).
        let takes = base.blocks() * 512 + differ * PAGE_SIZE;
        let lacks = self.available.is_some_and(|available| takes > available);
        if lacks {
            tracing::warn!("no new base: it takes {} MiB, and less is available", takes >> 20);
        }
        Ok(!lacks)
    }

    /// Checks that there is memory for a copy of so many pages. This machine is charged for it as long
    /// as any machine has the file: also for pages that every new machine reads and none maps, because
    /// the last one to start still reads them, and the file is sealed before the first.
    fn check_available(&self, what: &str, pages: u64) -> Result<(), End> {
        let (takes, available) = (pages * PAGE_SIZE, self.available.unwrap_or(u64::MAX));
        if takes <= available {
            return Ok(());
        }
        let [takes, available] = [takes.div_ceil(1 << 20), available >> 20];
        Err(End::Failed(format!("{what} copied, {takes} MiB, and {available} MiB are available")))
    }

    /// The number of pages that differ from the base now.
    fn differ(&self) -> Result<u64, End> {
        let mut all = 0;
        for slot in self.ram.slots() {
            let count = |run: Range<u64>| all += run.end - run.start;
            self.ram.parted_pages(&self.pagemap, slot, count).map_err(failed("/proc/self/pagemap"))?;
        }
        Ok(all)
    }

    /// Copies the pages that differ from the base while the guest runs, or on a `first` fork all
    /// memory, to the `next` base or else to `writer`. Returns the log of the pages that the guest
    /// wrote to meanwhile, which are owed.
    fn copy_ahead(&self, first: bool, next: Option<&mut NewBase>, writer: &mut Writer) -> Result<Since, End> {
        let Done::Tracker(tracker) = self.machine.demand(Demand::Track(None))? else {
            return Err(End::Failed("the machine cannot be followed".into()));
        };
        let (method, owed) = (tracker.method(), PendingPages::new(self.memory.clone()));
        let log = Since { method, owed, chain: String::new(), point: 0, taken: 0 };
        log.owed.follow(tracker, &self.ram, Some(&self.pagemap))?;
        if !first {
            self.owe_parted(&log)?;
        }
        if first {
            self.check_available("its memory is", log.owed.count())?;
        }
        self.copy_until_few(&log, next, writer)?;
        Ok(log)
    }

    /// Copies the pages that `log` owes while the guest runs, until few are left.
    fn copy_until_few(
        &self,
        log: &Since,
        mut next: Option<&mut NewBase>,
        writer: &mut Writer,
    ) -> Result<(), End> {
        let mut left = log.owed.count();
        loop {
            self.copy_owed(log, next.as_deref_mut(), writer)?;
            log.owed.collect(&self.ram, Some(&self.pagemap))?;
            let before = std::mem::replace(&mut left, log.owed.count());
            // Another pass takes time in which the guest writes about as much again.
            if left <= MAX_PAUSE_PAGES || left > before / 2 {
                return Ok(());
            }
        }
    }

    /// Maps memory anew, so that it shows `new`. The guest stands still for each part, and runs in
    /// between. `log` owes what has been written and not copied. Returns the number of pauses and the
    /// sum of their times. A fork that is cancelled meanwhile ends afterwards.
    fn show(&self, log: &Since, mut new: NewBase, writer: &mut Writer) -> Result<(u64, Duration), End> {
        let (mut pauses, mut time) = (0, Duration::ZERO);
        while new.shown() < self.ram.config.size {
            if plant::is(Mistake::HeldHalfway) && new.shown() >= self.ram.config.size / 2 {
                self.wait_until_cancelled()?;
            }
            self.copy_owed(log, Some(&mut new), writer)?;
            let since = Instant::now();
            self.demand(Demand::Pause)?;
            self.is_between.set(true);
            if !plant::is(Mistake::PartUncollected) {
                log.owed.collect(&self.ram, Some(&self.pagemap))?;
            }
            self.copy_owed(log, Some(&mut new), writer)?;
            self.ram.show(&mut new, SHOWN_AT_ONCE).map_err(failed("a new base"))?;
            self.demand(Demand::Resume)?;
            pauses += 1;
            time += since.elapsed();
        }
        self.ram.shows(new).map_err(failed("a new base"))?;
        self.is_between.set(false);
        self.cancelled.take().map_or(Ok((pauses, time)), |why| Err(End::Failed(why)))
    }

    /// Waits until the event loop's thread says something, which can only be that.
    fn wait_until_cancelled(&self) -> Result<(), End> {
        self.hear()?;
        let mut poll = Poll::default();
        poll.readable(&**self.machine.descriptor());
        let is_told = self.cancelled.borrow().is_some() || poll.wait(None).map_err(failed("poll"))?;
        if is_told { Ok(()) } else { self.wait_until_cancelled() }
    }

    /// Owes the pages that differ from the base, and no others. A page that differs from now on was
    /// written to, so the log has it.
    fn owe_parted(&self, log: &Since) -> Result<(), End> {
        for ((region, slot), bits) in (0..).zip(&self.memory).zip(log.owed.none()) {
            if self.ram.holds(slot) {
                let found = self.ram.parted_pages(&self.pagemap, slot, |run| bits.set(run));
                found.map_err(failed("/proc/self/pagemap"))?;
            }
            log.owed.owe(region, &bits);
        }
        Ok(())
    }

    /// Copies the pages of RAM that `log` owes to the `next` base. To `writer` go those that differ
    /// from it because memory shows it already, or all without a next base.
    fn copy_owed(&self, log: &Since, mut next: Option<&mut NewBase>, writer: &mut Writer) -> Result<(), End> {
        let (all, mut at) = (Share::new(0, 1), At::default());
        while let Some((outgoing, run)) = log.owed.next(&mut at, &all)? {
            self.hear()?;
            // Settled before they are read: a later write makes them owed again.
            log.owed.settle(outgoing, run.clone());
            let slot = outgoing.slot();
            if !self.ram.holds(slot) {
                continue;
            }
            let shown = next.as_ref().map_or(u64::MAX, |next| next.shown());
            let shown = shown.saturating_sub(slot.offset()) / PAGE_SIZE;
            let middle = shown.clamp(run.start, run.end);
            let (differ, rest) = (run.start..middle, middle..run.end);
            if !differ.is_empty() {
                let written = writer.write(outgoing.region() as usize, slot, differ);
                written.map_err(failed("copying pages"))?;
            }
            if let Some(next) = next.as_mut().filter(|_| !rest.is_empty()) {
                let copied = self.ram.copy(next, slot, rest, || self.is_wanted());
                copied.map_err(failed("copying pages"))?;
            }
        }
        Ok(())
    }

    /// Copies the pages that differ from the base, unless they are copied, and memory besides RAM.
    fn copy(&self, writer: &mut Writer, is_copied: bool) -> Result<(), End> {
        for (region, slot) in self.memory.iter().enumerate() {
            let mut result = Ok(());
            let mut write = |run: Range<u64>| {
                for run in pieces(run) {
                    if result.is_ok() {
                        result = self.is_wanted().and_then(|()| writer.write(region, slot, run).map(drop));
                    }
                }
            };
            if self.ram.holds(slot) && is_copied {
                continue;
            }
            if self.ram.holds(slot) {
                let told = self.ram.parted_pages(&self.pagemap, slot, write);
                told.map_err(failed("/proc/self/pagemap"))?;
            } else {
                // Memory besides RAM is small and not in the base.
                write(0..slot.pages());
            }
            result.map_err(failed("copying pages"))?;
        }
        Ok(())
    }

    /// The message for an error of [`Memory::part`].
    fn why_whole(&self, error: &io::Error) -> String {
        let (backing, size) = (self.ram.config.backing, self.ram.config.size);
        let page = backing.page_size();
        if page > host_page() && error.raw_os_error() == Some(libc::ENOMEM) {
            let (pages, page) = (size / page, short_size(page));
            return format!(
                "its memory is huge pages: a fork takes {pages} more of {page} than the host has free"
            );
        }
        format!("its memory cannot be mapped privately: {error}")
    }
}

/// Parts of `run` between which it is checked whether the fork is wanted.
fn pieces(run: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (run.start..run.end).step_by(PIECE as usize);
    starts.map(move |start| start..(start + PIECE).min(run.end))
}

/// The message for an error of [`Memory::freeze_base`].
fn why_writable(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY) => "another process maps its memory and could write to it".into(),
        _ => format!("its memory cannot be sealed: {error}"),
    }
}
