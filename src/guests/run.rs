//! The built-in guest of `vellum run`: one workload, run by a session from start to end, and its
//! result.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;

use super::control::{Control, PASS_ENDS, phase};
use super::guest::{self, Guest};
use super::latency::{self, BUCKET_RESOLUTION};
use super::model::{self, Model, Reached};
use super::{Region, WriteConfig, journal};
use crate::program::GuestPage;
use vellum_control::Do;
use vellum_control::operation::Asker;
use vellum_host::{Facts, Paging};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::core::Core;
use vellum_kvm::arch::cpuid::Choice;
use vellum_kvm::dirty::{self, DirtyTracker};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, Slot, short_size};
use vellum_kvm::vm::counters::Snapshot;
use vellum_kvm::vm::exits::Exits;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::vcpu::{Throttle, VcpusDebugHandle};
use vellum_machine::handoff::HandoffFds;
use vellum_machine::state::Processors;
use vellum_machine::{
    Disk, EventSources, HandOver, Inspect, Machine, MachineInfo, Progress, RestoreState, SaveState, Section,
};
use vellum_report::units::grouped;
use vellum_report::{Answer, Figure, Label, Premise, Report, Sample};
use vellum_sys::plant::{self, Mistake};

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The number of vCPUs.
    pub vcpus: usize,
    /// The CPU of each vCPU, if they are pinned.
    pub pins: Option<Vec<usize>>,
    /// The RAM.
    pub memory: MemoryConfig,
    /// What the guest does.
    pub write: WriteConfig,
    /// The page size of the guest's own tables.
    pub page: GuestPage,
    /// The CPU features.
    pub cpuid: Choice,
    /// The number of entries in each vCPU's dirty ring, if it gets one.
    pub dirty_ring: Option<u32>,
    /// The time after which the run stops.
    pub duration: Option<Duration>,
    /// Whether memory is filled with random numbers before the guest starts.
    pub fill: bool,
}

/// A workload between its first and its last access.
pub struct BuiltinMachine {
    /// The guest.
    pub guest: Guest,
    pub(super) config: RunConfig,
    regions: Vec<Region>,
    pub(super) models: Vec<Model>,
    before: Snapshot,
    /// The restored state that is not committed yet, and the value that each vCPU had rung.
    pub(super) arrived: Option<(Processors, Vec<u64>)>,
    /// Whether the guest was started in another process.
    pub(super) goes_on: bool,
    /// The counters and the verdict at the end of the run.
    seen: Option<Examined>,
    /// Whether the event loop has been told what to serve.
    served: bool,
}

/// The values read after the vCPUs have stopped for good.
struct Examined {
    after: Snapshot,
    verdict: model::StampVerdict,
}

impl BuiltinMachine {
    /// Programs the vCPUs of `guest`, which wait for their parameters.
    ///
    /// # Errors
    /// If there are fewer pages than they need.
    pub fn new(guest: Guest, config: RunConfig) -> Result<Self, guest::Error> {
        let regions = guest.program(&config.write)?;
        let models = guest.controls().map(Model::new).collect();
        let before = Snapshot::default();
        Ok(Self {
            guest,
            config,
            regions,
            models,
            before,
            arrived: None,
            goes_on: false,
            seen: None,
            served: false,
        })
    }

    fn counters(&self) -> Snapshot {
        self.guest.counters.as_ref().ok().and_then(|counters| counters.read().ok()).unwrap_or_default()
    }

    /// Reads the counters, then checks every page.
    fn look(&mut self) -> Examined {
        let after = self.counters();
        let verdict = check(&self.config, &self.guest, std::mem::take(&mut self.models));
        Examined { after, verdict }
    }

    /// Notes that the guest has moved. Its pages are checked by the process in which it ends.
    pub fn give_away(&mut self) {
        self.seen = Some(Examined { after: self.counters(), verdict: model::StampVerdict::default() });
    }

    /// Returns the measurements, taken on the host of `facts`, and whether every page holds what
    /// the guest must have written.
    pub fn report(mut self, facts: Facts) -> (Report, bool) {
        let Examined { after, verdict } = self.seen.take().unwrap_or_else(|| self.look());
        let Self { guest, config, before, .. } = self;
        let mut report = describe(&config, facts);
        measure(&mut report, &config, &guest);
        report.counters(None, &before, &after);
        if let Err(error) = &guest.counters {
            report.notes.push(error.to_string());
        }
        prove_huge(&mut report, &config, &after);
        report.figure("pages_checked", "pages", verdict.checked as f64);
        report.figure("wrong_stamps", "pages", verdict.wrong as f64);
        if verdict.unchecked > 0 {
            let pages = verdict.unchecked;
            report.note(format!(
                "{pages} pages were last written very long ago, or never: their stamps were not compared"
            ));
        }
        if verdict.wrong > 0 {
            let (page, found, expected) = &verdict.examples[0];
            let example = format!("page {page} holds {found:?}, right would be {expected:?}");
            let (wrong, of) = (verdict.wrong, verdict.checked);
            report.fail(None, Premise::WrongContents { wrong, of, example: Some(example) });
        }
        report.answer(answer(&report, verdict.checked, verdict.wrong));
        (report, verdict.wrong == 0)
    }
}

impl Machine for BuiltinMachine {
    type Error = guest::Error;

    fn event_sources(&mut self) -> EventSources {
        let wake = (!std::mem::replace(&mut self.served, true)).then(|| self.guest.bell.event.clone());
        EventSources { subscribers: Vec::new(), wakes: wake.into_iter().collect() }
    }

    fn start(&mut self) -> Result<(), guest::Error> {
        self.before = self.counters();
        if self.goes_on {
            // The vCPUs that have rung in the other process are done.
            self.guest.resume_unfinished();
        } else {
            self.guest.resume();
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Exit>, guest::Error> {
        let _ = self.guest.bell.event.read();
        if !self.guest.all_rung()? {
            return Ok(None);
        }
        // The vCPUs ring just before they pause.
        self.guest.wait_all_rung()?;
        let seen = self.look();
        let right = seen.verdict.wrong == 0;
        self.seen = Some(seen);
        Ok(Some(if right { Exit::PowerOff } else { Exit::Error }))
    }

    fn pause(&mut self) -> Result<(), guest::Error> {
        let paused = self.guest.pause().map(drop);
        if paused.is_err() {
            self.guest.resume_unfinished();
        }
        paused
    }

    fn resume(&mut self) {
        self.guest.resume_unfinished();
    }

    /// Asks the guest to stop before its next access.
    fn request_end(&mut self) -> bool {
        self.guest.request_stop();
        true
    }

    fn info(&self) -> MachineInfo {
        MachineInfo {
            vcpus: self.guest.vcpus.len(),
            memory: self.guest.vm.memory.config.size,
            backing: Some(self.guest.vm.memory.config.backing),
            forked: self.guest.vm.memory.is_forked(),
            dirty_ring: self.guest.vm.dirty_ring.as_deref().map(vellum_machine::dirty_rings),
            ..MachineInfo::default()
        }
    }

    fn progress(&self) -> Option<Progress> {
        let done = self.guest.controls().map(|control| control.done.load(Ordering::Relaxed));
        // The numbers may come from another process, and the guest may write to its own.
        let done = done.fold(0, u64::saturating_add);
        let of = self.regions.iter().map(|region| region.pages.saturating_mul(self.config.write.passes));
        let of = of.fold(0, u64::saturating_add);
        Some(Progress { done, of: (of > 0).then_some(of) })
    }

    fn silence(&self) -> Option<&'static str> {
        None
    }

    fn ask(&mut self, _: Asker, what: &Do, _: Vec<OwnedFd>) -> Result<Value, String> {
        Err(match what {
            Do::Balloon { .. } => {
                "this machine was started without a balloon: the built-in guest has no devices"
            }
            Do::Nmi {} => "a built-in guest has no handler of interrupts that cannot be masked",
            Do::Sysrq { .. } => "a built-in guest has no kernel that would obey",
            _ => "this machine has no serial port: the built-in guest has no devices",
        }
        .into())
    }

    /// Does nothing: the result still reads the memory. The vCPUs are paused already, and they end
    /// when the guest is dropped.
    fn stop(&mut self) {}

    fn flushed(&mut self) -> bool {
        true
    }
}

impl Inspect for BuiltinMachine {
    fn memory(&self) -> Vec<Slot> {
        let own = [self.guest.slot.clone()];
        self.guest.vm.memory.slots().iter().cloned().chain(own).collect()
    }

    fn ram(&self) -> Memory {
        self.guest.vm.memory.clone()
    }

    fn debug_handle(&self) -> VcpusDebugHandle {
        VcpusDebugHandle::new(&self.guest.vcpus)
    }

    fn last_core(&self) -> Option<(usize, Core)> {
        None
    }

    fn has_panicked(&self, exit: Exit) -> bool {
        exit == Exit::Panic
    }
}

impl RestoreState for BuiltinMachine {
    fn disks(&self) -> Vec<Disk> {
        Vec::new()
    }

    fn throttle(&self) -> Throttle {
        Throttle::new(&self.guest.vcpus)
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Self::Error> {
        self.restore_state(sections, meanwhile)
    }

    fn commit(&mut self, _forked: bool) -> Result<(), Self::Error> {
        self.commit_state()
    }

    fn renew(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    fn retake(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    fn give_typed(&mut self, _typed: &[u8]) {}
}

impl SaveState for BuiltinMachine {
    fn describe(&self) -> Value {
        serde_json::to_value(self.description()).expect("descriptions are plain data")
    }

    fn track(&mut self, method: dirty::Method) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        let mut slots = self.memory();
        if plant::is(Mistake::OwnSlotLeftOut) {
            slots.pop();
        }
        let (vm, quiesced) =
            self.guest.quiesced().map_err(|error| dirty::Error::NotStill(Box::new(error)))?;
        let mut tracker = dirty::tracker(method, vm, &quiesced, Some(dirty::CHUNK))?;
        slots.iter().try_for_each(|slot| tracker.track(slot.id()))?;
        // This comes before the log is switched on: the page written here is sent with all the
        // pages that were touched before.
        journal::enter(&self.guest, phase::LOGGED);
        Ok(tracker)
    }

    fn save(&mut self) -> Result<Vec<Section>, Self::Error> {
        self.save_state()
    }

    fn release(&mut self) {}

    fn take_typed(&mut self) -> Vec<u8> {
        Vec::new()
    }
}

impl HandOver for BuiltinMachine {
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String> {
        lent.list.lock = self.config.memory.lock;
        lent.list.dirty_ring = self.config.dirty_ring;
        Ok(())
    }
}

/// The first lines of the result.
fn answer(report: &Report, checked: u64, wrong: u64) -> Answer {
    let [checked, wrong] = [checked, wrong].map(|pages| grouped(pages.into()));
    let faults = report.counters.iter().find(|counter| counter.name == "pf_taken");
    let faults = faults.map_or(String::new(), |faults| format!(", {} KVM faults", grouped(faults.grown())));
    Answer::of_test(format!("{checked} pages checked, {wrong} wrong"))
        .fact_if("first pass", report.told(FIRST_PASS).map(|rate| rate + &faults))
        .fact_if("warm passes", report.told(WARM_PASSES))
}

/// The rates of the pass in which every page faults, and of the other passes.
const FIRST_PASS: &str = "first_pass_pages_per_second_per_vcpu";
const WARM_PASSES: &str = "warm_pages_per_second_per_vcpu";

/// Returns a result that lists the settings of the run.
fn describe(config: &RunConfig, facts: Facts) -> Report {
    let RunConfig { vcpus, pins, memory, write, page, duration, cpuid, dirty_ring, fill } = config;
    let mut report = Report::new("run write", facts);
    report.ask("cpus", *vcpus);
    report.ask("pin", pins.as_ref().map_or("off".into(), |pins| serde_json::json!(pins)));
    report.ask("memory", short_size(memory.size));
    report.ask("backing", memory.backing.to_string());
    report.ask("prealloc", memory.prealloc);
    report.ask("lock", memory.lock);
    report.ask("slots", memory.slots);
    report.ask("order", write.order.name());
    if let Some(hot) = write.hot {
        report.ask("hot_percent", hot.percent);
        report.ask("hot_share_percent", hot.share);
    }
    report.ask("write_percent", write.write_percent);
    if let Some(rate) = write.rate {
        report.ask("rate", rate);
    }
    report.ask("passes", write.passes);
    if write.warm {
        report.ask("warm", true);
    }
    if *fill {
        report.ask("fill", true);
    }
    if let Some(slice) = write.journal {
        report.ask("journal_seconds", slice.as_secs_f64());
    }
    if let Some(duration) = duration {
        report.ask("duration_seconds", duration.as_secs_f64());
    }
    report.ask("seed", write.seed);
    report.ask("region", if write.shared { "shared" } else { "each" });
    report.ask("stride", write.stride);
    report.ask("guest_page", if *page == GuestPage::Small { "4k" } else { "2m" });
    report.ask("latency", write.latency);
    if cpuid.model != Default::default() {
        report.ask("cpu", cpuid.model.to_string());
    }
    if cpuid.switches() {
        report.ask("cpuid", cpuid.to_string());
    }
    if let Some(entries) = dirty_ring {
        report.ask("dirty_ring", *entries);
    }
    report
}

/// Returns the duration of each recorded pass of a vCPU, in TSC ticks.
fn pass_ticks(control: &Control) -> Vec<u64> {
    let passes = control.pass.load(Ordering::Relaxed);
    let first = passes.saturating_sub(PASS_ENDS as u64);
    let mut last = if first == 0 { Some(control.started.load(Ordering::Relaxed)) } else { None };
    let mut ticks = Vec::new();
    for pass in first..passes {
        let end = control.pass_ends[pass as usize % PASS_ENDS].load(Ordering::Relaxed);
        ticks.extend(last.map(|last| end.saturating_sub(last)));
        last = Some(end);
    }
    ticks
}

/// Adds the figures from the guest's own counters.
fn measure(report: &mut Report, config: &RunConfig, guest: &Guest) {
    let hz = guest.tsc_hz as f64;
    let get = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
    let (mut rates, mut first_pass, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    for (index, control) in guest.controls().enumerate() {
        let pages = get(&control.pages) as f64;
        let seconds = get(&control.ended).saturating_sub(get(&control.started)).max(1) as f64 / hz;
        let of_pass = |(round, ticks): (u32, u64)| Sample {
            value: pages * hz / ticks.max(1) as f64,
            round,
            vcpu: Some(index as u32),
            machine: 0,
        };
        let mut per_pass: Vec<Sample> = (0..).zip(pass_ticks(control)).map(of_pass).collect();
        if get(&control.ended) < get(&control.started) {
            // The guest has moved away in the middle of its first pass and has no end yet.
            continue;
        }
        // If there were many passes, only the last ones are recorded.
        let from_start = get(&control.pass) == per_pass.len() as u64;
        if per_pass.is_empty() {
            // Stopped before the end of its first pass.
            let value = get(&control.done) as f64 / seconds;
            per_pass.push(Sample { value, vcpu: Some(index as u32), ..Sample::default() });
        }
        rates.extend_from_slice(&per_pass);
        let (cold, rest) = per_pass.split_at(usize::from(from_start).min(per_pass.len()));
        first_pass.extend_from_slice(cold);
        warm.extend_from_slice(rest);
        let of_vcpu = |name: &str| Label::of(name, format_args!("vcpu{index}"));
        report.samples(of_vcpu("pages_per_second"), "pages/s", per_pass);
        let distinct = get(&control.distinct) as f64 / seconds;
        report.figure(of_vcpu("distinct_pages_per_second"), "pages/s", distinct);
    }
    if !rates.is_empty() {
        report.samples("pages_per_second_per_vcpu", "pages/s", rates);
        report.samples(FIRST_PASS, "pages/s", first_pass);
        // The first pass faults on every page, so it would hide the rate of the others.
        let headline = if warm.is_empty() { "pages_per_second_per_vcpu" } else { WARM_PASSES };
        report.samples(WARM_PASSES, "pages/s", warm);
        report.set_headline(headline);
    }
    let sum = |of: fn(&Control) -> &std::sync::atomic::AtomicU64| -> f64 {
        guest.controls().map(|control| get(of(control)) as f64).sum()
    };
    report.figure("accesses", "pages", sum(|control| &control.done));
    report.figure("writes", "pages", sum(|control| &control.written));
    let histogram = latency::of_writes(guest);
    if histogram.count() > 0 {
        for (name, q) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            let value = histogram.quantile(q).unwrap_or(0.0);
            let label = Label::of("write_latency", name);
            report.push(Figure::once(label, "ns", value).resolved_to(BUCKET_RESOLUTION));
        }
        report.figure(Label::of("write_latency", "max"), "ns", histogram.max().unwrap_or(0.0));
        report.histograms.push(histogram);
    }
    if config.write.journal.is_some() {
        journal::add(report, guest);
    }
    let mut exits = Exits::default();
    guest.vcpus.iter().for_each(|vcpu| exits += vcpu.exits());
    for (reason, count) in exits.iter() {
        report.figure(Label::of("exits", reason.name()), "exits", count as f64);
    }
}

/// Adds the number of KVM's mappings by size, if this kernel counts them, and checks that a huge
/// backing got its huge pages.
fn prove_huge(report: &mut Report, config: &RunConfig, after: &Snapshot) {
    let (Some(large), Some(huge)) = (after.get("pages_2m"), after.get("pages_1g")) else {
        return;
    };
    report.figure("mapped_2m", "pages", *large as f64);
    report.figure("mapped_1g", "pages", *huge as f64);
    let backing = config.memory.backing;
    huge_premise(report, backing, config.page, after);
}

/// Checks the premise of a huge backing, which is that KVM maps huge pages. This needs a kernel
/// that counts mappings by size. If KVM shadows the guest's tables, it maps the smaller of its own
/// page size and theirs, so small mappings break no promise there.
pub fn huge_premise(report: &mut Report, backing: Backing, page: GuestPage, now: &Snapshot) {
    let count = |name: &str| now.get(name).copied();
    let (Some(small), Some(large), Some(huge)) = (count("pages_4k"), count("pages_2m"), count("pages_1g"))
    else {
        return;
    };
    let shadowed = page == GuestPage::Small && report.host.paging == Paging::Shadow;
    match backing.best_mapping() {
        promised if promised < 2 << 20 || huge > 0 => {}
        promised if large > 0 && promised < 1 << 30 => {}
        _ if large > 0 => {
            report.note(format!("backing {backing}, but KVM maps it by pages of 2 MiB, none of 1 GiB"));
        }
        _ if shadowed => {
            let why = "KVM shadows the guest's tables and their pages are of 4 KiB, so it maps no huge ones";
            report.note(format!("backing {backing}: {why}; tables of 2 MiB pages let it"));
        }
        _ => report.fail(None, Premise::NoHugePage { backing: backing.to_string(), small: Some(small) }),
    }
}

/// Compares every stamp with the one that the guest must have written.
fn check(config: &RunConfig, guest: &Guest, models: Vec<Model>) -> model::StampVerdict {
    let stride = config.write.stride;
    let reached = guest.controls().map(Reached::new);
    model::verify(models.into_iter().zip(reached).collect(), config.memory.size / stride, |page| {
        guest.stamp(page, stride)
    })
}
