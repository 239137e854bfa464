//! Where a run's time goes: each part's elapsed time, and the CPU time of its processes.
//!
//! A part ends where the next begins, so the parts add up to the whole. Hosts within a part run in
//! parallel. They have rows of their own below it, which are not added. The slowest tests follow.

use std::fmt::Write;
use std::time::{Duration, Instant};

/// Shorter parts are shown together.
const SHORT: Duration = Duration::from_secs(1);

/// This many tests are listed as the slowest.
const SLOWEST: usize = 25;

/// A part of a run.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    what: String,
    passed: Duration,
    used: Duration,
    /// What ran in parallel in this part.
    within: Vec<(String, Duration)>,
}

/// The parts so far.
#[derive(Debug)]
pub struct Clock {
    mark: (Instant, Duration),
    parts: Vec<Part>,
    within: Vec<(String, Duration)>,
    tests: Vec<(String, Duration)>,
}

impl Clock {
    /// Starts the first part.
    pub fn start() -> Self {
        Self { mark: (Instant::now(), used()), parts: Vec::new(), within: Vec::new(), tests: Vec::new() }
    }

    /// Records the time of something that ran in parallel within the current part.
    pub fn within(&mut self, what: String, passed: Duration) {
        self.within.push((what, passed));
    }

    /// Records the time of a test, by the clock of its host.
    pub fn test(&mut self, what: &str, took: Duration) {
        if took >= SHORT {
            self.tests.push((what.to_owned(), took));
        }
    }

    /// Ends the current part and starts the next.
    pub fn lap(&mut self, what: &str) {
        let mark = (Instant::now(), used());
        let passed = mark.0 - self.mark.0;
        let used = mark.1.saturating_sub(self.mark.1);
        self.mark = mark;
        let within = std::mem::take(&mut self.within);
        self.parts.push(Part { what: what.to_owned(), passed, used, within });
    }

    /// Adds the times of `other`, whose parts ran in parallel within the current part. What their
    /// processes used is in this clock's parts already.
    pub fn add(&mut self, other: Self) {
        for part in other.parts.into_iter().filter(|part| part.passed >= SHORT) {
            self.within.push((part.what, part.passed));
            self.within.extend(part.within);
        }
        self.within.extend(other.within);
        self.tests.extend(other.tests);
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut text = format!("{:60} {:>8} {:>8}\n", "Time", "passed", "of CPUs");
        let mut row = |what: &str, passed: Duration, used: Option<Duration>| {
            let used = used.map(|used| format!("{:>6} s", used.as_secs())).unwrap_or_default();
            let _ = writeln!(text, "  {what:58} {:>6} s {used}", passed.as_secs());
        };
        let (short, long): (Vec<_>, Vec<_>) = self.parts.iter().partition(|part| part.passed < SHORT);
        for part in long {
            row(&part.what, part.passed, Some(part.used));
            part.within.iter().for_each(|(what, passed)| row(&format!("  {what}"), *passed, None));
        }
        let sum = |parts: &[&Part]| {
            let each = parts.iter().map(|part| (part.passed, part.used));
            each.fold((Duration::ZERO, Duration::ZERO), |a, b| (a.0 + b.0, a.1 + b.1))
        };
        if !short.is_empty() {
            let (passed, used) = sum(&short);
            row(&format!("{} parts of less than a second each", short.len()), passed, Some(used));
        }
        let (passed, used) = sum(&self.parts.iter().collect::<Vec<_>>());
        row("the whole", passed, Some(used));
        if !self.tests.is_empty() {
            let mut tests: Vec<_> = self.tests.iter().collect();
            tests.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
            let _ = writeln!(text, "\nThe slowest tests, by the clocks of their hosts");
            for (what, took) in tests.into_iter().take(SLOWEST) {
                let _ = writeln!(text, "  {:>4} s  {what}", took.as_secs());
            }
        }
        text
    }
}

/// The CPU time of all processes that have been waited for.
fn used() -> Duration {
    // SAFETY: rusage is plain data, for which all zeroes is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and outlives the call, which cannot fail then.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    let time = |of: libc::timeval| {
        Duration::from_secs(of.tv_sec.cast_unsigned()) + Duration::from_micros(of.tv_usec.cast_unsigned())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(what: &str, passed: u64, used: u64, within: Vec<(String, Duration)>) -> Part {
        let (passed, used) = (Duration::from_millis(passed), Duration::from_millis(used));
        Part { what: what.into(), passed, used, within }
    }

    #[test]
    fn parts_add_up_and_what_runs_within_one_is_not_added() {
        let mut clock = Clock::start();
        clock.parts = vec![
            part("local: building", 70_000, 130_000, Vec::new()),
            part("local: unit", 400, 300, Vec::new()),
            part("local: other", 700, 600, Vec::new()),
            part("svm: hosts", 100_000, 190_000, vec![("npt=1: boot".into(), Duration::from_secs(30))]),
        ];
        let table = clock.table();
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        let ends = |row: &[&str], end: &[&str]| assert!(row.ends_with(end), "{row:?}");
        ends(&rows[1], &["building", "70", "s", "130", "s"]);
        ends(&rows[2], &["hosts", "100", "s", "190", "s"]);
        ends(&rows[3], &["npt=1:", "boot", "30", "s"]);
        ends(&rows[4], &["each", "1", "s", "0", "s"]);
        ends(&rows[5], &["whole", "171", "s", "320", "s"]);
        assert_eq!(rows.len(), 6);
    }

    #[test]
    fn what_another_clock_has_measured_runs_within_a_part() {
        let (mut clock, mut other) = (Clock::start(), Clock::start());
        let host = vec![("npt=1: boot".into(), Duration::from_secs(30))];
        other.parts = vec![part("hosts", 100_000, 190_000, host), part("short", 10, 0, Vec::new())];
        other.test("npt=1: boot::runs", Duration::from_secs(2));
        clock.add(other);
        clock.lap("local");
        let names: Vec<&str> = clock.parts[0].within.iter().map(|(what, _)| what.as_str()).collect();
        assert_eq!(names, ["hosts", "npt=1: boot"]);
        assert!(clock.parts[0].used < Duration::from_secs(190));
        assert_eq!(clock.tests.len(), 1);
    }

    #[test]
    fn a_part_has_what_its_processes_used() {
        let mut clock = Clock::start();
        let mut busy = std::process::Command::new("sh");
        busy.args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"]);
        assert!(busy.status().unwrap().success());
        clock.lap("busy");
        assert!(clock.parts[0].used > Duration::ZERO);
        assert!(clock.parts[0].passed > Duration::ZERO);
    }
}
