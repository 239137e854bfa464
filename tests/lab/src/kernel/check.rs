//! `cargo lab check`: what a maintainer would try before reading a series.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::build::{self, Config, Image};
use super::series::{self, Bench, Series};
use super::tree::Tree;
use crate::artifacts::Programs;
use crate::bed::{self, HostKernel, Request};
use crate::cache::Cache;
use crate::wire::Frame;
use crate::{Error, Result, tool};

/// What every patched host has to survive besides its series' own tests.
const ORACLE: &str = "vellum test dirty-log --memory 32m --events 20k --seed 1";

/// Holds `series` to its promises; each step says what it saw.
pub fn check(cache: &Cache, series: &Series) -> Result<()> {
    let tree = Tree::open(cache, series.base)?;
    applies(cache, &tree, series)?;
    checkpatch(&tree, series)?;
    warnings(cache, &tree, series)?;
    let image = build::build(cache, series.base, std::slice::from_ref(series), None)?;
    boots(cache, &image, &series.about.test)
}

/// The series alone, then all of its base in their order; the tree is pristine afterwards.
pub fn applies(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    tree.carry(&series.patches)?;
    let stack = stack_of(series)?;
    tree.carry(&series::stacked(&stack))?;
    tree.carry(&[])?;
    report(
        &series.name,
        &format!(
            "applies to {} without fuzz, alone and in the stack of {}",
            tree.package.version,
            stack.len()
        ),
    );
    Ok(())
}

fn stack_of(series: &Series) -> Result<Vec<Series>> {
    Ok(series::all()?.into_iter().filter(|other| other.base == series.base).collect())
}

fn checkpatch(tree: &Tree, series: &Series) -> Result<()> {
    let mut perl = Command::new("perl");
    perl.arg("scripts/checkpatch.pl").args([
        "--no-signoff",
        "--terse",
        "--show-types",
        "--ignore",
        "FILE_PATH_CHANGES",
    ]);
    perl.args(&series.patches).current_dir(&tree.source);
    match tool::text(&mut perl) {
        Ok(_) => {
            report(&series.name, "checkpatch finds nothing");
            Ok(())
        }
        Err(Error::Failed { output, .. }) => {
            Err(Error::Series(format!("{}: checkpatch says:\n{output}", series.name)))
        }
        Err(error) => Err(error),
    }
}

/// Compiles what each patch touches with W=1, patch by patch, and compares its warnings with the pristine ones. The
/// object directory is its own: W=1 changes every command line.
pub fn warnings(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    build::require_tools()?;
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let objects = tree.home.join("build-w1");
    let mut targets = Vec::new();
    for patch in &series.patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        targets.extend(targets_of(&text));
    }
    targets.sort();
    targets.dedup();
    tree.carry(&[])?;
    build::configure(tree, &Config::new(series.base, None)?, &objects)?;
    let mut seen = compile(tree, &objects, &targets)?;
    for (index, patch) in series.patches.iter().enumerate() {
        tree.carry(&series.patches[..=index])?;
        let now = compile(tree, &objects, &targets)?;
        // An object that was not rebuilt repeats no warning: only what is new and is more than before counts.
        for (warning, count) in &now {
            if count > seen.get(warning).unwrap_or(&0) {
                return Err(Error::Series(format!("{} adds a warning (W=1): {warning}", patch.display())));
            }
        }
        for (warning, count) in now {
            seen.insert(warning, count);
        }
    }
    tree.carry(&[])?;
    let (patches, targets) = (series.patches.len(), targets.join(", "));
    report(&series.name, &format!("{patches} patches compile with W=1 without a new warning: {targets}"));
    Ok(())
}

/// What to compile for a patch: the objects of its C files, and all of KVM where KVM's own is changed: its generic half is
/// built from there, and its headers are included from everywhere in it.
fn targets_of(patch: &str) -> Vec<String> {
    let files = patch.lines().filter_map(|line| line.strip_prefix("+++ b/"));
    files
        .filter_map(|file| match Path::new(file).extension()?.to_str()? {
            "c" | "h" if file.contains("kvm") => Some("arch/x86/kvm/".to_owned()),
            "c" => Some(format!("{}.o", file.strip_suffix(".c")?)),
            _ => None,
        })
        .collect()
}

/// Warnings by text, with the line numbers taken out: a patch moves lines.
fn compile(tree: &Tree, objects: &Path, targets: &[String]) -> Result<BTreeMap<String, usize>> {
    let mut found = BTreeMap::new();
    if targets.is_empty() {
        return Ok(found);
    }
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = build::command(tree, objects);
    make.args([&format!("-j{jobs}"), "W=1"]).args(targets);
    tool::lines(&mut make, |line| {
        if let Some((place, text)) = line.split_once(": warning: ") {
            let file = place.split(':').next().unwrap_or(place);
            *found.entry(format!("{file}: {text}")).or_default() += 1;
        }
    })?;
    Ok(found)
}

/// Boots `image` in both modes, runs the oracle and the series' own tests, and looks for the kernel's complaints.
pub fn boots(cache: &Cache, image: &Image, tests: &[Bench]) -> Result<()> {
    let programs = Programs::build()?;
    for npt in [true, false] {
        let mut request = Request::new(HostKernel::Image(image.bzimage()));
        request.second_stage = npt;
        let own = tests.iter().filter(|test| test.npt == npt);
        for test in own.clone() {
            request.parameters.extend(test.parameters.iter().cloned());
            request.memory_mib = request.memory_mib.max(test.memory);
            request.hugepages = request.hugepages.max(test.hugepages);
        }
        let lines = std::iter::once(ORACLE).chain(own.map(|test| test.run.as_str()));
        request.commands = lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
        // Splats are looked for last, when everything has run.
        request.commands.push(["dmesg".to_owned()].to_vec());
        let outcome = bed::run(cache, &programs, &request, |frame| {
            if let Frame::Stderr(bytes) = frame {
                eprint!("{}", String::from_utf8_lossy(bytes));
            }
        })?;
        let mode = format!("npt={}", u8::from(npt));
        for (ran, line) in outcome.ran.iter().zip(&request.commands) {
            let code = ran.exit.as_ref().map_or(1, |exit| exit.code);
            if code != 0 {
                let said = String::from_utf8_lossy(&ran.stdout);
                return Err(Error::Series(format!(
                    "{} {mode}: `{}` ended with {code}:\n{said}",
                    image.label,
                    line.join(" ")
                )));
            }
        }
        let log = outcome
            .ran
            .last()
            .map(|ran| String::from_utf8_lossy(&ran.stdout).into_owned())
            .unwrap_or_default();
        if let Some(splat) = log.lines().find(|line| SPLATS.iter().any(|mark| line.contains(mark))) {
            return Err(Error::Series(format!(
                "{} {mode}: the kernel complained:\n{splat}\n{log}",
                image.label
            )));
        }
        report(
            &image.label,
            &format!(
                "boots with {mode}; {} commands passed, no complaint from the kernel",
                request.commands.len() - 1
            ),
        );
    }
    Ok(())
}

/// How the kernel begins a complaint.
const SPLATS: [&str; 8] = [
    "WARNING: ",
    "BUG: ",
    "kernel BUG at",
    "Oops",
    "possible recursive locking",
    "inconsistent lock state",
    "suspicious RCU usage",
    "INFO: task ",
];

fn report(what: &str, seen: &str) {
    println!("{what}: {seen}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_objects_and_kvm_for_its_headers() {
        let patch = "+++ b/arch/x86/mm/tlb.c\n+++ b/virt/kvm/kvm_main.c\n+++ b/Documentation/a.rst\n";
        assert_eq!(targets_of(patch), ["arch/x86/mm/tlb.o", "arch/x86/kvm/"]);
    }
}
