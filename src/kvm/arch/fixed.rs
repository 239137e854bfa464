//! The description of boards of any architecture: devices at fixed addresses, and the input of a
//! machine's tables. The machine wires the devices. Each architecture defines their addresses
//! (`layout::FIXED`) and writes its own tables.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A board device with a fixed address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The serial port.
    Serial,
    /// The real-time clock of a PC (MC146818): an index and a data port.
    Cmos,
    /// The real-time clock of Arm boards (PL031).
    Pl031,
    /// A PC's system control port B.
    SystemControl,
    /// The keyboard controller's reset line.
    I8042,
    /// pvpanic.
    PvPanic,
    /// ACPI's sleep registers.
    Sleep,
}

/// The type of the serial port, as `--uart` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uart {
    /// A 16550, as a PC has it: ttyS0.
    #[default]
    #[value(name = "16550")]
    Ns16550,
    /// A PL011, as Arm boards have it: ttyAMA0.
    Pl011,
}

impl Uart {
    /// Whether this is the default, the only type of old saved states.
    pub fn is_16550(&self) -> bool {
        *self == Self::Ns16550
    }
}

/// An address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// I/O ports.
    Ports,
    /// Guest-physical memory.
    Memory,
}

/// A device's address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// The device.
    pub device: Device,
    /// The address space.
    pub on: Addresses,
    /// The first address.
    pub base: u64,
    /// The number of addresses.
    pub len: u64,
}

impl Fixed {
    /// `device` in memory.
    pub const fn in_memory(device: Device, base: u64, len: u64) -> Self {
        Self { device, on: Addresses::Memory, base, len }
    }
}

/// The i8042 command that pulses the reset line.
pub const I8042_RESET: u8 = 0xfe;
/// The sleep type in `\_S5` (ACPI 6.5, 7.4.2).
pub const SLEEP_S5: u8 = 5;

/// A virtio-mmio device, as announced to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioMmio {
    /// The guest-physical address of its registers.
    pub base: u64,
    /// Their size in bytes.
    pub size: u64,
    /// Its interrupt, edge triggered.
    pub gsi: u32,
}

/// How a kernel finds the virtio devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Virtio {
    /// Announced one by one.
    Mmio(Vec<VirtioMmio>),
    /// On a PCI bus.
    Pci(PciHost),
}

impl Virtio {
    /// The MMIO devices.
    pub fn mmio(&self) -> &[VirtioMmio] {
        match self {
            Self::Mmio(devices) => devices,
            Self::Pci(_) => &[],
        }
    }
}

/// The addresses of a PCI host bridge with one bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciHost {
    /// The address port of its configuration spaces, if it has ports. The data port follows it.
    pub ports: Option<u16>,
    /// Its configuration spaces in memory.
    pub ecam: Range<u64>,
    /// The window for BARs, below 4 GiB.
    pub window: Range<u64>,
}

/// The input of a machine's tables, besides the fixed board devices.
#[derive(Clone, Debug)]
pub struct Parts<Mode> {
    /// The number of vCPUs.
    pub cpus: u32,
    /// The interrupt controller.
    pub irqchip: Mode,
    /// The serial port.
    pub uart: Uart,
    /// The virtio devices.
    pub virtio: Virtio,
    /// The guest-physical address of the VM generation ID, if it has one.
    pub vmgenid: Option<u64>,
}
