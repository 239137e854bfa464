//! Fleets: one plan, run on many hosts by an existing engine (Slurm, or a loop over ssh), with one
//! merged result.
//!
//! A [`plan`] names tests and benchmarks with typed arguments, never commands. Its tasks are
//! numbered. A shared directory holds a copy of the plan and the results. [`task`] runs one task on
//! a host and writes its [`result`] there atomically. [`merge`] reads all results and trusts none,
//! and [`page`] prints the merged result. Only [`slurm`] knows Slurm. [`features`] selects hosts.
//!
//! The command line knows the meaning of arguments and passes in a function that checks them.

pub mod features;
pub mod merge;
pub mod page;
pub mod plan;
pub mod result;
pub mod slurm;
pub mod task;

use std::io;
use std::path::PathBuf;

use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// Why a fleet command failed. Each message is one line and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory is not accessible.
    #[error("{}: cannot be {doing}: {source}", path.display())]
    File {
        /// `read`, `written`.
        doing: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The plan is not valid.
    #[error("{}: {why}", path.display())]
    Plan {
        /// The plan's file.
        path: PathBuf,
        /// The problem and the remedy.
        why: String,
    },
    /// The request does not fit the plan.
    #[error("{0}")]
    Asked(String),
    /// Slurm reported an error.
    #[error("{0}")]
    Slurm(String),
    /// This host has no Slurm.
    #[error("{0} is missing: apt-get install slurm-client")]
    NoSlurm(String),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::File { .. } | Self::Slurm(_) | Self::NoSlurm(_) => ErrorOrigin::HOST,
            Self::Plan { .. } | Self::Asked(_) => ErrorOrigin::USER,
        }
    }
}

impl Error {
    /// Makes an error for `map_err` on a file operation.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }
}
