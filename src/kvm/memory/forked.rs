//! Memory whose machine is forked: what its file had becomes a base that nobody writes to any more, and that this machine and those made
//! from it map privately. What each of them writes from then on is its own.
//!
//! The mapping parts from the file piece by piece, while the guest runs. A write to a piece that has not parted goes to the file, and every
//! machine finds it there. A write to one that has is a private copy, which whoever forks the machine copies: [`Memory::parted_pages`] tells
//! of them. Once the first piece has parted, the file no longer is this memory, so that nobody may be handed it
//! ([`Memory::shared_file`]), and no piece ever parts twice, which would lose what was written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Backing, Error, Memory, MemoryConfig, Slot};
use crate::memory::plan::Space;
use vellum_sys::mmap::{self, Source};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};

/// How much of a mapping has parted from its file, in bytes from its start.
#[derive(Debug, Default)]
pub(super) struct Parted(AtomicU64);

/// Bytes that part at a time where pages are not huge ones of the pool: whoever faults meanwhile waits for as long as that takes.
const PIECE: u64 = 2 << 20;

impl Memory {
    /// The file that this memory is, where it is one: for userfaultfd's minor faults, and for handing to another process.
    pub fn shared_file(&self) -> Option<&Arc<File>> {
        self.file.as_ref().filter(|_| !self.is_forked())
    }

    /// Whether it has begun to part from its file, or was made of another machine's.
    pub fn is_forked(&self) -> bool {
        self.parted_bytes() > 0
    }

    fn parted_bytes(&self) -> u64 {
        self.parted.0.load(Ordering::Acquire)
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
        let Some(file) = &self.file else {
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
        match mmap::can_be_frozen(file) {
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
    /// Where the host refuses, for lack of huge pages above all: this piece and those behind it are as before.
    pub fn part(&self) -> io::Result<bool> {
        let (size, at) = (self.config.size, self.parted_bytes());
        let Some(file) = self.file.as_ref().filter(|_| at < size) else { return Ok(false) };
        let huge = matches!(self.config.backing, Backing::SharedHugetlb(_));
        // All of the pool's pages are there, or none is taken.
        let len = if huge { size } else { PIECE.min(size - at) };
        if plant::is(Mistake::PieceLeftShared) && at + len == size {
            self.parted.0.store(size, Ordering::Release);
            return Ok(false);
        }
        self.mapping.part(at, len, file, huge)?;
        self.parted.0.store(at + len, Ordering::Release);
        Ok(at + len < size)
    }

    /// The file that it has parted from, which nobody writes to any more.
    ///
    /// # Errors
    /// Where some of it has not parted, or another process maps the file so that it could write to it.
    pub fn base(&self) -> io::Result<Arc<File>> {
        let parted = self.parted_bytes() == self.config.size;
        let file = self.file.as_ref().filter(|_| parted);
        let file = file.ok_or_else(|| io::Error::other("it has not parted from its file"))?;
        if !plant::is(Mistake::PieceLeftShared) {
            mmap::freeze(file)?;
        }
        Ok(file.clone())
    }

    /// Tells `found` which pages of `slot`, which is of this memory, are this machine's own, as runs: those that it has written to since they
    /// parted from the base. While it stands still.
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

    /// RAM at `space` that shows `base` privately, which another machine has parted from. `config` is as for [`Memory::adopt`].
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
        memory.parted.0.store(memory.config.size, Ordering::Release);
        Ok(memory)
    }
}
