//! The dirty ring: each vCPU lists the pages that it writes, and stops when its list is full.
//!
//! Entries become bits of the same bitmaps that the other methods fill. The ring lists a page twice
//! if it is protected between a fault and its write, for instance around
//! `KVM_EXIT_DIRTY_RING_FULL`. [`DirtyRing`] manages the rings themselves, which vCPUs empty too.

use std::sync::Arc;

use super::{DirtyTracker, Error, Method, Slots};
use crate::vm::Vm;
use crate::vm::quiesced::Quiesced;
use crate::vm::ring::{DirtyRing, Failed, Stray};

/// Tracks the rings of all vCPUs.
#[derive(Debug)]
pub(crate) struct RingTracker {
    ring: Arc<DirtyRing>,
    slots: Slots,
    /// Whether KVM's log of the tracked slots is enabled.
    logged: bool,
}

impl RingTracker {
    /// Tracks `ring`, which belongs to `vm`.
    pub(super) fn new(vm: &Vm, quiesced: &Quiesced<'_>, ring: Arc<DirtyRing>) -> Result<Self, Error> {
        Ok(Self { ring, slots: Slots::new(vm, quiesced)?, logged: false })
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Ioctl(source) => Self::Ioctl { call: "KVM_RESET_DIRTY_RINGS", source },
            Failed::Fewer { harvested, reset } => Self::Reset { harvested, reset },
        }
    }
}

impl DirtyTracker for RingTracker {
    fn method(&self) -> Method {
        Method::Ring
    }

    fn slots(&self) -> &Slots {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    fn track(&mut self, id: u32) -> Result<(), Error> {
        self.slots.track(id)?;
        self.slots.logs.iter().for_each(|log| self.ring.follow(log.slot.id(), log.pages()));
        Ok(())
    }

    fn written(&self) -> Vec<u64> {
        self.ring.written()
    }

    fn get(&mut self) -> Result<(), Error> {
        // A memslot has a backup bitmap beside the rings only while its log is enabled. Rings still
        // hold entries from before it was disabled.
        if self.ring.has_backup_bitmap() && self.logged {
            self.slots.fetch()?;
        } else {
            self.slots.follow()?;
            self.slots.logs.iter_mut().for_each(|log| log.words.fill(0));
        }
        let logs = &mut self.slots.logs;
        logs.iter().for_each(|log| self.ring.follow(log.slot.id(), log.pages()));
        let harvested = self.ring.harvest();
        harvested.map_err(|Stray { vcpu, slot, page }| Error::Entry { vcpu, slot, page })?;
        logs.iter_mut().for_each(|log| self.ring.take(log.slot.id(), &mut log.words));
        Ok(())
    }

    fn clear(&mut self) -> Result<(), Error> {
        self.ring.reset()?;
        self.slots.merge_own();
        Ok(())
    }

    fn enable(&mut self, on: bool) -> Result<(), Error> {
        if on {
            // Drop entries of an earlier log.
            self.ring.forget()?;
        }
        self.slots.enable(on)?;
        self.logged = on;
        Ok(())
    }
}

impl Drop for RingTracker {
    fn drop(&mut self) {
        // On failure nothing is lost: a vCPU with a full ring empties it itself.
        let _ = self.ring.abandon();
    }
}
