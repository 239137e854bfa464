//! The pages that a machine wanted first after a restore, in that order. The next restore uses this
//! hint and fetches these pages before all others.
//!
//! It is one file of the directory, `working-set`, written by the last recorded restore of any
//! point. Points of one machine want mostly the same pages. All numbers are little-endian:
//!
//! ```text
//! 8 bytes   VELLUMWS
//! 4         version, 1
//! 4         pages per entry: more than one if huge pages of a pool were fetched
//! 8         pages of the machine
//! 8         entries
//! 8 each    the first page
//! 4         CRC32C of everything before
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use vmm_sys_util::eventfd::EventFd;

use super::Error;
use super::layer::sum;
use vellum_sys::file;
use vellum_sys::guard::Naming;
use vellum_sys::host::table;

/// The name of the file.
pub const NAME: &str = "working-set";
const MAGIC: &[u8; 8] = b"VELLUMWS";
const VERSION: u32 = 1;
const HEAD: usize = 32;
const ENTRY: usize = 8;
const TAIL: usize = 4;
/// The maximum number of pages per entry: a huge page of 1 GiB.
const MAX_UNIT: u32 = 1 << 18;

/// A working set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    /// Pages per entry, a power of two.
    pub unit: u32,
    /// The number of pages of the machine.
    pub pages: u64,
    /// The first page of each entry, in the order in which they were wanted.
    pub firsts: Vec<u64>,
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many bytes")
}

impl WorkingSet {
    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + ENTRY * self.firsts.len() + TAIL);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.unit.to_le_bytes());
        bytes.extend(self.pages.to_le_bytes());
        bytes.extend((self.firsts.len() as u64).to_le_bytes());
        self.firsts.iter().for_each(|first| bytes.extend(first.to_le_bytes()));
        bytes.extend(sum(&bytes).to_le_bytes());
        bytes
    }

    /// Parses the output of [`Self::bytes`] for a machine of `pages` pages.
    ///
    /// # Errors
    /// The bytes are not a valid working set, or it belongs to another machine.
    pub fn parse(bytes: &[u8], pages: u64) -> Result<Self, Error> {
        let unfit = |what: String| Error::Unfit { file: NAME.into(), what };
        let damaged = |offset: usize, what: String| {
            Err(Error::Damaged { file: NAME.into(), offset: offset as u64, what })
        };
        if bytes.len() < HEAD + TAIL || !bytes.starts_with(MAGIC) {
            return Err(unfit("it is no working set of a snapshot".into()));
        }
        let version = u32::from_le_bytes(word(bytes, 8));
        if version != VERSION {
            return Err(unfit(format!("version {version}: this program knows {VERSION}")));
        }
        let (content, tail) = bytes.split_at(bytes.len() - TAIL);
        let (found, told) = (sum(content), u32::from_le_bytes(word(tail, 0)));
        if found != told {
            return damaged(content.len(), format!("its sum is {found:#010x}, not {told:#010x}"));
        }
        let unit = u32::from_le_bytes(word(bytes, 12));
        if !unit.is_power_of_two() || unit > MAX_UNIT {
            return damaged(12, format!("{unit} pages for each entry"));
        }
        let of = u64::from_le_bytes(word(bytes, 16));
        if of != pages {
            return Err(unfit(format!("it is of a machine of {of} pages, and this one has {pages}")));
        }
        let count = u64::from_le_bytes(word(bytes, 24));
        let entries = &content[HEAD..];
        if count.checked_mul(ENTRY as u64) != Some(entries.len() as u64) {
            return damaged(24, format!("{count} entries in {} bytes", entries.len()));
        }
        let mut firsts = Vec::with_capacity(entries.len() / ENTRY);
        for (at, entry) in entries.as_chunks::<ENTRY>().0.iter().enumerate() {
            let first = u64::from_le_bytes(*entry);
            if first >= pages || !first.is_multiple_of(u64::from(unit)) {
                return damaged(HEAD + at * ENTRY, format!("page {first} of {pages}"));
            }
            firsts.push(first);
        }
        let mut sorted = firsts.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|two| two[0] == two[1]) {
            return damaged(HEAD, format!("page {} is listed twice", twice[0]));
        }
        Ok(Self { unit, pages, firsts })
    }

    /// Reads and parses a file.
    ///
    /// # Errors
    /// As [`Self::parse`], and if the file cannot be read.
    pub fn read(file: &File, pages: u64) -> Result<Self, Error> {
        let len = file.metadata().map_err(Error::io(NAME, "its length"))?.len();
        // No page is listed twice.
        let most = (HEAD + TAIL) as u64 + pages.saturating_mul(ENTRY as u64);
        if len > most {
            let what = format!("it has {len} bytes, where a machine of {pages} pages has {most} at most");
            return Err(Error::Damaged { file: NAME.into(), offset: most, what });
        }
        let mut bytes = table(0, len).map_err(Error::io(NAME, "its size"))?;
        file.read_exact_at(&mut bytes, 0).map_err(Error::io(NAME, "reading it"))?;
        Self::parse(&bytes, pages)
    }
}

/// The unnamed file of a restore that is being recorded.
#[derive(Debug)]
pub struct Unnamed {
    file: File,
    written: EventFd,
}

impl Unnamed {
    /// Creates a file for the directory `dir`, and the data with which the process's guard names
    /// it.
    ///
    /// # Errors
    /// The file system does not support unnamed files, or this user may not write there.
    pub fn create(dir: &Path) -> Result<(Self, Naming), Error> {
        let place = dir.display().to_string();
        let what = "making the file of the working set";
        let file = file::unnamed(dir).map_err(Error::io(&place, what))?;
        let written =
            EventFd::new(vmm_sys_util::eventfd::EFD_CLOEXEC).map_err(Error::io(&place, "eventfd"))?;
        let naming = Naming::new(&file, &written, &dir.join(format!(".{NAME}.new")), &dir.join(NAME));
        let naming = naming.map_err(Error::io(&place, "naming the working set"))?;
        Ok((Self { file, written }, naming))
    }

    /// Writes `set` to disk and has the file named.
    ///
    /// # Errors
    /// A write fails. An earlier working set then stays.
    pub fn finish(mut self, set: &WorkingSet) -> io::Result<()> {
        self.file.write_all(&set.bytes())?;
        self.file.sync_all()?;
        self.written.write(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set() -> WorkingSet {
        WorkingSet { unit: 2, pages: 64, firsts: vec![62, 0, 8] }
    }

    #[test]
    fn what_is_written_is_read() {
        let written = set();
        assert_eq!(WorkingSet::parse(&written.bytes(), 64).unwrap(), written);
        let none = WorkingSet { firsts: Vec::new(), ..set() };
        assert_eq!(WorkingSet::parse(&none.bytes(), 64).unwrap(), none);
    }

    /// The first version's bytes, as committed with it.
    #[test]
    fn the_first_version_is_read() {
        let bytes = include_bytes!("../../../tests/golden/working-set-1");
        assert_eq!(WorkingSet::parse(bytes, 64).unwrap(), set());
        assert_eq!(set().bytes(), bytes);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let says = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = set().bytes();
            bytes.truncate(bytes.len() - TAIL);
            change(&mut bytes);
            bytes.extend(sum(&bytes).to_le_bytes());
            WorkingSet::parse(&bytes, 64).unwrap_err().to_string()
        };
        assert!(says(&|b| b[8] = 2).contains("version 2: this program knows 1"));
        assert!(says(&|b| b[12] = 3).contains("byte 12: 3 pages"));
        assert!(says(&|b| b[16] = 65).contains("of 65 pages, and this one has 64"));
        assert!(says(&|b| b[24] = 4).contains("byte 24: 4 entries in 24 bytes"));
        assert!(says(&|b| b[31] = 0x80).contains("entries in 24 bytes"));
        assert!(says(&|b| b[32] = 64).contains("byte 32: page 64 of 64"));
        assert!(says(&|b| b[40] = 1).contains("byte 40: page 1 of 64"));
        assert!(says(&|b| b[48] = 62).contains("page 62 is listed twice"));
        assert!(says(&|b| b.truncate(31)).contains("no working set"));
        let mut bytes = set().bytes();
        bytes[33] ^= 1;
        assert!(WorkingSet::parse(&bytes, 64).unwrap_err().to_string().contains("byte 56: its sum is"));
    }
}
