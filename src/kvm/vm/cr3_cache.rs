//! The CR3 cache of a VM: asked for before it has vCPUs. With it a guest on shadow paging, which is told of it in CPUID, loads CR3 without
//! an exit; it sees the addresses that its shadow page tables have in the host's memory.
//!
//! A vCPU's part of it is in its state ([`crate::arch::state`]).

use clap::ValueEnum;
use kvm_bindings::kvm_enable_cap;
use kvm_ioctls::{Kvm, VmFd};

use vellum_host::cr3_cache::{Unavailable, entries};
use vellum_sys::cr3_cache::CAPABILITY;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Whether a VM is to have one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// It has none.
    #[default]
    Off,
    /// It has one, or is not made.
    On,
    /// It has one where the host can give it one.
    Auto,
}

/// Why a VM has none that was to have one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This host cannot.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// KVM refuses.
    #[error("KVM_ENABLE_CAP(KVM_CAP_CR3_CACHE): {0}")]
    Ioctl(#[source] kvm_ioctls::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Unavailable(_) => ErrorOrigin::user(Field::Cr3Cache),
            Self::Ioctl(_) => ErrorOrigin::HOST,
        }
    }
}

impl Choice {
    /// The same, decided: on or off. To be asked before the sandbox is entered, since files say why a host has none.
    ///
    /// # Errors
    /// Where there must be one, and this host has none.
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

/// Gives `vm` one, as long as it has no vCPU; how many entries each will have.
pub(super) fn enable(vm: &VmFd) -> Result<u32, Error> {
    vm.enable_cap(&kvm_enable_cap { cap: CAPABILITY, ..Default::default() }).map_err(Error::Ioctl)?;
    Ok(vm.check_extension_raw(CAPABILITY.into()).max(0) as u32)
}
