//! `/proc/self/pagemap` shows which pages of a private mapping are populated, in memory or in swap
//! (Documentation/admin-guide/mm/pagemap.rst). lseek(2) with SEEK_DATA shows which parts of a file
//! in memory have content. Neither populates a page, as reading it would.
//!
//! A page that was never written reads as zero, with or without an entry.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use super::mmap::{Mapping, PAGE_SIZE, host_page};

#[allow(
    missing_docs,
    reason = "the macro makes a function that cannot be documented; include/uapi/linux/fs.h does it"
)]
mod numbers {
    use vmm_sys_util::ioctl_iowr_nr;

    ioctl_iowr_nr!(PAGEMAP_SCAN, 0x66, 16, super::Scan);
}

/// `struct pm_scan_arg`.
#[derive(Debug, Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `PAGE_IS_FILE`, `PAGE_IS_PRESENT`, `PAGE_IS_SWAPPED`, `PAGE_IS_PFNZERO`.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_PFNZERO: u64 = 1 << 5;

/// Bits 62 and 63 of an entry: the page is in swap, or in memory.
const THERE: u64 = 3 << 62;
/// Bit 61 of an entry: a file's page, or shared.
const OF_FILE: u64 = 1 << 61;
/// The sandbox knows this size from the request's number (`sandbox/ioctls.rs`).
const _: () = assert!(size_of::<Scan>() == 96);
/// Regions or entries per call.
const REGIONS: usize = 512;
const ENTRIES: usize = 4096;

/// The file. It is opened before a sandbox that would refuse it.
#[derive(Debug)]
pub struct Pagemap(File);

/// Which pages are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// All that are there.
    There,
    /// Those that are no file's.
    Parted,
}

impl Pagemap {
    /// Opens it. Fails without `/proc`.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Calls `found` with the populated pages among the `pages` pages of `mapping` from byte
    /// `offset` on. Runs come in ascending order, in pages relative to `offset`. A page that was
    /// only read shows the kernel's zero page. It does not count as populated if the kernel can
    /// tell (Linux 6.7).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn there(
        &self,
        mapping: &Mapping,
        offset: u64,
        pages: u64,
        found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        self.find(Which::There, mapping, offset, pages, found)
    }

    /// The same of the pages that have parted from the file which `mapping` shows privately: this
    /// process has written to them, and they are its own. With huge pages of a pool, all of each.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn parted(
        &self,
        mapping: &Mapping,
        offset: u64,
        pages: u64,
        found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        self.find(Which::Parted, mapping, offset, pages, found)
    }

    fn find(
        &self,
        which: Which,
        mapping: &Mapping,
        offset: u64,
        pages: u64,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let start = mapping.as_ptr() as u64 + offset;
        let end = start + pages * PAGE_SIZE;
        // The kernel reports host pages, which may reach beyond the range.
        let mut found = |there: Range<u64>| {
            let (from, to) = (there.start.max(start), there.end.min(end));
            if from < to {
                found((from - start) / PAGE_SIZE..(to - start) / PAGE_SIZE);
            }
        };
        let whole = start / host_page() * host_page()..end.next_multiple_of(host_page());
        match Self::scan(&self.0, which, whole.clone(), &mut found) {
            // Linux before 6.7.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                Self::read(&self.0, which, whole, &mut found)
            }
            result => result,
        }
    }

    /// Calls `found` with the addresses of such pages in `range`, in whole host pages, with
    /// PAGEMAP_SCAN.
    fn scan(
        file: &File,
        which: Which,
        range: Range<u64>,
        found: &mut dyn FnMut(Range<u64>),
    ) -> io::Result<()> {
        let Range { start, end } = range;
        let but = match which {
            Which::There => IS_PFNZERO,
            Which::Parted => IS_FILE,
        };
        let mut regions = [Region::default(); REGIONS];
        let mut at = start;
        while at < end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start: at,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: REGIONS as u64,
                category_inverted: but,
                category_mask: but,
                category_anyof_mask: IS_PRESENT | IS_SWAPPED,
                return_mask: IS_PRESENT,
                ..Scan::default()
            };
            // SAFETY: the argument is a pm_scan_arg. The kernel writes to it and writes at most
            // `vec_len` regions to `vec`. Both are ours. No flag is set that would change the
            // mapping.
            let count = unsafe { ioctl_with_mut_ref(file, numbers::PAGEMAP_SCAN(), &mut scan) };
            let Ok(count) = usize::try_from(count) else { return Err(io::Error::last_os_error()) };
            for region in &regions[..count.min(REGIONS)] {
                found(region.start..region.end);
            }
            if scan.walk_end <= at {
                return Err(io::Error::other("PAGEMAP_SCAN does not advance"));
            }
            at = scan.walk_end;
        }
        Ok(())
    }

    /// Like `scan`, entry by entry.
    fn read(
        file: &File,
        which: Which,
        range: Range<u64>,
        found: &mut dyn FnMut(Range<u64>),
    ) -> io::Result<()> {
        let first = range.start / host_page();
        let pages = range.end / host_page() - first;
        let mut buffer = vec![0; ENTRIES * 8];
        let mut page = 0;
        while page < pages {
            let count = (pages - page).min(ENTRIES as u64);
            let bytes = &mut buffer[..count as usize * 8];
            file.read_exact_at(bytes, (first + page) * 8)?;
            let (entries, _) = bytes.as_chunks::<8>();
            let there = |index: &u64| {
                let entry = u64::from_ne_bytes(entries[*index as usize]);
                entry & THERE != 0 && (which == Which::There || entry & OF_FILE == 0)
            };
            let mut at = 0;
            while let Some(begin) = (at..count).find(there) {
                at = (begin..count).find(|index| !there(index)).unwrap_or(count);
                found((first + page + begin) * host_page()..(first + page + at) * host_page());
            }
            page += count;
        }
        Ok(())
    }
}

/// Calls `found` with the pages that have content, among the `pages` pages of `file` from byte
/// `offset` on. For files in memory these are the pages in memory or in swap. Runs come in
/// ascending order, in pages relative to `offset`.
///
/// # Errors
/// The kernel's error: EINVAL if the file system does not support it.
pub fn data(file: &File, offset: u64, pages: u64, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
    let seek = |at: u64, whence| {
        // SAFETY: takes numbers only. The file's position is not used, because the file is accessed
        // through mappings.
        let at = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
        u64::try_from(at).map_err(|_| io::Error::last_os_error())
    };
    let end = offset + pages * PAGE_SIZE;
    let mut at = offset;
    while at < end {
        let start = match seek(at, libc::SEEK_DATA) {
            // Only a hole is left.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
            start => start?,
        };
        if start >= end {
            break;
        }
        at = seek(start, libc::SEEK_HOLE)?.min(end);
        found((start.max(offset) - offset) / PAGE_SIZE..(at - offset).div_ceil(PAGE_SIZE));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::mmap::{self, Pages, Source};

    const PAGES: u64 = 2000;

    fn touch(mapping: &Mapping, pages: impl IntoIterator<Item = u64>) {
        pages.into_iter().for_each(|page| mapping.words()[page as usize * 512].store(1, Ordering::Relaxed));
    }

    #[test]
    fn pages_that_were_written_are_there_and_no_others() {
        let mapping = Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap();
        mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
        touch(&mapping, [0, 5, 6, 7, 1999]);
        // More runs than one call can return.
        touch(&mapping, (10..1900).step_by(2));
        // The kernel's page of zeroes.
        assert_eq!(mapping.words()[1950 * 512].load(Ordering::Relaxed), 0);
        let pagemap = Pagemap::open().unwrap();
        let mut expected: Vec<Range<u64>> = std::iter::once(1..4).collect();
        expected.extend((10..1900).step_by(2).map(|page| page - 4..page - 3));
        let first = mapping.as_ptr() as u64 + 4 * PAGE_SIZE;
        let addresses = |pages: u64| first..first + pages * PAGE_SIZE;
        let page = |run: Range<u64>| (run.start - first) / PAGE_SIZE..(run.end - first) / PAGE_SIZE;
        let mut runs = Vec::new();
        Pagemap::read(&pagemap.0, Which::There, addresses(1900), &mut |run| runs.push(page(run))).unwrap();
        assert_eq!(runs, expected);
        runs.clear();
        pagemap.there(&mapping, 4 * PAGE_SIZE, 1900, |run| runs.push(run)).unwrap();
        assert_eq!(runs, expected);
        let mut scanned = Vec::new();
        match Pagemap::scan(&pagemap.0, Which::There, addresses(1996), &mut |run| scanned.push(page(run))) {
            Ok(()) => {
                // The page of zeroes is not reported. The entries cannot distinguish it from other
                // pages.
                expected.push(1995..1996);
                assert_eq!(scanned, expected);
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "{error}");
                println!("not tested here: PAGEMAP_SCAN (Linux 6.7)");
            }
        }
    }

    #[test]
    fn what_has_parted_from_a_file_is_told_from_what_shows_it() {
        let file = mmap::memfd(c"vellum-test", PAGES * PAGE_SIZE, None).unwrap();
        let shared = Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, Source::Shared(&file)).unwrap();
        touch(&shared, [0, 1, 2, 900]);
        let source = Source::Private { file: &file, pages: Pages::Small };
        let mapping = Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, source).unwrap();
        mapping.advise(libc::MADV_NOHUGEPAGE).unwrap();
        let pagemap = Pagemap::open().unwrap();
        let told = |offset: u64, pages| {
            let mut runs = Vec::new();
            pagemap.parted(&mapping, offset * PAGE_SIZE, pages, |run| runs.push(run)).unwrap();
            let start = mapping.as_ptr() as u64 + offset * PAGE_SIZE;
            let (mut read, all) = (Vec::new(), start..start + pages * PAGE_SIZE);
            let page = |run: Range<u64>| (run.start - start) / PAGE_SIZE..(run.end - start) / PAGE_SIZE;
            Pagemap::read(&pagemap.0, Which::Parted, all, &mut |run| read.push(page(run))).unwrap();
            assert_eq!(runs, read);
            runs
        };
        // What is only read stays the file's, be it content or a hole.
        let words = [0, 1, 5].map(|page| mapping.words()[page * 512].load(Ordering::Relaxed));
        assert_eq!((words, told(0, PAGES)), ([1, 1, 0], Vec::new()));
        touch(&mapping, [1, 7, 8, 1999]);
        assert_eq!(told(0, PAGES), [1..2, 7..9, 1999..2000]);
        assert!(told(8, 1991).into_iter().eq(std::iter::once(0..1)));
        // Given back, a page shows the file again.
        mapping.advise_range(7 * PAGE_SIZE, PAGE_SIZE, libc::MADV_DONTNEED).unwrap();
        assert_eq!(told(0, 100), [1..2, 8..9]);
    }

    #[test]
    fn a_file_in_memory_has_data_where_it_was_written() {
        let file = mmap::memfd(c"vellum-test", PAGES * PAGE_SIZE, None).unwrap();
        let mapping = Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, Source::Shared(&file)).unwrap();
        let _ = mapping.advise(libc::MADV_NOHUGEPAGE);
        let told = |offset: u64, pages| {
            let mut runs = Vec::new();
            data(&file, offset * PAGE_SIZE, pages, |run| runs.push(run)).unwrap();
            runs
        };
        assert!(told(0, PAGES).is_empty());
        touch(&mapping, [0, 5, 6, 7, 1999]);
        assert_eq!(told(0, PAGES), [0..1, 5..8, 1999..2000]);
        assert!(told(6, 1993).into_iter().eq(std::iter::once(0..2)));
        assert!(told(8, 1991).is_empty());
    }
}
