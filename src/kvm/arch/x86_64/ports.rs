//! The board's I/O ports, and related values in its ACPI tables: one place for the tables, the boot
//! protocols and the devices behind the ports (`devices/`).

pub use crate::arch::fixed::{I8042_RESET, SLEEP_S5};

/// The first port of a PC's first serial port.
pub const COM1: u16 = 0x3f8;
/// The number of ports of a serial port.
pub(crate) const COM_PORTS: u64 = 8;
/// The interrupt of [`COM1`].
pub const COM1_GSI: u32 = 4;
/// The interrupt of the generic event device (ACPI 6.5, 5.6.9). A PC has its SCI there, which
/// hardware-reduced ACPI lacks.
pub(crate) const GED_GSI: u32 = 9;
/// The index port of the real-time clock. The data port follows it.
pub(crate) const RTC_INDEX: u16 = 0x70;
/// The number of ports of the real-time clock.
pub(crate) const RTC_PORTS: u64 = 2;
/// System control port B: the cause of an NMI, and the output of the PIT's timer 2.
pub(crate) const SYSTEM_CONTROL: u16 = 0x61;
/// The command and status port of the i8042.
pub(crate) const I8042_COMMAND: u16 = 0x64;
/// The address port of PCI's configuration spaces. The data port follows it.
pub(crate) const PCI_ADDRESS: u16 = 0xcf8;
/// The number of ports of both.
pub(crate) const PCI_PORTS: u8 = 8;
/// pvpanic's port. ACPI announces it as the device QEMU0001.
pub(crate) const PVPANIC: u16 = 0x505;
/// The port of ACPI's sleep control register. The sleep status register follows it.
pub(crate) const SLEEP_CONTROL: u16 = 0x600;
/// The port of ACPI's sleep status register.
pub(crate) const SLEEP_STATUS: u16 = SLEEP_CONTROL + 1;
/// The number of ports of both sleep registers.
pub(crate) const SLEEP_PORTS: u64 = 2;
