//! File systems that can be read: ext2, ext3 and ext4 by the crate ext4-view, and FAT by fatfs.
//! Others are recognized by their magic numbers, for messages.
//!
//! A damaged file system can contain cycles. The number of reads is limited by the size of the
//! partition, so that each search ends.

use std::cell::Cell;
use std::error::Error;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::rc::Rc;

use ext4_view::{Ext4, Ext4Read};

use super::ReadAt;
use super::partitions::{Partition, is_fat};

/// The maximum number of names that are read from a directory.
const MAX_NAMES: usize = 65536;
/// The number of reads of up to 4 KiB that every file system may have, in addition to one for each
/// 64 bytes of its partition.
const MIN_READS: u64 = 20_000;

/// A file system. Paths are absolute. Symbolic links are followed within it.
pub enum FileSystem {
    /// ext2, ext3 or ext4.
    Ext4(Ext4),
    /// FAT12, FAT16 or FAT32.
    Fat(Box<Fat>),
}

type Fat = fatfs::FileSystem<Extent>;

/// Magic numbers of others: offset, bytes, and the description for messages.
const OTHERS: [(u64, &[u8], &str); 14] = [
    (0, b"XFSB", "xfs, which is not read"),
    (65600, b"_BHRfS_M", "btrfs, which is not read"),
    (0, b"LUKS\xba\xbe", "encrypted (LUKS)"),
    (512, b"LABELONE", "an LVM volume, which is not read"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0, b"hsqs", "squashfs, which is not read"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "erofs, which is not read"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "f2fs, which is not read"),
    (32769, b"CD001", "ISO 9660, which is not read"),
    (3, b"NTFS    ", "ntfs, which is not read"),
    (3, b"EXFAT   ", "exfat, which is not read"),
    (0, b"ZFS", "zfs, which is not read"),
    (0, b"BCHFS", "bcachefs, which is not read"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID, which is not read"),
];

impl FileSystem {
    /// Opens the file system of `partition`.
    ///
    /// # Errors
    /// What the partition contains instead, as text.
    pub fn open(disk: &Rc<dyn ReadAt>, partition: &Partition) -> Result<Self, String> {
        let extent = Extent {
            disk: Rc::clone(disk),
            start: partition.start,
            len: partition.len,
            position: 0,
            left: Cell::new(MIN_READS + partition.len / 64),
        };
        let begins = |at: u64, magic: &[u8]| {
            let mut bytes = vec![0; magic.len()];
            extent.read_within(&mut bytes, at).is_ok() && bytes == magic
        };
        if begins(1080, &[0x53, 0xef]) {
            let opened = Ext4::load(Box::new(extent));
            return opened.map(Self::Ext4).map_err(|error| format!("ext4 that cannot be read: {error}"));
        }
        let mut sector = [0; 512];
        if extent.read_within(&mut sector, 0).is_ok() && is_fat(&sector) {
            let opened = Fat::new(extent, fatfs::FsOptions::new());
            return opened
                .map(|fat| Self::Fat(Box::new(fat)))
                .map_err(|error| format!("FAT that cannot be read: {error}"));
        }
        let other = OTHERS.iter().find(|(at, magic, _)| begins(*at, magic));
        Err(other.map_or("no known file system", |(_, _, name)| name).into())
    }

    /// Its name in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Ext4(_) => "ext4",
            Self::Fat(_) => "FAT",
        }
    }

    /// Its UUID, in the form that Linux and GRUB use.
    pub fn uuid(&self) -> String {
        match self {
            Self::Ext4(ext4) => ext4.uuid().to_string(),
            Self::Fat(fat) => {
                let id = fat.volume_id();
                format!("{:04X}-{:04X}", id >> 16, id & 0xffff)
            }
        }
    }

    /// Its label.
    pub fn label(&self) -> String {
        match self {
            Self::Ext4(ext4) => ext4.label().to_str().unwrap_or_default().into(),
            Self::Fat(fat) => match fat.volume_label().trim() {
                // mkfs.fat writes this if no label is given.
                "NO NAME" => String::new(),
                label => label.into(),
            },
        }
    }

    /// Whether there is a file or directory at `path`.
    pub fn exists(&self, path: &str) -> bool {
        match self {
            Self::Ext4(ext4) => ext4.exists(path).unwrap_or(false),
            Self::Fat(fat) => self.is_directory(path) || fat.root_dir().open_file(relative(path)).is_ok(),
        }
    }

    /// Whether there is a directory at `path`.
    pub(crate) fn is_directory(&self, path: &str) -> bool {
        match self {
            Self::Ext4(ext4) => ext4.metadata(path).is_ok_and(|metadata| metadata.is_dir()),
            Self::Fat(fat) => relative(path).is_empty() || fat.root_dir().open_dir(relative(path)).is_ok(),
        }
    }

    /// The names in the directory `path`, sorted. Empty if there is no such directory.
    pub fn names(&self, path: &str) -> Vec<String> {
        let mut names: Vec<String> = match self {
            Self::Ext4(ext4) => {
                let Ok(entries) = ext4.read_dir(path) else { return Vec::new() };
                let names = entries.take(MAX_NAMES).map_while(Result::ok);
                names.filter_map(|entry| Some(entry.file_name().as_str().ok()?.to_owned())).collect()
            }
            Self::Fat(fat) => {
                let root = fat.root_dir();
                let directory = match relative(path) {
                    "" => root,
                    path => match root.open_dir(path) {
                        Ok(directory) => directory,
                        Err(_) => return Vec::new(),
                    },
                };
                directory
                    .iter()
                    .take(MAX_NAMES)
                    .map_while(Result::ok)
                    .map(|entry| entry.file_name())
                    .collect()
            }
        };
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    /// Reads the file at `path`, if it has at most `max` bytes.
    ///
    /// # Errors
    /// The reason, as text.
    pub fn read(&self, path: &str, max: u64) -> Result<Vec<u8>, String> {
        let large = |len| format!("it has {len} bytes, and at most {max} are read");
        match self {
            Self::Ext4(ext4) => {
                let metadata = ext4.metadata(path).map_err(|error| error.to_string())?;
                match metadata.len() {
                    len if len > max => Err(large(len)),
                    _ => ext4.read(path).map_err(|error| error.to_string()),
                }
            }
            Self::Fat(fat) => {
                let file = fat.root_dir().open_file(relative(path)).map_err(|error| error.to_string())?;
                let mut bytes = Vec::new();
                file.take(max + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
                if bytes.len() as u64 > max { Err(large(bytes.len() as u64)) } else { Ok(bytes) }
            }
        }
    }
}

/// `path` in the form of fatfs, without the slash of the root.
fn relative(path: &str) -> &str {
    path.trim_matches('/')
}

/// A part of a disk, with the interfaces that both crates read from.
pub struct Extent {
    disk: Rc<dyn ReadAt>,
    start: u64,
    len: u64,
    position: u64,
    /// The number of reads that are left. See [`MIN_READS`].
    left: Cell<u64>,
}

impl Extent {
    fn read_within(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let left = self.left.get().checked_sub(1 + bytes.len() as u64 / 4096);
        let Some(left) = left else { return Err(io::Error::other("the file system leads in circles")) };
        self.left.set(left);
        let inside = at.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.len);
        if inside {
            self.disk.read_exact_at(bytes, self.start + at)
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

impl Ext4Read for Extent {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync + 'static>> {
        Ok(self.read_within(bytes, at)?)
    }
}

impl Read for Extent {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.len.saturating_sub(self.position).min(bytes.len() as u64) as usize;
        self.read_within(&mut bytes[..count], self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for Extent {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// fatfs requires it. Every write fails.
impl Write for Extent {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
