//! What tells a kernel which devices there are: ACPI's tables ([`super::acpi`]), written before the kernel is loaded.

use std::ops::Range;

use vm_memory::GuestMemoryBackend;

use super::acpi;
pub use super::acpi::Error;
use super::irqchip::Mode;
use crate::arch::fixed::{Parts, Virtio};

/// Tables in guest memory.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The guest-physical address of the RSDP.
    pub rsdp: u64,
    /// The configuration spaces of PCI, which the memory map reserves, where there is PCI.
    pub ecam: Option<Range<u64>>,
}

/// Writes those of a machine of `parts`.
///
/// # Errors
/// Where they do not fit, or guest memory has no RAM below 1 MiB.
pub fn prepare<M: GuestMemoryBackend>(memory: &M, parts: Parts<Mode>) -> Result<Tables, Error> {
    let rsdp = acpi::write(memory, 0..parts.cpus, &parts.virtio, parts.vmgenid)?;
    let ecam = match parts.virtio {
        Virtio::Mmio(_) => None,
        Virtio::Pci(host) => Some(host.ecam),
    };
    Ok(Tables { rsdp, ecam })
}
