//! A guest's writes to a disk, beside a base that never changes: a sparse file with a map of the
//! blocks that it holds.
//!
//! ```text
//! 0        header: "VLMOVER\n", u32 version, u32 block size, u64 base size in bytes, i64 time of
//!          the base's last write (ns since 1970), in version 2 u64 disk size in bytes, u32 CRC32C
//!          of these
//! 4096     the map, one bit per block, 1 if the block is in this file
//! then     from the next multiple of 4096 on, each block at its offset in the base
//! ```
//!
//! A disk that is larger than its base (version 2) has zeroes after the base's end.
//!
//! A block is in the file as a whole: the first partial write to a block copies the rest from the
//! base. The map on the medium has a block's bit set only after the block is on the medium, because
//! a flush first writes data and then the map. So after a power loss the disk has everything that
//! was flushed. Any sectors that were not flushed may be there or not, as on any disk.
//!
//! Overlays are not qcow2 images, although [`crate::qcow2`] reads and writes those:
//! - The first write to a block copies less than 4 KiB of the base. A cluster of a qcow2 image has
//!   64 KiB as most programs create it.
//! - A block has the same offset as in the base. So a read or write of a run is one call on guest
//!   memory, without a table lookup or an allocation. A qcow2 image needs an L2 entry and a
//!   refcount for each new cluster, and places clusters in the order of their first writes.
//! - The only writes are data and pages of the map. A test cuts the power between any two writes
//!   and checks what is left. The tables of a qcow2 image are written by a library, which does not
//!   specify the order of its writes.
//! - The header identifies the base by its size and by the time of its last write, so that a base
//!   that has changed is refused. A qcow2 image names its backing file by a path.
//!
//! The price is that no other program can read an overlay. For use by other programs, write the
//! disk to a qcow2 image.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm::Crc32Iscsi, checksum};
use serde::{Deserialize, Serialize};

use crate::medium::Medium;
#[cfg(test)]
use crate::power::Act;
use crate::qcow2::Qcow2;
use vellum_kvm::memory::slices::Slices;
use vellum_sys::mmap;
use vellum_sys::open::{self, Kind};

/// Block size in bytes: the smallest write of most file systems, and the page size of the host's
/// page cache.
const BLOCK: u64 = 4096;
const MAGIC: [u8; 8] = *b"VLMOVER\n";
/// The versions of a disk as large as its base, and of a larger one.
const VERSIONS: [u32; 2] = [1, 2];
/// The header size in version 1. Version 2 adds the size of the disk.
const HEADER: usize = 36;
const LARGER: usize = 44;
/// The offset of the map, and the unit in which it is written.
const MAP: u64 = 4096;
const MAP_PAGE: u64 = 4096;

/// The maximum disk size. Its map has 512 MiB. A new map takes memory only for the parts that are
/// written.
const MAX_BASE: u64 = 16 << 40;

/// Where a guest's writes go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// To a file. It is created if it does not exist.
    File(PathBuf),
    /// To a file that does not outlive the machine.
    Discard,
    /// To a file that this process has open, and that does not outlive the machine.
    Open(PathBuf),
}

/// Why an overlay cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of the host.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// The file is not an overlay.
    #[error("it is no overlay: it does not begin like one; another name makes a new one")]
    Other,
    /// The overlay has an unknown version.
    #[error("it is of version {0}, and this Vellum knows 1 and 2")]
    Version(u32),
    /// The overlay belongs to another base.
    #[error(
        "it is of another image, or the image was written to since ({}); use that image as it was, or another overlay",
        if bytes == now_bytes { "it has another modification time".into() } else { format!("it had {bytes} bytes, and has {now_bytes}") }
    )]
    Base {
        /// The size of the overlay's base in bytes.
        bytes: u64,
        /// The size of this base in bytes.
        now_bytes: u64,
    },
    /// The overlay cannot have the requested size.
    #[error("a disk of {wanted} bytes is not possible: {why}")]
    Size {
        /// The requested size in bytes.
        wanted: u64,
        /// Why not, and what would work.
        why: String,
    },
    /// The disk is too large.
    #[error("a disk of {} TiB is larger than an overlay's base may be, {} TiB", .0 >> 40, MAX_BASE >> 40)]
    Large(u64),
    /// The overlay's file is too short.
    #[error("it is cut short: it has {has} bytes of {due}")]
    Short {
        /// Its size in bytes.
        has: u64,
        /// The required size in bytes.
        due: u64,
    },
}

/// A base and the writes beside it.
pub struct Overlay {
    base: Base,
    over: File,
    medium: Medium,
    /// Whether the overlay outlives the machine.
    lasts: bool,
    /// The sizes of the base and of the disk in bytes.
    base_bytes: u64,
    bytes: u64,
    /// The offset of block 0 in `over`.
    data: u64,
    /// The map of the blocks in `over`, on the medium or not.
    here: Vec<u64>,
    /// Pages of the map that differ from `here` on the medium.
    owed: BTreeSet<u64>,
    /// In tests, the writes and syncs of `over`, in order.
    #[cfg(test)]
    trace: Vec<Act>,
}

/// An image that is never written to.
pub enum Base {
    /// A raw image or a block device.
    Raw(File),
    /// A qcow2 image and its file.
    Qcow2(Box<Qcow2>, File),
}

impl Base {
    fn file(&self) -> &File {
        match self {
            Self::Raw(file) | Self::Qcow2(_, file) => file,
        }
    }

    fn read(&self, data: &mut Slices<'_>, at: u64, max: usize) -> io::Result<usize> {
        match self {
            Self::Raw(file) => data.preadv(file, at, max),
            Self::Qcow2(image, _) => image.read(data, at, max),
        }
    }

    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.read_exact_at(bytes, at),
            Self::Qcow2(image, _) => image.read_exact_at(bytes, at),
        }
    }
}

/// Distinguishes one base from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    bytes: u64,
    written: i64,
}

impl Identity {
    fn of(base: &File, bytes: u64) -> io::Result<Self> {
        let stat = base.metadata()?;
        // A block device has no useful time.
        let written = stat
            .file_type()
            .is_file()
            .then(|| stat.mtime().saturating_mul(1_000_000_000).saturating_add(stat.mtime_nsec()));
        Ok(Self { bytes, written: written.unwrap_or(0) })
    }

    /// The header of a disk of `bytes` bytes.
    fn header(self, bytes: u64) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        let is_larger = bytes != self.bytes;
        header.extend(VERSIONS[usize::from(is_larger)].to_le_bytes());
        header.extend((BLOCK as u32).to_le_bytes());
        header.extend(self.bytes.to_le_bytes());
        header.extend(self.written.to_le_bytes());
        if is_larger {
            header.extend(bytes.to_le_bytes());
        }
        let sum = checksum(Crc32Iscsi, &header) as u32;
        header.extend(sum.to_le_bytes());
        header
    }

    /// Checks that `header` belongs to this base. Returns the size of the disk in bytes.
    fn check(self, header: &[u8; LARGER]) -> Result<u64, Error> {
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let half = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        if header[..8] != MAGIC {
            return Err(Error::Other);
        }
        let len = match half(8) {
            1 => HEADER,
            2 => LARGER,
            version => return Err(Error::Version(version)),
        };
        if half(len - 4) != checksum(Crc32Iscsi, &header[..len - 4]) as u32 || half(12) != BLOCK as u32 {
            return Err(Error::Other);
        }
        let found = Self { bytes: word(16), written: word(24).cast_signed() };
        if found != self {
            return Err(Error::Base { bytes: found.bytes, now_bytes: self.bytes });
        }
        let bytes = if len == HEADER { self.bytes } else { word(32) };
        if bytes < self.bytes { Err(Error::Other) } else { Ok(bytes) }
    }
}

/// Opens the overlay file at `path`, or creates it, and calls `work` with it. The file is not
/// locked. If `work` fails, a file that was created is removed.
///
/// # Errors
/// The kernel's error, through `failed`, or that of `work`.
pub fn with_file<T, E>(
    path: &Path,
    failed: impl FnOnce(io::Error) -> E,
    work: impl FnOnce(File) -> Result<T, E>,
) -> Result<T, E> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let open = |options: &OpenOptions| open::open(path, options, Kind::Regular);
    let (file, made) = match open(options.clone().create_new(true)) {
        Ok(file) => (file, true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // A dangling symbolic link also counts as existing.
            match open(options.create(true).truncate(false)) {
                Ok(file) => (file, false),
                Err(error) => return Err(failed(error)),
            }
        }
        Err(error) => return Err(failed(error)),
    };
    work(file).inspect_err(|_| {
        if made {
            let _ = std::fs::remove_file(path);
        }
    })
}

/// A file without a name, which lasts as long as it is open. It is in the directory for temporary
/// files, or in memory, which is said.
///
/// # Errors
/// The kernel's error, if neither works.
pub fn unnamed() -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600);
    let directory = std::env::temp_dir();
    options.open(&directory).or_else(|error| {
        let directory = directory.display();
        tracing::warn!(
            "what the guest writes to its disk is kept in memory, because it cannot be kept in {directory}: {error}; TMPDIR=DIRECTORY names \
             another"
        );
        mmap::memfd(c"vellum-overlay", 0, None)
    })
}

/// Reads the header of a file. A header of version 1 is padded with zeroes.
fn read_header(over: &File) -> Result<[u8; LARGER], Error> {
    let mut header = [0; LARGER];
    match over.read_exact_at(&mut header[..HEADER], 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(Error::Other),
        read => read?,
    }
    match over.read_exact_at(&mut header[HEADER..], HEADER as u64) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error.into()),
        _ => Ok(header),
    }
}

/// Where the parts of an overlay's file are.
struct Parts {
    /// The size of the map.
    map: u64,
    /// The offset of block 0.
    data: u64,
    /// The size of the file.
    end: u64,
}

impl Parts {
    /// Those of the overlay of a disk of `bytes` bytes, at most [`MAX_BASE`].
    fn of(bytes: u64) -> Self {
        let blocks = bytes.div_ceil(BLOCK);
        let map = blocks.div_ceil(8).next_multiple_of(MAP_PAGE);
        let data = MAP + map;
        Self { map, data, end: data + blocks * BLOCK }
    }
}

/// The size in bytes of the disk that [`Overlay::new`] makes of the same arguments. Of `over` only
/// the header is read.
///
/// # Errors
/// As there.
pub fn size(base: &File, base_bytes: u64, wanted: Option<u64>, over: &File) -> Result<u64, Error> {
    let has = over.metadata()?.len();
    let bytes = match has {
        0 => wanted.unwrap_or(base_bytes),
        _ => Identity::of(base, base_bytes)?.check(&read_header(over)?)?,
    };
    let refuse = |wanted, why| Err(Error::Size { wanted, why });
    match wanted {
        Some(wanted) if wanted < base_bytes => {
            return refuse(
                wanted,
                format!("the image has {base_bytes} bytes, and a disk can only be larger"),
            );
        }
        Some(wanted) if wanted != bytes => {
            return refuse(
                wanted,
                format!(
                    "the overlay was made for {bytes}, which cannot be changed; another overlay can have another size"
                ),
            );
        }
        _ if bytes > MAX_BASE => return Err(Error::Large(bytes)),
        _ => {}
    }
    match Parts::of(bytes).end {
        due if has > 0 && has < due => Err(Error::Short { has, due }),
        _ => Ok(bytes),
    }
}

impl Overlay {
    /// The overlay `over` of `base`, which has `base_bytes` bytes. An empty file becomes an overlay
    /// of a disk of `wanted` bytes, or by default as large as the base. The size of an existing
    /// overlay's disk cannot be changed.
    ///
    /// # Errors
    /// Why it does not fit this base, or why it cannot have that size.
    pub fn new(
        base: Base,
        base_bytes: u64,
        wanted: Option<u64>,
        over: File,
        lasts: bool,
    ) -> Result<Self, Error> {
        let bytes = size(base.file(), base_bytes, wanted, &over)?;
        let Parts { map, data, end } = Parts::of(bytes);
        let mut here = vec![0; (map / 8) as usize];
        match over.metadata()?.len() {
            0 => {
                // The length is set last: a file with its full length has a header.
                over.write_all_at(&Identity::of(base.file(), base_bytes)?.header(bytes), 0)?;
                over.set_len(end)?;
                if lasts {
                    over.sync_all()?;
                }
            }
            _ => {
                let mut page = [0; MAP_PAGE as usize];
                for (at, words) in here.chunks_mut(page.len() / 8).enumerate() {
                    over.read_exact_at(&mut page, MAP + at as u64 * MAP_PAGE)?;
                    // A write makes memory of the map resident, 512 MiB for a disk of 16 TiB.
                    if page == [0; MAP_PAGE as usize] {
                        continue;
                    }
                    for (word, bytes) in words.iter_mut().zip(page.as_chunks::<8>().0) {
                        *word = u64::from_le_bytes(*bytes);
                    }
                }
            }
        }
        Ok(Self {
            base,
            over,
            medium: Medium::default(),
            lasts,
            base_bytes,
            bytes,
            data,
            here,
            owed: BTreeSet::new(),
            #[cfg(test)]
            trace: Vec::new(),
        })
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.bytes
    }

    fn is_here(&self, block: u64) -> bool {
        self.here[(block / 64) as usize] >> (block % 64) & 1 != 0
    }

    /// The leading part of `len` bytes from `at` on that lies in one file. Returns whether that is
    /// the overlay's file, and where the part ends.
    fn run(&self, at: u64, len: u64) -> (bool, u64) {
        let here = self.is_here(at / BLOCK);
        let end = at + len;
        let mut next = (at / BLOCK + 1) * BLOCK;
        while next < end && self.is_here(next / BLOCK) == here {
            next += BLOCK;
        }
        (here, next.min(end))
    }

    /// Reads from `at` on into the next bytes of `data`, at most `max`. Returns the number of bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&self, data: &mut Slices<'_>, at: u64, max: usize) -> io::Result<usize> {
        let (here, end) = self.run(at, data.left().min(max) as u64);
        let most = (end - at) as usize;
        if here {
            return data.preadv(&self.over, self.data + at, most);
        }
        match self.base_bytes.saturating_sub(at) {
            0 => Ok(data.zero(most)),
            left => self.base.read(data, at, most.min(left as usize)),
        }
    }

    /// Reads exactly `bytes` from `at` on.
    ///
    /// # Errors
    /// The kernel's error, or the disk ends before.
    pub fn read_exact_at(&self, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        if at.checked_add(bytes.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while !bytes.is_empty() {
            let (here, end) = self.run(at, bytes.len() as u64);
            let (part, rest) = bytes.split_at_mut((end - at) as usize);
            if here {
                self.over.read_exact_at(part, self.data + at)?;
            } else {
                self.read_base(part, at)?;
            }
            (bytes, at) = (rest, end);
        }
        Ok(())
    }

    /// Reads exactly `bytes` of the base. It has zeroes after its end.
    fn read_base(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let (inside, behind) =
            bytes.split_at_mut(self.base_bytes.saturating_sub(at).min(bytes.len() as u64) as usize);
        behind.fill(0);
        if inside.is_empty() { Ok(()) } else { self.base.read_exact_at(inside, at) }
    }

    /// Writes the next bytes of `data` from `at` on, at most `max`. Returns the number of bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write(&mut self, data: &mut Slices<'_>, at: u64, max: usize) -> io::Result<usize> {
        let (here, end) = self.run(at, data.left().min(max) as u64);
        let (first, last) = (at / BLOCK, (end - 1) / BLOCK);
        if here {
            return self.put(data, at, end);
        }
        if !at.is_multiple_of(BLOCK) || end < ((first + 1) * BLOCK).min(self.bytes) {
            // The rest of this block is copied from the base. Then the block is in the overlay.
            self.fill(first)?;
            self.mark(first, first + 1);
            return self.put(data, at, end.min((first + 1) * BLOCK));
        }
        // Whole blocks. A partial block at the end is left to the next call.
        let whole = if end == self.bytes { end } else { end / BLOCK * BLOCK };
        let count = self.put(data, at, whole)?;
        let done = at + count as u64;
        self.mark(first, if done == self.bytes { last + 1 } else { done / BLOCK });
        // The host's file system was full in the middle of a block. That block does not become part
        // of the disk.
        let whole = done == self.bytes || done.is_multiple_of(BLOCK);
        if whole && count > 0 { Ok(count) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn put(&mut self, data: &mut Slices<'_>, at: u64, end: u64) -> io::Result<usize> {
        let count = data.pwritev(&self.over, self.data + at, (end - at) as usize)?;
        self.note(self.data + at, count as u64);
        Ok(count)
    }

    /// Copies `block` from the base.
    fn fill(&mut self, block: u64) -> io::Result<()> {
        let (at, mut bytes) = (block * BLOCK, [0; BLOCK as usize]);
        let part = &mut bytes[..(self.bytes - at).min(BLOCK) as usize];
        self.read_base(part, at)?;
        self.over.write_all_at(part, self.data + at)?;
        let len = part.len() as u64;
        self.note(self.data + at, len);
        Ok(())
    }

    /// Marks blocks `from..to` as being in the overlay.
    fn mark(&mut self, from: u64, to: u64) {
        for block in from..to {
            self.here[(block / 64) as usize] |= 1 << (block % 64);
            self.owed.insert(block / 8 / MAP_PAGE);
        }
    }

    /// Makes `len` bytes from `at` on read as zeroes, and frees their space.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn zero(&mut self, at: u64, len: u64) -> io::Result<()> {
        let (mut at, end) = (at, at + len);
        while at < end {
            let block = at / BLOCK;
            let whole = at.is_multiple_of(BLOCK) && (end >= (block + 1) * BLOCK || end == self.bytes);
            let next = if whole && end != self.bytes {
                end / BLOCK * BLOCK
            } else if whole {
                end
            } else {
                end.min((block + 1) * BLOCK)
            };
            if !whole && !self.is_here(block) {
                self.fill(block)?;
            }
            crate::write_zeros(&self.over, self.data + at, next - at, true)?;
            self.note(self.data + at, next - at);
            self.mark(block, next.div_ceil(BLOCK));
            at = next;
        }
        Ok(())
    }

    /// Makes everything written so far survive a power loss, if the overlay outlives the machine.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.lasts {
            return Ok(());
        }
        self.sync()?;
        if self.owed.is_empty() {
            return Ok(());
        }
        self.write_map()?;
        self.sync()?;
        self.owed.clear();
        Ok(())
    }

    /// Makes the file whole if the overlay does not outlive the machine, so that it can be copied. The
    /// map of another must not be on the medium before its blocks are.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn complete(&mut self) -> io::Result<()> {
        if !self.lasts {
            self.write_map()?;
            self.owed.clear();
        }
        Ok(())
    }

    /// Writes the pages of the map that are owed.
    fn write_map(&mut self) -> io::Result<()> {
        let words = (MAP_PAGE / 8) as usize;
        for &page in &self.owed {
            let part = &self.here[page as usize * words..][..words];
            let bytes: Vec<u8> = part.iter().flat_map(|word| word.to_le_bytes()).collect();
            self.over.write_all_at(&bytes, MAP + page * MAP_PAGE)?;
        }
        #[cfg(test)]
        for page in self.owed.clone() {
            self.note(MAP + page * MAP_PAGE, MAP_PAGE);
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.medium.sync(&self.over)?;
        #[cfg(test)]
        self.trace.push(Act::Sync(0));
        Ok(())
    }

    /// In tests, records that `len` bytes at `at` of the file were written.
    #[cfg_attr(not(test), allow(unused_variables, clippy::unused_self))]
    fn note(&mut self, at: u64, len: u64) {
        #[cfg(test)]
        {
            let mut bytes = vec![0; len as usize];
            self.over.read_exact_at(&mut bytes, at).unwrap();
            self.trace.push(Act::Write(0, at, bytes));
        }
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        // If the guest was ended without a shutdown, its unflushed writes need not be lost.
        if let Err(error) = self.flush() {
            tracing::warn!("an overlay: what was written to it last is lost: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
