//! The dirty ring: each vCPU lists the pages that it writes, and stops when its list is full.
//!
//! Entries become bits of the same bitmaps that the other methods fill: the ring lists a page twice when it is
//! protected between a fault and its write, for instance around `KVM_EXIT_DIRTY_RING_FULL`.

use std::sync::Arc;

use kvm_ioctls::VmFd;

use super::{DirtyTracker, Error, Method, Slots, sys};
use crate::vm::Vm;
use crate::vm::quiesced::Quiesced;
use crate::vm::ring::DirtyRing;

/// The rings of all vCPUs.
#[derive(Debug)]
pub struct RingTracker {
    vm: Arc<VmFd>,
    rings: Vec<sys::Ring>,
    /// Entries taken since the last reset.
    harvested: u64,
    /// Whether KVM keeps a bitmap of what no vCPU wrote.
    backup: bool,
    slots: Slots,
}

impl RingTracker {
    /// Maps the ring of each vCPU, on its own thread.
    pub(super) fn new(vm: &Vm, quiesced: &Quiesced<'_>, ring: DirtyRing) -> Result<Self, Error> {
        let call = "mmap of a dirty ring";
        let rings = quiesced.each(move |fd| sys::Ring::map(fd, ring.entries))?;
        let rings =
            rings.into_iter().collect::<Result<_, _>>().map_err(|source| Error::Ioctl { call, source })?;
        let slots = Slots::new(vm, quiesced)?;
        Ok(Self { vm: vm.fd.clone(), rings, harvested: 0, backup: ring.backup_bitmap, slots })
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

    fn get(&mut self) -> Result<(), Error> {
        if self.backup {
            self.slots.fetch()?;
        } else {
            self.slots.follow()?;
            self.slots.logs.iter_mut().for_each(|log| log.words.fill(0));
        }
        let logs = &mut self.slots.logs;
        for (vcpu, ring) in self.rings.iter_mut().enumerate() {
            let mut stray = None;
            let mut at = 0;
            self.harvested += u64::from(ring.harvest(|slot, page| {
                // Address space 1 is SMM's, whose slots are the same.
                let id = slot & 0xffff;
                if logs.get(at).is_none_or(|log| log.slot.id() != id) {
                    at = logs.iter().position(|log| log.slot.id() == id).unwrap_or(usize::MAX);
                }
                match logs.get_mut(at) {
                    Some(log) if page < log.pages() => log.words[(page / 64) as usize] |= 1 << (page % 64),
                    _ => stray = Some(Error::Entry { vcpu, slot: id, page }),
                }
            }));
            if let Some(stray) = stray {
                return Err(stray);
            }
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<(), Error> {
        let harvested = std::mem::take(&mut self.harvested);
        let mut reset = 0;
        // Since 6.16 a pending signal ends a reset early (virt/kvm/dirty_ring.c).
        while reset < harvested {
            let call = "KVM_RESET_DIRTY_RINGS";
            match sys::reset_rings(&self.vm).map_err(|source| Error::Ioctl { call, source })? {
                0 => return Err(Error::Reset { harvested, reset }),
                some => reset += u64::from(some),
            }
        }
        self.slots.merge_own();
        Ok(())
    }
}
