//! Why a built-in guest cannot run, and whose fault that is.

use std::io;

use vellum_kvm::arch::{cpuid, irqchip};
use vellum_kvm::memory;
use vellum_kvm::vm::Error as VmError;
use vellum_machine::state;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why a workload cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM or memory.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// Fewer pages than vCPUs need.
    #[error("{pages} pages are too few for {vcpus} vCPUs: each needs 2")]
    TooFewPages {
        /// Pages of the asked-for stride.
        pages: u64,
        /// vCPUs.
        vcpus: usize,
    },
    /// Interrupt controllers.
    #[error(transparent)]
    Irqchip(#[from] irqchip::Error),
    /// Its state.
    #[error(transparent)]
    State(#[from] state::Error),
    /// CPU features.
    #[error(transparent)]
    Cpuid(#[from] cpuid::Error),
    /// The page tables do not fit.
    #[error(
        "the workload's page tables need {need} bytes, and there is room for {room}: use 2 MiB guest pages or less memory"
    )]
    TablesTooLarge {
        /// Bytes needed.
        need: u64,
        /// Bytes there are.
        room: u64,
    },
    /// The host has no memory for them.
    #[error("cannot map the workload's own memory: {0}")]
    Map(#[source] io::Error),
    /// The user has had enough.
    #[error("interrupted by signal {0} before anything was measured")]
    Interrupted(i32),
    /// A vCPU ended where it should have rung.
    #[error("vCPU {index} ended: {what}")]
    Ended {
        /// Which.
        index: usize,
        /// How.
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
            // Nothing is wrong, and nothing is to be mended.
            Self::Interrupted(_) => ErrorOrigin::HOST,
            Self::Ended { .. } => ErrorOrigin::GUEST,
        }
    }
}
