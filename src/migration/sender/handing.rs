//! A migration to another process on this host that receives RAM as a descriptor. RAM is neither
//! tracked nor sent. The machine's other memory and its state are sent while it is paused, as in
//! any migration.

use std::fs::File;
use std::sync::Arc;

use super::Sending;
use crate::source::Event;
use crate::threads::Orphaned;

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
        // RAM's file has all memory only then.
        let ram = self.ram.clone();
        let whole = ram.fetch_missing(|| match self.next_event()? {
            Some(event) => {
                self.pending.push(event);
                Ok(false)
            }
            None => Ok(true),
        })?;
        if whole {
            self.pending.push(Event::Converged);
        }
        Ok(())
    }
}
