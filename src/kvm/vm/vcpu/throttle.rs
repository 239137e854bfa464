//! Taking time from vCPUs: each leaves the guest and sleeps in its own loop for as long as it is told.
//!
//! A share of the time is taken by whoever calls [`Throttle::throttle`] once a period. A throttled vCPU counts as running: what it is told
//! meanwhile, to pause above all, it does at once.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::cycle::Command;
use super::{Shared, Vcpu};

/// A handle on the vCPUs of a machine, for any thread. It keeps no vCPU alive.
#[derive(Clone)]
pub struct Throttle(Vec<Arc<Shared>>);

impl Throttle {
    /// One for `vcpus`.
    pub fn new(vcpus: &[Vcpu]) -> Self {
        Self(vcpus.iter().map(|vcpu| vcpu.shared.clone()).collect())
    }

    /// Has each vCPU that runs leave the guest for `time` from now, whatever it was told to sleep before; returns at once. What is
    /// left of it when a vCPU pauses is forgotten.
    pub fn throttle(&self, time: Duration) {
        self.nap_each(|_| Some(time));
    }

    /// The thread of each vCPU, in their order; 0 where it has ended.
    pub fn threads(&self) -> Vec<u32> {
        self.0.iter().map(|shared| shared.lock().kick.as_ref().map_or(0, |kick| kick.thread())).collect()
    }

    /// The same for as long as `time` says for each vCPU by its number; one for which it says nothing is left alone.
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

    /// Lets all of them go on.
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
    /// Sleeps as long as its vCPU is to nap, unless it is told not to run any more.
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
