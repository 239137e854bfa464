//! The thread that saves a machine for a live update of the host's kernel. Its RAM stays where it is:
//! a client has the kernel preserve the memfd, and the next kernel hands it over with its pages. Only
//! the state, and the pages of memory that is not RAM, go into files in the form of a
//! [`snapshot`](crate::snapshot)'s point.
//!
//! The client preserves the memory while the guest runs, because that gives each hole a page. Then it
//! says so ([`SenderCommand::Preserved`]), and the machine is paused and saved. From here on nothing
//! may write to its memory. So the guest does not run again, unless the client disconnects: it then
//! has given up what was preserved.

use std::sync::atomic::Ordering;

use crate::events::{Moving, Said, SenderCommand, SenderEvent, Written};
use crate::saving::{End, WrittenDown, failed, write_down};
use crate::snapshot::layer::Writer;
use crate::snapshot::{Files, disk};
use crate::threads::Mine;
use vellum_kvm::arch::clocks;
use vellum_kvm::memory::Backing;
use vellum_machine as machine;
use vellum_sys::plant::{self, Mistake};

/// The thread.
pub(crate) struct Preserving {
    machine: Mine<Said, SenderCommand>,
    what: Moving,
    files: Files,
    disks: Vec<machine::Disk>,
}

impl Preserving {
    /// Saves `what` into the empty `files`, once its memory is preserved.
    ///
    /// # Errors
    /// Its memory cannot be preserved. The message is for the user.
    pub fn new(
        what: Moving,
        files: Files,
        disks: Vec<machine::Disk>,
        machine: Mine<Said, SenderCommand>,
    ) -> Result<Self, String> {
        what.ram.can_be_handed_over()?;
        if what.ram.config.backing != Backing::Memfd {
            return Err(format!(
                "its memory is {}, and kernels preserve only memfd",
                what.ram.config.backing
            ));
        }
        if !what.ram.mapping.is_complete() {
            return Err("a part of its memory is not here yet".into());
        }
        Ok(Self { machine, what, files, disks })
    }

    /// Runs until the client disconnects or the event loop's thread has ended.
    pub fn run(self) {
        let why = match self.save() {
            Ok(()) => "the live update is over".to_owned(),
            Err(End::Failed(why)) => why,
            Err(End::Orphaned) => return,
        };
        // This fails only if the event loop has ended.
        let _ = self.machine.say(Said::SenderEvent(SenderEvent::Stayed(why)));
    }

    fn save(&self) -> Result<(), End> {
        // The guest still runs, so that the pause is short.
        disk::flush(&self.disks).map_err(End::Failed)?;
        self.wait_until_preserved()?;
        let ram = self.files.ram.try_clone().map_err(failed("another descriptor of a file"))?;
        let mut writer = Writer::new(ram, &self.what.memory).map_err(failed("the file for pages"))?;
        let sections = self.machine.save()?;
        let taken = clocks::now();
        let disks = disk::saved(&self.disks, &[]).map_err(End::Failed)?;
        // After the state: saving a vCPU makes KVM write to guest memory.
        let others = self.what.memory.iter().enumerate().filter(|(_, slot)| !self.what.ram.holds(slot));
        for (region, slot) in others {
            writer.write(region, slot, 0..slot.pages()).map_err(failed("copying pages"))?;
        }
        let WrittenDown { layer, state_bytes, state_crc } =
            write_down(&self.files, &self.what.describe, &sections, writer)?;
        let written = Written { full: false, taken, passes: 1, layer, state_bytes, state_crc, disks };
        self.machine.say(Said::SenderEvent(SenderEvent::Preserved(written)))?;
        if plant::is(Mistake::PageAfterSave) {
            // In the middle of memory, where guests have their data.
            let words = self.what.ram.mapping.words();
            words[words.len() / 2..][..512].iter().for_each(|word| {
                word.fetch_add(1, Ordering::Relaxed);
            });
        }
        loop {
            if let SenderCommand::Cancel(why) = self.machine.wait()? {
                return Err(End::Failed(why));
            }
        }
    }

    fn wait_until_preserved(&self) -> Result<(), End> {
        loop {
            match self.machine.wait()? {
                SenderCommand::Preserved => return Ok(()),
                SenderCommand::Cancel(why) => return Err(End::Failed(why)),
                _ => {}
            }
        }
    }
}
