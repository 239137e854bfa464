//! Creates and converts images, raw and qcow2, like `qemu-img create` and `convert`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Image;
use super::qcow2::Qcow2;

/// Bytes copied at once: a multiple of the largest cluster.
const PART: usize = 4 << 20;
/// The unit that is written, or skipped if it is all zeroes.
const BLOCK: usize = 64 << 10;

/// The target of a conversion.
pub enum Target {
    /// A raw image.
    Raw(File),
    /// A qcow2 image, version 3, with clusters of 64 KiB.
    Qcow2(Box<Qcow2>),
}

impl Target {
    /// A raw disk of `size` zeroes in the empty `file`.
    ///
    /// # Errors
    /// The host's.
    pub fn raw(file: File, size: u64) -> io::Result<Self> {
        file.set_len(size)?;
        Ok(Self::Raw(file))
    }

    /// A qcow2 disk of `size` zeroes in the empty `file`.
    ///
    /// # Errors
    /// The host's.
    pub fn qcow2(file: File, size: u64) -> io::Result<Self> {
        Ok(Self::Qcow2(Box::new(Qcow2::create(file, size)?)))
    }

    fn write_all_at(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.write_all_at(bytes, at),
            Self::Qcow2(image) => image.write_all_at(bytes, at),
        }
    }

    /// Syncs everything to the medium.
    ///
    /// # Errors
    /// The host's.
    pub fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.sync_all(),
            Self::Qcow2(image) => image.flush(),
        }
    }
}

/// Copies the disk `from` to `to`, which is all zeroes. Blocks of zeroes are skipped. `progress` is
/// called with the number of bytes done.
///
/// # Errors
/// The host's, or a damaged image.
pub fn copy(from: &Image, to: &mut Target, mut progress: impl FnMut(u64)) -> io::Result<()> {
    let size = from.size()?;
    let mut bytes = vec![0; PART];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(PART as u64) as usize;
        let (is_hole, hole) = from.is_hole(at, len as u64)?;
        if is_hole && hole > 0 {
            at += hole.min(len as u64);
        } else {
            from.read_exact_at(&mut bytes[..len], at)?;
            for (block, part) in bytes[..len].chunks(BLOCK).enumerate() {
                if part.iter().any(|&byte| byte != 0) {
                    to.write_all_at(part, at + (block * BLOCK) as u64)?;
                }
            }
            at += len as u64;
        }
        progress(at);
    }
    to.finish()
}
