//! Benchmarks: one file each, and each is a workload, a schedule and its figures.
//!
//! What a benchmark measures is said at the head of its file. Here is only what they share: how they fail, and the
//! premises without which a figure means nothing. The command line is `cli/bench/`.

pub mod access_tracking;
pub mod context_switch;
pub mod demand_paging;
pub mod dirty_log;
pub mod memslot;
pub mod page_table;
pub mod rmap_fork;
mod shadow;

use std::fmt::Display;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::ProgressBar;

use crate::arch::{irqchip, layout};
use crate::fault::{Blame, Fault, Field};
use crate::guests::control::Control;
use crate::guests::guest::{self, Guest, GuestConfig};
use crate::guests::program::GuestPage;
use crate::guests::run::huge_premise;
use crate::host::{Facts, Paging, hugepages, idle, topology};
use crate::memory::{self, Backing, Memory, MemoryConfig, short_size};
use crate::report::Report;
use crate::sandbox::{self, Mode};
use crate::sys::affinity;
use crate::vm::counters::{Counters, Snapshot};
use crate::{dirty, vm};

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field's value does not go with the others, or this host lacks it.
    #[error("{1}")]
    Asked(Field, String),
    /// This host lacks what the benchmark needs.
    #[error("{0}")]
    Lacking(String),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] guest::Error),
    /// The dirty log.
    #[error(transparent)]
    Dirty(#[from] dirty::Error),
    /// The host.
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

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Asked(field, _) => Blame::user(*field),
            Self::Lacking(_) => Blame::USER,
            Self::Machine(error) => error.blame(),
            Self::Dirty(error) => error.blame(),
            Self::Host(..) => Blame::HOST,
        }
    }
}

impl Error {
    /// The signal with which the user ended it.
    pub fn interrupted(&self) -> Option<i32> {
        match self {
            Self::Machine(guest::Error::Interrupted(signal)) => Some(*signal),
            _ => None,
        }
    }
}

/// What all benchmarks have.
#[derive(Clone, Debug)]
pub struct Common {
    /// Whether vCPU threads are confined. Each is on its own, since the main thread goes on to build machines.
    pub sandbox: Mode,
    /// The CPU of each vCPU; where there is one more, it is the main thread's.
    pub pins: Option<Vec<usize>>,
    /// Rounds: more than one give a median and a spread.
    pub repeat: u32,
    /// The page size of the guest's own tables; `None` for 4 KiB, or 2 MiB where the host shadows them.
    pub page: Option<GuestPage>,
    /// Interrupt controllers in KVM, with which every exit costs more.
    pub irqchip: Option<irqchip::Mode>,
    /// Where it says what it is at.
    pub progress: ProgressBar,
}

impl Default for Common {
    /// One round, sandboxed, unpinned, without interrupt controllers, silent.
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

    /// The part of what was asked for that every result says, last.
    fn ask(&self, report: &mut Report) {
        report.ask("pin", self.pins.as_ref().map_or("off".into(), |pins| serde_json::json!(pins)));
        report.ask("repeat", self.repeat);
        let irqchip = self.irqchip.as_ref().and_then(ValueEnum::to_possible_value);
        report.ask("irqchip", irqchip.map_or("none".into(), |value| value.get_name().to_owned()));
    }

    /// The page size of the guest's own tables on `host`.
    fn page(&self, host: &Facts) -> GuestPage {
        let large = host.paging == Paging::Shadow;
        self.page.unwrap_or(if large { GuestPage::Large } else { GuestPage::Small })
    }

    /// The same for benchmarks to which it matters.
    fn ask_page(&self, report: &mut Report) {
        let small = self.page(&report.host) == GuestPage::Small;
        report.ask("guest_page", if small { "4k" } else { "2m" });
    }

    /// How a machine of `vcpus` is built, unless the benchmark says otherwise.
    fn guest(&self, vcpus: usize) -> GuestConfig {
        GuestConfig {
            pins: self.pins.clone(),
            irqchip: self.irqchip,
            enter: sandbox::each_vcpu(self.sandbox),
            ..GuestConfig::new(vcpus)
        }
    }

    /// Does `one` for each of `parts`, and says which it is at. Where a signal interrupts it, what was measured before
    /// stands, and the result says so; where nothing was, that is an error.
    fn each<T: Display>(
        &self,
        report: &mut Report,
        parts: impl IntoIterator<Item = T>,
        mut one: impl FnMut(&mut Report, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let idling = Idling::watch(&report.host);
        for (index, part) in parts.into_iter().enumerate() {
            self.progress.set_message(part.to_string());
            match one(report, &part) {
                Err(error) if index > 0 && error.interrupted().is_some() => {
                    report.notes.push(format!("interrupted at {part}: the figures are of what came before"));
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
    fn rounds(&self) -> impl Iterator<Item = Round> + use<> {
        let of = self.repeat;
        (0..of).map(move |index| Round { index, of })
    }

    /// Pins this thread, where there is a CPU for it after those of `vcpus`.
    fn pin_main(&self, vcpus: usize) -> Result<(), Error> {
        match self.pins.as_ref().and_then(|pins| pins.get(vcpus)) {
            Some(&cpu) => affinity::pin(cpu).map_err(|e| Error::Host("sched_setaffinity", e)),
            None => Ok(()),
        }
    }
}

/// The share of a measurement that an emulated host may be idle.
const IDLE_LIMIT: f64 = 0.01;

/// How the reason begins.
const IDLE: &str = "the emulated host was idle";

/// The premise of emulated time: its clock counts instructions, and idle time as if it were some.
struct Idling {
    since: Instant,
    before: Duration,
}

impl Idling {
    /// From now on, where time is instructions. Two emulated CPUs run in real time.
    fn watch(host: &Facts) -> Option<Self> {
        let before = (host.emulated && host.cpus == 1).then(idle::since_boot)??;
        Some(Self { since: Instant::now(), before })
    }

    fn judge(self, report: &mut Report) {
        let elapsed = self.since.elapsed();
        let idled = idle::since_boot().map_or(Duration::ZERO, |now| now.saturating_sub(self.before));
        // Where one of the parts has said so already, there is no more to say of the whole.
        if !report.invalid.iter().any(|why| why.contains(IDLE)) {
            report.invalid.extend(idled_too_long(idled, elapsed));
        }
    }
}

fn idled_too_long(idled: Duration, elapsed: Duration) -> Option<String> {
    let share = idled.as_secs_f64() / elapsed.as_secs_f64();
    (share > IDLE_LIMIT).then(|| {
        format!(
            "{IDLE} for {:.1} % of the time, which its clock counts as work; above {:.0} % that is no measurement: measure more memory or more rounds",
            share * 100.0,
            IDLE_LIMIT * 100.0
        )
    })
}

/// One round of several.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// From 0.
    index: u32,
    of: u32,
}

impl Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "round {} of {}", self.index + 1, self.of)
    }
}

/// Memory, and how many vCPUs go over it.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Bytes: of each vCPU's part, unless the benchmark says otherwise.
    pub bytes: u64,
    /// What backs them.
    pub backing: Backing,
    /// vCPUs.
    pub vcpus: usize,
}

impl Region {
    /// Refuses bytes that are no multiple of `page`.
    fn check(&self, page: u64) -> Result<(), Error> {
        if self.bytes > 0 && self.bytes.is_multiple_of(page) {
            return Ok(());
        }
        Err(Error::Asked(
            Field::Memory,
            format!(
                "{} is no multiple of the {page}-byte pages of {}; the next that is one: {}",
                self.bytes,
                self.backing,
                self.bytes.max(1).next_multiple_of(page)
            ),
        ))
    }

    /// Bytes in all, where each vCPU has a part of its own, or all share one.
    fn total(&self, shared: bool) -> u64 {
        self.bytes.saturating_mul(if shared { 1 } else { self.vcpus as u64 })
    }

    /// The same, if this host has as much, and as many vCPUs.
    fn affordable(&self, shared: bool) -> Result<u64, Error> {
        let most = vm::open()?.get_max_vcpus();
        if self.vcpus > most {
            return Err(Error::Asked(
                Field::Cpus,
                format!("{}: this KVM has at most {most} vCPUs", self.vcpus),
            ));
        }
        let total = self.total(shared);
        check_memory(total, self.backing)?;
        Ok(total)
    }
}

/// Refuses an address at which RAM cannot start.
fn check_offset(offset: u64, bytes: u64, backing: Backing) -> Result<(), Error> {
    let align = backing.best_mapping().max(2 << 20);
    let end = offset.saturating_add(bytes);
    let in_gap = end > layout::GAP_START && offset < layout::GAP_END;
    if offset.is_multiple_of(align) && !in_gap && end <= layout::MAX_ADDRESS {
        return Ok(());
    }
    Err(Error::Asked(
        Field::GuestAddress,
        format!(
            "{offset:#x}: memory must start at a multiple of {} and keep clear of {:#x} to {:#x}; {:#x} would work",
            short_size(align),
            layout::GAP_START,
            layout::GAP_END,
            layout::GAP_END
        ),
    ))
}

/// Has RAM start at `offset` in the guest's physical address space, where that was asked for.
fn place(memory: &mut Memory, offset: Option<u64>) -> Result<(), Error> {
    Ok(offset.map_or(Ok(()), |offset| memory.start_at(offset))?)
}

/// Memory that the host has populated already, so that no first touch of its own is among the figures.
fn populated(config: MemoryConfig) -> Result<Memory, Error> {
    let memory = Memory::map(crate::arch::layout::RAM, MemoryConfig { prealloc: true, ..config })?;
    memory.populate(|_| {})?;
    Ok(memory)
}

/// Refuses what would exceed the host's memory, before anything is mapped.
fn check_memory(bytes: u64, backing: Backing) -> Result<(), Error> {
    if bytes < memory::LEAST {
        let [all, least] = [bytes, memory::LEAST].map(short_size);
        return Err(Error::Asked(Field::Memory, format!("{all} in all, and a machine has {least} at least")));
    }
    if let Backing::Hugetlb(page) | Backing::SharedHugetlb(page) = backing {
        return hugepages::check(page, bytes)
            .map_err(|shortage| Error::Asked(Field::Backing, format!("{backing}: {shortage}")));
    }
    let available = topology::memory().available;
    // Page tables, KVM's and ours, are some hundredths of it.
    let bytes = bytes.saturating_add(bytes / 64);
    if available > 0 && bytes > available {
        return Err(Error::Asked(
            Field::Memory,
            format!(
                "this needs {} of memory and {} is available: ask for fewer vCPUs or less for each",
                short_size(bytes.next_multiple_of(1 << 20)),
                short_size(available >> 20 << 20),
            ),
        ));
    }
    Ok(())
}

/// The seconds that a vCPU's pass took, by the guest's TSC; `of` counts from the start of its current run.
fn pass_seconds(control: &Control, hz: u64) -> f64 {
    let pass =
        control.pass.load(Ordering::Relaxed).saturating_sub(1) as usize % crate::guests::control::PASS_ENDS;
    let ticks = control.pass_ends[pass]
        .load(Ordering::Relaxed)
        .saturating_sub(control.started.load(Ordering::Relaxed));
    ticks as f64 / hz as f64
}

/// KVM's counters around a measurement; where there are none, a note says why.
struct Counted {
    counters: Option<Counters>,
    before: Snapshot,
}

impl Counted {
    /// Opens and reads the counters of `guest`, whose vCPUs are paused.
    fn start(guest: &Guest, report: &mut Report) -> Self {
        let counters = match Counters::open(&guest.vm.fd, &guest.vcpus) {
            Ok(counters) => Some(counters),
            Err(error) => {
                let note = error.to_string();
                if !report.notes.contains(&note) {
                    report.notes.push(note);
                }
                None
            }
        };
        let before = counters.as_ref().and_then(|c| c.read().ok()).unwrap_or_default();
        Self { counters, before }
    }

    /// The counters now.
    fn now(&self) -> Snapshot {
        self.counters.as_ref().and_then(|c| c.read().ok()).unwrap_or_default()
    }

    /// Puts both readings into the result; of one machine of several, under its own label.
    fn finish(self, report: &mut Report, now: Snapshot, label: Option<&str>) {
        let labelled = |snapshot: Snapshot| match label {
            None => snapshot,
            Some(label) => {
                snapshot.into_iter().map(|(name, value)| (format!("{name}[{label}]"), value)).collect()
            }
        };
        report.counters(&labelled(self.before), &labelled(now));
    }

    /// By how much a counter has grown; `None` where this kernel does not have it.
    fn grown(&self, now: &Snapshot, name: &str) -> Option<u64> {
        Some(now.get(name)?.saturating_sub(*self.before.get(name)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(of(31).is_some_and(|why| why.contains("idle for 3.1 %")));
        // A real host's idle time is in nobody's figures.
        let host = Facts { emulated: false, ..Facts::collect(String::new()) };
        assert!(Idling::watch(&host).is_none());
    }
}
