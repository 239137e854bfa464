//! `kernel-patches/`: a directory per base, with a directory per series and the file `series`,
//! which has the order in which they stack.
//!
//! `series.toml` in a series has its claim and how it is measured. FORMAT.md documents it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::bench::Bench;
use super::tree::{outside, paths_in};
use super::variants::VARIANTS;
use super::{BASES, Base, series_directory};
use crate::architecture::Architecture;
use crate::compare::calls::Call;
use crate::hosts::HOSTS;
use crate::{Error, Result};

/// One series.
#[derive(Debug)]
pub struct Series {
    /// The kernel that it is for.
    pub base: &'static Base,
    /// Its directory's name.
    pub name: String,
    /// Its patches, in order.
    pub patches: Vec<PathBuf>,
    /// Patches that follow if another series, named here, is applied too: the directories
    /// `with-NAME`.
    pub with: BTreeMap<String, Vec<PathBuf>>,
    /// Planted faults on top of the series, `planted/NAME.patch`, which its tool must catch.
    pub planted: Vec<PathBuf>,
    /// Its series.toml.
    pub about: About,
}

/// `series.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct About {
    /// What improves, in one line.
    pub claim: String,
    /// The figure that shows it, for `cargo lab list`.
    pub headline: String,
    /// The benchmarks that show it.
    #[serde(default)]
    pub bench: Vec<Bench>,
    /// A program in `kernel-patches/tools` and its arguments, split at blanks. It runs the patched
    /// code in user space and must exit with 0. `{source}` stands for the tree with the series.
    pub tool: Option<String>,
    /// What `cargo lab explore` finds without the series, and not with it.
    #[serde(default)]
    pub explore: Vec<Explored>,
    /// The mainline commit that already has the change. Stable kernels should take that commit.
    pub upstream: Option<String>,
    /// Commands that must exit with 0 on the patched kernel, besides the boot and the oracle.
    #[serde(default)]
    pub test: Vec<Bench>,
}

/// Runs of `cargo lab explore`, from seed 1 on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Explored {
    /// The harness's setup.
    pub setup: String,
    /// Whose code to run, if it is not that of the series' architecture.
    pub arch: Option<Architecture>,
    /// The fault, as the table of `cargo lab explore BASE --table` names it.
    pub fault: Option<String>,
    /// The number of random runs. Without the series one of them fails. With it none fails, nor does
    /// any of ten times as many as the fault took.
    pub runs: u64,
    /// Other series of the base that the kernels have, because a fault hides this one.
    #[serde(default)]
    pub with: Vec<String>,
    /// What the failing run says.
    pub says: String,
    /// A planted fault: the run fails with the series and this on top.
    pub planted: Option<String>,
}

/// Every series of every base, in stacking order.
pub fn all() -> Result<Vec<Series>> {
    all_in(&series_directory())
}

fn all_in(root: &Path) -> Result<Vec<Series>> {
    let mut found = Vec::new();
    for base in &BASES {
        let order = root.join(base.name).join("series");
        if !order.exists() {
            continue;
        }
        let text = fs::read_to_string(&order).map_err(Error::file("read", &order))?;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            found.push(read(root, base, line)?);
        }
    }
    Ok(found)
}

/// The series `name`, or `BASE/name` if several bases have one.
pub fn named(name: &str) -> Result<Series> {
    let mut all = all()?;
    let is = |series: &Series| series.name == name || format!("{}/{}", series.base.name, series.name) == name;
    match all.iter().filter(|series| is(series)).count() {
        1 => Ok(all.swap_remove(all.iter().position(is).expect("one was counted"))),
        0 => {
            let known: Vec<String> =
                all.iter().map(|series| format!("{}/{}", series.base.name, series.name)).collect();
            let known = if known.is_empty() { "there is none yet".into() } else { known.join(", ") };
            Err(Error::Usage(format!("no series {name}: {known} (kernel-patches/BASE/series lists them)")))
        }
        _ => Err(Error::Usage(format!("several bases have a series {name}: say BASE/{name}"))),
    }
}

/// The series `names` of `base`, in stacking order whatever the order of the names. `all` stands
/// for all of them.
pub fn of_base(base: &Base, names: &[String]) -> Result<Vec<Series>> {
    let mut of_base: Vec<Series> = all()?.into_iter().filter(|series| series.base == base).collect();
    if names == ["all"] {
        return Ok(of_base);
    }
    if let Some(unknown) = names.iter().find(|name| !of_base.iter().any(|series| series.name == **name)) {
        let known: Vec<&str> = of_base.iter().map(|series| series.name.as_str()).collect();
        return Err(Error::Usage(format!(
            "{} has no series {unknown}; it has: {}",
            base.name,
            known.join(", ")
        )));
    }
    of_base.retain(|series| names.contains(&series.name));
    Ok(of_base)
}

impl Series {
    /// Its architecture: Arm if it changes files of that architecture only.
    pub fn architecture(&self) -> Result<Architecture> {
        let mut files = BTreeSet::new();
        for patch in &self.patches {
            let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
            files.extend(paths_in(&text).map_err(|path| outside(patch, &path))?);
        }
        // Tests and documents in the kernel do not decide the architecture.
        files.retain(|file| !file.starts_with("tools") && !file.starts_with("Documentation"));
        let arm = !files.is_empty() && files.iter().all(|file| file.starts_with("arch/arm64"));
        Ok(if arm { Architecture::Arm } else { Architecture::X86 })
    }
}

impl Series {
    /// Whether it has the planted fault `name`.
    pub fn has_planted(&self, name: &str) -> bool {
        self.planted_at(name).is_some()
    }

    fn planted_at(&self, name: &str) -> Option<&PathBuf> {
        let file = planted_file(name);
        self.planted.iter().find(|path| path.ends_with(&file))
    }

    /// The series with its planted fault `name` on top.
    pub fn with_planted(&self, name: &str) -> Result<Self> {
        let planted = self.planted_at(name).ok_or_else(|| {
            Error::Usage(format!("{}/{}: no {}", self.base.name, self.name, planted_file(name)))
        })?;
        Ok(Self {
            base: self.base,
            name: format!("{}+{name}", self.name),
            patches: self.patches.iter().chain([planted]).cloned().collect(),
            with: self.with.clone(),
            planted: Vec::new(),
            about: self.about.clone(),
        })
    }
}

/// The default architecture of a kernel with `series`.
pub fn architecture(series: &[Series]) -> Result<Architecture> {
    let all = series.iter().map(Series::architecture).collect::<Result<Vec<_>>>()?;
    let arm = !all.is_empty() && all.iter().all(|one| *one == Architecture::Arm);
    Ok(if arm { Architecture::Arm } else { Architecture::X86 })
}

/// All patches of `series`, stacked: each series' own patches, then its additions for the series
/// below it.
pub fn stacked(series: &[Series]) -> Vec<PathBuf> {
    let mut patches = Vec::new();
    for (index, top) in series.iter().enumerate() {
        patches.extend_from_slice(&top.patches);
        let below = series[..index].iter().filter_map(|below| top.with.get(&below.name));
        patches.extend(below.flatten().cloned());
    }
    patches
}

/// The series `names`, or all series if there are no names.
pub fn chosen(names: &[String]) -> Result<Vec<Series>> {
    if names.is_empty() { all() } else { names.iter().map(|name| named(name)).collect() }
}

fn read(root: &Path, base: &'static Base, name: &str) -> Result<Series> {
    let dir = root.join(base.name).join(name);
    let patches = patches_in(&dir)?;
    let mut with = BTreeMap::new();
    for entry in fs::read_dir(&dir).map_err(Error::file("read", &dir))?.flatten() {
        if let Some(other) = entry.file_name().to_str().and_then(|name| name.strip_prefix("with-")) {
            with.insert(other.to_owned(), patches_in(&entry.path())?);
        }
    }
    let about = dir.join("series.toml");
    let text = fs::read_to_string(&about).map_err(Error::file("read", &about))?;
    let wrong = |why: String| Error::Series(format!("{}: {why}", dir.join("series.toml").display()));
    let about: About = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let counts = |bench: &Bench| !bench.locks.is_empty() || !bench.calls.is_empty();
    if let Some(bench) = about.bench.iter().find(|bench| bench.multi && !counts(bench)) {
        let why = "multi is for [[test]] and for a [[bench]] with locks or calls: other figures come from one CPU, whose clock counts \
                   instructions";
        return Err(wrong(format!("`{}`: {why}", bench.run)));
    }
    let calls = about.bench.iter().flat_map(|bench| &bench.calls);
    calls.map(|call| Call::parse(call)).try_for_each(|call| call.map(drop)).map_err(wrong)?;
    if about.bench.iter().chain(&about.test).any(|bench| bench.run.trim().is_empty()) {
        return Err(wrong("`run` is empty: it is a command".into()));
    }
    for command in about.bench.iter().chain(&about.test) {
        let why = match command {
            command if command.guest.is_some() != command.run.contains("{guest}") => {
                "`guest` is the series of the kernel that {guest} in the command stands for: both, or neither"
            }
            command if command.guest_variant.is_some() && command.guest.is_none() => {
                "guest-variant is what the kernel of `guest` is configured for: there is no `guest`"
            }
            command if command.guest_planted.is_some() && command.guest.is_none() => {
                "guest-planted is a mistake that the kernel of `guest` has: there is no `guest`"
            }
            command if command.guest_variant.as_deref().is_some_and(|name| !VARIANTS.contains(&name)) => {
                "`guest-variant` is one that `cargo lab kernel build --variant` knows"
            }
            _ => continue,
        };
        return Err(wrong(format!("`{}`: {why}", command.run)));
    }
    for bench in &about.bench {
        let emulated = !bench.beds.is_empty() && !bench.beds.iter().any(|bed| bed == "metal");
        let why = match bench {
            bench if bench.bed.is_some() || bench.sees_a_mistake() || bench.says.is_some() => {
                "bed, planted, guest-planted and says are for [[test]]: a comparison chooses its host, and nobody wants figures of a mistake"
            }
            bench if bench.cpu.is_some() && bench.beds.len() != 1 => {
                "cpu is an emulator's model: `beds` has to name that one bed"
            }
            bench if !bench.calls.is_empty() && !emulated => {
                "calls are for emulated hosts: `beds` has to name some, and not metal"
            }
            bench if (bench.guest.is_some() || bench.after.is_some() || bench.timed) && !emulated => {
                "guest, after and timed are for emulated hosts: `beds` has to name some, and not metal"
            }
            _ => continue,
        };
        return Err(wrong(format!("`{}`: {why}", bench.run)));
    }
    for test in &about.test {
        let why = match test {
            test if test.after.is_some() || test.timed => {
                "after and timed are for [[bench]]: a test has no figures"
            }
            test if !test.beds.is_empty() => "beds are for [[bench]]: a test has one `bed`",
            test if test.bed.as_ref().is_some_and(|name| !HOSTS.iter().any(|bed| bed.name() == name)) => {
                "`bed` is one of the emulated hosts svm, vmx and arm64"
            }
            test if test.sees_a_mistake() != test.says.is_some() => {
                "`planted` or `guest-planted` is a mistake, and `says` what is said of it: both, or neither"
            }
            test if test.planted.as_ref().is_some_and(|name| !dir.join(planted_file(name)).is_file()) => {
                "`planted` is a file of planted/, without its .patch"
            }
            test if test
                .guest
                .as_ref()
                .zip(test.guest_planted.as_ref())
                .is_some_and(|(guest, name)| !root.join(guest).join(planted_file(name)).is_file()) =>
            {
                "`guest-planted` is a file of planted/ of the guest's series, without its .patch"
            }
            test if test.cpu.is_some() => "cpu is for [[bench]]: tests run on the bed's own",
            test if !test.calls.is_empty() => "calls are for [[bench]]: a test has no figures",
            test if !test.locks.is_empty() => "locks are for [[bench]]: a test has no figures",
            test if test.own_base => "own-base is for [[bench]]: tests run on the series' own base",
            _ => continue,
        };
        return Err(wrong(format!("`{}`: {why}", test.run)));
    }
    let planted = dir.join(PLANTED);
    let planted = if planted.is_dir() { patches_in(&planted)? } else { Vec::new() };
    let explored = |path: &Path| {
        let mut named = about.explore.iter().filter_map(|explored| explored.planted.as_deref());
        named.any(|name| path.file_stem().is_some_and(|stem| stem == name))
    };
    if about.tool.is_none()
        && let Some(path) = planted.iter().find(|path| !explored(path))
    {
        let path = path.display();
        return Err(wrong(format!("{path} is a mistake that no `tool` and no [[explore]] catches")));
    }
    let is_missing = |explored: &&Explored| {
        explored.planted.as_ref().is_some_and(|name| !dir.join(planted_file(name)).is_file())
    };
    if let Some(explored) = about.explore.iter().find(is_missing) {
        return Err(wrong(format!(
            "[[explore]] of {}: `planted` is a file of planted/, without its .patch",
            explored.setup
        )));
    }
    Ok(Series { base, name: name.to_owned(), patches, with, planted, about })
}

/// The directory of a series' planted faults.
const PLANTED: &str = "planted";

/// The path of the planted fault `name` in a series' directory.
fn planted_file(name: &str) -> String {
    format!("{PLANTED}/{name}.patch")
}

fn patches_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
    let mut patches: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "patch"))
        .collect();
    patches.sort();
    if patches.is_empty() {
        return Err(Error::Series(format!("{} holds no NNNN-title.patch", dir.display())));
    }
    Ok(patches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_committed_can_be_read() {
        let all = all().unwrap();
        let setups = fs::read_to_string(series_directory().join("tools/explore/drive.c")).unwrap();
        for series in &all {
            assert!(!series.about.claim.is_empty(), "{}", series.name);
            // A with- directory of an unknown series would never be applied, unnoticed.
            let below = all.iter().take_while(|other| other.name != series.name);
            let known: Vec<&str> =
                below.filter(|other| other.base == series.base).map(|other| other.name.as_str()).collect();
            for name in series.with.keys() {
                assert!(
                    known.contains(&name.as_str()),
                    "{}: with-{name}, but below it are {known:?}",
                    series.name
                );
            }
            for explored in &series.about.explore {
                of_base(series.base, &explored.with).unwrap();
                let setup = format!("{{ \"{}\", {{", explored.setup);
                assert!(setups.contains(&setup), "{}: no setup {}", series.name, explored.setup);
            }
            let beds = series.about.bench.iter().flat_map(|bench| &bench.beds);
            let commands = series.about.bench.iter().chain(&series.about.test);
            for guest in commands.filter_map(|command| command.guest.as_ref()) {
                assert!(
                    named(guest).is_ok_and(|guest| !guest.patches.is_empty()),
                    "{}: {guest}",
                    series.name
                );
            }
            beds.for_each(|bed| {
                assert!(["svm", "vmx", "arm64", "metal"].contains(&bed.as_str()), "{}: {bed}", series.name)
            });
        }
    }

    #[test]
    fn what_a_series_adds_to_another_is_applied_only_with_it() {
        let series = |name: &str, with: &[&str]| Series {
            base: &BASES[0],
            name: name.into(),
            patches: vec![format!("{name}/1").into()],
            with: with
                .iter()
                .map(|other| ((*other).into(), vec![format!("{name}/{other}").into()]))
                .collect(),
            planted: Vec::new(),
            about: toml::from_str("claim = 'x'\nheadline = 'f'").unwrap(),
        };
        let stack = [series("a", &[]), series("b", &["a", "c"]), series("c", &["b"])];
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(stacked(&stack), paths(&["a/1", "b/1", "b/a", "c/1", "c/b"]));
        assert_eq!(stacked(&stack[1..2]), paths(&["b/1"]));
    }

    #[test]
    fn a_series_that_changes_arms_files_alone_is_for_arm() {
        let of = |name: &str| named(name).unwrap().architecture().unwrap();
        assert_eq!(of("5.10/arm64-stage2"), Architecture::Arm);
        assert_eq!(of("5.10/pte-list-desc"), Architecture::X86);
        let both = ["5.10/arm64-stage2", "5.10/pte-list-desc"].map(|name| named(name).unwrap());
        assert_eq!(architecture(&both).unwrap(), Architecture::X86);
        assert_eq!(architecture(&both[..1]).unwrap(), Architecture::Arm);
        assert_eq!(architecture(&[]).unwrap(), Architecture::X86);
    }

    #[test]
    fn a_series_says_what_it_claims_and_how_to_see_it() {
        let about: About = toml::from_str(
            "claim = 'fewer'\nheadline = 'f'\n[[bench]]\nnpt = false\nrun = 'vellum bench x --json {json}'\nparameters = ['kvm.a=1']\n",
        )
        .unwrap();
        assert_eq!((about.bench.len(), about.bench[0].npt, about.bench[0].memory), (1, false, 2048));
        assert!(
            toml::from_str::<About>("claim = ''\nheadline = ''\nbenhc = 1").is_err(),
            "a misspelt key must be refused"
        );
    }
}
