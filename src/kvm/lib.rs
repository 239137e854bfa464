//! KVM's VM and what belongs to it: its vCPU threads and memslots ([`vm`]), the board of each
//! architecture ([`arch`]), guest memory ([`memory`]) and the dirty trackers ([`dirty`]).
//!
//! Devices, and what a guest runs, live in the crates above.

pub mod arch;
pub mod dirty;
pub mod memory;
pub mod vm;
