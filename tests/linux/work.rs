//! A guest's work while it migrates or is saved, and its checks afterwards: data in memory, a disk
//! that is written, clocks.

use std::ops::RangeInclusive;
use std::time::Instant;

use support::linux::WORKERS;
pub use support::linux::{empty, holds};
use support::{Failed, ensure};

use crate::guest::Guest;

/// How far the guest's clock may deviate from the host's, in seconds.
const CLOCK: f64 = 0.05;

/// Starts the work, with `mib` MiB of data with a known checksum.
pub fn begin(guest: &Guest, mib: u64) -> Result<(), Failed> {
    guest.shell(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={mib} 2>/dev/null && sha256sum /tmp/data > /tmp/sum"
    ))?;
    guest.shell(WORKERS)?;
    // The counter exists from the first round on.
    guest.shell("until [ -e /tmp/flushed ]; do :; done").map(drop)
}

/// Checks that the data has its checksum, and that the clock never went back.
pub fn is_as_it_was(guest: &Guest) -> Result<(), Failed> {
    guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null").map(drop)
}

/// The last number that was written and flushed.
pub fn count(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("cat /tmp/flushed")?.trim().parse()?)
}

/// The guest's uptime in seconds, and the host's times before and after it was read.
pub struct Clock {
    pub guest: f64,
    host: [f64; 2],
}

impl Clock {
    pub fn read(guest: &Guest) -> Result<Self, Failed> {
        static EPOCH: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        let from = EPOCH.elapsed().as_secs_f64();
        let uptime = guest.shell("cat /proc/uptime")?;
        let guest = uptime.split_whitespace().next().unwrap_or_default().parse()?;
        Ok(Self { guest, host: [from, EPOCH.elapsed().as_secs_f64()] })
    }

    /// Checks that as much time has passed in the guest as on the host since `before`, within the
    /// time that reading took.
    pub fn agrees_with(&self, before: &Self) -> Result<(), Failed> {
        let here = self.since(before);
        self.is_within(before, *here.start()..=*here.end())
    }

    /// Checks that at least `gone` seconds of the host's time since `before` did not pass for the
    /// guest.
    pub fn stood_still(&self, before: &Self, gone: f64) -> Result<(), Failed> {
        self.is_within(before, 0.0..=*self.since(before).end() - gone)
    }

    fn since(&self, before: &Self) -> RangeInclusive<f64> {
        self.host[0] - before.host[1]..=self.host[1] - before.host[0]
    }

    fn is_within(&self, before: &Self, here: RangeInclusive<f64>) -> Result<(), Failed> {
        let there = self.guest - before.guest;
        eprintln!("{there:.2} s passed in the guest, {:.2} to {:.2} s here", here.start(), here.end());
        ensure((here.start() - CLOCK..=here.end() + CLOCK).contains(&there), || {
            format!("{there} s passed in the guest, {here:?} s here")
        })
    }
}
