//! The Slurm commands. Nothing from a plan reaches a shell or a line that sbatch parses. The batch
//! script is constant and gets the program, the plan's file and a number as arguments. Options go
//! to sbatch as separate arguments.
//!
//! A task's number is the array's base (an argument) plus Slurm's index (SLURM_ARRAY_TASK_ID). A
//! requeued task first waits in the state BeginTime for AuthInfo=cred_expire: 120 s by default, at
//! least 5 s.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Error;
use super::plan::{Plan, results};
use super::result::{self, SHARD};
use vellum_sys::open;

/// The batch script, which Slurm runs in the plan's directory. It contains no sbatch lines and
/// nothing from a plan. A task's other output only matters if its result is missing.
const SCRIPT: &str = "#!/bin/sh\nexec \"$1\" fleet task \"$2\" \"$3\" >>said 2>&1\n";

/// The longest list of array indices per submission, in characters.
const LIST: usize = 8000;

/// The limits of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The limit on array indices (MaxArraySize).
    pub array: u64,
    /// The most jobs that the controller keeps (MaxJobCount). Each task of an array is one.
    pub jobs: u64,
}

/// The outcome of a submission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Submitted {
    /// The number of arrays.
    pub arrays: u64,
    /// The tasks in them.
    pub tasks: u64,
    /// Tasks that already have a result.
    pub ended: u64,
    /// Tasks that are already in the queue.
    pub there: u64,
    /// Tasks for which the queue has no room.
    pub left: u64,
}

/// Where the tasks of a plan are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Tasks with a result.
    pub ended: u64,
    /// Tasks in Slurm's queue, by Slurm's name for their state.
    pub queued: BTreeMap<String, u64>,
    /// Tasks in neither.
    pub nowhere: u64,
}

/// Runs a Slurm program, the first word, and returns its output.
fn call(line: &[String]) -> Result<String, Error> {
    let program = &line[0];
    let output = Command::new(program)
        .args(&line[1..])
        // Fixes the output formats, which users can change, and lists all jobs.
        .envs([("SQUEUE_FORMAT", "%F %K %T"), ("SINFO_FORMAT", "%f")])
        .env_remove("SQUEUE_FORMAT2")
        .env_remove("SQUEUE_STATES")
        .env_remove("SQUEUE_USERS")
        .env_remove("SQUEUE_PARTITION")
        .output()
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::NoSlurm(program.into()),
            _ => Error::Slurm(format!("{program}: {error}")),
        })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Err(Error::Slurm(format!("{program}: {}", said.join("; "))))
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The controller's limits.
///
/// # Errors
/// Fails if Slurm is missing or does not answer.
pub fn limits() -> Result<Limits, Error> {
    limits_in(&call(&words("scontrol show config"))?).map_err(Error::Slurm)
}

fn limits_in(text: &str) -> Result<Limits, String> {
    let value = |name: &str| {
        let line = text.lines().find(|line| line.split('=').next().is_some_and(|key| key.trim() == name));
        let value = line
            .and_then(|line| line.split_once('='))
            .and_then(|(_, value)| value.trim().parse::<u64>().ok());
        value.filter(|&value| value > 0).ok_or_else(|| format!("scontrol show config has no {name}"))
    };
    Ok(Limits { array: value("MaxArraySize")?, jobs: value("MaxJobCount")? })
}

/// All features of the cluster's nodes.
fn features() -> Result<BTreeSet<String>, Error> {
    let text = call(&words("sinfo --noheader"))?;
    Ok(text.split([',', '\n']).map(str::trim).map(str::to_owned).collect())
}

/// The file with the number and base of each submitted array.
fn record(plan: &Path) -> PathBuf {
    plan.with_file_name("jobs")
}

/// Reads that file, which is trusted no more than results. Invalid lines are ignored. Before the
/// first submission there is none.
fn recorded(plan: &Path) -> Result<BTreeMap<u64, u64>, Error> {
    let path = record(plan);
    let bytes = match result::read_file(&path) {
        Ok(bytes) => bytes,
        Err(why) if path.exists() => return Err(Error::Plan { path, why }),
        Err(_) => Vec::new(),
    };
    let pair = |line: &str| {
        let (job, base) = line.split_once(' ')?;
        Some((job.parse().ok()?, base.parse().ok()?))
    };
    Ok(String::from_utf8_lossy(&bytes).lines().filter_map(pair).collect())
}

/// The tasks of this plan in the queue with their states, and the total number of jobs.
fn queue(plan: &Path) -> Result<(BTreeMap<u64, String>, u64), Error> {
    let (jobs, mut tasks, mut all) = (recorded(plan)?, BTreeMap::new(), 0);
    let text = call(&words("squeue --noheader --array"))?;
    for line in text.lines() {
        all += 1;
        let mut parts = line.split_whitespace();
        let (Some(job), Some(index), Some(state)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        if let (Ok(job), Ok(index)) = (job.parse::<u64>(), index.parse::<u64>())
            && let Some(task) = jobs.get(&job).and_then(|base| base.checked_add(index))
        {
            tasks.insert(task, state.to_owned());
        }
    }
    Ok((tasks, all))
}

/// Submits tasks that have no result and are not in the queue, as far as there is room. `node`
/// limits them to one host.
///
/// # Errors
/// Fails if Slurm is missing or refuses, or if no node has a required feature.
pub fn submit(file: &Path, plan: &Plan, node: Option<&str>, more: &[String]) -> Result<Submitted, Error> {
    let limits = limits()?;
    let there = features()?;
    for test in &plan.tests {
        if let Some(feature) = test.features.iter().find(|feature| !there.contains(*feature)) {
            let known: Vec<&str> = there.iter().map(String::as_str).collect();
            let meant = vellum_sys::keyvalue::meant(feature, known.iter().copied());
            return Err(Error::Asked(format!(
                "test {}: no node has the feature {feature}{meant}; nodes have {}",
                test.name,
                known.join(", ")
            )));
        }
    }
    let (queued, jobs) = queue(file)?;
    let mut room = limits.jobs.saturating_sub(jobs);
    let mut submitted = Submitted::default();
    let results = results(file);
    fs::create_dir_all(&results).map_err(Error::file("made", &results))?;
    let script = file.with_file_name("task.sh");
    result::place(&script, SCRIPT.as_bytes())?;
    // One array has the tasks with the same features, time limit and base. It never has more tasks
    // than the controller has room for.
    let mut groups: BTreeMap<(&BTreeSet<String>, u64, u64), Vec<u64>> = BTreeMap::new();
    let (mut done, mut shard) = (BTreeSet::new(), None);
    for index in 0..plan.len() {
        if shard != Some(index / SHARD) {
            shard = Some(index / SHARD);
            done = result::ended(&results, index / SHARD);
        }
        if done.contains(&index) {
            submitted.ended += 1;
        } else if queued.contains_key(&index) {
            submitted.there += 1;
        } else if room == 0 {
            submitted.left += 1;
        } else if let Some(task) = plan.task(index) {
            let base = index / limits.array * limits.array;
            groups.entry((&task.test.features, task.test.minutes, base)).or_default().push(index);
            room -= 1;
        }
    }
    // Submits in the order of the plan.
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, tasks)| tasks[0]);
    for ((features, minutes, base), tasks) in groups {
        let mut options = of_all(file, plan, minutes);
        if !features.is_empty() {
            let all: Vec<&str> = features.iter().map(String::as_str).collect();
            options.push(format!("--constraint={}", all.join("&")));
        }
        options.extend(node.map(|node| format!("--nodelist={node}")));
        options.extend(more.iter().cloned());
        for list in lists(&tasks, base) {
            array(file, &script, &options, base, &list)?;
            submitted.arrays += 1;
        }
        submitted.tasks += tasks.len() as u64;
    }
    Ok(submitted)
}

/// Indices relative to a base as sbatch takes them: `3,7-9`, in lists of at most [`LIST`]
/// characters.
fn lists(indices: &[u64], base: u64) -> Vec<String> {
    let mut lists = vec![String::new()];
    let mut at = 0;
    while at < indices.len() {
        let from = at;
        while at + 1 < indices.len() && indices[at + 1] == indices[at] + 1 {
            at += 1;
        }
        let (first, last) = (indices[from] - base, indices[at] - base);
        let part = if first == last { first.to_string() } else { format!("{first}-{last}") };
        if lists.last().is_some_and(|list| list.len() + part.len() > LIST) {
            lists.push(String::new());
        }
        if let Some(list) = lists.last_mut() {
            if !list.is_empty() {
                list.push(',');
            }
            list.push_str(&part);
        }
        at += 1;
    }
    lists
}

/// The sbatch options that all arrays share.
fn of_all(file: &Path, plan: &Plan, minutes: u64) -> Vec<String> {
    // The script redirects its own output. An output path for sbatch would be a pattern, in which
    // `%j` in a directory name means the job's number.
    let line = format!("sbatch --parsable --exclusive --requeue --time={minutes} --output=/dev/null");
    let mut options = words(&line);
    options.push(format!("--job-name=vellum-{}", plan.name));
    options.push(format!("--chdir={}", file.parent().unwrap_or(Path::new("/")).display()));
    options
}

/// Submits an array and records its number and base. An array without a record would be submitted
/// again, so it is cancelled.
fn array(file: &Path, script: &Path, options: &[String], base: u64, list: &str) -> Result<(), Error> {
    let program = std::env::current_exe().map_err(Error::file("found", "this program"))?;
    let path = record(file);
    let mut jobs = open::open(&path, File::options().create(true).append(true), open::Kind::Regular)
        .map_err(Error::file("written", &path))?;
    let mut line = options.to_vec();
    line.push(format!("--array={list}"));
    line.extend([script, &program, file].map(|path| path.to_string_lossy().into_owned()));
    line.push(base.to_string());
    let said = call(&line)?;
    let job = said.trim().split(';').next().unwrap_or_default();
    let job: u64 =
        job.parse().map_err(|_| Error::Slurm(format!("sbatch printed no job number but {said:?}")))?;
    writeln!(jobs, "{job} {base}").and_then(|()| jobs.sync_all()).map_err(|error| {
        let _ = call(&["scancel".into(), job.to_string()]);
        Error::file("written", &path)(error)
    })
}

/// Where the tasks of the plan are. Without Slurm only results count.
///
/// # Errors
/// Fails if Slurm does not answer.
pub fn standing(file: &Path, plan: &Plan) -> Result<Standing, Error> {
    let queued = if record(file).exists() { queue(file)?.0 } else { BTreeMap::new() };
    let (mut standing, results) = (Standing::default(), results(file));
    for shard in 0..plan.len().div_ceil(SHARD) {
        let done = result::ended(&results, shard);
        for index in shard * SHARD..((shard + 1) * SHARD).min(plan.len()) {
            match queued.get(&index) {
                _ if done.contains(&index) => standing.ended += 1,
                Some(state) => *standing.queued.entry(state.clone()).or_default() += 1,
                None => standing.nowhere += 1,
            }
        }
    }
    Ok(standing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_scontrol_prints_them() {
        let text = "Configuration data as of 2026\nMaxArraySize            = 1001\nMaxJobCount             = 10000\nMaxJobId = 7\n";
        assert_eq!(limits_in(text), Ok(Limits { array: 1001, jobs: 10_000 }));
        assert!(limits_in("MaxArraySize = 0\n").unwrap_err().contains("MaxArraySize"));
    }

    #[test]
    fn indices_are_ranges_from_their_base_on() {
        assert_eq!(lists(&[1003, 1007, 1008, 1009, 1011], 1001), ["2,6-8,10"]);
        let odd: Vec<u64> = (0..5000).map(|n| 2 * n).collect();
        let all = lists(&odd, 0);
        assert!(all.len() > 1 && all.iter().all(|list| list.len() <= LIST + 1 && !list.starts_with(',')));
        assert_eq!(all.iter().map(|list| list.split(',').count()).sum::<usize>(), 5000);
    }

    #[test]
    fn the_script_says_nothing_to_sbatch() {
        assert!(!SCRIPT.contains("#SBATCH") && SCRIPT.lines().count() == 2);
    }
}
