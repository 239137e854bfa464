//! Shared by the benchmarks of shadow paging: N guest page tables at CPL 0, KVM's limit on shadow
//! pages, and the premises of their figures.

use std::fmt::Display;

use super::region::populated;
use super::{Common, Counted, Error, Round};
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::{GuestPage, Privilege, tables_code};
use vellum_guests::tables;
use vellum_host::Paging;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm;
use vellum_kvm::vm::counters::Snapshot;
use vellum_kvm::vm::cr3_cache;
use vellum_report::{Premise, Report};
use vellum_sys as sys;

/// The page tables of a guest.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The numbers of tables, with a machine for each.
    pub counts: Vec<u64>,
}

/// One round with a number of tables: a part of the measurement.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) tables: u64,
    pub(super) round: Round,
}

impl Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tables, {}", self.tables, self.round)
    }
}

impl Tables {
    /// All rounds of each number in turn, for [`Common::each`].
    pub(super) fn parts(&self, common: &Common) -> Vec<Part> {
        let rounds = common.rounds();
        let of = |&tables: &u64| rounds.iter().map(move |&round| Part { tables, round }).collect::<Vec<_>>();
        self.counts.iter().flat_map(of).collect()
    }

    /// Records their parameters.
    pub(super) fn ask(&self, report: &mut Report) {
        report.ask("tables", self.counts.clone());
        let budgets: Vec<u64> = self.counts.iter().map(|&count| tables::shadow_pages(count)).collect();
        report.ask("mmu_pages", budgets);
    }

    /// A machine with one vCPU and room for `count` tables. `page` is the page size of its initial
    /// tables. `cr3_cache` lets it load CR3 without an exit.
    pub(super) fn guest(
        &self,
        common: &Common,
        count: u64,
        page: GuestPage,
        cr3_cache: cr3_cache::Choice,
    ) -> Result<Guest, Error> {
        let kvm = vm::open()?;
        let cr3_cache = cr3_cache.decided(&kvm).map_err(vm::Error::from)?;
        let memory = populated(MemoryConfig::new(tables::ram(count)))?;
        let (code, privilege) = (tables_code(), Privilege::Kernel);
        let config = GuestConfig { code, privilege, page, cr3_cache, ..common.guest(1) };
        let guest = Guest::build(&kvm, memory, config)?;
        sys::kvm::set_mmu_pages(&guest.vm.fd, tables::shadow_pages(count))
            .map_err(|e| Error::Host("KVM_SET_NR_MMU_PAGES", e))?;
        Ok(guest)
    }

    /// Checks the premises of a finished round. Adds the counters of the `first` round of a kind to
    /// the result. `of` describes the kind: the number of tables and anything else.
    pub(super) fn finish(
        &self,
        report: &mut Report,
        counted: Counted,
        now: &Snapshot,
        of: &str,
        mapped: u64,
        first: bool,
    ) {
        let part = format!("{of} tables");
        if report.host.paging != Paging::Shadow {
            report.fail(None, not_shadowed(report.host.paging));
        }
        premises(&counted, now, mapped)
            .into_iter()
            .for_each(|premise| report.fail(Some(part.clone()), premise));
        if first {
            let several =
                self.counts.len() > 1 || self.counts.first().map(u64::to_string).as_deref() != Some(of);
            counted.finish(report, now, several.then_some(of));
        }
    }
}

fn not_shadowed(paging: Paging) -> Premise {
    let paging = match paging {
        Paging::Unknown => "an unknown kind of paging".to_owned(),
        other => format!("{other:?}").to_uppercase(),
    };
    Premise::NotShadowed { paging }
}

/// The other premises of shadow paging: the guest's code is not emulated in software (at least
/// `mapped` faults installed a mapping), and no shadow page was recycled.
fn premises(counted: &Counted, now: &Snapshot, mapped: u64) -> Vec<Premise> {
    let no_counter =
        |counter: &str, shows: &str| Premise::NoCounter { counter: counter.into(), shows: shows.into() };
    let fixed = match counted.grown(now, "pf_fixed") {
        Some(faults) if faults >= mapped => None,
        Some(faults) => Some(Premise::Interpreted { faults, least: mapped }),
        None => Some(no_counter("pf_fixed", "mappings were made")),
    };
    let recycled = match counted.grown(now, "mmu_recycled") {
        Some(0) => None,
        Some(pages) => Some(Premise::Recycled { pages }),
        None => Some(no_counter("mmu_recycled", "no page was recycled")),
    };
    fixed.into_iter().chain(recycled).collect()
}
