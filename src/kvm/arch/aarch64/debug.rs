//! What a debugger sees of a vCPU, on x86-64: here it is refused. The interface is that of `arch/x86_64/debug.rs`.

use kvm_bindings::kvm_guest_debug;
use kvm_ioctls::VcpuFd;

use crate::arch::watch::{Access, Watch};
use crate::vm::vcpu::SLOTS;

/// Why there is no debugger here.
pub const IMPOSSIBLE: Option<&str> = Some(
    "x86-64 guests alone can be debugged: the stub knows neither an Arm guest's registers nor its page tables",
);
/// It cannot.
pub fn blocks_interrupts(_: u32) -> bool {
    false
}

/// None.
pub const BREAKPOINT: &[u8] = &[];
/// None.
pub const BYTES: usize = 0;
/// None.
pub const DESCRIPTION: &str = "";

/// None.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Registers;

impl Registers {
    /// None.
    ///
    /// # Errors
    /// Never.
    pub fn read(_: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self)
    }

    /// Nothing.
    ///
    /// # Errors
    /// Never.
    pub fn write(&self, _: &VcpuFd, _: &Self) -> Result<(), kvm_ioctls::Error> {
        Ok(())
    }

    /// None.
    pub fn pc(&self) -> u64 {
        0
    }

    /// None.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        []
    }

    /// The same.
    #[must_use]
    pub fn with_bytes(&self, _: &[u8; BYTES]) -> Self {
        *self
    }
}

/// None.
pub fn physical(_: &VcpuFd, _: u64) -> Option<u64> {
    None
}

/// None.
pub fn watch(_: u64, _: u64, _: Access) -> Option<Watch> {
    None
}

/// Nothing is debugged.
pub fn control(_: &[Option<Watch>; SLOTS], _: bool, _: bool, _: bool) -> kvm_guest_debug {
    kvm_guest_debug::default()
}
