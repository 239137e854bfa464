//! The I/O ports of the board, and the values that its ACPI tables name: one place for the tables, the boot protocols and the
//! devices behind the ports (`devices/`).

pub use crate::arch::fixed::{I8042_RESET, SLEEP_S5};

/// The first port of the first serial port of a PC.
pub const COM1: u16 = 0x3f8;
/// How many ports a serial port has.
pub const COM_PORTS: u64 = 8;
/// The interrupt of [`COM1`].
pub const COM1_GSI: u32 = 4;
/// The interrupt of the generic event device (ACPI 6.5, 5.6.9): a PC has its SCI there, which hardware-reduced ACPI has not.
pub const GED_GSI: u32 = 9;
/// The index port of the real-time clock; the data port follows it.
pub const RTC_INDEX: u16 = 0x70;
/// How many ports the real-time clock has.
pub const RTC_PORTS: u64 = 2;
/// System control port B: why there is a non-maskable interrupt, and the output of the PIT's timer 2.
pub const SYSTEM_CONTROL: u16 = 0x61;
/// The command and status port of the i8042.
pub const I8042_COMMAND: u16 = 0x64;
/// The address port of PCI's configuration spaces; the data port follows it.
pub const PCI_ADDRESS: u16 = 0xcf8;
/// How many ports the two take.
pub const PCI_PORTS: u8 = 8;
/// pvpanic's port; ACPI names it by the device QEMU0001.
pub const PVPANIC: u16 = 0x505;
/// The ACPI sleep control register's port; the sleep status register follows it.
pub const SLEEP_CONTROL: u16 = 0x600;
/// The ACPI sleep status register's port.
pub const SLEEP_STATUS: u16 = SLEEP_CONTROL + 1;
/// How many ports the two sleep registers take.
pub const SLEEP_PORTS: u64 = 2;
