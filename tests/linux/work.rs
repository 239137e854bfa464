//! What a guest does while it moves or is saved, and how it is looked at afterwards: data in memory, a disk that is written, clocks.

use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use support::{Failed, ensure};

use crate::guest::Guest;

/// Of the disk that is written, in sectors.
const SECTORS: u64 = 2048;
/// By how much the guest's clock may have left the host's meanwhile, in seconds.
const CLOCK: f64 = 0.05;

/// What runs in the guest meanwhile: each sector of the disk is written in turn, with a number that rises.
const WORKERS: &str = "\
    (i=0; while i=$((i+1)); do
       printf %-512d $i | dd of=/dev/vda bs=512 seek=$((i % 2048)) conv=notrunc,fsync 2>/dev/null && echo $i > /tmp/flushed.new &&
         mv /tmp/flushed.new /tmp/flushed; done) > /dev/null 2>&1 &
    (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
       [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &";

/// An empty disk for it.
pub fn empty(disk: &Path) -> Result<(), Failed> {
    Ok(fs::write(disk, vec![0; SECTORS as usize * 512])?)
}

/// Begins, with so much data of which the guest has the sum.
pub fn begin(guest: &Guest, mib: u64) -> Result<(), Failed> {
    guest.shell(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={mib} 2>/dev/null && sha256sum /tmp/data > /tmp/sum"
    ))?;
    guest.shell(WORKERS)?;
    // What is counted is there from its first round on.
    guest.shell("until [ -e /tmp/flushed ]; do :; done").map(drop)
}

/// That its data has the sum that it had, and that its clock never went back.
pub fn is_as_it_was(guest: &Guest) -> Result<(), Failed> {
    guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null").map(drop)
}

/// How often the writer of the disk has been round.
pub fn count(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("cat /tmp/flushed")?.trim().parse()?)
}

/// That each sector that was flushed before number `last` was holds its number, or one that came later.
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

/// The guest's uptime, and between which times of this host it was read; in seconds.
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

    /// That as much time has passed there as here since `before`; how long reading took is not known to either.
    pub fn agrees_with(&self, before: &Self) -> Result<(), Failed> {
        let here = self.since(before);
        self.is_within(before, *here.start()..=*here.end())
    }

    /// That the guest saw nothing of `gone` seconds, at least, of what has passed here since `before`.
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
