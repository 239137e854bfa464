//! A cap on bandwidth: a token bucket, on a clock of the caller's.

use std::time::Duration;

/// How much may be sent at once under a cap: what it allows in this time.
const BURST: Duration = Duration::from_millis(10);

/// The cap of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Bytes a second, where there is a cap.
    cap: Option<u64>,
    /// So many bytes were sent in the time since then.
    since: Duration,
    sent: u64,
}

impl Pace {
    /// Of so many bytes a second at most.
    pub fn new(cap: Option<u64>) -> Self {
        Self { cap, ..Self::default() }
    }

    /// From now on another cap, where it is another.
    pub fn set(&mut self, cap: Option<u64>) {
        if self.cap != cap {
            *self = Self::new(cap);
        }
    }

    /// So many bytes have been sent, `now` after the beginning.
    pub fn sent(&mut self, bytes: u64, now: Duration) {
        let Some(cap) = self.cap else { return };
        let allowed = (now.saturating_sub(self.since).as_secs_f64() * cap as f64) as u64;
        if allowed > self.sent {
            // What was not used is not saved up.
            (self.since, self.sent) = (now, 0);
        }
        self.sent += bytes;
    }

    /// How long the cap wants the next block to wait, if at all.
    pub fn holds_back(&self, now: Duration) -> Option<Duration> {
        let cap = self.cap?;
        let due = self.since + Duration::from_secs_f64(self.sent as f64 / cap.max(1) as f64);
        due.checked_sub(now + BURST).filter(|wait| !wait.is_zero())
    }
}
