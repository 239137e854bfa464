//! The guest-physical address map.
//!
//! ```text
//! 0x0100_0000             the interrupt controller: distributor, GICv2's CPU interface, ITS
//! 0x0400_0000             GICv3's redistributors, 128 KiB a vCPU
//! 0x0900_0000             serial port, real-time clock
//! 0x0a00_0000             virtio-mmio devices
//! 0x1000_0000             a workload's own slot: code, control blocks, page tables (`guests/`)
//! 0x3000_0000             the doorbell: never backed, a write leaves the guest
//! 0x3800_0000             configuration spaces of the PCI bus (ECAM), if there is one
//! 0x3a00_0000    96 MiB   its BARs
//! 0x4000_0000  1 GiB      RAM, all of it in one piece
//!   0x4000_0000             the device tree, at most 1 MiB
//!   0x401f_f010             the VM generation ID, on a reserved page of its own
//!   0x4020_0000             the kernel
//! ```
//!
//! Every address is a multiple of 64 KiB, the largest page size of hosts and guests.

use crate::arch::fixed::{Device, Fixed, PciHost, Uart};
use crate::memory::plan::Space;

/// The distributor of the interrupt controller, 64 KiB.
pub(crate) const GIC_DISTRIBUTOR: u64 = 0x0100_0000;
/// Its size in the device tree.
pub(crate) const GIC_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// GICv2's CPU interface, 8 KiB.
pub(crate) const GIC_CPU: u64 = 0x0102_0000;
/// Its size.
pub(crate) const GIC_CPU_SIZE: u64 = 0x2000;
/// GICv3's ITS (Arm IHI 0069, 12.18): a frame of registers, and one to which devices write.
pub(crate) const GIC_TRANSLATION: u64 = 0x0104_0000;
/// Its size.
pub(crate) const GIC_TRANSLATION_SIZE: u64 = 0x2_0000;
/// GICv3's redistributors, one after the other.
pub(crate) const GIC_REDISTRIBUTORS: u64 = 0x0400_0000;
/// The size of each (Arm IHI 0069, 12.10): a frame for itself and one for SGIs and PPIs.
pub(crate) const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// The serial port.
pub const SERIAL: u64 = 0x0900_0000;
/// The size of its register range. A 16550's registers are a byte apart.
pub(crate) const SERIAL_SIZE: u64 = 0x1000;
/// The supported types.
pub const UARTS: &[Uart] = &[Uart::Ns16550, Uart::Pl011];
/// The real-time clock.
pub const RTC: u64 = 0x0901_0000;
/// Its size.
pub(crate) const RTC_SIZE: u64 = 0x1000;
/// The first virtio-mmio device, a page each.
pub const VIRTIO_BASE: u64 = 0x0a00_0000;
/// A workload's own slot.
pub const WORKLOAD_BASE: u64 = 0x1000_0000;
/// Its end.
pub const WORKLOAD_END: u64 = DOORBELL;
/// The doorbell page.
pub const DOORBELL: u64 = 0x3000_0000;
/// The end of the guest-physical address space: 40 bits, which the oldest KVM supports for every
/// guest.
pub(crate) const MAX_ADDRESS: u64 = 1 << 40;

/// The addresses of RAM.
#[expect(clippy::single_range_in_vec_init, reason = "there is one range, not the numbers in it")]
pub const RAM: Space = Space(&[1 << 30..MAX_ADDRESS]);
/// The start of RAM.
pub const RAM_START: u64 = RAM.0[0].start;
/// The maximum size of RAM in one piece from its start.
pub const ONE_PIECE: u64 = RAM.0[0].end - RAM_START;

/// The address of the device tree.
pub(crate) const FDT: u64 = RAM_START;
/// Its maximum size.
pub(crate) const FDT_SIZE: u64 = 1 << 20;
/// PCI: one bus, with 1 MiB of configuration spaces.
pub const PCI: PciHost =
    PciHost { ports: None, ecam: 0x3800_0000..0x3810_0000, window: 0x3a00_0000..0x4000_0000 };
/// The address of the VM generation ID.
pub const VMGENID: u64 = RAM_START + 0x1f_f010;
/// The lowest load address of an image. The loader writes below it.
pub const KERNEL: u64 = RAM_START + (2 << 20);

/// The devices of every board.
pub const FIXED: &[Fixed] =
    &[Fixed::in_memory(Device::Serial, SERIAL, SERIAL_SIZE), Fixed::in_memory(Device::Pl031, RTC, RTC_SIZE)];
/// The interrupt of the serial port.
pub const SERIAL_GSI: u32 = 0;
/// The interrupt that reports a new VM generation ID.
pub const GENERATION_GSI: u32 = 1;
