//! The merged result: sums, and lists of limited length. Its size does not depend on the number of
//! results.

use std::collections::{BTreeMap, BTreeSet};

use vellum_report::Status;
use vellum_report::compare::mean_interval;

/// The most entries of a list. The rest is only counted.
pub(super) const NAMED: usize = 200;

/// The most kinds of figures. Forged results could name any number.
pub(super) const KINDS: usize = 20_000;

/// The most means of figures over all hosts.
pub(super) const MEANS: usize = 1_000_000;

/// The most hosts, and the most versions of Vellum.
pub(super) const HOSTS: usize = 20_000;

/// The fewest hosts for an interval. The host is the unit of replication.
pub(crate) const FEW: usize = 5;

/// Lines of a limited list, and the total number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// The first lines.
    pub first: Vec<String>,
    /// The total number.
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

/// A lost page.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The host.
    pub node: String,
    /// Its kernel.
    pub kernel: String,
    /// The test.
    pub test: String,
    /// The seed.
    pub seed: u64,
    /// The attempt of the task.
    pub attempt: u64,
    /// The result's description.
    pub what: String,
    /// The command that runs that seed there again.
    pub again: String,
}

/// A test on a host and kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tried {
    /// The test.
    pub test: String,
    /// The host.
    pub node: String,
    /// Its kernel.
    pub kernel: String,
}

/// The configuration over which the oracle's events are summed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alike {
    /// The host's kernel.
    pub kernel: String,
    /// The tracker.
    pub tracker: String,
    /// The backing of guest memory.
    pub backing: String,
    /// The processor, marked if it is emulated.
    pub cpu: String,
}

/// The oracle's events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Events {
    /// The events checked.
    pub events: f64,
    /// The pages lost.
    pub lost: f64,
}

impl Events {
    /// If no page was lost: the upper bound of the loss rate per event at 95 % confidence (1 -
    /// 0.05^(1/n)).
    pub fn bound(&self) -> Option<f64> {
        (self.lost == 0.0 && self.events > 0.0).then(|| -(0.05f64.ln() / self.events).exp_m1())
    }
}

/// The sums of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// Its kernels. More than one if it was rebooted.
    pub kernels: BTreeSet<String>,
    /// Its processor.
    pub cpu: String,
    /// Tasks whose result counts.
    pub tasks: u64,
    /// The number of cases that passed, that failed (or crashed or timed out), and that were
    /// skipped.
    pub cases: [u64; 3],
    /// The pages lost.
    pub lost: f64,
    /// The events checked.
    pub events: f64,
}

/// The mean of a figure on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    /// The number of results.
    pub count: u64,
    /// The sum of their values.
    pub sum: f64,
}

/// A figure on a kernel and processor.
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

/// The merged result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// The plan's name.
    pub plan: String,
    /// The number of tasks.
    pub tasks: u64,
    /// The number of tasks with a result.
    pub ended: u64,
    /// Lost pages of any attempt.
    pub losses: Vec<Loss>,
    /// Their total number.
    pub all_losses: u64,
    /// For each test, host and kernel: the number of runs in complete attempts, and of those that
    /// lost pages.
    pub tried: BTreeMap<Tried, [u64; 2]>,
    /// Other cases that failed, crashed or timed out.
    pub failed: Lines,
    /// Reasons of skipped cases, and how often.
    pub skipped: BTreeMap<String, u64>,
    /// Tasks without any file, as ranges.
    pub missing: Vec<(u64, u64)>,
    /// Their number.
    pub all_missing: u64,
    /// Tasks that started but have no result.
    pub vanished: Lines,
    /// Tasks that the batch system started more than once.
    pub requeued: Lines,
    /// Tasks with more than one result. Only the last one counts.
    pub doubled: Lines,
    /// Files that are not results of this plan, and the reasons.
    pub refused: Lines,
    /// The number of results by version of Vellum.
    pub vellums: BTreeMap<String, u64>,
    /// The oracle's events.
    pub events: BTreeMap<Alike, Events>,
    /// Hosts by name.
    pub hosts: BTreeMap<String, Host>,
    /// Means of benchmark figures by host.
    pub figures: BTreeMap<Kind, BTreeMap<String, Mean>>,
    /// The number of means in `figures`.
    pub means: usize,
    /// Whether hosts or kinds of figures were left out.
    pub too_many: bool,
}

impl Merged {
    /// Passed if all results exist and all passed, failed if anything failed. Otherwise skipped:
    /// results are missing, or they tested nothing.
    pub fn status(&self) -> Status {
        let wrong = self.all_losses + self.failed.count + self.vanished.count + self.refused.count;
        match wrong > 0 || self.vellums.len() > 1 || self.too_many {
            true => Status::Fail,
            false if self.all_missing > 0 || !self.has_tested() => Status::Skip,
            false => Status::Pass,
        }
    }

    /// Whether any case of a counted result ran to its end. Otherwise nothing is known about lost
    /// pages.
    pub(crate) fn has_tested(&self) -> bool {
        self.hosts.values().any(|host| host.cases[0] > 0)
    }
}

/// The mean of a figure over hosts and half the width of its 95 % interval, with the host as the
/// unit of replication. `None` with fewer than [`FEW`] hosts.
pub fn interval(hosts: &BTreeMap<String, Mean>) -> Option<(f64, f64)> {
    let means: Vec<f64> = hosts.values().map(|mean| mean.sum / mean.count as f64).collect();
    (means.len() >= FEW).then(|| mean_interval(&means, 0.05))
}

/// The first `most` characters of a text.
pub fn short(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        false => text.into(),
        true => text.chars().take(most - 1).chain(['…']).collect(),
    }
}
