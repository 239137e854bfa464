//! Why a built-in guest cannot run, and whether user, host or guest is at fault.

use std::io;

use vellum_kvm::arch::{cpuid, irqchip};
use vellum_kvm::memory;
use vellum_kvm::vm::Error as VmError;
use vellum_machine::state;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why a workload cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM or memory failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// There are fewer pages than the vCPUs need.
    #[error("{pages} pages are too few for {vcpus} vCPUs: each needs 2")]
    TooFewPages {
        /// Pages of the requested stride.
        pages: u64,
        /// vCPUs.
        vcpus: usize,
    },
    /// The interrupt controller cannot be created.
    #[error(transparent)]
    Irqchip(#[from] irqchip::Error),
    /// The guest's state cannot be saved or restored.
    #[error(transparent)]
    State(#[from] state::Error),
    /// CPU features are not possible.
    #[error(transparent)]
    Cpuid(#[from] cpuid::Error),
    /// The page tables do not fit.
    #[error(
        "the workload's page tables need {need} bytes and there is room for {room}; use 2 MiB guest pages or less memory"
    )]
    TablesTooLarge {
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        room: u64,
    },
    /// The host has no memory for the workload.
    #[error("cannot map the workload's own memory: {0}")]
    Map(#[source] io::Error),
    /// The user has interrupted it.
    #[error("interrupted by signal {0} before anything was measured")]
    Interrupted(i32),
    /// A vCPU ended instead of ringing the doorbell.
    #[error("vCPU {index} ended: {what}")]
    Ended {
        /// The vCPU.
        index: usize,
        /// How it ended.
        what: String,
    },
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Self {
        VmError::from(error).into()
    }
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Vm(error) => error.origin(),
            Self::Irqchip(error) => error.origin(),
            Self::State(error) => error.origin(),
            Self::Cpuid(error) => error.origin(),
            Self::TooFewPages { .. } | Self::TablesTooLarge { .. } => ErrorOrigin::user(Field::Memory),
            Self::Map(_) => ErrorOrigin::HOST,
            // An interrupt is not an error of the user.
            Self::Interrupted(_) => ErrorOrigin::HOST,
            Self::Ended { .. } => ErrorOrigin::GUEST,
        }
    }
}
