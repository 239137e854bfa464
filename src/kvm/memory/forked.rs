//! Memory whose machine is forked: what its file had becomes a base that nobody writes to any more,
//! and that this machine and those made from it map privately. What each of them writes from then
//! on is its own.
//!
//! The mapping parts from the file piece by piece, while the guest runs. A write to a piece that
//! has not parted goes to the file, and every machine finds it there. A write to one that has is a
//! private copy, which whoever forks the machine copies: [`Memory::parted_pages`] tells of them.
//! Once the first piece has parted, the file no longer is this memory, so that nobody may be handed
//! it ([`Memory::shared_file`]), and no piece ever parts twice, which would lose what was written.
//!
//! Where much has parted from the base, a new one is made ([`Memory::new_base`],
//! [`Memory::rebase`]): further machines then share that too.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Backing, Error, Memory, MemoryConfig, Slot};
use crate::memory::plan::Space;
use vellum_sys::mmap::{self, PAGE_SIZE, Source};
use vellum_sys::pagemap::{self, Pagemap};
use vellum_sys::plant::{self, Mistake};

/// The file that a memory is, or shows privately.
#[derive(Debug, Default)]
pub(super) struct Shared {
    file: Mutex<Option<Arc<File>>>,
    /// How much of the mapping has parted from it, in bytes from its start.
    parted: AtomicU64,
    /// How many bases there were before this one.
    number: AtomicU64,
}

impl Shared {
    /// Of memory that is `file`, if there is one.
    pub(super) fn new(file: Option<File>) -> Self {
        Self { file: Mutex::new(file.map(Arc::new)), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<File>>> {
        // It is read and replaced as a whole.
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file that is to become the base of a memory that was forked before: it has what the base had,
/// and gets what has parted from that.
#[derive(Debug)]
pub struct NewBase {
    file: File,
    buffer: Vec<u8>,
}

/// Bytes that part at a time where pages are not huge ones of the pool: whoever faults meanwhile
/// waits for as long as that takes.
const PIECE: u64 = 2 << 20;

impl Memory {
    /// The file that this memory is, where it is one: for userfaultfd's minor faults, and for
    /// handing to another process.
    pub fn shared_file(&self) -> Option<Arc<File>> {
        self.file().filter(|_| !self.is_forked())
    }

    /// The same, or the file that this memory shows privately.
    pub(super) fn file(&self) -> Option<Arc<File>> {
        self.shared.lock().clone()
    }

    /// Whether it has begun to part from its file, or was made of another machine's.
    pub fn is_forked(&self) -> bool {
        self.parted_bytes() > 0
    }

    fn parted_bytes(&self) -> u64 {
        self.shared.parted.load(Ordering::Acquire)
    }

    /// Why another process cannot be handed a descriptor of it, if it cannot.
    ///
    /// # Errors
    /// In words for whoever asked.
    pub fn can_be_handed_over(&self) -> Result<(), String> {
        let backing = self.config.backing;
        if !backing.can_be_handed_over() {
            return Err(format!(
                "its memory is {backing}, of which no other process can be handed a descriptor"
            ));
        }
        if self.is_forked() {
            return Err("its memory was forked, and parts of it are this process's alone: no descriptor has all of it".into());
        }
        Ok(())
    }

    /// Why its machine cannot be forked, if it cannot.
    ///
    /// # Errors
    /// In words for whoever asked.
    pub fn can_be_forked(&self) -> Result<(), String> {
        let backing = self.config.backing;
        let Some(file) = self.file() else {
            if self.is_forked() {
                return Err(
                    "its memory shows two bases, because a fork before could not map all of the new one"
                        .into(),
                );
            }
            return Err(format!(
                "its memory is {backing}, which has no descriptor that others could map; start it with backing=memfd or \
                 shared-hugetlb-2m"
            ));
        };
        if self.config.lock {
            return Err("its memory is locked, and private copies of it would not be".into());
        }
        if self.mapping.is_kept() {
            return Err("part of its memory has not come yet".into());
        }
        match mmap::can_be_frozen(&file) {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err("its memory was made by a Vellum that cannot fork, and does not let its writes be sealed"
                    .into())
            }
            Err(error) => Err(format!("its memory: {error}")),
        }
    }

    /// Has the next piece of it part from its file; false where all has. What is in it stays.
    ///
    /// # Errors
    /// Where the host refuses, for lack of huge pages above all: this piece and those behind it are
    /// as before.
    pub fn part(&self) -> io::Result<bool> {
        let (size, at) = (self.config.size, self.parted_bytes());
        let Some(file) = self.file().filter(|_| at < size) else { return Ok(false) };
        let huge = matches!(self.config.backing, Backing::SharedHugetlb(_));
        // All of the pool's pages are there, or none is taken.
        let len = if huge { size } else { PIECE.min(size - at) };
        if plant::is(Mistake::PieceLeftShared) && at + len == size {
            self.shared.parted.store(size, Ordering::Release);
            return Ok(false);
        }
        self.mapping.part(at, len, &file, huge)?;
        self.shared.parted.store(at + len, Ordering::Release);
        Ok(at + len < size)
    }

    /// The file that it has parted from, which nobody writes to any more, and the number of that
    /// base.
    ///
    /// # Errors
    /// Where some of it has not parted, or another process maps the file so that it could write to
    /// it.
    pub fn base(&self) -> io::Result<(Arc<File>, u64)> {
        let parted = self.parted_bytes() == self.config.size;
        let file = self.file().filter(|_| parted);
        let file = file.ok_or_else(|| io::Error::other("it has not parted from its file"))?;
        if !plant::is(Mistake::PieceLeftShared) {
            mmap::freeze(&file)?;
        }
        Ok((file, self.shared.number.load(Ordering::Acquire)))
    }

    /// Copies the base into `file`, which is empty and as long, while the guest runs: nobody writes
    /// to the base. Huge pages of the pool stay where they are: for these there is none.
    ///
    /// # Errors
    /// Where `file` cannot be a base, or the host lacks memory.
    pub fn new_base(&self, file: File) -> io::Result<Option<NewBase>> {
        if self.config.backing != Backing::Memfd {
            return Ok(None);
        }
        let unfit = |what: &str| io::Error::other(format!("the file for a new base {what}"));
        if file.metadata()?.len() != self.config.size {
            return Err(unfit("is not as long as memory"));
        }
        if !mmap::seals_hold(&file)? || !mmap::can_be_frozen(&file)? || mmap::is_frozen(&file)? {
            return Err(unfit("is not sealed as memory is"));
        }
        let (base, _) = self.base()?;
        let mut buffer = vec![0; PIECE as usize];
        let mut runs = Vec::new();
        pagemap::data(&base, 0, self.config.size / PAGE_SIZE, |run| runs.push(run))?;
        for run in runs {
            let end = run.end * PAGE_SIZE;
            for at in (run.start * PAGE_SIZE..end).step_by(PIECE as usize) {
                let bytes = &mut buffer[..PIECE.min(end - at) as usize];
                base.read_exact_at(bytes, at)?;
                file.write_all_at(bytes, at)?;
            }
        }
        Ok(Some(NewBase { file, buffer }))
    }

    /// Makes `new` its base: what has parted from the old one goes there, and all of memory shows
    /// it from now on. While the machine stands still.
    ///
    /// # Errors
    /// Where the host refuses. What memory has is as before; but where some of it shows the new
    /// base already, and not all, it cannot be forked again.
    pub fn rebase(&self, pagemap: &Pagemap, new: NewBase) -> io::Result<()> {
        let NewBase { file, mut buffer } = new;
        let mut result = Ok(());
        for slot in self.slots() {
            self.parted_pages(pagemap, slot, |run| {
                let (start, end) = (run.start * PAGE_SIZE, run.end * PAGE_SIZE);
                for at in (start..end).step_by(PIECE as usize) {
                    let at = slot.offset() + at;
                    let bytes = &mut buffer[..PIECE.min(slot.offset() + end - at) as usize];
                    if result.is_ok() {
                        self.mapping.copy_to(at, bytes);
                        result = file.write_all_at(bytes, at);
                    }
                }
            })?;
        }
        result?;
        mmap::freeze(&file)?;
        let size = self.config.size;
        for at in (0..size).step_by(PIECE as usize) {
            if let Err(error) = self.mapping.part(at, PIECE.min(size - at), &file, false) {
                if at > 0 {
                    *self.shared.lock() = None;
                }
                return Err(error);
            }
        }
        *self.shared.lock() = Some(Arc::new(file));
        self.shared.number.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Tells `found` which pages of `slot`, which is of this memory, are this machine's own, as
    /// runs: those that it has written to since they parted from the base. While it stands still.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn parted_pages(
        &self,
        pagemap: &Pagemap,
        slot: &Slot,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let mut forgets = plant::is(Mistake::PartedLeftOut);
        pagemap.parted(slot.mapping(), slot.offset(), slot.pages(), |run| {
            if !std::mem::take(&mut forgets) {
                found(run);
            }
        })
    }

    /// RAM at `space` that shows `base` privately, which another machine has parted from. `config`
    /// is as for [`Memory::adopt`].
    ///
    /// # Errors
    /// As there, where somebody can still write to `base`, and where the pool lacks huge pages.
    pub fn on_base(space: Space, config: MemoryConfig, base: File) -> Result<Self, Error> {
        let frozen = mmap::is_frozen(&base).map_err(|error| Error::Handed(error.to_string()))?;
        if !frozen && !plant::is(Mistake::PieceLeftShared) {
            return Err(Error::Handed("can be written to by others: it is no base of a fork".into()));
        }
        let huge = matches!(Backing::of_handed(&base)?, Backing::SharedHugetlb(_));
        let memory = Self::of_file(space, config, base, |file| Source::Private { file, huge })?;
        memory.shared.parted.store(memory.config.size, Ordering::Release);
        Ok(memory)
    }
}
