//! The continuous schedule: the guest runs while the log is collected. Its progress is sampled and
//! plotted over time with the collections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::machine::Run;
use super::measured::{Continuous, Parts, Phase, Round, Schedule, When};
use crate::Error;
use vellum_guests::Guest;
use vellum_guests::control::Control;
use vellum_report::{Mark, Series};
use vellum_sys::signal;

/// The most marks in a plot. Collections that are closer share a mark.
const MARKS: f64 = 1000.0;

/// The sampling interval of the guest's progress.
const SAMPLING: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// Collects as fast as possible while the guest runs.
    pub(super) fn continuous(&mut self, duration: Duration) -> Result<Round, Error> {
        self.write.lockstep = false;
        self.guest.program(&self.write)?;
        self.clock = Instant::now();
        let (clock, stop) = (self.clock, AtomicBool::new(false));
        let around = duration / 4;
        let own = self.guest.own_memory();
        let vcpus = self.config.region.vcpus;
        self.guest.resume();
        let (series, result) = std::thread::scope(|scope| {
            let (own, stop) = (&own, &stop);
            let sampler = scope.spawn(move || {
                let controls: Vec<&Control> =
                    (0..vcpus).filter_map(|vcpu| Guest::control_in(own, vcpu)).collect();
                sample(&controls, clock, stop)
            });
            let result = self.phases(duration, around);
            stop.store(true, Ordering::Relaxed);
            (sampler.join().unwrap_or_default(), result)
        });
        let logged = result?;
        self.pictures.series = series;
        self.guest.request_stop();
        self.finish_pass()?;
        self.finish();
        Ok(self.measured(logged.enable, Some(logged.disable), Schedule::Continuous(logged.measured)))
    }

    /// Measures the guest's progress and write latencies before, during and after logging.
    fn phases(&mut self, duration: Duration, around: Duration) -> Result<Logged, Error> {
        let leave_alone = |_: &mut Self| {
            let start = Instant::now();
            while start.elapsed() < around && signal::last().is_none() {
                std::thread::sleep(SAMPLING.min(around));
            }
            Ok(())
        };
        let ((), before) = self.phase(Phase::Before, leave_alone)?;
        let (mut logged, during) = self.phase(Phase::During, |run| run.collections(duration))?;
        let ((), after) = self.phase(Phase::After, leave_alone)?;
        if signal::take().is_some() {
            let end = self.clock.elapsed().as_secs_f64();
            self.report.cut_short =
                Some(format!("interrupted after {end:.1} s: phases are shorter than requested"));
        }
        logged.measured = Continuous { before, during, after, ..logged.measured };
        Ok(logged)
    }

    /// Runs `act`. Returns its result and the guest's pages per second meanwhile.
    fn phase<T>(
        &mut self,
        phase: Phase,
        act: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, f64), Error> {
        let done = |run: &Self| run.guest.controls().map(|c| c.done.load(Ordering::Relaxed)).sum::<u64>();
        let (start, before) = (Instant::now(), done(self));
        let result = act(self)?;
        let rate = (done(self) - before) as f64 / start.elapsed().as_secs_f64();
        self.end_phase(Some(phase));
        Ok((result, rate))
    }

    /// Collects again and again for `duration`.
    fn collections(&mut self, duration: Duration) -> Result<Logged, Error> {
        let start = Instant::now();
        self.tracker.enable(true)?;
        let enable = start.elapsed().as_secs_f64();
        let (mut total, mut longest) = (Parts::default(), Parts::default());
        let (mut collections, mut pages) = (0u64, 0);
        let pixel = duration.as_secs_f64() / MARKS;
        while start.elapsed() < duration && signal::last().is_none() {
            let began = self.clock.elapsed().as_secs_f64();
            let (parts, found) = self.collect()?;
            let end = self.clock.elapsed().as_secs_f64();
            match self.pictures.marks.last_mut().filter(|mark| began - mark.start < pixel) {
                Some(mark) => mark.end = end,
                None => self.pictures.marks.push(Mark { name: "collections".into(), start: began, end }),
            }
            total = total.each(parts, |sum, part| sum + part);
            longest = longest.each(parts, f64::max);
            (collections, pages) = (collections + 1, pages + found);
        }
        let now = self.counted.now();
        self.count_mapped(When::Logged, &now);
        let start = Instant::now();
        self.tracker.enable(false)?;
        let disable = start.elapsed().as_secs_f64();
        let (before, during, after) = (0.0, 0.0, 0.0);
        let measured = Continuous { before, during, after, collections, total, longest, pages };
        Ok(Logged { enable, disable, measured })
    }
}

/// The results while logging.
struct Logged {
    enable: f64,
    disable: f64,
    measured: Continuous,
}

/// Samples each vCPU's progress over time until `stop`.
fn sample(controls: &[&Control], clock: Instant, stop: &AtomicBool) -> Vec<Series> {
    let done = || controls.iter().map(|control| control.done.load(Ordering::Relaxed));
    let mut series: Vec<Series> = (0..controls.len())
        .map(|vcpu| Series {
            name: "progress".into(),
            index: Some(format!("vcpu{vcpu}")),
            unit: "pages/s".into(),
            points: Vec::new(),
        })
        .collect();
    let (mut last, mut before) = (clock.elapsed().as_secs_f64(), done().collect::<Vec<_>>());
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(SAMPLING);
        let now = clock.elapsed().as_secs_f64();
        for ((series, before), done) in series.iter_mut().zip(&mut before).zip(done()) {
            series.points.push((last, (done - *before) as f64 / (now - last)));
            *before = done;
        }
        last = now;
    }
    series
}
