//! Disk images: what a file's format is ([`format`](mod@format)), and what a guest writes beside an image that stays as it is
//! ([`overlay`]).
//!
//! The device that a guest sees is `vellum_devices::virtio::blk`. It opens and locks the files.

pub mod format;
pub mod overlay;

use std::fs::File;
use std::io;
use std::path::PathBuf;

use vellum_kvm::memory::slices::Slices;

use overlay::Overlay;

/// The file that a disk is, for whoever wants to know of it what the guest does not.
#[derive(Debug)]
pub struct DiskImage {
    /// Open for what the guest may do.
    pub file: File,
    /// Its absolute path.
    pub path: PathBuf,
    /// The guest may not write.
    pub readonly: bool,
}

/// What the guest's requests go to.
pub enum Image {
    /// An image or a block device.
    Raw(File),
    /// What is written goes beside it.
    Over(Box<Overlay>),
}

impl Image {
    /// Reads from `at` on into the next bytes of `data`: how many.
    ///
    /// # Errors
    /// The host's.
    pub fn read(&self, data: &mut Slices<'_>, at: u64) -> io::Result<usize> {
        match self {
            Self::Raw(file) => data.preadv(file, at, usize::MAX),
            Self::Over(overlay) => overlay.read(data, at),
        }
    }

    /// Writes the next bytes of `data` from `at` on: how many.
    ///
    /// # Errors
    /// The host's.
    pub fn write(&mut self, data: &mut Slices<'_>, at: u64) -> io::Result<usize> {
        match self {
            Self::Raw(file) => data.pwritev(file, at, usize::MAX),
            Self::Over(overlay) => overlay.write(data, at),
        }
    }

    /// Puts what was written on the medium.
    ///
    /// # Errors
    /// The host's.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.sync_data(),
            Self::Over(overlay) => overlay.flush(),
        }
    }
}
