//! x86-64: the physical layout, booting, ACPI tables, and the state of vCPUs.

pub(crate) mod acpi;
pub mod boot;
pub mod clocks;
pub mod core;
pub mod cpuid;
pub mod debug;
pub mod ioapic;
pub mod irqchip;
pub mod layout;
pub mod paging;
pub mod ports;
pub mod protocol;
pub mod regs;
pub(super) mod routing;
pub mod state;
mod state_error;
pub mod tables;
