//! The dirty rings of a VM, one for each vCPU. They must be enabled before the VM has memslots or
//! vCPUs. [`crate::dirty::ring`] tracks pages with them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvm_ioctls::{VcpuFd, VmFd};

use super::memslots::Memslots;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::dirty::{self as sys, Ring};

/// The default size of a dirty ring in entries: the largest that KVM has ever allowed.
pub const RING_ENTRIES: u32 = 65536;

/// The dirty rings of a machine. They are created with its VM, one is added with each vCPU, and
/// they live as long as the VM: only a reader that has followed a ring from its first entry knows
/// where KVM writes next.
///
/// A vCPU with a full ring empties all rings itself ([`DirtyRing::drain_rings`]), independent of
/// any tracker. So written pages are in two places: in the rings, and in bitmaps that hold drained
/// entries. [`DirtyRing::harvest`] and [`DirtyRing::take`] fetch both.
#[derive(Debug)]
pub struct DirtyRing {
    entries: u32,
    backup_bitmap: bool,
    relieved: AtomicU64,
    inner: Mutex<Inner>,
    vm: Arc<VmFd>,
    // Mappings of rings keep KVM's VM alive, and the VM uses this memory.
    _memslots: Arc<Memslots>,
}

#[derive(Debug)]
struct Inner {
    /// Ordered by vCPU, with the number of entries read from each.
    rings: Vec<(Ring, u64)>,
    /// Harvested entries that were not returned to KVM yet.
    harvested: u64,
    /// The harvested pages, a bit a page, by memslot.
    seen: Vec<SlotPages>,
    /// An entry that matches no memslot in `seen`.
    stray: Option<Stray>,
}

/// The harvested pages of a memslot.
#[derive(Debug)]
struct SlotPages {
    slot: u32,
    pages: u64,
    words: Vec<u64>,
}

/// An entry for a page that is not tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stray {
    /// The ring's vCPU.
    pub vcpu: usize,
    /// The entry's memslot.
    pub slot: u32,
    /// The page in the memslot.
    pub page: u64,
}

/// Why a reset failed.
#[derive(Debug)]
pub enum Failed {
    /// KVM refuses.
    Ioctl(io::Error),
    /// Fewer entries were reset than were harvested.
    Fewer {
        /// Entries harvested.
        harvested: u64,
        /// Entries reset.
        reset: u64,
    },
}

/// Why a VM cannot have dirty rings.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel is too old, or its KVM lacks rings.
    #[error(
        "this host has no ring: its KVM lacks KVM_CAP_DIRTY_LOG_RING (Linux 5.11); \
         manual-protect would work"
    )]
    Absent,
    /// KVM does not support the size.
    #[error("{entries} is out of range: a power of two from 1024 to {most} would work here")]
    Size {
        /// The requested size.
        entries: u32,
        /// The maximum of this KVM.
        most: u32,
    },
    /// KVM refuses.
    #[error("KVM_CAP_DIRTY_LOG_RING: {0}")]
    Ioctl(#[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Absent => ErrorOrigin::user(Field::Tracker).lacking(),
            Self::Size { .. } => ErrorOrigin::user(Field::RingEntries),
            Self::Ioctl(_) => ErrorOrigin::HOST,
        }
    }
}

/// Checks a ring's size against the limits of `vm`.
///
/// # Errors
/// `vm` has no rings, or not of this size.
pub fn check(vm: &VmFd, entries: u32) -> Result<(), Error> {
    let most = sys::ring_entries(vm).ok_or(Error::Absent)?;
    // KVM reserves 64 entries plus the size of the processor's own buffer (512 with PML;
    // virt/kvm/dirty_ring.c, kvm_dirty_ring_get_rsvd_entries). A ring must be larger.
    if !entries.is_power_of_two() || !(1024..=most).contains(&entries) {
        return Err(Error::Size { entries, most });
    }
    Ok(())
}

/// How many resets in a row may do nothing. Since Linux 6.17 a pending signal ends a reset early
/// (virt/kvm/dirty_ring.c). So does work that the kernel has queued for the thread, even if signals
/// are blocked.
const IDLE_RESETS: u32 = 1000;

impl DirtyRing {
    /// Gives the future vCPUs of `vm`, which has no memslots yet, rings of this many entries.
    pub(super) fn enable(vm: &Arc<VmFd>, memslots: &Arc<Memslots>, entries: u32) -> Result<Self, Error> {
        check(vm, entries)?;
        let backup_bitmap = sys::enable_ring(vm, entries).map_err(Error::Ioctl)?;
        let inner = Inner { rings: Vec::new(), harvested: 0, seen: Vec::new(), stray: None };
        let (vm, _memslots) = (vm.clone(), memslots.clone());
        Ok(Self {
            entries,
            backup_bitmap,
            relieved: AtomicU64::new(0),
            inner: Mutex::new(inner),
            vm,
            _memslots,
        })
    }

    /// Maps the ring of the next vCPU.
    pub(super) fn add(&self, vcpu: &VcpuFd) -> io::Result<()> {
        let ring = Ring::map(vcpu, self.entries)?;
        self.lock().rings.push((ring, 0));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it is held.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The size of each ring in entries, a power of two.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Whether KVM keeps a backup bitmap, for writes that no vCPU makes.
    pub(crate) fn has_backup_bitmap(&self) -> bool {
        self.backup_bitmap
    }

    /// How often a vCPU has stopped with a full ring.
    pub fn relieved(&self) -> u64 {
        self.relieved.load(Ordering::Relaxed)
    }

    /// The number of entries of each vCPU so far.
    pub fn written(&self) -> Vec<u64> {
        self.lock().rings.iter().map(|(_, written)| *written).collect()
    }

    /// Tracks memslot `slot` with this number of pages from now on. Its harvested pages are kept,
    /// unless its size has changed.
    pub fn follow(&self, slot: u32, pages: u64) {
        let seen = &mut self.lock().seen;
        match seen.iter_mut().find(|seen| seen.slot == slot) {
            Some(seen) if seen.pages == pages => {}
            found => {
                let new = SlotPages { slot, pages, words: vec![0; pages.div_ceil(64) as usize] };
                match found {
                    Some(seen) => *seen = new,
                    None => seen.push(new),
                }
            }
        }
    }

    /// Empties the rings and stops tracking. Harvested pages are dropped.
    ///
    /// # Errors
    /// As [`DirtyRing::reset`].
    pub fn abandon(&self) -> Result<(), Failed> {
        let mut inner = self.lock();
        inner.seen.clear();
        inner.harvest();
        inner.stray = None;
        inner.reset(&self.vm)
    }

    /// Empties the rings and drops all pages written until now.
    ///
    /// # Errors
    /// As [`DirtyRing::reset`].
    pub fn forget(&self) -> Result<(), Failed> {
        let mut inner = self.lock();
        inner.harvest();
        inner.stray = None;
        inner.seen.iter_mut().for_each(|seen| seen.words.fill(0));
        inner.reset(&self.vm)
    }

    /// Reads the rings. [`DirtyRing::take`] returns the pages, slot by slot. [`DirtyRing::reset`]
    /// returns the entries to KVM.
    ///
    /// # Errors
    /// An entry is for a page that is not tracked.
    pub fn harvest(&self) -> Result<(), Stray> {
        let mut inner = self.lock();
        inner.harvest();
        inner.stray.take().map_or(Ok(()), Err)
    }

    /// Moves the harvested pages of memslot `slot` to `words`, in addition to those already set.
    pub fn take(&self, slot: u32, words: &mut [u64]) {
        let mut inner = self.lock();
        if let Some(seen) = inner.seen.iter_mut().find(|seen| seen.slot == slot) {
            words.iter_mut().zip(&mut seen.words).for_each(|(word, seen)| *word |= std::mem::take(seen));
        }
    }

    /// Returns the harvested entries to KVM, which protects their pages again. Only then may the
    /// pages be read.
    ///
    /// # Errors
    /// KVM refuses, or did not reset all of them.
    pub fn reset(&self) -> Result<(), Failed> {
        self.lock().reset(&self.vm)
    }

    /// Like [`DirtyRing::reset`], interrupted by a signal after `delay`: tests what KVM does then.
    /// Returns how many entries were reset. [`DirtyRing::reset`] handles the rest.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn reset_interrupted(&self, delay: Duration) -> io::Result<u64> {
        let mut inner = self.lock();
        let reset = u64::from(sys::reset_rings_interrupted(&self.vm, delay)?);
        inner.harvested = inner.harvested.saturating_sub(reset);
        Ok(reset)
    }

    /// Empties all rings. A vCPU with a full ring does that before it continues.
    ///
    /// # Errors
    /// As [`DirtyRing::reset`].
    pub(super) fn drain_rings(&self) -> Result<(), Failed> {
        self.relieved.fetch_add(1, Ordering::Relaxed);
        // Under one lock: when a tracker reads the bitmaps, their pages have been protected again,
        // or the tracker's own reset does it.
        let mut inner = self.lock();
        inner.harvest();
        inner.reset(&self.vm)
    }
}

impl Inner {
    fn harvest(&mut self) {
        let Self { rings, harvested, seen, stray } = self;
        // Without tracked slots, an unknown page is not an error.
        let followed = !seen.is_empty();
        for (vcpu, (ring, written)) in rings.iter_mut().enumerate() {
            let mut at = 0;
            let count = u64::from(ring.harvest(|slot, page| {
                // Address space 1 is SMM's. Its slots are the same.
                let slot = slot & 0xffff;
                if seen.get(at).is_none_or(|seen| seen.slot != slot) {
                    at = seen.iter().position(|seen| seen.slot == slot).unwrap_or(usize::MAX);
                }
                match seen.get_mut(at) {
                    Some(seen) if page < seen.pages => seen.words[(page / 64) as usize] |= 1 << (page % 64),
                    _ if followed => *stray = Some(Stray { vcpu, slot, page }),
                    _ => {}
                }
            }));
            *written += count;
            *harvested += count;
        }
    }

    fn reset(&mut self, vm: &VmFd) -> Result<(), Failed> {
        let (harvested, mut idle) = (self.harvested, 0);
        while self.harvested > 0 {
            match sys::reset_rings(vm).map_err(Failed::Ioctl)? {
                0 if idle == IDLE_RESETS => {
                    let reset = harvested - std::mem::take(&mut self.harvested);
                    return Err(Failed::Fewer { harvested, reset });
                }
                0 => idle += 1,
                some => (self.harvested, idle) = (self.harvested.saturating_sub(u64::from(some)), 0),
            }
        }
        Ok(())
    }
}
