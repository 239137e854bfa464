//! Snapshots: a machine's memory and state in files, of which `vellum restore` makes a machine again.
//!
//! A directory holds points of one machine, numbered from 0:
//!
//! ```text
//! manifest.json   which points there are, and the sums of their files; it is renamed into its place last
//! ram-N           the pages of point N, each at its offset among all pages of the machine; sparse
//! map-N           for each page of the machine what of it is in ram-N, and the sum of that (layer)
//! state-N         what the machine is, and its state (state)
//! working-set     which pages a restore wanted first (working_set), where one was asked to record that
//! disk0-N …       clones of its disks, where these were asked for; otherwise they are named in the manifest alone
//! ```
//!
//! Where points were joined into point N, its first two files end in `N.1`, and in `N.2` when that is done again.
//!
//! Files are written unnamed and get their names once all of them are on the disk: a writer that dies leaves nothing behind.
//!
//! | file | what it is |
//! |---|---|
//! | [`manifest`] | the list of points |
//! | [`layer`] | pages and their map |
//! | [`state`] | everything else of a machine |
//! | [`disk`] | the machine's disks: flushed, cloned, told from what they become |
//! | [`source`] | the directory: points are opened |
//! | [`store`] | the directory: points are added |
//! | [`merge`] | points become one |
//! | [`working_set`] | what a machine wants first when it is restored |
//!
//! Here are the files alone. The threads that write and read them have the machine's memory, and are
//! [`crate`]'s: a snapshot is a migration into files, and a restore is one out of them.

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
    /// The host refuses something.
    #[error("{file}: {what}: {source}")]
    Io {
        /// Which file.
        file: String,
        /// What was tried.
        what: &'static str,
        /// What the kernel says.
        source: io::Error,
    },
    /// A file is not what was written.
    #[error("{file}, byte {offset}: {what}; it is damaged")]
    Damaged {
        /// Which file.
        file: String,
        /// Where in it.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A file that this program does not read.
    #[error("{file}: {what}")]
    Unfit {
        /// Which file.
        file: String,
        /// Why.
        what: String,
    },
    /// There is no such point.
    #[error("there is no point {asked}; {there}")]
    NoPoint {
        /// The number that was asked for.
        asked: u32,
        /// What there is.
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
    fn io(file: &str, what: &'static str) -> impl FnOnce(io::Error) -> Self {
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
    /// The clones of its machine's disks, in their order, where these are cloned.
    pub clones: Vec<File>,
}
