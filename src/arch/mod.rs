//! What differs from one architecture to the next, behind one interface: the rest of Vellum names `arch::…` and never
//! an architecture.
//!
//! Two rooms, `x86_64` and `aarch64`; exactly one is compiled. What both are described with is beside them.

pub mod begun;
pub mod fixed;
pub mod images;
pub mod meanwhile;
pub mod watch;

#[cfg(target_arch = "aarch64")]
pub mod aarch64;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
