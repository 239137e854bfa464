//! What a guest finds besides memory and CPUs.
//!
//! [`bus`] leads an access to a device. A board's own devices are one short file each; those that a guest ends by
//! ([`i8042`], [`acpi_pm`], [`pvpanic`], [`debug_exit`]) answer a write with an [`Ending`]. [`virtio`] holds the
//! paravirtual devices and the transport that carries them, [`pci`] the bus that some of them are on, [`mod@line`] an interrupt that can be
//! masked.

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

/// How a guest asks for its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It switched itself off.
    PowerOff,
    /// It asked for a reset.
    Reset,
    /// It reported a panic.
    Panic,
    /// It ended with a code of its own, the value with which the process exits.
    Code(u8),
}
