//! Disk images: formats ([`format`](mod@format)), qcow2 ([`qcow2`]), overlays that hold a guest's
//! writes beside an unchanged image ([`overlay`]), and copies from one format to another
//! ([`copy`](mod@copy)).
//!
//! The device that a guest sees is `vellum_devices::virtio::blk`. It opens and locks the files.

pub mod copy;
mod extents;
pub mod format;
mod medium;
pub mod overlay;
#[cfg(test)]
mod power;
pub mod qcow2;
mod unpacked;

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use vellum_kvm::memory::slices::Slices;

pub use medium::Medium;
use overlay::Overlay;
use qcow2::Qcow2;

/// The most that one read or write moves. A guest's request may be as long as 4 GiB; the next piece
/// is a call of its own, so that the request can be withdrawn before.
const MAX_PIECE: usize = 1 << 20;

/// The file behind a disk, for uses other than the guest's requests.
#[derive(Debug)]
pub struct DiskImage {
    /// Open for reading, and for writing if the guest may write.
    pub file: File,
    /// Its absolute path.
    pub path: PathBuf,
    /// Whether the guest may only read.
    pub readonly: bool,
    /// If it is an overlay that does not outlive its machine: whether the file was whole when the
    /// disk was paused last.
    pub overlay: Option<AtomicBool>,
    /// Syncs it, for the requests of a guest with a raw image too. Machines with other images are not
    /// saved.
    pub medium: Arc<Medium>,
}

impl DiskImage {
    /// Syncs what was written, and the file's times, to the medium.
    ///
    /// # Errors
    /// The host's. After the first each sync fails, the guest's too.
    pub fn sync(&self) -> io::Result<()> {
        self.medium.sync_all(&self.file)
    }

    /// Whether the host has lost some of what was written.
    pub fn has_failed(&self) -> bool {
        self.medium.has_failed()
    }
}

/// The target of the guest's requests.
pub enum Image {
    /// A raw image or a block device.
    Raw(File, Arc<Medium>),
    /// A qcow2 image.
    Qcow2(Box<Qcow2>),
    /// An overlay: writes go to a file beside the image.
    Over(Box<Overlay>),
}

impl Image {
    /// A raw image or a block device.
    pub fn raw(file: File) -> Self {
        Self::Raw(file, Arc::default())
    }

    /// Reads from `at` on into the next bytes of `data`, at most 1 MiB. Returns the number of bytes.
    ///
    /// # Errors
    /// The host's.
    pub fn read(&self, data: &mut Slices<'_>, at: u64) -> io::Result<usize> {
        match self {
            Self::Raw(file, _) => data.preadv(file, at, MAX_PIECE),
            Self::Qcow2(image) => image.read(data, at, MAX_PIECE),
            Self::Over(overlay) => overlay.read(data, at, MAX_PIECE),
        }
    }

    /// The size of the disk in bytes.
    ///
    /// # Errors
    /// The host's.
    pub fn size(&self) -> io::Result<u64> {
        match self {
            // Unlike the metadata's size, this is also right for block devices.
            Self::Raw(file, _) => (&mut &*file).seek(SeekFrom::End(0)),
            Self::Qcow2(image) => Ok(image.size()),
            Self::Over(overlay) => Ok(overlay.size()),
        }
    }

    /// Reads exactly `bytes` from `at` on.
    ///
    /// # Errors
    /// The host's, or the disk ends before.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::Raw(file, _) => file.read_exact_at(bytes, at),
            Self::Qcow2(image) => image.read_exact_at(bytes, at),
            Self::Over(overlay) => overlay.read_exact_at(bytes, at),
        }
    }

    /// Whether the bytes from `at` on are known to be zeroes without reading them, and for how many
    /// of the next `len` bytes the answer holds. A file system that does not report holes has none.
    ///
    /// # Errors
    /// The host's.
    pub fn is_hole(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        match self {
            Self::Raw(file, _) => match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => Ok((data > at, data.saturating_sub(at).min(len))),
                // No data follows.
                Err(rustix::io::Errno::NXIO) => Ok((true, len)),
                Err(_) => Ok((false, 0)),
            },
            Self::Qcow2(image) => image.is_hole(at, len),
            Self::Over(_) => Ok((false, 0)),
        }
    }

    /// Writes the next bytes of `data` from `at` on, at most 1 MiB. Returns the number of bytes.
    ///
    /// # Errors
    /// The host's.
    pub fn write(&mut self, data: &mut Slices<'_>, at: u64) -> io::Result<usize> {
        match self {
            Self::Raw(file, _) => data.pwritev(file, at, MAX_PIECE),
            Self::Qcow2(image) => image.write(data, at, MAX_PIECE),
            Self::Over(overlay) => overlay.write(data, at, MAX_PIECE),
        }
    }

    /// Syncs what was written to the medium.
    ///
    /// # Errors
    /// The host's. After the first each sync fails: some of what was written is lost.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Raw(file, medium) => medium.sync(file),
            Self::Qcow2(image) => image.flush(),
            Self::Over(overlay) => overlay.flush(),
        }
    }

    /// Makes the file of an overlay whole that does not outlive its machine, so that it can be copied.
    ///
    /// # Errors
    /// The host's.
    pub fn complete(&mut self) -> io::Result<()> {
        match self {
            Self::Over(overlay) => overlay.complete(),
            Self::Raw(..) | Self::Qcow2(_) => Ok(()),
        }
    }

    /// Makes `len` bytes from `at` on read as zeroes, and frees their space if `unmap`.
    ///
    /// # Errors
    /// The host's.
    pub fn zero(&mut self, at: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Self::Raw(file, _) => write_zeros(file, at, len, unmap),
            Self::Qcow2(image) => image.zero(at, len, unmap),
            Self::Over(overlay) => overlay.zero(at, len),
        }
    }

    /// Frees the space of `len` bytes from `at` on, which then read as zeroes. Returns whether the
    /// file system supports it.
    ///
    /// # Errors
    /// The host's.
    pub fn discard(&mut self, at: u64, len: u64) -> io::Result<bool> {
        match self {
            Self::Raw(file, _) => allocate(file, FallocateMode::PunchHole, at, len),
            Self::Qcow2(image) => image.zero(at, len, true).map(|()| true),
            Self::Over(overlay) => overlay.zero(at, len).map(|()| true),
        }
    }
}

/// A size for people: exact if it is whole in its unit, otherwise with one decimal.
pub fn size_text(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        None => format!("{bytes} bytes"),
        Some((unit, name)) if bytes.is_multiple_of(*unit) => format!("{} {name}", bytes / unit),
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
    }
}

/// Calls fallocate(2). Returns false if the file system does not support `mode`.
fn allocate(file: &File, mode: FallocateMode, at: u64, len: u64) -> io::Result<bool> {
    match fallocate(file, mode, true, at, len) {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == libc::EOPNOTSUPP => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes `len` bytes of `file` from `at` on read as zeroes, and frees their space if `unmap`.
fn write_zeros(file: &File, at: u64, len: u64, unmap: bool) -> io::Result<()> {
    let mode = if unmap { FallocateMode::PunchHole } else { FallocateMode::ZeroRange };
    match allocate(file, mode, at, len)? {
        true => Ok(()),
        false => vellum_sys::file::write_zeros(file, at, len),
    }
}
