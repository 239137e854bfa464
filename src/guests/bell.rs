//! The bell: the vCPU threads of a built-in guest record here that they have rung the doorbell, or
//! that they have ended. [`Guest`](super::Guest) interprets the rings.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use vellum_sys::clock;

/// Rings and ends recorded so far.
pub(super) struct Rung {
    /// The latest ring of each vCPU; 0 for none.
    pub(super) codes: Vec<u64>,
    /// The number of vCPUs whose thread has ended.
    pub(super) ended: usize,
}

/// The bell of one guest.
pub struct Bell {
    rung: Mutex<Rung>,
    changed: Condvar,
    first: OnceLock<Duration>,
    /// Readable after every ring and every end, for event loops.
    pub event: Arc<EventFd>,
}

impl Bell {
    /// A bell without rings.
    pub(super) fn new(vcpus: usize) -> io::Result<Self> {
        Ok(Self {
            rung: Mutex::new(Rung { codes: vec![0; vcpus], ended: 0 }),
            changed: Condvar::new(),
            first: OnceLock::new(),
            event: Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Rung> {
        self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, at most for `limit`.
    pub(super) fn wait<'a>(&'a self, rung: MutexGuard<'a, Rung>, limit: Duration) -> MutexGuard<'a, Rung> {
        self.changed.wait_timeout(rung, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The code that each vCPU has rung, 0 if it has not.
    pub(super) fn rung(&self) -> Vec<u64> {
        self.lock().codes.clone()
    }

    /// Restores the rings of another process.
    pub(super) fn set_rung(&self, codes: Vec<u64>) {
        self.note(|rung| rung.codes = codes);
    }

    /// The time of the first ring, on CLOCK_MONOTONIC.
    pub fn first(&self) -> Option<Duration> {
        self.first.get().copied()
    }

    /// Records that a vCPU has rung `code`.
    pub(super) fn ring(&self, vcpu: usize, code: u64) {
        self.first.get_or_init(clock::monotonic);
        self.note(|rung| rung.codes[vcpu] = code);
    }

    /// Records that a vCPU's thread has ended.
    pub(super) fn end(&self) {
        self.note(|rung| rung.ended += 1);
    }

    fn note(&self, change: impl FnOnce(&mut Rung)) {
        change(&mut self.lock());
        self.changed.notify_all();
        // The counter is full only after 2^64 - 2 unread rings.
        let _ = self.event.write(1);
    }
}
