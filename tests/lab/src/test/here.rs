//! Tests on this machine, which may be an emulated host.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use support::record;

use super::load::Load;
use super::programs::{self, Place};
use super::tally::{LOCAL, Tally};
use super::{Options, readers, setup, slurm};
use crate::artifacts::{self, Executable};
use crate::hosts::Emulated;
use crate::hosts::doctor;
use crate::{Error, Result, tool};

/// The limit of one libtest test. The slowest take seconds. Programs that keep a record limit their
/// tests themselves.
const LIMIT: Duration = Duration::from_secs(600);

/// With `all`, the commands of all pages of the book run.
pub(super) const BOOK: &str = "VELLUM_BOOK";

/// Every test of the workspace, as in `cargo test`.
pub fn local(options: &Options, tally: &mut Tally) -> Result<()> {
    if options.setup {
        readers::prepare(tally);
        slurm::prepare(tally);
        tally.lap(LOCAL, "fetching other projects' programs");
    }
    eprintln!("lab: {LOCAL}: every test program of the workspace");
    let programs = match programs::built_here() {
        Ok(programs) => programs,
        // The other test hosts can still run.
        Err(error @ Error::Failed { .. }) => {
            eprintln!("lab: {LOCAL}: {error}");
            tally.fail(LOCAL, "the test programs, which do not compile");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    tally.lap(LOCAL, "building");
    for (program, place) in programs {
        match place {
            Some(_) => recorded(&program, options, LOCAL, tally)?,
            None => by_libtest(&program, options, LOCAL, tally)?,
        }
        tally.lap(LOCAL, &format!("{} {}", program.kind, program.name));
    }
    documentation(options, tally)?;
    tally.lap(LOCAL, "examples in the documentation");
    Ok(())
}

/// Every test program of the workspace `times` times under load.
pub fn loaded(options: &Options, times: u32, tally: &mut Tally) -> Result<()> {
    if options.setup {
        readers::prepare(tally);
        slurm::prepare(tally);
    }
    let programs = programs::built_here()?;
    tally.lap(LOCAL, "building");
    let _load = Load::put_on()?;
    for time in 1..=times {
        let host = format!("{LOCAL}, time {time} of {times}");
        for (program, place) in &programs {
            match place {
                Some(_) => recorded(program, options, &host, tally)?,
                None => by_libtest(program, options, &host, tally)?,
            }
            tally.lap(&host, &format!("{} {}", program.kind, program.name));
        }
    }
    Ok(())
}

/// The programs that need KVM, on this machine's KVM.
pub fn metal(options: &Options, tally: &mut Tally) -> Result<()> {
    let host = std::env::var("VELLUM_BED").unwrap_or_else(|_| "metal".into());
    if let Err(why) = doctor::kvm() {
        tally.skip(&host, "all of its tests", &why);
        return Ok(());
    }
    let Some(dir) = &options.prebuilt else {
        return programs::built_for(Place::Kvm)?
            .iter()
            .chain(&programs::built_for(Place::Linux)?)
            .try_for_each(|program| recorded(program, options, &host, tally));
    };
    let paths = files(dir)?;
    if paths.is_empty() {
        return Err(Error::Usage(format!("--prebuilt {}: it holds no test program", dir.display())));
    }
    for path in paths {
        eprintln!("lab: {host}: {}", path.display());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        keep_record(Command::new(&path).args(&options.arguments), &host, &name, tally)?;
    }
    Ok(())
}

/// The programs about live migration, with all of their tests.
pub fn migration(options: &Options, tally: &mut Tally) -> Result<()> {
    let host = "migration";
    if let Err(why) = doctor::kvm() {
        tally.skip(host, "all of its tests", &why);
        return Ok(());
    }
    for program in programs::named(&["interrupts", "migrate", "workload"])? {
        eprintln!("lab: {host}: {}", program.path.display());
        let mut command = command(&program);
        command.args(&options.arguments).env("VELLUM_MIGRATION", "all");
        keep_record(&mut command, host, &program.name, tally)?;
        tally.lap(host, &program.name);
    }
    Ok(())
}

/// Plans on a Slurm cluster, with all of their tests.
pub fn fleet(options: &Options, tally: &mut Tally) -> Result<()> {
    if options.setup {
        slurm::prepare(tally);
    }
    for program in programs::named(&["fleet"])? {
        eprintln!("lab: fleet: {}", program.path.display());
        let mut command = command(&program);
        command.args(&options.arguments).env("VELLUM_FLEET", "all");
        keep_record(&mut command, "fleet", &program.name, tally)?;
        tally.lap("fleet", &program.name);
    }
    Ok(())
}

/// The laboratory's promises about emulated hosts like `host`.
pub fn promises(host: Emulated, arguments: &[String], tally: &mut Tally) -> Result<()> {
    let programs = programs::promises()?;
    tally.lap(host.name(), "building the laboratory's promises");
    for program in programs {
        let mut command = command(&program);
        command.args(arguments).env("VELLUM_LAB_BOOTS", host.name());
        keep_record(&mut command, host.name(), &program.name, tally)?;
        tally.lap(host.name(), &program.name);
    }
    Ok(())
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

/// The program as `cargo test` would start it.
fn command(program: &Executable) -> Command {
    let mut command = Command::new(&program.path);
    command.current_dir(program.package()).env("CARGO_MANIFEST_DIR", program.package());
    if let Some(dir) = readers::find() {
        command.env(readers::VARIABLE, dir);
    }
    if let Some(dir) = slurm::find() {
        command.env(slurm::VARIABLE, dir);
    }
    command
}

/// Runs a program that keeps a record.
fn recorded(program: &Executable, options: &Options, host: &str, tally: &mut Tally) -> Result<()> {
    eprintln!("lab: {host}: {}", program.path.display());
    let mut command = command(program);
    if options.full {
        command.env(BOOK, "all");
    }
    keep_record(command.args(&options.arguments), host, &program.name, tally)
}

/// Runs `command` and counts what it records.
fn keep_record(command: &mut Command, host: &str, name: &str, tally: &mut Tally) -> Result<()> {
    let file = std::env::temp_dir().join(format!("lab-{}-{name}.record", std::process::id()));
    // An earlier process with this pid may have left one.
    let _ = fs::remove_file(&file);
    let success = watched(command.env(record::VARIABLE, &file), |row| tally.show(row))?;
    let lines = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(&file);
    tally.program(host, name, &lines, success);
    Ok(())
}

/// Runs each test of a libtest program in a process of its own. Its exit status is the result,
/// because libtest's output for several tests is not meant for programs.
fn by_libtest(program: &Executable, options: &Options, host: &str, tally: &mut Tally) -> Result<()> {
    let tests = list(command(program).args(&options.arguments))?;
    let ignored = list(command(program).args(&options.arguments).arg("--ignored"))?;
    let of = |test: &str| format!("{} {}::{test}", program.kind, program.name);
    eprintln!("lab: {host}: {}: {} tests", program.path.display(), tests.len());
    if tests.is_empty() && options.arguments.is_empty() && program.kind == "test" {
        tally.fail(host, &format!("{}, a test program without a test", program.name));
    }
    for test in tests {
        if ignored.contains(&test) {
            tally.skip(host, &of(&test), "#[ignore] stands above it");
            continue;
        }
        let mut said = Vec::new();
        if limited(command(program).args(["--exact", &test]), LIMIT, |row| said.push(row.to_owned()))? {
            tally.pass(host, &of(&test));
        } else {
            said.iter().for_each(|row| tally.show(row));
            tally.fail(host, &of(&test));
        }
    }
    Ok(())
}

/// The examples in the documentation. rustdoc compiles and runs all of them and has one exit
/// status.
fn documentation(options: &Options, tally: &mut Tally) -> Result<()> {
    let cargo = || {
        let mut command = Command::new(artifacts::cargo());
        command.args(["test", "--workspace", "--doc", "--quiet", "--"]).args(&options.arguments);
        command.current_dir(artifacts::workspace());
        command
    };
    let examples = list(&mut cargo())?;
    if examples.is_empty() {
        return Ok(());
    }
    if watched(&mut cargo(), |row| tally.show(row))? {
        examples.iter().for_each(|example| tally.pass(LOCAL, example));
    } else {
        tally.fail(
            LOCAL,
            &format!("of the examples in the documentation, at least one of {}", examples.len()),
        );
    }
    Ok(())
}

/// The tests in a libtest program's machine-readable list.
pub(super) fn list(command: &mut Command) -> Result<Vec<String>> {
    let text = tool::text(command.args(["--list", "--format", "terse"]))?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs `command`, passes on its lines, and returns whether it succeeded.
pub(super) fn watched(command: &mut Command, each: impl FnMut(&str)) -> Result<bool> {
    watched_from(command, |_| (), each)
}

/// Like [`watched`], with a time limit. When it expires, the command's process group is killed and
/// a last line says so.
fn limited(command: &mut Command, limit: Duration, mut each: impl FnMut(&str)) -> Result<bool> {
    let (ended, end) = mpsc::channel::<()>();
    let mut watch = None;
    let success = watched_from(
        command,
        |leader| {
            watch = Some(thread::spawn(move || {
                let over = end.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
                if over {
                    // SAFETY: this signals the group that the process leads. It has not been waited
                    // for.
                    unsafe { libc::kill(-leader.cast_signed(), libc::SIGKILL) };
                }
                over
            }));
        },
        &mut each,
    );
    drop(ended);
    if watch.is_some_and(|watch| watch.join().unwrap_or(false)) {
        each(&format!("not over within {limit:?}, and so ended"));
    }
    success
}

/// Like [`watched`]. `started` gets the process id. The process leads a group of its own.
fn watched_from(command: &mut Command, started: impl FnOnce(u32), each: impl FnMut(&str)) -> Result<bool> {
    command.process_group(0);
    let begun = |leader| {
        setup::child(leader);
        started(leader);
    };
    let result = tool::lines_of(command, begun, each);
    setup::child(0);
    setup::check_interrupted()?;
    match result {
        Ok(()) => Ok(true),
        Err(Error::Failed { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_hangs_is_ended_with_its_children_and_says_so() {
        let mut said = Vec::new();
        let mut hangs = Command::new("sh");
        hangs.args(["-c", "echo begun; sleep 1000 & wait"]);
        let success = limited(&mut hangs, Duration::from_millis(100), |row| said.push(row.to_owned()));
        assert!(!success.unwrap());
        assert_eq!(said.last().map(String::as_str), Some("not over within 100ms, and so ended"));
        let ends = limited(Command::new("true").arg("--"), LIMIT, |row| panic!("{row}"));
        assert!(ends.unwrap());
    }
}
