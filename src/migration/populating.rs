//! Populating all memory of an incoming machine, before its guest is paused for it. A separate
//! thread does this, so that the migration's thread can tell the source meanwhile that it is alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use vellum_kvm::memory::Memory;
use vellum_sandbox::{Sandbox, ThreadKind};

/// A handle on the thread. The thread stops when the handle is dropped.
#[derive(Debug)]
pub struct Populating {
    stop: Arc<AtomicBool>,
    end: Receiver<Result<(), String>>,
}

impl Populating {
    /// Starts to populate `memory`.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(memory: Memory, sandbox: Sandbox) -> Result<Self, String> {
        let (said, end) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let populate = move || {
            // The thread needs no more than the thread of a connection.
            sandbox.enter(ThreadKind::Connection, "populating").map_err(|error| error.to_string())?;
            let whole = memory.populate_here(|_| !stopped.load(Ordering::Relaxed));
            whole.map(drop).map_err(|error| format!("populating memory: {error}"))
        };
        // The send fails only if the handle was dropped.
        let body = move || drop(said.send(populate()));
        let started = std::thread::Builder::new().name("populating".into()).spawn(body);
        started.map_err(|error| format!("the thread that populates memory: {error}"))?;
        Ok(Self { stop, end })
    }

    /// A handle on a thread that a test plays. It has populated memory when the test sends that.
    #[cfg(test)]
    pub(crate) fn of_a_test() -> (std::sync::mpsc::Sender<Result<(), String>>, Self) {
        let (said, end) = channel();
        (said, Self { stop: Arc::default(), end })
    }

    /// Waits up to `time` and returns whether all memory is populated.
    ///
    /// # Errors
    /// Populating has failed.
    pub(crate) fn is_done(&self, time: Duration) -> Result<bool, String> {
        match self.end.recv_timeout(time) {
            Ok(result) => result.map(|()| true),
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => Err("the thread that populates memory has failed".into()),
        }
    }
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
