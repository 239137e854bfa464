//! Ends a test program in which a test hangs, and names the test. A CI would name only the program.

use std::env;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Much longer than a test takes on an emulated host, the slowest, and shorter than a CI's limit
/// for everything.
pub const OVERALL: Duration = Duration::from_secs(30 * 60);

/// The environment variable of emulated hosts in real time. Only the laboratory outside knows how
/// much of that time the host had a CPU, so it ends the host. The program only names the test.
pub const OUTSIDE: &str = "VELLUM_WATCHED_OUTSIDE";

/// The tests that are running.
#[derive(Clone, Default)]
pub(crate) struct Running(Arc<Mutex<Vec<(String, Instant)>>>);

impl Running {
    /// Runs `test` and counts it as running. It must not panic.
    pub(crate) fn during<T>(&self, name: &str, test: impl FnOnce() -> T) -> T {
        self.change(|running| running.push((name.to_owned(), Instant::now())));
        let ended = test();
        self.change(|running| running.retain(|(other, _)| other != name));
        ended
    }

    /// Starts the thread that checks for tests that hang.
    pub(crate) fn watch(&self) {
        let (running, outside) = (self.clone(), env::var_os(OUTSIDE).is_some());
        thread::spawn(move || {
            let mut named = Vec::new();
            loop {
                thread::sleep(Duration::from_secs(10));
                let overdue = running.overdue(OVERALL);
                // The laboratory waits for silence, so a test is named once.
                if overdue.is_empty() || (outside && overdue == named) {
                    continue;
                }
                eprintln!(
                    "\nnot over within {OVERALL:?}{}: {}",
                    if outside { " by this host's clock" } else { ", so that this program ends" },
                    overdue.join(", ")
                );
                if !outside {
                    process::exit(101);
                }
                named = overdue;
            }
        });
    }

    fn overdue(&self, limit: Duration) -> Vec<String> {
        let mut overdue = Vec::new();
        self.change(|running| {
            let late = running.iter().filter(|(_, since)| since.elapsed() >= limit);
            overdue.extend(late.map(|(name, _)| name.clone()));
        });
        overdue
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(String, Instant)>)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_overdue_while_it_runs_and_not_after() {
        let running = Running::default();
        let during = running.during("slow", || (running.overdue(Duration::ZERO), running.overdue(OVERALL)));
        assert_eq!(during, (vec!["slow".to_owned()], vec![]));
        assert!(running.overdue(Duration::ZERO).is_empty());
    }
}
