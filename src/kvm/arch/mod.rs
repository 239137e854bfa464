//! The differences between architectures behind one interface. The rest of Vellum uses `arch::…`
//! and never names an architecture.
//!
//! Either `x86_64` or `aarch64` is compiled. Common types are beside them.

pub(crate) mod clock_policy;
pub mod fixed;
pub mod gsi;
pub mod load;
pub mod prepared_vm;
pub mod watch;

#[cfg(target_arch = "aarch64")]
pub mod aarch64;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
