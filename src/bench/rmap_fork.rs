//! `rmap-fork`: N page tables over the same frames, as N children of `fork` have them.
//!
//! Where KVM shadows guest tables, each frame's reverse map then holds N entries, and adding to, walking and removing
//! from such chains is what the figures are made of. A round has four phases, timed by the guest itself: *build* (the
//! guest writes its tables), *touch* (it loads each table and writes to every frame through it: N x pages entries are
//! added), *clear* (it empties each table's last level and flushes: as many are removed) and *free* (the tables' pages
//! are zeroed).

use std::sync::atomic::Ordering;

use super::{Common, Counted, Error, set_mmu_pages, shadow_premises};
use crate::arch::tables as code;
use crate::arch::workload::{GuestPage, Privilege};
use crate::report::Report;
use crate::vm;
use crate::vm::memory::{Memory, MemoryConfig};
use crate::workload::Guest;
use crate::workload::guest::GuestConfig;
use crate::workload::tables::{self, Command};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// Numbers of tables, a machine each.
    pub tables: Vec<u64>,
    /// Frames that each table maps.
    pub pages: u64,
    /// KVM's budget of shadow pages; `None` for enough.
    pub mmu_pages: Option<u64>,
    /// Rounds.
    pub repeat: u32,
    /// The CPU to stay on.
    pub pin: Option<usize>,
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
    report.ask("tables", config.tables.clone());
    report.ask("pages", config.pages);
    report.ask("repeat", config.repeat);
    report.ask("pin", config.pin.map_or("off".into(), |cpu| serde_json::json!(cpu)));
    let budget = |count| config.mmu_pages.unwrap_or_else(|| tables::shadow_pages(count));
    report.ask("mmu_pages", config.tables.iter().map(|&count| budget(count)).collect::<Vec<_>>());
    report.ask("drop_order", "oldest first");
    for &count in &config.tables {
        one(&mut report, config, count, budget(count))?;
    }
    Ok(report)
}

/// One number of tables in a machine of its own.
fn one(report: &mut Report, config: &Config, count: u64, budget: u64) -> Result<(), Error> {
    let kvm = vm::open()?;
    let memory = Memory::map(MemoryConfig { prealloc: true, ..MemoryConfig::new(tables::ram(count)) })?;
    // So that no first touch of the host's own memory is among the figures.
    memory.populate(|_| {})?;
    let guest = Guest::build(
        &kvm,
        memory,
        GuestConfig {
            code: code::code(),
            privilege: Privilege::Kernel,
            page: GuestPage::Large,
            pins: config.pin.map(|cpu| vec![cpu]),
            enter: config.common.enter(),
            ..GuestConfig::new(1)
        },
    )?;
    set_mmu_pages(&guest, budget)?;
    tables::program(&guest, count, config.pages);
    let counted = Counted::start(&guest, report);
    let mut times = vec![Vec::new(); PHASES.len()];
    for round in 0..config.repeat {
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
    let mapped = u64::from(config.repeat) * count * config.pages.div_ceil(8);
    shadow_premises(report, &counted, &now, mapped, &format!("{count} tables"));
    let label = count.to_string();
    counted.finish(report, now, (config.tables.len() > 1).then_some(label.as_str()));
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
