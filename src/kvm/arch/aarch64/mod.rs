//! 64-bit Arm: the physical layout, booting, the device tree, and the state of vCPUs.

pub mod boot;
pub mod clocks;
pub mod core;
pub mod cpuid;
pub mod debug;
mod fdt;
mod gic;
pub mod irqchip;
mod its;
pub mod layout;
pub mod paging;
pub mod protocol;
pub mod regs;
pub(super) mod routing;
pub mod state;
mod state_error;
pub mod tables;
