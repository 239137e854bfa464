//! A guest's work while it migrates or is saved, and its checks afterwards: data in memory, a disk
//! that is written, clocks.

use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use support::{Failed, ensure};

use crate::guest::Guest;

/// The sectors of the disk that is written.
const SECTORS: u64 = 2048;
/// How far the guest's clock may deviate from the host's, in seconds.
const CLOCK: f64 = 0.05;

/// The programs in the guest: one writes each sector of the disk in turn with increasing numbers,
/// one checks the clock.
const WORKERS: &str = "\
    (i=0; while i=$((i+1)); do
       printf %-512d $i | dd of=/dev/vda bs=512 seek=$((i % 2048)) conv=notrunc,fsync 2>/dev/null && echo $i > /tmp/flushed.new &&
         mv /tmp/flushed.new /tmp/flushed; done) > /dev/null 2>&1 &
    (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
       [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &";

/// Creates an empty disk.
pub fn empty(disk: &Path) -> Result<(), Failed> {
    Ok(fs::write(disk, vec![0; SECTORS as usize * 512])?)
}

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

/// Checks that each sector that was flushed up to number `last` holds its number or a later one.
pub fn holds(disk: &Path, last: u64) -> Result<(), Failed> {
    let disk = fs::File::open(disk)?;
    for number in last.saturating_sub(SECTORS).max(1)..=last {
        let mut sector = [0; 512];
        disk.read_exact_at(&mut sector, number % SECTORS * 512)?;
        let text = String::from_utf8_lossy(&sector).trim().to_owned();
        let found: u64 =
            text.parse().map_err(|_| format!("number {number} was flushed, and {text:?} is there"))?;
        let later = found >= number && (found - number).is_multiple_of(SECTORS);
        ensure(later, || format!("number {number} was flushed, and {found} is there"))?;
    }
    Ok(())
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
