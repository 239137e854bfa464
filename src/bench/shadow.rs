//! What the benchmarks of shadow paging share: N guest page tables at CPL 0, KVM's budget of shadow pages for them, and
//! the premises without which their figures mean nothing.

use std::fmt::Display;

use super::{Common, Counted, Error, populated};
use crate::guests::Guest;
use crate::guests::guest::GuestConfig;
use crate::guests::program::tables as code;
use crate::guests::program::{GuestPage, Privilege};
use crate::guests::tables;
use crate::host::Paging;
use crate::memory::MemoryConfig;
use crate::report::Report;
use crate::vm::counters::Snapshot;
use crate::{sys, vm};

/// Page tables of a guest.
#[derive(Clone, Debug)]
pub struct Tables {
    /// How many, a machine each.
    pub counts: Vec<u64>,
    /// KVM's budget of shadow pages; `None` for enough.
    pub mmu_pages: Option<u64>,
}

/// So many tables: a part of the measurement.
pub(super) struct Count(pub(super) u64);

impl Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tables", self.0)
    }
}

impl Tables {
    /// One after the other, for [`Common::each`].
    pub(super) fn parts(&self) -> impl Iterator<Item = Count> {
        self.counts.iter().copied().map(Count)
    }

    /// The part of what was asked for that concerns them.
    pub(super) fn ask(&self, report: &mut Report) {
        report.ask("tables", self.counts.clone());
        report.ask("mmu_pages", self.counts.iter().map(|&count| self.budget(count)).collect::<Vec<_>>());
    }

    fn budget(&self, count: u64) -> u64 {
        self.mmu_pages.unwrap_or_else(|| tables::shadow_pages(count))
    }

    /// A machine of one vCPU with room for `count` tables; `page` is the page size of those that it starts with.
    pub(super) fn guest(&self, common: &Common, count: u64, page: GuestPage) -> Result<Guest, Error> {
        let kvm = vm::open()?;
        let memory = populated(MemoryConfig::new(tables::ram(count)))?;
        let config =
            GuestConfig { code: code::code(), privilege: Privilege::Kernel, page, ..common.guest(1) };
        let guest = Guest::build(&kvm, memory, config)?;
        sys::kvm::set_mmu_pages(&guest.vm.fd, self.budget(count))
            .map_err(|e| Error::Host("KVM_SET_NR_MMU_PAGES", e))?;
        Ok(guest)
    }

    /// Holds a finished measurement with `count` tables to its premises, and puts its counters into the result.
    pub(super) fn finish(
        &self,
        report: &mut Report,
        counted: Counted,
        now: Snapshot,
        count: u64,
        mapped: u64,
    ) {
        premises(report, &counted, &now, mapped, &format!("{count} tables"));
        let label = count.to_string();
        counted.finish(report, now, (self.counts.len() > 1).then_some(label.as_str()));
    }
}

/// The premises of what measures shadow paging: guest tables are shadowed, the guest's code is not emulated in
/// software (`mapped`: at least so many faults installed a mapping), and no shadow page was recycled meanwhile.
pub(super) fn premises(report: &mut Report, counted: &Counted, now: &Snapshot, mapped: u64, what: &str) {
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
        Some(n) => fail(format!("{what}: KVM recycled {n} shadow pages: let it use more")),
        None => {
            fail(format!("{what}: without the counter mmu_recycled nothing shows that no page was recycled"))
        }
    }
}
