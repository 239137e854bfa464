//! `migration`: what it costs to move a guest that writes, the guest and the host.
//!
//! Two processes of this program's, started as a user starts them: `vellum run` with the built-in guest, and `vellum receive`; a third,
//! `vellum migrate`, is the client. The guest fills its memory as fast as it can, writes at the rate that was asked for, is left alone
//! for a while, moves, is left alone again, and ends, upon which every page is checked. It keeps a journal
//! ([`guests::journal`](vellum_guests::journal)), which moves with it: how long it stood still is what it says itself, by its own
//! clock, from its last write here to its first there. What the two processes say of their parts stands beside it.
//!
//! Where its memory follows the guest ([`Mode::Postcopy`]), the stream of it has half of what a connection carries, unless another cap was
//! asked for; and what the guest waited for a page stands beside the barest answer to such a fault, beside such a stream, which is
//! measured right before the guest moves.
//!
//! `process` has the processes, `round` one move of a guest, `answer` that barest answer, `measured` what was measured and its figures.

mod answer;
mod measured;
mod process;
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
use vellum_report::{Label, Report};
use vellum_sys::affinity;
use vellum_sys::uffd::{self, Uffd};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have. Its CPUs are those that all processes may use.
    pub common: Common,
    /// Memory of each vCPU.
    pub region: Region,
    /// How dirty pages are collected; `None` for what a migration takes by itself.
    pub method: Option<Method>,
    /// Entries of a dirty ring.
    pub ring_entries: u32,
    /// Bytes of pages that all vCPUs together write in a second.
    pub dirty_rate: Rate,
    /// The order of the writes.
    pub order: Order,
    /// The hot set of each vCPU.
    pub hot: Option<Hot>,
    /// When memory goes.
    pub mode: Mode,
    /// Over how many connections pages go.
    pub connections: u32,
    /// Bytes a second at most.
    pub bandwidth: Option<u64>,
    /// How long the guest may stand still.
    pub downtime: Duration,
    /// After which time it moves however long it has to stand still.
    pub timeout: Duration,
    /// How long the guest is left alone before it moves, and afterwards.
    pub around: Duration,
    /// What its processes are started with.
    pub lines: Lines,
}

/// Where the processes of a measurement find each other.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The socket at which the target waits.
    pub listen: PathBuf,
    /// The file for the target's result.
    pub result: PathBuf,
}

/// The command lines of a measurement's processes: machines called `source` and `target`, and the client, who says as JSON lines what
/// happens. How they are written is known where command lines are read.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// The target's.
    pub target: fn(&Config, &Paths) -> Vec<String>,
    /// The source's, whose guest keeps a journal in slices of this length.
    pub source: fn(&Config, Duration) -> Vec<String>,
    /// The client's.
    pub client: fn(&Config, &Paths) -> Vec<String>,
}

/// Bytes of pages a second, or as many as the guest can.
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
    /// Distinct pages that each vCPU writes in a second.
    pub fn pages(&self) -> Option<u64> {
        let share = |bytes: u64| (bytes / vellum_sys::mmap::PAGE_SIZE / self.region.vcpus as u64).max(1);
        self.dirty_rate.0.map(share)
    }

    /// Whether memory comes when the guest runs on the target.
    pub fn follows(&self) -> bool {
        self.mode != Mode::Precopy
    }

    /// Refuses what contradicts itself or this host.
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
                Error::Lacking(format!(
                    "memory that follows takes a userfaultfd, see `vellum doctor`: {error}"
                ))
            })?;
        }
        // Both processes have all of it.
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
        let cap = if self.follows() { "half of what a connection carries" } else { "off" };
        report.ask("bandwidth", self.bandwidth.map_or(cap.into(), |bytes| serde_json::json!(bytes)));
        report.ask("downtime_limit_seconds", self.downtime.as_secs_f64());
        report.ask("timeout_seconds", self.timeout.as_secs_f64());
        report.ask("left_alone_seconds", self.around.as_secs_f64());
        self.common.ask(report);
    }
}

/// Measures.
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
    Ok(report)
}

/// The dirty rates of [`sweep`] in MiB/s, before the last, which is as fast as the guest can.
const RATES: [u64; 4] = [16, 64, 256, 1024];

/// One round of one of them.
struct Part {
    rate: Rate,
    round: super::Round,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.rate, self.round)
    }
}

/// Measures with one dirty rate after the other, up to as fast as the guest can, as one table: where moving a guest gets hard.
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
