//! How long the host's CPUs have been idle. The clock of an emulated host counts instructions and
//! jumps over idle time. A measurement there must know how much of its time was idle.

use std::fs;
use std::time::Duration;

/// Idle time since boot, summed over CPUs; `None` if the kernel does not report it to this user.
///
/// /proc/stat has it in hundredths of a second. That is coarser than 1 % of the time of many
/// benchmarks, so it is used only if /proc/timer_list has no idle time. That is the case since
/// kernel/sched/cputime.c counts it; the first base kernel here that does is 7.2.
pub fn since_boot() -> Option<Duration> {
    let read = |path| fs::read_to_string(path).ok();
    read("/proc/timer_list").and_then(|text| of_timers(&text)).or_else(|| of_stat(&read("/proc/stat")?))
}

/// The sum of the lines `.idle_sleeptime: 123456 nsecs`.
fn of_timers(timers: &str) -> Option<Duration> {
    let of_cpus = timers.lines().filter_map(|line| line.trim().strip_prefix(".idle_sleeptime"));
    let nanoseconds = of_cpus.map(|value| value.split_whitespace().nth(1)?.parse::<u64>().ok());
    nanoseconds.reduce(|sum, one| sum?.checked_add(one?))?.map(Duration::from_nanos)
}

/// The fourth number in the line of all CPUs, in hundredths of a second (proc_stat(5)).
fn of_stat(stat: &str) -> Option<Duration> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let hundredths: u64 = all.split_whitespace().nth(3)?.parse().ok()?;
    Some(Duration::from_millis(hundredths.checked_mul(10)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_time_of_all_cpus_is_summed() {
        let two = "cpu: 0\n  .idle_entrytime : 9 nsecs\n  .idle_sleeptime : 1500 nsecs\ncpu: 1\n  .idle_sleeptime : 7 nsecs\n";
        assert_eq!(of_timers(two), Some(Duration::from_nanos(1507)));
        assert_eq!(of_timers("Timer List Version: v0.9\n"), None);
        assert_eq!(of_timers("  .idle_sleeptime : many nsecs\n"), None);
    }

    #[test]
    fn without_it_proc_stat_serves() {
        let stat = "cpu  12 0 34 567 8 0 0 0 0 0\ncpu0 12 0 34 567 8 0 0 0 0 0\n";
        assert_eq!(of_stat(stat), Some(Duration::from_millis(5670)));
        assert_eq!(of_stat("cpu0 12 0 34 567\n"), None);
        assert_eq!(of_stat("cpu  12 0 34\n"), None);
        assert_eq!(of_stat("cpu  12 0 34 18446744073709551615\n"), None);
    }
}
