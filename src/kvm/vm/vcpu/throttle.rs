//! Throttles vCPUs: each leaves the guest and sleeps in its own loop for a given time.
//!
//! The caller takes a share of the time by calling [`Throttle::throttle`] once a period. A
//! throttled vCPU counts as running: it obeys commands at once, above all to pause.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::cycle::Command;
use super::{Shared, Vcpu};

/// A handle to the vCPUs of a machine, for any thread. It keeps no vCPU alive.
#[derive(Clone)]
pub struct Throttle(Vec<Arc<Shared>>);

impl Throttle {
    /// A handle to `vcpus`.
    pub fn new(vcpus: &[Vcpu]) -> Self {
        Self(vcpus.iter().map(|vcpu| vcpu.shared.clone()).collect())
    }

    /// Makes each running vCPU leave the guest for `time` from now, replacing earlier sleeps.
    /// Returns at once. A pause drops the rest of the sleep.
    pub fn throttle(&self, time: Duration) {
        self.nap_each(|_| Some(time));
    }

    /// The thread ID of each vCPU, in order; 0 if it has ended.
    pub fn threads(&self) -> Vec<u32> {
        self.0.iter().map(|shared| shared.lock().kick.as_ref().map_or(0, |kick| kick.thread())).collect()
    }

    /// Like [`Throttle::throttle`], with a separate time for each vCPU number. A vCPU without a
    /// time is left alone.
    pub fn nap_each(&self, time: impl Fn(usize) -> Option<Duration>) {
        let now = Instant::now();
        for shared in &self.0 {
            let Some(time) = time(shared.index) else { continue };
            let mut inner = shared.lock();
            inner.nap = Some(now + time);
            shared.throttled.store(true, Ordering::SeqCst);
            inner.interrupt();
            drop(inner);
            shared.changed.notify_all();
        }
    }

    /// Lets all of them continue.
    pub fn wake(&self) {
        for shared in &self.0 {
            shared.lock().nap = None;
            shared.changed.notify_all();
        }
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("vcpus", &self.0.len()).finish()
    }
}

impl Shared {
    /// Sleeps until its vCPU's nap ends, unless it is told to stop running.
    pub(super) fn sleep(&self) {
        let mut inner = self.lock();
        while self.command() == Command::Run
            && let Some(until) = inner.nap
        {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // Out of KVM_RUN, nothing is held back.
            inner.flushed = self.flushes.load(Ordering::SeqCst);
            self.changed.notify_all();
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.nap = None;
        self.throttled.store(false, Ordering::SeqCst);
    }
}
