//! Why a machine that can leave, or that is to come, cannot go on.

use std::io;

use vellum_guests::guest;
use vellum_linux as machine;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why a machine that moves cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The PC.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The built-in guest.
    #[error(transparent)]
    Guest(#[from] guest::Error),
    /// It has not come, and will not.
    #[error("{0}")]
    Gone(String),
    /// What it was to be made of cannot be one here.
    #[error("{0}")]
    Refused(String),
    /// The disks of one that is to be restored are not as they were.
    #[error("{0}")]
    DiskChanged(String),
    /// A file that its memory shows has become shorter.
    #[error("{0} became shorter while it was mapped: the guest's memory is gone")]
    Shortened(String),
    /// It stands still for the hand-over, and what is asked of it now would not reach the target.
    #[error("the machine is being handed over to another process; ask it there")]
    HandedOver,
    /// It lacks memory that nobody brings at the moment.
    #[error(
        "part of its memory is at the source still, and the link to that is cut: it goes on when the migration is recovered there"
    )]
    Severed,
    /// There is no machine here yet.
    #[error("the machine has not come yet")]
    Absent,
    /// The host refuses a descriptor or a thread.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Machine(error) => error.origin(),
            Self::Guest(error) => error.origin(),
            Self::Refused(_) => ErrorOrigin::USER,
            Self::DiskChanged(_) => ErrorOrigin::user(Field::DiskChanged),
            Self::Gone(_)
            | Self::Shortened(_)
            | Self::HandedOver
            | Self::Severed
            | Self::Absent
            | Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}
