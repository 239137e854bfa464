//! The guest-physical address map.
//!
//! ```text
//! 0                       RAM, at most 3 GiB
//!   0xd_f000                the VM generation ID, on a reserved page of its own
//! 0xc000_0000  3 GiB      the gap: nothing of the guest's RAM
//!   0xc000_0000             a workload's own slot: code, control blocks, page tables (`guests/`)
//!   0xd000_0000             the doorbell: never backed, a write leaves the guest
//!   0xd800_0000             virtio-mmio devices
//!   0xe000_0000             configuration spaces of the PCI bus (ECAM), if there is one, reserved
//!   0xe800_0000             BARs of its functions
//!   0xfec0_0000             IOAPIC, LAPIC, KVM's TSS pages
//! 0x1_0000_0000  4 GiB    RAM, the rest
//! ```

use super::ports;
use crate::arch::fixed::{Addresses, Device, Fixed, PciHost, Uart};
use crate::memory::plan::Space;

/// The maximum end of RAM below 4 GiB.
pub(crate) const GAP_START: u64 = 0xc000_0000;
/// The start of RAM above 4 GiB.
pub(crate) const GAP_END: u64 = 1 << 32;
/// A workload's own slot.
pub const WORKLOAD_BASE: u64 = GAP_START;
/// Its end. Page tables for very large guests go above RAM if they do not fit here.
pub const WORKLOAD_END: u64 = 0xd000_0000;
/// The doorbell page.
pub const DOORBELL: u64 = 0xd000_0000;
/// The first virtio-mmio device, a page each.
pub const VIRTIO_BASE: u64 = 0xd800_0000;
/// The supported serial ports.
pub const UARTS: &[Uart] = &[Uart::Ns16550];
/// PCI: one bus, with 1 MiB of configuration spaces.
pub const PCI: PciHost = PciHost {
    ports: Some(ports::PCI_ADDRESS),
    ecam: 0xe000_0000..0xe010_0000,
    window: 0xe800_0000..0xf000_0000,
};
/// Three pages that KVM needs on Intel hosts for real mode (`KVM_SET_TSS_ADDR`).
pub(crate) const KVM_TSS: u64 = 0xfffb_d000;
/// The end of the guest-physical address space that both four-level page tables and KVM reach.
pub(crate) const MAX_ADDRESS: u64 = 1 << 46;

/// The address of the VM generation ID. Its page contains nothing else, as its specification
/// demands. Kernels that search the area for ROMs look at multiples of 2 KiB.
pub const VMGENID: u64 = 0xd_f010;

/// The addresses of RAM.
pub const RAM: Space = Space(&[0..GAP_START, GAP_END..MAX_ADDRESS]);
/// The start of RAM.
pub const RAM_START: u64 = RAM.0[0].start;
/// The maximum size of RAM in one piece from its start.
pub const ONE_PIECE: u64 = RAM.0[0].end - RAM_START;

const fn on_ports(device: Device, base: u16, len: u64) -> Fixed {
    Fixed { device, on: Addresses::Ports, base: base as u64, len }
}

/// The devices of every board.
pub const FIXED: &[Fixed] = &[
    on_ports(Device::Serial, ports::COM1, ports::COM_PORTS),
    on_ports(Device::Cmos, ports::RTC_INDEX, ports::RTC_PORTS),
    on_ports(Device::SystemControl, ports::SYSTEM_CONTROL, 1),
    on_ports(Device::I8042, ports::I8042_COMMAND, 1),
    on_ports(Device::PvPanic, ports::PVPANIC, 1),
    on_ports(Device::Sleep, ports::SLEEP_CONTROL, ports::SLEEP_PORTS),
];
/// The interrupt of the serial port.
pub const SERIAL_GSI: u32 = ports::COM1_GSI;
/// The interrupt that reports a new VM generation ID.
pub const GENERATION_GSI: u32 = ports::GED_GSI;
