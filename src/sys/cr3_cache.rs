//! The CR3 cache: its numbers and its vCPU ioctls. Only a KVM with the series `cr3-cache` of
//! `kernel-patches/` has it (arch/x86/include/uapi/asm/kvm_cr3_cache.h of the series).

use std::io;

use kvm_bindings::KVMIO;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

/// `KVM_CAP_CR3_CACHE`. KVM_CHECK_EXTENSION returns the number of entries, or 0.
pub const CAPABILITY: u32 = 25443;
/// `KVM_FEATURE_CR3_CACHE`, in EAX of CPUID leaf 0x4000_0001.
pub const FEATURE: u32 = 1 << 20;
/// `KVM_HC_CR3_CACHE`, a hypercall number for VMCALL.
pub const HYPERCALL: u64 = 120;
/// The hypercall's operation that registers a page.
pub const REGISTER: u64 = 0;
/// The operation that drops all roots of the vCPU, and with them all entries.
pub const FLUSH: u64 = 1;
/// The operation that ends a registration.
pub const UNREGISTER: u64 = 2;
/// The maximum length of a section in bytes.
pub const MAX_SECTION: u64 = 256;

/// `KVM_CR3_CACHE_REGISTERED`: the only flag.
const REGISTERED: u64 = 1;

/// `struct kvm_cr3_cache`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw {
    flags: u64,
    gpa: u64,
    section: u64,
    section_len: u64,
    reserved: [u64; 4],
}

#[allow(missing_docs, reason = "the macros write public functions, which nobody outside sees")]
mod request {
    use super::*;
    ioctl_ior_nr!(KVM_GET_CR3_CACHE, KVMIO, GET, Raw);
    ioctl_iow_nr!(KVM_SET_CR3_CACHE, KVMIO, SET, Raw);
}
use request::*;

/// The number of `KVM_GET_CR3_CACHE`.
pub const GET: u32 = 0xf3;
/// The number of `KVM_SET_CR3_CACHE`.
pub const SET: u32 = 0xf4;

/// A vCPU's registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registration {
    /// The guest-physical address of the registered page.
    pub gpa: u64,
    /// The linear address of the code that reads the page and loads CR3.
    pub section: u64,
    /// The length of that code in bytes.
    pub section_len: u64,
}

fn done(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the registration of `vcpu`. KVM first empties its page, which marks the page dirty.
pub fn get(vcpu: &VcpuFd) -> io::Result<Option<Registration>> {
    let mut raw = Raw::default();
    // SAFETY: the kernel fills one structure of this size.
    done(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_CR3_CACHE(), &mut raw) })?;
    let Raw { flags, gpa, section, section_len, .. } = raw;
    Ok((flags & REGISTERED != 0).then_some(Registration { gpa, section, section_len }))
}

/// Registers a page for `vcpu`. KVM empties the page.
pub fn set(vcpu: &VcpuFd, registration: &Registration) -> io::Result<()> {
    let Registration { gpa, section, section_len } = *registration;
    let raw = Raw { flags: REGISTERED, gpa, section, section_len, reserved: [0; 4] };
    // SAFETY: the kernel reads one structure of this size.
    done(unsafe { ioctl_with_ref(vcpu, KVM_SET_CR3_CACHE(), &raw) })
}
