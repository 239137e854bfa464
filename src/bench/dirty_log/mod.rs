//! `dirty-log`: the cost of dirty logging for the host and the guest.
//!
//! There are two schedules. *Lockstep* is that of the kernel's dirty_log_perf_test, with the same
//! figures: the guest accesses its memory once and stops, the log is collected, and so on. It times
//! each step well, but hides what matters to a running guest. *Continuous* lets the guest run and
//! collects as fast as possible. It samples the guest's progress and plots it over time with the
//! collections. Both measure the guest's write latency before, during and after logging.

mod continuous;
pub mod lazy;
mod lockstep;
mod machine;
mod measured;

use std::time::Duration;

use super::region::check_offset;
use super::{Common, Error, Region};
use vellum_guests::{Hot, Order};
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::{self, short_size};
use vellum_kvm::vm;
use vellum_report::units::humanised;
use vellum_report::{Answer, Figure, Label, Report};
use vellum_sys::diagnose::Field;
use vellum_sys::host::allowed_cpus;

use machine::Run;
pub(super) use measured::QUANTILES;
use measured::Round;

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// Passes over memory while logging (lockstep).
    pub iterations: u32,
    /// The memory of each vCPU.
    pub region: Region,
    /// The percentage of accesses that write.
    pub write_percent: f64,
    /// The order of accesses, except for populating.
    pub order: Order,
    /// The hot set of each vCPU.
    pub hot: Option<Hot>,
    /// Whether all vCPUs access all memory.
    pub overlap: bool,
    /// The number of memslots.
    pub slots: u32,
    /// How to collect the log. `None` picks the host's best method, as the selftest does.
    pub method: Option<Method>,
    /// The entries of a dirty ring.
    pub ring_entries: u32,
    /// The number of pages per clear. `None` means whole memslots.
    pub chunk: Option<u64>,
    /// How many bytes of blocks KVM splits at a time when logging starts. `None` is KVM's default.
    pub eager_split: Option<u64>,
    /// Whether vCPUs run while logging is disabled.
    pub run_while_disabling: bool,
    /// The seed of random orders.
    pub seed: u64,
    /// The start of memory in the guest's physical address space.
    pub phys_offset: Option<u64>,
    /// How long to collect continuously. `None` means lockstep.
    pub continuous: Option<Duration>,
    /// Whether to time each write.
    pub latency: bool,
    /// The common parameters.
    pub common: Common,
}

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("dirty-log");
    let rounds = measure(&mut report, config)?;
    measured::add(&mut report, rounds);
    report.set_headline(match config.continuous {
        // A single pass has no warm ones after it.
        None if config.iterations > 1 => measured::WARM.into(),
        None => "dirty_memory_average".into(),
        Some(_) => Label::of("progress", "during"),
    });
    report.answer(answer(&report, config));
    Ok(report)
}

/// The first lines of the result.
fn answer(report: &Report, config: &Config) -> Answer {
    let size = humanised("bytes", config.region.total(config.overlap) as f64);
    let value = |label: Label| report.find(label).map(Figure::value);
    let tracker = report.asked.get("tracker").and_then(|name| name.as_str()).unwrap_or_default();
    if config.continuous.is_some() {
        let rates = value(Label::of("progress", "before")).zip(value(Label::of("progress", "during")));
        let text = rates.map(|(before, during)| {
            let [unlogged, logged] = [before, during].map(|rate| humanised("pages/s", rate));
            let share = 100.0 * during / before;
            format!(
                "Writing {size} while {tracker} is collected: {logged}, {unlogged} unlogged ({share:.0} %)"
            )
        });
        let collected = value("collections".into()).map(|n| format!("{n:.0} times"));
        return Answer::of_measurement(text.unwrap_or_else(|| "nothing was measured".into()))
            .fact_if("collected", collected)
            .fact_if("get, longest", report.told("get_dirty_log_longest"))
            .fact_if("clear, longest", report.told("clear_dirty_log_longest"))
            .fact_if("after logging", report.told(Label::of("progress", "after")));
    }
    let logged = value(measured::WARM.into()).or(value(Label::of("dirty_memory", 0)));
    let text = value(Label::of("dirty_memory", "before")).zip(logged).map(|(before, logged)| {
        let [unlogged, times] = [humanised("s", before), format!("{:.1} x", logged / before)];
        format!("Writing {size}: {unlogged} unlogged, {} logged ({times})", humanised("s", logged))
    });
    let average = |name: &str| value(format!("{name}_average").as_str().into());
    let collect = average("get_dirty_log").zip(average("clear_dirty_log")).map(|(get, clear)| {
        let [all, get, clear] = [get + clear, get, clear].map(|seconds| humanised("s", seconds));
        format!("{all} a pass (get {get}, clear {clear})")
    });
    Answer::of_measurement(text.unwrap_or_else(|| "nothing was measured".into()))
        .fact_if(&format!("pass 0 ({tracker})"), report.told(Label::of("dirty_memory", 0)))
        .fact_if("warm passes", report.told(measured::WARM))
        .fact_if("collect", collect)
        .fact_if("after logging", report.told(Label::of("dirty_memory", "after")))
}

/// Measures every round. Adds parameters, counters and notes to `report`.
fn measure(report: &mut Report, config: &Config) -> Result<Vec<Round>, Error> {
    let kvm = vm::open()?;
    let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
    let method = match config.method {
        Some(method) => method,
        // In dirty_log_perf_test's order of preference: fewest side effects first.
        None => [Method::InitiallySet, Method::ManualProtect]
            .into_iter()
            .find(|method| method.check(&probe).is_ok())
            .unwrap_or(Method::Bitmap),
    };
    method.check(&probe)?;
    drop(probe);
    let total = check(config, method)?;
    config.common.pin_main(config.region.vcpus)?;
    ask(report, config, method);
    let mut rounds = Vec::new();
    config.common.each(report, &config.common.rounds(), |report, round| {
        let mut run = Run::new(config, method, total, &kvm, report)?;
        let measured = match config.continuous {
            None => run.lockstep()?,
            Some(duration) => run.continuous(duration)?,
        };
        let Run { counted, end, .. } = run;
        // The first round's counters represent all.
        if round.is_first() {
            counted.finish(report, &end, None);
        }
        rounds.push(measured);
        Ok(())
    })?;
    Ok(rounds)
}

/// Checks for contradictions. Returns the bytes of memory needed.
fn check(config: &Config, method: Method) -> Result<u64, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    let page = backing.page_size();
    let total = config.region.total(false);
    let asked = |field, reason: String| Err(Error::Asked(field, reason));
    if !bytes.is_multiple_of(4096) || bytes < 8192 {
        let next = short_size(bytes.max(memory::MIN_SIZE).next_multiple_of(4096));
        return asked(
            Field::Memory,
            format!("{bytes} is not a multiple of 4096, at least 8192; {next} would work"),
        );
    }
    let mapping = backing.best_mapping();
    let [each, together, of_page, of_mapping] = [bytes, total, page, mapping].map(short_size);
    if !total.is_multiple_of(page) {
        let next = short_size(bytes.next_multiple_of(page));
        let why = format!("not a multiple of the {of_page} pages of {backing}; {next} would work");
        return asked(Field::Memory, format!("{each}: {vcpus} vCPUs need {together} in all, {why}"));
    }
    let pages = total / mapping;
    if pages == 0 {
        let why = format!("less than one {of_mapping} page of {backing}; {of_mapping} would work");
        return asked(Field::Memory, format!("{each} is {why}"));
    }
    let slots = config.slots;
    if u64::from(slots) > pages || !pages.is_multiple_of(slots.into()) {
        let fits = (1..=u64::from(slots).min(pages)).rev().find(|slots| pages.is_multiple_of(*slots));
        let why = format!("{together} in pages of {of_mapping} cannot be split into that many memslots");
        return asked(Field::Slots, format!("{slots}: {why}; {} would work", fits.unwrap_or(1)));
    }
    if let Some(chunk) = config.chunk.filter(|_| !method.is_manual()) {
        let why = match method {
            Method::Ring => "the ring is reset as a whole",
            _ => "KVM_GET_DIRTY_LOG clears what it reads",
        };
        let instead = "so there is nothing to clear in chunks; the tracker manual-protect would work";
        return asked(Field::ClearChunk, format!("{chunk}: {why}, {instead}"));
    }
    if let Some(offset) = config.phys_offset {
        check_offset(offset, total, backing)?;
    }
    let cpus = allowed_cpus().map_err(|e| Error::Host("sched_getaffinity", e))?;
    if config.continuous.is_some() && cpus.len() < 2 {
        let why = "the guest and the collection would alternate on this process's only CPU; \
                   use lockstep, or allow a second CPU (taskset)";
        return asked(Field::Collect, format!("continuous: {why}"));
    }
    config.region.affordable(false)
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
    if let Some(bytes) = config.eager_split {
        report.ask("eager_split", bytes);
    }
    report.ask("run_while_disabling", config.run_while_disabling);
    report.ask("seed", config.seed);
    if let Some(offset) = config.phys_offset {
        report.ask("phys_offset", format!("{offset:#x}"));
    }
    config.common.ask_page(report);
    report.ask("latency", config.latency);
    config.common.ask(report);
}
