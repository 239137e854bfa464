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

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::host::{Facts, Paging, topology};
use crate::report::Report;
use crate::sandbox::{Mode, Sandbox, ThreadKind};
use crate::vm::counters::{Counters, Snapshot};
use crate::vm::memory::{Backing, short_size};
use crate::workload::control::Control;
use crate::workload::guest::{self, Guest};
use crate::{dirty, sys, vm, workload};

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was asked for contradicts itself, or this host lacks it.
    #[error("{0}")]
    Asked(String),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] workload::run::Error),
    /// The dirty log.
    #[error(transparent)]
    Dirty(#[from] dirty::Error),
    /// The host.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl From<guest::Error> for Error {
    fn from(error: guest::Error) -> Self {
        Self::Machine(error.into())
    }
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

impl From<vm::memory::Error> for Error {
    fn from(error: vm::memory::Error) -> Self {
        Self::Machine(error.into())
    }
}

impl Error {
    /// Whether other arguments would have helped.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Asked(_) => true,
            Self::Machine(error) => error.is_usage(),
            Self::Dirty(error) => error.is_usage(),
            Self::Host(..) => false,
        }
    }
}

/// What all benchmarks have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Common {
    /// Whether vCPU threads are confined. Each is on its own, since the main thread goes on to build machines.
    pub sandbox: Mode,
}

/// What a vCPU thread does last before its loop.
type Enter = Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync>;

impl Common {
    /// An empty result of `bench NAME` on this host.
    fn report(self, name: &str) -> Report {
        let mut report = Report::new(format!("bench {name}"), Facts::collect(self.sandbox.to_string()));
        if self.sandbox != Mode::Off {
            report.host.sandbox.push_str(" for vCPU threads");
        }
        report
    }

    fn enter(self) -> Enter {
        Arc::new(move |index| {
            let mut sandbox = Sandbox::new(self.sandbox);
            sandbox.process().map_err(io::Error::other)?;
            sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
        })
    }
}

/// Refuses what would exceed the host's memory, before anything is mapped. Huge pages have a check of their own.
fn check_memory(bytes: u64, backing: Backing) -> Result<(), Error> {
    let available = topology::memory().available;
    let from_pool = matches!(backing, Backing::Hugetlb(_) | Backing::SharedHugetlb(_));
    if !from_pool && available > 0 && bytes > available {
        return Err(Error::Asked(format!(
            "this needs {} of memory and {} is available: ask for fewer vCPUs (-v) or less for each (-b)",
            short_size(bytes.next_multiple_of(1 << 20)),
            short_size(available >> 20 << 20),
        )));
    }
    Ok(())
}

/// The seconds that a vCPU's pass took, by the guest's TSC; `of` counts from the start of its current run.
fn pass_seconds(control: &Control, hz: u64) -> f64 {
    let pass =
        control.pass.load(Ordering::Relaxed).saturating_sub(1) as usize % crate::workload::control::PASS_ENDS;
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

/// The premises of what measures shadow paging: guest tables are shadowed, the guest's code is not emulated in
/// software (`mapped`: at least so many faults installed a mapping), and no shadow page was recycled meanwhile.
fn shadow_premises(report: &mut Report, counted: &Counted, now: &Snapshot, mapped: u64, what: &str) {
    let mut fail = |reason: String| {
        if !report.invalid.contains(&reason) {
            report.invalid.push(reason);
        }
    };
    match report.host.paging {
        Paging::Shadow => {}
        Paging::Unknown => fail("whether this KVM shadows guest page tables is not known".into()),
        other => fail(format!(
            "this KVM maps guests by {other:?}, so their page tables are not shadowed: load kvm_intel with ept=0 or kvm_amd with npt=0"
        )),
    }
    match counted.grown(now, "pf_fixed") {
        Some(fixed) if fixed >= mapped => {}
        Some(fixed) => fail(format!(
            "{what}: {fixed} faults installed a mapping where at least {mapped} had to: this KVM emulates code at CPL 0 in software"
        )),
        None => fail(format!("{what}: without the counter pf_fixed nothing shows that mappings were made")),
    }
    match counted.grown(now, "mmu_recycled") {
        Some(0) => {}
        Some(n) => fail(format!("{what}: KVM recycled {n} shadow pages: raise --mmu-pages")),
        None => {
            fail(format!("{what}: without the counter mmu_recycled nothing shows that no page was recycled"))
        }
    }
}

/// The premise of a huge backing: KVM maps huge pages. Only kernels that count mappings by size can tell.
fn huge_premise(report: &mut Report, backing: Backing, now: &Snapshot) {
    let count = |name: &str| now.get(name).copied();
    let (Some(small), Some(large), Some(huge)) = (count("pages_4k"), count("pages_2m"), count("pages_1g"))
    else {
        return;
    };
    if backing.best_mapping() >= 2 << 20 && large + huge == 0 {
        report.invalid.push(format!("-s {backing}, but KVM mapped no huge page, only {small} of 4 KiB"));
    }
}

/// Gives the VM as many shadow pages as it needs.
fn set_mmu_pages(guest: &Guest, pages: u64) -> Result<(), Error> {
    sys::kvm::set_mmu_pages(&guest.vm.fd, pages).map_err(|e| Error::Host("KVM_SET_NR_MMU_PAGES", e))
}
