//! The time between saving a machine and restoring it: the part of its clocks that all
//! architectures share.

use std::time::Duration;

use vellum_sys::clock;

/// Whether the time between saving and restoring counts for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockPolicy {
    /// It counts, by the hosts' real time: a migration.
    Passes,
    /// It does not count: a snapshot.
    Stands,
}

impl ClockPolicy {
    /// The guest's time from real time `then` to `now`, both in nanoseconds.
    pub fn passed(self, then: u64, now: u64) -> Duration {
        match self {
            Self::Passes => Duration::from_nanos(now.saturating_sub(then)),
            Self::Stands => Duration::ZERO,
        }
    }
}

/// The host's real time in nanoseconds.
pub fn now() -> u64 {
    clock::realtime().as_nanos() as u64
}
