//! `context-switch`: CR3 loaded from among K page tables in turn, as a scheduler does it.
//!
//! Where KVM shadows guest tables, each load leaves the guest or, with the CR3-target list, does not. The loop that
//! does everything but the load is timed too and taken off. The exits are KVM's own count.

pub use super::shadow::Tables;
use super::{Common, Counted, Error};
use crate::guests::program::GuestPage;
use crate::guests::tables::{self, Command};
use crate::report::Report;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// The tables to switch among.
    pub tables: Tables,
    /// Loads in a round.
    pub switches: u64,
    /// Pages read after each load: the working set that a switch has to find again.
    pub reads: u64,
}

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("context-switch");
    config.tables.ask(&mut report);
    report.ask("switches", config.switches);
    report.ask("reads", config.reads);
    config.common.ask(&mut report);
    config.common.each(&mut report, config.tables.parts(), |report, part| one(report, config, part.0))?;
    Ok(report)
}

fn one(report: &mut Report, config: &Config, count: u64) -> Result<(), Error> {
    let guest = config.tables.guest(&config.common, count, GuestPage::Large)?;
    let pages = config.reads.max(1);
    tables::program(&guest, count, pages);
    tables::set_switches(&guest, config.switches, config.reads);
    let counted = Counted::start(&guest, report);
    for command in [Command::Build, Command::Touch] {
        tables::perform(&guest, command)?;
    }
    let warm = counted.now();
    let (mut switches, mut loops) = (Vec::new(), Vec::new());
    for _ in 0..config.common.repeat {
        switches.push(tables::perform(&guest, Command::Switch)?);
    }
    let now = counted.now();
    for _ in 0..config.common.repeat {
        loops.push(tables::perform(&guest, Command::Loop)?);
    }
    let each = |seconds: f64| seconds * 1e9 / config.switches as f64;
    let net: Vec<f64> = switches.iter().zip(&loops).map(|(s, l)| each(s - l)).collect();
    report.spread(format!("switch[{count}]"), "ns", &net);
    report.spread(format!("loop[{count}]"), "ns", &loops.iter().map(|l| each(*l)).collect::<Vec<_>>());
    let total = (config.switches * u64::from(config.common.repeat)) as f64;
    for (name, counter) in [("exits_per_switch", "exits"), ("faults_per_switch", "pf_taken")] {
        if let (Some(before), Some(after)) = (warm.get(counter), now.get(counter)) {
            report.figure(format!("{name}[{count}]"), "", after.saturating_sub(*before) as f64 / total);
        }
    }
    config.tables.finish(report, counted, now, count, count * pages.div_ceil(8));
    Ok(())
}
