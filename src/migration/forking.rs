//! The thread that forks a machine: its memory becomes a base that nobody writes to any more, and
//! that this machine and others show privately ([`vellum_kvm::memory`]); what differs from that at
//! the pause, and the state, go into files as a point of a [`snapshot`](crate::snapshot) does.
//!
//! The first time memory parts from its file while the guest runs. What the guest writes to pieces
//! that have parted already, it alone has: that is copied while it stands still, as all that it has
//! written since is the next time. Where that is more than a quarter of memory, a new base is made:
//! the old one is copied while the guest runs, and what differs from it at the pause. Memory that
//! has parted stays so, whatever becomes of the fork: for the guest nothing has changed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use crate::events::{Demand, Moving, Said, SenderCommand, SenderEvent, Written};
use crate::saving::{End, WrittenDown, failed, write_down};
use crate::snapshot::layer::Writer;
use crate::snapshot::{Files, disk};
use crate::threads::Mine;
use vellum_kvm::arch::clocks;
use vellum_kvm::memory::{Memory, Slot, short_size};
use vellum_machine as machine;
use vellum_sys::mmap::{PAGE_SIZE, host_page};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};

/// The thread.
pub(crate) struct Forking {
    machine: Mine<Said, SenderCommand>,
    describe: Value,
    ram: Memory,
    memory: Vec<Slot>,
    /// Tells what has parted from the base.
    pagemap: Arc<Pagemap>,
    files: Files,
    /// A file that can become the next base.
    next: File,
    disks: Vec<machine::Disk>,
}

/// Which share of memory has to differ from the base for a new one to be made: what is copied for
/// each fork otherwise, and shared by no two machines, costs more then.
const SHARE: u64 = 4;

impl Forking {
    /// A fork of `what` into `files`, which are empty.
    ///
    /// # Errors
    /// Where its memory cannot be forked, in words for whoever asked.
    pub fn new(
        what: Moving,
        files: Files,
        next: File,
        disks: Vec<machine::Disk>,
        machine: Mine<Said, SenderCommand>,
    ) -> Result<Self, String> {
        what.ram.can_be_forked()?;
        let pagemap = what.pagemap.ok_or(
            "this process cannot read its /proc/self/pagemap, which tells what differs from the base",
        )?;
        Ok(Self {
            machine,
            describe: what.describe,
            ram: what.ram,
            memory: what.memory,
            pagemap,
            files,
            next,
            disks,
        })
    }

    /// Goes on until the machine runs on, or the event loop's thread is gone.
    pub fn run(self) {
        let word = match self.fork() {
            Ok(forked) => forked,
            Err(End::Failed(why)) => SenderEvent::Stayed(why),
            Err(End::Orphaned) => return,
        };
        // Nobody is left to hear it where this fails.
        let _ = self.machine.say(Said::SenderEvent(word));
    }

    fn fork(&self) -> Result<SenderEvent, End> {
        // While the guest runs, so that little is left to do when it stands still.
        disk::flush(&self.disks).map_err(End::Failed)?;
        while self.ram.part().map_err(|error| End::Failed(self.why_whole(&error)))? {
            self.machine.is_wanted()?;
        }
        self.ram.base().map_err(|error| End::Failed(why_writable(&error)))?;
        let mut next = None;
        if self.differ()? * SHARE > self.pages() {
            let file = self.next.try_clone().map_err(failed("another descriptor of a file"))?;
            next = self.ram.new_base(file).map_err(failed("a new base"))?;
        }
        self.machine.is_wanted()?;
        let ram = self.files.ram.try_clone().map_err(failed("another descriptor of a file"))?;
        let mut writer = Writer::new(ram, &self.memory).map_err(failed("the file for pages"))?;
        let sections = self.machine.save()?;
        let taken = clocks::now();
        let disks = disk::saved(&self.disks, &[]).map_err(End::Failed)?;
        let early = plant::is(Mistake::CopiedAfterResume);
        if early {
            self.machine.demand(Demand::Resume)?;
        }
        // After the state: saving a vCPU makes KVM write to guest memory.
        if let Some(next) = next {
            self.ram.rebase(&self.pagemap, next).map_err(failed("a new base"))?;
        }
        self.copy(&mut writer)?;
        if !early {
            self.machine.demand(Demand::Resume)?;
        }
        let WrittenDown { layer, state_bytes, state_crc } =
            write_down(&self.files, &self.describe, &sections, writer)?;
        let written = Written { full: false, taken, passes: 1, layer, state_bytes, state_crc, disks };
        let (_, base) = self.ram.base().map_err(failed("its base"))?;
        Ok(SenderEvent::Forked { base, written })
    }

    /// How many pages of RAM there are.
    fn pages(&self) -> u64 {
        self.ram.config.size / PAGE_SIZE
    }

    /// How many of them differ from the base now.
    fn differ(&self) -> Result<u64, End> {
        let mut all = 0;
        for slot in self.ram.slots() {
            let count = |run: Range<u64>| all += run.end - run.start;
            self.ram.parted_pages(&self.pagemap, slot, count).map_err(failed("/proc/self/pagemap"))?;
        }
        Ok(all)
    }

    /// Copies what the base does not have.
    fn copy(&self, writer: &mut Writer) -> Result<(), End> {
        for (region, slot) in self.memory.iter().enumerate() {
            let mut result = Ok(());
            let mut write = |run| {
                if result.is_ok() {
                    result = writer.write(region, slot, run).map(drop);
                }
            };
            if self.ram.holds(slot) {
                let told = self.ram.parted_pages(&self.pagemap, slot, write);
                told.map_err(failed("/proc/self/pagemap"))?;
            } else {
                // A machine's other memory is small, and no part of the base.
                write(0..slot.pages());
            }
            result.map_err(failed("copying pages"))?;
        }
        Ok(())
    }

    /// Why memory could not part from its file.
    fn why_whole(&self, error: &io::Error) -> String {
        let (backing, size) = (self.ram.config.backing, self.ram.config.size);
        let page = backing.page_size();
        if page > host_page() && error.raw_os_error() == Some(libc::ENOMEM) {
            let (pages, page) = (size / page, short_size(page));
            return format!(
                "its memory is huge pages, of which it takes {pages} more of {page} than the host has free"
            );
        }
        format!("its memory cannot be mapped privately: {error}")
    }
}

/// Why what memory has parted from could not be sealed.
fn why_writable(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY) => "another process maps its memory and could write to it".into(),
        _ => format!("its memory cannot be sealed: {error}"),
    }
}
