//! What every board is described with, whatever its architecture: devices at places of their own, and what a board's tables say of a
//! machine. The machine wires the devices; each architecture says where they are (`layout::FIXED`) and writes its own tables.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A device that a board has at a place of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The serial port.
    Serial,
    /// The real-time clock as a PC has it (MC146818): an index and a data port.
    Cmos,
    /// The real-time clock as Arm's boards have it (PL031).
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

/// What the serial port is, as `--uart` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uart {
    /// A 16550, as a PC has it: ttyS0.
    #[default]
    #[value(name = "16550")]
    Ns16550,
    /// A PL011, as Arm's boards have it: ttyAMA0.
    Pl011,
}

impl Uart {
    /// Whether it is what machines had before there was a choice.
    pub fn is_16550(&self) -> bool {
        *self == Self::Ns16550
    }
}

/// Which addresses a device answers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// I/O ports.
    Ports,
    /// Guest-physical memory.
    Memory,
}

/// Where a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Which device.
    pub device: Device,
    /// On which bus.
    pub on: Addresses,
    /// Its first address.
    pub base: u64,
    /// How many addresses it has.
    pub len: u64,
}

impl Fixed {
    /// `device` on ports.
    pub const fn on_ports(device: Device, base: u16, len: u64) -> Self {
        Self { device, on: Addresses::Ports, base: base as u64, len }
    }

    /// `device` in memory.
    pub const fn in_memory(device: Device, base: u64, len: u64) -> Self {
        Self { device, on: Addresses::Memory, base, len }
    }
}

/// The i8042 command that pulses the reset line.
pub const I8042_RESET: u8 = 0xfe;
/// The sleep type that `\_S5` names (ACPI 6.5, 7.4.2).
pub const SLEEP_S5: u8 = 5;

/// A virtio-mmio device, as a kernel should find it.
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
    /// Each by itself.
    Mmio(Vec<VirtioMmio>),
    /// On a bus.
    Pci(PciHost),
}

impl Virtio {
    /// Those that are found by themselves.
    pub fn mmio(&self) -> &[VirtioMmio] {
        match self {
            Self::Mmio(devices) => devices,
            Self::Pci(_) => &[],
        }
    }
}

/// Where a PCI host bridge, of one bus, is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciHost {
    /// The address port of its configuration spaces, where there are ports; the data port follows it.
    pub ports: Option<u16>,
    /// Its configuration spaces in memory.
    pub ecam: Range<u64>,
    /// Where BARs can be, below 4 GiB.
    pub window: Range<u64>,
}

/// What the tables of a machine say beside what every board of its architecture has.
#[derive(Clone, Debug)]
pub struct Parts<Mode> {
    /// How many vCPUs.
    pub cpus: u32,
    /// The interrupt controller.
    pub irqchip: Mode,
    /// The serial port.
    pub uart: Uart,
    /// Its virtio devices.
    pub virtio: Virtio,
    /// The guest-physical address of its VM generation ID, if it has one.
    pub vmgenid: Option<u64>,
}
