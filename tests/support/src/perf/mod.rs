//! What benchmarks compare Vellum with.

pub mod floor;
#[cfg(target_arch = "x86_64")]
pub mod function;
