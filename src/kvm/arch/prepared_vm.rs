//! The parts of an incoming machine that can be made before its description is known. The first
//! thread makes them while another reads the description.

use kvm_ioctls::{Kvm, VmFd};

use super::cpuid::{self, Supported};
use vellum_host as host;

/// KVM's VM without memory, and the features that KVM supports.
#[derive(Debug)]
pub struct PreparedVm {
    /// The VM.
    pub vm: VmFd,
    /// The supported features.
    pub supported: Supported,
}

impl PreparedVm {
    /// Creates the VM and queries the features, on this thread. Returns None if KVM refuses: a
    /// later attempt reports the error.
    pub fn new(kvm: &Kvm) -> Option<Self> {
        let vm = host::kvm::create_vm(kvm).ok()?;
        Some(Self { vm, supported: cpuid::supported(kvm) })
    }
}
