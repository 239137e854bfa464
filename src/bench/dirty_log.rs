//! `dirty-log`: what it costs to log a guest's writes, the host and the guest.
//!
//! Two schedules. *Lockstep* is that of the kernel's dirty_log_perf_test, figure for figure: the guest goes over its
//! memory once, stops, the log is collected, and so on. It times each step well and hides what matters to a
//! guest. *Continuous* leaves the guest alone and collects as fast as it can; what the guest got done meanwhile is
//! sampled, and shown over time with the collections marked. Both measure the write latency that the guest saw before,
//! during and after logging.

pub mod lazy;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Common, Counted, Error, Region, check_memory, check_offset, huge_premise, place};
use crate::dirty::{self, DirtyTracker, Method, SlotLog};
use crate::report::{Figure, Histogram, Mark, Report, Series};
use crate::sys::{host::allowed_cpus, signal};
use crate::vm;
use crate::vm::counters::Snapshot;
use crate::vm::memory::{Memory, MemoryConfig, short_size};
use crate::workload::control::{BUCKETS, Control};
use crate::workload::guest::{GuestConfig, Woke};
use crate::workload::run::nanoseconds;
use crate::workload::{Guest, Hot, Order, WriteConfig};

/// The parts of a collection; `scan` is Vellum's own.
const PARTS: [&str; 3] = ["get_dirty_log", "clear_dirty_log", "scan_dirty_log"];

/// As many marks are made in the pictures at most; collections that follow closer share one.
const MARKS: f64 = 1000.0;

/// How often the guest's progress is sampled.
const SAMPLING: Duration = Duration::from_millis(20);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// Passes over memory while the log is on (lockstep).
    pub iterations: u32,
    /// Memory of each vCPU.
    pub region: Region,
    /// Percent of the accesses that write.
    pub write_percent: f64,
    /// The order of the accesses, populating apart.
    pub order: Order,
    /// The hot set of each vCPU.
    pub hot: Option<Hot>,
    /// Whether all vCPUs work on all memory.
    pub overlap: bool,
    /// Into how many memslots memory is cut.
    pub slots: u32,
    /// How the log is collected; `None` for the best that this host has, as the selftest does.
    pub method: Option<Method>,
    /// Entries of a dirty ring.
    pub ring_entries: u32,
    /// Pages that one clear covers; `None` for whole memslots.
    pub chunk: Option<u64>,
    /// Whether vCPUs run while the log is switched off.
    pub run_while_disabling: bool,
    /// The seed of random orders.
    pub seed: u64,
    /// Where memory starts in the guest's physical address space.
    pub phys_offset: Option<u64>,
    /// How long to collect without regard to the guest; `None` for lockstep.
    pub continuous: Option<Duration>,
    /// Whether the time of each write is measured.
    pub latency: bool,
    /// What all benchmarks have.
    pub common: Common,
}

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("dirty-log");
    let kvm = vm::open()?;
    let total = check(config)?;
    config.common.pin_main(config.region.vcpus)?;
    let probe = crate::host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
    let method = match config.method {
        Some(method) => method,
        // Those with the fewest side effects first, as dirty_log_perf_test chooses.
        None => [Method::InitiallySet, Method::ManualProtect]
            .into_iter()
            .find(|method| method.check(&probe).is_ok())
            .unwrap_or(Method::Bitmap),
    };
    method.check(&probe)?;
    drop(probe);
    ask(&mut report, config, method);
    let mut samples: Vec<(String, &'static str, Vec<f64>)> = Vec::new();
    config.common.each(&mut report, config.common.rounds(), |report, round| {
        let mut run = Run::new(config, method, total, &kvm, report)?;
        match config.continuous {
            None => run.lockstep()?,
            Some(duration) => run.continuous(duration)?,
        }
        let Run { figures, histograms, series, marks, counted, end, .. } = run;
        for (name, unit, value) in figures {
            match samples.iter_mut().find(|sample| sample.0 == name) {
                Some(sample) => sample.2.push(value),
                None => samples.push((name, unit, vec![value])),
            }
        }
        // One round's pictures stand for all; the spread is in the figures.
        if round.index == 0 {
            (report.histograms, report.series, report.marks) = (histograms, series, marks);
            counted.finish(report, end, None);
        }
        Ok(())
    })?;
    for (name, unit, values) in samples {
        match values.as_slice() {
            [value] => report.figure(name, unit, *value),
            values => report.spread(name, unit, values),
        }
    }
    if config.common.repeat > 1 {
        let noise = |figure: &Figure| match figure {
            Figure::Spread { name, unit, median, min, max, .. }
                if unit == "s" && name.ends_with("_average") =>
            {
                let percent = (max - min) / median * 100.0;
                Some(format!(
                    "{name}: a difference below {percent:.1} % is noise here ({} rounds)",
                    config.common.repeat
                ))
            }
            _ => None,
        };
        report.notes.extend(report.figures.iter().filter_map(noise).collect::<Vec<_>>());
    }
    Ok(report)
}

/// Refuses what contradicts itself; returns the bytes of memory needed.
fn check(config: &Config) -> Result<u64, Error> {
    let asked = |reason: String| Err(Error::Asked(reason));
    let Region { bytes, backing, vcpus } = config.region;
    let page = backing.page_size();
    let total = config.region.total(false);
    if !bytes.is_multiple_of(4096) || bytes < 8192 {
        return asked(format!(
            "-b {bytes}: no multiple of 4096 from 8192 on; {} would work",
            bytes.max(8192).next_multiple_of(4096)
        ));
    }
    if !total.is_multiple_of(page) {
        let each = short_size(bytes.next_multiple_of(page));
        return asked(format!(
            "-b {}: {} vCPUs need {} together, no multiple of the {} pages of -s {}; -b {each} would work",
            short_size(bytes),
            vcpus,
            short_size(total),
            short_size(page),
            backing
        ));
    }
    let pages = total / backing.best_mapping().max(4096);
    if u64::from(config.slots) > pages || !pages.is_multiple_of(config.slots.into()) {
        let fits = (1..=u64::from(config.slots).min(pages)).rev().find(|slots| pages.is_multiple_of(*slots));
        return asked(format!(
            "-x {}: {} in pages of {} do not divide into so many memslots; -x {} would work",
            config.slots,
            short_size(total),
            short_size(backing.best_mapping()),
            fits.unwrap_or(1)
        ));
    }
    if let Some(offset) = config.phys_offset {
        check_offset(offset, total, backing)?;
    }
    let cpus = allowed_cpus().map_err(|e| Error::Host("sched_getaffinity", e))?;
    if config.continuous.is_some() && cpus.len() < 2 {
        return asked(
            "--collect continuous: the guest and the collection would take turns on this process's only CPU, and nothing \
             would be decoupled; --collect lockstep works, or allow a second CPU (taskset)"
                .into(),
        );
    }
    // Page tables, KVM's and ours, are some hundredths of it.
    check_memory(total.saturating_add(total / 64), backing)?;
    Ok(total)
}

fn ask(report: &mut Report, config: &Config, method: Method) {
    report.ask("vcpus", config.region.vcpus);
    report.ask("bytes_per_vcpu", config.region.bytes);
    report.ask("backing", config.region.backing.to_string());
    report.ask("tracker", method.name());
    if method == Method::Ring {
        report.ask("ring_entries", config.ring_entries);
    }
    match config.continuous {
        None => {
            report.ask("collect", "lockstep");
            report.ask("iterations", config.iterations);
        }
        Some(duration) => {
            report.ask("collect", "continuous");
            report.ask("duration_seconds", duration.as_secs_f64());
        }
    }
    report.ask("write_percent", config.write_percent);
    report.ask("order", config.order.name());
    if let Some(hot) = config.hot {
        report.ask("hot_percent", hot.percent);
        report.ask("hot_share_percent", hot.share);
    }
    report.ask("overlap", config.overlap);
    report.ask("slots", config.slots);
    report.ask("clear_chunk", config.chunk.map_or("slot".into(), |pages| serde_json::json!(pages)));
    report.ask("run_while_disabling", config.run_while_disabling);
    report.ask("seed", config.seed);
    if let Some(offset) = config.phys_offset {
        report.ask("phys_offset", format!("{offset:#x}"));
    }
    config.common.ask_page(report);
    report.ask("latency", config.latency);
    config.common.ask(report);
}

/// One round on a machine of its own.
struct Run<'a> {
    config: &'a Config,
    report: &'a mut Report,
    // Before the guest, to whose vCPUs its rings belong.
    tracker: Box<dyn DirtyTracker>,
    guest: Guest,
    counted: Counted,
    end: Snapshot,
    clock: Instant,
    write: WriteConfig,
    /// The latency histograms' sum when the current phase began.
    buckets: Vec<u64>,
    figures: Vec<(String, &'static str, f64)>,
    histograms: Vec<Histogram>,
    series: Vec<Series>,
    marks: Vec<Mark>,
}

impl<'a> Run<'a> {
    fn new(
        config: &'a Config,
        method: Method,
        total: u64,
        kvm: &kvm_ioctls::Kvm,
        report: &'a mut Report,
    ) -> Result<Self, Error> {
        let memory =
            MemoryConfig { backing: config.region.backing, slots: config.slots, ..MemoryConfig::new(total) };
        let mut memory = Memory::map(memory)?;
        place(&mut memory, config.phys_offset);
        let dirty_ring = (method == Method::Ring).then_some(config.ring_entries);
        let page = config.common.page(&report.host);
        let guest = GuestConfig { page, dirty_ring, ..config.common.guest(config.region.vcpus) };
        let guest = Guest::build(kvm, memory, guest)?;
        let counted = Counted::start(&guest, report);
        let mut tracker = dirty::tracker(method, &guest.vm, &guest.vcpus, config.chunk)?;
        guest.vm.memory.slots.iter().for_each(|slot| tracker.track(*slot));
        let write = WriteConfig {
            order: config.order,
            hot: config.hot,
            write_percent: config.write_percent,
            passes: 0,
            seed: config.seed,
            shared: config.overlap,
            latency: config.latency,
            lockstep: true,
            ..WriteConfig::default()
        };
        let mut run = Self {
            config,
            report,
            tracker,
            guest,
            counted,
            end: Snapshot::new(),
            clock: Instant::now(),
            write,
            buckets: vec![0; BUCKETS],
            figures: Vec::new(),
            histograms: Vec::new(),
            series: Vec::new(),
            marks: Vec::new(),
        };
        run.populate()?;
        Ok(run)
    }

    fn figure(&mut self, name: impl Into<String>, unit: &'static str, value: f64) {
        self.figures.push((name.into(), unit, value));
    }

    /// The first pass writes every page in turn, whatever is asked for later.
    fn populate(&mut self) -> Result<(), Error> {
        let all =
            WriteConfig { order: Order::Sequential, hot: None, write_percent: 100.0, ..self.write.clone() };
        self.guest.program(&all)?;
        let (seconds, _) = self.pass(false)?;
        self.figure("populate_memory", "s", seconds);
        let now = self.counted.now();
        self.mapped("populated", &now);
        // A round that failed its premise spoils them all.
        if self.report.invalid.is_empty() {
            huge_premise(self.report, self.config.region.backing, &now);
        }
        let huge = self.config.region.backing.best_mapping();
        let mapped = now.get(if huge == 1 << 30 { "pages_1g" } else { "pages_2m" });
        let possible = self.guest.vm.memory.config.size / huge;
        if let Some(&mapped) = mapped.filter(|&&mapped| huge > 4096 && mapped > 0 && mapped < possible) {
            self.report.notes.push(format!(
                "KVM mapped {mapped} of {possible} huge pages that memory could have had: where the others should be, the host found no free ones"
            ));
        }
        self.guest.program(&self.write)?;
        self.end_phase(None);
        Ok(())
    }

    /// KVM's mappings by size, where this kernel counts them.
    fn mapped(&mut self, when: &str, now: &Snapshot) {
        for name in ["pages_4k", "pages_2m", "pages_1g"] {
            if let Some(&value) = now.get(name) {
                self.figure(format!("mapped_{}[{when}]", &name[6..]), "pages", value as f64);
            }
        }
    }

    /// One pass of all vCPUs; with `logged`, rings are harvested as they fill. Returns the seconds, and the pages found.
    fn pass(&mut self, logged: bool) -> Result<(f64, u64), Error> {
        let start = Instant::now();
        let mut found = 0;
        self.guest.resume();
        loop {
            match self.guest.wait(Duration::from_secs(3600))? {
                Woke::Rung => return Ok((start.elapsed().as_secs_f64(), found)),
                Woke::Timeout => {}
                Woke::RingFull => {
                    self.tracker.collect()?;
                    found += if logged { dirty_pages(self.tracker.logs()) } else { 0 };
                    self.guest.resume_full()?;
                }
            }
        }
    }

    /// Closes a phase of the guest's write latencies under `name`, or forgets it.
    fn end_phase(&mut self, name: Option<&str>) {
        let mut now = vec![0; BUCKETS];
        let mut slowest = 0;
        for control in self.guest.controls() {
            now.iter_mut().zip(control.latency_snapshot()).for_each(|(sum, count)| *sum += count);
            slowest = slowest.max(control.slowest.swap(0, Ordering::Relaxed));
        }
        let before = std::mem::replace(&mut self.buckets, now);
        let Some(name) = name.filter(|_| self.config.latency) else { return };
        let grown: Vec<u64> = self.buckets.iter().zip(before).map(|(now, before)| now - before).collect();
        let histogram = nanoseconds(&format!("write_latency[{name}]"), &grown, self.guest.tsc_hz);
        for (quantile, q) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            if let Some(value) = histogram.quantile(q) {
                self.figure(format!("write_latency_{quantile}[{name}]"), "ns", value);
            }
        }
        if histogram.count() > 0 {
            self.figure(
                format!("write_latency_max[{name}]"),
                "ns",
                slowest as f64 * 1e9 / self.guest.tsc_hz as f64,
            );
            self.histograms.push(histogram);
        }
    }

    /// One collection in its parts: seconds of get, clear and scan, and the pages found.
    fn collect(&mut self) -> Result<([f64; 3], u64), Error> {
        let mut last = Instant::now();
        let mut lap = || {
            let now = Instant::now();
            (now - std::mem::replace(&mut last, now)).as_secs_f64()
        };
        self.tracker.get()?;
        let get = lap();
        self.tracker.clear()?;
        let clear = lap();
        let pages = dirty_pages(self.tracker.logs());
        Ok(([get, clear, lap()], pages))
    }

    /// dirty_log_perf_test's schedule.
    fn lockstep(&mut self) -> Result<(), Error> {
        let (seconds, _) = self.pass(false)?;
        self.figure("dirty_memory[before]", "s", seconds);
        self.end_phase(Some("before"));
        let start = Instant::now();
        self.tracker.enable(&self.guest.vm, true)?;
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
        self.tracker.enable(&self.guest.vm, false)?;
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

    /// Waits for the end of a pass that was begun elsewhere.
    fn finish_pass(&mut self) -> Result<(), Error> {
        while self.guest.wait(Duration::from_secs(3600))? != Woke::Rung {
            self.tracker.collect()?;
            self.guest.resume_full()?;
        }
        Ok(())
    }

    /// The guest runs through; the collections come as fast as they can.
    fn continuous(&mut self, duration: Duration) -> Result<(), Error> {
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
        self.tracker.enable(&self.guest.vm, true)?;
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
        self.tracker.enable(&self.guest.vm, false)?;
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

    /// The mappings that are left; the counters' readings go into the result when the machine is gone.
    fn finish(&mut self) {
        self.end = self.counted.now();
        let now = std::mem::take(&mut self.end);
        self.mapped("after", &now);
        if let Some(recycled) = self.counted.grown(&now, "mmu_recycled").filter(|&recycled| recycled > 0) {
            self.report.invalid.push(format!(
                "KVM recycled {recycled} shadow pages: what was timed is also their rebuilding"
            ));
        }
        self.end = now;
    }
}

/// Counts what a collection found, run by run.
fn dirty_pages(logs: &[SlotLog]) -> u64 {
    logs.iter().flat_map(SlotLog::runs).map(|run| run.end - run.start).sum()
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
