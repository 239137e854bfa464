//! The header of an image, checked before imago reads it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use super::Error;
use super::file::{file_size, read_or_zero};

/// The first four bytes.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The size of a version 3 header without its extensions.
const HEADER: usize = 104;
/// The maximum disk size: 16 TiB.
pub const MAX_DISK: u64 = 16 << 40;
/// The maximum size of the L1 table. QEMU has the same limit.
const MAX_L1_BYTES: u64 = 32 << 20;
/// The maximum size of the refcount table. QEMU has the same limit.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Bits of `incompatible_features`.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version: 2 or 3.
    pub version: u32,
    /// The size of the disk in bytes.
    pub size: u64,
    /// The cluster size in bytes.
    pub cluster: u64,
    /// The number of snapshots inside the image.
    pub snapshots: u32,
    /// The name of the backing file, as in the image.
    pub backing: Option<String>,
    /// Whether the image has an external data file.
    pub data_file: bool,
}

impl Header {
    /// Reads the header of `file`.
    ///
    /// # Errors
    /// It is not a qcow2 image, or one that cannot be used.
    pub fn read(file: &File) -> Result<Self, Error> {
        let length = file_size(file)?;
        let mut bytes = [0; HEADER];
        read_or_zero(file, &mut bytes, 0)?;
        let header = Self::parse(&bytes, length)?;
        let (at, len) = (be64(&bytes, 8), be32(&bytes, 16));
        if at == 0 {
            // The length is meaningless then and was not checked.
            return Ok(header);
        }
        let mut name = vec![0; len as usize];
        file.read_exact_at(&mut name, at)?;
        Ok(Self { backing: Some(String::from_utf8_lossy(&name).into_owned()), ..header })
    }

    /// Parses the header in `bytes`, of a file of `length` bytes, without the name of a backing
    /// file.
    ///
    /// # Errors
    /// It is not a qcow2 image, or one that cannot be used.
    pub fn parse(bytes: &[u8; HEADER], length: u64) -> Result<Self, Error> {
        let within = |field, value, limit: std::ops::RangeInclusive<u64>| {
            if limit.contains(&value) {
                return Ok(value);
            }
            Err(Error::Header {
                field,
                value,
                limit: format!("and {} to {} are possible", limit.start(), limit.end()),
            })
        };
        if bytes[..4] != MAGIC {
            return Err(Error::Header {
                field: "magic",
                value: be32(bytes, 0).into(),
                limit: "not QFI\\xfb".into(),
            });
        }
        let version = within("version", be32(bytes, 4).into(), 2..=3)? as u32;
        let bits = within("cluster_bits", be32(bytes, 20).into(), 9..=21)?;
        let size = be64(bytes, 24);
        if size > MAX_DISK {
            return Err(Error::Large(size));
        }
        match be32(bytes, 32) {
            0 => {}
            _ => return Err(Error::Encrypted),
        }
        let cluster = 1 << bits;
        // An L1 entry covers a table of cluster / 8 clusters.
        let entries = size.div_ceil(cluster * (cluster / 8));
        let l1 = within("l1_size", be32(bytes, 36).into(), entries..=MAX_L1_BYTES / 8)?;
        let table = |field, at: u64, len: u64| {
            let fits = at.is_multiple_of(cluster) && at.checked_add(len).is_some_and(|end| end <= length);
            if fits || len == 0 {
                return Ok(());
            }
            Err(Error::Header {
                field,
                value: at,
                limit: format!("and {len} bytes do not lie there in a file of {length}"),
            })
        };
        table("l1_table_offset", be64(bytes, 40), l1 * 8)?;
        let clusters =
            within("refcount_table_clusters", be32(bytes, 56).into(), 0..=MAX_REFCOUNT_TABLE_BYTES >> bits)?;
        table("refcount_table_offset", be64(bytes, 48), clusters * cluster)?;
        let snapshots = within("nb_snapshots", be32(bytes, 60).into(), 0..=65536)? as u32;
        let (backing, name) = (be64(bytes, 8), be32(bytes, 16));
        if backing != 0 {
            within("backing_file_size", name.into(), 1..=1023)?;
            within("backing_file_offset", backing, 72..=cluster - 1)?;
        }
        let features = if version == 2 { 0 } else { be64(bytes, 72) };
        match features {
            _ if features & CORRUPT != 0 => return Err(Error::Corrupt),
            _ if features & DIRTY != 0 => return Err(Error::Dirty),
            _ if features & EXTENDED_L2 != 0 => return Err(Error::Feature("extended L2 entries")),
            _ if features & COMPRESSION != 0 => return Err(Error::Feature("clusters compressed by zstd")),
            _ if features & !DATA_FILE != 0 => return Err(Error::Feature("a feature of a later version")),
            _ => {}
        }
        Ok(Self { version, size, cluster, snapshots, backing: None, data_file: features & DATA_FILE != 0 })
    }
}

/// Where a checked header says that the tables are.
pub(super) struct Tables {
    /// The offset of the L1 table.
    pub(super) l1: u64,
    /// The number of its entries.
    pub(super) l1_size: u32,
    /// The offset of the refcount table.
    pub(super) refcounts: u64,
    /// Its size in bytes.
    pub(super) refcounts_size: u64,
    /// The binary logarithm of the number of bits of a refcount.
    pub(super) refcount_order: u32,
    /// The offset of the table of snapshots.
    pub(super) snapshots_at: u64,
    /// The number of snapshots.
    pub(super) snapshots: u32,
}

impl Tables {
    /// Reads those of the image in `file`, which has `header`.
    ///
    /// # Errors
    /// The kernel's error, or the refcounts have a size that does not exist.
    pub(super) fn read(file: &File, header: &Header) -> Result<Self, Error> {
        let mut bytes = [0; HEADER];
        read_or_zero(file, &mut bytes, 0)?;
        // The field is of version 3.
        let refcount_order = if header.version == 2 { 4 } else { be32(&bytes, 96) };
        if refcount_order > 6 {
            return Err(Error::Header {
                field: "refcount_order",
                value: refcount_order.into(),
                limit: "and 0 to 6 are possible".into(),
            });
        }
        Ok(Self {
            l1: be64(&bytes, 40),
            l1_size: be32(&bytes, 36),
            refcounts: be64(&bytes, 48),
            refcounts_size: u64::from(be32(&bytes, 56)) * header.cluster,
            refcount_order,
            snapshots_at: be64(&bytes, 64),
            snapshots: header.snapshots,
        })
    }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}
