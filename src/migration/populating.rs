//! Memory of a machine that comes and that is to be there in full: it is populated beside the pages that come, on a thread of its own,
//! and the target is not ready before. What has come by then is not changed by that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use vellum_kvm::memory::Memory;
use vellum_sandbox::{Sandbox, ThreadKind};

/// The thread, as those who wait for it see it. It stops where nobody does any more.
#[derive(Debug)]
pub struct Populating {
    stop: Arc<AtomicBool>,
    end: Receiver<Result<(), String>>,
}

impl Populating {
    /// Begins to populate `memory`.
    ///
    /// # Errors
    /// Where the host refuses a thread.
    pub fn start(memory: Memory, sandbox: Sandbox) -> Result<Self, String> {
        let (said, end) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let populate = move || {
            // It needs no more than the thread of a connection.
            sandbox.enter(ThreadKind::Connection, "populating").map_err(|error| error.to_string())?;
            let whole = memory.populate_here(|_| !stopped.load(Ordering::Relaxed));
            whole.map(drop).map_err(|error| format!("populating memory: {error}"))
        };
        // Whoever waits no longer is not told.
        let body = move || drop(said.send(populate()));
        let started = std::thread::Builder::new().name("populating".into()).spawn(body);
        started.map_err(|error| format!("the thread that populates memory: {error}"))?;
        Ok(Self { stop, end })
    }

    /// Whether all of it is there; waits for that for `time`.
    ///
    /// # Errors
    /// Why it never will be.
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
