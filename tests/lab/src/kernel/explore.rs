//! `cargo lab explore`: runs KVM's memory code under a scheduler in user space.
//!
//! The harness is in `kernel-patches/tools/explore`. This module builds its program for a base with
//! series, and runs it. The program prints KTAP. Its exit status says whether a rule was broken.

use std::fs;
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
    if base.name == "5.10" && architecture == Architecture::X86 {
        return Err(Error::Usage(
            "5.10: the harness knows KVM for x86 from 6.12 on; explore 6.12, 7.2 or 7.3, or --arch arm64"
                .into(),
        ));
    }
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
        let mut names = explored.with.clone();
        names.push(series.name.clone());
        let mut stack = series::of_base(series.base, &names)?;
        let own = stack.iter().position(|one| one.name == series.name).expect("it is one of its base's");
        let found = match &explored.planted {
            Some(planted) => {
                stack[own] = series.with_planted(planted)?;
                found(cache, series, explored, &stack)?
            }
            None => {
                let without = series::of_base(series.base, &explored.with)?;
                let found = found(cache, series, explored, &without)?;
                if let Some(failure) = failure(cache, series, explored, &stack)? {
                    return Err(Error::Series(format!("{}: {}: {failure}", series.name, explored.setup)));
                }
                found
            }
        };
        let what = explored.planted.as_deref().unwrap_or("without the series");
        let then = match &explored.planted {
            Some(_) => String::new(),
            None => format!("; with it {} runs pass", explored.runs),
        };
        report(&series.name, &format!("{}, {what}: {found}{then}", explored.setup));
    }
    Ok(())
}

/// The run of `explored` that fails with `stack`, which must say what it should.
fn found(cache: &Cache, series: &Series, explored: &Explored, stack: &[Series]) -> Result<String> {
    let what = explored.planted.as_deref().unwrap_or("without the series");
    let wrong = |why: String| Error::Series(format!("{}: {}, {what}: {why}", series.name, explored.setup));
    match failure(cache, series, explored, stack)? {
        Some(failure) if failure.contains(&explored.says) => Ok(failure),
        Some(failure) => Err(wrong(format!("fails, but does not say {:?}: {failure}", explored.says))),
        None => Err(wrong(format!("{} runs pass, and one must not", explored.runs))),
    }
}

/// How the runs of `explored` fail with `stack`, if they do.
fn failure(cache: &Cache, series: &Series, explored: &Explored, stack: &[Series]) -> Result<Option<String>> {
    let mut command = Command::new(program(cache, series.architecture()?, series.base, stack)?);
    command.args(["-o", &explored.setup, "-n", &explored.runs.to_string()]);
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
    for file in sources(&harness)? {
        parts.push(code(&file, &fs::read(&file).map_err(Error::file("read", &file))?));
    }
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
            "KCFLAGS=-g",
            first,
        ]))?;
        let mut build = Command::new(harness.join("build"));
        build.arg(architecture.kernel()).args([&tree.source, &objects]).arg(out).env("CC", build::COMPILER);
        // Most files are the same with and without a series.
        build::remember(&mut build, &tree);
        let built = tool::output(&mut build);
        built.map(drop).and(tree.carry(&[]))
    })?;
    Ok(dir.join("explore"))
}

/// The harness's files in a fixed order.
fn sources(harness: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(harness).map_err(Error::file("read", harness))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}
