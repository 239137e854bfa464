//! Executes requests on a disk's file (virtio 1.2, section 5.2.6).

use std::fmt;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_disk::format::Format;
use vellum_disk::{DiskImage, Image};
use virtio_bindings::virtio_blk::*;

use super::{BlkError, Files, MAX_ZERO_SECTORS, MAX_ZERO_SEGMENTS, SECTOR};
use crate::virtio::Active;
use crate::virtio::queue::Chain;
use crate::virtio::worker::Work;
use vellum_kvm::memory::slices::Slices;

/// The image, and the state that requests need.
pub struct Disk {
    /// The target of the guest's requests.
    pub image: Image,
    /// The path, for messages.
    pub path: PathBuf,
    /// The size.
    pub sectors: u64,
    /// The guest may not write.
    pub readonly: bool,
    /// The image is raw because of its first bytes, and must remain so.
    pub stays_raw: bool,
    /// The driver did not negotiate flush: a write completes when it is on the medium.
    pub write_through: bool,
    /// The serial number that the guest reads.
    pub id: Id,
    /// The file that the guest writes to.
    pub own: Arc<DiskImage>,
}

/// A serial number as the guest reads it, with a zero after it if it is shorter.
pub type Id = [u8; VIRTIO_BLK_ID_BYTES as usize];

/// A request in progress, for status and error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    kind: u32,
    sector: u64,
    bytes: usize,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { kind, sector, bytes } = self;
        match *kind {
            VIRTIO_BLK_T_IN => write!(f, "a read of {bytes} bytes at sector {sector}"),
            VIRTIO_BLK_T_OUT => write!(f, "a write of {bytes} bytes at sector {sector}"),
            VIRTIO_BLK_T_FLUSH => f.write_str("a flush"),
            VIRTIO_BLK_T_DISCARD => f.write_str("a discard"),
            VIRTIO_BLK_T_WRITE_ZEROES => f.write_str("a write of zeroes"),
            _ => write!(f, "a request of type {kind}"),
        }
    }
}

/// Why a request fails.
enum Refusal {
    /// The request is invalid: VIRTIO_BLK_S_IOERR.
    Malformed,
    /// The request is not supported, here or on this file system: VIRTIO_BLK_S_UNSUPP.
    Unsupported,
    /// The host's file failed: VIRTIO_BLK_S_IOERR.
    Host(io::Error),
    /// The queues are wanted back before the request is complete. It has no answer yet.
    Stopped,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Host(error)
    }
}

impl Work for Disk {
    type Notice = Id;
    type Request = Request;

    fn begin(&mut self, active: &Active, id: Id) {
        self.id = id;
        self.write_through = !active.has(VIRTIO_BLK_F_FLUSH);
    }

    fn answer(
        &mut self,
        chain: &mut Chain<'_>,
        begins: impl FnOnce(Request),
        are_wanted: &dyn Fn() -> bool,
    ) -> Option<u32> {
        // Without a status byte there is no way to answer.
        let Some(status) = chain.writable.take_last_byte() else { return Some(0) };
        let code = match self.execute(chain, begins, are_wanted) {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Refusal::Malformed | Refusal::Host(_)) => VIRTIO_BLK_S_IOERR,
            Err(Refusal::Unsupported) => VIRTIO_BLK_S_UNSUPP,
            Err(Refusal::Stopped) => return None,
        };
        status.copy_from(&[code as u8]);
        Some(chain.writable.consumed() as u32 + 1)
    }

    fn rest(&mut self) {
        let Some(is_whole) = &self.own.overlay else { return };
        let completed = self.image.complete();
        if let Err(error) = &completed {
            tracing::warn!("disk {}: the map of its overlay: {error}", self.path.display());
        }
        is_whole.store(completed.is_ok(), Ordering::Release);
    }
}

impl Disk {
    /// Reads the tables of `files`, of which the guest writes to `own`. The disk has `sectors`, or
    /// fewer if the image has changed since its size was read.
    ///
    /// # Errors
    /// The image or its overlay cannot be used.
    pub fn open(files: Files, own: Arc<DiskImage>, sectors: u64, readonly: bool) -> Result<Self, BlkError> {
        let path = files.path().to_owned();
        let stays_raw = files.is_told_by_content();
        let image = files.image()?;
        let size = image.size().map_err(|source| BlkError::Open { readonly, path: path.clone(), source })?;
        let sectors = sectors.min(size / SECTOR);
        Ok(Self { image, path, sectors, readonly, stays_raw, write_through: false, id: Id::default(), own })
    }

    fn execute(
        &mut self,
        chain: &mut Chain<'_>,
        begins: impl FnOnce(Request),
        are_wanted: &dyn Fn() -> bool,
    ) -> Result<(), Refusal> {
        let header: [u8; 16] = chain.readable.read_array().ok_or(Refusal::Malformed)?;
        let kind = u32::from_le_bytes(header[0..4].try_into().expect("4 bytes"));
        let sector = u64::from_le_bytes(header[8..16].try_into().expect("8 bytes"));
        let data = if kind == VIRTIO_BLK_T_IN { &chain.writable } else { &chain.readable };
        let request = Request { kind, sector, bytes: data.left() };
        begins(request);
        self.perform(kind, sector, chain, are_wanted).inspect_err(|refusal| {
            if let Refusal::Host(error) = refusal {
                tracing::warn!("disk {}: {request}: {error}", self.path.display());
            }
        })
    }

    fn perform(
        &mut self,
        kind: u32,
        sector: u64,
        chain: &mut Chain<'_>,
        are_wanted: &dyn Fn() -> bool,
    ) -> Result<(), Refusal> {
        // A long request would delay a pause for as long as the guest likes.
        let next = |left: usize| match left {
            0 => Ok(false),
            _ if are_wanted() => Err(Refusal::Stopped),
            _ => Ok(true),
        };
        match kind {
            VIRTIO_BLK_T_IN => {
                let data = &mut chain.writable;
                let mut at = self.extent(sector, data.left() as u64)?;
                while next(data.left())? {
                    at += moved(self.image.read(data, at))?;
                }
                Ok(())
            }
            VIRTIO_BLK_T_OUT => {
                self.writable()?;
                let data = &mut chain.readable;
                let mut at = self.extent(sector, data.left() as u64)?;
                if at == 0 && self.stays_raw && data.left() > 0 {
                    at += self.write_first(data)?;
                }
                while next(data.left())? {
                    at += moved(self.image.write(data, at))?;
                }
                Ok(self.settle()?)
            }
            VIRTIO_BLK_T_FLUSH => Ok(self.image.flush()?),
            VIRTIO_BLK_T_GET_ID => {
                chain.writable.write(&self.id);
                Ok(())
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.writable()?;
                self.zero(&mut chain.readable, kind == VIRTIO_BLK_T_DISCARD, &next)
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    /// Writes the first sector, unless that would make an image of another format of the disk. The next
    /// start would read that, of whatever size and content the guest has chosen. Returns its size.
    fn write_first(&self, data: &mut Slices<'_>) -> Result<u64, Refusal> {
        // The guest may change its memory meanwhile.
        let sector: [u8; SECTOR as usize] = data.read_array().ok_or(Refusal::Malformed)?;
        if let Some(format) = Format::of_sector(&sector) {
            return Err(Refusal::Host(io::Error::other(format!(
                "it would make a {} image of the raw disk at the next start; `format=raw` allows that",
                format.name()
            ))));
        }
        self.own.file.write_all_at(&sector, 0)?;
        Ok(SECTOR)
    }

    fn writable(&self) -> Result<(), Refusal> {
        if self.readonly { Err(Refusal::Malformed) } else { Ok(()) }
    }

    fn settle(&mut self) -> io::Result<()> {
        if self.write_through { self.image.flush() } else { Ok(()) }
    }

    /// The file offset of `len` bytes at `sector`, if they are whole sectors within the disk.
    fn extent(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let end = sector.checked_add(len / SECTOR).ok_or(Refusal::Malformed)?;
        if !len.is_multiple_of(SECTOR) || end > self.sectors {
            Err(Refusal::Malformed)
        } else {
            Ok(sector * SECTOR)
        }
    }

    /// Discard and write-zeroes: segments of (sector u64, sectors u32, flags u32).
    fn zero(
        &mut self,
        segments: &mut Slices<'_>,
        discard: bool,
        next: &dyn Fn(usize) -> Result<bool, Refusal>,
    ) -> Result<(), Refusal> {
        let count = segments.left() / 16;
        if !segments.left().is_multiple_of(16) || count == 0 || count > MAX_ZERO_SEGMENTS as usize {
            return Err(Refusal::Malformed);
        }
        while next(segments.left())? {
            let segment: [u8; 16] = segments.read_array().ok_or(Refusal::Malformed)?;
            let sector = u64::from_le_bytes(segment[0..8].try_into().expect("8 bytes"));
            let sectors = u32::from_le_bytes(segment[8..12].try_into().expect("4 bytes"));
            let flags = u32::from_le_bytes(segment[12..16].try_into().expect("4 bytes"));
            let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || discard && unmap {
                return Err(Refusal::Unsupported);
            }
            if sectors > MAX_ZERO_SECTORS {
                return Err(Refusal::Malformed);
            }
            let len = u64::from(sectors) * SECTOR;
            let at = self.extent(sector, len)?;
            if len == 0 {
                continue;
            }
            loop {
                let done = match discard {
                    true => self.image.discard(at, len),
                    false => self.image.zero(at, len, unmap).map(|()| true),
                };
                match done {
                    Ok(true) => break,
                    Ok(false) => return Err(Refusal::Unsupported),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => drop(next(1)?),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(self.settle()?)
    }
}

/// A transfer without progress is past the end of a file that was truncated.
fn moved(result: io::Result<usize>) -> io::Result<u64> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
        other => other.map(|count| count as u64),
    }
}
