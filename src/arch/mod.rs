//! What differs between architectures: one interface, a room each.

#[cfg(target_arch = "x86_64")]
pub mod x86_64;
