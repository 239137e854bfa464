//! What a guest finds besides memory and CPUs.
//!
//! [`bus`] leads an access to a device. The PC's own devices are one short file each; those that a guest ends by
//! ([`i8042`], [`acpi_pm`], [`pvpanic`], [`debug_exit`]) answer a write with an [`Ending`]. [`virtio`] holds the
//! paravirtual devices and the transport that carries them.

pub mod bus;

#[cfg(target_arch = "x86_64")]
pub mod acpi_pm;
pub mod console;
#[cfg(target_arch = "x86_64")]
pub mod debug_exit;
#[cfg(target_arch = "x86_64")]
pub mod i8042;
#[cfg(target_arch = "x86_64")]
mod ioapic;
#[cfg(target_arch = "x86_64")]
pub mod pvpanic;
#[cfg(target_arch = "x86_64")]
pub mod rtc;
pub mod serial;
#[cfg(target_arch = "x86_64")]
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
