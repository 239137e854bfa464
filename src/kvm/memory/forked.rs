//! Memory of a forked machine. Its file becomes the base, which is never written again. This
//! machine and the machines made from it map the base privately, so each keeps its own writes.
//!
//! Anonymous memory has no file. It is copied once, into a file that becomes the base
//! ([`Memory::copy`], [`Memory::show`]). The child of a fork(2) would inherit it without a copy. But
//! such a child would also have this process's sandbox, which opens no device, and each fork would
//! copy all page tables while the guest stands still.
//!
//! The mapping parts from the file piece by piece, while the guest runs. A write to a piece that
//! has not parted goes to the file, and all machines share it. A write to a parted piece makes a
//! private copy of the page. A fork copies these pages ([`Memory::parted_pages`]).
//!
//! Once the first piece has parted, the file no longer holds all of this memory, so it is not
//! handed to other processes ([`Memory::shared_file`]). No piece parts twice: that would lose its
//! writes.
//!
//! A new machine copies the pages that differ from the base, or maps those that are many in a row
//! from the file of the fork, which is sealed too ([`Memory::map_layer`]). These differ from the base
//! as well, until there is another base.
//!
//! If many pages differ from the base, a new base is made ([`Memory::new_base`],
//! [`Memory::copy_parted`]). Later machines then share these pages too. Memory shows it part by part
//! ([`Memory::show`]), each in a pause of its own. If the host refuses a part, memory shows two files,
//! and the next fork copies what was ever written to, as if it had no file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Backing, Error, Memory, MemoryConfig, Slot};
use crate::memory::plan::Space;
use vellum_sys::mmap::{self, Mapping, PAGE_SIZE, Pages, Source, host_page};
use vellum_sys::pagemap::{self, Pagemap};
use vellum_sys::plant::{self, Mistake};

/// The file that backs a memory, mapped shared or privately.
#[derive(Debug, Default)]
pub(super) struct Shared {
    base: Mutex<Base>,
    /// The bytes of the mapping that have parted from it, counted from the start.
    parted: AtomicU64,
}

/// A file and its number, which change together.
#[derive(Clone, Debug, Default)]
struct Base {
    /// The file, if all of the mapping shows it.
    file: Option<Arc<File>>,
    /// How many bases came before it.
    number: u64,
    /// The ranges of the mapping that map another file than the base, in ascending order.
    layers: Arc<Vec<Range<u64>>>,
    /// The files that ranges of the mapping show if there is no `file`, in ascending order.
    parts: Vec<(Range<u64>, Arc<File>)>,
}

impl Base {
    /// The files that ranges of a mapping of `size` bytes show, in ascending order.
    fn files(&self, size: u64) -> Vec<(Range<u64>, Arc<File>)> {
        match &self.file {
            Some(file) => vec![(0..size, file.clone())],
            None => self.parts.clone(),
        }
    }

    /// The first `shown` bytes of a mapping of `size` bytes show `new`. The rest is as before.
    fn show(&mut self, new: &Arc<File>, shown: u64, size: u64) {
        let rest = |range: &Range<u64>| range.start.max(shown)..range.end.max(shown);
        let mut parts = vec![(0..shown, new.clone())];
        parts.extend(self.files(size).into_iter().map(|(range, file)| (rest(&range), file)));
        parts.retain(|(range, _)| !range.is_empty());
        let layers = self.layers.iter().map(rest).filter(|range| !range.is_empty()).collect();
        let number = self.number + u64::from(self.file.is_some());
        *self = Self { file: None, number, layers: Arc::new(layers), parts };
    }
}

impl Shared {
    /// For memory that maps `file` shared, or that has no file.
    pub(super) fn new(file: Option<File>) -> Self {
        let base = Base { file: file.map(Arc::new), ..Base::default() };
        Self { base: Mutex::new(base), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Base> {
        // The value is replaced as a whole, so a panic leaves it valid.
        self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A future base. It starts as a copy of the old base, if there is one.
#[derive(Debug)]
pub struct NewBase {
    file: Arc<File>,
    buffer: Vec<u8>,
    /// A mapping by which huge pages are put into the file.
    huge: Option<Mapping>,
    /// The piece that was written to last.
    piece: Option<u64>,
    /// The bytes of memory that show it, counted from the start.
    shown: u64,
}

impl NewBase {
    /// The bytes of memory that show it, counted from the start. A page there that is copied later
    /// would not be seen.
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// Copies `len` bytes at `at` of `mapping`. Asks `wanted` before each piece, and ends with its
    /// error.
    fn copy(
        &mut self,
        mapping: &Mapping,
        at: u64,
        len: u64,
        wanted: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let end = at + len;
        let mut at = at;
        while at < end {
            wanted()?;
            let piece = at / PIECE * PIECE;
            let len = (end.min(piece + PIECE) - at) as usize;
            mapping.copy_to(at, &mut self.buffer[..len]);
            self.write(at, len)?;
            at += len as u64;
        }
        Ok(())
    }

    /// Writes the first `len` bytes of the buffer, which are of one piece, to `at`. Pages of zeroes
    /// that the file does not have are left out: they would take memory.
    fn write(&mut self, at: u64, len: usize) -> io::Result<()> {
        const PAGE: usize = PAGE_SIZE as usize;
        let is_zero = |page: &[u8; PAGE]| *page == [0; PAGE];
        let piece = at / PIECE * PIECE;
        let mut at = at;
        for pages in self.buffer[..len].as_chunks().0.chunk_by(|one, two| is_zero(one) == is_zero(two)) {
            if is_zero(&pages[0]) {
                let mut there = Vec::new();
                pagemap::data(&self.file, at, pages.len() as u64, |run| there.push(run))?;
                for run in there {
                    let zeroes = &pages.as_flattened()[..(run.end - run.start) as usize * PAGE];
                    self.file.write_all_at(zeroes, at + run.start * PAGE_SIZE)?;
                }
            } else {
                if let Some(huge) = self.huge.as_ref().filter(|_| self.piece != Some(piece)) {
                    // One page fault brings a huge page where the host has them for files in memory.
                    huge.populate(piece, host_page())?;
                    self.piece = Some(piece);
                }
                self.file.write_all_at(pages.as_flattened(), at)?;
            }
            at += pages.as_flattened().len() as u64;
        }
        Ok(())
    }

    /// The file, to which nothing is written any more.
    fn freeze(self) -> io::Result<Arc<File>> {
        let Self { file, huge, .. } = self;
        drop(huge);
        mmap::freeze(&file)?;
        Ok(file)
    }
}

/// The bytes that part at a time, except with huge pages of the pool. A page fault waits until the
/// current piece has parted.
const PIECE: u64 = 2 << 20;

impl Backing {
    /// The backings whose machines can be forked, for messages.
    pub const FORKED: &str = "memfd, shared-hugetlb-2m, anonymous and thp can be";

    /// Whether a machine with such memory can be forked.
    pub fn can_be_forked(self) -> bool {
        self.can_be_handed_over() || self.is_copied()
    }

    /// The backing of memory that shows `base`, whose owner has memory of backing `theirs`.
    ///
    /// # Errors
    /// As for [`Backing::of_handed`].
    pub fn of_base(base: &File, theirs: Self) -> Result<Self, Error> {
        match Self::of_handed(base)? {
            Self::Memfd if theirs == Self::Thp => Ok(theirs),
            handed => Ok(handed),
        }
    }

    /// Whether a first fork copies such memory.
    fn is_copied(self) -> bool {
        matches!(self, Self::Anonymous | Self::Thp)
    }

    /// The pages of its file.
    pub fn pages(self) -> Pages {
        match self {
            Self::SharedHugetlb(_) => Pages::Pool,
            Self::Thp => Pages::Transparent,
            _ => Pages::Small,
        }
    }
}

impl Memory {
    /// The file that this memory maps shared, if any: for userfaultfd's minor faults, and for
    /// handing to another process. `None` once the memory is forked.
    pub fn shared_file(&self) -> Option<Arc<File>> {
        self.file().filter(|_| !self.is_forked())
    }

    /// The file that this memory maps, shared or privately.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        self.shared.lock().file.clone()
    }

    /// The files that ranges of the mapping show, in ascending order. After a new base was shown in
    /// part, these are several.
    pub(super) fn files(&self) -> Vec<(Range<u64>, Arc<File>)> {
        self.shared.lock().files(self.config.size)
    }

    /// Whether it has begun to part from its file, or was made from another machine's base.
    pub fn is_forked(&self) -> bool {
        self.parted_bytes() > 0
    }

    fn parted_bytes(&self) -> u64 {
        self.shared.parted.load(Ordering::Acquire)
    }

    /// Checks that another process can be handed a descriptor of it.
    ///
    /// # Errors
    /// The reason why not, for the user.
    pub fn can_be_handed_over(&self) -> Result<(), String> {
        let backing = self.config.backing;
        if !backing.can_be_handed_over() {
            return Err(format!("its memory is {backing}, which no other process can map"));
        }
        if self.is_forked() {
            return Err("its memory was forked, and parts of it are this process's alone: no descriptor has all of it".into());
        }
        Ok(())
    }

    /// Checks that its machine can be forked.
    ///
    /// # Errors
    /// The reason why not, for the user.
    pub fn can_be_forked(&self) -> Result<(), String> {
        let backing = self.config.backing;
        let Some(file) = self.file() else {
            // Memory that shows two bases is copied.
            if !self.is_forked() && !backing.is_copied() {
                return Err(format!("its memory is {backing}, which cannot be forked: {}", Backing::FORKED));
            }
            return self.can_be_parted();
        };
        self.can_be_parted()?;
        match mmap::can_be_frozen(&file) {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err("its memory was made by a Vellum that cannot fork, and does not let its writes be sealed"
                    .into())
            }
            Err(error) => Err(format!("its memory: {error}")),
        }
    }

    fn can_be_parted(&self) -> Result<(), String> {
        if self.config.lock {
            return Err("its memory is locked, and private copies of it would not be".into());
        }
        // What a snapshot's files have is fetched first. A source may be gone.
        if self.mapping.is_kept() {
            return Err("part of its memory has not come yet".into());
        }
        Ok(())
    }

    /// Whether its content is to be copied into a first base: it has no file that could be one, or it
    /// shows two.
    pub fn is_without_file(&self) -> bool {
        self.file().is_none()
    }

    /// Parts the next piece from the file and returns whether any piece is left. The content stays.
    ///
    /// # Errors
    /// The host refuses, most likely for lack of huge pages. This piece and later ones stay shared.
    pub fn part(&self) -> io::Result<bool> {
        let (size, at) = (self.config.size, self.parted_bytes());
        let Some(file) = self.file().filter(|_| at < size) else { return Ok(false) };
        let pages = self.config.backing.pages();
        // With the pool's huge pages everything parts at once: either all private pages can be
        // reserved, or none is.
        let len = if pages == Pages::Pool { size } else { PIECE.min(size - at) };
        if plant::is(Mistake::PieceLeftShared) && at + len == size {
            self.shared.parted.store(size, Ordering::Release);
            return Ok(false);
        }
        self.map_piece(at, len, &file, pages)?;
        self.shared.parted.store(at + len, Ordering::Release);
        Ok(at + len < size)
    }

    /// Maps `len` bytes at `at` of `file` privately.
    fn map_piece(&self, at: u64, len: u64, file: &File, pages: Pages) -> io::Result<()> {
        static REFUSED: AtomicBool = AtomicBool::new(false);
        let is_second_half = at >= self.config.size / 2;
        if plant::is(Mistake::SecondHalfRefused) && is_second_half && !REFUSED.swap(true, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        self.mapping.part(at, len, file, pages)
    }

    /// Seals the file that it has parted from against writes. This may take seconds.
    ///
    /// # Errors
    /// Some of the memory has not parted, or another process has a writable mapping of the file.
    pub fn freeze_base(&self) -> io::Result<()> {
        let (file, _) = self.parted_file()?;
        if plant::is(Mistake::PieceLeftShared) { Ok(()) } else { mmap::freeze(&file) }
    }

    /// The base, sealed against writes, and its number.
    ///
    /// # Errors
    /// Some of the memory has not parted, or it is not sealed yet.
    pub fn base(&self) -> io::Result<(Arc<File>, u64)> {
        let (file, number) = self.parted_file()?;
        if !mmap::is_frozen(&file)? && !plant::is(Mistake::PieceLeftShared) {
            return Err(io::Error::other("the file that it has parted from is not sealed yet"));
        }
        Ok((file, number))
    }

    /// The file that all of it has parted from, with its number as a base.
    fn parted_file(&self) -> io::Result<(Arc<File>, u64)> {
        let Base { file, number, .. } = self.shared.lock().clone();
        let file = file.filter(|_| self.parted_bytes() == self.config.size);
        Ok((file.ok_or_else(|| io::Error::other("it has not parted from its file"))?, number))
    }

    /// Makes `file` a future base, which is empty and as long as memory. Copies the base to it, if
    /// there is one. The guest may run: the base is never written. Returns `None` for huge pages of
    /// the pool, which keep their base. Ends with the error of `wanted`, which is asked now and then.
    ///
    /// # Errors
    /// `file` cannot be a base, or the host lacks memory.
    pub fn new_base(&self, file: File, wanted: impl Fn() -> io::Result<()>) -> io::Result<Option<NewBase>> {
        let (size, pages) = (self.config.size, self.config.backing.pages());
        if pages == Pages::Pool {
            return Ok(None);
        }
        let unfit = |what: &str| io::Error::other(format!("the file for a new base {what}"));
        if file.metadata()?.len() != size {
            return Err(unfit("is not as long as memory"));
        }
        if !mmap::seals_hold(&file)? || !mmap::can_be_frozen(&file)? || mmap::is_frozen(&file)? {
            return Err(unfit("is not sealed as memory is"));
        }
        let huge = match pages {
            Pages::Transparent => {
                let huge = Mapping::new(size, PIECE, Source::Shared(&file))?;
                huge.advise(libc::MADV_HUGEPAGE)?;
                Some(huge)
            }
            _ => None,
        };
        let file = Arc::new(file);
        let mut new = NewBase { file, buffer: vec![0; PIECE as usize], huge, piece: None, shown: 0 };
        if self.is_without_file() {
            return Ok(Some(new));
        }
        let (base, _) = self.base()?;
        let old = Mapping::new(size, PAGE_SIZE, Source::Private { file: &base, pages: Pages::Small })?;
        let mut runs = Vec::new();
        pagemap::data(&base, 0, size / PAGE_SIZE, |run| runs.push(run))?;
        for run in runs {
            new.copy(&old, run.start * PAGE_SIZE, (run.end - run.start) * PAGE_SIZE, &wanted)?;
        }
        Ok(Some(new))
    }

    /// Copies pages of `slot` into `new`. `slot` is part of this memory. Ends with the error of
    /// `wanted`, which is asked now and then.
    ///
    /// # Errors
    /// The host lacks memory.
    pub fn copy(
        &self,
        new: &mut NewBase,
        slot: &Slot,
        run: Range<u64>,
        wanted: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let at = slot.offset() + run.start * PAGE_SIZE;
        new.copy(&self.mapping, at, (run.end - run.start) * PAGE_SIZE, &wanted)
    }

    /// Copies the pages that differ from the old base into `new`. The machine must be paused. Ends
    /// with the error of `wanted`, which is asked now and then.
    ///
    /// # Errors
    /// The host refuses.
    pub fn copy_parted(
        &self,
        pagemap: &Pagemap,
        new: &mut NewBase,
        wanted: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        for slot in self.slots() {
            let mut result = Ok(());
            self.parted_pages(pagemap, slot, |run| {
                if result.is_ok() {
                    result = self.copy(new, slot, run, &wanted);
                }
            })?;
            result?;
        }
        Ok(())
    }

    /// Maps the next `most` bytes of `new` privately. `new` has the content of memory there, and the
    /// machine is paused. It may run before the rest is shown: what it then writes to is private to it.
    ///
    /// # Errors
    /// The host refuses. The content is unchanged.
    pub fn show(&self, new: &mut NewBase, most: u64) -> io::Result<()> {
        let (size, pages) = (self.config.size, self.config.backing.pages());
        let end = size.min(new.shown.saturating_add(most));
        while new.shown < end {
            let len = PIECE.min(end - new.shown);
            self.map_piece(new.shown, len, &new.file, pages)?;
            new.shown += len;
            // From the first piece on it shows two files, or a file and anonymous memory.
            self.shared.lock().show(&new.file, new.shown, size);
            self.shared.parted.store(new.shown, Ordering::Release);
        }
        Ok(())
    }

    /// Makes `new` the base, which all of memory shows.
    ///
    /// # Errors
    /// Not all of memory shows it, or it cannot be sealed against writes.
    pub fn shows(&self, new: NewBase) -> io::Result<()> {
        if new.shown < self.config.size {
            return Err(io::Error::other("memory does not show all of it"));
        }
        let file = Some(new.freeze()?);
        let mut base = self.shared.lock();
        *base = Base { file, number: base.number, ..Base::default() };
        Ok(())
    }

    /// Calls `found` with runs of the pages of `slot` that are private to this machine: those
    /// written since they parted from the base. `slot` is part of this memory. Pages written during
    /// the call may be missed.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn parted_pages(
        &self,
        pagemap: &Pagemap,
        slot: &Slot,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let mut forgets = plant::is(Mistake::PartedLeftOut);
        let mut layered = self.layers(slot);
        layered.iter().for_each(|run| found(run.clone()));
        layered.push(u64::MAX..u64::MAX);
        let mut layered = &layered[..];
        pagemap.parted(slot.mapping(), slot.offset(), slot.pages(), |mut run| {
            if std::mem::take(&mut forgets) {
                return;
            }
            // What it has written to in a layer was found already. Runs ascend, as layers do.
            while let Some((layer, rest)) = layered.split_first()
                && !run.is_empty()
            {
                if run.start < layer.start.min(run.end) {
                    found(run.start..layer.start.min(run.end));
                }
                run.start = run.start.max(layer.end.min(run.end));
                if layer.end <= run.start {
                    layered = rest;
                }
            }
        })
    }

    /// The pages of `slot` that map another file than the base, in ascending order.
    pub(super) fn layers(&self, slot: &Slot) -> Vec<Range<u64>> {
        let all = self.shared.lock().layers.clone();
        let range = slot.range();
        let known =
            if plant::is(Mistake::LayerLeftOut) { all.get(1..).unwrap_or_default() } else { &all[..] };
        let inside = known.iter().map(|layer| layer.start.max(range.start)..layer.end.min(range.end));
        let pages = inside
            .filter(|layer| layer.start < layer.end)
            .map(|layer| (layer.start - range.start) / PAGE_SIZE..(layer.end - range.start) / PAGE_SIZE);
        pages.collect()
    }

    /// Maps `runs` privately from `file`: each is an offset into memory, a length and an offset into
    /// the file, and they ascend. The content there differs from the base. The machine has not run
    /// yet. Returns how many are mapped: the host may refuse one, and the later ones are not tried.
    ///
    /// # Errors
    /// The file is not sealed.
    pub fn map_layer(&self, file: &File, runs: &[(u64, u64, u64)]) -> io::Result<usize> {
        if !mmap::is_frozen(file)? || !mmap::seals_hold(file)? {
            return Err(io::Error::other("the file of the pages is not sealed"));
        }
        let refused = |(at, len, from): &(u64, u64, u64)| self.mapping.show(*at, *len, file, *from).is_err();
        let mapped = runs.iter().position(refused).unwrap_or(runs.len());
        let layers = runs[..mapped].iter().map(|(at, len, _)| *at..*at + *len).collect();
        self.shared.lock().layers = Arc::new(layers);
        Ok(mapped)
    }

    /// RAM at `space` that maps `base` privately. `base` is another machine's. `config` is as for
    /// [`Memory::adopt`], but memory with transparent huge pages keeps them.
    ///
    /// # Errors
    /// As for [`Memory::adopt`]; or `base` is not sealed against writes, or the pool lacks huge
    /// pages.
    pub fn on_base(space: Space, config: MemoryConfig, base: File) -> Result<Self, Error> {
        let frozen = mmap::is_frozen(&base).map_err(|error| Error::Handed(error.to_string()))?;
        if !frozen && !plant::is(Mistake::PieceLeftShared) {
            return Err(Error::Handed("can be written to by others: it is no base of a fork".into()));
        }
        let backing = Backing::of_base(&base, config.backing)?;
        let pages = backing.pages();
        let memory = Self::of_file(space, config, backing, base, |file| Source::Private { file, pages })?;
        memory.shared.parted.store(memory.config.size, Ordering::Release);
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Whoever asks for the base while another one is made gets a number with its own file.
    #[test]
    fn a_base_has_its_own_number() {
        const BELOW: &[Range<u64>] = std::slice::from_ref(&(0..1 << 30));
        let config = MemoryConfig { backing: Backing::Memfd, ..MemoryConfig::new(1 << 20) };
        let memory = Memory::map(Space(BELOW), config).unwrap();
        while memory.part().unwrap() {}
        memory.freeze_base().unwrap();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let found = std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let mut found = HashMap::new();
                while !ended.load(Ordering::Relaxed) {
                    // While memory shows two, there is none.
                    let Ok((file, number)) = memory.base() else { continue };
                    let inode = file.metadata().unwrap().ino();
                    let first = *found.entry(number).or_insert(inode);
                    assert_eq!(first, inode, "two files have the number {number}");
                }
                found.len()
            });
            for _ in 0..2000 {
                let file = mmap::freezable_memfd(c"vellum-test", 1 << 20, None).unwrap();
                let mut new = memory.new_base(file, || Ok(())).unwrap().unwrap();
                memory.show(&mut new, u64::MAX).unwrap();
                memory.shows(new).unwrap();
            }
            ended.store(true, Ordering::Relaxed);
            asks.join().unwrap()
        });
        assert!(found > 0);
    }

    /// Pages that a machine maps from the file of the fork differ from the base, whether or not it has
    /// written to them.
    #[test]
    fn pages_of_a_layer_differ_from_the_base() {
        const BELOW: &[Range<u64>] = std::slice::from_ref(&(0..1 << 30));
        const PAGES: u64 = 256;
        let file = |content: Range<u64>| {
            let file = mmap::freezable_memfd(c"vellum-test", PAGES * PAGE_SIZE, None).unwrap();
            for page in content {
                file.write_all_at(&page.to_le_bytes(), page * PAGE_SIZE).unwrap();
            }
            file
        };
        let (base, layer) = (file(0..16), file(100..140));
        mmap::freeze(&base).unwrap();
        let config =
            MemoryConfig { backing: Backing::Memfd, slots: 2, ..MemoryConfig::new(PAGES * PAGE_SIZE) };
        let memory = Memory::on_base(Space(BELOW), config, base).unwrap();
        // The machine's pages 120 to 149 are the file's pages 110 to 139, in both memslots.
        let runs = [(120 * PAGE_SIZE, 30 * PAGE_SIZE, 110 * PAGE_SIZE)];
        assert!(memory.map_layer(&layer, &runs).is_err(), "a file that can change");
        mmap::freeze(&layer).unwrap();
        // The host refuses what is outside of the mapping.
        let more = [runs[0], (PAGES * PAGE_SIZE, PAGE_SIZE, 0), runs[0]];
        assert_eq!(memory.map_layer(&layer, &more).unwrap(), 1);
        let word =
            |page: u64| memory.mapping.words()[(page * PAGE_SIZE / 8) as usize].load(Ordering::Relaxed);
        assert_eq!([word(15), word(119), word(120), word(149), word(150)], [15, 0, 110, 139, 0]);
        let pagemap = Pagemap::open().unwrap();
        type Runs<'a> = &'a mut dyn FnMut(Range<u64>);
        let found = |of: &dyn Fn(&Slot, Runs<'_>)| {
            let mut pages = Vec::new();
            for slot in memory.slots() {
                let first = slot.offset() / PAGE_SIZE;
                of(slot, &mut |run| pages.extend(first + run.start..first + run.end));
            }
            pages.sort_unstable();
            pages
        };
        let parted = || found(&|slot, each| memory.parted_pages(&pagemap, slot, each).unwrap());
        assert_eq!(parted(), (120..150).collect::<Vec<_>>());
        for page in [3, 119, 125, 150, 200] {
            memory.mapping.copy_from(page * PAGE_SIZE, &[7; 8]);
        }
        let expected: Vec<u64> = [3, 119].into_iter().chain(120..150).chain([150, 200]).collect();
        assert_eq!(parted(), expected);
        let mut touched = found(&|slot, each| {
            assert!(memory.touched(Some(&pagemap), slot, 0..slot.pages(), each).unwrap());
        });
        touched.dedup();
        let all: Vec<u64> = (0..16).chain([119]).chain(120..150).chain([150, 200]).collect();
        assert!(all.iter().all(|page| touched.binary_search(page).is_ok()), "{touched:?}");
    }
}
