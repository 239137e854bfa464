//! Debugging of vCPUs: not supported on Arm. The interface is that of `arch/x86_64/debug.rs`.

use kvm_bindings::kvm_guest_debug;
use kvm_ioctls::VcpuFd;

use crate::arch::watch::{Access, Watch};
use crate::vm::vcpu::SLOTS;

/// Why debugging is not supported.
pub const IMPOSSIBLE: Option<&str> =
    Some("only x86-64 guests can be debugged: the GDB stub does not support Arm registers and page tables");
/// Returns false.
pub fn blocks_interrupts(_: u32) -> bool {
    false
}

/// Empty.
pub const BREAKPOINT: &[u8] = &[];
/// Zero.
pub const BYTES: usize = 0;
/// Empty.
pub const DESCRIPTION: &str = "";

/// A placeholder: there are no registers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Registers;

impl Registers {
    /// Returns the placeholder.
    ///
    /// # Errors
    /// Never.
    pub fn read(_: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self)
    }

    /// Does nothing.
    ///
    /// # Errors
    /// Never.
    pub fn write(&self, _: &VcpuFd, _: &Self) -> Result<(), kvm_ioctls::Error> {
        Ok(())
    }

    /// Returns zero.
    pub fn pc(&self) -> u64 {
        0
    }

    /// Returns no bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        []
    }

    /// Returns the placeholder.
    #[must_use]
    pub fn with_bytes(&self, _: &[u8; BYTES]) -> Self {
        *self
    }
}

/// Finds no address.
pub fn physical(_: &VcpuFd, _: u64) -> Option<u64> {
    None
}

/// Offers no hardware breakpoint.
pub fn watch(_: u64, _: u64, _: Access) -> Option<Watch> {
    None
}

/// Returns an empty debug mode.
pub fn control(_: &[Option<Watch>; SLOTS], _: bool, _: bool, _: bool) -> kvm_guest_debug {
    kvm_guest_debug::default()
}
