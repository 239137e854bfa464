//! PCI for a machine with one bus, without PCI-to-PCI bridges and legacy interrupts. Functions have
//! a type 0 header, one memory BAR and MSI-X (PCI Local Bus Specification 3.0, chapter 6).
//!
//! Start reading at [`Function`], the interface of a function to its bus. [`host`] is the host
//! bridge: it gives a guest access to configuration spaces (CF8/CFC and ECAM) and BARs. [`config`]
//! is a configuration space. [`msix`] is the message table of a function. The functions that are
//! devices are virtio's ([`super::virtio::pci`]). The board announces the bus
//! ([`vellum_kvm::arch`]), and the machine wires messages and doorbells to KVM.

pub mod config;
pub mod host;
pub mod msix;

use super::Ending;

/// The maximum number of devices on a bus (PCI 3.0, section 3.2.2.3.2). Each has one function here.
/// Device 0 is the host bridge.
pub const DEVICES: usize = 32;

/// The requester ID of a device (PCI Express 5.0, section 2.2.6.2), by which bridges and the GIC's
/// ITS tell the source of a message: bus 0, the device number, function 0.
pub fn requester(device: usize) -> u16 {
    debug_assert!(device < DEVICES);
    (device as u16) << 3
}

/// A function on the bus. Every access lies within the configuration space or BAR, and has 1, 2, 4
/// or 8 bytes.
pub trait Function: Send + Sync {
    /// Handles a read of the configuration space.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Handles a write to the configuration space. Such a write can end the guest, through a window
    /// on the BAR.
    fn write_config(&self, offset: u16, data: &[u8]) -> Option<Ending>;
    /// Address and size of the BAR, while the function decodes memory.
    fn bar(&self) -> Option<(u64, u64)> {
        None
    }
    /// Handles a read at `offset` of the BAR.
    fn read_bar(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    /// Handles a write at `offset` of the BAR.
    fn write_bar(&self, _offset: u64, _data: &[u8]) -> Option<Ending> {
        None
    }
}
