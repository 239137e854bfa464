//! The kernel's own KVM selftests, built from the base's source and run on an emulated host with
//! the pristine and the patched kernel. A series must not change the result of any of them.
//!
//! All selftests that the kernel's Makefile builds are run. Tests that need more memory or time
//! than an emulated host has get smaller arguments ([`ARGUMENTS`]). A test that exceeds the time
//! limit is recorded as late. An image's results are cached, so a stopped check continues from
//! there, and the pristine kernel runs once for all series.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::build::{self, Image};
use super::tree::Tree;
use crate::architecture::Architecture;
use crate::artifacts::Programs;
use crate::cache::{Cache, digest};
use crate::hosts::wire::Frame;
use crate::hosts::{self, Request};
use crate::{Error, Result, tool};

/// The time limit of a test in seconds of the host's clock. On `svm` it is 15 billion instructions.
/// dirty_log_test takes 15 s to populate its 1 GiB for each way to read the log.
const LIMIT: u32 = 30;

/// Tests with defaults for large machines, and their arguments here.
const ARGUMENTS: [(&str, &str); 9] = [
    ("access_tracking_perf_test", "-b 16M"),
    ("demand_paging_test", "-b 16M"),
    ("dirty_log_perf_test", "-b 64M"),
    ("dirty_log_test", "-i 4 -I 20"),
    ("kvm_page_table_test", "-b 64M"),
    ("max_guest_memory_test", "-m 1 -s 1 -c 1"),
    ("memslot_modification_stress_test", "-b 16M -i 64"),
    ("memslot_perf_test", "-l 1 -s 64"),
    ("mmu_stress_test", "-m 1 -s 1 -c 1"),
];

/// A test's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Verdict {
    /// It exited with 0.
    Pass,
    /// It exited with kselftest's 4: this host lacks what it tests.
    Skip,
    /// It exited with another code.
    Fail(i32),
    /// It exceeded [`LIMIT`].
    Late,
}

impl Verdict {
    fn of(code: i32) -> Self {
        match code {
            0 => Self::Pass,
            4 => Self::Skip,
            // The codes of a test that busybox's timeout killed.
            137 | 143 => Self::Late,
            code => Self::Fail(code),
        }
    }

    /// Whether both say the same about a kernel. A test that sometimes exits with a code and
    /// sometimes exceeds its limit fails either way. On one CPU, dirty_log_test of 5.10 does so
    /// with any kernel, because it expects that a page with a set bit has been written.
    pub fn is_like(self, other: Self) -> bool {
        let fails = |verdict| matches!(verdict, Self::Fail(_) | Self::Late);
        self == other || (fails(self) && fails(other))
    }
}

/// An image's results.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// The results by test.
    pub verdicts: BTreeMap<String, Verdict>,
    /// The kernel's log afterwards.
    pub log: String,
}

impl Results {
    /// `31 pass, 2 skip; fail: a, b; late: c`.
    pub fn summary(&self) -> String {
        let count = |verdict| self.verdicts.values().filter(|&&v| v == verdict).count();
        let mut text = format!("{} pass, {} skip", count(Verdict::Pass), count(Verdict::Skip));
        for (what, is) in [("fail", false), ("late", true)] {
            let names: Vec<&str> = self
                .verdicts
                .iter()
                .filter(|(_, verdict)| match verdict {
                    Verdict::Fail(_) => !is,
                    Verdict::Late => is,
                    _ => false,
                })
                .map(|(name, _)| name.as_str())
                .collect();
            if !names.is_empty() {
                text += &format!("; {what}: {}", names.join(", "));
            }
        }
        text
    }

    /// The tests with different results in `other`, with both results.
    pub fn differences(&self, other: &Self) -> BTreeMap<String, [Option<Verdict>; 2]> {
        let names = self.verdicts.keys().chain(other.verdicts.keys());
        let both = names.map(|name| {
            let ended = [self, other].map(|results| results.verdicts.get(name).copied());
            (name.clone(), ended)
        });
        let alike = |[here, there]: [Option<Verdict>; 2]| here.zip(there).is_some_and(|(a, b)| a.is_like(b));
        both.filter(|(_, ended)| !alike(*ended)).collect()
    }
}

/// The tests that `patches` add for all architectures or for this one.
pub fn added(patches: &[PathBuf], architecture: Architecture) -> Result<Vec<String>> {
    named_after(&format!("--- /dev/null\n+++ b/{TESTS}"), patches, architecture)
}

/// The tests of the base that `patches` change.
pub fn changed(patches: &[PathBuf], architecture: Architecture) -> Result<Vec<String>> {
    named_after(&format!("--- a/{TESTS}"), patches, architecture)
}

const TESTS: &str = "tools/testing/selftests/kvm/";

/// The tests whose paths follow `header` in `patches`.
fn named_after(header: &str, patches: &[PathBuf], architecture: Architecture) -> Result<Vec<String>> {
    // The directories' names differ between kernel versions.
    let own = match architecture {
        Architecture::X86 => ["x86", "x86_64"],
        Architecture::Arm => ["arm64", "aarch64"],
    };
    let mut names = Vec::new();
    for patch in patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        let files = text.split(header).skip(1).filter_map(|rest| rest.lines().next()?.strip_suffix(".c"));
        names.extend(files.filter_map(|file| match file.split_once('/') {
            None => Some(file.to_owned()),
            Some((directory, name)) => own.contains(&directory).then(|| name.to_owned()),
        }));
    }
    Ok(names)
}

/// The selftests of `tree` with those that `patches` add, static, by name. The kernel's headers are
/// the pristine ones.
pub fn build(
    cache: &Cache,
    tree: &Tree,
    architecture: Architecture,
    patches: &[PathBuf],
) -> Result<Vec<(String, PathBuf)>> {
    let mut own = Vec::new();
    let mut key = vec![build::toolchain_for(architecture)?.into_bytes()];
    for patch in patches {
        let text = fs::read(patch).map_err(Error::file("read", patch))?;
        if String::from_utf8_lossy(&text).contains("\n+++ b/tools/testing/selftests/kvm/") {
            own.push(patch.clone());
            key.push(build::change(&text).to_vec());
        }
    }
    let mut name = match architecture {
        Architecture::X86 => "selftests".to_owned(),
        Architecture::Arm => "selftests-arm64".to_owned(),
    };
    if !own.is_empty() {
        name += &format!("-{}", digest(key.iter().map(Vec::as_slice)));
    }
    let dir = cache.entry(&format!("kernel/{}/{name}", tree.package.version), |out| {
        build::require_tools_for(architecture)?;
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        cache.need_mib(512)?;
        tree.carry(&own)?;
        eprintln!("lab: building the KVM selftests of {}", tree.package.version);
        let (objects, tests) = (out.join("objects"), out.join("tests"));
        fs::create_dir_all(&objects).map_err(Error::file("create", &objects))?;
        tool::output(build::command_for(tree, architecture, &objects).args(["-s", "headers"]))?;
        let headers = objects.join("usr/include");
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut make = std::process::Command::new("make");
        make.arg("-C").arg(tree.source.join("tools/testing/selftests/kvm"));
        let (prefix, arch) = match architecture {
            Architecture::X86 => ("", "x86_64"),
            Architecture::Arm => (architecture.prefix(), "arm64"),
        };
        make.args(["-s", &format!("-j{jobs}"), &format!("ARCH={arch}"), "all"]);
        make.args([format!("CC={prefix}{}", build::COMPILER), format!("CROSS_COMPILE={prefix}")]);
        make.arg(format!("OUTPUT={}", tests.display()));
        // The selftests' own headers_install would write into the source tree.
        make.args([
            "KSFT_KHDR_INSTALL=".to_owned(),
            format!("LINUX_HDR_PATH={}", headers.display()),
            format!("KHDR_INCLUDES=-isystem {}", headers.display()),
        ]);
        make.args(["EXTRA_CFLAGS=-static", "LDFLAGS=-static -pthread -no-pie"]).env("LC_ALL", "C");
        fs::create_dir_all(&tests).map_err(Error::file("create", &tests))?;
        let made = tool::output(&mut make);
        made.map(drop).and(tree.carry(&[]))?;
        keep_programs(&tests, out, prefix)?;
        for done in [objects, tests] {
            fs::remove_dir_all(&done).map_err(Error::file("remove", &done))?;
        }
        Ok(())
    })?;
    let entries = fs::read_dir(&dir).map_err(Error::file("read", &dir))?;
    let mut programs: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| entry.ok())
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .collect();
    programs.sort();
    Ok(programs)
}

/// Strips the executables below `from` into `to`. Their directories differ between bases.
fn keep_programs(from: &Path, to: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(from).map_err(Error::file("read", from))? {
        let path = entry.map_err(Error::file("read", from))?.path();
        if path.is_dir() {
            keep_programs(&path, to, prefix)?;
        } else if is_program(&path)? {
            let name = path.file_name().expect("an entry of a directory has a name");
            let strip = format!("{prefix}strip");
            tool::output(std::process::Command::new(strip).arg("-o").arg(to.join(name)).arg(&path))?;
        }
    }
    Ok(())
}

fn is_program(path: &Path) -> Result<bool> {
    let bytes = fs::read(path).map_err(Error::file("read", path))?;
    // e_type of the ELF header is ET_EXEC with -no-pie. Objects are ET_REL.
    Ok(bytes.starts_with(b"\x7fELF") && bytes.get(16..18) == Some(&[2, 0]))
}

/// Runs `tests` on `request`'s host, which boots `image`. Prints a line per test.
pub fn run(
    cache: &Cache,
    programs: &Programs,
    image: &Image,
    tests: &[(String, PathBuf)],
    request: Request,
) -> Result<Results> {
    kept(cache, &entry(image, tests, &request)?, || {
        let (verdicts, log) = boot(cache, programs, image, tests, 1, request)?;
        let verdicts = tests.iter().zip(verdicts).map(|((name, _), verdict)| (name.clone(), verdict));
        Ok(Results { verdicts: verdicts.collect(), log })
    })
}

/// All results of `tests` on `image` when each is run `times` times, in turn.
pub fn endings(
    cache: &Cache,
    programs: &Programs,
    image: &Image,
    tests: &[(String, PathBuf)],
    times: usize,
    request: Request,
) -> Result<BTreeMap<String, BTreeSet<Verdict>>> {
    kept(cache, &format!("{}-{times}-times", entry(image, tests, &request)?), || {
        let (verdicts, _) = boot(cache, programs, image, tests, times, request)?;
        let mut endings = BTreeMap::<String, BTreeSet<Verdict>>::new();
        for ((name, _), verdict) in tests.iter().cycle().zip(verdicts) {
            endings.entry(name.clone()).or_default().insert(verdict);
        }
        Ok(endings)
    })
}

/// The cache entry of the results of `tests` on `image` and this host, keyed by everything that
/// they depend on.
fn entry(image: &Image, tests: &[(String, PathBuf)], request: &Request) -> Result<String> {
    let mut key = vec![request.parameters.join(" "), format!("{:?} {LIMIT}", request.second_stage)];
    // A program's path depends on the patches in it.
    key.extend(tests.iter().map(|(name, built)| format!("{} {}", built.display(), command(name).join(" "))));
    key.push(request.host.version()?);
    Ok(format!("selftests/{}-{}", image.name, digest(key.iter().map(String::as_bytes))))
}

/// The cached results of `entry`, or else those of `make`.
fn kept<T: Serialize + DeserializeOwned>(
    cache: &Cache,
    entry: &str,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let dir = cache.entry(entry, |out| {
        let json = serde_json::to_vec_pretty(&make()?).expect("results are plain data");
        let file = out.join("results.json");
        fs::write(&file, json).map_err(Error::file("write", &file))
    })?;
    let file = dir.join("results.json");
    let bytes = fs::read(&file).map_err(Error::file("read", &file))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::Series(format!("{}: {error}; remove {} and try again", file.display(), dir.display()))
    })
}

/// One boot: the tests' results in the order in which they ran, and the kernel's log.
fn boot(
    cache: &Cache,
    programs: &Programs,
    image: &Image,
    tests: &[(String, PathBuf)],
    times: usize,
    mut request: Request,
) -> Result<(Vec<Verdict>, String)> {
    let host = request.label();
    let names: Vec<&String> = std::iter::repeat_n(tests, times).flatten().map(|(name, _)| name).collect();
    request.memory_mib = 3072;
    request.hugepages = 64;
    request.time_limit = Duration::from_secs(90 * 60);
    request.files = tests.iter().map(|(name, path)| (path.clone(), format!("/selftests/{name}"))).collect();
    request.commands = names.iter().map(|name| command(name)).collect();
    request.commands.push(vec!["dmesg".to_owned()]);
    let mut done = 0;
    let outcome = hosts::run(cache, programs, &request, |frame| {
        if let Frame::Exit(exit) = frame
            && let Some(name) = names.get(done)
        {
            done += 1;
            let verdict = Verdict::of(exit.code);
            eprintln!(
                "lab: {} {host}: selftest {done} of {}: {name}: {verdict:?} ({:.1} s of its clock)",
                image.label,
                names.len(),
                exit.seconds
            );
        }
    })?;
    let code = |index: usize| outcome.ran.get(index).and_then(|ran| ran.exit.as_ref()).map_or(1, |e| e.code);
    let verdicts = (0..names.len()).map(|index| Verdict::of(code(index))).collect();
    // Without a log, there would seem to be no complaints.
    let log = outcome.ran.last().filter(|ran| ran.exit.as_ref().is_some_and(|exit| exit.code == 0));
    let log = log.map(|ran| String::from_utf8_lossy(&ran.stdout).into_owned());
    match log.filter(|log| !log.trim().is_empty()) {
        Some(log) => Ok((verdicts, log)),
        None => Err(Error::Series(format!("{} {host}: dmesg did not show the kernel's log", image.label))),
    }
}

fn command(name: &str) -> Vec<String> {
    let arguments = ARGUMENTS.iter().find(|(test, _)| *test == name).map_or("", |(_, arguments)| arguments);
    let line = format!("timeout -s KILL {LIMIT} /selftests/{name} {arguments}");
    line.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_a_patch_adds_or_changes_is_known_by_its_file() {
        let file = std::env::temp_dir().join(format!("vellum-added-{}.patch", std::process::id()));
        let dir = "tools/testing/selftests/kvm";
        let text = format!(
            "--- a/{dir}/Makefile\n+++ b/{dir}/Makefile\n--- /dev/null\n+++ b/{dir}/x86/one_test.c\n@@\n\
             --- /dev/null\n+++ b/{dir}/two_test.c\n--- /dev/null\n+++ b/arch/x86/kvm/new.c\n\
             --- /dev/null\n+++ b/{dir}/aarch64/three_test.c\n\
             --- a/{dir}/lib/x86/svm.c\n+++ b/{dir}/lib/x86/svm.c\n\
             --- a/{dir}/x86/old_test.c\n+++ b/{dir}/x86/old_test.c\n"
        );
        fs::write(&file, text).unwrap();
        let added = |architecture| added(std::slice::from_ref(&file), architecture).unwrap();
        assert_eq!(added(Architecture::X86), ["one_test", "two_test"]);
        assert_eq!(added(Architecture::Arm), ["two_test", "three_test"]);
        let changed = |architecture| changed(std::slice::from_ref(&file), architecture).unwrap();
        assert_eq!(changed(Architecture::X86), ["old_test"]);
        assert_eq!(changed(Architecture::Arm), [""; 0]);
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn what_ended_otherwise_is_named() {
        let results = |codes: &[(&str, i32)]| Results {
            verdicts: codes.iter().map(|(name, code)| ((*name).to_owned(), Verdict::of(*code))).collect(),
            log: String::new(),
        };
        let before = results(&[("a", 0), ("b", 4), ("c", 254), ("d", 137)]);
        assert!(before.differences(&before.clone()).is_empty());
        assert_eq!(before.summary(), "1 pass, 1 skip; fail: c; late: d");
        let after = results(&[("a", 254), ("b", 4), ("c", 137)]);
        let differences = before.differences(&after);
        assert_eq!(differences.len(), 2, "{differences:?}");
        assert_eq!(differences["a"], [Some(Verdict::Pass), Some(Verdict::Fail(254))]);
        assert_eq!(differences["d"], [Some(Verdict::Late), None]);
    }
}
