//! Merges many results into one. Lost pages come first, missing results are listed, and figures are
//! summed only over comparable hosts.
//!
//! Merging the same files again gives the same result. For each task the last complete attempt
//! counts, once. A lost page of any attempt is reported. Tasks are merged in order, a directory at
//! a time, into sums. So memory grows with the number of hosts and figures, not of tasks.
//! [`result`] reads the files and trusts none.

mod count;
mod merged;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub use merged::{Alike, Events, Host, Kind, Lines, Loss, Mean, Merged, Tried, interval, short};

use super::plan::{Plan, Task};
use super::result::{self, Header, SHARD};
use merged::NAMED;
use vellum_report::{Report, printable};

/// The most files to read for a thousand tasks. No batch system restarts tasks as often as this
/// allows.
const FILES: usize = 100 * SHARD as usize;

/// The most files to read for one task.
const ATTEMPTS: usize = 100;

/// The most results of one task to list.
const SHOWN: usize = 8;

/// The longest name to keep, of a host, kernel or figure, in bytes.
const LONGEST: usize = 300;

/// Merges the files in `results`. `again` writes the command that runs a seed of a test on a host
/// again.
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
                Some(task) => merge_task(plan, &task, &dir, &of_task, &mut merged, again),
                None => merged.refused.add(|| format!("the plan has no task {index}")),
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

/// Reports entries that are not directories of tasks.
fn strangers(results: &Path, shards: u64, merged: &mut Merged) {
    if is_link(results) {
        merged.refused.add(|| format!("{}: a symbolic link, which is not followed", shown(results)));
        return;
    }
    for entry in fs::read_dir(results).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let known = name.len() >= 5 && name.parse::<u64>().is_ok_and(|number| number < shards);
        if !known {
            merged.refused.add(|| format!("{}: not a directory of this plan's tasks", shown(&entry.path())));
        }
    }
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink())
}

/// A file of a task: the attempt, its name, and whether it is a result.
type Named = (u64, String, bool);

/// The files of a directory by task. Other names are refused.
fn files(dir: &Path, merged: &mut Merged) -> BTreeMap<u64, Vec<Named>> {
    let mut names: BTreeMap<u64, Vec<Named>> = BTreeMap::new();
    if is_link(dir) || dir.parent().is_some_and(is_link) {
        merged.refused.add(|| format!("{}: a symbolic link, which is not followed", shown(dir)));
        return names;
    }
    for (number, entry) in fs::read_dir(dir).into_iter().flatten().flatten().enumerate() {
        if number >= FILES {
            merged.refused.add(|| format!("{}: more than {FILES} files; the rest was not read", shown(dir)));
            break;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        match result::named(&name) {
            Some((index, attempt, ended)) => names.entry(index).or_default().push((attempt, name, ended)),
            // A file that is being written.
            None if name.starts_with('.') => {}
            None => merged.refused.add(|| format!("{}: not the name of a result", shown(&entry.path()))),
        }
    }
    names.values_mut().for_each(|of_task| of_task.sort());
    names
}

/// Merges one task from its files. Only the current file and the last complete attempt are in
/// memory.
fn merge_task(
    plan: &Plan,
    task: &Task,
    dir: &Path,
    names: &[Named],
    merged: &mut Merged,
    again: &dyn Fn(&str, u64, &str) -> String,
) {
    let index = task.index;
    let over = names.len().saturating_sub(ATTEMPTS);
    if over > 0 {
        merged.refused.add(|| format!("task {index}: {over} of {} files were not read", names.len()));
    }
    let mut last: Option<(Header, Vec<Report>)> = None;
    let mut begun: Option<(u64, String)> = None;
    let (mut known, mut whole) = (Vec::new(), Vec::new());
    for (attempt, name, ended) in &names[over..] {
        let path = dir.join(name);
        let read = result::read_file(&path);
        if !ended {
            let node =
                read.map_or("an unknown host".into(), |node| String::from_utf8_lossy(&node).into_owned());
            begun = Some((*attempt, short(&node, 64)));
            continue;
        }
        let read = match read.and_then(|bytes| result::parse(&bytes)) {
            Ok(read) => fits(plan, task, *attempt, &read).map(|()| read),
            Err(why) => Err(why),
        };
        match read {
            Ok((header, reports)) => {
                whole.push(format!("attempt {attempt} on {}", printable(&header.node)));
                // A copy of a result adds nothing.
                let which = (*attempt, header.node.clone(), header.job.clone(), header.began.to_bits());
                if !known.contains(&which) {
                    known.push(which);
                    losses(&header, &reports, merged, again);
                }
                let later = |(last, _): &(Header, Vec<Report>)| {
                    (header.attempt, header.ended) >= (last.attempt, last.ended)
                };
                if last.as_ref().is_none_or(later) {
                    last = Some((header, reports));
                }
            }
            Err(why) => merged.refused.add(|| format!("{}: {}", shown(&path), printable(&why))),
        }
    }
    if let Some(attempts) = names.iter().map(|(attempt, ..)| *attempt).max().filter(|&most| most > 0) {
        merged.requeued.add(|| format!("task {index}: started {} times", attempts + 1));
    }
    if whole.len() > 1 {
        merged.doubled.add(|| {
            let more = whole.len().saturating_sub(SHOWN);
            let first = if more > 0 { format!("{more} before, ") } else { String::new() };
            format!("task {index}: {first}{}; the last counts", whole[more..].join(", "))
        });
    }
    match (last, begun) {
        (Some((header, reports)), _) => count::count(&header, &reports, merged),
        (None, Some((attempt, node))) => merged.vanished.add(|| {
            format!("task {index}: started on {} (attempt {attempt}), but no result", printable(&node))
        }),
        (None, None) => missing(index, merged),
    }
}

/// Records lost pages, no matter how the attempt ended.
fn losses(
    header: &Header,
    reports: &[Report],
    merged: &mut Merged,
    again: &dyn Fn(&str, u64, &str) -> String,
) {
    for (run, report) in header.runs.iter().zip(reports) {
        let lost = count::lost(report);
        count::tried(header, report, lost, merged);
        if lost == 0.0 {
            continue;
        }
        merged.all_losses += 1;
        if merged.losses.len() < NAMED {
            let note = report.notes.iter().find(|note| note.contains("LOST")).or(report.notes.first());
            merged.losses.push(Loss {
                node: header.node.clone(),
                kernel: report.host.kernel.clone(),
                test: header.test.clone(),
                seed: run.seed,
                attempt: header.attempt,
                what: note.map_or_else(|| format!("{lost} pages lost"), |note| short(note, 300)),
                again: again(&header.test, run.seed, &header.node),
            });
        }
    }
}

/// Records that a task has no files.
fn missing(index: u64, merged: &mut Merged) {
    merged.all_missing += 1;
    let room = merged.missing.len() < NAMED;
    match merged.missing.last_mut() {
        Some((_, end)) if *end + 1 == index => *end = index,
        _ if room => merged.missing.push((index, index)),
        _ => {}
    }
}

/// Checks that a result belongs to this task of this plan.
fn fits(
    plan: &Plan,
    task: &Task,
    attempt: u64,
    (header, reports): &(Header, Vec<Report>),
) -> Result<(), String> {
    if header.plan != plan.digest {
        return Err("a result of another plan".into());
    }
    let seeds = (task.first..task.first + task.count).eq(header.runs.iter().map(|run| run.seed));
    let names = reports.iter().flat_map(|report| {
        let labels = report.figures.iter().map(|figure| &figure.label);
        let labels = labels.flat_map(|label| [Some(&label.name), label.index.as_ref()]).flatten();
        labels
            .chain(report.figures.iter().map(|figure| &figure.unit))
            .chain([&report.host.kernel, &report.host.cpu])
    });
    if names.chain([&header.node, &header.vellum]).chain(&header.job).any(|name| name.len() > LONGEST) {
        return Err(format!("it has a name longer than {LONGEST} bytes"));
    }
    let same = (header.index, header.attempt, header.round, header.first)
        == (task.index, attempt, task.round, task.first);
    match same && seeds && header.test == task.test.name {
        true => Ok(()),
        false => Err(format!(
            "it is a result of task {}, attempt {}, or of other seeds",
            header.index, header.attempt
        )),
    }
}

/// A path, safe to print.
fn shown(path: &Path) -> String {
    printable(&PathBuf::from(path).to_string_lossy()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_host::Facts;
    use vellum_report::{Case, Label, Status};

    /// A plan of three tasks in its own directory.
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
        // All attempts count towards how often a host loses pages. Copies do not.
        let tried: Vec<_> = all.tried.iter().map(|(of, runs)| (of.node.as_str(), *runs)).collect();
        assert_eq!(tried, [("n1", [2, 1]), ("n2", [1, 0])]);
        assert_eq!(all.status(), Status::Fail);
        assert_eq!(all, merged(&plan, &results), "twice the same");
        fs::remove_file(mark).unwrap();
        assert_eq!(merged(&plan, &results).missing, [(2, 2)]);
        fs::remove_dir_all(results).unwrap();
    }

    /// Without a result, nothing is known about lost pages. With some results, nothing is known
    /// about the rest. A skip tests nothing.
    #[test]
    fn what_has_no_result_is_not_said_to_have_lost_nothing() {
        let (plan, results) = planned("absent");
        let said = || {
            let all = merged(&plan, &results);
            let text = crate::page::text(&all);
            (all.status(), text.lines().next().unwrap().split_once("; ").unwrap().1.to_owned())
        };
        assert_eq!(said(), (Status::Skip, "nothing was tested".into()));
        for index in 0..3 {
            let left = leave(&plan, &results, index, 0, "n", 0.0);
            let text = fs::read_to_string(&left).unwrap();
            fs::write(&left, text.replace("\"status\":\"pass\"", "\"status\":\"skip\"")).unwrap();
        }
        assert_eq!(said(), (Status::Skip, "nothing was tested".into()));
        leave(&plan, &results, 0, 1, "n", 0.0);
        assert_eq!(said(), (Status::Pass, "no pages were lost".into()));
        fs::remove_dir_all(&results).unwrap();
        leave(&plan, &results, 0, 0, "n", 0.0);
        let (status, said) = said();
        assert_eq!(status, Status::Skip);
        assert!(said.ends_with("the rest is unknown"), "{said}");
        fs::remove_dir_all(results).unwrap();
    }

    /// A task may have any number of files. Few are read, and at most one is kept in memory.
    #[test]
    fn a_task_with_any_number_of_results_is_bounded_and_said() {
        let (plan, results) = planned("many");
        let kept = leave(&plan, &results, 0, 0, "n1", 1.0);
        for copy in 0..ATTEMPTS + 20 {
            fs::hard_link(&kept, kept.with_file_name(format!("00000000-0-0{copy:04}.json"))).unwrap();
        }
        let all = merged(&plan, &results);
        assert_eq!((all.ended, all.all_losses, all.doubled.count), (1, 1, 1));
        assert!(all.doubled.first[0].len() < 300, "{:?}", all.doubled);
        assert!(all.refused.first[0].contains("21 of 121 files"), "{:?}", all.refused);
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
        leave(&plan, &results, 1, 1, &"n".repeat(LONGEST + 1), 0.0);
        std::os::unix::fs::symlink("/etc/passwd", other.with_file_name("00000002-0-link.json")).unwrap();
        fs::create_dir(results.join("..data")).unwrap();
        let all = merged(&plan, &results);
        assert_eq!((all.ended, all.refused.count, all.all_missing), (1, 8, 2), "{:?}", all.refused);
        for why in [
            "cut short",
            "another plan",
            "schema version 9",
            "not the name of a result",
            "not one of 0 to 2",
            "symbolic link",
            "not a directory",
            "a name longer than",
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
        // For 0, 1, 2, 3, 4: 2.776 standard errors of 0.7071.
        let (mean, half) = interval(&hosts(5)).unwrap();
        assert!((mean - 2.0).abs() < 1e-9 && (half - 1.963).abs() < 1e-3, "{mean} {half}");
    }
}
