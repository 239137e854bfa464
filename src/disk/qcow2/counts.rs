//! Checks the refcounts of an image before anything is written to it.
//!
//! A writer takes a cluster with the refcount 0 as free, and writes to one with the flag COPIED in
//! place. Where the image is wrong about either, the writer overwrites data or tables. imago, unlike
//! QEMU, does not look for that when it writes. This counts all references once, when the image is
//! opened, and raises refcounts that are too low. imago keeps them right while it runs, but not in
//! the file: it writes a new L2 table and the L1 entry that leads there before the refcount. So an
//! image that was not closed, because of a loss of power or a SIGKILL, has such refcounts.
//!
//! All L2 tables are read, and all refcount blocks: 128 MiB and 32 MiB for 1 TiB of clusters of
//! 64 KiB. Meanwhile a byte of memory is needed for each cluster of the file.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Error;
use super::end::{COMPRESSED, OFFSET, entries};
use super::file::{file_size, read_or_zero};
use super::header::{Header, Tables};

/// The maximum number of clusters of a file: 32 TiB of 64 KiB.
const MAX_CLUSTERS: u64 = 1 << 29;
/// The maximum size of all L2 tables. Those of a disk of 16 TiB with clusters of 64 KiB have 2 GiB.
const MAX_L2_BYTES: u64 = 4 << 30;
/// The maximum size of the L1 tables, with those of snapshots.
const MAX_L1_BYTES: u64 = 128 << 20;
/// The maximum size of the table of snapshots. QEMU has the same limit.
const MAX_SNAPSHOT_BYTES: u64 = 64 << 20;
/// The size of an entry of that table without its strings.
const SNAPSHOT: usize = 40;
/// The maximum number of clusters that count as used and are not. imago looks at the refcount of each
/// cluster before the first free one, so an image that counts many delays a guest's write.
const MAX_LEAKED: u64 = 1 << 18;
/// The flag of an entry: its cluster may be written in place.
const COPIED: u64 = 1 << 63;

/// The number of references to each cluster of a file.
struct References {
    /// The binary logarithm of the cluster size.
    bits: u32,
    /// The file's size in bytes.
    length: u64,
    /// By cluster. [`u8::MAX`] means that `many` has the number.
    few: Vec<u8>,
    many: HashMap<u64, u64>,
    /// A bit for each cluster: whether an entry has it with the flag COPIED.
    copied: Vec<u64>,
}

impl References {
    fn new(length: u64, bits: u32) -> Result<Self, Error> {
        let clusters = length.div_ceil(1 << bits);
        if clusters > MAX_CLUSTERS {
            return Err(Error::Unchecked("file"));
        }
        Ok(Self {
            bits,
            length,
            few: vec![0; clusters as usize],
            many: HashMap::new(),
            copied: vec![0; clusters.div_ceil(64) as usize],
        })
    }

    /// Counts `times` references to the clusters of `len` bytes from `at` on.
    fn add(&mut self, at: u64, len: u64, times: u64) -> Result<(), Error> {
        if at >= self.length {
            return Err(Error::CutOff { length: self.length, at });
        }
        for cluster in at >> self.bits..=(at + len.max(1) - 1) >> self.bits {
            let Some(few) = self.few.get_mut(cluster as usize) else {
                return Err(Error::CutOff { length: self.length, at: cluster << self.bits });
            };
            match u64::from(*few) + times {
                sum if *few < u8::MAX && sum < u8::MAX.into() => *few = sum as u8,
                sum => {
                    *self.many.entry(cluster).or_insert(sum - times) += times;
                    *few = u8::MAX;
                }
            }
        }
        Ok(())
    }

    /// Counts `times` references to the cluster at `at`, which a table names.
    fn add_cluster(&mut self, at: u64, times: u64, copied: bool) -> Result<(), Error> {
        if at & ((1 << self.bits) - 1) != 0 {
            return Err(Error::Unaligned(at));
        }
        self.add(at, 1, times)?;
        let cluster = at >> self.bits;
        self.copied[(cluster / 64) as usize] |= u64::from(copied) << (cluster % 64);
        Ok(())
    }

    fn of(&self, cluster: u64) -> u64 {
        match self.few.get(cluster as usize) {
            Some(&u8::MAX) => self.many[&cluster],
            few => few.copied().unwrap_or(0).into(),
        }
    }

    fn is_copied(&self, cluster: u64) -> bool {
        self.copied.get((cluster / 64) as usize).is_some_and(|bits| bits >> (cluster % 64) & 1 != 0)
    }
}

/// Checks that a writer of the image in `file` overwrites nothing that is in use. Raises refcounts that
/// are too low, and returns their number.
///
/// # Errors
/// A refcount cannot be raised, or the tables are damaged, or too large to tell.
pub(super) fn check_counts(file: &File, header: &Header) -> Result<u64, Error> {
    let tables = Tables::read(file, header)?;
    let bits = header.cluster.ilog2();
    let mut references = References::new(file_size(file)?, bits)?;
    references.add(0, 1, 1)?;
    // How often each L2 table is referenced, and whether the guest's L1 table does so.
    let mut l2 = HashMap::new();
    let mut l1_bytes = 0;
    for (at, count, active) in [(tables.l1, tables.l1_size, true)]
        .into_iter()
        .chain(snapshots(file, &tables, &mut references)?.into_iter().map(|(at, count)| (at, count, false)))
    {
        let len = u64::from(count) * 8;
        l1_bytes += len;
        if l1_bytes > MAX_L1_BYTES {
            return Err(Error::Unchecked("L1 tables"));
        }
        if len == 0 {
            continue;
        }
        references.add(at, len, 1)?;
        for entry in entries(&read(file, at, len)?).filter(|entry| entry & OFFSET != 0) {
            let at = entry & OFFSET;
            references.add_cluster(at, 1, active && entry & COPIED != 0)?;
            let (times, is_active) = l2.entry(at).or_insert((0u64, false));
            (*times, *is_active) = (*times + 1, *is_active | active);
        }
    }
    if l2.len() as u64 * header.cluster > MAX_L2_BYTES {
        return Err(Error::Unchecked("L2 tables"));
    }
    // The clusters of data may be in another file.
    if !header.data_file {
        let mut l2: Vec<_> = l2.into_iter().collect();
        l2.sort_unstable();
        for (at, (times, active)) in l2 {
            for entry in entries(&read(file, at, header.cluster)?) {
                if entry & COMPRESSED != 0 {
                    let shift = 62 - (bits - 8);
                    let at = entry & ((1 << shift) - 1);
                    let sectors = ((entry & (COMPRESSED - 1)) >> shift) + 1;
                    references.add(at, sectors * 512 - at % 512, times)?;
                } else if entry & OFFSET != 0 {
                    references.add_cluster(entry & OFFSET, times, active && entry & COPIED != 0)?;
                }
            }
        }
    }
    references.add(tables.refcounts, tables.refcounts_size.max(1), 1)?;
    compare(file, &tables, references)
}

/// Counts the references to the table of snapshots. Returns where their L1 tables are, and how many
/// entries those have.
fn snapshots(file: &File, tables: &Tables, references: &mut References) -> Result<Vec<(u64, u32)>, Error> {
    let (mut found, mut at) = (Vec::new(), tables.snapshots_at);
    for _ in 0..tables.snapshots {
        let bytes = read(file, at, SNAPSHOT as u64)?;
        let word =
            |at: usize, len| bytes[at..at + len].iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
        found.push((word(0, 8), word(8, 4) as u32));
        // The sizes of its name, its number in letters, and more data.
        at += (SNAPSHOT as u64 + word(12, 2) + word(14, 2) + word(36, 4)).next_multiple_of(8);
        if at - tables.snapshots_at > MAX_SNAPSHOT_BYTES {
            return Err(Error::Unchecked("table of snapshots"));
        }
    }
    if !found.is_empty() {
        references.add(tables.snapshots_at, at - tables.snapshots_at, 1)?;
    }
    Ok(found)
}

/// Checks that a cluster that is written in place has one of the `references`, and that no more than
/// [`MAX_LEAKED`] clusters have none and count as used. Then raises each refcount that is lower than
/// the number of references. Returns how many were raised.
fn compare(file: &File, tables: &Tables, mut references: References) -> Result<u64, Error> {
    let cluster = 1u64 << references.bits;
    let each = (cluster * 8) >> tables.refcount_order;
    let table = read(file, tables.refcounts, tables.refcounts_size)?;
    let blocks: Vec<u64> = entries(&table).map(|entry| entry & OFFSET).collect();
    for (number, &at) in blocks.iter().enumerate().filter(|(_, at)| **at != 0) {
        if number as u64 * each > MAX_CLUSTERS {
            return Err(Error::Unchecked("refcounts"));
        }
        references.add_cluster(at, 1, false)?;
        // The refcounts would count each other.
        if references.of(at >> references.bits) > 1 {
            return Err(Error::Block(at));
        }
    }
    let raised = pass(file, tables, &references, &blocks, false)?;
    // An image that is refused has not changed.
    if raised > 0 {
        pass(file, tables, &references, &blocks, true)?;
        file.sync_data()?;
    }
    Ok(raised)
}

/// Compares the refcounts in `blocks` with the `references`. Returns how many are too low. If `write`,
/// these are raised.
fn pass(
    file: &File,
    tables: &Tables,
    references: &References,
    blocks: &[u64],
    write: bool,
) -> Result<u64, Error> {
    let cluster = 1u64 << references.bits;
    let each = (cluster * 8) >> tables.refcount_order;
    let (mut leaked, mut raised) = (0, 0);
    let end = references.few.len() as u64;
    let numbers = 0..(blocks.len() as u64).max(end.div_ceil(each));
    for number in numbers {
        let place = blocks.get(number as usize).copied().filter(|&at| at != 0);
        let mut block = match place {
            None => Vec::new(),
            Some(at) => read(file, at, cluster)?,
        };
        let before = raised;
        for index in 0..each {
            let number = number * each + index;
            if block.is_empty() && number >= end {
                break;
            }
            let counted = if block.is_empty() { 0 } else { refcount(&block, index, tables.refcount_order) };
            let (used, at) = (references.of(number), number << references.bits);
            if used > 1 && references.is_copied(number) {
                return Err(Error::Shared { at, used });
            }
            if counted < used {
                if block.is_empty() || !set_refcount(&mut block, index, tables.refcount_order, used) {
                    return Err(Error::Refcount { at, counted, used });
                }
                raised += 1;
            }
            leaked += u64::from(used == 0 && counted > 0);
        }
        if leaked > MAX_LEAKED {
            return Err(Error::Leaked);
        }
        if let Some(at) = place.filter(|_| write && raised > before) {
            file.write_all_at(&block, at)?;
        }
    }
    Ok(raised)
}

/// The refcount with the number `index` in `block`. Each has 1 << `order` bits.
fn refcount(block: &[u8], index: u64, order: u32) -> u64 {
    let index = index as usize;
    if order < 3 {
        let each = 8 >> order;
        let byte = u64::from(block[index / each]);
        return byte >> ((index % each) << order) & ((1 << (1 << order)) - 1);
    }
    let len = 1 << (order - 3);
    block[index * len..][..len].iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
}

/// Changes that refcount to `count`. Returns false if its bits do not hold it.
fn set_refcount(block: &mut [u8], index: u64, order: u32, count: u64) -> bool {
    let (index, width) = (index as usize, 1 << order);
    if width < 64 && count >> width != 0 {
        return false;
    }
    if order < 3 {
        let each = 8 >> order;
        let shift = (index % each) << order;
        let byte = &mut block[index / each];
        *byte = *byte & !(((1 << width) - 1) << shift) as u8 | (count << shift) as u8;
    } else {
        let len = 1 << (order - 3);
        block[index * len..][..len].copy_from_slice(&count.to_be_bytes()[8 - len..]);
    }
    true
}

fn read(file: &File, at: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    read_or_zero(file, &mut bytes, at)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_all_sizes_are_read_as_they_were_written() {
        for order in 0..=6 {
            let (mut block, most) = (vec![0; 512], u64::MAX >> (64 - (1 << order)));
            let each = 4096 >> order;
            for index in 0..each {
                assert!(set_refcount(&mut block, index, order, most.min(index + 1)));
            }
            for index in 0..each {
                assert_eq!(refcount(&block, index, order), most.min(index + 1), "{order}, {index}");
            }
            assert!(set_refcount(&mut block, 1, order, 0));
            assert_eq!([0, 1, 2].map(|index| refcount(&block, index, order)), [1, 0, most.min(3)]);
            assert!(set_refcount(&mut block, 1, order, most));
            assert!(order == 6 || !set_refcount(&mut block, 1, order, most + 1));
        }
    }

    #[test]
    fn references_are_counted_beyond_a_byte() {
        let mut references = References::new(3 * 512 + 1, 9).unwrap();
        for times in [200, 54, 1, 1000] {
            references.add(700, 512, times).unwrap();
        }
        references.add_cluster(512, 7, true).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|cluster| references.of(cluster)), [0, 1262, 1255, 0, 0]);
        assert_eq!([0, 1, 2].map(|cluster| references.is_copied(cluster)), [false, true, false]);
        assert!(matches!(references.add_cluster(513, 1, false), Err(Error::Unaligned(513))));
        assert!(matches!(references.add(2048, 1, 1), Err(Error::CutOff { at: 2048, .. })));
        assert!(matches!(references.add(1536, 1000, 1), Err(Error::CutOff { at: 2048, .. })));
    }
}
