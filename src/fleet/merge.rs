//! Many results as one: what was lost comes first, what is missing is named, and figures are summed only over what is alike.
//!
//! The same whenever it is done: for each task the last whole attempt counts, once, and a lost page of any attempt stands. It goes over the
//! tasks in the order of their numbers, a directory at a time, and keeps sums: memory grows with hosts and kinds of figures, and not
//! with tasks. Files are read as [`result`] reads them, which trusts none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::plan::{Plan, Task};
use super::result::{self, Header, SHARD};
use crate::report::compare::mean_interval;
use crate::report::{Report, Status, printable};

/// How many of a kind are named; the rest are counted.
const NAMED: usize = 200;

/// The most kinds of figures that are kept: results that are no results could name any number.
const KINDS: usize = 20_000;

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
    fn add(&mut self, line: impl FnOnce() -> String) {
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
    /// Whether there were more kinds of figures than are kept.
    pub too_many: bool,
}

impl Merged {
    /// Whether everything has come, and all of it was well.
    pub fn is_well(&self) -> bool {
        self.all_losses == 0
            && self.failed.count + self.vanished.count + self.refused.count + self.all_missing == 0
            && self.vellums.len() < 2
    }
}

/// The interval of a figure over hosts, with the host as the unit of replication: mean and half of the width at 95 %; `None` for few.
pub fn interval(hosts: &BTreeMap<String, Mean>) -> Option<(f64, f64)> {
    let means: Vec<f64> = hosts.values().map(|mean| mean.sum / mean.count as f64).collect();
    (means.len() >= FEW).then(|| mean_interval(&means, 0.05))
}

/// Merges what lies in `results`. `again` writes the command that tries a seed of a test on a host again.
pub fn merge(plan: &Plan, results: &Path, again: &dyn Fn(&str, u64, &str) -> String) -> Merged {
    let mut merged = Merged { plan: plan.name.clone(), tasks: plan.len(), ..Merged::default() };
    let shards = plan.len().div_ceil(SHARD);
    strangers(results, shards, &mut merged);
    for number in 0..shards {
        let dir = result::shard(results, number);
        let mut names = files(&dir, &mut merged);
        let range = number * SHARD..((number + 1) * SHARD).min(plan.len());
        for index in range.clone() {
            let of_task = names.remove(&index).unwrap_or_default();
            match plan.task(index) {
                Some(task) => one(plan, &task, &dir, &of_task, &mut merged, again),
                None => merged.refused.add(|| format!("task {index} is none of the plan's")),
            }
        }
        for (index, of_task) in names {
            merged.refused.add(|| {
                let name = of_task.first().map_or("", |(_, name, _)| name);
                format!(
                    "{}: task {index} is not one of {} to {}",
                    shown(&dir.join(name)),
                    range.start,
                    range.end - 1
                )
            });
        }
    }
    merged
}

/// What lies beside the directories of tasks.
fn strangers(results: &Path, shards: u64, merged: &mut Merged) {
    if is_link(results) {
        merged.refused.add(|| format!("{}: a symbolic link, which is not followed", shown(results)));
        return;
    }
    for entry in fs::read_dir(results).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let known = name.len() >= 5 && name.parse::<u64>().is_ok_and(|number| number < shards);
        if !known {
            merged.refused.add(|| format!("{}: no directory of this plan's tasks", shown(&entry.path())));
        }
    }
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink())
}

/// A file of a task: the attempt, its name, and whether it is a result.
type Named = (u64, String, bool);

/// The files of a directory by task; what has another name is refused.
fn files(dir: &Path, merged: &mut Merged) -> BTreeMap<u64, Vec<Named>> {
    let mut names: BTreeMap<u64, Vec<Named>> = BTreeMap::new();
    if is_link(dir) || dir.parent().is_some_and(is_link) {
        merged.refused.add(|| format!("{}: a symbolic link, which is not followed", shown(dir)));
        return names;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        match result::named(&name) {
            Some((index, attempt, ended)) => names.entry(index).or_default().push((attempt, name, ended)),
            // One that is being written.
            None if name.starts_with('.') => {}
            None => merged.refused.add(|| format!("{}: no name of a result", shown(&entry.path()))),
        }
    }
    names.values_mut().for_each(|of_task| of_task.sort());
    names
}

/// One task, from its files.
fn one(
    plan: &Plan,
    task: &Task,
    dir: &Path,
    names: &[Named],
    merged: &mut Merged,
    again: &dyn Fn(&str, u64, &str) -> String,
) {
    let mut whole: Vec<(Header, Vec<Report>)> = Vec::new();
    let mut begun = Vec::new();
    for (attempt, name, ended) in names {
        let path = dir.join(name);
        let read = result::read_file(&path);
        if !ended {
            begun.push((
                *attempt,
                read.map(|node| String::from_utf8_lossy(&node).chars().take(64).collect::<String>()),
            ));
            continue;
        }
        match read.and_then(|bytes| result::parse(&bytes)).and_then(|read| fits(plan, task, *attempt, read)) {
            Ok(read) => whole.push(read),
            Err(why) => merged.refused.add(|| format!("{}: {}", shown(&path), printable(&why))),
        }
    }
    let index = task.index;
    // A lost page stands, whatever came of the attempt otherwise; one that two copies of a result tell of is one.
    let mut told = BTreeSet::new();
    for (header, reports) in &whole {
        for (run, report) in header.runs.iter().zip(reports) {
            let lost = lost(report);
            if lost > 0.0 && told.insert((header.node.clone(), header.attempt, run.seed)) {
                merged.all_losses += 1;
                if merged.losses.len() < NAMED {
                    let note =
                        report.notes.iter().find(|note| note.contains("LOST")).or(report.notes.first());
                    merged.losses.push(Loss {
                        node: header.node.clone(),
                        kernel: report.host.kernel.clone(),
                        test: header.test.clone(),
                        seed: run.seed,
                        attempt: header.attempt,
                        what: note.map_or_else(
                            || format!("{lost} pages lost"),
                            |note| note.chars().take(300).collect(),
                        ),
                        again: again(&header.test, run.seed, &header.node),
                    });
                }
            }
        }
    }
    let attempts = names.iter().map(|(attempt, ..)| *attempt).max().unwrap_or(0);
    if attempts > 0 {
        merged.requeued.add(|| format!("task {index}: begun {} times", attempts + 1));
    }
    if whole.len() > 1 {
        merged.doubled.add(|| {
            let of = whole
                .iter()
                .map(|(header, _)| format!("attempt {} on {}", header.attempt, printable(&header.node)));
            format!("task {index}: {}; the last counts", of.collect::<Vec<_>>().join(", "))
        });
    }
    let last = whole.into_iter().max_by(|(a, _), (b, _)| {
        (a.attempt, a.ended).partial_cmp(&(b.attempt, b.ended)).unwrap_or(std::cmp::Ordering::Equal)
    });
    match (last, begun.last()) {
        (Some((header, reports)), _) => count(&header, &reports, merged),
        (None, Some((attempt, node))) => merged.vanished.add(|| {
            let node = node.as_deref().unwrap_or("an unknown host");
            format!("task {index}: begun on {} (attempt {attempt}), and no result", printable(node))
        }),
        (None, None) => {
            merged.all_missing += 1;
            let room = merged.missing.len() < NAMED;
            match merged.missing.last_mut() {
                Some((_, end)) if *end + 1 == index => *end = index,
                _ if room => merged.missing.push((index, index)),
                _ => {}
            }
        }
    }
}

/// Whether a result is of this task of this plan.
fn fits(
    plan: &Plan,
    task: &Task,
    attempt: u64,
    read: (Header, Vec<Report>),
) -> Result<(Header, Vec<Report>), String> {
    let header = &read.0;
    if header.plan != plan.digest {
        return Err("a result of another plan".into());
    }
    let seeds = (task.first..task.first + task.count).eq(header.runs.iter().map(|run| run.seed));
    let same = (header.index, header.attempt, header.round, header.first)
        == (task.index, attempt, task.round, task.first);
    match same && seeds && header.test == task.test.name {
        true => Ok(read),
        false => Err(format!(
            "it says that it is of task {}, attempt {}, or of other seeds",
            header.index, header.attempt
        )),
    }
}

/// The pages that a test's result says were lost.
fn lost(report: &Report) -> f64 {
    let figures = |name: &str| {
        report.figures.iter().filter(|figure| figure.label.name == name).map(|figure| figure.value()).sum()
    };
    match report.name.as_str() {
        "test dirty-log" => figures("pages_lost"),
        name if name.starts_with("test ") => figures("lost"),
        _ => 0.0,
    }
}

/// Adds the result that counts.
fn count(header: &Header, reports: &[Report], merged: &mut Merged) {
    merged.ended += 1;
    *merged.vellums.entry(header.vellum.clone()).or_default() += 1;
    let host = merged.hosts.entry(header.node.clone()).or_default();
    host.tasks += 1;
    for (run, report) in header.runs.iter().zip(reports) {
        let lossy = lost(report);
        host.kernels.insert(report.host.kernel.clone());
        host.cpu.clone_from(&report.host.cpu);
        host.lost += lossy;
        for case in report.all_cases() {
            match case.status {
                Status::Pass => host.cases[0] += 1,
                Status::Skip => {
                    host.cases[2] += 1;
                    let reason =
                        case.reason.unwrap_or_else(|| "no reason given".into()).chars().take(200).collect();
                    if merged.skipped.len() < NAMED || merged.skipped.contains_key(&reason) {
                        *merged.skipped.entry(reason).or_default() += 1;
                    }
                }
                _ => {
                    host.cases[1] += 1;
                    if lossy == 0.0 {
                        merged.failed.add(|| {
                            let (why, name): (String, _) =
                                (case.why().chars().take(300).collect(), printable(&case.name));
                            format!(
                                "task {} on {}, seed {}, {name}: {}",
                                header.index,
                                printable(&header.node),
                                run.seed,
                                printable(&why)
                            )
                        });
                    }
                }
            }
        }
        let emulated = if report.host.emulated { " (emulated)" } else { "" };
        let (kernel, cpu) = (report.host.kernel.clone(), format!("{}{emulated}", report.host.cpu));
        for figure in &report.figures {
            let (name, index) = (figure.label.name.as_str(), figure.label.index.as_deref());
            if report.name == "test dirty-log" {
                let Some((tracker, backing)) = index.and_then(|index| index.split_once('/')) else {
                    continue;
                };
                let (tracker, backing) = (tracker.to_owned(), backing.to_owned());
                let alike = Alike { kernel: kernel.clone(), tracker, backing, cpu: cpu.clone() };
                if merged.events.len() >= KINDS && !merged.events.contains_key(&alike) {
                    merged.too_many = true;
                    continue;
                }
                let events = merged.events.entry(alike).or_default();
                match name {
                    "events" => {
                        events.events += figure.value();
                        host.events += figure.value();
                    }
                    "pages_lost" => events.lost += figure.value(),
                    _ => {}
                }
            } else if report.name.starts_with("bench ") && report.invalid.is_empty() {
                let (test, unit) = (header.test.clone(), figure.unit.clone());
                let kind = Kind {
                    test,
                    figure: figure.label.to_string(),
                    unit,
                    kernel: kernel.clone(),
                    cpu: cpu.clone(),
                };
                if merged.figures.len() >= KINDS && !merged.figures.contains_key(&kind) {
                    merged.too_many = true;
                    continue;
                }
                let mean = merged.figures.entry(kind).or_default().entry(header.node.clone()).or_default();
                mean.count += 1;
                mean.sum += figure.value();
            }
        }
    }
}

/// A path as it may be shown.
fn shown(path: &Path) -> String {
    printable(&PathBuf::from(path).to_string_lossy()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Facts;
    use crate::report::{Case, Label};

    /// A plan of three tasks, in a directory of its own.
    fn planned(name: &str) -> (Plan, PathBuf) {
        let text = "name = \"n\"\n[[test]]\nname = \"a\"\nrun = \"test dirty-log\"\nseeds = 3\n";
        let results = std::env::temp_dir().join(format!("vellum-fleet-merge-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&results);
        (Plan::parse(text, &|_| Ok(Some("-S".into()))).unwrap(), results)
    }

    fn leave(plan: &Plan, results: &Path, index: u64, attempt: u64, node: &str, lost: f64) -> PathBuf {
        let task = plan.task(index).unwrap();
        let mut report = Report::new("test dirty-log", Facts::collect("off".into()));
        report.host.kernel = "k".into();
        report.cases.push(Case::new("ring/thp", if lost > 0.0 { Status::Fail } else { Status::Pass }));
        report.figure(Label::of("events", "ring/thp"), "events", 1000.0);
        report.figure(Label::of("pages_lost", "ring/thp"), "pages", lost);
        let header = Header {
            fleet: result::VERSION,
            plan: plan.digest.clone(),
            vellum: "0".into(),
            index,
            test: "a".into(),
            round: task.round,
            first: task.first,
            attempt,
            job: None,
            node: node.into(),
            began: 0.0,
            ended: 1.0 + attempt as f64,
            runs: vec![result::Run { seed: task.first, exit: 0 }],
        };
        let path = result::stem(results, index, attempt).with_extension("json");
        result::place(&path, &result::text(&header, &[report]).unwrap()).unwrap();
        path
    }

    fn merged(plan: &Plan, results: &Path) -> Merged {
        merge(plan, results, &|test, seed, node| format!("{test} {seed} {node}"))
    }

    #[test]
    fn each_task_counts_once_and_a_lost_page_stands() {
        let (plan, results) = planned("once");
        leave(&plan, &results, 0, 0, "n1", 1.0);
        leave(&plan, &results, 0, 1, "n2", 0.0);
        let copied = leave(&plan, &results, 1, 0, "n1", 0.0);
        fs::copy(&copied, copied.with_file_name("00000001-0-copy.json")).unwrap();
        let mark = result::stem(&results, 2, 0).with_extension("begun");
        result::place(&mark, b"n3\x1b[2J").unwrap();
        let all = merged(&plan, &results);
        assert_eq!((all.tasks, all.ended, all.all_losses, all.losses[0].again.as_str()), (3, 2, 1, "a 1 n1"));
        let events: Vec<_> = all.events.values().copied().collect();
        assert_eq!(events, [Events { events: 2000.0, lost: 0.0 }], "the last attempt counts, once");
        assert_eq!(
            (all.requeued.count, all.doubled.count, all.vanished.count, all.all_missing),
            (1, 2, 1, 0)
        );
        assert!(all.vanished.first[0].contains("n3\\u{1b}"), "{:?}", all.vanished);
        assert!(!all.is_well());
        assert_eq!(all, merged(&plan, &results), "twice the same");
        fs::remove_file(mark).unwrap();
        assert_eq!(merged(&plan, &results).missing, [(2, 2)]);
        fs::remove_dir_all(results).unwrap();
    }

    #[test]
    fn what_is_none_of_the_results_is_named_and_the_rest_goes_on() {
        let (plan, results) = planned("refused");
        leave(&plan, &results, 0, 0, "<b>$(id)\u{1b}[2J", 0.0);
        let cut = leave(&plan, &results, 1, 0, "n", 0.0);
        let bytes = fs::read(&cut).unwrap();
        fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
        let other = leave(&plan, &results, 2, 0, "n", 0.0);
        let text = fs::read_to_string(&other).unwrap();
        fs::write(&other, text.replace(&plan.digest, "another")).unwrap();
        fs::write(
            other.with_file_name("00000002-1-schema.json"),
            text.replace("\"schema\":3", "\"schema\":9"),
        )
        .unwrap();
        fs::write(other.with_file_name("nonsense"), "x").unwrap();
        fs::write(other.with_file_name("00005000-0-far.json"), "x").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", other.with_file_name("00000002-0-link.json")).unwrap();
        fs::create_dir(results.join("..data")).unwrap();
        let all = merged(&plan, &results);
        assert_eq!((all.ended, all.refused.count, all.all_missing), (1, 7, 2), "{:?}", all.refused);
        for why in [
            "cut short",
            "another plan",
            "schema version 9",
            "no name of a result",
            "not one of 0 to 2",
            "symbolic link",
            "no directory",
        ] {
            assert!(all.refused.first.iter().any(|line| line.contains(why)), "{why}: {:?}", all.refused);
        }
        fs::remove_dir_all(results).unwrap();
    }

    #[test]
    fn nothing_lost_bounds_the_rate_and_few_hosts_have_no_interval() {
        let bound = Events { events: 3e6, lost: 0.0 }.bound().unwrap();
        assert!((bound - 1e-6).abs() < 5e-9, "{bound}");
        assert_eq!(Events { events: 3e6, lost: 1.0 }.bound(), None);
        let hosts =
            |n: u32| (0..n).map(|i| (i.to_string(), Mean { count: 2, sum: f64::from(2 * i) })).collect();
        assert_eq!(interval(&hosts(4)), None);
        // Of 0, 1, 2, 3, 4: 2.776 standard errors of 0.7071.
        let (mean, half) = interval(&hosts(5)).unwrap();
        assert!((mean - 2.0).abs() < 1e-9 && (half - 1.963).abs() < 1e-3, "{mean} {half}");
    }
}
