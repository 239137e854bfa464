//! `cargo lab test`: runs every test that this machine can run, and lists what it cannot.
//!
//! [`programs`] finds the test programs and where each can run. All run on this machine ([`here`]),
//! each libtest test in a process of its own. Programs that need KVM also run on emulated hosts
//! ([`hosts`]): they are built static and copied there, and `lab test metal` runs them as on any
//! machine. The hosts of a run boot in parallel ([`pool`]), in a run without a bed beside the tests of
//! this machine. Results are counted from records
//! ([`tally`]), never from output, and times by [`clock`]. A missing bed is listed as skipped. Slow
//! tests are left to `--full`, and [`green`] records when it last passed.
//!
//! [`fresh`] runs the README's commands on a fresh machine. [`kvm_unit_tests`] runs kvm-unit-tests.

pub(crate) mod clock;
mod debuggers;
pub mod fresh;
mod fuzz;
mod green;
mod here;
mod hosts;
mod kernels;
pub mod kvm_unit_tests;
mod load;
mod pool;
pub(crate) mod programs;
mod readers;
pub(crate) mod setup;
mod slurm;
pub(crate) mod tally;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use support::record::Record;

use crate::architecture::Architecture;
use crate::form::Output;
use crate::hosts::{Emulated, HOSTS, svm};
use crate::{Error, Result, kernel};
pub use green::last_full;
use tally::Tally;

/// Where the tests can run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TestHost {
    /// This machine: `cargo test`.
    Local,
    /// This machine's KVM: only the bed tests, optimized.
    Metal,
    /// The bed tests on emulated hosts of this kind.
    Emulated(Emulated),
    /// Linux guests on emulated AMD hosts.
    Linux,
    /// Linux guests that move between two of them.
    Pair,
    /// Linux guests, and others, that stay while their emulated host's kernel is replaced.
    LiveUpdate,
    /// Every series in kernel-patches/.
    Kernels,
    /// The fuzz targets.
    Fuzz,
    /// Live migration, with all tests.
    Migration,
    /// Plans on a Slurm cluster that consists of this machine.
    Fleet,
}

impl ValueEnum for TestHost {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<TestHost>> = LazyLock::new(|| {
            let emulated = HOSTS.into_iter().map(TestHost::Emulated);
            [TestHost::Local, TestHost::Metal]
                .into_iter()
                .chain(emulated)
                .chain([
                    TestHost::Linux,
                    TestHost::Pair,
                    TestHost::LiveUpdate,
                    TestHost::Kernels,
                    TestHost::Fuzz,
                    TestHost::Migration,
                    TestHost::Fleet,
                ])
                .collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            TestHost::Local => ("local", "This machine: `cargo test`".into()),
            TestHost::Metal => ("metal", "This machine's KVM: the bed tests only, optimized".into()),
            TestHost::Emulated(bed) => (
                bed.name(),
                format!("The bed tests on {}, with the second stage of paging and without", bed.about()),
            ),
            TestHost::Linux => (
                "linux",
                "Linux guests of every kind on emulated AMD hosts; takes long, and a run without a bed has one of them"
                    .into(),
            ),
            TestHost::Pair => (
                "pair",
                "Linux guests that move from an emulated AMD host with one kernel to one with another, and back; only when asked for"
                    .into(),
            ),
            TestHost::LiveUpdate => (
                "live-update",
                "Guests that stay while the kernel of their emulated AMD host is replaced by kexec; builds two kernels, and runs only when asked for"
                    .into(),
            ),
            TestHost::Kernels => (
                "kernels",
                "Every series in kernel-patches/: applies, compiles, and boots under the oracle".into(),
            ),
            TestHost::Fuzz => (
                "fuzz",
                "The parsers' fuzz targets, guided by coverage, for --time together; only when asked for".into(),
            ),
            TestHost::Migration => (
                "migration",
                "Live migration with all that it has: hours on this machine, then Linux guests on emulated AMD hosts; only when asked for"
                    .into(),
            ),
            TestHost::Fleet => (
                "fleet",
                "Plans on a Slurm cluster in namespaces of its own, daemons that are killed included; a run without a bed has a short one"
                    .into(),
            ),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The options of [`run`].
#[derive(Default)]
pub struct Options {
    /// One bed, or all.
    pub bed: Option<TestHost>,
    /// Permission to install Debian packages, and to reserve huge pages during the tests.
    pub setup: bool,
    /// A directory of prebuilt test programs, for [`TestHost::Metal`].
    pub prebuilt: Option<PathBuf>,
    /// The only kind of emulated host to use, or both.
    pub npt: Option<bool>,
    /// The emulated hosts of [`TestHost::Linux`], if not svm's.
    pub hosts: Option<Emulated>,
    /// The only base of [`TestHost::LiveUpdate`]'s kernels, or all.
    pub base: Option<String>,
    /// Whether to run the slow tests too.
    pub full: bool,
    /// How often each local program runs under load, if asked for.
    pub loaded: Option<u32>,
    /// The time for all fuzz targets together.
    pub time: Option<Duration>,
    /// The test programs' arguments, such as test names.
    pub arguments: Vec<String>,
    /// Standard output for a report with a case per test, if asked for.
    pub form: Option<Output>,
}

/// The number of huge pages that `--setup` reserves: as many as the largest bed test needs.
const HUGEPAGES: u32 = 96;

impl Options {
    /// Whether this run leaves out slow tests.
    fn is_short(&self) -> bool {
        self.bed.is_none() && !self.full
    }

    /// Checks that the options are compatible.
    fn check(&self) -> Result<()> {
        if self.prebuilt.is_some() && self.bed != Some(TestHost::Metal) {
            return Err(Error::Usage(
                "--prebuilt names the tests for one bed: cargo lab test metal --prebuilt DIR".into(),
            ));
        }
        if self.full && self.bed.is_some() {
            return Err(Error::Usage("--full is a run of all beds: cargo lab test --full".into()));
        }
        if self.loaded.is_some() && (self.full || !matches!(self.bed, None | Some(TestHost::Local))) {
            return Err(Error::Usage(
                "--loaded runs the programs of this machine: cargo lab test local --loaded 20".into(),
            ));
        }
        if self.npt.is_some()
            && !matches!(
                self.bed,
                Some(
                    TestHost::Emulated(_)
                        | TestHost::Linux
                        | TestHost::Pair
                        | TestHost::LiveUpdate
                        | TestHost::Migration
                )
            )
        {
            return Err(Error::Usage(
                "--npt chooses among emulated hosts: cargo lab test svm, linux, pair, live-update or migration"
                    .into(),
            ));
        }
        if self.hosts.is_some() && self.bed != Some(TestHost::Linux) {
            return Err(Error::Usage(
                "--bed names the hosts of Linux guests: cargo lab test linux --bed vmx".into(),
            ));
        }
        if self.hosts.is_some_and(|bed| bed.architecture() != Architecture::X86) {
            return Err(Error::Usage("--bed: the Linux guests here are of x86-64; use svm or vmx".into()));
        }
        if let Some(base) = &self.base {
            if self.bed != Some(TestHost::LiveUpdate) {
                return Err(Error::Usage(
                    "--base chooses the kernel that replaces itself: cargo lab test live-update".into(),
                ));
            }
            if !hosts::REPLACED.contains(&base.as_str()) {
                return Err(Error::Usage(format!(
                    "--base {base}: {} are known here",
                    hosts::REPLACED.join(" and ")
                )));
            }
        }
        if self.time.is_some() && self.bed != Some(TestHost::Fuzz) {
            return Err(Error::Usage(
                "--time is how long targets are fuzzed: cargo lab test fuzz --time 10m".into(),
            ));
        }
        if !self.arguments.is_empty()
            && self.loaded.is_none()
            && matches!(self.bed, None | Some(TestHost::Kernels | TestHost::Pair))
        {
            return Err(Error::Usage(format!(
                "-- {}: arguments are for the test programs of one bed: local, metal, svm, linux, live-update, fuzz, fleet or migration",
                self.arguments.join(" ")
            )));
        }
        Ok(())
    }
}

/// Whether the tests on `bed`, or in a run without a bed, use `tool`.
fn needs(bed: Option<TestHost>, tool: &str) -> bool {
    match bed {
        None | Some(TestHost::Local | TestHost::Metal | TestHost::Migration) => true,
        Some(TestHost::Emulated(_) | TestHost::Linux | TestHost::Pair) => debuggers::TOOLS.contains(&tool),
        Some(TestHost::Fleet) => slurm::TOOLS.contains(&tool),
        Some(TestHost::LiveUpdate | TestHost::Kernels | TestHost::Fuzz) => false,
    }
}

/// Runs the tests. The exit code is 0 if none failed.
pub fn run(mut options: Options) -> Result<u8> {
    options.check()?;
    let form = options.form.take();
    let options = &options;
    let record = Record::from_env();
    let mut tally = match &form {
        Some(_) => Tally::kept(record, "lab test"),
        None => Tally::new(record),
    };
    if setup::is_held_to(options.setup) {
        tally.hold_to_setup();
    }
    let commit = green::Commit::now();
    // What was counted is told in any case.
    if let Err(error) = run_hosts(options, &mut tally) {
        tally.stage("lab", "the run", Err(error));
    }
    ended(options, form, tally, commit)
}

/// Runs what `options` ask for, and counts it.
fn run_hosts(options: &Options, tally: &mut Tally) -> Result<()> {
    let wants = |bed| options.bed.is_none_or(|asked| asked == bed);
    if options.setup {
        setup::tools(|tool| needs(options.bed, tool), tally);
        tally.lap("setup", "what the tests of this machine call");
    }
    if let Some(times) = options.loaded {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, tally)).flatten();
        return here::loaded(options, times, tally);
    }
    if options.bed.is_none() {
        beside(options, tally)?;
    }
    if let Some(TestHost::Local | TestHost::Metal) = options.bed {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, tally)).flatten();
        match options.bed {
            Some(TestHost::Metal) => here::metal(options, tally)?,
            _ => here::local(options, tally)?,
        }
    }
    if let Some(TestHost::Emulated(host)) = options.bed
        && setup::packages(host.programs(), options.setup, host.name(), tally)?
    {
        pool::run(hosts::emulated(host, options, tally)?, tally)?;
    }
    if options.bed == Some(TestHost::Linux) {
        let needs = [options.hosts.unwrap_or(svm::HOST).programs(), &["lz4", "zstd"]].concat();
        if setup::packages(&needs, options.setup, "linux", tally)? {
            pool::run(hosts::linux(options, tally)?, tally)?;
        }
    }
    if options.bed == Some(TestHost::LiveUpdate) {
        let needs = [svm::HOST.programs(), kernel::PROGRAMS, &["mke2fs", "lz4", "zstd"]].concat();
        if setup::packages(&needs, options.setup, "live-update", tally)? {
            pool::run(hosts::live_update(options, tally)?, tally)?;
        }
    }
    if options.is_short() {
        tally.skip("kernels", "each series of kernel-patches", hosts::LEFT_TO_FULL);
    } else if wants(TestHost::Kernels) {
        let needs = [HOSTS[0].programs(), kernel::PROGRAMS].concat();
        if setup::packages(&needs, options.setup, "kernels", tally)? {
            kernels::run(tally)?;
        }
    }
    if options.bed == Some(TestHost::Fuzz) && setup::packages(&fuzz::PROGRAMS, options.setup, "fuzz", tally)?
    {
        let _signals = setup::Signals::catch();
        fuzz::run(options, tally)?;
    }
    if options.bed == Some(TestHost::Migration) {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, tally)).flatten();
        here::migration(options, tally)?;
    }
    if options.bed == Some(TestHost::Fleet) {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, tally)).flatten();
        here::fleet(options, tally)?;
    }
    // Arguments name tests on this machine, so Linux guests are left out then.
    let moves = options.bed == Some(TestHost::Pair)
        || options.bed == Some(TestHost::Migration) && options.arguments.is_empty();
    let needs = [svm::HOST.programs(), &["lz4", "zstd"]].concat();
    if moves && setup::packages(&needs, options.setup, "migration", tally)? {
        if options.bed == Some(TestHost::Migration) {
            let under_load = Options {
                bed: Some(TestHost::Linux),
                setup: options.setup,
                npt: options.npt,
                arguments: vec!["moves_under_load".into()],
                ..Options::default()
            };
            pool::run(hosts::linux(&under_load, tally)?, tally)?;
        }
        hosts::pair(options, tally)?;
    }
    Ok(())
}

/// The tests of this machine, and with the lowest priority the emulated hosts beside them. Tests wait
/// for each other and for guests, and that time is enough for most of the hosts. What is left of
/// these when this machine's tests have ended is done on all CPUs.
fn beside(options: &Options, tally: &mut Tally) -> Result<()> {
    let (setup, full) = (options.setup, options.full);
    let mut count = tally.beside();
    let (give, take) = mpsc::channel();
    // A thread of its own and not of a scope: after a signal the laboratory ends at once, and an
    // emulator ends with the thread that has started it.
    let low = thread::spawn(move || {
        // SAFETY: setpriority takes no pointers. On Linux it is about one thread and what it starts.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
        let jobs = hosts::ahead(&Options { setup, full, ..Options::default() }, &mut count);
        let jobs = jobs.unwrap_or_else(|error| {
            count.stage("lab", "the emulated hosts", Err(error));
            Vec::new()
        });
        let hosts = pool::Hosts::new(jobs, count).map(Arc::new);
        let beside = hosts.as_ref().ok().cloned();
        if give.send(hosts).is_ok()
            && let Some(hosts) = beside
        {
            hosts.work();
        }
    });
    {
        let _signals = setup::Signals::catch();
        let _pages = setup.then(|| setup::huge_pages(HUGEPAGES, tally)).flatten();
        here::local(options, tally)?;
    }
    let hosts = take.recv().expect("the thread sends something")?;
    tally.lap("hosts", "building for them, what was left of it");
    hosts.add(hosts::left(options, tally)?);
    // The thread has one of the CPUs.
    let others = thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1);
    thread::scope(|scope| (0..others).for_each(|_| drop(scope.spawn(|| hosts.work()))));
    low.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let hosts = Arc::into_inner(hosts).expect("the thread has ended");
    tally.add(hosts.into_tally());
    tally.lap("hosts", "what was left of them");
    Ok(())
}

/// Prints the results and records what later runs use.
fn ended(options: &Options, form: Option<Output>, tally: Tally, commit: green::Commit) -> Result<u8> {
    tally.close();
    let status = tally.status();
    if !tally.is_inner() {
        // The results are known in any case.
        if let Err(error) = green::keep(options, status, &tally.times(), &commit) {
            eprintln!("lab: {error}");
        }
    }
    if let (Some(form), Some(report)) = (form, tally.into_report()) {
        form.deliver(&report)?;
    }
    Ok(status)
}
