//! What tells a kernel which devices there are: a device tree ([`super::fdt`]). It has the kernel's command line and initrd in it, so
//! that the loader writes it, last; here is what it is made from.

use vm_memory::GuestMemoryBackend;

use super::irqchip::Mode;
use crate::arch::fixed::Parts;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// GICv2 has a bit a CPU in a byte (Arm IHI 0048, 4.3.12).
const MAX_CPUS_V2: u32 = 8;

/// What a device tree is made from.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The machine.
    pub parts: Parts<Mode>,
}

/// Why there can be no device tree.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// GICv2 has no room for them.
    #[error("{0}: a machine with a GICv2 has {MAX_CPUS_V2} vCPUs at most; use a GICv3")]
    Cpus(u32),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Cpus(_) => ErrorOrigin::user(Field::Cpus),
        }
    }
}

/// Checks that a machine of `parts` can be described.
///
/// # Errors
/// Where its interrupt controller does not know as many vCPUs.
pub fn prepare<M: GuestMemoryBackend>(_memory: &M, parts: Parts<Mode>) -> Result<Tables, Error> {
    match parts.irqchip {
        Mode::Gicv2 if parts.cpus > MAX_CPUS_V2 => Err(Error::Cpus(parts.cpus)),
        _ => Ok(Tables { parts }),
    }
}
