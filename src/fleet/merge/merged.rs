//! What a merge comes to: sums, and as many names as people read. All of it stays the same size however many results there are.

use std::collections::{BTreeMap, BTreeSet};

use vellum_report::Status;
use vellum_report::compare::mean_interval;

/// How many of a kind are named; the rest are counted.
pub(super) const NAMED: usize = 200;

/// The most kinds of figures that are kept: results that are no results could name any number.
pub(super) const KINDS: usize = 20_000;

/// The most means of a figure on a host.
pub(super) const MEANS: usize = 1_000_000;

/// The most hosts, and Vellums, that are told apart.
pub(super) const HOSTS: usize = 20_000;

/// Hosts below which a figure has no interval: the host is what is drawn, and few say little of others.
pub const FEW: usize = 5;

/// Lines, as many as are named, and how many there were.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// The first of them.
    pub first: Vec<String>,
    /// All.
    pub count: u64,
}

impl Lines {
    pub(super) fn add(&mut self, line: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < NAMED {
            self.first.push(line());
        }
    }
}

/// A page that a log lost.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The host.
    pub node: String,
    /// Its kernel.
    pub kernel: String,
    /// The test.
    pub test: String,
    /// The seed with which it happened.
    pub seed: u64,
    /// Which attempt of the task.
    pub attempt: u64,
    /// What the result says.
    pub what: String,
    /// The command that tries that seed there again.
    pub again: String,
}

/// What was tried where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tried {
    /// The test.
    pub test: String,
    /// The host.
    pub node: String,
    /// Its kernel.
    pub kernel: String,
}

/// What events of the oracle's are summed over: nothing else is alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alike {
    /// The host's kernel.
    pub kernel: String,
    /// The tracker.
    pub tracker: String,
    /// What backs guest memory.
    pub backing: String,
    /// The processor; marked where it is emulated.
    pub cpu: String,
}

/// Events, and what came of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Events {
    /// Checked.
    pub events: f64,
    /// Pages lost.
    pub lost: f64,
}

impl Events {
    /// Below which rate per event losses lie with 95 % confidence, where none was seen (1 - 0.05^(1/n)).
    pub fn bound(&self) -> Option<f64> {
        (self.lost == 0.0 && self.events > 0.0).then(|| -(0.05f64.ln() / self.events).exp_m1())
    }
}

/// A host's share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// Its kernels: more than one where it was booted anew meanwhile.
    pub kernels: BTreeSet<String>,
    /// Its processor.
    pub cpu: String,
    /// Tasks whose result counts.
    pub tasks: u64,
    /// Cases that passed, failed, crashed or were late, and were skipped.
    pub cases: [u64; 3],
    /// Pages lost.
    pub lost: f64,
    /// Events checked.
    pub events: f64,
}

/// The mean of a figure on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    /// Of so many results.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}

/// Which figure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// The test.
    pub test: String,
    /// The figure.
    pub figure: String,
    /// Its unit.
    pub unit: String,
    /// The kernel.
    pub kernel: String,
    /// The processor.
    pub cpu: String,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// The plan's name.
    pub plan: String,
    /// Its tasks.
    pub tasks: u64,
    /// Those with a result.
    pub ended: u64,
    /// Pages lost, of any attempt.
    pub losses: Vec<Loss>,
    /// How many there were.
    pub all_losses: u64,
    /// How many runs of a test there were on a host with a kernel, whole attempts all of them, and how many of them lost pages.
    pub tried: BTreeMap<Tried, [u64; 2]>,
    /// Cases that failed, crashed or were late, besides these.
    pub failed: Lines,
    /// Reasons for which something was skipped, and how often.
    pub skipped: BTreeMap<String, u64>,
    /// Tasks without any trace, as ranges.
    pub missing: Vec<(u64, u64)>,
    /// How many.
    pub all_missing: u64,
    /// Tasks that began and have no result.
    pub vanished: Lines,
    /// Tasks that a batch system began more than once.
    pub requeued: Lines,
    /// Tasks with more than one result, of which one counts.
    pub doubled: Lines,
    /// Files that are none of this plan's results, and why.
    pub refused: Lines,
    /// How many results are of which Vellum.
    pub vellums: BTreeMap<String, u64>,
    /// The oracle's events.
    pub events: BTreeMap<Alike, Events>,
    /// Hosts by name.
    pub hosts: BTreeMap<String, Host>,
    /// Figures of benchmarks, a mean a host.
    pub figures: BTreeMap<Kind, BTreeMap<String, Mean>>,
    /// How many means there are in `figures`.
    pub means: usize,
    /// Whether there were more hosts or kinds of figures than are kept.
    pub too_many: bool,
}

impl Merged {
    /// How it ended: passed where everything has come and all of it was well, failed where anything is wrong, and otherwise skipped:
    /// results are missing, or nothing in them was tested.
    pub fn status(&self) -> Status {
        let wrong = self.all_losses + self.failed.count + self.vanished.count + self.refused.count;
        match wrong > 0 || self.vellums.len() > 1 || self.too_many {
            true => Status::Fail,
            false if self.all_missing > 0 || !self.has_tested() => Status::Skip,
            false => Status::Pass,
        }
    }

    /// Whether any case of any result that counts was tested to its end. Without one nothing is known of lost pages.
    pub fn has_tested(&self) -> bool {
        self.hosts.values().any(|host| host.cases[0] > 0)
    }
}

/// The interval of a figure over hosts, with the host as the unit of replication: mean and half of the width at 95 %; `None` for few.
pub fn interval(hosts: &BTreeMap<String, Mean>) -> Option<(f64, f64)> {
    let means: Vec<f64> = hosts.values().map(|mean| mean.sum / mean.count as f64).collect();
    (means.len() >= FEW).then(|| mean_interval(&means, 0.05))
}

/// At most `most` characters of a text.
pub fn short(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        false => text.into(),
        true => text.chars().take(most - 1).chain(['…']).collect(),
    }
}
