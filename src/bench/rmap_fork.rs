//! `rmap-fork`: N page tables over the same frames, as N children of `fork` have them.
//!
//! Where KVM shadows guest tables, each frame's reverse map then holds N entries, and adding to, walking and removing
//! from such chains is what the figures are made of. A round has four phases, timed by the guest itself: *build* (the
//! guest writes its tables), *touch* (it loads each table and writes to every frame through it: N x pages entries are
//! added), *clear* (it empties each table's last level and flushes: as many are removed) and *free* (the tables' pages
//! are zeroed).

use std::sync::atomic::Ordering;

pub use super::shadow::Tables;
use super::{Common, Counted, Error};
use crate::arch::workload::GuestPage;
use crate::report::Report;
use crate::workload::Guest;
use crate::workload::tables::{self, Command};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// The tables.
    pub tables: Tables,
    /// Frames that each table maps.
    pub pages: u64,
}

/// The phases in their order.
const PHASES: [(&str, Command); 4] = [
    ("build", Command::Build),
    ("touch", Command::Touch),
    ("clear", Command::Clear),
    ("free", Command::Free),
];

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("rmap-fork");
    config.tables.ask(&mut report);
    report.ask("pages", config.pages);
    report.ask("drop_order", "oldest first");
    config.common.ask(&mut report);
    config.common.each(&mut report, config.tables.parts(), |report, part| one(report, config, part.0))?;
    Ok(report)
}

/// One number of tables in a machine of its own.
fn one(report: &mut Report, config: &Config, count: u64) -> Result<(), Error> {
    let guest = config.tables.guest(&config.common, count, GuestPage::Large)?;
    tables::program(&guest, count, config.pages);
    let counted = Counted::start(&guest, report);
    let mut times = vec![Vec::new(); PHASES.len()];
    for round in 0..config.common.repeat {
        for ((_, command), times) in PHASES.iter().zip(&mut times) {
            times.push(tables::perform(&guest, *command)?);
            if *command == Command::Touch {
                check(report, &guest, config.pages, count, round);
            }
        }
    }
    let now = counted.now();
    for ((name, _), times) in PHASES.iter().zip(&times) {
        report.spread(format!("{name}[{count}]"), "s", times);
    }
    let totals: Vec<f64> =
        (0..times[0].len()).map(|round| times.iter().map(|phase| phase[round]).sum()).collect();
    report.spread(format!("total[{count}]"), "s", &totals);
    let each = |phase: usize| -> Vec<f64> {
        times[phase].iter().map(|t| t * 1e9 / (count * config.pages) as f64).collect()
    };
    report.spread(format!("touch_per_page[{count}]"), "ns", &each(1));
    report.spread(format!("clear_per_page[{count}]"), "ns", &each(2));
    // A fault may map the seven neighbours too (PTE_PREFETCH_NUM, arch/x86/kvm/mmu/mmu.c).
    let mapped = u64::from(config.common.repeat) * count * config.pages.div_ceil(8);
    config.tables.finish(report, counted, now, count, mapped);
    Ok(())
}

/// Every frame must hold what the last table wrote to it: then all tables led to the same frames.
fn check(report: &mut Report, guest: &Guest, pages: u64, count: u64, round: u32) {
    let words = guest.vm.memory.mapping.words();
    let wrong = (0..pages as usize).filter(|page| words[page * 512].load(Ordering::Relaxed) != 1).count();
    if wrong > 0 {
        report.invalid.push(format!(
            "{count} tables, round {round}: {wrong} of {pages} frames were not written through the last one"
        ));
    }
}
