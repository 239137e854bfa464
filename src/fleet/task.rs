//! One task on this host: each of its seeds is run by this program again, and the result is placed in the shared directory.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use super::plan::{Plan, Task};
use super::result::{self, Header, Run};
use super::{Error, features, plan};
use crate::host::Facts;
use crate::report::{Case, Report, Status, json, printable};
use crate::sys::signal;

/// Who runs it.
pub struct Runner<'a> {
    /// How often it was begun before.
    pub attempt: u64,
    /// The batch system's name for it.
    pub job: Option<String>,
    /// What this host is called.
    pub node: String,
    /// This Vellum's version.
    pub vellum: &'a str,
    /// The argument that has a command print its result alone.
    pub as_json: &'a str,
}

/// How much of what a run says on standard error is kept, in bytes.
const SAID: usize = 4096;

/// Runs it; whether all of it was well.
///
/// # Errors
/// Where the result cannot be placed: the task then has none.
pub fn run(file: &Path, plan: &Plan, task: &Task, runner: &Runner) -> Result<bool, Error> {
    let stem = result::stem(&plan::results(file), task.index, runner.attempt);
    let began = now();
    // Whoever finds this without a result knows where to look for the reason.
    let mark = stem.with_extension("begun");
    result::place(&mark, runner.node.as_bytes())?;
    let (mut runs, mut reports) = (Vec::new(), Vec::new());
    let facts = Facts::collect("off".into());
    let lacks: Vec<String> = task.test.features.difference(&features::here(&facts)).cloned().collect();
    for seed in task.first..task.first + task.count {
        let name = task.test.words[..2].join(" ");
        let (exit, report) = match lacks.is_empty() {
            true => one(task, seed, &name, runner.as_json),
            false => {
                let why = format!("this host lacks {}", lacks.join(", "));
                let case =
                    Case::new(&name, Status::Skip).because(why).mended_by("run the task on one that has it");
                (0, alone(&name, case))
            }
        };
        runs.push(Run { seed, exit });
        reports.push(report);
    }
    let well = reports.iter().all(|report| !report.status().is_bad()) && runs.iter().all(|run| run.exit == 0);
    let header = Header {
        fleet: result::VERSION,
        plan: plan.digest.clone(),
        vellum: runner.vellum.into(),
        index: task.index,
        test: task.test.name.clone(),
        round: task.round,
        first: task.first,
        attempt: runner.attempt,
        job: runner.job.clone(),
        node: runner.node.clone(),
        began,
        ended: now(),
        runs,
    };
    let place = stem.with_extension("json");
    let text = result::text(&header, &reports).map_err(|error| Error::Asked(error.to_string()))?;
    if text.len() as u64 > result::LARGEST {
        let most = result::LARGEST >> 20;
        return Err(Error::Asked(format!(
            "task {}: its result is larger than {most} MiB: lower per_task",
            task.index
        )));
    }
    result::place(&place, &text)?;
    // The result says all of that and more.
    let _ = std::fs::remove_file(mark);
    Ok(well)
}

/// One run, and what became of it.
fn one(task: &Task, seed: u64, name: &str, as_json: &str) -> (i32, Report) {
    let mut command = Command::new("/proc/self/exe");
    command.args(task.test.command(seed)).arg(as_json);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    signal::end_with_parent(&mut command);
    let crash =
        |why: String| alone(name, Case { seed: Some(seed), ..Case::new(name, Status::Crash).because(why) });
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return (1, crash(format!("it could not be started: {error}"))),
    };
    let said = child.stderr.take().map(|stderr| thread::spawn(move || last_of(stderr)));
    let mut bytes = Vec::new();
    let read = child.stdout.take().map(|stdout| stdout.take(json::LIMIT).read_to_end(&mut bytes));
    let status = match child.wait() {
        Ok(status) => status,
        Err(error) => return (1, crash(error.to_string())),
    };
    let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
    let exit = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let result = json::parse(&bytes, Path::new("its result")).map(|mut results| results.remove(0));
    match (read, result) {
        (Some(Ok(_)), Ok(report)) => (exit, report),
        (_, result) => {
            let why = match (status.signal(), result) {
                (Some(signal), _) => format!("ended by signal {signal}"),
                (None, Err(error)) if said.is_empty() => error.to_string(),
                _ => said,
            };
            (exit, crash(why))
        }
    }
}

/// A result of this one case.
fn alone(name: &str, case: Case) -> Report {
    let mut report = Report::new(name, Facts::collect("off".into()));
    report.cases.push(case);
    report
}

/// The last line that is said, as far as it is kept.
fn last_of(mut stderr: ChildStderr) -> String {
    let (mut kept, mut part) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = stderr.read(&mut part) {
        kept.extend_from_slice(&part[..n]);
        let over = kept.len().saturating_sub(SAID);
        kept.drain(..over);
    }
    let text = String::from_utf8_lossy(&kept);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    printable(line).into_owned()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
