//! Arm's 64-bit architecture: the physical layout, how its kernels are booted, what they are told, and the state of its vCPUs.

pub mod boot;
pub mod clocks;
pub mod core;
pub mod cpuid;
pub mod debug;
mod fdt;
mod gic;
pub mod gsi;
pub mod irqchip;
mod its;
pub mod layout;
pub mod paging;
pub mod regs;
pub mod state;
pub mod tables;
