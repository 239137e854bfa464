//! Finds images whose file ends before a part of the disk. QEMU reads that part as zeroes, so a guest
//! would find a damaged file system.

use std::fs::File;

use super::Error;
use super::file::{file_size, read_or_zero};
use super::header::{Header, Tables};

/// The maximum number of bytes of L2 tables that are read. Those of a disk of 512 GiB with clusters
/// of 64 KiB have as many. Of an image with more, only the L1 table is checked.
const MAX_L2_BYTES: u64 = 64 << 20;
/// The host offset in an entry of an L1 table, and in one of an L2 table.
pub(super) const OFFSET: u64 = ((1 << 56) - 1) & !511;
/// Bits of an entry of an L2 table.
pub(super) const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1 << 0;

/// Checks that each table and each cluster of the image begins within its `file`. QEMU extends a
/// file by no more than is written, so the last cluster may be partial.
///
/// # Errors
/// The file ends before one of them.
pub(super) fn check_end(file: &File, header: &Header) -> Result<(), Error> {
    let length = file_size(file)?;
    let check = |at: u64| if at < length { Ok(()) } else { Err(Error::CutOff { length, at }) };
    let tables = Tables::read(file, header)?;
    let mut table = vec![0; tables.l1_size as usize * 8];
    read_or_zero(file, &mut table, tables.l1)?;
    let l2: Vec<u64> = entries(&table).map(|entry| entry & OFFSET).filter(|&at| at != 0).collect();
    l2.iter().try_for_each(|&at| check(at))?;
    // The clusters may be in another file.
    if header.data_file || l2.len() as u64 * header.cluster > MAX_L2_BYTES {
        return Ok(());
    }
    // A compressed cluster's offset has these bits. Its length in sectors is above them.
    let packed = (1 << (62 - (header.cluster.ilog2() - 8))) - 1;
    let mut table = vec![0; header.cluster as usize];
    for at in l2 {
        read_or_zero(file, &mut table, at)?;
        for entry in entries(&table) {
            let at = match entry {
                _ if entry & COMPRESSED != 0 => entry & packed,
                _ if entry & ZERO != 0 => 0,
                _ => entry & OFFSET,
            };
            check(at)?;
        }
    }
    Ok(())
}

pub(super) fn entries(table: &[u8]) -> impl Iterator<Item = u64> {
    table.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry))
}
