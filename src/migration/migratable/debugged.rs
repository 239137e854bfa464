//! A machine with a debugger. The machine is paused while the debugger looks at it, in addition to
//! other reasons. It can neither move nor be saved: the debugger's breakpoints in its memory would
//! be copied, and no one could remove them there.

use super::MigratableMachine;
use vellum_control::MigrationBlocker;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::gdb::{Debugger, Door, Wish};
use vellum_machine::{Inspect, Machine};

/// The key of the command line's argument.
pub(super) const KEY: &str = "gdb";

impl<P: Inspect> MigratableMachine<P> {
    /// Lets a debugger connect through `door`. Called before the machine runs.
    pub fn debug(&mut self, door: Door) {
        let (vcpus, ram, slots) =
            (self.machine.debug_handle(), self.machine.ram().guest, self.machine.memory());
        let mut debugger = Debugger::new(door, vcpus, ram, slots, self.wake.clone());
        // The machine has not run yet, so one that waits for its debugger is paused already.
        self.held.debugger = debugger.turn(false) == Wish::Stand;
        self.debugger = Some(debugger);
    }
}

impl<P: Machine> MigratableMachine<P> {
    /// Executes the debugger's requests.
    pub(super) fn serve_debugger(&mut self) {
        while let Some(debugger) = &mut self.debugger {
            match debugger.turn(self.held.debugger) {
                Wish::Nothing => return,
                Wish::Stand => {
                    if !self.stands()
                        && let Err(error) = self.machine.pause()
                    {
                        // The machine continues, and the next turn tries again.
                        tracing::warn!("the debugger: {error}");
                        return;
                    }
                    self.held.debugger = true;
                }
                Wish::Go => self.let_go(),
            }
        }
    }

    /// The debugger no longer pauses the machine.
    fn let_go(&mut self) {
        if std::mem::replace(&mut self.held.debugger, false)
            && let Err(error) = self.let_run()
        {
            tracing::error!("it cannot be started: {error}");
        }
    }

    /// The machine is to end, and its debugger cannot prevent that.
    pub(super) fn dismiss_debugger(&mut self) {
        let Some(mut debugger) = self.debugger.take() else { return };
        let stood = self.stands();
        if !stood && self.machine.pause().is_err() {
            return;
        }
        debugger.dismiss();
        if stood {
            self.let_go();
        } else {
            self.machine.resume();
        }
    }

    /// The guest has ended. Tells the debugger.
    pub(super) fn over(&mut self, exit: Exit) -> Option<Exit> {
        if let Some(debugger) = &mut self.debugger {
            debugger.ended(exit.code());
        }
        Some(exit)
    }

    /// What prevents it from being saved and from moving: its debugger, or the inner machine's
    /// reason.
    pub(super) fn stays(&self) -> Option<MigrationBlocker> {
        self.held_by_debugger().or_else(|| self.machine.info().stays)
    }

    /// What prevents it from being forked: the same, unless a fork copies it.
    pub(super) fn fork_stays(&self) -> Option<MigrationBlocker> {
        self.held_by_debugger().or_else(|| self.machine.info().fork_stays)
    }

    fn held_by_debugger(&self) -> Option<MigrationBlocker> {
        self.debugger.as_ref().map(|_| MigrationBlocker {
            key: KEY.into(),
            name: "debugger".into(),
            why: "what a debugger plants in its memory is known to this process alone".into(),
        })
    }
}
