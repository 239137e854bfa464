//! Eager block splitting on Arm: KVM splits blocks as soon as they are logged, in chunks of a given
//! size, and drops its lock between chunks. It must be enabled before the VM has memslots. x86 has
//! a module parameter instead (`kvm.eager_page_split`).

use std::io;

use kvm_ioctls::VmFd;

use crate::memory::short_size;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::dirty as sys;

/// Why eager splitting is not possible.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This KVM lacks the capability.
    #[error(
        "this KVM lacks KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE (Arm, Linux 6.5 and later); on x86 use the module parameter \
         kvm.eager_page_split"
    )]
    Absent,
    /// The size is not a block size.
    #[error("{} is not a block size here; use {sizes}", short_size(*asked))]
    Size {
        /// The requested size.
        asked: u64,
        /// The possible sizes, as text.
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

/// The chunk sizes that `vm` supports in bytes, smallest first. Empty without support.
pub fn sizes(vm: &VmFd) -> Vec<u64> {
    let sizes = sys::block_sizes(vm);
    (0..u64::BITS).map(|bit| 1 << bit).filter(|size| sizes & size != 0).collect()
}

/// Makes `vm`, which has no memslots yet, split `bytes` at a time.
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
