//! `kernel-patches/`: a directory a base, in it a directory a series, and `series`, the order in which they stack.
//!
//! `series.toml` in a series says what it claims and how that is measured; its README documents the form.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::tree::{outside, paths_in};
use super::{BASES, Base};
use crate::architecture::Architecture;
use crate::bed::{Emulated, Pace, Request};
use crate::compare::calls::Call;
use crate::{Error, Result, artifacts};

/// One series.
#[derive(Debug)]
pub struct Series {
    /// What it is written against.
    pub base: &'static Base,
    /// Its directory's name.
    pub name: String,
    /// Its patches in order.
    pub patches: Vec<PathBuf>,
    /// What follows them where another series, named here, is applied as well: the directories `with-NAME`.
    pub with: BTreeMap<String, Vec<PathBuf>>,
    /// Mistakes on top of it, `planted/NAME.patch`, which its tool must catch.
    pub planted: Vec<PathBuf>,
    /// What it says of itself.
    pub about: About,
}

/// `series.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct About {
    /// One line: what becomes better.
    pub claim: String,
    /// The figure that says so, for `cargo lab list`.
    pub headline: String,
    /// What shows it.
    #[serde(default)]
    pub bench: Vec<Bench>,
    /// A program in `kernel-patches/tools` and its arguments, split at blanks: it runs the patched code in user space, and
    /// must exit with 0. `{source}` is the tree that carries the series.
    pub tool: Option<String>,
    /// Commands that must exit with 0 on the patched kernel, beyond the boot and the oracle.
    #[serde(default)]
    pub test: Vec<Bench>,
}

/// A command inside an emulated host.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Bench {
    /// The command, split at blanks. `{json}` in it is where it is to write its result.
    pub run: String,
    /// The host's second stage: `npt` of kvm-amd, `ept` of kvm-intel.
    #[serde(default = "on")]
    pub npt: bool,
    /// The beds that it is for, `metal` among them, where not for all: what takes minutes on QEMU takes hours on Bochs.
    #[serde(default)]
    pub beds: Vec<String>,
    /// Module parameters of the host's kernel.
    #[serde(default)]
    pub parameters: Vec<String>,
    /// The host's memory in MiB.
    #[serde(default = "two_gibibytes")]
    pub memory: u32,
    /// 2 MiB pages that the host reserves.
    #[serde(default)]
    pub hugepages: u32,
    /// Two CPUs that run at once, for races: such a host's clock counts no instructions, so a benchmark on it has to name
    /// `locks` or `calls`.
    #[serde(default)]
    pub multi: bool,
    /// Locks that are watched: parts of their names in /proc/lock_stat. The kernels are then built with `--variant lock-stat`.
    #[serde(default)]
    pub locks: Vec<String>,
    /// Functions of the host's kernel whose calls are counted, and with `NAME:N` the sum of their N-th argument: nothing is timed then.
    #[serde(default)]
    pub calls: Vec<String>,
    /// On the series' own base alone: a kernel of another does so little of this work that its host idles.
    #[serde(default)]
    pub own_base: bool,
    /// The series whose kernel a Linux guest in there has, `BASE/NAME`; `{guest}` in the command is where that is and its initramfs.
    #[serde(default)]
    pub guest: Option<String>,
    /// What the command has besides on the patched kernel, which the pristine one would refuse.
    #[serde(default)]
    pub after: Option<String>,
    /// The command times parts of what it does, and looks how long the host idled in these: what else it ran is not measured.
    #[serde(default)]
    pub timed: bool,
}

impl Bench {
    /// `run` on a host without more to it.
    pub fn plain(run: &str, npt: bool) -> Self {
        Self {
            run: run.to_owned(),
            npt,
            beds: Vec::new(),
            parameters: Vec::new(),
            memory: two_gibibytes(),
            hugepages: 0,
            multi: false,
            locks: Vec::new(),
            calls: Vec::new(),
            own_base: false,
            guest: None,
            after: None,
            timed: false,
        }
    }

    /// Its words, with `{json}` as `result`.
    pub fn command(&self, result: &str) -> Vec<String> {
        let guest = self.guest.as_ref().map_or(String::new(), |guest| {
            let [kernel, initrd] = guest_files(guest);
            format!("--kernel {kernel} --initrd {initrd}")
        });
        let run = self.run.replace("{guest}", &guest);
        run.split_whitespace().map(|word| word.replace("{json}", result)).collect()
    }

    /// The same on the patched kernel.
    pub fn on_the_patched(&self) -> Self {
        let after = self.after.as_ref().map_or(String::new(), |after| format!(" {after}"));
        Self { run: format!("{}{after}", self.run), ..self.clone() }
    }

    /// Whether it is for hosts of this kind.
    pub fn runs_on(&self, bed: Emulated) -> bool {
        bed.has_pace(self.pace()).is_ok() && self.is_for(bed.name())
    }

    fn pace(&self) -> Pace {
        if self.multi { Pace::Races } else { Pace::Counted }
    }

    /// Whether its `beds` have this one.
    pub fn is_for(&self, bed: &str) -> bool {
        self.beds.is_empty() || self.beds.iter().any(|name| name == bed)
    }

    /// Whether one boot can serve both.
    pub fn same_host(&self, other: &Self) -> bool {
        let host =
            |b: &Self| (b.npt, b.parameters.clone(), b.memory, b.hugepages, b.multi, b.locks.is_empty());
        host(self) == host(other)
    }

    /// Makes `request`'s host the one that this needs.
    pub fn describe_host(&self, request: &mut Request) {
        request.second_stage = self.npt;
        request.parameters = self.parameters.clone();
        request.memory_mib = self.memory;
        request.hugepages = self.hugepages;
        request.pace = self.pace();
    }
}

/// Where in a host the kernel and the initramfs of the guests of the series `name` are.
pub fn guest_files(name: &str) -> [String; 2] {
    ["bzImage", "initrd"].map(|file| format!("/guests/{name}/{file}"))
}

/// Commands that one boot can serve, together.
pub fn by_host<'a>(benches: &[&'a Bench]) -> Vec<Vec<&'a Bench>> {
    let mut groups: Vec<Vec<&Bench>> = Vec::new();
    for &bench in benches {
        match groups.iter_mut().find(|group| group[0].same_host(bench)) {
            Some(group) => group.push(bench),
            None => groups.push(vec![bench]),
        }
    }
    groups
}

fn on() -> bool {
    true
}

fn two_gibibytes() -> u32 {
    2048
}

/// Where the series are.
pub fn directory() -> PathBuf {
    artifacts::workspace().join("kernel-patches")
}

/// The scripts that tests run inside a host, and where they are there: `tools/NAME.sh` is `/tools/NAME.sh`.
pub fn scripts() -> Result<Vec<(PathBuf, String)>> {
    let dir = directory().join("tools");
    let entries = fs::read_dir(&dir).map_err(Error::file("read", &dir))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut scripts: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "sh")).collect();
    scripts.sort();
    Ok(scripts
        .into_iter()
        .map(|path| {
            let inside = format!("/tools/{}", path.file_name().unwrap_or_default().to_string_lossy());
            (path, inside)
        })
        .collect())
}

/// Every series of every base, in stacking order.
pub fn all() -> Result<Vec<Series>> {
    all_in(&directory())
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

/// The series called `name`, or `BASE/name` where several bases have one.
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

/// The series of `base` called `names`, in stacking order, whatever the order of the names; `all` is all of them.
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
    /// What it is for: Arm, where it changes that architecture's files alone.
    pub fn architecture(&self) -> Result<Architecture> {
        let mut files = BTreeSet::new();
        for patch in &self.patches {
            let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
            files.extend(paths_in(&text).map_err(|path| outside(patch, &path))?);
        }
        // The kernel's tests and documents are of whatever is tested and documented in them.
        files.retain(|file| !file.starts_with("tools") && !file.starts_with("Documentation"));
        let arm = !files.is_empty() && files.iter().all(|file| file.starts_with("arch/arm64"));
        Ok(if arm { Architecture::Arm } else { Architecture::X86 })
    }
}

/// What a kernel with `series` is built for, where nobody says so.
pub fn architecture(series: &[Series]) -> Result<Architecture> {
    let all = series.iter().map(Series::architecture).collect::<Result<Vec<_>>>()?;
    let arm = !all.is_empty() && all.iter().all(|one| *one == Architecture::Arm);
    Ok(if arm { Architecture::Arm } else { Architecture::X86 })
}

/// The patches of `series` on top of each other: each series' own, then what it adds to those below it.
pub fn stacked(series: &[Series]) -> Vec<PathBuf> {
    let mut patches = Vec::new();
    for (index, top) in series.iter().enumerate() {
        patches.extend_from_slice(&top.patches);
        let below = series[..index].iter().filter_map(|below| top.with.get(&below.name));
        patches.extend(below.flatten().cloned());
    }
    patches
}

/// The series called `names`, or all of them for none.
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
    for bench in &about.bench {
        let emulated = !bench.beds.is_empty() && !bench.beds.iter().any(|bed| bed == "metal");
        let why = match bench {
            bench if bench.guest.is_some() != bench.run.contains("{guest}") => {
                "`guest` is the series of the kernel that {guest} in the command stands for: both, or neither"
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
            test if test.guest.is_some() || test.after.is_some() || test.timed => {
                "guest, after and timed are for [[bench]]: a test has no figures"
            }
            test if !test.beds.is_empty() => "beds are for [[bench]]: tests run on svm, or on arm64",
            test if !test.calls.is_empty() => "calls are for [[bench]]: a test has no figures",
            test if !test.locks.is_empty() => "locks are for [[bench]]: a test has no figures",
            test if test.own_base => "own-base is for [[bench]]: tests run on the series' own base",
            _ => continue,
        };
        return Err(wrong(format!("`{}`: {why}", test.run)));
    }
    let planted = dir.join("planted");
    let planted = if planted.is_dir() { patches_in(&planted)? } else { Vec::new() };
    if !planted.is_empty() && about.tool.is_none() {
        return Err(wrong("planted/ has mistakes, and there is no `tool` to catch them".into()));
    }
    Ok(Series { base, name: name.to_owned(), patches, with, planted, about })
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
        for series in &all {
            assert!(!series.about.claim.is_empty(), "{}", series.name);
            // A name that nobody has would never be applied, and nobody would notice.
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
            let beds = series.about.bench.iter().flat_map(|bench| &bench.beds);
            for guest in series.about.bench.iter().filter_map(|bench| bench.guest.as_ref()) {
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
    fn a_guest_has_its_place_in_the_command_and_the_patched_kernel_its_own_words() {
        let about = |more: &str| {
            let text = format!(
                "claim = 'x'\nheadline = 'f'\n[[bench]]\nrun = 'tasks {{guest}} --json {{json}}'\nbeds = ['vmx']\n{more}"
            );
            toml::from_str::<About>(&text).unwrap().bench.remove(0)
        };
        let bench = about("guest = '6.12/g'\nafter = '--cr3-cache on'");
        let words = "tasks --kernel /guests/6.12/g/bzImage --initrd /guests/6.12/g/initrd --json 0.json";
        assert_eq!(bench.command("0.json").join(" "), words);
        assert_eq!(bench.on_the_patched().command("0.json").join(" "), format!("{words} --cr3-cache on"));
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
    fn commands_with_the_same_host_share_a_boot() {
        let bench = |text: &str| toml::from_str::<Bench>(text).unwrap();
        let benches =
            [bench("run='a'"), bench("run='b'\nnpt=false"), bench("run='c'"), bench("run='d'\nmulti=true")];
        let groups: Vec<Vec<&str>> = by_host(&benches.iter().collect::<Vec<_>>())
            .iter()
            .map(|group| group.iter().map(|bench| bench.run.as_str()).collect())
            .collect();
        assert_eq!(groups, [vec!["a", "c"], vec!["b"], vec!["d"]]);
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
