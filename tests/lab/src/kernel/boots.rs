//! A patched image boots, in both modes, and survives: the oracle everywhere, the series' own tests on the hosts that they
//! name, and no complaint in the kernel's log.

use std::fs;

use super::build::Image;
use super::check::report;
use super::complaints::complaints;
use super::series::{self, Bench};
use crate::artifacts::Programs;
use crate::bed;
use crate::cache::{Cache, digest};
use crate::lanes::side_by_side;
use crate::wire::Frame;
use crate::{Error, Result};

/// What every patched host has to survive besides its series' own tests.
const ORACLE: &str = "vellum test dirty-log --memory 32m --events 20k --seed 1";

/// Boots `image` with the oracle and `tests`.
pub fn every_time(cache: &Cache, image: &Image, tests: &[Bench]) -> Result<()> {
    let (oracles, programs) = (oracles(), Programs::build_for(image.architecture)?);
    let groups = series::by_host(&oracles.iter().chain(tests).collect::<Vec<_>>());
    each(&groups, |group| boot(cache, &programs, image, group))
}

/// The same, less what this `vellum` has passed on `image` before: one image with its base's whole stack serves the check
/// of each series, and a kernel that checks itself takes minutes for the oracle.
pub fn once_each(cache: &Cache, image: &Image, tests: &[Bench]) -> Result<()> {
    let (oracles, programs) = (oracles(), Programs::build_for(image.architecture)?);
    // What a command runs: vellum, and the series' scripts.
    let mut ran = Vec::new();
    for path in series::scripts()?.into_iter().map(|(path, _)| path).chain([programs.vellum.clone()]) {
        ran.push(fs::read(&path).map_err(Error::file("read", &path))?);
    }
    let ran = digest(ran.iter().map(Vec::as_slice));
    let (name, emulator) = (&image.name, image.host().bed.version()?);
    let entry = |bench: &Bench| {
        let command = digest([format!("{bench:?}").as_bytes(), ran.as_bytes(), emulator.as_bytes()]);
        format!("boots/{name}-{command}")
    };
    let (known, new): (Vec<_>, Vec<_>) =
        oracles.iter().chain(tests).partition(|bench| cache.path(&entry(bench)).exists());
    each(&series::by_host(&new), |group| {
        boot(cache, &programs, image, group)?;
        group.iter().try_for_each(|bench| cache.entry(&entry(bench), |_| Ok(())).map(drop))
    })?;
    if !known.is_empty() {
        let marks = cache.path(&format!("boots/{name}-*"));
        let passed = format!("{} commands passed on it before, with this vellum", known.len());
        report(&image.label, &format!("{passed} (to run them again: rm -r {})", marks.display()));
    }
    Ok(())
}

/// Hosts that count instructions side by side; then, one after the other, those whose two CPUs race in real time.
fn each(groups: &[Vec<&Bench>], boot: impl Fn(&[&Bench]) -> Result<()> + Sync) -> Result<()> {
    let (races, counted): (Vec<_>, Vec<_>) = groups.iter().partition(|group| group[0].multi);
    side_by_side(&counted, |group| boot(group))?;
    races.into_iter().try_for_each(|group| boot(group))
}

fn oracles() -> [Bench; 2] {
    [Bench::plain(ORACLE, true), Bench::plain(ORACLE, false)]
}

/// One boot: the commands of `group`, all for the same host, and its kernel's log.
fn boot(cache: &Cache, programs: &Programs, image: &Image, group: &[&Bench]) -> Result<()> {
    let mut request = image.host();
    group[0].describe_host(&mut request);
    // Many commands share a boot, and a kernel that checks itself takes minutes for the oracle.
    request.time_limit *= u32::try_from(group.len() + 1).unwrap_or(u32::MAX);
    let host = request.label();
    request.commands = group.iter().map(|bench| bench.command("result.json")).collect();
    request.files = series::scripts()?;
    // Splats are looked for last, when everything has run.
    request.commands.push(["dmesg".to_owned()].to_vec());
    let mut done = 0;
    let mut said = Vec::new();
    let outcome = bed::run(cache, programs, &request, |frame| match frame {
        // Beside another host, only what is told at once is told as one.
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
    for (ran, line) in outcome.ran.iter().zip(&request.commands) {
        let code = ran.exit.as_ref().map_or(1, |exit| exit.code);
        if code != 0 {
            let said = String::from_utf8_lossy(&ran.stdout);
            let line = line.join(" ");
            return Err(Error::Series(format!(
                "{} {host}: `{line}` ended with {code}:\n{said}",
                image.label
            )));
        }
    }
    let log = outcome.ran.last().map(|ran| String::from_utf8_lossy(&ran.stdout).into_owned());
    let log = log.unwrap_or_default();
    if let Some(splat) = complaints(&log).first() {
        return Err(Error::Series(format!("{} {host}: the kernel complained:\n{splat}\n{log}", image.label)));
    }
    let passed = group.len();
    report(&image.label, &format!("boots on {host}; {passed} commands passed, no complaint from the kernel"));
    Ok(())
}
