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
    /// KVM refuses an MSR's value.
    #[error(
        "MSR {index:#x} cannot be set to {value:#x}; is the destination's CPU or KVM older than the source's?"
    )]
    Msr {
        /// The MSR's number.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// KVM lacks an MSR that every processor has.
    #[error("this KVM has no MSR {index:#x}")]
    Absent {
        /// The MSR's number.
        index: u32,
    },
    /// The guest's TSC would run at another frequency.
    #[error(
        "the guest's TSC has {saved} kHz, guests here have {here} kHz, and this host cannot scale TSCs; use a host \
         whose TSC is within 250 ppm of the guest's, one that scales TSCs, or allow the difference"
    )]
    TscFrequency {
        /// The guest's frequency in kHz.
        saved: u32,
        /// This host's frequency in kHz.
        here: u32,
    },
    /// The guest runs guests.
    #[error(
        "the guest itself uses hardware virtualization, whose state cannot be saved; end its guests first"
    )]
    Nested,
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
