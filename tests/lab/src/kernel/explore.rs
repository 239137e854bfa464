//! `cargo lab explore`: runs KVM's memory code under a scheduler in user space.
//!
//! The harness is in `kernel-patches/tools/explore`. This module builds its program for a base with
//! series, and runs it. The program prints KTAP. Its exit status says whether a rule was broken.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::build::{self, Config};
use super::series::{self, Explored, Series};
use super::tree::Tree;
use super::variants::{EXPLORE, EXPLORE_ARM};
use super::{Base, report, series_directory};
use crate::architecture::Architecture;
use crate::cache::{Cache, code, digest};
use crate::{Error, Result, tool};

/// What the program explores.
pub struct Options {
    /// Whose code to run. If it is not given, that of arm64 if all series change only files of
    /// arm64.
    pub architecture: Option<Architecture>,
    /// The time for all setups together.
    pub time: Option<Duration>,
    /// The number of runs of each setup.
    pub runs: Option<u64>,
    /// The seed of the first run.
    pub seed: Option<u64>,
    /// The only setup to run.
    pub setup: Option<String>,
}

/// Explores `base` with `series`. Returns the harness's exit status.
pub fn explore(cache: &Cache, base: &Base, series: &[Series], options: &Options) -> Result<u8> {
    let architecture = match options.architecture {
        Some(architecture) => architecture,
        None => series::architecture(series)?,
    };
    let mut command = Command::new(program(cache, architecture, base, series)?);
    let mut pass = |flag: &str, value: Option<String>| {
        if let Some(value) = value {
            command.args([flag, &value]);
        }
    };
    pass("-t", options.time.map(|time| time.as_secs_f64().to_string()));
    pass("-n", options.runs.map(|runs| runs.to_string()));
    pass("-s", options.seed.map(|seed| seed.to_string()));
    pass("-o", options.setup.clone());
    let status = command.status().map_err(Error::file("run", Path::new(command.get_program())))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Whether `planted` is one of the mistakes that `series` has explored.
pub fn is_for(series: &Series, planted: &Path) -> bool {
    let mut named = series.about.explore.iter().filter_map(|explored| explored.planted.as_deref());
    named.any(|name| planted.file_stem().is_some_and(|stem| stem == name))
}

/// Explores what `series` says: its fault is found without it and not with it, and each planted
/// mistake is found on top of it.
pub fn check(cache: &Cache, series: &Series) -> Result<()> {
    if series.about.explore.is_empty() {
        report(&series.name, "has nothing that explore runs");
    }
    for explored in &series.about.explore {
        let (found, then) = match &explored.planted {
            Some(planted) => {
                (found(cache, series, explored, &stack(series, explored, Some(planted))?)?, String::new())
            }
            None => {
                let (found, passed) = found_and_fixed(cache, series, explored)?;
                (found, format!("; with it {passed} runs pass"))
            }
        };
        let what = explored.planted.as_deref().unwrap_or("without the series");
        report(&series.name, &format!("{}, {what}: {found}{then}", explored.setup));
    }
    Ok(())
}

/// Explores what all series of `base` say of their faults, and prints a row of a table for each.
/// With `planted`, the rows are of their planted mistakes instead. Returns whether all is as they
/// say.
pub fn table(cache: &Cache, base: &Base, planted: bool) -> Result<bool> {
    let mut holds = true;
    if planted {
        println!("| series | mistake | setup | runs | seconds |\n|---|---|---|---|---|");
    } else {
        println!("| fault | series | setup | runs | seconds | with the series |\n|---|---|---|---|---|---|");
    }
    for series in series::of_base(base, &["all".to_owned()])? {
        let said = series.about.explore.iter().filter(|explored| explored.planted.is_some() == planted);
        for explored in said {
            let row = match &explored.planted {
                Some(mistake) => stack(&series, explored, Some(mistake))
                    .and_then(|stack| found(cache, &series, explored, &stack))
                    .map(|found| {
                        format!("{} | {mistake} | {} | {}", series.name, setup(explored), cost(&found))
                    }),
                None => found_and_fixed(cache, &series, explored).map(|(found, passed)| {
                    let fault = explored.fault.as_ref().unwrap_or(&series.about.claim);
                    format!("{fault} | {} | {} | {} | {passed}", series.name, setup(explored), cost(&found))
                }),
            };
            match row {
                Ok(row) => println!("| {row} |"),
                Err(error) => {
                    holds = false;
                    eprintln!("lab: {error}");
                }
            }
        }
    }
    Ok(holds)
}

/// The setup of `explored`, and the other series that it has.
fn setup(explored: &Explored) -> String {
    match explored.with.as_slice() {
        [] => explored.setup.clone(),
        with => format!("{}, `--with {}`", explored.setup, with.join(" ")),
    }
}

/// The cells for runs and seconds of the failure `found`.
fn cost(found: &str) -> String {
    match after(found) {
        Some((runs, seconds)) => format!("{runs} | {seconds}"),
        None => "all orders | ".to_owned(),
    }
}

/// After how many random runs and seconds `found` failed. The driver with all orders of a few
/// programs has no such number.
fn after(found: &str) -> Option<(u64, &str)> {
    let (_, rest) = found.split_once(", after ")?;
    let (runs, rest) = rest.split_once(" runs and ")?;
    Some((runs.parse().ok()?, rest.split_once(" s,")?.0))
}

/// How `explored` fails without `series`, and the number of random runs that pass with it: ten
/// times as many as the fault took.
fn found_and_fixed(cache: &Cache, series: &Series, explored: &Explored) -> Result<(String, u64)> {
    let found = found(cache, series, explored, &series::of_base(series.base, &explored.with)?)?;
    let runs = after(&found).map_or(0, |(runs, _)| 10 * runs).max(explored.runs);
    match failure(cache, series, explored, &stack(series, explored, None)?, runs)? {
        Some(failure) => Err(Error::Series(format!("{}: {}: {failure}", series.name, explored.setup))),
        None => Ok((found, runs)),
    }
}

/// The other series of `explored` with `series`, which has the mistake `planted`.
fn stack(series: &Series, explored: &Explored, planted: Option<&str>) -> Result<Vec<Series>> {
    let mut names = explored.with.clone();
    names.push(series.name.clone());
    let mut stack = series::of_base(series.base, &names)?;
    if let Some(planted) = planted {
        let own = stack.iter().position(|one| one.name == series.name).expect("it is one of its base's");
        stack[own] = series.with_planted(planted)?;
    }
    Ok(stack)
}

/// The run of `explored` that fails with `stack`, which must say what it should.
fn found(cache: &Cache, series: &Series, explored: &Explored, stack: &[Series]) -> Result<String> {
    let what = explored.planted.as_deref().unwrap_or("without the series");
    let wrong = |why: String| Error::Series(format!("{}: {}, {what}: {why}", series.name, explored.setup));
    match failure(cache, series, explored, stack, explored.runs)? {
        Some(failure) if failure.contains(&explored.says) => Ok(failure),
        Some(failure) => Err(wrong(format!("fails, but does not say {:?}: {failure}", explored.says))),
        None => Err(wrong(format!("{} runs pass, and one must not", explored.runs))),
    }
}

/// How `runs` random runs of `explored`, or all orders of its programs, fail with `stack`, if they
/// do.
fn failure(
    cache: &Cache,
    series: &Series,
    explored: &Explored,
    stack: &[Series],
    runs: u64,
) -> Result<Option<String>> {
    let architecture = match explored.arch {
        Some(architecture) => architecture,
        None => series.architecture()?,
    };
    let mut command = Command::new(program(cache, architecture, series.base, stack)?);
    command.args(["-f", "-o", &explored.setup, "-n", &runs.to_string()]);
    let ended = tool::bound(&mut command, libc::SIGTERM).output();
    let ended = ended.map_err(Error::file("run", Path::new(command.get_program())))?;
    let said = String::from_utf8_lossy(&ended.stdout);
    if ended.status.success() && !said.contains(" # SKIP ") {
        return Ok(None);
    }
    // The driver with all orders of a few programs has no seeds.
    let line = said.lines().map(str::trim).find(|line| line.starts_with("# ") && line.contains(" fails: "));
    Ok(Some(line.map_or_else(|| said.to_string(), |line| line[2..].to_owned())))
}

/// The harness's program for `base` with `series`, built if need be.
fn program(cache: &Cache, architecture: Architecture, base: &Base, series: &[Series]) -> Result<PathBuf> {
    build::require_tools_for(architecture)?;
    // All objects get the flags of `first`. Making it also makes the generated headers.
    let (variant, first) = match architecture {
        Architecture::X86 => (EXPLORE, "arch/x86/kvm/x86.o"),
        Architecture::Arm => (EXPLORE_ARM, "arch/arm64/kvm/mmu.o"),
    };
    let config = Config::new_for(architecture, base, Some(variant))?;
    let patches = series::stacked(series);
    let tree = Tree::open(cache, base)?;
    let harness = series_directory().join("tools/explore");
    let mut parts = vec![config.text()?, build::toolchain_for(architecture)?.into()];
    for patch in &patches {
        parts.push(build::change(&fs::read(patch).map_err(Error::file("read", patch))?).to_vec());
    }
    let sources = sources(&harness)?;
    parts.extend(sources.iter().map(|(file, text)| code(Path::new(file), text)));
    let names: Vec<&str> = series.iter().map(|series| series.name.as_str()).collect();
    let names = if names.is_empty() { "pristine".into() } else { names.join("+") };
    let key = digest(parts.iter().map(Vec::as_slice));
    let dir = cache.entry(&format!("kernel/{}/explore/{names}-{key}", tree.package.version), |out| {
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        eprintln!("lab: building the harness of {} {names}", tree.package.version);
        tree.carry(&patches)?;
        let objects = config.objects(&tree)?;
        build::configure(&tree, &config, &objects)?;
        tree.date_for(&objects)?;
        // objtool checks only what a booting kernel needs.
        tool::output(build::command_for(&tree, architecture, &objects).args([
            "CONFIG_OBJTOOL=",
            // Its name in 5.10
            "CONFIG_STACK_VALIDATION=",
            "KCFLAGS=-g",
            first,
        ]))?;
        // What the key stands for is built, even if a file is edited meanwhile.
        let copy = out.join("harness");
        write_all(&copy, &sources)?;
        let mut build = Command::new(copy.join("build"));
        build.arg(architecture.kernel()).args([&tree.source, &objects]).arg(out).env("CC", build::COMPILER);
        // Most files are the same with and without a series.
        build::remember(&mut build, &tree);
        let built = tool::output(&mut build);
        built.map(drop).and(tree.carry(&[]))
    })?;
    Ok(dir.join("explore"))
}

/// The names and contents of the harness's files in a fixed order.
fn sources(harness: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(harness).map_err(Error::file("read", harness))?.flatten() {
        let text = fs::read(entry.path()).map_err(Error::file("read", &entry.path()))?;
        files.push((entry.file_name(), text));
    }
    files.sort();
    Ok(files)
}

/// Writes `files` into a new directory, executable.
fn write_all(directory: &Path, files: &[(OsString, Vec<u8>)]) -> Result<()> {
    fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
    for (name, text) in files {
        let file = directory.join(name);
        let mut options = OpenOptions::new();
        let opened = options.write(true).create_new(true).mode(0o755).open(&file);
        opened.and_then(|mut to| to.write_all(text)).map_err(Error::file("write", &file))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_how_many_runs_it_took() {
        assert_eq!(after("the run of seed 49, after 50 runs and 0.1 s, fails: x"), Some((50, "0.1")));
        assert_eq!(after("program 3, begun by vCPU 0, with 2 changes of task, fails: x"), None);
    }

    #[test]
    fn a_file_that_is_edited_meanwhile_is_built_as_the_key_has_it() {
        let home = std::env::temp_dir().join(format!("vellum-explore-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        let harness = home.join("harness");
        fs::create_dir_all(&harness).unwrap();
        fs::write(harness.join("vm.c"), "one\n").unwrap();
        fs::write(harness.join("build"), "#!/bin/sh\ncat \"$(dirname \"$0\")/vm.c\"\n").unwrap();

        let read = sources(&harness).unwrap();
        fs::write(harness.join("vm.c"), "two\n").unwrap();
        let copy = home.join("copy");
        write_all(&copy, &read).unwrap();

        assert_eq!(tool::text(&mut Command::new(copy.join("build"))).unwrap(), "one\n");
        let keys = [&read, &sources(&harness).unwrap()]
            .map(|files| digest(files.iter().map(|(_, text)| text.as_slice())));
        assert_ne!(keys[0], keys[1]);
        fs::remove_dir_all(&home).unwrap();
    }
}
