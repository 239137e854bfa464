//! The bell: where the vCPU threads of a built-in guest leave word that they have rung the doorbell, or that they are over.
//! What a ring means to the one who waits is [`Guest`](super::Guest)'s.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use vellum_sys::clock;

/// What vCPUs have rung since somebody last asked.
pub(super) struct Rung {
    /// The latest ring of each vCPU; 0 for none.
    pub(super) codes: Vec<u64>,
    /// vCPUs whose thread is over.
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
    /// Nobody has rung yet.
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

    /// Waits until something is left here, at most as long as `limit`.
    pub(super) fn wait<'a>(&'a self, rung: MutexGuard<'a, Rung>, limit: Duration) -> MutexGuard<'a, Rung> {
        self.changed.wait_timeout(rung, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// What each vCPU has rung, and 0 where it has not.
    pub(super) fn rung(&self) -> Vec<u64> {
        self.lock().codes.clone()
    }

    /// Takes over what they have rung in another process.
    pub(super) fn set_rung(&self, codes: Vec<u64>) {
        self.note(|rung| rung.codes = codes);
    }

    /// When the first ring came, on CLOCK_MONOTONIC.
    pub fn first(&self) -> Option<Duration> {
        self.first.get().copied()
    }

    /// A vCPU has rung `code`.
    pub(super) fn ring(&self, vcpu: usize, code: u64) {
        self.first.get_or_init(clock::monotonic);
        self.note(|rung| rung.codes[vcpu] = code);
    }

    /// A vCPU's thread is over.
    pub(super) fn end(&self) {
        self.note(|rung| rung.ended += 1);
    }

    fn note(&self, change: impl FnOnce(&mut Rung)) {
        change(&mut self.lock());
        self.changed.notify_all();
        // Full only after 2^64 - 2 rings that nobody read.
        let _ = self.event.write(1);
    }
}
