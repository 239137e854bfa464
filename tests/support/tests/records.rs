//! Tests of the records of test programs. This program starts itself again, with an environment
//! variable that adds tests with every kind of end.

use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{self, Command, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};

use support::record::{self, Line, Outcome};
use support::{Completion, Failed, Tests, ensure, test};

const SAMPLE: &str = "VELLUM_TEST_SAMPLE";

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    if let Ok(kind) = env::var(SAMPLE) {
        samples(&mut tests, &kind);
    }
    tests.run()
}

/// Fails if a child of this program survives one of the signals.
fn children_die_of_signals() -> Result<(), Failed> {
    for (name, number) in [("INT", libc::SIGINT), ("QUIT", libc::SIGQUIT), ("HUP", libc::SIGHUP)] {
        let status = Command::new("sh").args(["-c", &format!("kill -{name} $$")]).status()?;
        ensure(status.signal() == Some(number), || format!("SIG{name}: {status}"))?;
    }
    Ok(())
}

fn samples(tests: &mut Tests, kind: &str) {
    let fine = || -> Result<(), Failed> { Ok(()) };
    tests.add("sample_passes", Ok(()), fine);
    tests.add("sample_fails", Ok(()), || ensure(false, || "planted".into()));
    tests.add("sample_panics", Ok(()), || -> Result<(), Failed> { panic!("planted panic") });
    tests.add("sample_without_its_bed", Err("needs what no host has".into()), fine);
    tests.add("sample_finds_out", Ok(()), || Ok::<_, Failed>(Completion::ignored_with("too late")));
    tests.add("sample_whose_children_die_of_signals", Ok(()), children_die_of_signals);
    if kind == "cut-short" {
        tests.one_at_a_time();
        tests.add("sample_that_ends_its_program", Ok(()), || -> Result<(), Failed> { process::exit(0) });
    }
}

/// Runs this program with its samples. Returns its record, and whether it succeeded.
fn sampled(kind: &str, filter: &str) -> Result<(Vec<Line>, bool), Failed> {
    sampled_after(kind, filter, "")
}

/// The same, where the tests `passed` have passed on another host.
fn sampled_after(kind: &str, filter: &str, passed: &str) -> Result<(Vec<Line>, bool), Failed> {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("record-{number}-{}", process::id()));
    let output = Command::new(env::current_exe()?)
        .arg(filter)
        .env(SAMPLE, kind)
        .env(record::VARIABLE, &file)
        .env(record::PASSED, passed)
        .output()?;
    let (lines, rest) = record::parse(&fs::read_to_string(&file)?);
    rest?;
    fs::remove_file(file)?;
    Ok((lines, output.status.success()))
}

fn outcome(lines: &[Line], wanted: &str) -> Option<Outcome> {
    lines.iter().find_map(|line| match line {
        Line::Test { name, outcome, .. } if name == wanted => Some(outcome.clone()),
        _ => None,
    })
}

#[test]
fn every_end_is_recorded_with_its_reason() -> Result<(), Failed> {
    let (lines, success) = sampled("all", "sample_")?;
    for (name, wanted) in [
        ("sample_passes", Outcome::Passed),
        ("sample_fails", Outcome::Failed("planted".into())),
        ("sample_panics", Outcome::Failed("it panicked: planted panic".into())),
        ("sample_without_its_bed", Outcome::Skipped("needs what no host has".into())),
        ("sample_finds_out", Outcome::Skipped("too late".into())),
    ] {
        let found = outcome(&lines, name);
        ensure(found.as_ref() == Some(&wanted), || format!("{name}: {found:?}, not {wanted:?}"))?;
    }
    ensure(lines.len() == 7 && lines.last() == Some(&Line::End(6)) && !success, || format!("{lines:?}"))
}

/// Shells ignore SIGINT and SIGQUIT for background jobs, and nohup(1) ignores SIGHUP.
#[test]
fn signals_that_the_parent_ignores_have_their_default_actions() -> Result<(), Failed> {
    let output = Command::new("sh")
        .args(["-c", "trap '' INT QUIT HUP; exec \"$@\"", "sh"])
        .arg(env::current_exe()?)
        .args(["--exact", "sample_whose_children_die_of_signals"])
        .env(SAMPLE, "all")
        .env_remove(record::VARIABLE)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.success() && said.contains("1 passed"), || format!("{output:?}"))
}

#[test]
fn what_is_not_asked_for_is_not_recorded() -> Result<(), Failed> {
    let (lines, success) = sampled("all", "sample_passes")?;
    ensure(lines.len() == 2 && lines[1] == Line::End(1) && success, || format!("{lines:?}"))
}

#[test]
fn a_program_that_is_cut_short_records_no_end() -> Result<(), Failed> {
    let (lines, success) = sampled("cut-short", "sample_")?;
    ensure(success && !lines.iter().any(|line| matches!(line, Line::End(_))), || format!("{lines:?}"))
}

/// Another program's tests, and those whose names only begin alike, are others.
#[test]
fn what_has_passed_on_another_host_is_skipped_and_says_so() -> Result<(), Failed> {
    let program = env::current_exe()?;
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let passed = format!("{name}::sample_fails other::sample_panics {name}::sample_passes_");
    let (lines, success) = sampled_after("all", "sample_", &passed)?;
    let is_skipped =
        |name| matches!(outcome(&lines, name), Some(Outcome::Skipped(why)) if why.contains("lab test svm"));
    ensure(is_skipped("sample_fails"), || format!("{lines:?}"))?;
    ensure(outcome(&lines, "sample_passes") == Some(Outcome::Passed) && !success, || format!("{lines:?}"))?;
    ensure(matches!(outcome(&lines, "sample_panics"), Some(Outcome::Failed(_))), || format!("{lines:?}"))
}
