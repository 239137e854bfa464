//! Disk images: what a file's format is ([`format`](mod@format)), qcow2 ([`qcow2`]), what a guest writes beside an image that
//! stays as it is ([`overlay`]), and copies from one format to the other ([`copy`](mod@copy)).
//!
//! The device that a guest sees is `vellum_devices::virtio::blk`. It opens and locks the files.

pub mod copy;
mod extents;
pub mod format;
pub mod overlay;
#[cfg(test)]
mod power;
pub mod qcow2;
mod unpacked;

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use vellum_kvm::memory::slices::Slices;

use overlay::Overlay;
use qcow2::Qcow2;

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
    /// A raw image or a block device.
    Raw(File),
    /// A qcow2 image.
    Qcow2(Box<Qcow2>),
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
            Self::Qcow2(image) => image.read(data, at, usize::MAX),
            Self::Over(overlay) => overlay.read(data, at),
        }
    }

    /// Bytes of the disk.
    ///
    /// # Errors
    /// The host's.
    pub fn size(&self) -> io::Result<u64> {
        match self {
            // Unlike the metadata's size, this is right for block devices too.
            Self::Raw(file) => (&mut &*file).seek(SeekFrom::End(0)),
            Self::Qcow2(image) => Ok(image.size()),
            Self::Over(overlay) => Ok(overlay.size()),
        }
    }

    /// Reads exactly `bytes` from `at` on.
    ///
    /// # Errors
    /// The host's, or that the disk ends before.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.read_exact_at(bytes, at),
            Self::Qcow2(image) => image.read_exact_at(bytes, at),
            Self::Over(overlay) => overlay.read_exact_at(bytes, at),
        }
    }

    /// Whether bytes from `at` on read as zeroes without a look at them, and how many of the next `len`.
    /// A file system that does not know its holes has none.
    ///
    /// # Errors
    /// The host's.
    pub fn is_hole(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        match self {
            Self::Raw(file) => match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => Ok((data > at, data.saturating_sub(at).min(len))),
                // No data follows.
                Err(rustix::io::Errno::NXIO) => Ok((true, len)),
                Err(_) => Ok((false, 0)),
            },
            Self::Qcow2(image) => image.is_hole(at, len),
            Self::Over(_) => Ok((false, 0)),
        }
    }

    /// Writes the next bytes of `data` from `at` on: how many.
    ///
    /// # Errors
    /// The host's.
    pub fn write(&mut self, data: &mut Slices<'_>, at: u64) -> io::Result<usize> {
        match self {
            Self::Raw(file) => data.pwritev(file, at, usize::MAX),
            Self::Qcow2(image) => image.write(data, at),
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
            Self::Qcow2(image) => image.flush(),
            Self::Over(overlay) => overlay.flush(),
        }
    }

    /// Has `len` bytes from `at` on read as zeroes, and gives up their space if `unmap`.
    ///
    /// # Errors
    /// The host's.
    pub fn zero(&mut self, at: u64, len: u64, unmap: bool) -> io::Result<()> {
        match self {
            Self::Raw(file) => write_zeros(file, at, len, unmap),
            Self::Qcow2(image) => image.zero(at, len, unmap),
            Self::Over(overlay) => overlay.zero(at, len),
        }
    }

    /// Gives up the space of `len` bytes from `at` on: whether the file system can. They read as zeroes afterwards.
    ///
    /// # Errors
    /// The host's.
    pub fn discard(&mut self, at: u64, len: u64) -> io::Result<bool> {
        match self {
            Self::Raw(file) => allocate(file, FallocateMode::PunchHole, at, len),
            Self::Qcow2(image) => image.zero(at, len, true).map(|()| true),
            Self::Over(overlay) => overlay.zero(at, len).map(|()| true),
        }
    }
}

/// fallocate(2): false if the file system does not know `mode`.
fn allocate(file: &File, mode: FallocateMode, at: u64, len: u64) -> io::Result<bool> {
    match fallocate(file, mode, true, at, len) {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == libc::EOPNOTSUPP => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Has `len` bytes of `file` from `at` on read as zeroes, and gives up their space if `unmap`.
fn write_zeros(file: &File, at: u64, len: u64, unmap: bool) -> io::Result<()> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    let mode = if unmap { FallocateMode::PunchHole } else { FallocateMode::ZeroRange };
    if allocate(file, mode, at, len)? {
        return Ok(());
    }
    let (mut at, end) = (at, at + len);
    while at < end {
        let part = (end - at).min(ZEROS.len() as u64) as usize;
        file.write_all_at(&ZEROS[..part], at)?;
        at += part as u64;
    }
    Ok(())
}
