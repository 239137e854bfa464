//! PCI, as far as a machine without other buses, bridges and legacy interrupts has it: one bus, whose functions have a type 0 header,
//! one memory BAR and MSI-X (PCI Local Bus Specification 3.0, chapter 6).
//!
//! Start reading at [`Function`], what a function is to its bus; then [`host`], the host bridge, by which a guest reaches configuration
//! spaces (CF8/CFC, and ECAM) and BARs. [`config`] is a configuration space, [`msix`] the table of messages of a function. The functions
//! with something behind them are virtio's ([`super::virtio::pci`]). What announces the bus is the board's ([`vellum_kvm::arch`]), what
//! wires messages and doorbells to KVM the machine's.

pub mod config;
pub mod host;
pub mod msix;

use super::Ending;

/// How many devices a bus can have (PCI 3.0, section 3.2.2.3.2); each has one function here. The first is the host bridge.
pub const DEVICES: usize = 32;

/// Who a device's requests come from, as a bridge and a translation service know it (PCI Express 5.0, section 2.2.6.2): bus 0, its number,
/// function 0.
pub fn requester(device: usize) -> u16 {
    debug_assert!(device < DEVICES);
    (device as u16) << 3
}

/// A function on the bus. Every access lies within what it is of, and has 1, 2, 4 or 8 bytes.
pub trait Function: Send + Sync {
    /// The guest reads its configuration space.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// The guest writes to it, by which it may end itself (through a window on the BAR).
    fn write_config(&self, offset: u16, data: &[u8]) -> Option<Ending>;
    /// Where its BAR is and how many bytes it has, while it decodes memory.
    fn bar(&self) -> Option<(u64, u64)> {
        None
    }
    /// The guest reads at `offset` of the BAR.
    fn read_bar(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    /// The guest writes at `offset` of the BAR.
    fn write_bar(&self, _offset: u64, _data: &[u8]) -> Option<Ending> {
        None
    }
}
