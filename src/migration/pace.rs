//! A cap on bandwidth: a token bucket on the caller's clock.

use std::time::Duration;

/// The burst: what the cap allows in this time may be sent at once.
const BURST: Duration = Duration::from_millis(10);

/// The cap of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Bytes per second. None without a cap.
    cap: Option<u64>,
    /// `sent` bytes were sent since this time.
    since: Duration,
    sent: u64,
}

impl Pace {
    /// A cap of this many bytes per second.
    pub fn new(cap: Option<u64>) -> Self {
        Self { cap, ..Self::default() }
    }

    /// Changes the cap. Keeps the state if the cap is the same.
    pub fn set(&mut self, cap: Option<u64>) {
        if self.cap != cap {
            *self = Self::new(cap);
        }
    }

    /// Records that `bytes` have been sent, `now` after the beginning.
    pub fn sent(&mut self, bytes: u64, now: Duration) {
        let Some(cap) = self.cap else { return };
        let allowed = (now.saturating_sub(self.since).as_secs_f64() * cap as f64) as u64;
        if allowed > self.sent {
            // Unused bandwidth is not saved up.
            (self.since, self.sent) = (now, 0);
        }
        self.sent += bytes;
    }

    /// How long the cap requires the next block to wait. None without a wait.
    pub fn holds_back(&self, now: Duration) -> Option<Duration> {
        let cap = self.cap?;
        let due = self.since + Duration::from_secs_f64(self.sent as f64 / cap.max(1) as f64);
        due.checked_sub(now + BURST).filter(|wait| !wait.is_zero())
    }
}
