//! How long the host's CPUs have been idle. The clock of an emulated host counts instructions and jumps over idle time, so
//! whoever times something there has to know how much of it was in it.

use std::fs;
use std::time::Duration;

/// Idle time since boot, summed over CPUs; `None` where the kernel does not say, or not to this user.
///
/// /proc/stat has the same in hundredths of a second, which is coarser than 1 % of many a benchmark.
pub fn since_boot() -> Option<Duration> {
    parse(&fs::read_to_string("/proc/timer_list").ok()?)
}

/// The sum of the lines `.idle_sleeptime: 123456 nsecs`.
fn parse(timers: &str) -> Option<Duration> {
    let of_cpus = timers.lines().filter_map(|line| line.trim().strip_prefix(".idle_sleeptime"));
    let nanoseconds = of_cpus.map(|value| value.split_whitespace().nth(1)?.parse::<u64>().ok());
    nanoseconds.reduce(|sum, one| sum?.checked_add(one?))?.map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_time_of_all_cpus_is_summed() {
        let two = "cpu: 0\n  .idle_entrytime : 9 nsecs\n  .idle_sleeptime : 1500 nsecs\ncpu: 1\n  .idle_sleeptime : 7 nsecs\n";
        assert_eq!(parse(two), Some(Duration::from_nanos(1507)));
        assert_eq!(parse("Timer List Version: v0.9\n"), None);
        assert_eq!(parse("  .idle_sleeptime : many nsecs\n"), None);
    }
}
