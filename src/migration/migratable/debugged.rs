//! A machine with a debugger: it stands still while that looks at it, beside whatever else holds it. Such a machine neither moves nor is
//! saved, for what the debugger planted in its memory would go along, and nobody there would know of it.

use super::MigratableMachine;
use vellum_control::MigrationBlocker;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::gdb::{Debugger, Door, Wish};
use vellum_machine::{Inspect, Machine};

/// The key of the command line's argument.
pub(super) const KEY: &str = "gdb";

impl<P: Inspect> MigratableMachine<P> {
    /// Lets a debugger come in by `door`. Before it runs.
    pub fn debug(&mut self, door: Door) {
        let (vcpus, ram, slots) =
            (self.machine.debug_handle(), self.machine.ram().guest, self.machine.memory());
        let mut debugger = Debugger::new(door, vcpus, ram, slots, self.wake.clone());
        // It has not run yet: one that waits for its debugger stands still already.
        self.held.debugger = debugger.turn(false) == Wish::Stand;
        self.debugger = Some(debugger);
    }
}

impl<P: Machine> MigratableMachine<P> {
    /// Does what the debugger wants of the machine.
    pub(super) fn serve_debugger(&mut self) {
        while let Some(debugger) = &mut self.debugger {
            match debugger.turn(self.held.debugger) {
                Wish::Nothing => return,
                Wish::Stand => {
                    if !self.stands()
                        && let Err(error) = self.machine.pause()
                    {
                        // It goes on as before, and is asked again with the next turn.
                        tracing::warn!("the debugger: {error}");
                        return;
                    }
                    self.held.debugger = true;
                }
                Wish::Go => self.let_go(),
            }
        }
    }

    /// The debugger holds it no more.
    fn let_go(&mut self) {
        if std::mem::replace(&mut self.held.debugger, false)
            && let Err(error) = self.let_run()
        {
            tracing::error!("it cannot be started: {error}");
        }
    }

    /// It is to come to its end: its debugger has no say in that.
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

    /// The guest has ended, which its debugger is told.
    pub(super) fn over(&mut self, exit: Exit) -> Option<Exit> {
        if let Some(debugger) = &mut self.debugger {
            debugger.ended(exit.code());
        }
        Some(exit)
    }

    /// What keeps it from being saved and from moving: its debugger, or what its machine says.
    pub(super) fn stays(&self) -> Option<MigrationBlocker> {
        let debugger = self.debugger.as_ref().map(|_| MigrationBlocker {
            key: KEY.into(),
            name: "debugger".into(),
            why: "what a debugger plants in its memory is known to this process alone".into(),
        });
        debugger.or_else(|| self.machine.info().stays)
    }
}
