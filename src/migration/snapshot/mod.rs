//! Snapshots: a machine's memory and state in files. `vellum restore` makes a machine from them.
//!
//! A directory holds points of one machine, numbered from 0:
//!
//! ```text
//! manifest.json   the points and the checksums of their files; renamed into place last
//! ram-N           the pages of point N, each at its offset among all pages of the machine; sparse
//! map-N           for each page of the machine, what ram-N has of it, and its checksum (layer)
//! state-N         the machine's configuration and its state (state)
//! working-set     the pages that a restore wanted first (working_set), if that was recorded
//! disk0-N …       clones of its disks, if requested; otherwise only the manifest names the disks
//! ```
//!
//! After a merge into point N, the names of its first two files end in `N.1`, after the next one in
//! `N.2`, and so on.
//!
//! Files are written without a name and are named once all of them are on disk. A writer that dies
//! leaves nothing behind.
//!
//! | file | contents |
//! |---|---|
//! | [`manifest`] | the list of points |
//! | [`layer`] | pages and their map |
//! | [`state`] | everything else of a machine |
//! | [`disk`] | the machine's disks: flushing, cloning, detecting changes |
//! | [`source`] | the directory for readers: opens points |
//! | [`store`] | the directory for writers: adds points |
//! | [`merge`] | merges points into one |
//! | [`working_set`] | the pages that a machine wants first after a restore |
//!
//! This module has only the files. The threads that write and read them have the machine's memory
//! and are in [`crate`]: a snapshot is a migration into files, and a restore is a migration out of
//! them.

pub mod disk;
pub mod layer;
pub mod manifest;
pub mod merge;
pub mod source;
pub mod state;
pub mod store;
pub mod working_set;

use std::fs::File;
use std::io;

use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// Why a snapshot cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call has failed.
    #[error("{file}: {what}: {source}")]
    Io {
        /// The name of the file.
        file: String,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The contents of a file are not what was written.
    #[error("{file}, byte {offset}: {what}; it is damaged")]
    Damaged {
        /// The name of the file.
        file: String,
        /// The offset in the file.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A file that this program cannot use.
    #[error("{file}: {what}")]
    Unfit {
        /// The name of the file.
        file: String,
        /// The reason.
        what: String,
    },
    /// There is no such point.
    #[error("there is no point {asked}; {there}")]
    NoPoint {
        /// The requested number.
        asked: u32,
        /// The points that exist, in words.
        there: String,
    },
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Io { source, .. } if source.kind() != io::ErrorKind::NotFound => ErrorOrigin::HOST,
            _ => ErrorOrigin::USER,
        }
    }
}

impl Error {
    pub(crate) fn io(file: &str, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Io { file, what, source }
    }
}

/// The files of one point.
#[derive(Debug)]
pub struct Files {
    /// Its pages.
    pub ram: File,
    /// Its map.
    pub map: File,
    /// Its state.
    pub state: File,
    /// The clones of its machine's disks, in their order, if they are cloned.
    pub clones: Vec<File>,
}
