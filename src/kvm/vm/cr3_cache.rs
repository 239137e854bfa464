//! The CR3 cache of a VM. It must be enabled before the first vCPU. CPUID announces it to the
//! guest. A guest on shadow paging then loads CR3 without an exit. The guest sees host physical
//! addresses of its shadow page tables.
//!
//! The per-vCPU part is in the vCPU's state ([`crate::arch::state`]).

use clap::ValueEnum;
use kvm_bindings::kvm_enable_cap;
use kvm_ioctls::{Kvm, VmFd};

use vellum_host::cr3_cache::{Unavailable, entries};
use vellum_sys::cr3_cache::CAPABILITY;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Whether a VM has a CR3 cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// No cache.
    #[default]
    Off,
    /// A cache; an error if the host has none.
    On,
    /// A cache if the host has one.
    Auto,
}

/// Why the requested cache is not possible.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host does not support it.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// KVM refuses.
    #[error("KVM_ENABLE_CAP(KVM_CAP_CR3_CACHE): {0}")]
    Ioctl(#[source] kvm_ioctls::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Unavailable(_) => ErrorOrigin::user(Field::Cr3Cache).lacking(),
            Self::Ioctl(_) => ErrorOrigin::HOST,
        }
    }
}

impl Choice {
    /// Resolves the choice to on or off. Call this before entering the sandbox: the reasons for a
    /// missing cache come from files.
    ///
    /// # Errors
    /// A cache is required, and this host has none.
    pub fn decided(self, kvm: &Kvm) -> Result<Self, Error> {
        if self == Self::Off {
            return Ok(Self::Off);
        }
        match entries(kvm) {
            Ok(_) => Ok(Self::On),
            Err(why) if self == Self::On => Err(why.into()),
            Err(why) => {
                tracing::info!("no CR3 cache: {why}");
                Ok(Self::Off)
            }
        }
    }
}

/// Enables the cache of `vm`, which has no vCPU yet. Returns the number of entries of each vCPU.
pub(super) fn enable(vm: &VmFd) -> Result<u32, Error> {
    vm.enable_cap(&kvm_enable_cap { cap: CAPABILITY, ..Default::default() }).map_err(Error::Ioctl)?;
    Ok(vm.check_extension_raw(CAPABILITY.into()).max(0) as u32)
}
