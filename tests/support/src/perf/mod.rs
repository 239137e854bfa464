//! What benchmarks hold Vellum against.

pub mod floor;
#[cfg(target_arch = "x86_64")]
pub mod function;
