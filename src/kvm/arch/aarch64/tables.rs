//! The input of the device tree ([`super::fdt`]). The tree contains the command line and the
//! initrd's address, so the loader writes it last.

use vm_memory::GuestMemoryBackend;

use super::irqchip::Mode;
use crate::arch::fixed::Parts;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// GICv2 has a bit a CPU in a byte (Arm IHI 0048, 4.3.12).
const MAX_CPUS_V2: u32 = 8;

/// The input of a device tree.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The machine.
    pub parts: Parts<Mode>,
}

/// Why a device tree is not possible.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// GICv2 does not support that many.
    #[error("{0}: a machine with a GICv2 has at most {MAX_CPUS_V2} vCPUs; use a GICv3")]
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
/// The interrupt controller does not support that many vCPUs.
pub fn prepare<M: GuestMemoryBackend>(_memory: &M, parts: Parts<Mode>) -> Result<Tables, Error> {
    match parts.irqchip {
        Mode::Gicv2 if parts.cpus > MAX_CPUS_V2 => Err(Error::Cpus(parts.cpus)),
        _ => Ok(Tables { parts }),
    }
}
