//! The guest-physical address map.
//!
//! ```text
//! 0                       RAM, at most 3 GiB
//!   0xd_f000                the VM generation ID, on a page of its own that the memory map reserves
//! 0xc000_0000  3 GiB      the gap: nothing of the guest's RAM
//!   0xc000_0000             a workload's own slot: code, control blocks, page tables (`guests/`)
//!   0xd000_0000             the doorbell: never backed, a write leaves the guest
//!   0xd800_0000             virtio-mmio devices
//!   0xe000_0000             configuration spaces of the PCI bus (ECAM), where there is one; the memory map reserves it
//!   0xe800_0000             BARs of its functions
//!   0xfec0_0000             IOAPIC, LAPIC, KVM's TSS pages
//! 0x1_0000_0000  4 GiB    RAM, the rest
//! ```

use super::ports;
use crate::arch::fixed::{Device, Fixed, PciHost, Uart};
use crate::memory::plan::Space;

/// Where RAM below 4 GiB ends at the latest.
pub const GAP_START: u64 = 0xc000_0000;
/// Where RAM goes on.
pub const GAP_END: u64 = 1 << 32;
/// A workload's own slot.
pub const WORKLOAD_BASE: u64 = GAP_START;
/// The end of the room for it: page tables for as much as a guest can have go above RAM if they do not fit here.
pub const WORKLOAD_END: u64 = 0xd000_0000;
/// The doorbell page.
pub const DOORBELL: u64 = 0xd000_0000;
/// Where virtio-mmio devices start, a page each.
pub const VIRTIO_BASE: u64 = 0xd800_0000;
/// What its serial port can be.
pub const UARTS: &[Uart] = &[Uart::Ns16550];
/// Where PCI is reached: one bus, 1 MiB of configuration spaces.
pub const PCI: PciHost = PciHost {
    ports: Some(ports::PCI_ADDRESS),
    ecam: 0xe000_0000..0xe010_0000,
    window: 0xe800_0000..0xf000_0000,
};
/// Three pages that KVM wants on Intel hosts for real mode (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: u64 = 0xfffb_d000;
/// The largest guest-physical address plus one that four levels of page tables and KVM both reach.
pub const MAX_ADDRESS: u64 = 1 << 46;

/// Where the VM generation ID is. Its page has nothing else, as its specification wants it, and kernels that search the area for ROMs look
/// at multiples of 2 KiB.
pub const VMGENID: u64 = 0xd_f010;

/// Where RAM goes.
pub const RAM: Space = Space(&[0..GAP_START, GAP_END..MAX_ADDRESS]);
/// Where RAM starts.
pub const RAM_START: u64 = RAM.0[0].start;
/// How many bytes of RAM lie in one piece from its start on.
pub const ONE_PIECE: u64 = RAM.0[0].end - RAM_START;

/// The devices that every board has.
pub const FIXED: &[Fixed] = &[
    Fixed::on_ports(Device::Serial, ports::COM1, ports::COM_PORTS),
    Fixed::on_ports(Device::Cmos, ports::RTC_INDEX, ports::RTC_PORTS),
    Fixed::on_ports(Device::SystemControl, ports::SYSTEM_CONTROL, 1),
    Fixed::on_ports(Device::I8042, ports::I8042_COMMAND, 1),
    Fixed::on_ports(Device::PvPanic, ports::PVPANIC, 1),
    Fixed::on_ports(Device::Sleep, ports::SLEEP_CONTROL, ports::SLEEP_PORTS),
];
/// The interrupt of the serial port.
pub const SERIAL_GSI: u32 = ports::COM1_GSI;
/// The interrupt by which a guest hears of a new VM generation ID.
pub const GENERATION_GSI: u32 = ports::GED_GSI;
