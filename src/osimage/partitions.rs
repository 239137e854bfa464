//! Partition tables: GPT (UEFI 2.10, section 5.3) and MBR with logical partitions.

use std::fmt;
use std::io;

use crc_fast::{CrcAlgorithm::Crc32IsoHdlc, checksum};

use super::ReadAt;

/// Bytes of a sector: that of virtio-blk disks, whatever the image was made for.
const SECTOR: u64 = 512;
/// The maximum number of entries of a GPT. The usual number is 128.
const MAX_ENTRIES: u32 = 1024;
/// The maximum number of logical partitions.
const MAX_LOGICAL: u32 = 64;

/// A GUID, in the byte order of the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Guid(pub [u8; 16]);

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.0;
        let (one, two) = (u32::from_le_bytes([b[0], b[1], b[2], b[3]]), u16::from_le_bytes([b[4], b[5]]));
        write!(f, "{one:08x}-{two:04x}-{:04x}-", u16::from_le_bytes([b[6], b[7]]))?;
        write!(f, "{:02x}{:02x}-", b[8], b[9])?;
        b[10..].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The table that lists a partition, and its entry there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A GUID partition table.
    Gpt {
        /// The partition's type.
        kind: Guid,
        /// The partition's own GUID.
        id: Guid,
    },
    /// A master boot record.
    Mbr {
        /// The partition's type.
        kind: u8,
        /// The disk's signature.
        disk: u32,
    },
    /// No table: the partition is the whole disk.
    Whole,
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its number in Linux, from 1. 0 for the whole disk.
    pub number: u32,
    /// The offset of its start in bytes.
    pub start: u64,
    /// Its size in bytes.
    pub len: u64,
    /// The table that lists it.
    pub origin: Origin,
}

/// The partitions of `disk`, or the whole disk as one.
///
/// # Errors
/// The host's error.
pub fn read(disk: &dyn ReadAt) -> io::Result<Vec<Partition>> {
    let mut first = [0; SECTOR as usize];
    if disk.size() < SECTOR {
        return Ok(Vec::new());
    }
    disk.read_exact_at(&mut first, 0)?;
    let backup = (disk.size() / SECTOR).saturating_sub(1);
    for at in [1, backup] {
        if let Some(partitions) = gpt(disk, at)? {
            return Ok(partitions);
        }
    }
    if first[510..] == [0x55, 0xaa] && !is_fat(&first) {
        let partitions = mbr(disk, &first)?;
        if !partitions.is_empty() {
            return Ok(partitions);
        }
    }
    Ok(vec![Partition { number: 0, start: 0, len: disk.size(), origin: Origin::Whole }])
}

/// Whether `sector` is the boot sector of a FAT file system, which has the same signature as an
/// MBR.
pub(crate) fn is_fat(sector: &[u8; SECTOR as usize]) -> bool {
    let bytes = le16(sector, 11);
    let named = sector[82..].starts_with(b"FAT32   ") || sector[54..].starts_with(b"FAT1");
    matches!(sector[0], 0xeb | 0xe9) && [512, 1024, 2048, 4096].contains(&bytes) && named
}

/// The partitions of the GPT with its header in sector `at`. `None` if there is no header or a
/// checksum is wrong.
fn gpt(disk: &dyn ReadAt, at: u64) -> io::Result<Option<Vec<Partition>>> {
    let mut header = [0; SECTOR as usize];
    let Some(offset) = at.checked_mul(SECTOR).filter(|at| at + SECTOR <= disk.size()) else {
        return Ok(None);
    };
    disk.read_exact_at(&mut header, offset)?;
    let len = le32(&header, 12) as usize;
    if &header[..8] != b"EFI PART" || !(92..=header.len()).contains(&len) {
        return Ok(None);
    }
    let sum = le32(&header, 16);
    header[16..20].fill(0);
    let (table, count, size) = (le64(&header, 72), le32(&header, 80), le32(&header, 84));
    if crc32(&header[..len]) != sum || count > MAX_ENTRIES || !(128..=4096).contains(&size) {
        return Ok(None);
    }
    let mut entries = vec![0; count as usize * size as usize];
    let fits = |at: &u64| at.checked_add(entries.len() as u64).is_some_and(|end| end <= disk.size());
    let Some(table) = table.checked_mul(SECTOR).filter(fits) else { return Ok(None) };
    disk.read_exact_at(&mut entries, table)?;
    if crc32(&entries) != le32(&header, 88) {
        return Ok(None);
    }
    let partitions = entries.chunks_exact(size as usize).zip(1..).filter_map(|(entry, number)| {
        let guid = |at: usize| Guid(entry[at..at + 16].try_into().expect("16 bytes"));
        let (kind, id, first, last) = (guid(0), guid(16), le64(entry, 32), le64(entry, 40));
        if kind.0 == [0; 16] {
            return None;
        }
        let sectors = last.checked_sub(first)?.checked_add(1)?;
        extent(disk, first, sectors, number, Origin::Gpt { kind, id })
    });
    Ok(Some(partitions.collect()))
}

fn mbr(disk: &dyn ReadAt, first: &[u8; SECTOR as usize]) -> io::Result<Vec<Partition>> {
    let signature = le32(first, 440);
    let mut found = Vec::new();
    let mut extended = None;
    for (entry, number) in first[446..510].as_chunks::<16>().0.iter().zip(1..) {
        let (kind, start, sectors) = (entry[4], le32(entry, 8), le32(entry, 12));
        match kind {
            0 => {}
            0x05 | 0x0f | 0x85 => extended = extended.or(Some(u64::from(start))),
            _ => found.extend(extent(
                disk,
                start.into(),
                sectors.into(),
                number,
                Origin::Mbr { kind, disk: signature },
            )),
        }
    }
    let Some(base) = extended else { return Ok(found) };
    // Each logical partition has its own boot record, which contains its location and that of the
    // next record.
    let mut next = base;
    for number in 5..5 + MAX_LOGICAL {
        let mut record = [0; SECTOR as usize];
        match next.checked_mul(SECTOR) {
            Some(at) if at + SECTOR <= disk.size() => disk.read_exact_at(&mut record, at)?,
            _ => break,
        }
        if record[510..] != [0x55, 0xaa] {
            break;
        }
        let (kind, start, sectors) = (record[450], le32(&record, 454), le32(&record, 458));
        let origin = Origin::Mbr { kind, disk: signature };
        found.extend(extent(disk, next + u64::from(start), sectors.into(), number, origin));
        match le32(&record, 470) {
            0 => break,
            link => next = base + u64::from(link),
        }
    }
    Ok(found)
}

/// The partition, if it is not empty and lies within the disk.
fn extent(disk: &dyn ReadAt, first: u64, sectors: u64, number: u32, origin: Origin) -> Option<Partition> {
    let (start, len) = (first.checked_mul(SECTOR)?, sectors.checked_mul(SECTOR)?);
    let inside = start.checked_add(len)? <= disk.size();
    (inside && len > 0).then_some(Partition { number, start, len, origin })
}

fn crc32(bytes: &[u8]) -> u32 {
    checksum(Crc32IsoHdlc, bytes) as u32
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"))
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_are_written_as_linux_does() {
        let esp =
            [0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b];
        assert_eq!(Guid(esp).to_string(), "c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
    }

    #[test]
    fn logical_partitions_are_followed_and_a_loop_ends() {
        let mut disk = vec![0; 64 << 9];
        let entry = |disk: &mut [u8], at: usize, kind: u8, start: u32, sectors: u32| {
            disk[at + 4] = kind;
            disk[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
            disk[at + 12..at + 16].copy_from_slice(&sectors.to_le_bytes());
        };
        entry(&mut disk, 446, 0x83, 1, 8);
        entry(&mut disk, 462, 0x05, 16, 40);
        // A partition that ends after the disk is left out.
        entry(&mut disk, 478, 0x83, 60, 8);
        disk[440..444].copy_from_slice(&0xfeed_u32.to_le_bytes());
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        entry(&mut disk, (16 << 9) + 446, 0x83, 1, 4);
        entry(&mut disk, (16 << 9) + 462, 0x05, 8, 8);
        disk[(16 << 9) + 510..(16 << 9) + 512].copy_from_slice(&[0x55, 0xaa]);
        entry(&mut disk, (24 << 9) + 446, 0x82, 2, 4);
        // Back to the first record.
        entry(&mut disk, (24 << 9) + 462, 0x05, 8, 8);
        disk[(24 << 9) + 510..(24 << 9) + 512].copy_from_slice(&[0x55, 0xaa]);
        let found = read(&disk).unwrap();
        let seen: Vec<_> = found.iter().map(|p| (p.number, p.start >> 9, p.len >> 9)).collect();
        assert_eq!(seen[..3], [(1, 1, 8), (5, 17, 4), (6, 26, 4)]);
        assert!(seen.len() <= 3 + MAX_LOGICAL as usize);
        assert_eq!(found[0].origin, Origin::Mbr { kind: 0x83, disk: 0xfeed });
    }

    #[test]
    fn a_disk_without_a_table_is_one_volume() {
        let disk = vec![0; 4096];
        assert_eq!(
            read(&disk).unwrap(),
            [Partition { number: 0, start: 0, len: 4096, origin: Origin::Whole }]
        );
        assert_eq!(read(&Vec::new()).unwrap(), []);
    }
}
