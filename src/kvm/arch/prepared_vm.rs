//! What of a machine can be made before anything is known of it: for a machine that comes from elsewhere, whose first thread has nothing
//! else to do until another one has read what it is.

use kvm_ioctls::{Kvm, VmFd};

use super::cpuid::{self, Supported};
use vellum_host as host;

/// KVM's VM without memory, and what KVM can show a guest.
#[derive(Debug)]
pub struct PreparedVm {
    /// The VM.
    pub vm: VmFd,
    /// What it can be shown.
    pub supported: Supported,
}

impl PreparedVm {
    /// Makes the VM, and asks, on this thread; nothing where KVM refuses: it will be asked again, and then somebody hears why.
    pub fn new(kvm: &Kvm) -> Option<Self> {
        let vm = host::kvm::create_vm(kvm).ok()?;
        Some(Self { vm, supported: cpuid::supported(kvm) })
    }
}
