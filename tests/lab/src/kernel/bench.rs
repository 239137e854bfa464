//! A series' commands inside emulated hosts: benchmarks ([`super::series::About::bench`]) and tests
//! that must pass ([`super::series::About::test`]), with the hosts that they need.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::series_directory;
use crate::hosts::{Emulated, HOSTS, HUGEPAGE, Pace, Request};
use crate::{Error, Result};

/// A command inside an emulated host.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Bench {
    /// The command, split at blanks. `{json}` stands for the file for its result.
    pub run: String,
    /// The host's second stage: `npt` of kvm-amd, `ept` of kvm-intel.
    #[serde(default = "on")]
    pub npt: bool,
    /// The beds that it is for, possibly `metal`. Empty: all of them. Minutes on QEMU are hours on
    /// Bochs.
    #[serde(default)]
    pub beds: Vec<String>,
    /// The processor's model by the emulator's name, if not the bed's own. It must then name one
    /// bed.
    #[serde(default)]
    pub cpu: Option<String>,
    /// Module parameters of the host's kernel.
    #[serde(default)]
    pub parameters: Vec<String>,
    /// The host's memory in MiB.
    #[serde(default = "two_gibibytes")]
    pub memory: u32,
    /// Huge pages that the host reserves.
    #[serde(default)]
    pub hugepages: u32,
    /// Their size, as on the kernel's command line.
    #[serde(default = "two_mebibytes")]
    pub hugepage_size: String,
    /// Two CPUs in parallel, for races. Such a host's clock does not count instructions, so a
    /// benchmark must name `locks` or `calls`.
    #[serde(default)]
    pub multi: bool,
    /// Locks to watch: parts of their names in /proc/lock_stat. The kernels are then built with
    /// `--variant lock-stat`.
    #[serde(default)]
    pub locks: Vec<String>,
    /// Functions of the host's kernel whose calls are counted. `NAME:N` also sums their N-th
    /// argument. Nothing is timed then.
    #[serde(default)]
    pub calls: Vec<String>,
    /// Only for the series' own base. The host would idle with another base's kernel, which does
    /// too little of this work.
    #[serde(default)]
    pub own_base: bool,
    /// The series of a Linux guest's kernel in the host, `BASE/NAME`. `{guest}` in the command
    /// stands for the flags that name the kernel and the initramfs.
    #[serde(default)]
    pub guest: Option<String>,
    /// The guest kernel's variant, one of [`VARIANTS`](super::variants::VARIANTS).
    #[serde(default)]
    pub guest_variant: Option<String>,
    /// A planted fault of the guest's series, from its `planted/`. The command must fail, and its
    /// output or the host's log must contain `says`.
    #[serde(default)]
    pub guest_planted: Option<String>,
    /// Additional arguments on the patched kernel, which the pristine one would refuse.
    #[serde(default)]
    pub after: Option<String>,
    /// The command times parts of its run and measures the host's idle time in them. The rest of
    /// its run is not measured.
    #[serde(default)]
    pub timed: bool,
    /// The emulated host of a test, if not that of the series' architecture.
    #[serde(default)]
    pub bed: Option<String>,
    /// A planted fault of the series, from its `planted/`, on top of the patches. The command must
    /// fail, and its output or the kernel's log must contain `says`.
    #[serde(default)]
    pub planted: Option<String>,
    /// The text that then must appear.
    #[serde(default)]
    pub says: Option<String>,
}

impl Bench {
    /// `run` on a default host.
    pub fn plain(run: &str, npt: bool) -> Self {
        Self {
            run: run.to_owned(),
            npt,
            beds: Vec::new(),
            cpu: None,
            parameters: Vec::new(),
            memory: two_gibibytes(),
            hugepages: 0,
            hugepage_size: two_mebibytes(),
            multi: false,
            locks: Vec::new(),
            calls: Vec::new(),
            own_base: false,
            guest: None,
            guest_variant: None,
            guest_planted: None,
            after: None,
            timed: false,
            bed: None,
            planted: None,
            says: None,
        }
    }

    /// The command's words, with `result` for `{json}`.
    pub fn command(&self, result: &str) -> Vec<String> {
        let guest = self.guest_name().map_or(String::new(), |guest| {
            let [kernel, initrd] = guest_files(&guest);
            format!("--kernel {kernel} --initrd {initrd}")
        });
        let run = self.run.replace("{guest}", &guest);
        run.split_whitespace().map(|word| word.replace("{json}", result)).collect()
    }

    /// The name of its guest: the series of its kernel, the planted fault, and the variant.
    pub fn guest_name(&self) -> Option<String> {
        let more =
            [&self.guest_planted, &self.guest_variant].map(|name| name.as_ref().map(|it| format!("+{it}")));
        let [planted, variant] = more.map(Option::unwrap_or_default);
        self.guest.as_ref().map(|series| format!("{series}{planted}{variant}"))
    }

    /// The command for the patched kernel.
    pub fn on_the_patched(&self) -> Self {
        let after = self.after.as_ref().map_or(String::new(), |after| format!(" {after}"));
        Self { run: format!("{}{after}", self.run), ..self.clone() }
    }

    /// Whether it runs on hosts of `bed`.
    pub fn runs_on(&self, bed: Emulated) -> bool {
        let as_meant = !self.multi || !bed.takes_turns();
        as_meant && bed.has_pace(self.pace()).is_ok() && self.is_for(bed.name())
    }

    fn pace(&self) -> Pace {
        if self.multi { Pace::Races } else { Pace::Counted }
    }

    /// The compiled program of kernel-patches/tools that it runs, if any.
    pub fn tool(&self) -> Option<&str> {
        let name = self.run.split_whitespace().next()?.strip_prefix(TOOLS)?;
        (!name.ends_with(".sh")).then_some(name)
    }

    /// Whether its kernel or its guest's has a planted fault.
    pub fn sees_a_mistake(&self) -> bool {
        self.planted.is_some() || self.guest_planted.is_some()
    }

    /// Whether its host's kernel has the planted fault in this file.
    pub fn is_of(&self, planted: &Path) -> bool {
        self.planted.is_some() && self.planted.as_deref() == stem(planted)
    }

    /// Whether its guest has `series` and the planted fault in this file.
    pub fn is_of_its_guest(&self, series: &str, planted: &Path) -> bool {
        self.guest.as_deref() == Some(series)
            && self.guest_planted.is_some()
            && self.guest_planted.as_deref() == stem(planted)
    }

    /// Whether its `beds` include `bed`.
    pub fn is_for(&self, bed: &str) -> bool {
        self.beds.is_empty() || self.beds.iter().any(|name| name == bed)
    }

    /// Whether one boot can run both.
    pub fn same_host(&self, other: &Self) -> bool {
        let host = |b: &Self| {
            let parts = (b.npt, b.memory, b.hugepages, b.multi, b.locks.is_empty());
            (parts, b.bed.clone(), b.parameters.clone(), b.cpu.clone(), b.hugepage_size.clone())
        };
        host(self) == host(other)
    }

    /// Whether a short run of a base's whole stack can include it: it needs neither another host
    /// than its architecture's nor a kernel with a fault.
    pub fn is_plain(&self) -> bool {
        self.bed.is_none() && !self.sees_a_mistake()
    }

    /// The test program of this workspace that it runs, if any.
    pub fn program(&self) -> Option<&str> {
        self.run.split_whitespace().next()?.strip_prefix(PROGRAMS)
    }

    /// `host`, changed to what this command needs.
    pub fn host(&self, mut host: Request) -> Request {
        self.describe_host(&mut host);
        host
    }

    /// Changes `request` to what this command needs.
    pub fn describe_host(&self, request: &mut Request) {
        request.second_stage = self.npt;
        request.cpu.clone_from(&self.cpu);
        request.parameters = self.parameters.clone();
        request.memory_mib = self.memory;
        request.hugepages = self.hugepages;
        request.hugepage_size.clone_from(&self.hugepage_size);
        request.pace = self.pace();
        if let Some(bed) = HOSTS.iter().find(|bed| self.bed.as_deref() == Some(bed.name())) {
            request.host = *bed;
        }
    }
}

/// The directory in a host of this workspace's test programs.
pub const PROGRAMS: &str = "/tests/";

/// The directory in a host of kernel-patches/tools.
pub const TOOLS: &str = "/tools/";

/// The paths in a host of the kernel and the initramfs of the guest `name` ([`Bench::guest_name`]).
pub fn guest_files(name: &str) -> [String; 2] {
    ["bzImage", "initrd"].map(|file| format!("/guests/{name}/{file}"))
}

/// Groups commands that one boot can run.
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

fn two_mebibytes() -> String {
    HUGEPAGE.to_owned()
}

fn two_gibibytes() -> u32 {
    2048
}

/// The scripts of kernel-patches/tools and their paths in a host: `tools/NAME.sh` is
/// `/tools/NAME.sh`.
pub fn scripts() -> Result<Vec<(PathBuf, String)>> {
    let dir = series_directory().join("tools");
    let entries = fs::read_dir(&dir).map_err(Error::file("read", &dir))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut scripts: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "sh")).collect();
    scripts.sort();
    Ok(scripts
        .into_iter()
        .map(|path| {
            let inside = format!("{TOOLS}{}", path.file_name().unwrap_or_default().to_string_lossy());
            (path, inside)
        })
        .collect())
}

/// The name of a planted fault.
fn stem(planted: &Path) -> Option<&str> {
    planted.file_stem()?.to_str()
}

#[cfg(test)]
mod tests {
    use super::super::series::About;
    use super::*;

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
        let bench = about("guest = '6.12/g'\nguest-variant = 'pti'");
        assert_eq!(bench.command("0.json").join(" "), words.replace("6.12/g", "6.12/g+pti"));
    }

    #[test]
    fn a_tests_first_word_says_what_its_host_is_to_have_and_its_bed_and_mistake_make_it_long() {
        let test = |text: &str| toml::from_str::<Bench>(text).unwrap();
        let own = |text: &str| {
            let test = test(text);
            (test.program().map(str::to_owned), test.tool().map(str::to_owned))
        };
        assert_eq!(own("run='/tests/cr3_cache misbehaves'"), (Some("cr3_cache".into()), None));
        assert_eq!(own("run='/tools/cr3-cache test 1'"), (None, Some("cr3-cache".into())));
        assert_eq!(own("run='sh /tools/x.sh'"), (None, None));
        assert_eq!(own("run='/tools/x.sh'"), (None, None));
        let planted = test("run='a'\nplanted='stale-root'\nsays='x'");
        assert!(
            planted.is_of(Path::new("planted/stale-root.patch")) && !planted.is_of(Path::new("root.patch"))
        );
        let elsewhere = test("run='a'\nbed='vmx'\nmulti=true");
        assert!(test("run='a'").is_plain() && !planted.is_plain() && !elsewhere.is_plain());
        let guest =
            test("run='a {guest}'\nguest='6.12/g'\nguest-planted='stays'\nguest-variant='kexec'\nsays='x'");
        let is_of = |series, file| guest.is_of_its_guest(series, Path::new(file));
        assert!(is_of("6.12/g", "planted/stays.patch") && !is_of("5.10/g", "planted/stays.patch"));
        assert!(guest.sees_a_mistake() && !guest.is_of(Path::new("planted/stays.patch")));
        assert_eq!(guest.guest_name().as_deref(), Some("6.12/g+stays+kexec"));
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
}
