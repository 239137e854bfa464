//! Core dumps of vCPUs: not supported on Arm. The interface is that of `arch/x86_64/core.rs`.

use kvm_ioctls::VcpuFd;

use super::paging::Tables;

/// Why core dumps are not supported.
pub const IMPOSSIBLE: Option<&str> = Some(
    "only x86-64 guests can be dumped: an Arm kernel's VMCOREINFO cannot be checked against its page tables yet",
);
/// EM_AARCH64.
pub const MACHINE: u16 = 183;
/// The address of the kernel's image without KASLR: KIMAGE_VADDR with 48-bit addresses
/// (arch/arm64/include/asm/memory.h).
pub const IMAGE: u64 = 0xffff_8000_8000_0000;

/// A placeholder: there is no state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Core;

impl Core {
    /// Returns the placeholder.
    ///
    /// # Errors
    /// Never.
    pub fn read(_: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self)
    }

    /// Returns no page tables.
    pub fn tables(&self) -> Vec<Tables> {
        Vec::new()
    }

    /// Returns no bytes.
    pub fn prstatus(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }
}
