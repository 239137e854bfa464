//! Benchmarks: one file each, and each is a workload, a schedule and its figures.
//!
//! What a benchmark measures is said at the head of its file. Here is only what they share: how they fail, and the
//! premises without which a figure means nothing. The command line is `cli/bench/`.

pub mod context_switch;
pub mod rmap_fork;

use crate::host::Paging;
use crate::report::Report;
use crate::vm::counters::{Counters, Snapshot};
use crate::workload::guest::{self, Guest};
use crate::{sys, vm, workload};

/// Why a benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was asked for contradicts itself, or this host lacks it.
    #[error("{0}")]
    Asked(String),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] workload::run::Error),
    /// The host.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] std::io::Error),
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
            Self::Host(..) => false,
        }
    }
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
    fn finish(self, report: &mut Report, now: Snapshot, label: Option<u64>) {
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

/// Gives the VM as many shadow pages as it needs.
fn set_mmu_pages(guest: &Guest, pages: u64) -> Result<(), Error> {
    sys::kvm::set_mmu_pages(&guest.vm.fd, pages).map_err(|e| Error::Host("KVM_SET_NR_MMU_PAGES", e))
}
