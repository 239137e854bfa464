//! `rmap-fork`: N page tables over the same frames, as N children of `fork` have them.
//!
//! Where KVM shadows guest tables, each frame's reverse map then holds N entries, and adding to, walking and removing
//! from such chains is what the figures are made of. A round has four phases, timed by the guest itself: *build* (the
//! guest writes its tables), *touch* (it loads each table and writes to every frame through it: N x pages entries are
//! added), *clear* (it empties each table's last level and flushes: as many are removed; the order decides where in
//! their chains they are found) and *free* (the tables' pages are zeroed). Each round has a machine of its own: tables
//! on pages that were tables before cost KVM more.
//!
//! Asked for chain lengths instead, it lets the chains of one machine grow to each length in turn, and times one
//! table only: the one whose entries are the last of such chains, and one whose entries leave them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

pub use super::shadow::Tables;
use super::shadow::premises;
use super::{Common, Counted, Error};
use crate::guests::Guest;
use crate::guests::program::GuestPage;
use crate::guests::tables::{self, Command, Visit};
use crate::report::Report;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// What is asked for.
    pub what: What,
    /// KVM's budget of shadow pages; `None` for enough.
    pub mmu_pages: Option<u64>,
    /// Frames that each table maps.
    pub pages: u64,
}

/// The two forms of the benchmark.
#[derive(Clone, Debug)]
pub enum What {
    /// Numbers of tables, and the orders in which they are dropped.
    Tables(Vec<u64>, Vec<DropOrder>),
    /// Lengths of chains, ascending.
    Lengths(Vec<u64>),
}

/// The order in which tables are dropped, by when they were touched; of one table, its place in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropOrder {
    /// As they were touched.
    Oldest,
    /// The other way round.
    Newest,
    /// From all over.
    Any,
}

impl DropOrder {
    /// The names as typed.
    pub const NAMES: [(&str, Self); 3] =
        [("oldest", Self::Oldest), ("newest", Self::Newest), ("any", Self::Any)];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, drop)| *drop == self).map_or("", |(name, _)| name)
    }

    fn visit(self, count: u64) -> Visit {
        match self {
            Self::Oldest => Visit::all(count),
            Self::Newest => Visit::backwards(count),
            Self::Any => Visit::scattered(count),
        }
    }
}

/// Where in a chain an entry is that leaves it, in the order in which it is tried: the newest leaves no gap.
const PLACES: [&str; 3] = ["newest", "oldest", "middle"];

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("rmap-fork");
    let counts = match &config.what {
        What::Tables(counts, _) => counts.clone(),
        // Each is used once.
        What::Lengths(lengths) => {
            let timed = lengths.len() * PLACES.len();
            vec![lengths.last().copied().unwrap_or(1) + timed as u64]
        }
    };
    let tables = Tables { counts, mmu_pages: config.mmu_pages };
    tables.ask(&mut report);
    match &config.what {
        What::Tables(_, drops) => {
            report.ask("drop", drops.iter().map(|drop| drop.name()).collect::<Vec<_>>())
        }
        What::Lengths(lengths) => report.ask("lengths", lengths.clone()),
    }
    report.ask("pages", config.pages);
    config.common.ask(&mut report);
    match &config.what {
        What::Tables(_, drops) => config.common.each(&mut report, tables.parts(), |report, part| {
            whole(report, config, &tables, part.0, drops)
        })?,
        What::Lengths(lengths) => chains(&mut report, config, &tables, lengths)?,
    }
    Ok(report)
}

/// One number of tables: built, touched, dropped in each order.
fn whole(
    report: &mut Report,
    config: &Config,
    tables: &Tables,
    count: u64,
    drops: &[DropOrder],
) -> Result<(), Error> {
    let (mut build, mut touch, mut free) = (Vec::new(), Vec::new(), Vec::new());
    let mut clear = vec![Vec::new(); drops.len()];
    let mut total = clear.clone();
    // A fault may map the seven neighbours too (PTE_PREFETCH_NUM, arch/x86/kvm/mmu/mmu.c).
    let mapped = count * config.pages.div_ceil(8);
    for (index, drop) in drops.iter().enumerate() {
        for round in 0..config.common.repeat {
            let guest = tables.guest(&config.common, count, GuestPage::Large)?;
            tables::program(&guest, count, config.pages);
            let counted = Counted::start(&guest, report);
            let built = tables::perform(&guest, Command::Build)?;
            let touched = tables::perform(&guest, Command::Touch)?;
            check(report, &guest, config.pages, count, round);
            tables::visit(&guest, drop.visit(count));
            let cleared = tables::perform(&guest, Command::Clear)?;
            let freed = tables::perform(&guest, Command::Free)?;
            let phases = [built, touched, cleared, freed];
            for (samples, phase) in
                [&mut build, &mut touch, &mut clear[index], &mut free].into_iter().zip(phases)
            {
                samples.push(phase);
            }
            total[index].push(phases.iter().sum::<f64>());
            let now = counted.now();
            if index == 0 && round == 0 {
                // One machine's counters stand for all.
                tables.finish(report, counted, now, count, mapped);
            } else {
                premises(report, &counted, &now, mapped, &format!("{count} tables"));
            }
        }
    }
    let of_order = |name: &str, samples: Vec<Vec<f64>>| -> Vec<(String, Vec<f64>)> {
        drops.iter().map(|drop| format!("{name}_{}", drop.name())).zip(samples).collect()
    };
    let mut phases = vec![("build".to_owned(), build), ("touch".to_owned(), touch)];
    phases.extend(of_order("clear", clear));
    phases.push(("free".to_owned(), free));
    phases.extend(of_order("total", total));
    for (name, samples) in &phases {
        report.spread(format!("{name}[{count}]"), "s", samples);
    }
    for (name, samples) in phases.iter().filter(|(name, _)| name == "touch" || name.starts_with("clear")) {
        let each: Vec<f64> = samples.iter().map(|t| t * 1e9 / (count * config.pages) as f64).collect();
        report.spread(format!("{name}_per_page[{count}]"), "ns", &each);
    }
    Ok(())
}

/// Chains that grow from length to length.
fn chains(report: &mut Report, config: &Config, tables: &Tables, lengths: &[u64]) -> Result<(), Error> {
    let count = tables.counts[0];
    let mut add = vec![Vec::new(); lengths.len()];
    let mut remove = PLACES.map(|_| add.clone());
    config.common.each(report, config.common.rounds(), |report, round| {
        let guest = tables.guest(&config.common, count, GuestPage::Large)?;
        tables::program(&guest, count, config.pages);
        let counted = Counted::start(&guest, report);
        let on = |visit, command| {
            tables::visit(&guest, visit);
            tables::perform(&guest, command).map(|seconds| seconds * 1e9 / config.pages as f64)
        };
        on(Visit::all(count), Command::Build)?;
        // The tables whose entries the chains hold, oldest first; those from `fresh` on were never touched.
        let mut chain = VecDeque::new();
        let mut fresh = 0;
        for (index, &length) in lengths.iter().enumerate() {
            let grow = length - 1 - chain.len() as u64;
            if grow > 0 {
                on(Visit::some(fresh, grow), Command::Touch)?;
                chain.extend(fresh..fresh + grow);
                fresh += grow;
            }
            for (place, samples) in PLACES.iter().zip(&mut remove) {
                let cost = on(Visit::some(fresh, 1), Command::Touch)?;
                chain.push_back(fresh);
                fresh += 1;
                let at = match *place {
                    "newest" => {
                        // The others may fill a gap that a removal left.
                        add[index].push(cost);
                        chain.len() - 1
                    }
                    "oldest" => 0,
                    _ => chain.len() / 2,
                };
                let leaves = chain.remove(at).unwrap_or_default();
                samples[index].push(on(Visit::some(leaves, 1), Command::Clear)?);
            }
        }
        let now = counted.now();
        let mapped = fresh * config.pages.div_ceil(8);
        if round.index == 0 {
            tables.finish(report, counted, now, count, mapped);
        } else {
            premises(report, &counted, &now, mapped, &format!("{count} tables"));
        }
        Ok(())
    })?;
    for (index, length) in lengths.iter().enumerate() {
        report.spread(format!("add[{length}]"), "ns", &add[index]);
        for (place, samples) in PLACES.iter().zip(&remove) {
            report.spread(format!("remove_{place}[{length}]"), "ns", &samples[index]);
        }
    }
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
