//! The dirty rings of a VM, one for each vCPU: asked for before the VM has memslots or vCPUs. Who follows pages by them is
//! [`crate::dirty::ring`].

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvm_ioctls::{VcpuFd, VmFd};

use super::memslots::Memslots;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::dirty::{self as sys, Ring};

/// The size of a dirty ring in entries where none is asked for: the largest that KVM has ever allowed.
pub const RING_ENTRIES: u32 = 65536;

/// The dirty rings of a machine: made with its VM, one added with each vCPU, and there as long as it is. Where KVM writes next in a
/// ring is known to nobody who was not there from the first entry on.
///
/// A vCPU whose ring is full empties all of them itself ([`DirtyRing::drain_rings`]), whoever follows its pages and however busy that
/// one is. So what has been written is in two places, the rings and bitmaps in which relieved entries wait;
/// [`DirtyRing::harvest`] and [`DirtyRing::take`] fetch both.
#[derive(Debug)]
pub struct DirtyRing {
    entries: u32,
    backup_bitmap: bool,
    relieved: AtomicU64,
    inner: Mutex<Inner>,
    vm: Arc<VmFd>,
    // Mappings of rings keep KVM's VM alive, and that uses this memory.
    _memslots: Arc<Memslots>,
}

#[derive(Debug)]
struct Inner {
    /// In the order of the vCPUs, with how many entries each has had.
    rings: Vec<(Ring, u64)>,
    /// Entries harvested that have not been given back to KVM.
    harvested: u64,
    /// What was harvested, a bit a page, by memslot.
    seen: Vec<SlotPages>,
    /// An entry that fits no memslot in `seen`.
    stray: Option<Stray>,
}

/// The harvested pages of a memslot.
#[derive(Debug)]
struct SlotPages {
    slot: u32,
    pages: u64,
    words: Vec<u64>,
}

/// An entry of a page that nobody follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stray {
    /// Whose ring.
    pub vcpu: usize,
    /// The memslot that it names.
    pub slot: u32,
    /// The page in it.
    pub page: u64,
}

/// What became of a reset.
#[derive(Debug)]
pub enum Failed {
    /// KVM refuses.
    Ioctl(io::Error),
    /// Fewer entries went back than were harvested.
    Fewer {
        /// What was harvested.
        harvested: u64,
        /// What went back.
        reset: u64,
    },
}

/// Why a VM cannot have dirty rings.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This kernel is too old, or this KVM leaves it out.
    #[error(
        "this host has no ring: its KVM lacks KVM_CAP_DIRTY_LOG_RING (Linux 5.11); \
         manual-protect would work"
    )]
    Absent,
    /// A size that KVM does not give.
    #[error("{entries} is out of range: a power of two from 1024 to {most} would work here")]
    Size {
        /// What was asked for.
        entries: u32,
        /// What this KVM offers.
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

/// Checks a ring's size against what `vm` offers.
///
/// # Errors
/// Where `vm` has no rings, or none of this size.
pub fn check(vm: &VmFd, entries: u32) -> Result<(), Error> {
    let most = sys::ring_entries(vm).ok_or(Error::Absent)?;
    // KVM keeps 64 entries and the length of the processor's own buffer (512 with PML) in reserve
    // (virt/kvm/dirty_ring.c, kvm_dirty_ring_get_rsvd_entries); a ring must hold more than that.
    if !entries.is_power_of_two() || !(1024..=most).contains(&entries) {
        return Err(Error::Size { entries, most });
    }
    Ok(())
}

/// How often in a row a reset may do nothing: since Linux 6.16 what counts as a pending signal ends it early (virt/kvm/dirty_ring.c),
/// and work that the kernel has queued for the thread does, where signals are blocked too.
const IDLE_RESETS: u32 = 1000;

impl DirtyRing {
    /// Gives the future vCPUs of `vm`, which has no memslots yet, rings of so many entries.
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

    /// Entries of each ring, a power of two.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Whether KVM keeps a bitmap beside them, for what no vCPU writes.
    pub fn has_backup_bitmap(&self) -> bool {
        self.backup_bitmap
    }

    /// How often a vCPU has stopped for a full ring.
    pub fn relieved(&self) -> u64 {
        self.relieved.load(Ordering::Relaxed)
    }

    /// How many entries each vCPU has had.
    pub fn written(&self) -> Vec<u64> {
        self.lock().rings.iter().map(|(_, written)| *written).collect()
    }

    /// Follows memslot `slot`, which has so many pages, from now on. What was seen of it stays unless it has become another size.
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

    /// Empties the rings, and follows no memslot any more: what is harvested then is forgotten.
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

    /// Empties the rings, and forgets what was written until now.
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

    /// Reads what the rings hold; [`DirtyRing::take`] tells it, slot by slot. The entries are KVM's again after [`DirtyRing::reset`].
    ///
    /// # Errors
    /// Where an entry is of no page that is followed.
    pub fn harvest(&self) -> Result<(), Stray> {
        let mut inner = self.lock();
        inner.harvest();
        inner.stray.take().map_or(Ok(()), Err)
    }

    /// Moves the pages of memslot `slot` that were harvested to `words`, beside those that are there.
    pub fn take(&self, slot: u32, words: &mut [u64]) {
        let mut inner = self.lock();
        if let Some(seen) = inner.seen.iter_mut().find(|seen| seen.slot == slot) {
            words.iter_mut().zip(&mut seen.words).for_each(|(word, seen)| *word |= std::mem::take(seen));
        }
    }

    /// Gives the harvested entries back to KVM, which protects their pages again. Only then may the pages be read.
    ///
    /// # Errors
    /// Where KVM refuses, or has not all of them back.
    pub fn reset(&self) -> Result<(), Failed> {
        self.lock().reset(&self.vm)
    }

    /// As [`DirtyRing::reset`], until a signal ends it, `delay` from now: a test of what KVM does then. Returns how many entries went back;
    /// the others are left to [`DirtyRing::reset`].
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn reset_interrupted(&self, delay: Duration) -> io::Result<u64> {
        let mut inner = self.lock();
        let reset = u64::from(sys::reset_rings_interrupted(&self.vm, delay)?);
        inner.harvested = inner.harvested.saturating_sub(reset);
        Ok(reset)
    }

    /// Empties all rings: what a vCPU does whose own is full, before it goes on.
    ///
    /// # Errors
    /// As [`DirtyRing::reset`].
    pub(super) fn drain_rings(&self) -> Result<(), Failed> {
        self.relieved.fetch_add(1, Ordering::Relaxed);
        // Under one lock, so that what is in the bitmaps when somebody else looks has been protected again, or is so by that one's
        // own reset.
        let mut inner = self.lock();
        inner.harvest();
        inner.reset(&self.vm)
    }
}

impl Inner {
    fn harvest(&mut self) {
        let Self { rings, harvested, seen, stray } = self;
        // Where nobody follows anything there is nobody to tell.
        let followed = !seen.is_empty();
        for (vcpu, (ring, written)) in rings.iter_mut().enumerate() {
            let mut at = 0;
            let count = u64::from(ring.harvest(|slot, page| {
                // Address space 1 is SMM's, whose slots are the same.
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
        let harvested = std::mem::take(&mut self.harvested);
        let (mut reset, mut idle) = (0, 0);
        while reset < harvested {
            match sys::reset_rings(vm).map_err(Failed::Ioctl)? {
                0 if idle == IDLE_RESETS => return Err(Failed::Fewer { harvested, reset }),
                0 => idle += 1,
                some => (reset, idle) = (reset + u64::from(some), 0),
            }
        }
        Ok(())
    }
}
