//! `context-switch`: CR3 loaded from among K page tables in turn, as a scheduler does it.
//!
//! Where KVM shadows guest tables, each load leaves the guest or, with the CR3-target list, does not. The loop that
//! does everything but the load is timed too and taken off. The exits are KVM's own count.

use super::{Common, Counted, Error, set_mmu_pages, shadow_premises};
use crate::arch::tables as code;
use crate::arch::workload::Privilege;
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
    /// Numbers of tables to switch among, a machine each.
    pub tables: Vec<u64>,
    /// Loads in a round.
    pub switches: u64,
    /// Pages read after each load: the working set that a switch has to find again.
    pub reads: u64,
    /// KVM's budget of shadow pages; `None` for enough.
    pub mmu_pages: Option<u64>,
    /// Rounds.
    pub repeat: u32,
    /// The CPU to stay on.
    pub pin: Option<usize>,
}

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("context-switch");
    report.ask("tables", config.tables.clone());
    report.ask("switches", config.switches);
    report.ask("reads", config.reads);
    report.ask("repeat", config.repeat);
    report.ask("pin", config.pin.map_or("off".into(), |cpu| serde_json::json!(cpu)));
    let budget = |count| config.mmu_pages.unwrap_or_else(|| tables::shadow_pages(count));
    report.ask("mmu_pages", config.tables.iter().map(|&count| budget(count)).collect::<Vec<_>>());
    for &count in &config.tables {
        one(&mut report, config, count, budget(count))?;
    }
    Ok(report)
}

fn one(report: &mut Report, config: &Config, count: u64, budget: u64) -> Result<(), Error> {
    let kvm = vm::open()?;
    let memory = Memory::map(MemoryConfig { prealloc: true, ..MemoryConfig::new(tables::ram(count)) })?;
    memory.populate(|_| {})?;
    let guest = Guest::build(
        &kvm,
        memory,
        GuestConfig {
            code: code::code(),
            privilege: Privilege::Kernel,
            pins: config.pin.map(|cpu| vec![cpu]),
            enter: config.common.enter(),
            ..GuestConfig::new(1)
        },
    )?;
    set_mmu_pages(&guest, budget)?;
    let pages = config.reads.max(1);
    tables::program(&guest, count, pages);
    tables::set_switches(&guest, config.switches, config.reads);
    let counted = Counted::start(&guest, report);
    for command in [Command::Build, Command::Touch] {
        tables::perform(&guest, command)?;
    }
    let warm = counted.now();
    let (mut switches, mut loops) = (Vec::new(), Vec::new());
    for _ in 0..config.repeat {
        switches.push(tables::perform(&guest, Command::Switch)?);
    }
    let now = counted.now();
    for _ in 0..config.repeat {
        loops.push(tables::perform(&guest, Command::Loop)?);
    }
    let each = |seconds: f64| seconds * 1e9 / config.switches as f64;
    let net: Vec<f64> = switches.iter().zip(&loops).map(|(s, l)| each(s - l)).collect();
    report.spread(format!("switch[{count}]"), "ns", &net);
    report.spread(format!("loop[{count}]"), "ns", &loops.iter().map(|l| each(*l)).collect::<Vec<_>>());
    let total = (config.switches * u64::from(config.repeat)) as f64;
    for (name, counter) in [("exits_per_switch", "exits"), ("faults_per_switch", "pf_taken")] {
        if let (Some(before), Some(after)) = (warm.get(counter), now.get(counter)) {
            report.figure(format!("{name}[{count}]"), "", after.saturating_sub(*before) as f64 / total);
        }
    }
    shadow_premises(report, &counted, &now, count * pages.div_ceil(8), &format!("{count} tables"));
    let label = count.to_string();
    counted.finish(report, now, (config.tables.len() > 1).then_some(label.as_str()));
    Ok(())
}
