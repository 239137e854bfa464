//! How Arm's KVM splits blocks before their pages are written: so many bytes at a time as soon as they are logged, under a lock that it
//! gives up in between. It is asked for before the VM has memslots; x86 has a module parameter instead (`kvm.eager_page_split`).

use std::io;

use kvm_ioctls::VmFd;

use crate::memory::short_size;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::dirty as sys;

/// Why blocks are not split at once.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This KVM knows no such thing.
    #[error(
        "this KVM cannot be told to: KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE is Arm's, from Linux 6.5 on; on x86 it is the parameter \
         kvm.eager_page_split"
    )]
    Absent,
    /// No block is so large.
    #[error("{} is the size of no block here: {sizes} would work", short_size(*asked))]
    Size {
        /// What was asked.
        asked: u64,
        /// What there is, as a list in words.
        sizes: String,
    },
    /// KVM refuses.
    #[error("KVM_ENABLE_CAP(KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE): {0}")]
    Ioctl(#[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Absent => ErrorOrigin::user(Field::EagerSplit).lacking(),
            Self::Size { .. } => ErrorOrigin::user(Field::EagerSplit),
            Self::Ioctl(_) => ErrorOrigin::HOST,
        }
    }
}

/// Sizes in bytes that `vm` could split at a time, the smallest first; none where it cannot.
pub fn sizes(vm: &VmFd) -> Vec<u64> {
    let sizes = sys::block_sizes(vm);
    (0..u64::BITS).map(|bit| 1 << bit).filter(|size| sizes & size != 0).collect()
}

/// Has `vm`, which has no memslots yet, split `bytes` at a time.
pub(super) fn enable(vm: &VmFd, bytes: u64) -> Result<(), Error> {
    let sizes = sizes(vm);
    if sizes.is_empty() {
        return Err(Error::Absent);
    }
    if !sizes.contains(&bytes) {
        let sizes = sizes.into_iter().map(short_size).collect::<Vec<_>>().join(", ");
        return Err(Error::Size { asked: bytes, sizes });
    }
    sys::set_eager_split(vm, bytes).map_err(Error::Ioctl)
}
