//! The migration or the snapshot that a machine has under way, as its event loop's thread sees it: the end that speaks to the thread
//! which does it, and what has been measured and decided so far.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::dirty::Method;
use crate::migration::link::GiveUp;
use crate::migration::sender::{Said, Told};
use crate::migration::threads;

/// Where memory and state go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    /// To another process, where the guest goes on.
    Migration,
    /// Into files. It goes on here, or ends here.
    Snapshot { stop: bool },
}

/// The migration or the snapshot that is under way.
pub(super) struct Leaving {
    pub(super) errand: Errand,
    /// None once it is to find nobody there.
    pub(super) thread_end: Option<threads::Machine<Said, Told>>,
    pub(super) give_up: GiveUp,
    pub(super) thread: Option<JoinHandle<()>>,
    /// When the machine was paused for the final pass.
    pub(super) paused: Option<Instant>,
    /// How long it stood still, once it goes on.
    pub(super) stood: Option<Duration>,
    /// When it was to stand still for that, when it did, and when its state had been saved.
    pub(super) steps: [u64; 3],
    /// How its dirty pages are collected, once they are.
    pub(super) tracker: Option<Method>,
    /// Why they are not collected in the way that costs the guest least.
    pub(super) distrust: Option<&'static str>,
    /// For how long the guest had stood still, in microseconds, when it ran on the target, which lacks some of its memory.
    pub(super) ahead: Option<u64>,
    /// Whether the link to that is cut.
    pub(super) severed: bool,
}

impl Leaving {
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    pub(super) fn tell(&self, told: Told) {
        if let Some(thread) = &self.thread_end {
            thread.tell(told);
        }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.give_up.now();
        self.tell(Told::Cancel("its machine is being ended".into()));
        // Then it finds nobody there, whatever it is at.
        self.thread_end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
