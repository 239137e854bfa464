//! `rmap-fork`: N page tables that map the same frames, like those of N children of `fork`.
//!
//! If KVM shadows guest page tables, each frame's reverse map has N entries. The figures measure
//! adding to, walking and removing from such chains. A round has four phases, timed by the guest:
//! - *build*: the guest writes its tables.
//! - *touch*: it loads each table and writes to every frame through it. This adds N x pages
//!   entries.
//! - *clear*: it clears each table's last level and flushes. This removes as many entries. The
//!   order decides where in their chains they are.
//! - *free*: it zeroes the pages of the tables.
//!
//! Each round has its own machine, because pages that were tables before cost KVM more.
//!
//! With chain lengths instead, the chains of one machine grow to each length in turn. Only one
//! table is timed: one whose entries are added to such chains, and one whose entries are removed.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::atomic::Ordering;

pub use super::shadow::Tables;
use super::{Common, Counted, Error, Round, of_rounds};
use vellum_guests::Guest;
use vellum_guests::program::GuestPage;
use vellum_guests::tables::{self, Command, Visit};
use vellum_kvm::vm::cr3_cache;
use vellum_report::{Label, Premise, Report, Sample};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The form of the benchmark.
    pub what: Step,
    /// The number of frames that each table maps.
    pub pages: u64,
}

/// The two forms of the benchmark.
#[derive(Clone, Debug)]
pub enum Step {
    /// Numbers of tables, and the orders of removal.
    Tables(Vec<u64>, Vec<DropOrder>),
    /// Chain lengths, ascending.
    Lengths(Vec<u64>),
}

/// The order in which tables are removed, relative to when they were touched. For one table: its
/// place in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropOrder {
    /// Oldest first.
    Oldest,
    /// Newest first.
    Newest,
    /// From all over.
    Any,
}

impl DropOrder {
    /// The names on the command line.
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

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("rmap-fork");
    match &config.what {
        Step::Tables(counts, drops) => {
            let tables = Tables { counts: counts.clone() };
            tables.ask(&mut report);
            report.ask("drop", drops.iter().map(|drop| drop.name()).collect::<Vec<_>>());
            report.ask("pages", config.pages);
            config.common.ask(&mut report);
            let rounds = whole(&mut report, config, &tables, drops)?;
            counts.iter().for_each(|&count| add_whole(&mut report, config, drops, count, &rounds));
            if let (Some(count), Some(drop)) = (counts.last(), drops.first()) {
                report.set_headline(Label::of(format!("total_{}", drop.name()), count));
            }
        }
        Step::Lengths(lengths) => {
            // Each table is used once.
            let timed = lengths.len() as u64 * 3;
            let tables = Tables { counts: vec![lengths.last().copied().unwrap_or(1) + timed] };
            tables.ask(&mut report);
            report.ask("lengths", lengths.clone());
            report.ask("pages", config.pages);
            config.common.ask(&mut report);
            let rounds = chains(&mut report, config, &tables, lengths)?;
            for (index, length) in lengths.iter().enumerate() {
                let mut put = |name, of: fn(&Chain) -> f64| {
                    let samples = of_rounds(&rounds, |chains| chains.get(index).map(of));
                    report.samples(Label::of(name, length), "ns", samples);
                };
                put("add", |chain| chain.add);
                put("remove_newest", |chain| chain.remove_newest);
                put("remove_oldest", |chain| chain.remove_oldest);
                put("remove_middle", |chain| chain.remove_middle);
                report.set_headline(Label::of("add", length));
            }
        }
    }
    report.answer_with_headline("Mapping pages in many tables takes");
    Ok(report)
}

/// One machine of the first form: a number of tables and an order of removal.
#[derive(Clone, Copy)]
struct Part {
    tables: u64,
    drop: DropOrder,
    round: Round,
}

impl Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tables, {} dropped first, {}", self.tables, self.drop.name(), self.round)
    }
}

/// The durations of the phases in seconds.
struct Phases {
    build: f64,
    touch: f64,
    clear: f64,
    free: f64,
}

impl Phases {
    fn total(&self) -> f64 {
        self.build + self.touch + self.clear + self.free
    }
}

/// For each number of tables and each order: build, touch, clear, free.
fn whole(
    report: &mut Report,
    config: &Config,
    tables: &Tables,
    drops: &[DropOrder],
) -> Result<Vec<(Part, Phases)>, Error> {
    let mut parts = Vec::new();
    for &tables in &tables.counts {
        for &drop in drops {
            parts.extend(config.common.rounds().into_iter().map(|round| Part { tables, drop, round }));
        }
    }
    let mut rounds = Vec::new();
    config.common.each(report, &parts, |report, &part| {
        let count = part.tables;
        let guest = tables.guest(&config.common, count, GuestPage::Large, cr3_cache::Choice::Off)?;
        tables::program(&guest, count, config.pages);
        let counted = Counted::start(&guest, report);
        let build = tables::perform(&guest, Command::Build)?;
        let touch = tables::perform(&guest, Command::Touch)?;
        check(report, &guest, config.pages, &part);
        tables::visit(&guest, part.drop.visit(count));
        let clear = tables::perform(&guest, Command::Clear)?;
        let free = tables::perform(&guest, Command::Free)?;
        // A fault may also map the seven neighbours (PTE_PREFETCH_NUM, arch/x86/kvm/mmu/mmu.c).
        let mapped = count * config.pages.div_ceil(8);
        let first = part.drop == drops[0] && part.round.is_first();
        let now = counted.now();
        tables.finish(report, counted, &now, &count.to_string(), mapped, first);
        rounds.push((part, Phases { build, touch, clear, free }));
        Ok(())
    })?;
    Ok(rounds)
}

/// Adds the figures for one number of tables. Phases before the removal have a sample of every
/// machine, whatever its order.
fn add_whole(
    report: &mut Report,
    config: &Config,
    drops: &[DropOrder],
    count: u64,
    rounds: &[(Part, Phases)],
) {
    type Of = fn(&Phases) -> f64;
    let samples = |drop: Option<DropOrder>, of: Of| -> Vec<Sample> {
        let mine = rounds.iter().filter(|(part, _)| part.tables == count);
        let numbered = (0..).zip(mine).filter(|(_, (part, _))| drop.is_none_or(|drop| drop == part.drop));
        let sample = |(machine, (part, phases)): (u32, &(Part, Phases))| Sample {
            value: of(phases),
            machine,
            round: part.round.0,
            vcpu: None,
        };
        numbered.map(sample).collect()
    };
    let mut phases: Vec<(String, bool, Vec<Sample>)> = vec![
        ("build".into(), false, samples(None, |p| p.build)),
        ("touch".into(), true, samples(None, |p| p.touch)),
    ];
    let of_each = |name: &str, per_page: bool, of: Of| -> Vec<(String, bool, Vec<Sample>)> {
        let one = |drop: &DropOrder| (format!("{name}_{}", drop.name()), per_page, samples(Some(*drop), of));
        drops.iter().map(one).collect()
    };
    phases.extend(of_each("clear", true, |p| p.clear));
    phases.push(("free".into(), false, samples(None, |p| p.free)));
    phases.extend(of_each("total", false, Phases::total));
    for (name, _, samples) in &phases {
        report.samples(Label::of(name, count), "s", samples.clone());
    }
    for (name, _, samples) in phases.into_iter().filter(|(_, per_page, _)| *per_page) {
        let ns = |t: Sample| Sample { value: t.value * 1e9 / (count * config.pages) as f64, ..t };
        let each = samples.into_iter().map(ns).collect();
        report.samples(Label::of(format!("{name}_per_page"), count), "ns", each);
    }
}

/// The cost per entry of chains of one length, in nanoseconds. The newest entry is removed first,
/// because that leaves no gap, then the oldest, then the middle.
struct Chain {
    add: f64,
    remove_newest: f64,
    remove_oldest: f64,
    remove_middle: f64,
}

/// Measures chains that grow from length to length, in one round.
fn chains(
    report: &mut Report,
    config: &Config,
    tables: &Tables,
    lengths: &[u64],
) -> Result<Vec<Vec<Chain>>, Error> {
    let count = tables.counts[0];
    let mut rounds = Vec::new();
    config.common.each(report, &config.common.rounds(), |report, round| {
        let guest = tables.guest(&config.common, count, GuestPage::Large, cr3_cache::Choice::Off)?;
        tables::program(&guest, count, config.pages);
        let counted = Counted::start(&guest, report);
        let on = |visit, command| {
            tables::visit(&guest, visit);
            tables::perform(&guest, command).map(|seconds| seconds * 1e9 / config.pages as f64)
        };
        on(Visit::all(count), Command::Build)?;
        // The tables in the chains, oldest first. Those from `fresh` on were never touched.
        let mut chain = VecDeque::new();
        let mut fresh = 0;
        let mut measured = Vec::new();
        for &length in lengths {
            let grow = length - 1 - chain.len() as u64;
            if grow > 0 {
                on(Visit::some(fresh, grow), Command::Touch)?;
                chain.extend(fresh..fresh + grow);
                fresh += grow;
            }
            // Adds one entry and removes the one at `place` of the chain.
            let mut both = |place: fn(usize) -> usize| -> Result<(f64, f64), Error> {
                let added = on(Visit::some(fresh, 1), Command::Touch)?;
                chain.push_back(fresh);
                fresh += 1;
                let leaves = chain.remove(place(chain.len())).unwrap_or_default();
                Ok((added, on(Visit::some(leaves, 1), Command::Clear)?))
            };
            // Later additions may fill a gap left by a removal, so only the first measures adding.
            let (add, remove_newest) = both(|length| length - 1)?;
            let (_, remove_oldest) = both(|_| 0)?;
            let (_, remove_middle) = both(|length| length / 2)?;
            measured.push(Chain { add, remove_newest, remove_oldest, remove_middle });
        }
        rounds.push(measured);
        let now = counted.now();
        let mapped = fresh * config.pages.div_ceil(8);
        tables.finish(report, counted, &now, &count.to_string(), mapped, round.is_first());
        Ok(())
    })?;
    Ok(rounds)
}

/// Checks that every frame holds what the last table wrote to it, so all tables map the same
/// frames.
fn check(report: &mut Report, guest: &Guest, pages: u64, part: &Part) {
    let words = guest.vm.memory.mapping.words();
    let wrong =
        (0..pages as usize).filter(|page| words[page * 512].load(Ordering::Relaxed) != 1).count() as u64;
    if wrong > 0 {
        let example = Some("the last table maps other frames".to_owned());
        report.fail(Some(part.to_string()), Premise::WrongContents { wrong, of: pages, example });
    }
}
