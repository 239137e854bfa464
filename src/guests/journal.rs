//! The journal of a built-in guest: the longest time without a write, progress at the end of each
//! time slice, and write latencies before logging, during it, and after the move to this process.
//! It is stored in the control blocks ([`Control`]), so it moves with the guest and uses the
//! guest's own clock. This module reads it. The assembly in `program/` writes it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::control::{BUCKETS, Control, SLICES, phase};
use super::guest::Guest;
use super::latency::nanoseconds;
use vellum_report::{Label, Mark, Report, Sample, Series};

/// The phases' names in results.
pub const PHASES: [&str; phase::COUNT] = ["before", "during", "after"];

/// The name of the mark without writes because the guest moved.
pub const MOVED: &str = "moved";

/// [`Control::slice_shift`] for slices of at least `slice`.
pub(super) fn shift(slice: Duration, tsc_hz: u64) -> u64 {
    let ticks = (slice.as_secs_f64() * tsc_hz as f64) as u64;
    u64::from(ticks.clamp(1, 1 << 62).next_power_of_two().ilog2())
}

/// Tells every vCPU that another phase begins. The vCPUs are paused. The control blocks' memory is
/// not logged yet, or belongs to this process alone.
pub(super) fn enter(guest: &Guest, phase: u64) {
    guest.controls().for_each(|control| control.phase.store(phase, Ordering::Relaxed));
}

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// Adds the guest's journal to `report`. Time starts at the guest's first write.
pub(super) fn add(report: &mut Report, guest: &Guest) {
    let hz = guest.tsc_hz as f64;
    let writers = || guest.controls().zip(0u32..).filter(|(control, _)| get(&control.origin) > 0);
    let Some(begun) = writers().map(|(control, _)| get(&control.origin)).min() else { return };
    let since = |tsc: u64| tsc.saturating_sub(begun) as f64 / hz;
    let of_vcpus = |value: &dyn Fn(&Control) -> Option<u64>| {
        let sample =
            |(control, vcpu): (&Control, u32)| Some((vcpu, value(control).map(|ticks| ticks as f64 / hz)?));
        let samples = writers().filter_map(sample);
        samples.map(|(vcpu, value)| Sample { value, vcpu: Some(vcpu), ..Sample::default() }).collect()
    };
    report.samples("longest_gap", "s", of_vcpus(&|control| Some(get(&control.gap))));
    let entered = |control: &Control, phase: u64| {
        let [end, gap] = [&control.entered, &control.entered_gap].map(|of| get(&of[phase as usize]));
        (end > 0).then_some((end.saturating_sub(gap), end))
    };
    let moved = |control: &Control| entered(control, phase::MOVED).map(|(start, end)| end - start);
    report.samples("downtime", "s", of_vcpus(&moved));
    // From the last write of any vCPU before to the first after.
    let gap_of_all = |phase| {
        let gaps = writers().filter_map(|(control, _)| entered(control, phase));
        gaps.reduce(|(start, end), (from, to)| (start.max(from), end.min(to)))
    };
    let mut mark = |name: &str, start: u64, end: u64| {
        report.marks.push(Mark { name: name.into(), start: since(start), end: since(end.max(start)) });
    };
    if let (Some((_, start)), Some((end, _))) = (gap_of_all(phase::LOGGED), gap_of_all(phase::MOVED)) {
        mark("logged", start, end);
    }
    if let Some((start, end)) = gap_of_all(phase::MOVED) {
        mark(MOVED, start, end);
    }
    let full = writers().any(|(control, _)| get(&control.slices[SLICES - 1]) > 0);
    report.series.extend(writers().map(|(control, vcpu)| progress(control, vcpu, since, hz)));
    if full {
        report.note(format!("the guest's journal of {SLICES} slices was full before the end"));
    }
    for (phase, name) in PHASES.iter().enumerate() {
        let mut sum = vec![0; BUCKETS];
        let mut slowest = 0;
        for control in guest.controls() {
            sum.iter_mut().zip(control.latency_of(phase)).for_each(|(sum, count)| *sum += count);
            slowest = slowest.max(get(&control.slowest[phase]));
        }
        let histogram = nanoseconds(Label::of("write_latency", name), &sum, slowest, guest.tsc_hz);
        if histogram.count() > 0 {
            report.histograms.push(histogram);
        }
    }
}

/// Pages that a vCPU wrote in each slice, counting a page once a pass. The last slice is omitted,
/// because it may have ended early.
fn progress(control: &Control, vcpu: u32, since: impl Fn(u64) -> f64, hz: f64) -> Series {
    let slice = (1u64 << get(&control.slice_shift).min(62)) as f64 / hz;
    let start = since(get(&control.origin));
    let end = control.slices.iter().rposition(|pages| get(pages) > 0).unwrap_or(0);
    let mut before = 0;
    let mut point = |(slot, pages): (usize, &AtomicU64)| {
        let pages = get(pages).max(before);
        let grown = pages - std::mem::replace(&mut before, pages);
        (start + slot as f64 * slice, grown as f64 / slice)
    };
    let points = control.slices[..end].iter().enumerate().map(&mut point).collect();
    Series { name: "progress".into(), index: Some(format!("vcpu{vcpu}")), unit: "pages/s".into(), points }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_as_long_as_asked_and_not_twice_as_long() {
        for hz in [1_000_000, 2_500_000_000, 4_000_000_000u64] {
            for slice in [1, 20, 300].map(Duration::from_millis) {
                let got = (1u64 << shift(slice, hz)) as f64 / hz as f64;
                assert!((1.0..2.0).contains(&(got / slice.as_secs_f64())), "{hz} {slice:?}: {got}");
            }
        }
    }
}
