//! The code that a guest without an operating system runs, and how a vCPU is made to enter it, behind one interface: the
//! rest of Vellum names `program::…` and never an architecture.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
