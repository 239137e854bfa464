//! Dirty tracking: who wrote which page since somebody last asked.
//!
//! A [`DirtyTracker`] stands in front of KVM's four ways to tell ([`Method`]): [`log`] for the bitmaps, [`ring`] for the
//! dirty ring. Its results are bitmaps, a bit a page, one for each memslot ([`SlotLog`]), read as runs ([`scan`]).
//! What the VMM itself writes ([`crate::memory::write_log`]) is merged in. Whether a tracker is right is judged in `oracle/`.
//!
//! The rules of a collection, whoever the tracker:
//!
//! 1. [`DirtyTracker::get`], then [`DirtyTracker::clear`], and only then read a page's content: what is written before
//!    the clear is covered by the bit in hand, what is written after it faults and is in the next collection.
//! 2. Only what was read is cleared, so a write between the two calls to a page that was clean stays logged.
//! 3. The last collection comes after the vCPUs are out of `KVM_RUN` (paused): until then a processor may hold entries
//!    back (PML). While they run, [`flush_all`](vcpu::flush_all) before a collection bounds how long.
//! 4. Deleting a memslot, or switching its log off, discards its bits: harvest first, vCPUs paused.
//! 5. A vCPU whose dirty ring is full empties it itself (`vm/ring.rs`): its pages wait in bitmaps for the next collection.
//! 6. Where protection is manual, a collection may leave the clear to those who read ([`DirtyTracker::collect_deferred`]): each chunk is
//!    cleared right before its pages are read ([`DirtyTracker::clear_chunks`]). KVM holds its lock of the page tables for one chunk at a
//!    time, and a page that is written again before its chunk is cleared is named once.
//! 7. A tracker is made while the machine stands still ([`Quiesced`]): only then is nothing that a device writes missed while
//!    the log of the VMM's own writes is switched on. That log stays on as long as the tracker lives; KVM's can be switched
//!    on and off meanwhile ([`DirtyTracker::enable`]) while vCPUs and devices run.

pub mod log;
pub mod ring;
pub mod scan;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::memory::{GuestMemory, Slot};
use crate::vm::memslots::Memslots;
use crate::vm::quiesced::Quiesced;
use crate::vm::vcpu;
use crate::vm::{self, Vm};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::dirty as sys;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::plant::{self, Mistake};

/// Pages of a chunk where memory is sent or saved while its guest runs: 64 MiB of 4 KiB pages, so that one clear keeps the guest's page
/// faults waiting for a millisecond or so, and calls are few.
pub const CHUNK: u64 = 1 << 14;

/// How KVM is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `KVM_GET_DIRTY_LOG` alone, which also clears and protects.
    Bitmap,
    /// `KVM_CLEAR_DIRTY_LOG` clears and protects, when and where we like.
    ManualProtect,
    /// The same, and all pages are dirty at first, so that switching the log on protects nothing.
    InitiallySet,
    /// A ring for each vCPU, chosen before there are vCPUs.
    Ring,
}

impl Method {
    /// The names as typed.
    pub const NAMES: [(&str, Self); 4] = [
        ("bitmap", Self::Bitmap),
        ("manual-protect", Self::ManualProtect),
        ("initially-set", Self::InitiallySet),
        ("ring", Self::Ring),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, method)| *method == self).map_or("", |(name, _)| name)
    }

    /// Whether `KVM_CLEAR_DIRTY_LOG` clears, so that a part can be cleared and the rest kept.
    pub fn is_manual(self) -> bool {
        matches!(self, Self::ManualProtect | Self::InitiallySet)
    }

    /// Whether this host has it; the error says what would work.
    pub fn check(self, vm: &kvm_ioctls::VmFd) -> Result<(), Error> {
        let bits = sys::manual_protect_bits(vm);
        let (there, lacks, instead) = match self {
            Self::Bitmap => (true, "", ""),
            Self::ManualProtect => (bits & 1 != 0, "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 (Linux 5.0)", "bitmap"),
            Self::InitiallySet => {
                (bits & 2 != 0, "KVM_DIRTY_LOG_INITIALLY_SET (Linux 5.7)", "manual-protect")
            }
            Self::Ring => {
                (sys::ring_entries(vm).is_some(), "KVM_CAP_DIRTY_LOG_RING (Linux 5.11)", "manual-protect")
            }
        };
        if there { Ok(()) } else { Err(Error::Absent { method: self, lacks, instead }) }
    }
}

impl Method {
    /// All that this host has, and why it has not got the others.
    pub fn available() -> Result<(Vec<Self>, Vec<Absent>), vm::Error> {
        let probe = vellum_host::kvm::create_vm(&vm::open()?)?;
        let (mut available, mut absent) = (Vec::new(), Vec::new());
        for (_, method) in Self::NAMES {
            match method.check(&probe) {
                Ok(()) => available.push(method),
                Err(why) => absent.push((method, why)),
            }
        }
        Ok((available, absent))
    }
}

/// A method that this host does not have, and why.
pub type Absent = (Method, Error);

/// Why pages cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This kernel is too old, or this KVM leaves it out.
    #[error("this host has no {}: its KVM lacks {lacks}; {instead} would work", method.name())]
    Absent {
        /// What was asked for.
        method: Method,
        /// What is missing, and since when Linux has it.
        lacks: &'static str,
        /// What would work.
        instead: &'static str,
    },
    /// The two lose data together.
    #[error(
        "ring and initially-set exclude each other: with the ring KVM keeps no bitmap whose bits could be set at \
         first, so every page written before its first harvest would be lost silently; choose one of them"
    )]
    RingWithInitiallySet,
    /// The VM has no ring.
    #[error("a dirty ring must be chosen before a machine has vCPUs, and this one has none")]
    TooLate,
    /// The VM has a ring, and another method is asked for.
    #[error("this machine has a dirty ring, and KVM gives it no bitmap: {} cannot follow it, ring would work", .0.name())]
    HasRing(Method),
    /// There is one tracker at a time: two would take each other's view of what the VMM writes.
    #[error("another tracker follows this machine's memory")]
    Taken,
    /// The machine does not stand still.
    #[error("pages cannot be tracked: {0}")]
    NotStill(Box<dyn Diagnose + Send + Sync>),
    /// An ioctl failed.
    #[error("{call} of memslot {slot}: {source}")]
    Slot {
        /// Its name.
        call: &'static str,
        /// Which slot.
        slot: u32,
        /// What KVM said.
        source: io::Error,
    },
    /// An ioctl on the whole VM failed.
    #[error("{call}: {source}")]
    Ioctl {
        /// Its name.
        call: &'static str,
        /// What KVM said.
        source: io::Error,
    },
    /// KVM named a page that nobody tracks.
    #[error(
        "the dirty ring of vCPU {vcpu} names page {page} of memslot {slot}, which is not tracked or not so large"
    )]
    Entry {
        /// Whose ring.
        vcpu: usize,
        /// The slot it names.
        slot: u32,
        /// The page in the slot.
        page: u64,
    },
    /// Fewer entries came back to KVM than were taken.
    #[error("KVM_RESET_DIRTY_RINGS gave back {reset} entries of {harvested} that were harvested")]
    Reset {
        /// What was taken.
        harvested: u64,
        /// What came back.
        reset: u64,
    },
    /// Memslots.
    #[error(transparent)]
    Vm(#[from] vm::Error),
}

impl From<vcpu::Error> for Error {
    fn from(error: vcpu::Error) -> Self {
        Self::Vm(error.into())
    }
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Absent { .. } => ErrorOrigin::user(Field::Tracker).lacking(),
            Self::RingWithInitiallySet => ErrorOrigin::user(Field::Tracker),
            Self::Vm(error) => error.origin(),
            Self::NotStill(error) => error.origin(),
            Self::TooLate
            | Self::HasRing(_)
            | Self::Taken
            | Self::Slot { .. }
            | Self::Ioctl { .. }
            | Self::Entry { .. }
            | Self::Reset { .. } => ErrorOrigin::HOST,
        }
    }
}

/// What is known of one memslot.
#[derive(Clone, Debug)]
pub struct SlotLog {
    slot: Slot,
    /// The dirty pages of the latest collection, a bit a page from the slot's start.
    pub words: Vec<u64>,
}

impl SlotLog {
    /// An empty log of `slot`: no page is dirty.
    pub fn new(slot: Slot) -> Self {
        Self { words: vec![0; slot.bitmap_words()], slot }
    }

    /// Whose log it is, and where that slot was at the latest collection.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.slot.pages()
    }

    /// Takes over where the slot is now; where it is of another size, none of its pages is dirty.
    fn follow(&mut self, slot: &Slot) {
        if self.slot.bytes() != slot.bytes() {
            *self = Self::new(slot.clone());
        } else if !self.slot.is(slot) {
            self.slot = slot.clone();
        }
    }

    /// The dirty pages as runs from the slot's start.
    pub fn runs(&self) -> scan::Runs<'_> {
        scan::runs(&self.words, self.pages())
    }
}

/// The tracked slots, and the VMM's own writes to them.
#[derive(Debug)]
pub struct Slots {
    logs: Vec<SlotLog>,
    memslots: Arc<Memslots>,
    memory: GuestMemory,
}

impl Slots {
    /// Of a machine that stands still, for from now on what the VMM writes is logged.
    fn new(vm: &Vm, _: &Quiesced<'_>) -> Result<Self, Error> {
        let memory = vm.memory.guest.clone();
        if !memory.iter().all(|region| region.bitmap().log().start()) {
            return Err(Error::Taken);
        }
        Ok(Self { logs: Vec::new(), memslots: vm.memslots().clone(), memory })
    }

    fn track(&mut self, id: u32) -> Result<(), Error> {
        let slot = self.memslots.get(id).ok_or(vm::Error::NoSlot(id))?;
        match self.logs.iter_mut().find(|log| log.slot.id() == id) {
            Some(log) => log.follow(&slot),
            None => self.logs.push(SlotLog::new(slot)),
        }
        Ok(())
    }

    /// Follows slots that have been moved or made anew since the last collection.
    fn follow(&mut self) -> Result<(), Error> {
        for log in &mut self.logs {
            let id = log.slot.id();
            log.follow(&self.memslots.get(id).ok_or(vm::Error::NoSlot(id))?);
        }
        Ok(())
    }

    /// Fetches KVM's bitmaps, of slots as they are now.
    fn fetch(&mut self) -> Result<(), Error> {
        for log in &mut self.logs {
            let (call, slot) = ("KVM_GET_DIRTY_LOG", log.slot.id());
            let fetched = self.memslots.dirty_log(slot, move |now| {
                log.follow(now);
                &mut log.words
            });
            fetched.map_err(|source| Error::Slot { call, slot, source })?;
        }
        Ok(())
    }

    /// Adds what the VMM wrote since the last call. Called after KVM's bits are cleared, lest a bit be cleared in KVM that was not read
    /// there; where that is deferred, one may be, and its page is read afterwards like any other that is named.
    ///
    /// Slots are found by host address, so that writes are right wherever in the guest's space a slot has moved.
    fn merge_own(&mut self) {
        if plant::is(Mistake::VmmWritesLeftOut) {
            return;
        }
        for region in self.memory.iter() {
            let base = region.as_ptr() as u64;
            let mut at = 0;
            region.bitmap().log().drain(|page| {
                let hva = base + page * PAGE_SIZE;
                let holds = |log: &SlotLog| hva >= log.slot.hva() && hva - log.slot.hva() < log.slot.bytes();
                // Writes come in runs: the slot is most often the one of before.
                if !self.logs.get(at).is_some_and(holds) {
                    at = self.logs.iter().position(holds).unwrap_or(usize::MAX);
                }
                if let Some(log) = self.logs.get_mut(at) {
                    let page = (hva - log.slot.hva()) / PAGE_SIZE;
                    log.words[(page / 64) as usize] |= 1 << (page % 64);
                }
            });
        }
    }

    /// Switches KVM's log on or off.
    fn enable(&self, on: bool) -> Result<(), Error> {
        if on {
            // First, so that no write falls between.
            self.forget_own();
        }
        let flags = if on { kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        Ok(self.logs.iter().try_for_each(|log| self.memslots.set_flags(log.slot.id(), flags))?)
    }

    /// Forgets what the VMM wrote until now.
    fn forget_own(&self) {
        self.memory.iter().for_each(|region| region.bitmap().log().drain(|_| ()));
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.memory.iter().for_each(|region| region.bitmap().log().stop());
    }
}

/// Collects the pages that were written. See the module for the order in which to call it.
pub trait DirtyTracker: Send {
    /// How it asks KVM.
    fn method(&self) -> Method;

    /// What it tracks.
    fn slots(&self) -> &Slots;

    /// As above, to change.
    fn slots_mut(&mut self) -> &mut Slots;

    /// Reads what was written since the last collection into [`DirtyTracker::logs`].
    fn get(&mut self) -> Result<(), Error>;

    /// Clears and protects what [`DirtyTracker::get`] read, and merges the VMM's own writes. The collection is complete
    /// and pages may be read when this returns.
    fn clear(&mut self) -> Result<(), Error>;

    /// Both: one collection.
    fn collect(&mut self) -> Result<(), Error> {
        self.get()?;
        self.clear()
    }

    /// One collection whose pages are cleared later, chunk by chunk: none may be read before [`DirtyTracker::clear_chunks`] has been
    /// called for it. A tracker that cannot clear in parts clears all at once, here.
    ///
    /// # Errors
    /// As [`DirtyTracker::collect`].
    fn collect_deferred(&mut self) -> Result<(), Error> {
        self.collect()
    }

    /// Clears and protects what [`DirtyTracker::get`] or [`DirtyTracker::collect_deferred`] read of the chunks that hold `pages` of the
    /// `index`th tracked slot, and takes it out of [`DirtyTracker::logs`]: a second call does nothing. The slot's pages of those chunks,
    /// which it returns, may be read from then on. A slot that is not tracked has nothing to clear.
    ///
    /// # Errors
    /// Where KVM refuses; what could not be cleared is still in the logs.
    fn clear_chunks(&mut self, _index: usize, _pages: Range<u64>) -> Result<Range<u64>, Error> {
        Ok(0..u64::MAX)
    }

    /// The latest collection, slot by slot.
    fn logs(&self) -> &[SlotLog] {
        &self.slots().logs
    }

    /// As above, for those who take bits out: between [`DirtyTracker::get`] and [`DirtyTracker::clear`] that leaves pages
    /// dirty in KVM, where protection is manual.
    fn logs_mut(&mut self) -> &mut [SlotLog] {
        &mut self.slots_mut().logs
    }

    /// How many pages each vCPU has written until the last collection, one as often as KVM has named it; empty for a tracker that does not
    /// know who writes.
    fn written(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Tracks memslot `id` of the tracker's VM from now on, wherever it moves.
    ///
    /// # Errors
    /// Where the VM has no such slot.
    fn track(&mut self, id: u32) -> Result<(), Error> {
        self.slots_mut().track(id)
    }

    /// Switches KVM's log of all tracked slots on or off, whether vCPUs run or not. Off discards what is not collected; on
    /// begins anew: what was written before is in memory for whoever looks after this returns.
    fn enable(&mut self, on: bool) -> Result<(), Error> {
        self.slots().enable(on)
    }
}

/// The tracker for `method` on a machine that stands still, tracking no slot yet. The VMM's own writes are logged from now on,
/// until the tracker is dropped. For the ring, the machine must have been built with one.
///
/// `chunk` is how many pages one `KVM_CLEAR_DIRTY_LOG` clears, at least and in multiples of 64 of the host's; `None` for whole slots.
pub fn tracker(
    method: Method,
    vm: &Vm,
    quiesced: &Quiesced<'_>,
    chunk: Option<u64>,
) -> Result<Box<dyn DirtyTracker>, Error> {
    match (method, vm.dirty_ring.clone()) {
        (Method::InitiallySet, Some(_)) => Err(Error::RingWithInitiallySet),
        (Method::Ring, Some(ring)) => Ok(Box::new(ring::RingTracker::new(vm, quiesced, ring)?)),
        (Method::Ring, None) => Err(Error::TooLate),
        (method, Some(_)) => Err(Error::HasRing(method)),
        _ => Ok(Box::new(log::LogTracker::new(method, vm, quiesced, chunk)?)),
    }
}
