//! Dirty tracking: which pages were written since the last collection.
//!
//! A [`DirtyTracker`] wraps KVM's four methods ([`Method`]): [`log`] has those with bitmaps,
//! [`ring`] the dirty ring. The result is a bitmap for each memslot, a bit a page ([`SlotLog`]),
//! read as runs ([`scan`]). The VMM's own writes ([`crate::memory::write_log`]) are merged in. The
//! oracle checks trackers.
//!
//! The rules of a collection, for every tracker:
//!
//! 1. Call [`DirtyTracker::get`], then [`DirtyTracker::clear`], and only then read a page's
//!    content. A write before the clear is covered by the bit already fetched. A write after it
//!    faults and is in the next collection.
//! 2. Only fetched bits are cleared. So a page that was clean stays logged if it is written between
//!    the two calls.
//! 3. The last collection comes after the vCPUs have left `KVM_RUN` (paused). Until then a
//!    processor may hold entries back (PML). While vCPUs run, [`flush_all`](vcpu::flush_all) before
//!    a collection bounds how long.
//! 4. Deleting a memslot, or disabling its log, discards its bits. Collect first, with paused
//!    vCPUs.
//! 5. A vCPU with a full dirty ring empties the ring itself (`vm/ring.rs`). Its pages wait in
//!    bitmaps for the next collection.
//! 6. With manual protection, a collection may leave the clear to its reader
//!    ([`DirtyTracker::collect_deferred`]). Each chunk is cleared directly before its pages are
//!    read ([`DirtyTracker::clear_chunks`]). KVM holds its MMU lock for one chunk at a time, and a
//!    page that is written again before its chunk is cleared is reported once.
//! 7. A tracker is created while the machine is stopped ([`Quiesced`]). Only then does it miss no
//!    device write while the log of the VMM's own writes is enabled. That log stays enabled as long
//!    as the tracker lives. KVM's log can be enabled and disabled ([`DirtyTracker::enable`]) while
//!    vCPUs and devices run.

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

/// Pages of a chunk when memory is sent or saved while the guest runs: 64 MiB of 4 KiB pages. One
/// clear then delays the guest's page faults by about a millisecond, and calls are few.
pub const CHUNK: u64 = 1 << 14;

/// A method of dirty tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `KVM_GET_DIRTY_LOG` alone, which also clears and protects.
    Bitmap,
    /// `KVM_CLEAR_DIRTY_LOG` clears and protects separately, also in parts.
    ManualProtect,
    /// Like [`Method::ManualProtect`], but all pages are dirty at first, so enabling the log
    /// protects nothing.
    InitiallySet,
    /// A ring for each vCPU, chosen before the first vCPU.
    Ring,
}

impl Method {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 4] = [
        ("bitmap", Self::Bitmap),
        ("manual-protect", Self::ManualProtect),
        ("initially-set", Self::InitiallySet),
        ("ring", Self::Ring),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, method)| *method == self).map_or("", |(name, _)| name)
    }

    /// Whether `KVM_CLEAR_DIRTY_LOG` clears, so that parts can be cleared separately.
    pub fn is_manual(self) -> bool {
        matches!(self, Self::ManualProtect | Self::InitiallySet)
    }

    /// Checks that this host has the method. The error says what would work.
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
    /// The methods of this host, and the missing ones with the reasons.
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
    /// The kernel is too old, or its KVM lacks the method.
    #[error("this host has no {}: its KVM lacks {lacks}; {instead} would work", method.name())]
    Absent {
        /// The requested method.
        method: Method,
        /// The missing capability, and the Linux version that added it.
        lacks: &'static str,
        /// A method that works.
        instead: &'static str,
    },
    /// Together they would lose pages.
    #[error(
        "ring and initially-set exclude each other: with a ring, KVM keeps no bitmap that could be set at \
         first, so pages written before the first collection would be lost silently; choose one of them"
    )]
    RingWithInitiallySet,
    /// The VM has no ring.
    #[error("this machine has no dirty ring; it must be chosen before the first vCPU is created")]
    TooLate,
    /// The VM has a ring, and another method was requested.
    #[error("this machine has a dirty ring, so KVM keeps no bitmap for {}; use ring", .0.name())]
    HasRing(Method),
    /// Only one tracker is possible: two would take each other's records of the VMM's writes.
    #[error("another dirty tracker already tracks this machine's memory")]
    Taken,
    /// The machine is not stopped.
    #[error("pages cannot be tracked: {0}")]
    NotStill(Box<dyn Diagnose + Send + Sync>),
    /// An ioctl failed.
    #[error("{call} of memslot {slot}: {source}")]
    Slot {
        /// The ioctl.
        call: &'static str,
        /// The memslot.
        slot: u32,
        /// KVM's error.
        source: io::Error,
    },
    /// An ioctl on the VM failed.
    #[error("{call}: {source}")]
    Ioctl {
        /// The ioctl.
        call: &'static str,
        /// KVM's error.
        source: io::Error,
    },
    /// KVM reported a page that is not tracked.
    #[error(
        "the dirty ring of vCPU {vcpu} reports page {page} of memslot {slot}: the slot is not tracked or is smaller"
    )]
    Entry {
        /// The ring's vCPU.
        vcpu: usize,
        /// The reported memslot.
        slot: u32,
        /// The page in the slot.
        page: u64,
    },
    /// Fewer entries were returned to KVM than were taken.
    #[error("KVM_RESET_DIRTY_RINGS reset {reset} of {harvested} harvested entries")]
    Reset {
        /// Entries taken.
        harvested: u64,
        /// Entries returned.
        reset: u64,
    },
    /// Memslots cannot be changed.
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

/// The dirty pages of a memslot.
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

    /// The memslot, as of the latest collection.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.slot.pages()
    }

    /// Adopts the slot's current address. If its size has changed, no page is dirty.
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

/// The tracked slots, and the log of the VMM's own writes.
#[derive(Debug)]
pub struct Slots {
    logs: Vec<SlotLog>,
    memslots: Arc<Memslots>,
    memory: GuestMemory,
}

impl Slots {
    /// Starts the log of the VMM's writes. The machine must be stopped, so that none is missed.
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

    /// Adopts changes of the slots since the last collection.
    fn follow(&mut self) -> Result<(), Error> {
        for log in &mut self.logs {
            let id = log.slot.id();
            log.follow(&self.memslots.get(id).ok_or(vm::Error::NoSlot(id))?);
        }
        Ok(())
    }

    /// Fetches KVM's bitmaps for the current slots.
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

    /// Adds the VMM's writes since the last call. Called after KVM's bits are cleared: otherwise a
    /// bit could be cleared in KVM that was not fetched. With a deferred clear that can happen, but
    /// the page is read afterwards like any other reported page.
    ///
    /// Slots are found by host address, so writes are attributed correctly wherever a slot has
    /// moved in the guest's space.
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
                // Writes come in runs, so the slot is usually the previous one.
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

    /// Enables or disables KVM's log.
    fn enable(&self, on: bool) -> Result<(), Error> {
        if on {
            // First, so that no write falls in between.
            self.forget_own();
        }
        let flags = if on { kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        Ok(self.logs.iter().try_for_each(|log| self.memslots.set_flags(log.slot.id(), flags))?)
    }

    /// Drops the log of the VMM's writes until now.
    fn forget_own(&self) {
        self.memory.iter().for_each(|region| region.bitmap().log().drain(|_| ()));
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.memory.iter().for_each(|region| region.bitmap().log().stop());
    }
}

/// Collects written pages. The module's documentation has the order of calls.
pub trait DirtyTracker: Send {
    /// The method.
    fn method(&self) -> Method;

    /// The tracked slots.
    fn slots(&self) -> &Slots;

    /// The tracked slots, to change.
    fn slots_mut(&mut self) -> &mut Slots;

    /// Fetches what was written since the last collection into [`DirtyTracker::logs`].
    fn get(&mut self) -> Result<(), Error>;

    /// Clears and protects what [`DirtyTracker::get`] fetched, and merges the VMM's own writes.
    /// When this returns, the collection is complete and pages may be read.
    fn clear(&mut self) -> Result<(), Error>;

    /// One collection: get and clear.
    fn collect(&mut self) -> Result<(), Error> {
        self.get()?;
        self.clear()
    }

    /// One collection whose pages are cleared later, chunk by chunk. No page may be read before
    /// [`DirtyTracker::clear_chunks`] was called for it. A tracker that cannot clear in parts
    /// clears everything here.
    ///
    /// # Errors
    /// As [`DirtyTracker::collect`].
    fn collect_deferred(&mut self) -> Result<(), Error> {
        self.collect()
    }

    /// Clears and protects the chunks that hold `pages` of the `index`th tracked slot, as far as
    /// [`DirtyTracker::get`] or [`DirtyTracker::collect_deferred`] fetched them. Their bits are
    /// removed from [`DirtyTracker::logs`], so a second call does nothing. Returns the pages of
    /// those chunks, which may be read from then on. An untracked slot has nothing to clear.
    ///
    /// # Errors
    /// KVM refuses. Bits that could not be cleared stay in the logs.
    fn clear_chunks(&mut self, _index: usize, _pages: Range<u64>) -> Result<Range<u64>, Error> {
        Ok(0..u64::MAX)
    }

    /// The latest collection, slot by slot.
    fn logs(&self) -> &[SlotLog] {
        &self.slots().logs
    }

    /// The latest collection, to remove bits. Bits removed between [`DirtyTracker::get`] and
    /// [`DirtyTracker::clear`] stay dirty in KVM, with manual protection.
    fn logs_mut(&mut self) -> &mut [SlotLog] {
        &mut self.slots_mut().logs
    }

    /// How many pages each vCPU has written until the last collection. A page counts as often as
    /// KVM reported it. Empty if the tracker does not know the writers.
    fn written(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Tracks memslot `id` of the tracker's VM from now on, wherever it moves.
    ///
    /// # Errors
    /// The VM has no such slot.
    fn track(&mut self, id: u32) -> Result<(), Error> {
        self.slots_mut().track(id)
    }

    /// Enables or disables KVM's log of all tracked slots, whether vCPUs run or not. Disabling
    /// discards what is not collected. Enabling starts afresh: earlier writes are visible in memory
    /// when this returns.
    fn enable(&mut self, on: bool) -> Result<(), Error> {
        self.slots().enable(on)
    }
}

/// The tracker for `method` on a stopped machine, tracking no slot yet. The VMM's own writes are
/// logged from now on, until the tracker is dropped. For the ring, the machine must have been built
/// with one.
///
/// `chunk` is the number of pages that one `KVM_CLEAR_DIRTY_LOG` clears, rounded to multiples of 64
/// host pages; `None` for whole slots.
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
