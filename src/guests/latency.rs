//! Turns latencies counted in log-linear buckets, by a guest or a benchmark, into distributions of
//! a result.

use super::control::{BUCKETS, SUB_BITS, bucket_bound};
use super::guest::Guest;
use vellum_report::{Histogram, Label};

/// The largest relative error of a bucket: how far its bound may lie above the values in it. See
/// [`bucket_bound`].
pub const BUCKET_RESOLUTION: f64 = 1.0 / (1u64 << SUB_BITS) as f64;

/// Returns the write latencies of all vCPUs in nanoseconds.
pub fn of_writes(guest: &Guest) -> Histogram {
    let mut sum = vec![0; BUCKETS];
    let mut slowest = 0;
    for control in guest.controls() {
        sum.iter_mut().zip(control.latency_snapshot()).for_each(|(sum, count)| *sum += count);
        slowest = slowest.max(control.slowest_of_all());
    }
    nanoseconds("write_latency".into(), &sum, slowest, guest.tsc_hz)
}

/// Returns log-linear buckets of ticks (see [`bucket_bound`]) as a distribution in nanoseconds. The
/// largest value is `slowest`. Buckets with the same bound in nanoseconds become one.
pub fn nanoseconds(label: Label, counts: &[u64], slowest: u64, hz: u64) -> Histogram {
    let in_ns = |ticks: u64| ticks as f64 * 1e9 / hz as f64;
    let mut buckets: Vec<(f64, u64)> = Vec::new();
    for (index, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
        let bound = in_ns(bucket_bound(index)).max(1.0);
        match buckets.last_mut() {
            Some(last) if last.0 == bound => last.1 += count,
            _ => buckets.push((bound, count)),
        }
    }
    let max = (!buckets.is_empty()).then_some(in_ns(slowest));
    Histogram { name: label.name, index: label.index, unit: "ns".into(), buckets, max }
}
