//! `context-switch`: CR3 loaded from among K page tables in turn, as a scheduler does it.
//!
//! Where KVM shadows guest tables, each load leaves the guest or, with the CR3-target list, does not. The loop that
//! does everything but the load is timed too, before the switches and after them, and its mean is taken off: what disturbs
//! the host for longer than a round is then in both. The exits are KVM's own count. Each round has a machine of its own.

pub use super::shadow::Tables;
use super::{Common, Counted, Error, of_rounds};
use crate::guests::program::GuestPage;
use crate::guests::tables::{self, Command};
use crate::report::{Label, Premise, Report};

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

/// What one round measured.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Seconds of the loop with the loads in it.
    switches: f64,
    /// Seconds of the one without, the mean of before and after.
    empty: f64,
    /// How often the guest left while it switched, where this kernel counts that.
    exits: Option<u64>,
    /// The same of page faults.
    faults: Option<u64>,
}

impl Measured {
    /// That the loads can be told from the loop around them.
    fn premise(&self) -> Result<(), Premise> {
        match self.switches > self.empty {
            true => Ok(()),
            false => Err(Premise::NotResolved { with: self.switches, without: self.empty }),
        }
    }
}

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("context-switch");
    config.tables.ask(&mut report);
    report.ask("switches", config.switches);
    report.ask("reads", config.reads);
    config.common.ask(&mut report);
    let parts = config.tables.parts(&config.common);
    let mut rounds: Vec<(u64, Vec<Measured>)> = Vec::new();
    config.common.each(&mut report, &parts, |report, part| {
        let measured = one(report, config, part.tables, part.round.is_first())?;
        if let Err(premise) = measured.premise() {
            report.fail(Some(part.to_string()), premise);
        }
        match rounds.iter_mut().find(|(count, _)| *count == part.tables) {
            Some((_, rounds)) => rounds.push(measured),
            None => rounds.push((part.tables, vec![measured])),
        }
        Ok(())
    })?;
    for (count, rounds) in &rounds {
        let each = |seconds: f64| seconds * 1e9 / config.switches as f64;
        let per_switch = |count: Option<u64>| Some(count? as f64 / config.switches as f64);
        let label = |name| Label::of(name, count);
        report.samples(label("switch"), "ns", of_rounds(rounds, |r| Some(each(r.switches - r.empty))));
        report.samples(label("loop"), "ns", of_rounds(rounds, |r| Some(each(r.empty))));
        report.samples(label("exits_per_switch"), "", of_rounds(rounds, |r| per_switch(r.exits)));
        report.samples(label("faults_per_switch"), "", of_rounds(rounds, |r| per_switch(r.faults)));
    }
    if let Some((count, _)) = rounds.last() {
        report.set_headline(Label::of("switch", count));
    }
    Ok(report)
}

fn one(report: &mut Report, config: &Config, count: u64, first: bool) -> Result<Measured, Error> {
    let guest = config.tables.guest(&config.common, count, GuestPage::Large)?;
    let pages = config.reads.max(1);
    tables::program(&guest, count, pages);
    tables::set_switches(&guest, config.switches, config.reads);
    let counted = Counted::start(&guest, report);
    for command in [Command::Build, Command::Touch] {
        tables::perform(&guest, command)?;
    }
    let before = tables::perform(&guest, Command::Loop)?;
    let warm = counted.now();
    let switches = tables::perform(&guest, Command::Switch)?;
    let now = counted.now();
    let after = tables::perform(&guest, Command::Loop)?;
    let grown = |name: &str| Some(now.get(name)?.saturating_sub(*warm.get(name)?));
    let measured = Measured {
        switches,
        empty: (before + after) / 2.0,
        exits: grown("exits"),
        faults: grown("pf_taken"),
    };
    let now = counted.now();
    config.tables.finish(report, counted, &now, count, count * pages.div_ceil(8), first);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_takes_as_long_as_the_switches_is_no_result() {
        let of = |switches, empty| Measured { switches, empty, exits: None, faults: None };
        assert_eq!(of(2e-3, 1e-3).premise(), Ok(()));
        let premise = of(1e-3, 1.14e-3).premise().unwrap_err();
        assert!(premise.to_string().contains("1000.0 µs with the work and 1140.0 µs without"), "{premise}");
    }
}
