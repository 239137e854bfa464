//! A machine's memory as a core dump that crash, makedumpfile, drgn and GDB open.
//!
//! [`vmcoreinfo`] finds what a Linux kernel says of itself, [`elf`] is the file. A dump goes in [turns](Dumping::turn) of the event loop, a part of
//! memory each, so that a machine that is large answers meanwhile; it stands still from the first turn to the last. What nobody has
//! touched, and what is zero, is a hole in the file.

pub mod elf;
pub mod vmcoreinfo;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::elf::{Layout, Stretch};
use self::vmcoreinfo::{LOOK, Vmcoreinfo};
use vellum_kvm::arch::core::Core;
use vellum_kvm::arch::paging::Tables;
use vellum_kvm::memory::{Memory, Slot};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::Pagemap;

/// How much of memory a turn goes over, in pages: 64 MiB.
const TURN: u64 = 16 << 10;
/// How much is read and written at a time, in pages.
const BATCH: u64 = 64;

/// What has been written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// How long the file is.
    pub bytes: u64,
    /// How much of it is no hole.
    pub content: u64,
    /// What the kernel says of itself, where it says so.
    pub vmcoreinfo: Option<Vmcoreinfo>,
}

/// RAM by guest-physical address.
struct Ram {
    memory: Memory,
    slots: Vec<Slot>,
    pagemap: Option<Arc<Pagemap>>,
}

impl Ram {
    /// The word at `physical`.
    fn word(&self, physical: u64) -> Option<u64> {
        let slot =
            self.slots.iter().find(|slot| (slot.gpa()..slot.gpa() + slot.bytes()).contains(&physical))?;
        let at = slot.offset() + (physical - slot.gpa());
        Some(slot.mapping().words()[at as usize / 8].load(Ordering::Relaxed))
    }

    /// Copies the pages `pages` of `slot`.
    fn copy(&self, slot: &Slot, pages: Range<u64>, to: &mut Vec<u8>) {
        to.resize(((pages.end - pages.start) * PAGE_SIZE) as usize, 0);
        slot.mapping().copy_to(slot.offset() + pages.start * PAGE_SIZE, to);
    }

    /// Those of the pages `pages` of `slot` that may be other than zero.
    fn touched(&self, slot: &Slot, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        self.memory.perhaps_touched(self.pagemap.as_deref(), slot, pages, |run| runs.push(run));
        runs
    }
}

/// A dump that is being written.
pub struct Dumping {
    file: File,
    ram: Ram,
    cores: Vec<Core>,
    current: Vec<Tables>,
    vmcoreinfo: Option<Vmcoreinfo>,
    /// The file, once it is known what the kernel says of itself.
    layout: Option<Layout>,
    /// The slot and the page in it that are next.
    at: (usize, u64),
    content: u64,
}

impl Dumping {
    /// One of a machine that stands still, with these vCPUs and RAM in `slots` of `memory`, into `file`.
    pub fn new(
        file: File,
        cores: Vec<Core>,
        memory: Memory,
        slots: Vec<Slot>,
        pagemap: Option<Arc<Pagemap>>,
    ) -> Self {
        let current = cores.iter().flat_map(Core::tables).collect();
        let ram = Ram { memory, slots, pagemap };
        Self { file, ram, cores, current, vmcoreinfo: None, layout: None, at: (0, 0), content: 0 }
    }

    /// Goes on by a part of memory; what was written, when all of it is.
    ///
    /// # Errors
    /// Where a write fails.
    pub fn turn(&mut self) -> io::Result<Option<Dumped>> {
        let (index, page) = self.at;
        let Some(slot) = self.ram.slots.get(index).cloned() else {
            if self.layout.is_none() {
                self.begin()?;
                return Ok(None);
            }
            let bytes = self.layout.as_ref().map_or(0, |layout| layout.bytes);
            return Ok(Some(Dumped { bytes, content: self.content, vmcoreinfo: self.vmcoreinfo.take() }));
        };
        let pages = page..slot.pages().min(page + TURN);
        self.at = if pages.end == slot.pages() { (index + 1, 0) } else { (index, pages.end) };
        let Some(layout) = &self.layout else {
            if self.look(&slot, pages) {
                // Nothing more to look for.
                self.at = (self.ram.slots.len(), 0);
            }
            return Ok(None);
        };
        let start = layout.offsets[index];
        self.write(&slot, pages, start)?;
        Ok(None)
    }

    /// Looks for the kernel's note among these pages; whether it is there.
    fn look(&mut self, slot: &Slot, pages: Range<u64>) -> bool {
        let mut start = [0; LOOK.next_multiple_of(8)];
        for run in self.ram.touched(slot, pages) {
            for page in run {
                slot.mapping().copy_to(slot.offset() + page * PAGE_SIZE, &mut start);
                let Some(len) = vmcoreinfo::length(&start) else { continue };
                // It may go over into the next pages, which are of the same memory.
                let end = slot.pages().min(page + (len as u64).div_ceil(PAGE_SIZE));
                let mut note = Vec::new();
                self.ram.copy(slot, page..end, &mut note);
                let found = Vmcoreinfo::parse(&note);
                let holds = |info: &Vmcoreinfo| info.holds(&self.current, |at| self.ram.word(at));
                if let Some(info) = found.filter(holds) {
                    self.vmcoreinfo = Some(info);
                    return true;
                }
            }
        }
        false
    }

    /// Writes all that is before memory.
    fn begin(&mut self) -> io::Result<()> {
        let statuses: Vec<_> =
            self.cores.iter().enumerate().map(|(index, core)| core.prstatus(index)).collect();
        let info = self.vmcoreinfo.as_ref();
        let notes = elf::notes(&statuses, info.map(|info| info.note.as_slice()));
        let direct = info.and_then(|info| {
            let known = [
                info.tables.root,
                info.text.wrapping_sub(vellum_kvm::arch::core::IMAGE).wrapping_add(info.phys_base),
            ];
            info.direct_mapping(&known, |at| self.ram.word(at))
        });
        let stretch = |slot: &Slot| Stretch { physical: slot.gpa(), bytes: slot.bytes() };
        let stretches: Vec<_> = self.ram.slots.iter().map(stretch).collect();
        let layout = elf::layout(&notes, &stretches, direct);
        self.file.set_len(layout.bytes)?;
        self.file.write_all_at(&layout.head, 0)?;
        self.content = layout.head.len() as u64;
        self.layout = Some(layout);
        self.at = (0, 0);
        Ok(())
    }

    /// Writes those of these pages that are not zero.
    fn write(&mut self, slot: &Slot, pages: Range<u64>, start: u64) -> io::Result<()> {
        let mut buffer = Vec::new();
        for run in self.ram.touched(slot, pages) {
            let mut first = run.start;
            while first < run.end {
                let batch = first..run.end.min(first + BATCH);
                self.ram.copy(slot, batch.clone(), &mut buffer);
                let full = |page: &[u8]| page.iter().any(|byte| *byte != 0);
                let mut at = 0;
                // Neighbours that are both zero, or both not, go together.
                let pages: Vec<&[u8]> = buffer.chunks(PAGE_SIZE as usize).collect();
                for part in pages.chunk_by(|a, b| full(a) == full(b)) {
                    let bytes = part.len() * PAGE_SIZE as usize;
                    if full(part[0]) {
                        self.file
                            .write_all_at(&buffer[at..at + bytes], start + first * PAGE_SIZE + at as u64)?;
                        self.content += bytes as u64;
                    }
                    at += bytes;
                }
                first = batch.end;
            }
        }
        Ok(())
    }

    /// Has it on the disk.
    ///
    /// # Errors
    /// What the disk says.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}
