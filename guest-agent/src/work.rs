//! The workloads: memory, disk, clocks. Each reports results through `tell`, and ends without a
//! listener.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::{DiskWork, Event, MemoryWork, Pattern, sys};

const PAGE: u64 = 4096;
/// Words from one page's stamp to the next.
const WORDS: usize = PAGE as usize / 8;
/// Writes are paced in slices of this length.
const SLICE: Duration = Duration::from_millis(10);

type Tell<'a> = &'a mut dyn FnMut(Event) -> io::Result<()>;

/// Latencies in log-linear buckets: 16 for each power of two.
struct Histogram {
    counts: Vec<u64>,
    max: u64,
}

impl Histogram {
    fn new() -> Self {
        Histogram { counts: vec![0; 64 * 16], max: 0 }
    }

    fn add(&mut self, value: u64) {
        self.max = self.max.max(value);
        self.counts[Self::slot(value)] += 1;
    }

    fn slot(value: u64) -> usize {
        match value {
            0..16 => value as usize,
            _ => {
                let power = value.ilog2() as usize;
                (power - 3) * 16 + (value >> (power - 4)) as usize % 16
            }
        }
    }

    /// The smallest value of a slot.
    fn value(slot: usize) -> u64 {
        match slot {
            0..16 => slot as u64,
            _ => (16 + slot as u64 % 16) << (slot / 16 - 1),
        }
    }

    fn quantile(&self, part: f64) -> u64 {
        let rank = (self.counts.iter().sum::<u64>() as f64 * part) as u64;
        let mut seen = 0;
        let slot = self.counts.iter().position(|count| {
            seen += count;
            seen > rank
        });
        slot.map_or(self.max, Self::value)
    }
}

/// Writes stamps to memory. A page's stamp is its number and its count of writes. The count is also
/// kept separately, so a page that lost a write shows at the next one.
pub fn memory(work: &MemoryWork, tell: Tell<'_>) -> io::Result<()> {
    let pages = work.mib.checked_mul(256).filter(|pages| *pages > 0 && *pages < 1 << 32);
    let Some(pages) = pages else {
        return tell(Event::Error { message: format!("{} MiB of memory", work.mib) });
    };
    // Write each page once, so that it is allocated.
    let memory: Vec<AtomicU64> = (0..pages as usize * WORDS).map(|at| AtomicU64::new(at as u64)).collect();
    let mut written = vec![0u32; pages as usize];
    for page in 0..pages {
        memory[page as usize * WORDS].store(stamp(page, 0), Ordering::Relaxed);
    }

    let per_slice = work.rate_mib * 256 * SLICE.as_millis() as u64 / 1000;
    let per_slice = if work.rate_mib == 0 { u64::MAX } else { per_slice.max(1) };
    let (mut next, mut state, mut wrong) = (0u64, work.seed | 1, 0);
    for number in 1..=work.seconds {
        let second = Instant::now();
        let (mut histogram, mut count) = (Histogram::new(), 0);
        while second.elapsed() < Duration::from_secs(1) {
            let slice = Instant::now();
            let mut done = 0;
            while done < per_slice && slice.elapsed() < SLICE {
                let page = match work.pattern {
                    Pattern::Random => {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        state % pages
                    }
                    _ => next % pages,
                };
                let word = &memory[page as usize * WORDS];
                let before = Instant::now();
                let old = word.load(Ordering::Relaxed);
                let times = &mut written[page as usize];
                let right = old == stamp(page, *times);
                if work.pattern != Pattern::Once || next < pages {
                    *times = times.wrapping_add(1);
                    word.store(stamp(page, *times), Ordering::Relaxed);
                }
                histogram.add(before.elapsed().as_nanos() as u64);
                wrong += u64::from(!right);
                next += 1;
                done += 1;
            }
            count += done;
            sleep(SLICE.saturating_sub(slice.elapsed()));
        }
        let (p50_ns, p99_ns) = (histogram.quantile(0.5), histogram.quantile(0.99));
        let max_ns = histogram.max;
        tell(Event::Memory { second: number, pages: count, p50_ns, p99_ns, max_ns, wrong })?;
        if work.until.as_ref().is_some_and(|path| Path::new(path).exists()) {
            break;
        }
    }
    Ok(())
}

fn stamp(page: u64, times: u32) -> u64 {
    page << 32 | u64::from(times)
}

/// Writes stamps to a disk, flushes it, drops caches, and reads them back.
pub fn disk(work: &DiskWork, tell: Tell<'_>) -> io::Result<()> {
    const CHUNK: usize = 64 << 10;
    let file = OpenOptions::new().read(true).write(true).open(&work.path)?;
    let blocks = (work.mib << 20) / PAGE;
    let per_chunk = CHUNK as u64 / PAGE;
    let mut chunk = vec![0; CHUNK];
    let stamps = |chunk: &mut [u8], first: u64, pass: u64| {
        for (at, block) in (first..).zip(chunk.as_chunks_mut::<{ PAGE as usize }>().0) {
            block.as_chunks_mut().0.iter_mut().for_each(|word| *word = (at << 16 | pass).to_le_bytes());
        }
    };
    for pass in 1..=work.passes {
        let start = Instant::now();
        for first in (0..blocks).step_by(per_chunk as usize) {
            stamps(&mut chunk, first, pass);
            file.write_all_at(&chunk, first * PAGE)?;
        }
        file.sync_all()?;
        let write_ns = start.elapsed().as_nanos() as u64;
        // Otherwise reads would come from the page cache instead of the disk.
        std::fs::write("/proc/sys/vm/drop_caches", "3")?;
        let start = Instant::now();
        let (mut wrong, mut expected) = (0, vec![0; CHUNK]);
        for first in (0..blocks).step_by(per_chunk as usize) {
            stamps(&mut expected, first, pass);
            file.read_exact_at(&mut chunk, first * PAGE)?;
            let pairs = chunk.chunks(PAGE as usize).zip(expected.chunks(PAGE as usize));
            wrong += pairs.filter(|(is, should)| is != should).count() as u64;
        }
        let read_ns = start.elapsed().as_nanos() as u64;
        tell(Event::Disk { pass, bytes: blocks * PAGE, write_ns, read_ns, wrong })?;
    }
    Ok(())
}

/// fallocate(2). On a block device it becomes write-zeroes requests: with UNMAP for a hole, without
/// for a range.
pub fn zero(path: &str, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mode = if unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
    sys::allocate(&file, mode | libc::FALLOC_FL_KEEP_SIZE, offset, bytes)
}

/// Reads the clocks every few milliseconds.
pub fn clock(seconds: u64, tell: Tell<'_>) -> io::Result<()> {
    let look = || (sys::clock(libc::CLOCK_MONOTONIC), sys::clock(libc::CLOCK_REALTIME));
    let first = look();
    let (mut last, mut backwards, mut longest_gap_ns) = (first, 0, 0);
    while last.0 - first.0 < seconds as i64 * 1_000_000_000 {
        sleep(Duration::from_millis(2));
        let now = look();
        backwards += u64::from(now.0 < last.0) + u64::from(now.1 < last.1);
        longest_gap_ns = longest_gap_ns.max((now.0 - last.0).max(0) as u64);
        last = now;
    }
    let drift_ns = (last.1 - first.1) - (last.0 - first.0);
    tell(Event::Clock { backwards, longest_gap_ns, drift_ns })
}

/// Collects what the guest sees.
pub fn facts() -> io::Result<Event> {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    let meminfo = read("/proc/meminfo")?;
    let memory_kib = meminfo.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0);
    let cpus = read("/proc/cpuinfo")?.lines().filter(|line| line.starts_with("processor")).count() as u64;
    let clocksource = read("/sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    Ok(Event::Facts { cpus, memory_kib, clocksource, kernel: read("/proc/sys/kernel/osrelease")? })
}

/// Loads the image's modules. `/modules/order` names them, dependencies first. Returns those that
/// could not be loaded.
pub fn load_modules(order: &str) -> Vec<String> {
    let order = std::fs::read_to_string(format!("/modules/{order}")).unwrap_or_default();
    let load = |name: &str| {
        let result = File::open(format!("/modules/{name}.ko")).and_then(|file| sys::load_module(&file));
        match result {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Some(format!("{name}: {error}")),
            _ => None,
        }
    };
    order.lines().filter_map(load).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_sixteenth() {
        for value in [0, 1, 15, 16, 17, 100, 4095, 1 << 40, u64::MAX] {
            let least = Histogram::value(Histogram::slot(value));
            assert!(least <= value && value - least <= value / 16, "{value} {least}");
        }
        let mut histogram = Histogram::new();
        (1..=1000).for_each(|value| histogram.add(value));
        assert_eq!((histogram.quantile(0.5) / 10, histogram.max), (49, 1000));
    }

    #[test]
    fn memory_that_keeps_its_stamps_is_right() {
        for pattern in [Pattern::Sequential, Pattern::Random, Pattern::Once] {
            // The file exists, so that there is no second second.
            let until = Some("/".to_owned());
            let work = MemoryWork { mib: 1, rate_mib: 2, pattern, seconds: 2, seed: 7, until };
            let mut events = Vec::new();
            memory(&work, &mut |event| {
                events.push(event);
                Ok(())
            })
            .unwrap();
            let [Event::Memory { second: 1, pages, wrong: 0, .. }] = events[..] else { panic!("{events:?}") };
            assert!(pages > 0);
        }
    }
}
