//! Collecting without regard to the guest, which runs through: what it gets done meanwhile is sampled, and shown over time
//! with the collections marked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::PARTS;
use super::machine::Run;
use crate::bench::Error;
use crate::dirty::Method;
use crate::guests::Guest;
use crate::guests::control::Control;
use crate::report::{Mark, Series};
use crate::sys::signal;

/// As many marks are made in the pictures at most; collections that follow closer share one.
const MARKS: f64 = 1000.0;

/// How often the guest's progress is sampled.
const SAMPLING: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// The guest runs through; the collections come as fast as they can.
    pub(super) fn continuous(&mut self, duration: Duration) -> Result<(), Error> {
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
        result?;
        self.series = series;
        if self.tracker.method() == Method::Ring {
            // What was logged to the last, lest a vCPU wait for its ring.
            self.tracker.collect()?;
            self.guest.resume_full()?;
        }
        self.guest.request_stop();
        self.finish_pass()?;
        self.finish();
        Ok(())
    }

    /// Before, while and after the log is on: what the guest gets done, and what each of its writes takes.
    fn phases(&mut self, duration: Duration, around: Duration) -> Result<(), Error> {
        let leave_alone = |_: &mut Self| {
            let start = Instant::now();
            while start.elapsed() < around && signal::last().is_none() {
                std::thread::sleep(SAMPLING.min(around));
            }
            Ok(())
        };
        self.phase("before", leave_alone)?;
        self.phase("during", |run| run.collections(duration))?;
        self.phase("after", leave_alone)?;
        if signal::take().is_some() {
            let after = self.clock.elapsed().as_secs_f64();
            self.report
                .notes
                .push(format!("interrupted after {after:.1} s: phases are shorter than asked for"));
        }
        Ok(())
    }

    fn phase(&mut self, name: &str, act: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<(), Error> {
        let done = |run: &Self| run.guest.controls().map(|c| c.done.load(Ordering::Relaxed)).sum::<u64>();
        let (start, before) = (Instant::now(), done(self));
        act(self)?;
        let rate = (done(self) - before) as f64 / start.elapsed().as_secs_f64();
        self.figure(format!("progress[{name}]"), "pages/s", rate);
        self.end_phase(Some(name));
        Ok(())
    }

    /// Logs for as long as asked, one collection after the other.
    fn collections(&mut self, duration: Duration) -> Result<(), Error> {
        let start = Instant::now();
        self.tracker.enable(true)?;
        self.figure("enable_logging", "s", start.elapsed().as_secs_f64());
        let (mut times, mut longest) = ([0.0; 3], [0.0f64; 3]);
        let (mut count, mut pages) = (0u64, 0);
        let pixel = duration.as_secs_f64() / MARKS;
        while start.elapsed() < duration && signal::last().is_none() {
            let began = self.clock.elapsed().as_secs_f64();
            let (parts, found) = self.collect()?;
            self.guest.resume_full()?;
            let end = self.clock.elapsed().as_secs_f64();
            match self.marks.last_mut().filter(|mark| began - mark.start < pixel) {
                Some(mark) => mark.end = end,
                None => self.marks.push(Mark { name: "collections".into(), start: began, end }),
            }
            times.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
            longest.iter_mut().zip(parts).for_each(|(longest, part)| *longest = longest.max(part));
            (count, pages) = (count + 1, pages + found);
        }
        let now = self.counted.now();
        self.mapped("logged", &now);
        let start = Instant::now();
        self.tracker.enable(false)?;
        self.figure("disable_logging", "s", start.elapsed().as_secs_f64());
        self.guest.resume_full()?;
        self.figure("collections", "", count as f64);
        for ((name, sum), longest) in PARTS.iter().zip(times).zip(longest) {
            self.figure(format!("{name}_total"), "s", sum);
            self.figure(format!("{name}_average"), "s", sum / count.max(1) as f64);
            self.figure(format!("{name}_longest"), "s", longest);
        }
        self.figure("dirty_pages_total", "pages", pages as f64);
        self.figure("dirty_pages_average", "pages", pages as f64 / count.max(1) as f64);
        Ok(())
    }
}

/// What each vCPU got done, over time, until `stop`.
fn sample(controls: &[&Control], clock: Instant, stop: &AtomicBool) -> Vec<Series> {
    let done = || controls.iter().map(|control| control.done.load(Ordering::Relaxed));
    let mut series: Vec<Series> = (0..controls.len())
        .map(|vcpu| Series {
            name: format!("progress[vcpu{vcpu}]"),
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
