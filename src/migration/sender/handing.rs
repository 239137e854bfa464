//! A migration to another process of this host, which is handed RAM as a descriptor: nothing of that is followed or sent. What is left are
//! a machine's other memory and its state, which go while it stands still, as in any migration.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Sending;
use crate::source::Event;
use crate::threads::Orphaned;
use vellum_sys::mmap::PAGE_SIZE;

/// Bytes of memory that is still being fetched which are waited for before somebody is listened to.
const STEP: usize = 2 << 20;

impl Sending {
    /// RAM's file, where it is handed over.
    pub(super) fn handed_over(&self) -> Option<Arc<File>> {
        self.ram.file.clone().filter(|_| self.options.hands_over)
    }

    /// Nothing has to be copied while the guest runs: it may be paused at once.
    pub(super) fn hand_over(&mut self) -> Result<(), Orphaned> {
        if self.passes > 0 {
            // Another try would take as long.
            return self.give_up_for("handing it over took longer than the guest may stand still".into());
        }
        let shown = self.ram.shown.get().cloned().unwrap_or_default();
        if self.all_is_there(&shown)? {
            self.pending.push(Event::Converged);
        }
        Ok(())
    }

    /// Waits for what of memory is still to come out of a snapshot: the file has it then. False where somebody had something to say
    /// meanwhile that is more urgent.
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
