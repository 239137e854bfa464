//! ACPI tables ([`super::acpi`]) tell a kernel its devices. They are written before the kernel is
//! loaded.

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
    /// PCI's configuration spaces, which the memory map reserves, if there is PCI.
    pub ecam: Option<Range<u64>>,
}

/// Writes the tables of a machine of `parts`.
///
/// # Errors
/// They do not fit, or guest memory has no RAM below 1 MiB.
pub fn prepare<M: GuestMemoryBackend>(memory: &M, parts: Parts<Mode>) -> Result<Tables, Error> {
    let rsdp = acpi::write(memory, 0..parts.cpus, &parts.virtio, parts.vmgenid)?;
    let ecam = match parts.virtio {
        Virtio::Mmio(_) => None,
        Virtio::Pci(host) => Some(host.ecam),
    };
    Ok(Tables { rsdp, ecam })
}
