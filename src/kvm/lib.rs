//! KVM's VM and its parts: vCPU threads and memslots ([`vm`]), the board of each architecture
//! ([`arch`]), guest memory ([`memory`]) and the dirty trackers ([`dirty`]).
//!
//! Devices and guests are in higher crates.

pub mod arch;
pub mod dirty;
pub mod memory;
pub mod vm;
