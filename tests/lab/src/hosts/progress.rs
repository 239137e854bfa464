//! The time that an emulated host has had. On a busy machine more time passes, because the emulator
//! waits for a CPU. Limits are there to end hangs, so they count only a host's own time.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// The interval between two looks at the emulator.
const BETWEEN: Duration = Duration::from_secs(1);

/// The time of an emulator's process.
pub struct Progress {
    process: u32,
    had: Duration,
    mark: Instant,
    /// How long each of its threads has waited for a CPU.
    waited: BTreeMap<String, Duration>,
}

impl Progress {
    /// Starts to count the time of `process`.
    pub fn of(process: u32) -> Self {
        Self { process, had: Duration::ZERO, mark: Instant::now(), waited: waited(process) }
    }

    /// The time so far.
    pub fn had(&mut self) -> Duration {
        let passed = self.mark.elapsed();
        if passed >= BETWEEN {
            self.mark += passed;
            let now = waited(self.process);
            self.had += without_waits(passed, &self.waited, &now);
            self.waited = now;
        }
        self.had
    }
}

/// The part of `passed` in which no thread waited for a CPU. The host stands still if any thread
/// does: a thread of a CPU waits for the emulator's main thread, for one. A host that idles, as one
/// may that hangs, does not wait.
fn without_waits(
    passed: Duration,
    before: &BTreeMap<String, Duration>,
    now: &BTreeMap<String, Duration>,
) -> Duration {
    let wait = |(thread, waited): (&String, &Duration)| {
        waited.saturating_sub(before.get(thread).copied().unwrap_or_default())
    };
    passed.saturating_sub(now.iter().map(wait).max().unwrap_or_default())
}

/// How long each thread of `process` has waited for a CPU. Empty if the kernel does not tell.
fn waited(process: u32) -> BTreeMap<String, Duration> {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return BTreeMap::new() };
    let waited = |thread: fs::DirEntry| {
        // The time on a CPU, the time in a run queue, both in nanoseconds, and a count.
        let times = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let queued = times.split_whitespace().nth(1)?.parse().ok()?;
        Some((thread.file_name().to_string_lossy().into_owned(), Duration::from_nanos(queued)))
    };
    threads.flatten().filter_map(waited).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn the_longest_wait_is_taken_off() {
        let seconds = |waits: &[(&str, u64)]| -> BTreeMap<String, Duration> {
            waits.iter().map(|(name, wait)| ((*name).to_owned(), Duration::from_secs(*wait))).collect()
        };
        let before = seconds(&[("1", 10), ("2", 10), ("gone", 50)]);
        let now = seconds(&[("1", 13), ("2", 11), ("new", 2)]);
        let of = |passed| without_waits(Duration::from_secs(passed), &before, &now).as_secs();
        assert_eq!((of(10), of(3), of(1)), (7, 0, 0));
        assert_eq!(without_waits(BETWEEN, &before, &BTreeMap::new()), BETWEEN);
    }

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn two_processes_on_one_cpu_wait_for_each_other() {
        if waited(std::process::id()).is_empty() {
            return eprintln!("this kernel has no /proc/PID/schedstat");
        }
        let allowed = fs::read_to_string("/proc/self/status").unwrap();
        let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let cpu = allowed.trim().split([',', '-']).next().unwrap();
        let busy = || {
            let mut command = Command::new("taskset");
            command.args(["-c", cpu, "sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
            Ended(command.spawn().unwrap())
        };
        let [one, _other] = [busy(), busy()];
        let first = waited(one.0.id()).values().sum::<Duration>();
        support::eventually(support::LIMIT, "one waits for the other", || {
            let now = waited(one.0.id()).values().sum::<Duration>();
            Ok((now > first + Duration::from_millis(50)).then_some(()))
        })
        .unwrap();
    }
}
