//! What tells a kernel which devices there are: ACPI's tables ([`super::acpi`]), written before the kernel is loaded.

use vm_memory::GuestMemoryBackend;

use super::acpi;
pub use super::acpi::Error;
use super::irqchip::Mode;
use crate::arch::fixed::Parts;

/// Tables in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// The guest-physical address of the RSDP.
    pub rsdp: u64,
}

/// Writes those of a machine of `parts`.
///
/// # Errors
/// Where they do not fit, or guest memory has no RAM below 1 MiB.
pub fn prepare<M: GuestMemoryBackend>(memory: &M, parts: Parts<Mode>) -> Result<Tables, Error> {
    acpi::write(memory, 0..parts.cpus, &parts.virtio, parts.vmgenid).map(|rsdp| Tables { rsdp })
}
