//! What a core dump has of a vCPU, on x86-64: here it is refused. The interface is that of `arch/x86_64/core.rs`.

use kvm_ioctls::VcpuFd;

use super::paging::Tables;

/// Why there are no dumps here.
pub const IMPOSSIBLE: Option<&str> = Some(
    "x86-64 guests alone can be dumped: what an Arm kernel says of itself is not checked against its page tables yet",
);
/// EM_AARCH64.
pub const MACHINE: u16 = 183;
/// Where the kernel's image is mapped, but for KASLR: KIMAGE_VADDR of 48-bit addresses (arch/arm64/include/asm/memory.h).
pub const IMAGE: u64 = 0xffff_8000_8000_0000;

/// None.
#[derive(Clone, Copy, Debug, Default)]
pub struct Core;

impl Core {
    /// None.
    ///
    /// # Errors
    /// Never.
    pub fn read(_: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self)
    }

    /// None.
    pub fn tables(&self) -> Vec<Tables> {
        Vec::new()
    }

    /// None.
    pub fn prstatus(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }
}
