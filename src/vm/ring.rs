//! The dirty rings of a VM, one for each vCPU: asked for before the VM has memslots or vCPUs. How they are harvested is
//! [`crate::dirty::ring`]'s.

use std::io;

use kvm_ioctls::VmFd;

use crate::fault::{Blame, Fault, Field};
use crate::sys::dirty as sys;

/// The size of a dirty ring in entries where none is asked for: the largest that KVM has ever allowed.
pub const RING_ENTRIES: u32 = 65536;

/// The dirty rings of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRing {
    /// Entries of each, a power of two.
    pub entries: u32,
    /// Whether KVM keeps a bitmap beside them, for what no vCPU writes.
    pub backup_bitmap: bool,
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

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Absent => Blame::user(Field::Tracker),
            Self::Size { .. } => Blame::user(Field::RingEntries),
            Self::Ioctl(_) => Blame::HOST,
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

/// Gives the future vCPUs of `vm` rings of so many entries.
pub(super) fn enable(vm: &VmFd, entries: u32) -> Result<DirtyRing, Error> {
    check(vm, entries)?;
    let backup_bitmap = sys::enable_ring(vm, entries).map_err(Error::Ioctl)?;
    Ok(DirtyRing { entries, backup_bitmap })
}
