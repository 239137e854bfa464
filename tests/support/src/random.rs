//! Random numbers for tests, from a seed that is printed.

use std::time::{SystemTime, UNIX_EPOCH};

/// An xorshift64 generator. `VELLUM_SEED` repeats a run.
pub struct Random(u64);

impl Random {
    /// A generator with the seed of `VELLUM_SEED`, or of the time.
    pub fn new() -> Self {
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
        let seed = std::env::var("VELLUM_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(clock);
        eprintln!("VELLUM_SEED={seed}");
        Self::of(seed)
    }

    /// A generator with this seed.
    pub fn of(seed: u64) -> Self {
        // The state must not be zero.
        Self(seed | 1)
    }

    /// A generator for another thread.
    pub fn split(&mut self) -> Self {
        Self(self.below(u64::MAX) | 1)
    }

    /// A number below `bound`, or 0 if that is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}
