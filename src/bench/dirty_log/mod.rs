//! `dirty-log`: what it costs to log a guest's writes, the host and the guest.
//!
//! Two schedules. *Lockstep* is that of the kernel's dirty_log_perf_test, figure for figure: the guest goes over its
//! memory once, stops, the log is collected, and so on. It times each step well and hides what matters to a
//! guest. *Continuous* leaves the guest alone and collects as fast as it can; what the guest got done meanwhile is
//! sampled, and shown over time with the collections marked. Both measure the write latency that the guest saw before,
//! during and after logging.

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
use vellum_report::{Label, Report};
use vellum_sys::diagnose::Field;
use vellum_sys::host::allowed_cpus;

use machine::Run;
pub(super) use measured::QUANTILES;
use measured::Round;

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
    /// How many bytes of blocks KVM splits at a time as soon as they are logged; `None` for what it does by itself.
    pub eager_split: Option<u64>,
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
    let rounds = measure(&mut report, config)?;
    measured::add(&mut report, rounds);
    report.set_headline(match config.continuous {
        None => "dirty_memory_average".into(),
        Some(_) => Label::of("progress", "during"),
    });
    Ok(report)
}

/// Measures every round; what was asked, the counters and what is to be said besides go into `report`.
fn measure(report: &mut Report, config: &Config) -> Result<Vec<Round>, Error> {
    let kvm = vm::open()?;
    let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
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
        // One round's counters stand for all.
        if round.is_first() {
            counted.finish(report, &end, None);
        }
        rounds.push(measured);
        Ok(())
    })?;
    Ok(rounds)
}

/// Refuses what contradicts itself; returns the bytes of memory needed.
fn check(config: &Config, method: Method) -> Result<u64, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    let page = backing.page_size();
    let total = config.region.total(false);
    let asked = |field, reason: String| Err(Error::Asked(field, reason));
    if !bytes.is_multiple_of(4096) || bytes < 8192 {
        let next = short_size(bytes.max(memory::MIN_SIZE).next_multiple_of(4096));
        return asked(
            Field::Memory,
            format!("{bytes} is no multiple of 4096 from 8192 on; {next} would work"),
        );
    }
    let mapping = backing.best_mapping();
    let [each, together, of_page, of_mapping] = [bytes, total, page, mapping].map(short_size);
    if !total.is_multiple_of(page) {
        let next = short_size(bytes.next_multiple_of(page));
        let why = format!("no multiple of the {of_page} pages of {backing}; {next} would work");
        return asked(Field::Memory, format!("{each}: {vcpus} vCPUs need {together} together, {why}"));
    }
    let pages = total / mapping;
    if pages == 0 {
        let why = format!("less than one of the {of_mapping} pages of {backing}; {of_mapping} would work");
        return asked(Field::Memory, format!("{each} is {why}"));
    }
    let slots = config.slots;
    if u64::from(slots) > pages || !pages.is_multiple_of(slots.into()) {
        let fits = (1..=u64::from(slots).min(pages)).rev().find(|slots| pages.is_multiple_of(*slots));
        let why = format!("{together} in pages of {of_mapping} do not divide into so many memslots");
        return asked(Field::Slots, format!("{slots}: {why}; {} would work", fits.unwrap_or(1)));
    }
    if let Some(chunk) = config.chunk.filter(|_| !method.is_manual()) {
        let why = match method {
            Method::Ring => "the ring is reset as a whole",
            _ => "KVM_GET_DIRTY_LOG alone clears what it reads",
        };
        let instead = "so there is nothing to clear in chunks; the tracker manual-protect would work";
        return asked(Field::ClearChunk, format!("{chunk}: {why}, {instead}"));
    }
    if let Some(offset) = config.phys_offset {
        check_offset(offset, total, backing)?;
    }
    let cpus = allowed_cpus().map_err(|e| Error::Host("sched_getaffinity", e))?;
    if config.continuous.is_some() && cpus.len() < 2 {
        let why = "the guest and the collection would take turns on this process's only CPU, and nothing would be decoupled; \
                   lockstep works, or allow a second CPU (taskset)";
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
