//! The schedule of dirty_log_perf_test: the guest accesses its memory once and stops, the log is
//! collected, and so on.

use std::time::Instant;

use super::machine::Run;
use super::measured::{Lockstep, Pass, Phase, Round, Schedule, When};
use crate::Error;
use vellum_report::Mark;

impl Run<'_> {
    /// Runs the schedule of dirty_log_perf_test.
    pub(super) fn lockstep(&mut self) -> Result<Round, Error> {
        let before = self.pass()?;
        self.end_phase(Some(Phase::Before));
        let start = Instant::now();
        self.tracker.enable(true)?;
        let enable = start.elapsed().as_secs_f64();
        let mut passes = Vec::new();
        for iteration in 0..self.config.iterations {
            match self.iteration() {
                // The guest stops in the middle of its pass. Earlier passes remain.
                Err(error) if iteration > 0 && error.interrupted().is_some() => {
                    self.report.cut_short = Some(format!(
                        "interrupted in pass {iteration}: the figures cover earlier passes, and nothing was measured after logging"
                    ));
                    break;
                }
                pass => passes.push(pass?),
            }
        }
        self.end_phase(Some(Phase::During));
        let now = self.counted.now();
        self.count_mapped(When::Logged, &now);
        if passes.len() < self.config.iterations as usize {
            self.end = now;
            return Ok(self.measured(
                enable,
                None,
                Schedule::Lockstep(Lockstep { before, passes, after: None }),
            ));
        }
        if self.config.run_while_disabling {
            self.guest.resume();
        }
        let start = Instant::now();
        self.tracker.enable(false)?;
        let disable = start.elapsed().as_secs_f64();
        if self.config.run_while_disabling {
            self.finish_pass()?;
            self.end_phase(Some(Phase::Disabling));
        }
        let after = self.pass()?;
        self.end_phase(Some(Phase::After));
        self.finish();
        let schedule = Schedule::Lockstep(Lockstep { before, passes, after: Some(after) });
        Ok(self.measured(enable, Some(disable), schedule))
    }

    /// One pass while logging, and its collection.
    fn iteration(&mut self) -> Result<Pass, Error> {
        let began = self.clock.elapsed().as_secs_f64();
        let write = self.pass()?;
        let start = self.clock.elapsed().as_secs_f64();
        let (collected, pages) = self.collect()?;
        let end = start + collected.get + collected.clear;
        self.pictures.marks.push(Mark { name: "dirtying".into(), start: began, end: start });
        self.pictures.marks.push(Mark { name: "collection".into(), start, end });
        Ok(Pass { write, collected, pages })
    }
}
