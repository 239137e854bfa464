//! Benchmarks, one file each. Each is a workload, a schedule and its figures.
//!
//! The head of a benchmark's file says what it measures. Each has a type for the results of one
//! round, which become figures after all rounds. This file has what they share: errors, rounds and
//! premises. `region` has the memory. The command line is in `cli/bench/`.

pub mod access_tracking;
pub mod context_switch;
pub mod demand_paging;
pub mod dirty_log;
pub mod fork;
pub mod live_update;
pub mod memslot;
pub mod migration;
pub mod oracle;
pub mod page_table;
mod process;
mod region;
pub mod rmap_fork;
mod shadow;

use std::fmt::Display;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::ProgressBar;

use vellum_guests::control::Control;
use vellum_guests::guest::{self, Guest, GuestConfig};
use vellum_guests::program::GuestPage;
use vellum_guests::run::huge_premise;
use vellum_host::{Facts, Paging, idle};
use vellum_kvm::arch::irqchip;
use vellum_kvm::dirty;
use vellum_kvm::memory;
use vellum_kvm::vm;
use vellum_kvm::vm::counters::{Counters, Snapshot};
use vellum_report::{Premise, Report, Sample};
use vellum_sandbox::{self as sandbox, Mode};
use vellum_sys::affinity;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

pub use region::Region;

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field does not fit the others, or this host lacks it.
    #[error("{1}")]
    Asked(Field, String),
    /// This host lacks something that the benchmark needs.
    #[error("{0}")]
    Lacking(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] guest::Error),
    /// The dirty log failed.
    #[error(transparent)]
    Dirty(#[from] dirty::Error),
    /// The host failed an operation.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl From<vm::Error> for Error {
    fn from(error: vm::Error) -> Self {
        Self::Machine(error.into())
    }
}

impl From<vm::vcpu::Error> for Error {
    fn from(error: vm::vcpu::Error) -> Self {
        vm::Error::from(error).into()
    }
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Self {
        Self::Machine(error.into())
    }
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Asked(field, _) => ErrorOrigin::user(*field),
            Self::Lacking(_) => ErrorOrigin::USER.lacking(),
            Self::Machine(error) => error.origin(),
            Self::Dirty(error) => error.origin(),
            Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}

impl Error {
    /// The signal that interrupted the benchmark, if one did.
    pub fn interrupted(&self) -> Option<i32> {
        match self {
            Self::Machine(guest::Error::Interrupted(signal)) => Some(*signal),
            _ => None,
        }
    }
}

/// The parameters of all benchmarks.
#[derive(Clone, Debug)]
pub struct Common {
    /// Whether to confine vCPU threads. Each thread is confined separately, because the main thread
    /// still builds machines.
    pub sandbox: Mode,
    /// The CPU of each vCPU. One more CPU is for the main thread.
    pub pins: Option<Vec<usize>>,
    /// The number of rounds. More than one give a median and a spread.
    pub repeat: u32,
    /// The guest's page size. `None` means 4 KiB, or 2 MiB if the host shadows guest page tables.
    pub page: Option<GuestPage>,
    /// The interrupt controllers in KVM. They make every exit more expensive.
    pub irqchip: Option<irqchip::Mode>,
    /// Shows the progress.
    pub progress: ProgressBar,
}

impl Default for Common {
    /// One round, sandboxed, not pinned, without interrupt controllers and progress.
    fn default() -> Self {
        Self {
            sandbox: Mode::default(),
            pins: None,
            repeat: 1,
            page: None,
            irqchip: None,
            progress: ProgressBar::hidden(),
        }
    }
}

impl Common {
    /// An empty result of `bench NAME` on this host.
    fn report(&self, name: &str) -> Report {
        Report::new(format!("bench {name}"), Facts::collect(self.sandbox.of_vcpus()))
    }

    /// Records the common parameters, after all others.
    fn ask(&self, report: &mut Report) {
        report.ask("pin", self.pins.as_ref().map_or("off".into(), |pins| serde_json::json!(pins)));
        report.ask("repeat", self.repeat);
        let irqchip = self.irqchip.as_ref().and_then(ValueEnum::to_possible_value);
        report.ask("irqchip", irqchip.map_or("none".into(), |value| value.get_name().to_owned()));
    }

    /// The guest's page size on `host`.
    fn page(&self, host: &Facts) -> GuestPage {
        let large = host.paging == Paging::Shadow;
        self.page.unwrap_or(if large { GuestPage::Large } else { GuestPage::Small })
    }

    /// Records the guest's page size, for benchmarks that depend on it.
    fn ask_page(&self, report: &mut Report) {
        let small = self.page(&report.host) == GuestPage::Small;
        report.ask("guest_page", if small { "4k" } else { "2m" });
    }

    /// The default configuration of a machine with `vcpus` vCPUs.
    fn guest(&self, vcpus: usize) -> GuestConfig {
        GuestConfig {
            pins: self.pins.clone(),
            irqchip: self.irqchip,
            enter: sandbox::each_vcpu(self.sandbox),
            ..GuestConfig::new(vcpus)
        }
    }

    /// Runs `one` for each of `parts`. Shows the current part and the time left. If a signal
    /// interrupts it, the parts measured before remain and the result says so. Without any it is an
    /// error.
    fn each<T: Display>(
        &self,
        report: &mut Report,
        parts: &[T],
        mut one: impl FnMut(&mut Report, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let idling = Idling::watch(&report.host);
        let begun = Instant::now();
        for (done, part) in parts.iter().enumerate() {
            // If a part has parts itself, it reports those.
            if parts.len() > 1 {
                let left = left(begun.elapsed(), done, parts.len());
                self.progress.set_message(format!("{part}, {}/{}{left}", done + 1, parts.len()));
            }
            match one(report, part) {
                Err(error) if done > 0 && error.interrupted().is_some() => {
                    let of = parts.len();
                    report.cut_short = Some(format!(
                        "interrupted in {part}: the figures cover the {done} of {of} parts measured before"
                    ));
                    break;
                }
                result => result?,
            }
        }
        if let Some(idling) = idling {
            idling.judge(report);
        }
        Ok(())
    }

    /// The rounds, for [`Common::each`].
    fn rounds(&self) -> Vec<Round> {
        (0..self.repeat).map(Round).collect()
    }

    /// Pins this thread if there is a CPU for it after those of the vCPUs.
    fn pin_main(&self, vcpus: usize) -> Result<(), Error> {
        match self.pins.as_ref().and_then(|pins| pins.get(vcpus)) {
            Some(&cpu) => affinity::pin(cpu).map_err(|e| Error::Host("sched_setaffinity", e)),
            None => Ok(()),
        }
    }
}

/// The estimated time left.
fn left(elapsed: Duration, done: usize, of: usize) -> String {
    if done == 0 {
        return String::new();
    }
    let seconds = (elapsed.as_secs_f64() / done as f64 * (of - done) as f64).ceil() as u64;
    let time = match seconds {
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{} h", seconds.div_ceil(3600)),
    };
    format!(", about {time} left")
}

/// The samples of a figure with at most one value per round, each in its own machine.
fn of_rounds<R>(rounds: &[R], value: impl Fn(&R) -> Option<f64>) -> Vec<Sample> {
    (0..).zip(rounds).filter_map(|(i, round)| Some(Sample::of_round(i, value(round)?))).collect()
}

/// The largest share of a measurement that an emulated host may be idle.
const IDLE_LIMIT: f64 = 0.01;

/// Premise for emulated time: the clock counts instructions, and idle time as if it were
/// instructions.
struct Idling {
    since: Instant,
    before: Duration,
}

impl Idling {
    /// Starts to watch, if the clock counts instructions. With two CPUs an emulated host runs in
    /// real time.
    fn watch(host: &Facts) -> Option<Self> {
        let before = (host.emulated && host.cpus == 1).then(idle::since_boot)??;
        Some(Self { since: Instant::now(), before })
    }

    fn judge(self, report: &mut Report) {
        let elapsed = self.since.elapsed();
        let idled = idle::since_boot().map_or(Duration::ZERO, |now| now.saturating_sub(self.before));
        let said = report.invalid.iter().any(|failed| matches!(failed.premise, Premise::HostIdled { .. }));
        // If a part has failed this premise, the whole does not repeat it.
        if let Some(premise) = idled_too_long(idled, elapsed).filter(|_| !said) {
            report.fail(None, premise);
        }
    }
}

fn idled_too_long(idled: Duration, elapsed: Duration) -> Option<Premise> {
    let share = idled.as_secs_f64() / elapsed.as_secs_f64();
    (share > IDLE_LIMIT).then_some(Premise::HostIdled { share, limit: IDLE_LIMIT })
}

/// The number of a round, from 0.
#[derive(Clone, Copy, Debug)]
struct Round(u32);

impl Round {
    /// Whether it is the round whose counters and plots represent all.
    fn is_first(self) -> bool {
        self.0 == 0
    }
}

impl Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "round {}", self.0 + 1)
    }
}

/// The duration of a vCPU's pass in seconds, by the guest's TSC. `of` counts from the start of its
/// current run.
fn pass_seconds(control: &Control, hz: u64) -> f64 {
    let pass =
        control.pass.load(Ordering::Relaxed).saturating_sub(1) as usize % vellum_guests::control::PASS_ENDS;
    let ticks = control.pass_ends[pass]
        .load(Ordering::Relaxed)
        .saturating_sub(control.started.load(Ordering::Relaxed));
    ticks as f64 / hz as f64
}

/// KVM's counters around a measurement. If they are missing, a note says why.
struct Counted {
    counters: Option<Counters>,
    before: Snapshot,
}

impl Counted {
    /// Reads the counters of `guest`, whose vCPUs are paused.
    fn start(guest: &Guest, report: &mut Report) -> Self {
        let counters = match Counters::open(&guest.vm.fd, &guest.vcpus) {
            Ok(counters) => Some(counters),
            Err(error) => {
                report.note(error.to_string());
                None
            }
        };
        let before = counters.as_ref().and_then(|c| c.read().ok()).unwrap_or_default();
        Self { counters, before }
    }

    /// Reads the counters now.
    fn now(&self) -> Snapshot {
        self.counters.as_ref().and_then(|c| c.read().ok()).unwrap_or_default()
    }

    /// Adds both readings to the result. `index` names the machine if there are several.
    fn finish(self, report: &mut Report, now: &Snapshot, index: Option<&str>) {
        report.counters(index, &self.before, now);
    }

    /// The increase of a counter. `None` if this kernel lacks it.
    fn grown(&self, now: &Snapshot, name: &str) -> Option<u64> {
        Some(now.get(name)?.saturating_sub(*self.before.get(name)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_kvm::memory::Backing;

    #[test]
    fn small_guest_pages_excuse_small_mappings_where_they_are_shadowed() {
        let now: Snapshot = [("pages_4k", 512), ("pages_2m", 0), ("pages_1g", 0)]
            .map(|(name, n)| (name.to_owned(), n))
            .into();
        let of = |paging, page| {
            let mut report = Common::default().report("page-table");
            report.host.paging = paging;
            for _round in 0..2 {
                huge_premise(&mut report, Backing::Thp, page, &now);
            }
            (report.invalid.len(), report.notes.len())
        };
        assert_eq!(of(Paging::Shadow, GuestPage::Small), (0, 1));
        assert_eq!(of(Paging::Shadow, GuestPage::Large), (1, 0));
        assert_eq!(of(Paging::Npt, GuestPage::Small), (1, 0));
    }

    #[test]
    fn a_backing_that_is_mapped_smaller_is_noted() {
        let of = |backing, huge| {
            let now: Snapshot = [("pages_4k", 1), ("pages_2m", 512), ("pages_1g", huge)]
                .map(|(name, n)| (name.to_owned(), n))
                .into();
            let mut report = Common::default().report("page-table");
            huge_premise(&mut report, backing, GuestPage::Large, &now);
            (report.invalid.len(), report.notes.len())
        };
        assert_eq!(of(Backing::Hugetlb(1 << 30), 0), (0, 1));
        assert_eq!(of(Backing::Hugetlb(1 << 30), 1), (0, 0));
        assert_eq!(of(Backing::Hugetlb(2 << 20), 0), (0, 0));
    }

    #[test]
    fn an_emulated_host_may_idle_a_hundredth_of_the_time() {
        let of = |idled| idled_too_long(Duration::from_millis(idled), Duration::from_secs(1));
        assert_eq!((of(0), of(9)), (None, None));
        assert!(of(31).is_some_and(|why| why.to_string().contains("idle for 3.1 %")));
        // On a real host idle time affects no figure.
        let host = Facts { emulated: false, ..Facts::collect(String::new()) };
        assert!(Idling::watch(&host).is_none());
    }

    #[test]
    fn what_an_interrupt_leaves_says_how_much_that_is() {
        let mut report = Common::default().report("t");
        let parts: Vec<Round> = (0..500).map(Round).collect();
        let interrupted = || guest::Error::Interrupted(2).into();
        let measured = Common::default()
            .each(&mut report, &parts, |_, round| if round.0 < 9 { Ok(()) } else { Err(interrupted()) });
        measured.unwrap();
        let said = report.cut_short.unwrap();
        assert!(said.contains("in round 10") && said.contains("the 9 of 500 parts"), "{said}");
        let mut report = Common::default().report("t");
        assert!(Common::default().each(&mut report, &parts, |_, _| Err(interrupted())).is_err());
    }

    #[test]
    fn what_is_left_is_told_in_the_unit_that_suits() {
        let of = |elapsed, done| left(Duration::from_secs(elapsed), done, 100);
        assert_eq!((of(0, 0), of(10, 10)), (String::new(), ", about 90 s left".into()));
        assert_eq!((of(60, 10), of(7200, 50)), (", about 9 min left".into(), ", about 2 h left".into()));
    }
}
