//! The map of a layer for readers: the kind of each page without its checksum, which is read with
//! the page. A machine may have far more memory than it has touched. Untouched memory takes no
//! space here either.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::{Digest, checksum, checksum_combine};

use super::ENTRY;
use crate::snapshot::Error;
use vellum_sys::host::table;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap;

/// The number of pages whose entries fill one page of the file.
const PART: u64 = PAGE_SIZE / ENTRY;
/// The number of parts read at once.
const AT_ONCE: u64 = 16;

/// What a layer has of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Nothing: the page is as in the point before. In a full point it was never touched and is as
    /// in a new machine.
    #[default]
    Absent,
    /// The page is zero.
    Zero,
    /// Its content, with this checksum.
    Present(u32),
}

/// What a layer has of a page, without the checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Absent,
    Zero,
    Present,
}

impl Page {
    fn kind(self) -> Kind {
        match self {
            Self::Absent => Kind::Absent,
            Self::Zero => Kind::Zero,
            Self::Present(_) => Kind::Present,
        }
    }

    pub(super) fn encode(self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Zero => 1 << 32,
            Self::Present(sum) => 2 << 32 | u64::from(sum),
        }
    }

    pub(super) fn decode(entry: u64) -> Option<Self> {
        match (entry >> 32, entry as u32) {
            (0, 0) => Some(Self::Absent),
            (1, 0) => Some(Self::Zero),
            (2, sum) => Some(Self::Present(sum)),
            _ => None,
        }
    }
}

/// Pages whose entries are one page of the file.
#[derive(Clone, Debug)]
enum Part {
    /// All pages are of this kind.
    Alike(Kind),
    /// The kind of each page.
    Each(Box<[Kind]>),
}

/// What a layer has of each page, in parts.
#[derive(Debug)]
pub(super) struct Map {
    parts: Vec<Part>,
    /// The number of pages.
    pub pages: u64,
}

impl Map {
    /// Reads the map of `pages` pages from `file`, which has the right size. `name` is its name and
    /// `crc` its checksum.
    ///
    /// # Errors
    /// The file cannot be read, or is not what was written.
    pub fn read(file: &File, name: &str, pages: u64, crc: u32) -> Result<Self, Error> {
        let (bytes, parts) = (pages * ENTRY, pages.div_ceil(PART));
        let mut runs = Vec::new();
        if pagemap::data(file, 0, parts, |run| runs.push(run)).is_err() {
            // If the file system does not report holes, all of the file is read.
            runs.clear();
            runs.push(0..parts);
        }
        let parts = table(Part::Alike(Kind::Absent), parts).map_err(Error::io(name, "its size"))?;
        let mut this = Self { parts, pages };
        let (mut sum, mut at) = (0, 0);
        let mut buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        let mut wrong = None;
        for run in runs {
            let (start, end) = (run.start * PAGE_SIZE, (run.end * PAGE_SIZE).min(bytes));
            sum = checksum_combine(Crc32Iscsi, sum, sum_of_zeroes(start - at), start - at);
            let mut all = Digest::new(Crc32Iscsi);
            for first in run.clone().step_by(AT_ONCE as usize) {
                let offset = first * PAGE_SIZE;
                let read = &mut buffer[..(end - offset).min(AT_ONCE * PAGE_SIZE) as usize];
                file.read_exact_at(read, offset).map_err(Error::io(name, "reading it"))?;
                all.update(read);
                for (number, part) in (first..).zip(read.chunks(PAGE_SIZE as usize)) {
                    match Part::decode(part) {
                        Ok(part) => this.parts[number as usize] = part,
                        Err((index, entry)) => {
                            let what = format!("{entry:#x} is no entry of a map");
                            wrong.get_or_insert((number * PAGE_SIZE + index, what));
                        }
                    }
                }
            }
            sum = checksum_combine(Crc32Iscsi, sum, all.finalize(), end - start);
            at = end;
        }
        let found = checksum_combine(Crc32Iscsi, sum, sum_of_zeroes(bytes - at), bytes - at) as u32;
        if found != crc {
            wrong = Some((0, format!("its sum is {found:#010x}, not {crc:#010x}")));
        }
        match wrong {
            None => Ok(this),
            Some((offset, what)) => Err(Error::Damaged { file: name.into(), offset, what }),
        }
    }

    /// The kind of a page.
    pub fn get(&self, page: u64) -> Kind {
        match &self.parts[(page / PART) as usize] {
            Part::Alike(kind) => *kind,
            Part::Each(kinds) => kinds[(page % PART) as usize],
        }
    }

    /// The end of the run of pages from `pages.start` on that have the same kind.
    pub fn alike(&self, pages: Range<u64>) -> u64 {
        let kind = self.get(pages.start);
        let mut at = pages.start;
        while at < pages.end {
            let end = pages.end.min((at / PART + 1) * PART);
            match &self.parts[(at / PART) as usize] {
                Part::Each(kinds) => {
                    let part = &kinds[(at % PART) as usize..][..(end - at) as usize];
                    if let Some(other) = part.iter().position(|other| *other != kind) {
                        return at + other as u64;
                    }
                }
                Part::Alike(other) if *other != kind => return at,
                Part::Alike(_) => {}
            }
            at = end;
        }
        pages.end
    }

    /// The first page from `page` on in a part that is not empty. The number of pages if there is
    /// none.
    pub fn skip(&self, page: u64) -> u64 {
        let parts = self.parts.iter().enumerate().skip((page / PART) as usize);
        let has_any = |part: &Part| !matches!(part, Part::Alike(Kind::Absent));
        let next = parts.filter(|(_, part)| has_any(part)).map(|(number, _)| number as u64 * PART).next();
        next.map_or(self.pages, |first| first.max(page))
    }
}

/// The checksum of this many zero bytes, without reading any: a hole may be larger than all memory.
fn sum_of_zeroes(bytes: u64) -> u64 {
    let (pages, rest) = (bytes / PAGE_SIZE, (bytes % PAGE_SIZE) as usize);
    let zeroes = [0; PAGE_SIZE as usize];
    let page = checksum(Crc32Iscsi, &zeroes);
    let (mut sum, mut done) = (0, 0);
    // Builds the number of pages bit by bit from the highest: doubles the length, then appends a
    // page if the bit is set.
    for bit in (0..u64::BITS - pages.leading_zeros()).rev() {
        (sum, done) = (checksum_combine(Crc32Iscsi, sum, sum, done), 2 * done);
        if pages >> bit & 1 == 1 {
            (sum, done) = (checksum_combine(Crc32Iscsi, sum, page, PAGE_SIZE), done + PAGE_SIZE);
        }
    }
    checksum_combine(Crc32Iscsi, sum, checksum(Crc32Iscsi, &zeroes[..rest]), rest as u64)
}

impl Part {
    /// Parses entries. An error has the offset of an invalid entry and its value.
    fn decode(entries: &[u8]) -> Result<Self, (u64, u64)> {
        let mut kinds = [Kind::Absent; PART as usize];
        let mut alike = true;
        let entries = entries.as_chunks::<{ ENTRY as usize }>().0;
        for (index, entry) in entries.iter().enumerate() {
            let entry = u64::from_le_bytes(*entry);
            kinds[index] = Page::decode(entry).ok_or((index as u64 * ENTRY, entry))?.kind();
            alike &= kinds[index] == kinds[0];
        }
        Ok(if alike { Self::Alike(kinds[0]) } else { Self::Each(kinds[..entries.len()].into()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_need_not_be_looked_at() {
        for bytes in [0, 1, 8, 4095, 4096, 4097, 12_288, 100_000, 1 << 20, (1 << 20) + 8] {
            assert_eq!(sum_of_zeroes(bytes), checksum(Crc32Iscsi, &vec![0; bytes as usize]), "{bytes}");
        }
    }
}
