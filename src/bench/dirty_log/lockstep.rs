//! The schedule of dirty_log_perf_test: the guest goes over its memory once, stops, the log is collected, and so on.

use std::time::Instant;

use super::PARTS;
use super::machine::Run;
use crate::bench::Error;
use crate::report::Mark;

impl Run<'_> {
    /// dirty_log_perf_test's schedule.
    pub(super) fn lockstep(&mut self) -> Result<(), Error> {
        let (seconds, _) = self.pass(false)?;
        self.figure("dirty_memory[before]", "s", seconds);
        self.end_phase(Some("before"));
        let start = Instant::now();
        self.tracker.enable(true)?;
        self.figure("enable_logging", "s", start.elapsed().as_secs_f64());
        let mut totals = [0.0; 4];
        let mut done = self.config.iterations;
        for iteration in 0..self.config.iterations {
            let began = self.clock.elapsed().as_secs_f64();
            let (seconds, found) = match self.pass(true) {
                // The guest is left in the middle of its pass; what it did before stands.
                Err(error) if iteration > 0 && error.interrupted().is_some() => {
                    self.report.notes.push(format!(
                        "interrupted in pass {iteration}: the figures are of those before, and nothing was measured after logging"
                    ));
                    done = iteration;
                    break;
                }
                result => result?,
            };
            let start = self.clock.elapsed().as_secs_f64();
            let ([get, clear, scan], pages) = self.collect()?;
            self.marks.push(Mark { name: "dirtying".into(), start: began, end: start });
            self.marks.push(Mark { name: "collection".into(), start, end: start + get + clear });
            self.figure(format!("dirty_memory[{iteration}]"), "s", seconds);
            self.figure(format!("get_dirty_log[{iteration}]"), "s", get);
            self.figure(format!("clear_dirty_log[{iteration}]"), "s", clear);
            self.figure(format!("scan_dirty_log[{iteration}]"), "s", scan);
            self.figure(format!("dirty_pages[{iteration}]"), "pages", (pages + found) as f64);
            let parts = [seconds, get, clear, scan];
            totals.iter_mut().zip(parts).for_each(|(total, part)| *total += part);
        }
        for (name, total) in ["dirty_memory"].iter().chain(&PARTS).zip(totals) {
            self.figure(format!("{name}_total"), "s", total);
            self.figure(format!("{name}_average"), "s", total / f64::from(done));
        }
        self.end_phase(Some("during"));
        let now = self.counted.now();
        self.mapped("logged", &now);
        if done < self.config.iterations {
            self.end = now;
            return Ok(());
        }
        if self.config.run_while_disabling {
            self.guest.resume();
        }
        let start = Instant::now();
        self.tracker.enable(false)?;
        self.figure("disable_logging", "s", start.elapsed().as_secs_f64());
        if self.config.run_while_disabling {
            self.finish_pass()?;
            self.end_phase(Some("disabling"));
        }
        let (seconds, _) = self.pass(false)?;
        self.figure("dirty_memory[after]", "s", seconds);
        self.end_phase(Some("after"));
        self.finish();
        Ok(())
    }
}
