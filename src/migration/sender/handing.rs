//! A migration to another process on this host that receives RAM as a descriptor. RAM is neither
//! tracked nor sent. The machine's other memory and its state are sent while it is paused, as in
//! any migration.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Sending;
use crate::source::Event;
use crate::threads::Orphaned;
use vellum_sys::mmap::PAGE_SIZE;

/// While memory is still being fetched, the thread checks for commands after this many bytes.
const STEP: usize = 2 << 20;

impl Sending {
    /// RAM's file, if it is handed over.
    pub(super) fn handed_over(&self) -> Option<Arc<File>> {
        self.ram.shared_file().filter(|_| self.options.hands_over)
    }

    /// Starts a hand-over. No memory has to be copied while the guest runs, so it can be paused at
    /// once.
    pub(super) fn hand_over(&mut self) -> Result<(), Orphaned> {
        if self.passes > 0 {
            // Another attempt would take as long.
            return self.give_up_for("handing it over took longer than the guest may stand still".into());
        }
        let shown = self.ram.shown.get().cloned().unwrap_or_default();
        if self.all_is_there(&shown)? {
            self.pending.push(Event::Converged);
        }
        Ok(())
    }

    /// Waits until all memory from a snapshot has been fetched. RAM's file contains it then.
    /// Returns false if a command arrived meanwhile.
    fn all_is_there(&mut self, shown: &[Range<u64>]) -> Result<bool, Orphaned> {
        for range in shown {
            for at in (range.start..range.end).step_by(STEP) {
                if let Some(event) = self.next_event()? {
                    self.pending.push(event);
                    return Ok(false);
                }
                let words = &self.ram.mapping.words()
                    [at as usize / 8..(at as usize + STEP).min(range.end as usize) / 8];
                words.iter().step_by(PAGE_SIZE as usize / 8).for_each(|word| {
                    word.load(Ordering::Relaxed);
                });
            }
        }
        Ok(true)
    }
}
