//! Errors of a machine that can leave or that is to arrive.

use std::io;

use vellum_guests::guest;
use vellum_linux as machine;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why a machine that moves cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of a Linux machine.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// An error of a built-in guest.
    #[error(transparent)]
    Guest(#[from] guest::Error),
    /// The machine has not arrived and never will.
    #[error("{0}")]
    Gone(String),
    /// The source's machine or snapshot cannot run here.
    #[error("{0}")]
    Refused(String),
    /// The disks of a machine to be restored have changed.
    #[error("{0}")]
    DiskChanged(String),
    /// The guest of a machine to be restored would have a TSC of another frequency.
    #[error("{0}")]
    OtherTsc(String),
    /// A file that is mapped as its memory was truncated.
    #[error("{0} became shorter while it was mapped: the guest's memory is gone")]
    Shortened(String),
    /// The machine is paused for the hand-over, and this request would not reach the target.
    #[error("the machine is being handed over to another process; ask it there")]
    HandedOver,
    /// Memory is missing, and the link to it has dropped.
    #[error(
        "part of its memory is at the source still, and the link to that is cut: it goes on when the migration is recovered there"
    )]
    Severed,
    /// Memory is missing, and the request would wait for it.
    #[error("some of its memory has not arrived from the source yet")]
    Lacking,
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
            Self::OtherTsc(_) => ErrorOrigin::user(Field::OtherTsc),
            Self::Gone(_)
            | Self::Shortened(_)
            | Self::HandedOver
            | Self::Severed
            | Self::Lacking
            | Self::Absent
            | Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}
