//! Fleets: one plan, run on many hosts by an engine that exists (Slurm, or a loop over ssh), and one result of it.
//!
//! A [`plan`] names tests and benchmarks with typed arguments, never commands; its tasks are numbered. One shared directory holds a copy
//! of the plan and the results: [`task`] runs one task on a host and puts its [`result`] there, whole or not at all; [`merge`] reads
//! them, trusting none, and [`page`] shows what came of it. [`slurm`] is all that knows Slurm, [`features`] is what hosts are chosen by,
//! and [`quote`] writes commands for shells.
//!
//! The command line knows what an argument means. It passes a check in.

pub mod features;
pub mod merge;
pub mod page;
pub mod plan;
pub mod quote;
pub mod result;
pub mod slurm;
pub mod task;

use std::io;
use std::path::PathBuf;

use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// Why something could not be done with a fleet. Each is one line, complete with what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory.
    #[error("{}: cannot be {doing}: {source}", path.display())]
    File {
        /// `read`, `written`.
        doing: &'static str,
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The plan.
    #[error("{}: {why}", path.display())]
    Plan {
        /// Its file.
        path: PathBuf,
        /// What is wrong, and what would work.
        why: String,
    },
    /// What was asked for does not go with the plan.
    #[error("{0}")]
    Asked(String),
    /// Slurm.
    #[error("{0}")]
    Slurm(String),
    /// There is none here.
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
    /// For `map_err` on what is done with a file.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }
}
