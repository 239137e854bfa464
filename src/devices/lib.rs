//! Devices of a machine, besides memory and CPUs.
//!
//! [`bus`] routes an access to a device. A board's own devices are one short file each. Devices
//! that end the guest ([`i8042`], [`acpi_pm`], [`pvpanic`], [`debug_exit`]) answer a write with an
//! [`Ending`]. [`virtio`] holds the paravirtual devices and their transports. [`pci`] is the PCI
//! bus. [`mod@line`] is an interrupt that can be masked. [`console`] is the host's end of the serial
//! port; the virtio console is in [`virtio`].

pub mod bus;

pub mod acpi_pm;
pub mod console;
pub mod debug_exit;
pub mod i8042;
mod irqchip;
pub mod line;
pub mod pci;
pub mod pl031;
pub mod pvpanic;
pub mod rtc;
pub mod serial;
pub mod system_control;
pub mod test_device;
pub mod virtio;
pub mod vmgenid;

/// How a guest ends itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It switched itself off.
    PowerOff,
    /// It asked for a reset.
    Reset,
    /// It reported a panic.
    Panic,
    /// It ended with this exit code, which becomes the process's.
    Code(u8),
}
