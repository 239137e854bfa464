//! `migration`: the cost of moving a guest that writes, for the guest and the host.
//!
//! It starts three processes of this program as a user would: `vellum run` with the built-in guest,
//! `vellum receive`, and `vellum migrate` as the client. The guest fills its memory as fast as it
//! can, then writes at the requested rate. It runs undisturbed for a while, moves, runs undisturbed
//! again, and ends. Then every page is checked. The guest keeps a journal
//! ([`guests::journal`](vellum_guests::journal)) that moves with it. The downtime comes from this
//! journal: from its last write on the source to its first on the target, by its own clock. The
//! figures of the two processes are listed with it.
//!
//! With postcopy ([`Mode::Postcopy`]) the page stream gets half of a connection's bandwidth, unless
//! another cap is given. Right before the guest moves, the benchmark also measures the minimal
//! answer to a fault beside such a stream, to compare with the guest's waits.
//!
//! [`process`](super::process) has the processes, `round` moves a guest once, `answer` measures the
//! minimal answer, `measured` has the results and figures.

mod answer;
mod measured;
mod round;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Common, Error, Region};
use vellum_control::Mode;
use vellum_guests::{Hot, Order};
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::short_size;
use vellum_kvm::vm;
use vellum_report::units::humanised;
use vellum_report::{Answer, Label, Report};
use vellum_sys::affinity;
use vellum_sys::uffd::{self, Uffd};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters. All processes share its CPUs.
    pub common: Common,
    /// The memory of each vCPU.
    pub region: Region,
    /// How to collect dirty pages. `None` uses the migration's default.
    pub method: Option<Method>,
    /// The entries of a dirty ring.
    pub ring_entries: u32,
    /// The rate at which all vCPUs together write pages.
    pub dirty_rate: Rate,
    /// The order of the writes.
    pub order: Order,
    /// The hot set of each vCPU.
    pub hot: Option<Hot>,
    /// When to transfer memory.
    pub mode: Mode,
    /// The number of connections for pages.
    pub connections: u32,
    /// The bandwidth limit in bytes per second.
    pub bandwidth: Option<u64>,
    /// The longest pause of the guest.
    pub downtime: Duration,
    /// After this time the guest moves, no matter how long it pauses.
    pub timeout: Duration,
    /// How long the guest runs undisturbed before and after the move.
    pub around: Duration,
    /// The command lines of the processes.
    pub lines: Lines,
}

/// The paths that the processes of a measurement share.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The target's socket for the migration.
    pub listen: PathBuf,
    /// The file for the target's result.
    pub result: PathBuf,
}

/// Build the command lines of the processes: machines named `source` and `target`, and the client,
/// which prints events as JSON lines. The command line's own crate provides them.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// The target's command line.
    pub target: fn(&Config, &Paths) -> Vec<String>,
    /// The source's. Its guest keeps a journal with slices of this length.
    pub source: fn(&Config, Duration) -> Vec<String>,
    /// The client's.
    pub client: fn(&Config, &Paths) -> Vec<String>,
}

/// Bytes of pages per second. `None` is as fast as possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub Option<u64>);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "{}/s", short_size(bytes)),
            None => f.write_str("max"),
        }
    }
}

impl Config {
    /// Distinct pages per second that each vCPU writes.
    pub fn pages(&self) -> Option<u64> {
        let share = |bytes: u64| (bytes / vellum_sys::mmap::PAGE_SIZE / self.region.vcpus as u64).max(1);
        self.dirty_rate.0.map(share)
    }

    /// Whether memory arrives after the guest runs on the target.
    pub fn follows(&self) -> bool {
        self.mode != Mode::Precopy
    }

    /// Checks for contradictions and against this host.
    fn check(&self) -> Result<(), Error> {
        self.region.check(self.region.backing.best_mapping())?;
        if let Some(method) = self.method {
            let kvm = vm::open()?;
            let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
            method.check(&probe)?;
            if method == Method::Ring {
                vm::ring::check(&probe, self.ring_entries).map_err(vm::Error::from)?;
            }
        }
        if self.follows() {
            Uffd::new(uffd::Mode::Missing).map_err(|error| {
                Error::Lacking(format!("postcopy needs a userfaultfd, see `vellum doctor`: {error}"))
            })?;
        }
        // Both processes have all of the memory.
        let both = Region { bytes: self.region.bytes.saturating_mul(2), ..self.region };
        both.affordable(false)?;
        if let Some(cpus) = &self.common.pins {
            affinity::allow(cpus).map_err(|e| Error::Host("sched_setaffinity", e))?;
        }
        Ok(())
    }

    fn ask(&self, report: &mut Report) {
        report.ask("vcpus", self.region.vcpus);
        report.ask("bytes_per_vcpu", self.region.bytes);
        report.ask("backing", self.region.backing.to_string());
        report.ask("order", self.order.name());
        if let Some(hot) = self.hot {
            report.ask("hot_percent", hot.percent);
            report.ask("hot_share_percent", hot.share);
        }
        if self.method == Some(Method::Ring) {
            report.ask("ring_entries", self.ring_entries);
        }
        report.ask("mode", self.mode.name());
        report.ask("connections", self.connections);
        let cap = if self.follows() { "half of a connection's bandwidth" } else { "off" };
        report.ask("bandwidth", self.bandwidth.map_or(cap.into(), |bytes| serde_json::json!(bytes)));
        report.ask("downtime_limit_seconds", self.downtime.as_secs_f64());
        report.ask("timeout_seconds", self.timeout.as_secs_f64());
        report.ask("left_alone_seconds", self.around.as_secs_f64());
        self.common.ask(report);
    }
}

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    config.check()?;
    let mut report = config.common.report("migration");
    report.host.sandbox = config.common.sandbox.to_string();
    config.ask(&mut report);
    report.ask("dirty_rate", config.dirty_rate.to_string());
    let mut rounds = Vec::new();
    config.common.each(&mut report, &config.common.rounds(), |report, round| {
        let measured = round::measure(report, config, &round.to_string())?;
        rounds.push(measured);
        Ok(())
    })?;
    measured::add(&mut report, rounds);
    report.set_headline("downtime");
    report.answer(answer(&report, config));
    Ok(report)
}

/// The first lines of the result.
fn answer(report: &Report, config: &Config) -> Answer {
    let told = |name: &str| report.told(name).unwrap_or_else(|| "unknown".into());
    let limit = humanised("s", config.downtime.as_secs_f64());
    let progress = |when| report.told(Label::of("progress", when));
    let answer =
        Answer::of_measurement(format!("The guest stood still for {}, limit {limit}", told("downtime")));
    // Memory that follows the guest is not part of the time until it runs there.
    let until = if config.follows() { "runs there after" } else { "moved in" };
    answer
        .fact(until, told("total"))
        .fact_if("all memory is there after", report.told("memory_there"))
        .fact_if("passes", report.told("passes"))
        .fact_if(
            "sent",
            report.find("bytes_sent").map(|sent| format!("{:.0} MiB", sent.value() / f64::from(1 << 20))),
        )
        .fact_if("bandwidth", report.told("bandwidth"))
        .fact_if("faults waited for", report.told("faults"))
        .fact_if("a fault waits", report.told("fault_latency_p50"))
        .fact_if("progress before", progress("before"))
        .fact_if("progress during", progress("during"))
        .fact_if("progress lost", lost(report))
}

/// What the migration took from the guest's progress. A difference within the noise is no loss.
fn lost(report: &Report) -> Option<String> {
    let (lost, noise) = (report.find("progress_lost")?.value(), report.find("progress_noise")?.value());
    Some(match lost.abs() <= noise {
        true => format!("none shown: {lost:.1} % is within the noise of {noise:.1} %"),
        false => format!("{lost:.1} % (noise {noise:.1} %)"),
    })
}

/// The dirty rates of [`sweep`] in MiB/s. One more is as fast as possible.
const RATES: [u64; 4] = [16, 64, 256, 1024];

/// One round at one dirty rate.
struct Part {
    rate: Rate,
    round: super::Round,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.rate, self.round)
    }
}

/// Measures with rising dirty rates, up to as fast as possible. Builds one table that shows where
/// moving a guest gets hard.
pub fn sweep(config: &Config) -> Result<Report, Error> {
    config.check()?;
    let mut report = config.common.report("migration");
    report.host.sandbox = config.common.sandbox.to_string();
    config.ask(&mut report);
    report.ask("preset", "sweep");
    let rates = || RATES.iter().map(|mib| Rate(Some(mib << 20))).chain([Rate(None)]);
    let parts: Vec<Part> = rates()
        .flat_map(|rate| config.common.rounds().into_iter().map(move |round| Part { rate, round }))
        .collect();
    let mut rounds: Vec<(Rate, measured::Round)> = Vec::new();
    config.common.each(&mut report, &parts, |report, part| {
        let config = Config { dirty_rate: part.rate, ..config.clone() };
        rounds.push((part.rate, round::measure(report, &config, &part.to_string())?));
        Ok(())
    })?;
    for rate in rates() {
        let (of_rate, others) = rounds.into_iter().partition(|(of, _)| *of == rate);
        rounds = others;
        let of_rate: Vec<_> = of_rate.into_iter().map(|(_, round)| round).collect();
        measured::add_column(&mut report, &rate.to_string(), &of_rate);
    }
    report.set_headline(Label::of(rates().next().map_or(String::new(), |rate| rate.to_string()), "downtime"));
    Ok(report)
}
