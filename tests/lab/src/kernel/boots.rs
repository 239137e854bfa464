//! Boots a patched image in both paging modes: the oracle must pass everywhere, the series' own
//! tests on the hosts that they name, and the kernel must log no complaint.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::bench::{self, Bench};
use super::build::{self, Image};
use super::complaints::complaints;
use super::report;
use super::series::{self, Series};
use super::tree::Tree;
use crate::artifacts::{self, Programs};
use crate::cache::{Cache, code, digest};
use crate::hosts::wire::Frame;
use crate::hosts::{self, Ran};
use crate::lanes::side_by_side;
use crate::test::programs;
use crate::{Error, Result, compare, tool};

/// Every patched host runs this besides its series' own tests.
const ORACLE: &str = "vellum test dirty-log --memory 32m --events 20k --seed 1";

/// Boots `image`, whose kernel has the series `stack`, with the oracle and `tests`.
pub fn every_time(cache: &Cache, image: &Image, stack: &[Series], tests: &[Bench]) -> Result<()> {
    let (oracles, programs) = (oracles(), Programs::build_for(image.architecture)?);
    let groups = bench::by_host(&oracles.iter().chain(tests).collect::<Vec<_>>());
    each(&groups, |group| boot(cache, &programs, image, group, &brought(cache, &programs, stack, group)?))
}

/// Like [`every_time`], without commands that this `vellum` has passed on `image` before. One image
/// with its base's whole stack serves the check of each series, and a kernel that checks itself
/// takes minutes for the oracle.
pub fn once_each(cache: &Cache, image: &Image, stack: &[Series], tests: &[Bench]) -> Result<()> {
    let (oracles, programs) = (oracles(), Programs::build_for(image.architecture)?);
    // A command runs vellum and the series' scripts.
    let mut ran = Vec::new();
    for (path, _) in bench::scripts()? {
        ran.push(code(&path, &fs::read(&path).map_err(Error::file("read", &path))?));
    }
    ran.push(fs::read(&programs.vellum).map_err(Error::file("read", &programs.vellum))?);
    let ran = digest(ran.iter().map(Vec::as_slice));
    let name = &image.name;
    let entry = |bench: &Bench| -> Result<String> {
        let emulator = bench.host(image.host()).host.version()?;
        let mut parts = vec![format!("{bench:?}").into_bytes(), ran.clone().into(), emulator.into()];
        for (path, _) in brought(cache, &programs, stack, &[bench])? {
            parts.push(fs::read(&path).map_err(Error::file("read", &path))?);
        }
        Ok(format!("boots/{name}-{}", digest(parts.iter().map(Vec::as_slice))))
    };
    let (mut known, mut new) = (Vec::new(), Vec::new());
    for bench in oracles.iter().chain(tests) {
        let passed = cache.path(&entry(bench)?).exists();
        if passed { &mut known } else { &mut new }.push(bench);
    }
    each(&bench::by_host(&new), |group| {
        boot(cache, &programs, image, group, &brought(cache, &programs, stack, group)?)?;
        group.iter().try_for_each(|bench| cache.entry(&entry(bench)?, |_| Ok(())).map(drop))
    })?;
    if !known.is_empty() {
        let marks = cache.path(&format!("boots/{name}-*"));
        let passed = format!("{} commands passed on it before, with this vellum", known.len());
        report(&image.label, &format!("{passed} (to run them again: rm -r {})", marks.display()));
    }
    Ok(())
}

/// Runs the tests of `series` for planted faults, each with a kernel or a guest that has the fault.
/// They must fail, and print or log the expected text.
pub fn with_mistakes(cache: &Cache, series: &Series) -> Result<()> {
    for test in &series.about.test {
        let Some(says) = &test.says else { continue };
        let planted = test.planted.as_ref().map(|name| series.with_planted(name)).transpose()?;
        let stack = std::slice::from_ref(planted.as_ref().unwrap_or(series));
        let image = build::build(cache, series.base, stack, None)?;
        let programs = Programs::build_for(image.architecture)?;
        let ran = ran(cache, &programs, &image, &[test], &brought(cache, &programs, stack, &[test])?)?;
        let said = said(&ran);
        let code = ran.first().and_then(|ran| ran.exit.as_ref()).map_or(0, |exit| exit.code);
        let host = test.host(image.host()).label();
        if code == 0 || !said.contains(says.as_str()) {
            return Err(Error::Series(format!(
                "{} {host}: `{}` must fail and say {says:?}; it ended with {code}:\n{said}",
                image.label, test.run
            )));
        }
        report(&image.label, &format!("{host}: `{}` fails, and {says:?} is said", test.run));
    }
    Ok(())
}

/// The files that the commands of `group` need: Linux guests and their program, test programs, and
/// the tools of the stack's series.
fn brought(
    cache: &Cache,
    programs: &Programs,
    stack: &[Series],
    group: &[&Bench],
) -> Result<Vec<(PathBuf, String)>> {
    let guests = compare::boot::guests(cache, group)?;
    let mut files: Vec<_> = guests.into_values().flat_map(|guest| guest.files).collect();
    if !files.is_empty() {
        files.push((programs.guest_tasks.clone(), compare::boot::GUEST_TASKS.into()));
    }
    let set = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    let tools = set(group.iter().filter_map(|bench| bench.tool()).collect());
    if let Some(base) = stack.first().map(|series| series.base).filter(|_| !tools.is_empty()) {
        let tree = Tree::open(cache, base)?;
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        tree.carry(&series::stacked(stack))?;
        let dir = artifacts::workspace().join("target/guests").join(base.name);
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        for name in &tools {
            let to = dir.join(name);
            let mut tool = Command::new(super::series_directory().join("tools").join(name));
            tool::output(tool.arg(&tree.source).arg(&to).env("CC", build::COMPILER))?;
            files.push((to, format!("{}{name}", bench::TOOLS)));
        }
    }
    let names = set(group.iter().filter_map(|bench| bench.program()).collect());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    if !names.is_empty() {
        let own = programs::named(&names)?.into_iter();
        files.extend(own.map(|program| (program.path, format!("{}{}", bench::PROGRAMS, program.name))));
    }
    Ok(files)
}

/// Boots hosts that count instructions in parallel, and then, one by one, those whose two CPUs race
/// in real time.
fn each(groups: &[Vec<&Bench>], boot: impl Fn(&[&Bench]) -> Result<()> + Sync) -> Result<()> {
    let (races, counted): (Vec<_>, Vec<_>) = groups.iter().partition(|group| group[0].multi);
    side_by_side(&counted, |group| boot(group))?;
    races.into_iter().try_for_each(|group| boot(group))
}

fn oracles() -> [Bench; 2] {
    [Bench::plain(ORACLE, true), Bench::plain(ORACLE, false)]
}

/// One boot: the commands of `group`, all for the same host, and then the kernel's log.
fn ran(
    cache: &Cache,
    programs: &Programs,
    image: &Image,
    group: &[&Bench],
    brought: &[(PathBuf, String)],
) -> Result<Vec<Ran>> {
    let mut request = group[0].host(image.host());
    // The time limit is for one command, and the boot runs several. A kernel that checks itself
    // takes minutes for the oracle.
    request.time_limit *= u32::try_from(group.len() + 1).unwrap_or(u32::MAX);
    let host = request.label();
    request.commands = group.iter().map(|bench| bench.command("result.json")).collect();
    request.files = bench::scripts()?;
    request.files.extend_from_slice(brought);
    // The log is read last, when everything has run.
    request.commands.push(["dmesg".to_owned()].to_vec());
    let mut done = 0;
    let mut said = Vec::new();
    let outcome = hosts::run(cache, programs, &request, |frame| match frame {
        // Other hosts print too, so a command's output is printed at once.
        Frame::Stderr(bytes) => said.extend(bytes),
        Frame::Exit(exit) => {
            if let Some(bench) = group.get(done) {
                let said = String::from_utf8_lossy(&said);
                eprintln!("{said}lab: {} {host}: `{}` ended with {}", image.label, bench.run, exit.code);
            }
            said.clear();
            done += 1;
        }
        _ => (),
    })?;
    Ok(outcome.ran)
}

/// One boot whose commands must pass and whose kernel must not complain.
fn boot(
    cache: &Cache,
    programs: &Programs,
    image: &Image,
    group: &[&Bench],
    brought: &[(PathBuf, String)],
) -> Result<()> {
    let ran = ran(cache, programs, image, group, brought)?;
    let host = group[0].host(image.host()).label();
    for (ran, line) in ran.iter().zip(group.iter().map(|bench| bench.run.as_str()).chain(["dmesg"])) {
        let code = ran.exit.as_ref().map_or(1, |exit| exit.code);
        if code != 0 {
            let said = String::from_utf8_lossy(&ran.stdout);
            return Err(Error::Series(format!(
                "{} {host}: `{line}` ended with {code}:\n{said}",
                image.label
            )));
        }
    }
    let log = ran.last().map(|ran| String::from_utf8_lossy(&ran.stdout).into_owned()).unwrap_or_default();
    if let Some(splat) = complaints(&log).first() {
        return Err(Error::Series(format!("{} {host}: the kernel complained:\n{splat}\n{log}", image.label)));
    }
    let passed = group.len();
    report(&image.label, &format!("boots on {host}; {passed} commands passed, no complaint from the kernel"));
    Ok(())
}

/// All output, including the kernel's log.
fn said(ran: &[Ran]) -> String {
    let all = ran.iter().flat_map(|ran| [&ran.stdout, &ran.stderr]);
    all.map(|bytes| String::from_utf8_lossy(bytes)).collect()
}
