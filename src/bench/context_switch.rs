//! `context-switch`: a guest loads CR3 from K page tables in turn, as a scheduler does.
//!
//! If KVM shadows guest page tables, each load exits unless the CR3-target list prevents it. A loop
//! without the load is timed before and after, and its mean is subtracted. A disturbance longer
//! than a round is then in both. Exits are KVM's own count. Each round has its own machine.
//!
//! With the CR3 cache the guest registers a page with KVM, searches it for each table, and loads
//! the host CR3 that it finds. The search is part of the switch.

pub use super::shadow::Tables;
use std::io;

use clap::ValueEnum;

use super::{Common, Counted, Error, of_rounds};
use vellum_guests::program::GuestPage;
use vellum_guests::tables::{self, Command};
use vellum_kvm::vm::{self, cr3_cache::Choice};
use vellum_report::{Label, Premise, Report};

/// Whether the guest loads CR3 through the CR3 cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Cached {
    /// Without the cache.
    #[default]
    Off,
    /// With the cache.
    On,
    /// Alternate rounds without and with the cache.
    Both,
}

impl Cached {
    /// Whether the rounds of each kind use the cache.
    fn each(self) -> &'static [bool] {
        match self {
            Self::Off => &[false],
            Self::On => &[true],
            Self::Both => &[false, true],
        }
    }
}

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The page tables to switch between.
    pub tables: Tables,
    /// The number of loads in a round.
    pub switches: u64,
    /// The pages to read after each load: the working set that a switch has to map again.
    pub reads: u64,
    /// Whether the loads use the CR3 cache.
    pub cr3_cache: Cached,
}

/// The kind of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    tables: u64,
    cached: bool,
}

/// The results of one round.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// The duration of the loop with the loads, in seconds.
    switches: f64,
    /// The duration of the empty loop, the mean of before and after.
    empty: f64,
    /// The exits during the loop, if this kernel counts them.
    exits: Option<u64>,
    /// The page faults during the loop.
    faults: Option<u64>,
    /// With the CR3 cache: the number of loads that found their table in it.
    hits: Option<u64>,
}

impl Measured {
    /// Checks that the loads can be distinguished from the loop.
    fn premise(&self) -> Result<(), Premise> {
        match self.switches > self.empty {
            true => Ok(()),
            false => Err(Premise::NotResolved { with: self.switches, without: self.empty }),
        }
    }
}

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    if config.cr3_cache != Cached::Off {
        // Checked before the rounds without the cache.
        Choice::On.decided(&vm::open()?).map_err(vm::Error::from)?;
    }
    let mut report = config.common.report("context-switch");
    config.tables.ask(&mut report);
    report.ask("switches", config.switches);
    report.ask("reads", config.reads);
    if config.cr3_cache != Cached::Off {
        let both = config.cr3_cache == Cached::Both;
        report.ask("cr3_cache", if both { "both" } else { "on" });
    }
    config.common.ask(&mut report);
    let parts = config.tables.parts(&config.common);
    let mut rounds: Vec<(Kind, Vec<Measured>)> = Vec::new();
    config.common.each(&mut report, &parts, |report, part| {
        for &cached in config.cr3_cache.each() {
            let kind = Kind { tables: part.tables, cached };
            let measured = run_round(report, config, kind, part.round.is_first())?;
            if let Err(premise) = measured.premise() {
                report.fail(Some(part.to_string()), premise);
            }
            match rounds.iter_mut().find(|(other, _)| *other == kind) {
                Some((_, rounds)) => rounds.push(measured),
                None => rounds.push((kind, vec![measured])),
            }
        }
        Ok(())
    })?;
    for (Kind { tables: count, cached }, rounds) in &rounds {
        let each = |seconds: f64| seconds * 1e9 / config.switches as f64;
        let per_switch = |count: Option<u64>| Some(count? as f64 / config.switches as f64);
        // A single kind has the same names with and without the cache, so that results can be
        // compared.
        let prefix = if *cached && config.cr3_cache == Cached::Both { "cached_" } else { "" };
        let label = |name| Label::of(format!("{prefix}{name}"), count);
        report.samples(label("switch"), "ns", of_rounds(rounds, |r| Some(each(r.switches - r.empty))));
        report.samples(label("loop"), "ns", of_rounds(rounds, |r| Some(each(r.empty))));
        report.samples(label("exits_per_switch"), "", of_rounds(rounds, |r| per_switch(r.exits)));
        report.samples(label("faults_per_switch"), "", of_rounds(rounds, |r| per_switch(r.faults)));
        if *cached {
            report.samples(label("hits_per_switch"), "", of_rounds(rounds, |r| per_switch(r.hits)));
        }
        report.set_headline(label("switch"));
    }
    report.answer_with_headline("A switch of page tables takes");
    Ok(report)
}

fn run_round(report: &mut Report, config: &Config, kind: Kind, first: bool) -> Result<Measured, Error> {
    let Kind { tables: count, cached } = kind;
    let cr3_cache = if cached { Choice::On } else { Choice::Off };
    let guest = config.tables.guest(&config.common, count, GuestPage::Large, cr3_cache)?;
    let pages = config.reads.max(1);
    tables::program(&guest, count, pages);
    tables::set_switches(&guest, config.switches, config.reads);
    let counted = Counted::start(&guest, report);
    for command in [Command::Build, Command::Touch] {
        tables::perform(&guest, command)?;
    }
    if cached && let refused @ ..=0 = tables::register(&guest)? {
        let error = io::Error::from_raw_os_error(i32::try_from(-refused).unwrap_or(libc::EINVAL));
        return Err(Error::Host("registering the guest's CR3 cache page", error));
    }
    let before = tables::perform(&guest, Command::Loop)?;
    let warm = counted.now();
    let switches = tables::perform(&guest, if cached { Command::SwitchCached } else { Command::Switch })?;
    let now = counted.now();
    let after = tables::perform(&guest, Command::Loop)?;
    let grown = |name: &str| Some(now.get(name)?.saturating_sub(*warm.get(name)?));
    let measured = Measured {
        switches,
        empty: (before + after) / 2.0,
        exits: grown("exits"),
        faults: grown("pf_taken"),
        hits: cached.then(|| tables::hits(&guest)),
    };
    let now = counted.now();
    let of = if cached && config.cr3_cache == Cached::Both {
        format!("{count} cached")
    } else {
        count.to_string()
    };
    config.tables.finish(report, counted, &now, &of, count * pages.div_ceil(8), first);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_takes_as_long_as_the_switches_is_no_result() {
        let of = |switches, empty| Measured { switches, empty, exits: None, faults: None, hits: None };
        assert_eq!(of(2e-3, 1e-3).premise(), Ok(()));
        let premise = of(1e-3, 1.14e-3).premise().unwrap_err();
        assert!(premise.to_string().contains("1000.0 µs with the work, 1140.0 µs without"), "{premise}");
    }
}
