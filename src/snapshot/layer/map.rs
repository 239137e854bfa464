//! The map of a layer as whoever reads it has it: a machine may have far more memory than it has touched, and of what it has not there
//! is nothing here either.

use std::fs::File;
use std::mem::discriminant;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::{Digest, checksum, checksum_combine};

use super::{ENTRY, Page};
use crate::snapshot::Error;
use crate::sys::mmap::PAGE_SIZE;
use crate::sys::pagemap;

/// Pages whose entries are one page of the file.
const PART: u64 = PAGE_SIZE / ENTRY;
/// Parts that are read at once.
const AT_ONCE: u64 = 16;

/// What a layer has of each page, in parts; those are left out that have nothing.
#[derive(Debug)]
pub(super) struct Map {
    parts: Vec<Option<Box<[Page]>>>,
    /// How many pages there are.
    pub pages: u64,
}

impl Map {
    /// The map of so many `pages` in `file`, which is as long, is called `name` and has this sum.
    ///
    /// # Errors
    /// Where it cannot be read, or is not what was written.
    pub fn read(file: &File, name: &str, pages: u64, crc: u32) -> Result<Self, Error> {
        let (bytes, parts) = (pages * ENTRY, pages.div_ceil(PART));
        let mut runs = Vec::new();
        if pagemap::data(file, 0, parts, |run| runs.push(run)).is_err() {
            // Where the file system does not tell, all of it is looked at.
            runs.clear();
            runs.push(0..parts);
        }
        let mut this = Self { parts: vec![None; parts as usize], pages };
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
                    match decoded(part) {
                        Ok(entries) => this.parts[number as usize] = entries,
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

    /// What there is of a page.
    pub fn get(&self, page: u64) -> Page {
        let part = &self.parts[(page / PART) as usize];
        part.as_ref().map_or(Page::Absent, |entries| entries[(page % PART) as usize])
    }

    /// Where the pages from `pages.start` on end of which there is the same as of that one: absent, zero, or present.
    pub fn alike(&self, pages: Range<u64>) -> u64 {
        let kind = discriminant(&self.get(pages.start));
        let mut at = pages.start;
        while at < pages.end {
            let end = pages.end.min((at / PART + 1) * PART);
            match &self.parts[(at / PART) as usize] {
                Some(entries) => {
                    let part = &entries[(at % PART) as usize..][..(end - at) as usize];
                    if let Some(other) = part.iter().position(|page| discriminant(page) != kind) {
                        return at + other as u64;
                    }
                }
                None if discriminant(&Page::Absent) != kind => return at,
                None => {}
            }
            at = end;
        }
        pages.end
    }

    /// The first page from `page` on in a part that has something; how many pages there are, where there is none.
    pub fn skip(&self, page: u64) -> u64 {
        let parts = self.parts.iter().enumerate().skip((page / PART) as usize);
        let next = parts.filter(|(_, part)| part.is_some()).map(|(number, _)| number as u64 * PART).next();
        next.map_or(self.pages, |first| first.max(page))
    }
}

/// The sum of so many bytes that are zero, none of which is looked at: a hole may be larger than all that there is.
fn sum_of_zeroes(bytes: u64) -> u64 {
    let (pages, rest) = (bytes / PAGE_SIZE, (bytes % PAGE_SIZE) as usize);
    let zeroes = [0; PAGE_SIZE as usize];
    let page = checksum(Crc32Iscsi, &zeroes);
    let (mut sum, mut done) = (0, 0);
    // As many pages as the bits of their number say, from the highest on: what there is twice, and one more.
    for bit in (0..u64::BITS - pages.leading_zeros()).rev() {
        (sum, done) = (checksum_combine(Crc32Iscsi, sum, sum, done), 2 * done);
        if pages >> bit & 1 == 1 {
            (sum, done) = (checksum_combine(Crc32Iscsi, sum, page, PAGE_SIZE), done + PAGE_SIZE);
        }
    }
    checksum_combine(Crc32Iscsi, sum, checksum(Crc32Iscsi, &zeroes[..rest]), rest as u64)
}

/// The entries of a part, if it has any that say something; or the offset of one that is none, and what it is.
fn decoded(part: &[u8]) -> Result<Option<Box<[Page]>>, (u64, u64)> {
    let entries = part.as_chunks::<{ ENTRY as usize }>().0.iter().map(|entry| u64::from_le_bytes(*entry));
    let pages: Box<[Page]> = (0..)
        .zip(entries)
        .map(|(index, entry)| Page::decode(entry).ok_or((index * ENTRY, entry)))
        .collect::<Result<_, _>>()?;
    Ok(pages.iter().any(|page| *page != Page::Absent).then_some(pages))
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
