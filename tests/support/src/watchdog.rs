//! Ends a test program in which a test hangs, and names the test. A CI would name only the program.

use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Much longer than a test takes on an emulated host, the slowest, and shorter than a CI's limit
/// for everything.
const OVERALL: Duration = Duration::from_secs(30 * 60);

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
        let running = self.clone();
        thread::spawn(move || {
            loop {
                thread::sleep(Duration::from_secs(10));
                let overdue = running.overdue(OVERALL);
                if !overdue.is_empty() {
                    eprintln!(
                        "\nnot over within {OVERALL:?}, so that this program ends: {}",
                        overdue.join(", ")
                    );
                    process::exit(101);
                }
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
