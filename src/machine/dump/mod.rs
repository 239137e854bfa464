//! Writes a machine's memory as a core dump that crash, makedumpfile, drgn and GDB open.
//!
//! [`vmcoreinfo`] finds the Linux kernel's description of itself, and [`elf`] is the file format. A
//! dump runs in [turns](Dumping::turn) of the event loop, each for a part of memory, so that a
//! large machine still answers requests. The machine is paused from the first turn to the last.
//! Untouched pages and zero pages are holes in the file.

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

/// The number of pages that a turn processes: 64 MiB.
const TURN: u64 = 16 << 10;
/// The number of pages read and written at a time.
const BATCH: u64 = 64;

/// The result of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// The length of the file in bytes.
    pub bytes: u64,
    /// How many of these bytes are not holes.
    pub content: u64,
    /// The kernel's description of itself, if it has one.
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

    /// The runs among the pages `pages` of `slot` that may not be zero.
    fn touched(&self, slot: &Slot, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        self.memory.perhaps_touched(self.pagemap.as_deref(), slot, pages, |run| runs.push(run));
        runs
    }
}

/// A dump in progress.
pub struct Dumping {
    file: File,
    ram: Ram,
    cores: Vec<Core>,
    current: Vec<Tables>,
    vmcoreinfo: Option<Vmcoreinfo>,
    /// The file's layout. It is known after the search for the kernel's description.
    layout: Option<Layout>,
    /// The next slot and the next page in it.
    at: (usize, u64),
    content: u64,
}

impl Dumping {
    /// A dump to `file` of a paused machine with these vCPUs, and with its RAM in `slots` of
    /// `memory`.
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

    /// Processes the next part of memory. Returns the result once all is written.
    ///
    /// # Errors
    /// A write fails.
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
                // The search is over.
                self.at = (self.ram.slots.len(), 0);
            }
            return Ok(None);
        };
        let start = layout.offsets[index];
        self.write(&slot, pages, start)?;
        Ok(None)
    }

    /// Searches these pages for the kernel's note. Returns whether it was found.
    fn look(&mut self, slot: &Slot, pages: Range<u64>) -> bool {
        let mut start = [0; LOOK.next_multiple_of(8)];
        for run in self.ram.touched(slot, pages) {
            for page in run {
                slot.mapping().copy_to(slot.offset() + page * PAGE_SIZE, &mut start);
                let Some(len) = vmcoreinfo::length(&start) else { continue };
                // The note may extend into the next pages of the same slot.
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

    /// Writes everything before memory.
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

    /// Writes the nonzero pages among these.
    fn write(&mut self, slot: &Slot, pages: Range<u64>, start: u64) -> io::Result<()> {
        let mut buffer = Vec::new();
        for run in self.ram.touched(slot, pages) {
            let mut first = run.start;
            while first < run.end {
                let batch = first..run.end.min(first + BATCH);
                self.ram.copy(slot, batch.clone(), &mut buffer);
                let full = |page: &[u8]| page.iter().any(|byte| *byte != 0);
                let mut at = 0;
                // Neighbours that are both zero, or both nonzero, are handled together.
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

    /// Syncs the file to the disk.
    ///
    /// # Errors
    /// The disk's.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}
