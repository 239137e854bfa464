//! The pages of one point: a sparse file with each page at its offset, and a map of the pages that
//! it has.
//!
//! The map has 8 bytes per page of the machine, in the order of its memslots, little-endian. The
//! upper half says what the file has of the page: 0 for nothing, 1 for a zero page, 2 for its
//! content. The lower half is the CRC32C of the content. Absent and zero pages are holes in the
//! page file. The map may have holes for absent pages too, and readers skip these.
//!
//! Memory that a guest writes to meanwhile is copied before it is checksummed and written, as in a
//! migration. A page that changes during its copy is written again, because its dirty bit was
//! cleared before.

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
/// Bytes of the map per page.
pub(crate) const ENTRY: u64 = 8;
/// The number of pages written or read by one call.
pub const AT_ONCE: u64 = 256;
/// The number of pages that are submitted for writeback at once: enough for the disk's full speed.
const BACK_AT_ONCE: u64 = 2048;
/// The number of pages whose map entries are written by one call.
const MAP_AT_ONCE: usize = 8192;
/// A gap of up to this many pages between wanted pages is cheaper to read than to skip.
const GAP: u64 = 16;

/// The checksum of `bytes` as stored in files.
pub fn sum(bytes: &[u8]) -> u32 {
    checksum(Crc32Iscsi, bytes) as u32
}

/// Checks that this host has memory for the maps of a machine of `pages` pages. A file states this
/// number.
///
/// # Errors
/// The host does not have it.
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
    /// Consecutive pages that have not been submitted for writeback.
    behind: Range<u64>,
}

impl Writer {
    /// Starts a layer of `memory`, the machine's memslots in order, in an empty file.
    ///
    /// # Errors
    /// The file cannot be extended to the required size.
    pub fn new(ram: File, memory: &[Slot]) -> io::Result<Self> {
        let mut pages = 0;
        let mut firsts = Vec::with_capacity(memory.len());
        for slot in memory {
            firsts.push(pages);
            pages += slot.pages();
        }
        Ok(Self { firsts, ..Self::of_pages(ram, pages)? })
    }

    /// Starts a layer of `pages` pages without memory. The caller [stores](Self::store) them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn of_pages(ram: File, pages: u64) -> io::Result<Self> {
        let map = table(Page::Absent, pages)?;
        ram.set_len(pages * PAGE_SIZE)?;
        let buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        Ok(Self { ram, map, firsts: Vec::new(), buffer, behind: 0..0 })
    }

    /// The buffer for the content of the machine's pages `run`, at most [`AT_ONCE`], before they
    /// are [stored](Self::store).
    ///
    /// # Panics
    /// `run` is longer.
    pub fn buffer(&mut self, run: &Range<u64>) -> &mut [u8] {
        &mut self.buffer[..((run.end - run.start) * PAGE_SIZE) as usize]
    }

    /// Writes the pages `run` of region `region`, which is `slot`. Returns how many bytes were
    /// written to the file.
    ///
    /// # Errors
    /// A write fails, usually for lack of space.
    ///
    /// # Panics
    /// The region has no such pages.
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

    /// Pages `run` of region `region` were [written](Self::write) and will probably not change.
    /// Submits them for writeback, [`BACK_AT_ONCE`] at a time, while other pages are read and
    /// checksummed.
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

    /// Writes the contents of the [buffer](Self::buffer), the machine's pages `run`. Returns how
    /// many bytes were written to the file.
    ///
    /// # Errors
    /// A write fails.
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

    /// Writes the map and syncs both files. Returns the map's checksum, and how many pages are
    /// present and zero.
    ///
    /// # Errors
    /// A write fails.
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
            // A machine may have far more memory than it has touched. Untouched memory is a hole in
            // the map.
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

/// The result of writing a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The number of pages of the machine.
    pub pages: u64,
    /// The number of pages with content.
    pub present: u64,
    /// The number of zero pages.
    pub zero: u64,
    /// The checksum of the map.
    pub map_crc: u32,
}

/// A layer that is read.
#[derive(Debug)]
pub struct Reader {
    ram: File,
    map: Map,
    /// The map's file, which has the checksums.
    sums: File,
    /// The suffix of its files' names.
    label: String,
}

impl Reader {
    /// Opens the layer of a point. `label` is the suffix of its files' names. The machine has
    /// `pages` pages, and `map_crc` is the map's checksum.
    ///
    /// # Errors
    /// A file has the wrong size, or the map is not what was written.
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

    /// The file of its pages, each at its offset, and the file's name.
    pub fn file(&self) -> (&File, String) {
        (&self.ram, format!("ram-{}", self.label))
    }

    fn announce(&self, pages: &Range<u64>) {
        will_need(&self.ram, pages.start * PAGE_SIZE, (pages.end - pages.start) * PAGE_SIZE);
    }

    /// Reads the content of `pages` into `to` and verifies the checksums. The layer must have all
    /// of them.
    ///
    /// # Errors
    /// A page is not what was written.
    ///
    /// # Panics
    /// `to` has another size.
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

/// Fills `to` with the bytes of `file` at `offset`. The file was long enough when it was opened.
fn read_exactly(file: &File, name: impl Fn() -> String, to: &mut [u8], offset: u64) -> Result<(), Error> {
    file.read_exact_at(to, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            Error::Damaged { file: name(), offset, what: "it has become shorter".into() }
        }
        _ => Error::io(&name(), "reading it")(error),
    })
}

impl Reader {
    /// Reads and verifies all its pages. Returns their number.
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
    /// The number of pages of each.
    pub fn pages(&self) -> u64 {
        self.0.first().map_or(0, |layer| layer.map.pages)
    }

    /// The newest layer that has page `page`, and what it has. `None` if no layer has it.
    fn of(&self, page: u64) -> Option<(usize, Kind)> {
        let told = |(at, layer): (usize, &Reader)| {
            Some((at, layer.map.get(page))).filter(|(_, kind)| *kind != Kind::Absent)
        };
        self.0.iter().enumerate().rev().find_map(told)
    }

    /// Tells the kernel to read the layers' pages of `runs`, which ascend. Small gaps are read with
    /// them.
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

    /// The first run of pages within `pages` that some layer has, at most [`AT_ONCE`]. All pages of
    /// the run are of one kind and in one layer. Returns that layer, or None for zero pages.
    pub fn next(&self, pages: Range<u64>) -> Option<(Range<u64>, Option<&Reader>)> {
        self.next_of(pages, AT_ONCE)
    }

    /// The same with at most `most` pages.
    pub(crate) fn next_of(&self, pages: Range<u64>, most: u64) -> Option<(Range<u64>, Option<&Reader>)> {
        let mut first = pages.start;
        let (layer, kind) = loop {
            // Skips parts that are empty in every layer.
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
