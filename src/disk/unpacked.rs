//! Caches decompressed clusters of a qcow2 image, the latest first. A read of 4 KiB from a
//! compressed cluster decompresses all of it, up to 2 MiB, and the next read is often in the same
//! cluster.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;

/// The size of the cache in bytes, or [`MIN_CLUSTERS`] clusters if those are larger.
const KEPT: u64 = 4 << 20;
/// A file system reader alternates between a directory, an inode and a file.
const MIN_CLUSTERS: u64 = 4;
/// The maximum number of clusters, because lookups search the list linearly.
const MAX_CLUSTERS: u64 = 32;

/// Decompressed clusters of one image.
pub(crate) struct Unpacked {
    /// The cluster size in bytes.
    cluster: u64,
    /// The offset of each cluster on the disk, and its bytes.
    clusters: RefCell<VecDeque<(u64, Vec<u8>)>>,
}

impl Unpacked {
    /// An empty cache for clusters of `cluster` bytes.
    pub(crate) fn new(cluster: u64) -> Self {
        Self { cluster, clusters: RefCell::default() }
    }

    /// Calls `with` with the disk's bytes from `at` to the end of its cluster. The disk has `size`
    /// bytes. `fill` reads a cluster that is not cached.
    ///
    /// # Errors
    /// Those of `fill`.
    pub(crate) fn read<T>(
        &self,
        at: u64,
        size: u64,
        fill: impl FnOnce(&mut [u8], u64) -> io::Result<()>,
        with: impl FnOnce(&[u8]) -> T,
    ) -> io::Result<T> {
        let start = at - at % self.cluster;
        let mut clusters = self.clusters.borrow_mut();
        let entry = match clusters.iter().position(|(kept, _)| *kept == start) {
            Some(0) => None,
            Some(index) => clusters.remove(index),
            None => {
                let most = (KEPT / self.cluster).clamp(MIN_CLUSTERS, MAX_CLUSTERS) as usize;
                // Reuse the memory of the oldest cluster.
                let mut bytes = if clusters.len() < most {
                    Vec::new()
                } else {
                    clusters.pop_back().map_or_else(Vec::new, |(_, bytes)| bytes)
                };
                bytes.resize(self.cluster.min(size - start) as usize, 0);
                fill(&mut bytes, start)?;
                Some((start, bytes))
            }
        };
        if let Some(entry) = entry {
            clusters.push_front(entry);
        }
        Ok(with(&clusters[0].1[(at - start) as usize..]))
    }

    /// Drops the clusters that overlap `len` bytes from `at` on, which are about to change.
    pub(crate) fn forget(&mut self, at: u64, len: u64) {
        let end = at.saturating_add(len);
        let clusters = self.clusters.get_mut();
        if !clusters.is_empty() {
            clusters.retain(|(start, bytes)| end <= *start || start + bytes.len() as u64 <= at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads from a disk whose bytes are the numbers of their clusters. Counts the decompressions
    /// in `fills`.
    fn read(unpacked: &Unpacked, fills: &mut u32, at: u64) -> (u8, usize) {
        let fill = |bytes: &mut [u8], start: u64| {
            *fills += 1;
            bytes.fill((start / unpacked.cluster) as u8);
            Ok(())
        };
        unpacked.read(at, (100 << 20) + 5, fill, |bytes| (bytes[0], bytes.len())).unwrap()
    }

    #[test]
    fn a_cluster_is_decompressed_once_while_it_is_kept() {
        let cluster = 2 << 20;
        let (unpacked, mut fills) = (Unpacked::new(cluster), 0);
        for at in [0, 4096, cluster - 1, 3 * cluster, 1, 3 * cluster + 9] {
            assert_eq!(read(&unpacked, &mut fills, at).0 as u64, at / cluster);
        }
        assert_eq!(fills, 2);
        // The fifth cluster replaces the oldest. The last cluster of the disk is short.
        for at in [5 * cluster, 6 * cluster, 7 * cluster, 0, 50 * cluster] {
            read(&unpacked, &mut fills, at);
        }
        assert_eq!(fills, 7);
        assert_eq!(read(&unpacked, &mut fills, 50 * cluster + 1), (50, 4));
        assert_eq!(fills, 7);
    }

    #[test]
    fn what_changes_is_read_again() {
        let cluster = 1 << 16;
        let (mut unpacked, mut fills) = (Unpacked::new(cluster), 0);
        read(&unpacked, &mut fills, cluster);
        unpacked.forget(0, cluster);
        unpacked.forget(2 * cluster, u64::MAX);
        read(&unpacked, &mut fills, cluster);
        assert_eq!(fills, 1);
        unpacked.forget(2 * cluster - 1, 1);
        read(&unpacked, &mut fills, cluster);
        assert_eq!(fills, 2);
    }

    #[test]
    fn a_cluster_that_cannot_be_read_is_not_kept() {
        let (unpacked, mut fills) = (Unpacked::new(512), 0);
        let damaged = |_: &mut [u8], _| Err(io::ErrorKind::InvalidData.into());
        assert!(unpacked.read(512, 4096, damaged, |_| ()).is_err());
        assert_eq!(read(&unpacked, &mut fills, 512), (1, 512));
        assert_eq!(fills, 1);
    }
}
