//! A round's machine, and the steps of both schedules: a pass, a collection, a latency phase,
//! counting KVM's mappings.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Config;
use super::measured::{Mapped, Parts, Phase, Pictures, Round, Schedule, When};
use crate::region::place;
use crate::{Counted, Error, huge_premise};
use vellum_guests::control::BUCKETS;
use vellum_guests::guest::GuestConfig;
use vellum_guests::latency::nanoseconds;
use vellum_guests::{Guest, Order, WriteConfig};
use vellum_kvm::dirty::{self, DirtyTracker, Method, SlotLog};
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_kvm::vm::counters::Snapshot;
use vellum_report::{Histogram, Label, Premise, Report};

/// One round on its own machine.
pub(super) struct Run<'a> {
    pub(super) config: &'a Config,
    pub(super) report: &'a mut Report,
    // Must drop before the guest, whose vCPUs own its rings.
    pub(super) tracker: Box<dyn DirtyTracker>,
    pub(super) guest: Guest,
    pub(super) counted: Counted,
    pub(super) end: Snapshot,
    pub(super) clock: Instant,
    pub(super) write: WriteConfig,
    /// The sum of the latency histograms at the start of the current phase.
    pub(super) buckets: Vec<u64>,
    /// The duration of the first pass in seconds.
    pub(super) populate: f64,
    pub(super) mapped: [(When, Option<Mapped>); 3],
    pub(super) latencies: Vec<(Phase, Histogram)>,
    pub(super) pictures: Pictures,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        config: &'a Config,
        method: Method,
        total: u64,
        kvm: &kvm_ioctls::Kvm,
        report: &'a mut Report,
    ) -> Result<Self, Error> {
        let memory = MemoryConfig {
            backing: config.region.backing,
            slots: config.slots,
            eager_split: config.eager_split,
            ..MemoryConfig::new(total)
        };
        let mut memory = Memory::map(vellum_kvm::arch::layout::RAM, memory)?;
        place(&mut memory, config.phys_offset)?;
        let dirty_ring = (method == Method::Ring).then_some(config.ring_entries);
        let page = config.common.page(&report.host);
        let guest = GuestConfig { page, dirty_ring, ..config.common.guest(config.region.vcpus) };
        let mut guest = Guest::build(kvm, memory, guest)?;
        let counted = Counted::start(&guest, report);
        let (vm, quiesced) = guest.quiesced()?;
        let mut tracker = dirty::tracker(method, vm, &quiesced, config.chunk)?;
        guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id()))?;
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
            populate: 0.0,
            mapped: [When::Populated, When::Logged, When::After].map(|when| (when, None)),
            latencies: Vec::new(),
            pictures: Pictures::default(),
        };
        run.populate()?;
        Ok(run)
    }

    /// The first pass writes every page in order, whatever the parameters.
    fn populate(&mut self) -> Result<(), Error> {
        let all =
            WriteConfig { order: Order::Sequential, hot: None, write_percent: 100.0, ..self.write.clone() };
        self.guest.program(&all)?;
        self.populate = self.pass()?;
        let now = self.counted.now();
        self.count_mapped(When::Populated, &now);
        let page = self.config.common.page(&self.report.host);
        huge_premise(self.report, self.config.region.backing, page, &now);
        let huge = self.config.region.backing.best_mapping();
        let of_size = |mapped: Mapped| if huge == 1 << 30 { mapped.huge } else { mapped.large };
        let possible = self.guest.vm.memory.config.size / huge;
        let mapped = Mapped::read(&now).map(of_size);
        if let Some(mapped) = mapped.filter(|&mapped| huge > 4096 && mapped > 0 && mapped < possible) {
            self.report.note(format!(
                "KVM mapped {mapped} of {possible} possible huge pages: the host had no free ones for the others"
            ));
        }
        self.guest.program(&self.write)?;
        self.end_phase(None);
        Ok(())
    }

    /// Counts KVM's mappings by size, if this kernel does.
    pub(super) fn count_mapped(&mut self, when: When, now: &Snapshot) {
        let place = self.mapped.iter_mut().find(|(of, _)| *of == when);
        place.into_iter().for_each(|(_, mapped)| *mapped = Mapped::read(now));
    }

    /// Runs one pass of all vCPUs. Returns the seconds.
    pub(super) fn pass(&mut self) -> Result<f64, Error> {
        let start = Instant::now();
        self.guest.resume();
        self.finish_pass()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Ends a latency phase. Stores its histogram under `phase`, or drops it.
    pub(super) fn end_phase(&mut self, phase: Option<Phase>) {
        let mut now = vec![0; BUCKETS];
        let mut slowest = 0;
        for control in self.guest.controls() {
            now.iter_mut().zip(control.latency_snapshot()).for_each(|(sum, count)| *sum += count);
            slowest = slowest.max(control.slowest[0].swap(0, Ordering::Relaxed));
        }
        let before = std::mem::replace(&mut self.buckets, now);
        let Some(phase) = phase.filter(|_| self.config.latency) else { return };
        let grown: Vec<u64> = self.buckets.iter().zip(before).map(|(now, before)| now - before).collect();
        let label = Label::of("write_latency", phase.name());
        let histogram = nanoseconds(label, &grown, slowest, self.guest.tsc_hz);
        if histogram.count() > 0 {
            self.latencies.push((phase, histogram));
        }
    }

    /// Collects the log once. Returns the durations and the pages found.
    pub(super) fn collect(&mut self) -> Result<(Parts, u64), Error> {
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
        Ok((Parts { get, clear, scan: lap() }, pages))
    }

    /// Waits for the end of a pass that is already running.
    pub(super) fn finish_pass(&mut self) -> Result<(), Error> {
        Ok(self.guest.wait_all_rung()?)
    }

    /// Counts the remaining mappings. The counters go into the result after the machine is gone.
    pub(super) fn finish(&mut self) {
        let now = self.counted.now();
        self.count_mapped(When::After, &now);
        if let Some(pages) = self.counted.grown(&now, "mmu_recycled").filter(|&pages| pages > 0) {
            self.report.fail(None, Premise::Recycled { pages });
        }
        self.end = now;
    }

    /// The results of the round, with those of the schedule.
    pub(super) fn measured(&mut self, enable: f64, disable: Option<f64>, schedule: Schedule) -> Round {
        Round {
            populate: self.populate,
            enable,
            disable,
            schedule,
            mapped: self.mapped,
            latencies: std::mem::take(&mut self.latencies),
            pictures: std::mem::take(&mut self.pictures),
        }
    }
}

/// The number of dirty pages in a collection.
fn dirty_pages(logs: &[SlotLog]) -> u64 {
    logs.iter().flat_map(SlotLog::runs).map(|run| run.end - run.start).sum()
}
