//! `cargo lab test`: everything that this machine can prove, and one list of what it cannot.
//!
//! On this machine `cargo test` runs as it is. On an emulated host the same bed tests run from the same sources: those
//! integration tests that share `tests/bed`, built static and shipped in, where `lab test metal` runs them as it would
//! on any machine. A bed that is missing is an entry of the skip list, never a silent pass.

mod kernels;
mod setup;
mod tally;

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::artifacts::{self, Executable, Kernel, Programs};
use crate::bed::{self, BEDS, Emulated, HostKernel, Pace, Request, svm};
use crate::cache::Cache;
use crate::guest::Guest;
use crate::wire::Frame;
use crate::{Error, Result, doctor, kernel, tool};
use tally::Tally;

/// Where the tests can run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bed {
    /// This machine: `cargo test`.
    Local,
    /// This machine's KVM: the bed tests only, optimized.
    Metal,
    /// The bed tests on emulated hosts of this kind.
    Emulated(Emulated),
    /// Linux guests on emulated AMD hosts.
    Linux,
    /// Every series in kernel-patches/.
    Kernels,
}

impl ValueEnum for Bed {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Bed>> = LazyLock::new(|| {
            let emulated = BEDS.into_iter().map(Bed::Emulated);
            [Bed::Local, Bed::Metal].into_iter().chain(emulated).chain([Bed::Linux, Bed::Kernels]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Bed::Local => ("local", "This machine: `cargo test`".into()),
            Bed::Metal => ("metal", "This machine's KVM: the bed tests only, optimized".into()),
            Bed::Emulated(bed) => (
                bed.name(),
                format!("The bed tests on {}, with the second stage of paging and without", bed.about()),
            ),
            Bed::Linux => (
                "linux",
                "Linux guests of every kind on emulated AMD hosts; takes long, and a run without a bed has one of them"
                    .into(),
            ),
            Bed::Kernels => (
                "kernels",
                "Every series in kernel-patches/: applies, compiles, and boots under the oracle".into(),
            ),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// What is asked of [`run`].
pub struct Options {
    /// One bed, or all.
    pub bed: Option<Bed>,
    /// The consent to install Debian's packages and to reserve huge pages for the duration.
    pub setup: bool,
    /// Test executables that were built elsewhere, for [`Bed::Metal`].
    pub prebuilt: Option<PathBuf>,
    /// The one kind of emulated host that is wanted, or both.
    pub npt: Option<bool>,
    /// What the test programs are told: which tests, above all.
    pub arguments: Vec<String>,
}

/// Huge pages that `--setup` reserves: what the largest bed test asks for.
const HUGEPAGES: u32 = 96;

/// Runs the tests; the exit code is 0 where none failed.
pub fn run(options: &Options) -> Result<u8> {
    if options.prebuilt.is_some() && options.bed != Some(Bed::Metal) {
        return Err(Error::Usage(
            "--prebuilt names the tests for one bed: cargo lab test metal --prebuilt DIR".into(),
        ));
    }
    if options.npt.is_some() && !matches!(options.bed, Some(Bed::Emulated(_) | Bed::Linux)) {
        return Err(Error::Usage(
            "--npt chooses among emulated hosts: cargo lab test svm, or cargo lab test linux".into(),
        ));
    }
    if !options.arguments.is_empty() && matches!(options.bed, None | Some(Bed::Kernels)) {
        return Err(Error::Usage(format!(
            "-- {}: arguments are for the test programs of one bed: local, metal, svm or linux",
            options.arguments.join(" ")
        )));
    }
    let wants = |bed| options.bed.is_none_or(|asked| asked == bed);
    let mut tally = Tally::default();
    let on_host = wants(Bed::Local) || options.bed == Some(Bed::Metal);
    if on_host {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, &mut tally)).flatten();
        match options.bed {
            Some(Bed::Metal) => metal(options, &mut tally)?,
            // This runs metal's tests too, on the same KVM.
            _ => local(options, &mut tally)?,
        }
    }
    // One kind of host is enough for a run without a bed: each takes long.
    if let Bed::Emulated(bed) = options.bed.unwrap_or(Bed::Emulated(BEDS[0]))
        && setup::packages(bed.programs(), options.setup, bed.name(), &mut tally)?
    {
        emulated(bed, options, &mut tally)?;
    }
    if wants(Bed::Linux) {
        let needs = [svm::BED.programs(), &["lz4", "zstd"]].concat();
        if setup::packages(&needs, options.setup, "linux", &mut tally)? {
            linux(options, &mut tally)?;
        }
    }
    if wants(Bed::Kernels) {
        let needs = [BEDS[0].programs(), kernel::PROGRAMS].concat();
        if setup::packages(&needs, options.setup, "kernels", &mut tally)? {
            kernels::run(&mut tally)?;
        }
    }
    // Inside an emulated host these lines are read by the laboratory outside, which prints the one list.
    if options.prebuilt.is_none() {
        tally.print();
    }
    Ok(u8::from(tally.failed() > 0))
}

/// `cargo test`, all of it.
fn local(options: &Options, tally: &mut Tally) -> Result<()> {
    eprintln!("lab: local: cargo test");
    let mut command = Command::new(artifacts::cargo());
    command.args(["test", "--workspace", "--no-fail-fast", "--"]).args(&options.arguments);
    command.current_dir(artifacts::workspace());
    watched(&mut command, "local", tally)
}

/// The bed tests on this machine.
fn metal(options: &Options, tally: &mut Tally) -> Result<()> {
    let prebuilt = options.prebuilt.as_deref();
    let bed = std::env::var("VELLUM_BED").unwrap_or_else(|_| "metal".into());
    if let Err(why) = doctor::kvm() {
        if prebuilt.is_some() {
            // There is no list at the end: whoever reads these lines makes it.
            println!("test all of its tests ... ignored, {why}");
        }
        tally.skip(&bed, "all of its tests", &why);
        return Ok(());
    }
    let tests = match prebuilt {
        Some(dir) => match executables(dir)? {
            none if none.is_empty() => {
                return Err(Error::Usage(format!("--prebuilt {}: it holds no test program", dir.display())));
            }
            some => some,
        },
        None => bed_tests("*")?.into_iter().map(|test| test.path).collect(),
    };
    for test in tests {
        eprintln!("lab: {bed}: {}", test.display());
        let mut command = Command::new(&test);
        command.args(&options.arguments);
        // Their fixtures are relative to the package, as under `cargo test`.
        if prebuilt.is_none() {
            command.current_dir(artifacts::workspace());
        }
        watched(&mut command, &bed, tally)?;
    }
    Ok(())
}

/// The bed tests on emulated hosts: the same executables, run by the same laboratory, as if that host were metal.
fn emulated(bed: Emulated, options: &Options, tally: &mut Tally) -> Result<()> {
    // The laboratory's own promises come first: what follows relies on them.
    let mut own = Command::new(artifacts::cargo());
    own.args(["test", "--package", "lab", "--test", "emulated", "--"]).args(&options.arguments);
    own.current_dir(artifacts::workspace());
    watched(own.env("VELLUM_LAB_BOOTS", bed.name()), bed.name(), tally)?;
    let cache = Cache::open()?;
    let mut tests = bed_tests("*")?;
    // Its hosts are others: the bed of that name.
    tests.retain(|test| test.name != "linux");
    // Time that counts instructions makes the tests' own time limits independent of how busy this machine is.
    hosts(&cache, options, (bed, bed.name()), tests, &[], tally, |request| {
        request.memory_mib = 4096;
        request.hugepages = HUGEPAGES;
        request.time_limit = Duration::from_secs(40 * 60);
    })
}

/// Every test of a Linux guest, with both of Debian's kernels and their ELF images; where the bed was not asked for by name,
/// the older kernel with every device.
fn linux(options: &Options, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let whole = options.bed == Some(Bed::Linux);
    let mut guests = Vec::new();
    for version in Kernel::versions().take(if whole { usize::MAX } else { 1 }) {
        let guest = Guest::make(&cache, version, &guests_dir().join(version))?;
        let vmlinux = guest.unpack_vmlinux()?;
        guests.push((version, guest, vmlinux));
    }
    hosts(&cache, options, (svm::BED, "linux"), bed_tests("linux")?, &guests, tally, |request| {
        // What Linux guests do wrong on other hosts is the emulator's doing (`bed::svm`).
        request.pace = Pace::Real;
        request.memory_mib = 6144;
        request.time_limit = Duration::from_secs(90 * 60);
        // The largest guest on them has 1 GiB.
        request.hugepages = 512;
        if whole {
            request.env.push(("VELLUM_LINUX".into(), "all".into()));
        }
    })
}

/// Where guests for tests are made: they hold this workspace's agent, so that they belong to its build.
fn guests_dir() -> PathBuf {
    artifacts::workspace().join("target/guests")
}

/// Runs `tests` on two hosts, with nested paging and without, or on the one that is wanted.
fn hosts(
    cache: &Cache,
    options: &Options,
    (emulated, bed): (Emulated, &str),
    tests: Vec<Executable>,
    guests: &[(&str, Guest, PathBuf)],
    tally: &mut Tally,
    change: impl Fn(&mut Request),
) -> Result<()> {
    let programs = Programs::build()?;
    let kernel = Kernel::debian(cache, "6.1")?;
    for npt in [true, false].into_iter().filter(|&npt| options.npt.is_none_or(|wanted| wanted == npt)) {
        let bed = format!("{bed} {}", emulated.mode(npt));
        eprintln!("lab: {bed}: {} test programs on {}", tests.len(), kernel.package);
        let mut request = Request::new(HostKernel::Debian(kernel.clone()));
        (request.bed, request.second_stage) = (emulated, npt);
        change(&mut request);
        request.files.push((programs.lab.clone(), "/bin/lab".into()));
        // The tests know vellum by the path at which cargo built it.
        request.files.push((programs.vellum.clone(), absolute(&programs.vellum)));
        for test in &tests {
            // CARGO_TARGET_TMPDIR, as cargo told the tests when it built them: target/TRIPLE/tmp beside
            // target/TRIPLE/PROFILE/deps/TEST.
            let target = test.path.ancestors().nth(3).unwrap_or(Path::new("/"));
            request.directories.push(target.join("tmp").to_string_lossy().into_owned());
            request.files.push((test.path.clone(), format!("/tests/{}", test.name)));
        }
        if !guests.is_empty() {
            request.env.push(("VELLUM_GUESTS".into(), "/guests".into()));
        }
        for (version, guest, vmlinux) in guests {
            for file in [&guest.kernel, &guest.initrd, vmlinux] {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                request.files.push((file.clone(), format!("/guests/{version}/{name}")));
            }
        }
        let line = ["lab", "test", "metal", "--prebuilt", "/tests", "--"].map(str::to_owned);
        request.commands.push([&line[..], &options.arguments].concat());
        let mut rows = Rows::default();
        let outcome = bed::run(cache, &programs, &request, |frame| {
            if let Frame::Stdout(bytes) | Frame::Stderr(bytes) = frame {
                rows.push(bytes, |row| {
                    println!("{row}");
                    tally.line(&bed, row);
                });
            }
        });
        match outcome {
            Ok(outcome) => tally.ended(&bed, "lab test metal", outcome.code() == 0),
            // The host is itself under test: one that dies is a failure, and the other mode still has something to say.
            Err(error) => {
                eprintln!("lab: {bed}: {error}");
                tally.fail(&bed, "the emulated host did not finish");
            }
        }
    }
    Ok(())
}

/// Those of the integration tests called `name`, which may be a pattern, that share `tests/bed`; built static.
fn bed_tests(name: &str) -> Result<Vec<Executable>> {
    let built = artifacts::build_static(&["test", "--no-run", "--package", "vellum", "--test", name])?;
    let shares = |test: &Executable| {
        let source = fs::read_to_string(&test.source).unwrap_or_default();
        source.lines().any(|line| line.trim_end() == "mod bed;")
    };
    Ok(built.into_iter().filter(|test| test.kind == "test" && shares(test)).collect())
}

fn executables(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

fn absolute(path: &Path) -> String {
    let path: OsString = path.canonicalize().unwrap_or_else(|_| path.to_owned()).into();
    path.to_string_lossy().into_owned()
}

/// Runs `command`, passes its lines on, and counts what they say.
fn watched(command: &mut Command, bed: &str, tally: &mut Tally) -> Result<()> {
    command.process_group(0);
    let result = tool::lines_of(command, setup::child, |row| {
        println!("{row}");
        tally.line(bed, row);
    });
    setup::child(0);
    setup::check_interrupted()?;
    match result {
        Ok(()) => tally.ended(bed, &tool::line(command), true),
        Err(Error::Failed { line, .. }) => tally.ended(bed, &line, false),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Bytes as they come, cut into lines.
#[derive(Default)]
struct Rows(Vec<u8>);

impl Rows {
    fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|&byte| byte == b'\n') {
            let row: Vec<u8> = self.0.drain(..=end).collect();
            each(String::from_utf8_lossy(&row).trim_end());
        }
    }
}
