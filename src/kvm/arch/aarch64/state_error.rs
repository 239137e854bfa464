//! Errors of a vCPU's state and clocks.

use std::io;

use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// Why a vCPU's state cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{call} of the vCPU's state: {source}")]
    Ioctl {
        /// The ioctl.
        call: &'static str,
        /// KVM's error.
        source: io::Error,
    },
    /// KVM refuses a register's value.
    #[error(
        "register {register:#x} cannot be set to {value:x?}: {error}; do CPU and KVM match the source's?"
    )]
    Register {
        /// The register's number.
        register: u64,
        /// The saved value.
        value: Vec<u64>,
        /// KVM's error.
        error: kvm_ioctls::Error,
    },
    /// The guest's counter would run at another frequency.
    #[error(
        "the guest's counter has {saved} kHz, guests here have {here} kHz, and Arm cannot scale it; use a host whose \
         counter has the guest's frequency, or allow the difference"
    )]
    Frequency {
        /// The guest's frequency in kHz.
        saved: u32,
        /// This host's frequency in kHz.
        here: u32,
    },
    /// An invalid state.
    #[error("the saved vCPU has {0}; the file is damaged or from another version")]
    Implausible(&'static str),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::HOST
    }
}

/// Names the ioctl that returned `result`.
pub(super) fn call<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, Error> {
    result.map_err(|source| Error::Ioctl { call, source: source.into() })
}
