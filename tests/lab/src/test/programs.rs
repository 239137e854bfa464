//! The test programs and where each can run.
//!
//! Cargo lists the programs. Those with a harness of their own keep a record (`support::record`),
//! and `[package.metadata.beds]` in their package's Cargo.toml says where they run. The others use
//! libtest and run on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::architecture::Architecture;
use crate::artifacts::{self, Executable};
use crate::{Error, Result};

/// Where a program that keeps a record can run. Each also runs on this machine, and reports there
/// what it lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// Only on this machine.
    Local,
    /// On every test host: it needs KVM.
    Kvm,
    /// On test hosts with Linux guests.
    Linux,
    /// On this machine, where it boots emulated hosts.
    Emulated,
    /// On emulated hosts whose kernel is replaced, one for each test.
    Replaced,
}

/// The part of a Cargo.toml that is read.
#[derive(Deserialize)]
struct Manifest {
    package: Package,
    #[serde(default)]
    test: Vec<Target>,
}

#[derive(Deserialize)]
struct Package {
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
struct Metadata {
    #[serde(default, rename = "beds")]
    hosts: Hosts,
}

/// The programs by where they run.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Hosts {
    local: Vec<String>,
    kvm: Vec<String>,
    linux: Vec<String>,
    emulated: Vec<String>,
    replaced: Vec<String>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    #[serde(default = "yes")]
    harness: bool,
}

fn yes() -> bool {
    true
}

/// The programs of a package that keep a record, and where they run.
pub fn places(manifest: &Path) -> Result<BTreeMap<String, Place>> {
    let text = fs::read_to_string(manifest).map_err(Error::file("read", manifest))?;
    places_in(&text).map_err(|why| Error::Usage(format!("{}: {why}", manifest.display())))
}

fn places_in(manifest: &str) -> std::result::Result<BTreeMap<String, Place>, String> {
    let Manifest { package, test } = toml::from_str(manifest).map_err(|error| error.to_string())?;
    let Hosts { local, kvm, linux, emulated, replaced } = package.metadata.hosts;
    let lists = [
        (local, Place::Local),
        (kvm, Place::Kvm),
        (linux, Place::Linux),
        (emulated, Place::Emulated),
        (replaced, Place::Replaced),
    ];
    let mut places = BTreeMap::new();
    for (name, place) in
        lists.into_iter().flat_map(|(names, place)| names.into_iter().map(move |n| (n, place)))
    {
        if places.insert(name.clone(), place).is_some() {
            return Err(format!("[package.metadata.beds] has {name} twice"));
        }
    }
    let own: Vec<String> = test.into_iter().filter(|test| !test.harness).map(|test| test.name).collect();
    if let Some(name) = own.iter().find(|name| !places.contains_key(*name)) {
        return Err(format!(
            "the test program {name} has a harness of its own and is not in [package.metadata.beds]"
        ));
    }
    if let Some(name) = places.keys().find(|name| !own.contains(name)) {
        return Err(format!(
            "[package.metadata.beds] has {name}, which is no test program with `harness = false`"
        ));
    }
    Ok(places)
}

/// vellum's programs for `place`, built static.
pub fn built_for(place: Place) -> Result<Vec<Executable>> {
    built_at(place, "vellum", "Cargo.toml", artifacts::build_static)
}

/// The programs that run on any KVM of this architecture, built static for it. Programs with guest
/// code of their own are for x86-64.
pub fn built_on(architecture: Architecture) -> Result<Vec<Executable>> {
    match architecture {
        Architecture::X86 => built_for(Place::Kvm),
        Architecture::Arm => named_for(architecture, &ON_ARM),
    }
}

/// Programs without x86-64 guest code.
const ON_ARM: [&str; 3] = ["dirty_log", "run", "workload"];

/// The program with Linux guests, built static for hosts of `architecture`.
pub fn linux_on(architecture: Architecture) -> Result<Vec<Executable>> {
    named_for(architecture, &["linux"])
}

/// vellum's programs `names`, built static.
pub fn named(names: &[&str]) -> Result<Vec<Executable>> {
    named_for(Architecture::X86, names)
}

/// The same for `architecture`.
fn named_for(architecture: Architecture, names: &[&str]) -> Result<Vec<Executable>> {
    let arguments = ["test", "--no-run", "--package", "vellum"].into_iter();
    let arguments: Vec<&str> = arguments.chain(names.iter().flat_map(|name| ["--test", name])).collect();
    Ok(artifacts::build_for(architecture, &arguments)?.into_iter().filter(|program| program.test).collect())
}

/// The laboratory's own test programs, which boot emulated hosts.
pub fn promises() -> Result<Vec<Executable>> {
    built_at(Place::Emulated, "lab", "tests/lab/Cargo.toml", artifacts::build)
}

fn built_at(
    place: Place,
    package: &str,
    manifest: &str,
    build: impl Fn(&[&str]) -> Result<Vec<Executable>>,
) -> Result<Vec<Executable>> {
    let places = places(&artifacts::workspace().join(manifest))?;
    let mut arguments = vec!["test", "--no-run", "--package", package];
    let names = places.iter().filter(|(_, at)| **at == place).map(|(name, _)| name.as_str());
    arguments.extend(names.flat_map(|name| ["--test", name]));
    // Filters out the programs that the tests start, which are built too.
    Ok(build(&arguments)?.into_iter().filter(|program| program.test).collect())
}

/// Every test program of the workspace, and where it runs if it keeps a record.
pub fn built_here() -> Result<Vec<(Executable, Option<Place>)>> {
    let mut programs: Vec<Executable> = artifacts::build(&["test", "--workspace", "--no-run"])?;
    programs.retain(|program| program.test);
    programs.sort_by(|a, b| (&a.manifest, &a.kind, &a.name).cmp(&(&b.manifest, &b.kind, &b.name)));
    let place = |program: &Executable| -> Result<Option<Place>> {
        if program.kind != "test" {
            return Ok(None);
        }
        Ok(places(&program.manifest)?.get(&program.name).copied())
    };
    programs.into_iter().map(|program| Ok((program.clone(), place(&program)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "[package]\nname = \"p\"\n[package.metadata.beds]\nkvm = [\"boot\"]\n\
        [[test]]\nname = \"boot\"\nharness = false\n[[test]]\nname = \"unit\"\n";

    #[test]
    fn programs_are_where_they_are_declared() {
        assert_eq!(places_in(MANIFEST), Ok(BTreeMap::from([("boot".into(), Place::Kvm)])));
    }

    #[test]
    fn a_program_that_is_declared_nowhere_twice_or_in_vain_is_refused() {
        let planted = format!("{MANIFEST}[[test]]\nname = \"planted\"\nharness = false\n");
        assert!(places_in(&planted).unwrap_err().contains("planted has a harness of its own"));
        let twice = MANIFEST.replace("kvm = ", "linux = [\"boot\"]\nkvm = ");
        assert!(places_in(&twice).unwrap_err().contains("boot twice"));
        let vain = MANIFEST.replace("[\"boot\"]", "[\"boot\", \"gone\"]");
        assert!(places_in(&vain).unwrap_err().contains("gone, which is no test program"));
        assert!(places_in(&MANIFEST.replace("kvm =", "kvn =")).unwrap_err().contains("kvn"));
    }

    #[test]
    fn every_program_of_the_workspace_is_declared() {
        let mut all = Vec::new();
        for package in [".", "guest-agent", "tests/support", "tests/lab"] {
            let places = places(&artifacts::workspace().join(package).join("Cargo.toml")).unwrap();
            all.extend(places.into_values());
        }
        for place in [Place::Local, Place::Kvm, Place::Linux, Place::Emulated, Place::Replaced] {
            assert!(all.contains(&place), "{place:?} has no program");
        }
    }

    /// rustc silently removes a function with its own `#[test]` from a program with another
    /// harness.
    #[test]
    fn a_test_of_a_program_that_keeps_a_record_is_one_of_support() {
        let loses = |source: &str| {
            let imports = source.split("use support::").skip(1).filter_map(|rest| rest.split(';').next());
            let of_support = imports
                .flat_map(|import| import.split(|c: char| !c.is_alphanumeric()))
                .any(|word| word == "test");
            source.lines().any(|line| line.starts_with("#[test")) && !of_support
        };
        assert!(loses("use support::Failed;\n\n#[test]\nfn lost() {}\n"));
        assert!(!loses("use std::fs;\n\nuse support::{Failed, test};\n\n#[test]\nfn kept() {}\n"));
        let mut seen = 0;
        for package in [".", "tests/support", "tests/lab"] {
            let package = artifacts::workspace().join(package);
            for name in places(&package.join("Cargo.toml")).unwrap().into_keys() {
                let tests = package.join("tests");
                let mut sources = vec![tests.join(format!("{name}.rs"))];
                if tests.join(&name).is_dir() {
                    sources =
                        artifacts::files_below(&[tests.join(&name)], |file| file.ends_with(".rs")).unwrap();
                }
                for path in sources {
                    assert!(!loses(&fs::read_to_string(&path).unwrap()), "{}", path.display());
                    seen += 1;
                }
            }
        }
        assert!(seen > 30, "{seen} files");
    }
}
