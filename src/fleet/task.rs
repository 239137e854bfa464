//! Runs one task on this host. Each seed is a new run of this program. The result goes to the
//! shared directory.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ChildStderr, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use super::plan::{Plan, Task};
use super::result::{self, Header, Run};
use super::{Error, features, plan};
use vellum_host::Facts;
use vellum_report::case::together;
use vellum_report::{Case, Report, Status, json, printable};
use vellum_sys::signal;

/// The context of a task.
pub struct Runner<'a> {
    /// How often it was started before.
    pub attempt: u64,
    /// The batch system's job.
    pub job: Option<String>,
    /// This host's name.
    pub node: String,
    /// This Vellum's version.
    pub vellum: &'a str,
    /// The argument that makes a command print its result as JSON.
    pub as_json: &'a str,
}

/// How much of a run's standard error is kept, in bytes.
const SAID: usize = 4096;

/// Runs the task and returns its status.
///
/// # Errors
/// Fails if the result cannot be written. The task then has none.
pub fn run(file: &Path, plan: &Plan, task: &Task, runner: &Runner) -> Result<Status, Error> {
    let stem = result::stem(&plan::results(file), task.index, runner.attempt);
    let began = now();
    // If the result never appears, this names the host where the reason is.
    let mark = stem.with_extension("begun");
    result::place(&mark, runner.node.as_bytes())?;
    let (mut runs, mut reports) = (Vec::new(), Vec::new());
    let facts = Facts::collect("off".into());
    let lacks: Vec<String> = task.test.features.difference(&features::here(&facts)).cloned().collect();
    for seed in task.first..task.first + task.count {
        let name = task.test.words[..2].join(" ");
        let (exit, report) = match lacks.is_empty() {
            true => run_once(task, seed, &name, runner.as_json),
            false => {
                let why = format!("this host lacks {}", lacks.join(", "));
                let case = Case::new(&name, Status::Skip)
                    .because(why)
                    .mended_by("run the task on a host that has it");
                (0, alone(&name, facts.clone(), case))
            }
        };
        runs.push(Run { seed, exit });
        reports.push(report);
    }
    let status = together(reports.iter().map(Report::status));
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
    Ok(status)
}

/// Runs one seed. Returns the exit status and the result.
fn run_once(task: &Task, seed: u64, name: &str, as_json: &str) -> (i32, Report) {
    let mut command = Command::new("/proc/self/exe");
    command.args(task.test.command(seed)).arg(as_json);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    signal::end_with_parent(&mut command);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return (1, crashed(name, seed, format!("it failed to start: {error}"))),
    };
    let said = child.stderr.take().map(|stderr| thread::spawn(move || last_of(stderr)));
    let mut bytes = Vec::new();
    let read = child.stdout.take().map(|stdout| stdout.take(json::LIMIT).read_to_end(&mut bytes));
    let status = match child.wait() {
        Ok(status) => status,
        Err(error) => return (1, crashed(name, seed, error.to_string())),
    };
    let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
    let result = match read {
        Some(Ok(_)) => json::parse(&bytes, Path::new("its result")).map_err(|error| error.to_string()),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("it had no standard output".into()),
    };
    judged(name, seed, status, result.map(|mut results| results.remove(0)), said)
}

/// Combines a run's exit status, as a shell would report it, with its result. A status that
/// contradicts the result is a crash.
fn judged(
    name: &str,
    seed: u64,
    status: ExitStatus,
    result: Result<Report, String>,
    said: String,
) -> (i32, Report) {
    let exit = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let ended = || match status.signal() {
        Some(signal) => format!("ended by signal {signal}"),
        None => format!("ended with status {exit}"),
    };
    match result {
        // A test that this host cannot run has its own status and is not a crash.
        Ok(report) if exit == 0 || report.status() != Status::Pass => (exit, report),
        Ok(mut report) => {
            let why = format!("{}, although its result passed; {said}", ended());
            report.cases.push(of_run(seed, Case::new(format!("vellum {name}"), Status::Crash).because(why)));
            (exit, report)
        }
        Err(_) if status.signal().is_some() => (exit, crashed(name, seed, ended())),
        Err(why) if said.is_empty() => (exit, crashed(name, seed, why)),
        Err(_) => (exit, crashed(name, seed, said)),
    }
}

fn of_run(seed: u64, case: Case) -> Case {
    Case { seed: Some(seed), ..case }
}

/// The result of a run that left none.
fn crashed(name: &str, seed: u64, why: String) -> Report {
    let case = of_run(seed, Case::new(name, Status::Crash).because(why));
    alone(name, Facts::collect("off".into()), case)
}

/// A result with one case.
fn alone(name: &str, facts: Facts, case: Case) -> Report {
    let mut report = Report::new(name, facts);
    report.cases.push(case);
    report
}

/// The last line of standard error, as far as it was kept.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A run whose exit status contradicts its result is reported. A skipped one is not.
    #[test]
    fn a_run_is_well_where_it_ended_as_its_result_says() {
        let of = |status| alone("test x", Facts::collect("off".into()), Case::new("a", status));
        let case = |status: i32, result: Result<Report, String>, said: &str| {
            let (exit, report) = judged("test x", 7, ExitStatus::from_raw(status), result, said.into());
            let last = report.cases.last().cloned().unwrap();
            assert!(report.status() == last.status || report.cases.len() == 1, "{report:?}");
            (exit, last.status, last.why())
        };
        assert_eq!(case(0, Ok(of(Status::Pass)), ""), (0, Status::Pass, String::new()));
        assert_eq!(case(1 << 8, Ok(of(Status::Skip)), "no KVM"), (1, Status::Skip, String::new()));
        assert_eq!(case(1 << 8, Ok(of(Status::Fail)), ""), (1, Status::Fail, String::new()));
        let (exit, status, why) = case(11, Ok(of(Status::Pass)), "");
        assert!((exit, status) == (139, Status::Crash) && why.contains("signal 11"), "{why}");
        let (exit, status, why) = case(1 << 8, Ok(of(Status::Pass)), "no room");
        assert!((exit, status) == (1, Status::Crash) && why.contains("status 1") && why.contains("no room"));
        let (exit, status, why) = case(9, Err("cut short".into()), "x");
        assert_eq!((exit, status, why.as_str()), (137, Status::Crash, "ended by signal 9"));
        assert_eq!(case(2 << 8, Err("cut short".into()), "why").2, "why");
        assert_eq!(case(0, Err("cut short".into()), "").2, "cut short");
    }
}
