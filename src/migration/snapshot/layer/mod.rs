//! The pages of one point: a file in which each has its place, and a map that says which of them are there.
//!
//! The map has 8 bytes for each page of the machine, in the order of its memslots, little-endian: in the upper half what of the page is
//! here (0 nothing, 1 that it is zero, 2 its content), in the lower half the CRC32C of the content. Pages that are not there or zero
//! are holes of the other file; of pages that are not there the map may be one, too, and whoever reads it does not look at its holes.
//!
//! Memory that a guest writes to meanwhile is copied before it is summed and written, as in a migration: a page that changes while it
//! is copied is written again, for its dirty bit was cleared before.

mod map;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::{Digest, checksum};

use self::map::{Kind, Map, Page};
use super::Error;
use vellum_kvm::memory::Slot;
use vellum_sys::file::{begin_write_back, punch, will_need};
use vellum_sys::host::{self, table};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::plant::{self, Mistake};

const PAGE: usize = PAGE_SIZE as usize;
/// Bytes of the map for a page.
pub(crate) const ENTRY: u64 = 8;
/// Pages that are written or read by one call.
pub const AT_ONCE: u64 = 256;
/// Pages that the disk is asked to take at once: enough for it to write at its full speed.
const BACK_AT_ONCE: u64 = 2048;
/// Pages whose entries in the map are written by one call.
const MAP_AT_ONCE: usize = 8192;
/// Pages between two that are wanted which cost less to read with them than to leave out.
const GAP: u64 = 16;

/// The sum of `bytes` as files have it.
pub fn sum(bytes: &[u8]) -> u32 {
    checksum(Crc32Iscsi, bytes) as u32
}

/// Whether this host has memory for the maps of a machine of so many pages, a number that a file tells.
///
/// # Errors
/// Where it has not.
pub fn check_room(name: &str, pages: u64) -> Result<(), Error> {
    let bytes = pages.saturating_mul(size_of::<Page>() as u64);
    host::check_room(bytes).map_err(|error| Error::Unfit {
        file: name.into(),
        what: format!("it tells of a machine of {pages} pages: {error}"),
    })
}

/// A layer that is being written.
pub struct Writer {
    ram: File,
    map: Vec<Page>,
    /// The first page of each region.
    firsts: Vec<u64>,
    buffer: Vec<u8>,
    /// Pages that follow each other and that the disk has not been asked to take.
    behind: Range<u64>,
}

impl Writer {
    /// A layer of `memory`, the machine's memslots in their order, into an empty file.
    ///
    /// # Errors
    /// Where the file cannot be made as long.
    pub fn new(ram: File, memory: &[Slot]) -> io::Result<Self> {
        let mut pages = 0;
        let mut firsts = Vec::with_capacity(memory.len());
        for slot in memory {
            firsts.push(pages);
            pages += slot.pages();
        }
        Ok(Self { firsts, ..Self::of_pages(ram, pages)? })
    }

    /// A layer of a machine of so many pages, which are no memory: they are [stored](Self::store).
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn of_pages(ram: File, pages: u64) -> io::Result<Self> {
        let map = table(Page::Absent, pages)?;
        ram.set_len(pages * PAGE_SIZE)?;
        let buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        Ok(Self { ram, map, firsts: Vec::new(), buffer, behind: 0..0 })
    }

    /// Where the content of the pages `run` of the machine, [`AT_ONCE`] at most, is put before they are [stored](Self::store).
    ///
    /// # Panics
    /// Where they are more.
    pub fn buffer(&mut self, run: &Range<u64>) -> &mut [u8] {
        &mut self.buffer[..((run.end - run.start) * PAGE_SIZE) as usize]
    }

    /// Writes the pages `run` of region `region`, which is `slot`; gives the bytes that went into the file.
    ///
    /// # Errors
    /// Where a write fails, for lack of space above all.
    ///
    /// # Panics
    /// Where the region has no such pages.
    pub fn write(&mut self, region: usize, slot: &Slot, run: Range<u64>) -> io::Result<u64> {
        assert!(run.end <= slot.pages(), "pages {run:?} of {slot:?}");
        let (mut written, mut first) = (0, run.start);
        while first < run.end {
            let end = run.end.min(first + AT_ONCE);
            let (pages, _) = self.buffer(&(first..end)).as_chunks_mut::<PAGE>();
            for (page, content) in (first..).zip(pages) {
                slot.mapping().copy_to(slot.offset() + page * PAGE_SIZE, content);
            }
            let before = plant::is(Mistake::LayerOffByASlot);
            let at = self.firsts[region - usize::from(before && region > 0)];
            written += self.store(at + first..at + end)?;
            first = end;
        }
        Ok(written)
    }

    /// Pages `run` of region `region` were [written](Self::write) and will hardly be again: the disk is to take them while others are read
    /// and summed, [`BACK_AT_ONCE`] of them at a time.
    pub(crate) fn write_back(&mut self, region: usize, run: Range<u64>) {
        let first = self.firsts[region];
        let run = first + run.start..first + run.end;
        if self.behind.end == run.start {
            self.behind.end = run.end;
        } else {
            self.behind = run;
        }
        let pages = self.behind.end - self.behind.start;
        if pages >= BACK_AT_ONCE {
            begin_write_back(&self.ram, self.behind.start * PAGE_SIZE, pages * PAGE_SIZE);
            self.behind.start = self.behind.end;
        }
    }

    /// Writes what is in the [buffer](Self::buffer), the pages `run` of the machine; gives the bytes that went into the file.
    ///
    /// # Errors
    /// Where a write fails.
    pub fn store(&mut self, run: Range<u64>) -> io::Result<u64> {
        let at = run.start;
        let (pages, _) = self.buffer(&run).as_chunks::<PAGE>();
        let now: Vec<Page> = pages
            .iter()
            .map(|page| match page.iter().all(|byte| *byte == 0) {
                true => Page::Zero,
                false => Page::Present(sum(page)),
            })
            .collect();
        let (mut index, mut written) = (0, 0);
        while index < now.len() {
            let zero = now[index] == Page::Zero;
            let end = (index..now.len()).find(|&i| (now[i] == Page::Zero) != zero).unwrap_or(now.len());
            let offset = (at + index as u64) * PAGE_SIZE;
            if zero {
                let before = &self.map[at as usize + index..at as usize + end];
                if before.iter().any(|page| matches!(page, Page::Present(_))) {
                    punch(&self.ram, offset, (end - index) as u64 * PAGE_SIZE)?;
                }
            } else {
                let span = &self.buffer[index * PAGE..end * PAGE];
                self.ram.write_all_at(span, offset)?;
                written += span.len() as u64;
            }
            self.map[at as usize + index..at as usize + end].copy_from_slice(&now[index..end]);
            index = end;
        }
        Ok(written)
    }

    /// Has everything on the disk, and writes the map: its sum, and how many pages are present and zero.
    ///
    /// # Errors
    /// Where a write fails.
    pub fn finish(self, map: &File) -> io::Result<Written> {
        let mut written = Written { pages: self.map.len() as u64, ..Written::default() };
        let (mut all, mut bytes) =
            (Digest::new(Crc32Iscsi), Vec::with_capacity(MAP_AT_ONCE * ENTRY as usize));
        map.set_len(written.pages * ENTRY)?;
        for (part, pages) in (0..).zip(self.map.chunks(MAP_AT_ONCE)) {
            bytes.clear();
            let before = written.zero + written.present;
            for page in pages {
                match page {
                    Page::Absent => (),
                    Page::Zero => written.zero += 1,
                    Page::Present(_) => written.present += 1,
                }
                bytes.extend(page.encode().to_le_bytes());
            }
            all.update(&bytes);
            // A machine may have far more memory than it has touched: of the rest the map is a hole.
            if written.zero + written.present > before {
                map.write_all_at(&bytes, part * MAP_AT_ONCE as u64 * ENTRY)?;
            }
        }
        written.map_crc = all.finalize() as u32;
        map.sync_all()?;
        self.ram.sync_all()?;
        Ok(written)
    }
}

/// What a layer came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// All pages of the machine.
    pub pages: u64,
    /// Those whose content is there.
    pub present: u64,
    /// Those that are zero.
    pub zero: u64,
    /// The sum of its map.
    pub map_crc: u32,
}

/// A layer that is read.
#[derive(Debug)]
pub struct Reader {
    ram: File,
    map: Map,
    /// The map's file, which has the sums.
    sums: File,
    /// What the names of its files end in.
    label: String,
}

impl Reader {
    /// The layer of the point whose files' names end in `label`, of a machine of so many `pages`, whose map has this sum.
    ///
    /// # Errors
    /// Where a file is shorter or longer than it must be, or the map is not what was written.
    pub fn new(ram: File, map: &File, label: &str, pages: u64, map_crc: u32) -> Result<Self, Error> {
        let (ram_name, map_name) = (format!("ram-{label}"), format!("map-{label}"));
        for (file, name, bytes) in
            [(&ram, &ram_name, pages.checked_mul(PAGE_SIZE)), (map, &map_name, pages.checked_mul(ENTRY))]
        {
            let len = file.metadata().map_err(Error::io(name, "its length"))?.len();
            if bytes != Some(len) {
                let what = format!("it has {len} bytes, and the manifest tells of {pages} pages");
                return Err(Error::Damaged { file: name.clone(), offset: len, what });
            }
        }
        let sums = map.try_clone().map_err(Error::io(&map_name, "another descriptor of it"))?;
        let map = Map::read(map, &map_name, pages, map_crc)?;
        Ok(Self { ram, map, sums, label: label.into() })
    }

    /// Its pages, each at its offset, and what it is called.
    pub fn file(&self) -> (&File, String) {
        (&self.ram, format!("ram-{}", self.label))
    }

    fn announce(&self, pages: &Range<u64>) {
        will_need(&self.ram, pages.start * PAGE_SIZE, (pages.end - pages.start) * PAGE_SIZE);
    }

    /// Reads the content of `pages`, all of which it has, into `to`, and compares their sums.
    ///
    /// # Errors
    /// Where a page is not what was written.
    ///
    /// # Panics
    /// Where `to` is of another size.
    pub fn read(&self, pages: Range<u64>, to: &mut [u8]) -> Result<(), Error> {
        assert_eq!(to.len() as u64, (pages.end - pages.start) * PAGE_SIZE);
        let ram = || format!("ram-{}", self.label);
        read_exactly(&self.ram, ram, to, pages.start * PAGE_SIZE)?;
        let mut entries = [0; (AT_ONCE * ENTRY) as usize];
        for (contents, first) in to.chunks(AT_ONCE as usize * PAGE).zip(pages.step_by(AT_ONCE as usize)) {
            let (contents, _) = contents.as_chunks::<PAGE>();
            let entries = &mut entries[..contents.len() * ENTRY as usize];
            read_exactly(&self.sums, || format!("map-{}", self.label), entries, first * ENTRY)?;
            let (entries, _) = entries.as_chunks::<{ ENTRY as usize }>();
            for (page, (content, entry)) in (first..).zip(contents.iter().zip(entries)) {
                let differs = Page::decode(u64::from_le_bytes(*entry)) != Some(Page::Present(sum(content)));
                if differs && !plant::is(Mistake::SumsUnchecked) {
                    let what = format!("page {page} of the machine is not the one that was written");
                    return Err(Error::Damaged { file: ram(), offset: page * PAGE_SIZE, what });
                }
            }
        }
        Ok(())
    }
}

/// Fills `to` with what `file` has at `offset`, which was as long when it was opened.
fn read_exactly(file: &File, name: impl Fn() -> String, to: &mut [u8], offset: u64) -> Result<(), Error> {
    file.read_exact_at(to, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            Error::Damaged { file: name(), offset, what: "it has become shorter".into() }
        }
        _ => Error::io(&name(), "reading it")(error),
    })
}

impl Reader {
    /// Reads all pages that it has; how many those are.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn verify(&self) -> Result<u64, Error> {
        let mut buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        let is_present = |page: u64| self.map.get(page) == Kind::Present;
        let (pages, mut at, mut read) = (self.map.pages, 0, 0);
        while let Some(first) = (at..pages).find(|page| is_present(*page)) {
            let most = pages.min(first + AT_ONCE);
            at = (first + 1..most).find(|page| !is_present(*page)).unwrap_or(most);
            self.read(first..at, &mut buffer[..((at - first) * PAGE_SIZE) as usize])?;
            read += at - first;
        }
        Ok(read)
    }
}

/// The layers of one point, the newest last.
#[derive(Debug)]
pub struct Layers(pub Vec<Reader>);

impl Layers {
    /// How many pages each has.
    pub fn pages(&self) -> u64 {
        self.0.first().map_or(0, |layer| layer.map.pages)
    }

    /// The layer that has page `page`, and what it has: `None` where none has.
    fn of(&self, page: u64) -> Option<(usize, Kind)> {
        let told = |(at, layer): (usize, &Reader)| {
            Some((at, layer.map.get(page))).filter(|(_, kind)| *kind != Kind::Absent)
        };
        self.0.iter().enumerate().rev().find_map(told)
    }

    /// Has the kernel begin to read what the layers have of `runs`, which ascend, and what lies between them where that is little.
    pub(crate) fn announce(&self, runs: impl Iterator<Item = Range<u64>>) {
        let mut span: Option<(&Reader, Range<u64>)> = None;
        for run in runs {
            let mut at = run.start;
            while let Some((part, from)) = self.next_of(at..run.end, u64::MAX) {
                at = part.end;
                let Some(layer) = from else { continue };
                match &mut span {
                    Some((same, span)) if ptr::eq(*same, layer) && part.start <= span.end + GAP => {
                        span.end = part.end;
                    }
                    _ => {
                        span.iter().for_each(|(layer, span)| layer.announce(span));
                        span = Some((layer, part));
                    }
                }
            }
        }
        span.iter().for_each(|(layer, span)| layer.announce(span));
    }

    /// The first pages of `pages` of which something is known, alike and in one layer, up to [`AT_ONCE`]: which, whether they are zero, and
    /// the layer.
    pub fn next(&self, pages: Range<u64>) -> Option<(Range<u64>, Option<&Reader>)> {
        self.next_of(pages, AT_ONCE)
    }

    /// The same up to `most`.
    pub(crate) fn next_of(&self, pages: Range<u64>, most: u64) -> Option<(Range<u64>, Option<&Reader>)> {
        let mut first = pages.start;
        let (layer, kind) = loop {
            // Where no layer has anything, no page has to be asked for.
            first = self.0.iter().map(|layer| layer.map.skip(first)).min()?;
            if first >= pages.end {
                return None;
            }
            match self.of(first) {
                Some(found) => break found,
                None => first += 1,
            }
        };
        let zero = kind == Kind::Zero;
        let alike = |page: u64| match self.of(page) {
            Some((_, Kind::Zero)) => zero,
            Some((at, _)) => !zero && at == layer,
            None => false,
        };
        let most = pages.end.min(first.saturating_add(most));
        let end = match &self.0[..] {
            [layer] => layer.map.alike(first..most),
            _ => (first + 1..most).find(|page| !alike(*page)).unwrap_or(most),
        };
        Some((first..end, (!zero).then(|| &self.0[layer])))
    }
}

#[cfg(test)]
mod tests;
