//! `cargo bench --bench dirty`: what Vellum adds to KVM's ioctls when a dirty log is harvested.
//!
//! A guest of 4 GiB dirties none, 1 % and all of its pages. A harvest is collect, scan and clear
//! through `DirtyTracker`. It is compared with the bare ioctls: one get, and if a page is dirty one
//! clear of the whole memslot, over a buffer of their own. The two take turns, so that other load
//! affects both alike. A clean bitmap of 512 KiB (16 GiB of guest) is scanned too. `-- 0 1`
//! measures only these percentages.

use std::hint::black_box;
use std::time::Instant;

use vellum_guests::guest::GuestConfig;
use vellum_guests::{Guest, WriteConfig};
use vellum_kvm::dirty::{self, DirtyTracker, Method, SlotLog, scan};
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_kvm::vm;
use vellum_sys::dirty as sys;

const SIZE: u64 = 4 << 30;
/// Few rounds if one takes seconds, many if it takes milliseconds.
fn rounds(percent: u64) -> usize {
    if percent > 10 { 41 } else { 401 }
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Dirties about `percent` of memory.
fn dirty(guest: &Guest, percent: u64) {
    let Some(stride) = (4096 * 100u64).checked_div(percent) else { return };
    // In lockstep the guest rings after each pass, however many it has done before.
    let config = WriteConfig { passes: 0, lockstep: true, stride, latency: false, ..WriteConfig::default() };
    guest.program(&config).expect("program");
    guest.resume();
    guest.wait_all_rung().expect("the guest's pass");
}

/// Collects by the bare ioctls. Returns the seconds of get and of clear.
fn bare(guest: &Guest, words: &mut [u64]) -> [f64; 2] {
    let slots = guest.vm.memory.slots();
    let mut parts = [0.0; 2];
    let mut rest = words;
    for slot in slots {
        let pages = slot.pages();
        let (own, others) = rest.split_at_mut(scan::words_for(pages));
        let start = Instant::now();
        // SAFETY: one word for each 64 pages of the memslot.
        unsafe { sys::get_log(&guest.vm.fd, slot.id(), own) }.expect("KVM_GET_DIRTY_LOG");
        parts[0] += start.elapsed().as_secs_f64();
        // An empty log is not cleared. Finding that out is not one of the ioctls, so it is not
        // timed.
        if !scan::is_clean(own) {
            let start = Instant::now();
            sys::clear_log(&guest.vm.fd, slot.id(), 0, pages as u32, own).expect("KVM_CLEAR_DIRTY_LOG");
            parts[1] += start.elapsed().as_secs_f64();
        }
        rest = others;
    }
    parts
}

/// Collects as a migration would. Returns the seconds of get, clear and the scan for runs, and the
/// pages found.
fn harvest(tracker: &mut dyn DirtyTracker) -> ([f64; 3], u64) {
    let mut last = Instant::now();
    let mut lap = || {
        let now = Instant::now();
        (now - std::mem::replace(&mut last, now)).as_secs_f64()
    };
    tracker.get().expect("get");
    let get = lap();
    tracker.clear().expect("clear");
    let clear = lap();
    let pages = tracker.logs().iter().flat_map(SlotLog::runs).map(|run| run.end - run.start).sum();
    ([get, clear, lap()], pages)
}

fn main() {
    let kvm = match vm::open() {
        Ok(kvm) => kvm,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    scan_speed();
    let memory = match Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(SIZE)) {
        Ok(memory) => memory,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let mut guest = Guest::build(&kvm, memory, GuestConfig::new(1)).expect("guest");
    // Populated before anything is timed.
    dirty(&guest, 100);
    let (vm, quiesced) = guest.quiesced().expect("a paused guest");
    let mut tracker = dirty::tracker(Method::ManualProtect, vm, &quiesced, None).expect("tracker");
    guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id())).expect("track");
    tracker.enable(true).expect("log");
    let mut words = vec![0; (SIZE / 4096 / 64) as usize];
    println!("harvest of {} GiB with manual protection, in turn with the bare ioctls, medians:", SIZE >> 30);
    let asked: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    for percent in if asked.is_empty() { vec![0, 1, 100] } else { asked } {
        // Get and clear bare, the same through the tracker, and the scan for runs.
        let mut samples = [const { Vec::new() }; 5];
        let mut ratios = Vec::new();
        let mut found = 0;
        let rounds = rounds(percent);
        for round in 0..rounds {
            let (mut ioctls, mut vellum) = ([0.0; 2], [0.0; 3]);
            // They take turns to go first, because the second one finds the host's caches as the
            // first has left them.
            for turn in 0..2 {
                dirty(&guest, percent);
                if (round + turn) % 2 == 0 {
                    ioctls = bare(&guest, &mut words);
                } else {
                    (vellum, found) = harvest(&mut *tracker);
                }
            }
            ratios.push(vellum.iter().sum::<f64>() / ioctls.iter().sum::<f64>());
            samples.iter_mut().zip(ioctls.iter().chain(&vellum)).for_each(|(all, one)| all.push(*one));
        }
        let [get, clear, own_get, own_clear, scan] = samples.map(|mut samples| median(&mut samples) * 1e6);
        ratios.sort_by(f64::total_cmp);
        let more = |ratio: f64| (ratio - 1.0) * 100.0;
        // Ranks around the median by the binomial distribution, which is nearly normal for one
        // half.
        let spread = (0.98 * (rounds as f64).sqrt()).ceil() as usize;
        println!(
            "  {percent:3} % dirty ({found:7} pages): bare get {get:.1} + clear {clear:.1} us; Vellum get {own_get:.1} + clear \
             {own_clear:.1} + scan for runs {scan:.1} us; together {:+.1} % (quartiles {:+.1} to {:+.1} %; the median's own \
             95 % interval {:+.1} to {:+.1} %)",
            more(ratios[rounds / 2]),
            more(ratios[rounds / 4]),
            more(ratios[rounds * 3 / 4]),
            more(ratios[(rounds / 2).saturating_sub(spread)]),
            more(ratios[(rounds / 2 + spread).min(rounds - 1)]),
        );
    }
}

fn scan_speed() {
    let words = vec![0u64; (512 << 10) / 8];
    let mut samples: Vec<f64> = (0..101)
        .map(|_| {
            let start = Instant::now();
            assert!(scan::is_clean(black_box(&words)));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    let mut runs: Vec<f64> = (0..101)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(scan::runs(black_box(&words), words.len() as u64 * 64).count(), 0);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    let (clean, runs) = (median(&mut samples), median(&mut runs));
    println!("a clean bitmap of 512 KiB (16 GiB of guest), medians of 101:");
    println!("  tested for cleanness {clean:6.1} us, {:.1} GiB/s", 512.0 / 1048576.0 / (clean / 1e6));
    println!("  searched for runs    {runs:6.1} us");
}
