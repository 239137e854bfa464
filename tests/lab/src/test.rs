//! `cargo lab test`: everything that this machine can prove, and one list of what it cannot.
//!
//! [`programs`] finds the test programs and says where each can run. On this machine all of them do ([`here`]), each test
//! of libtest's in a process of its own. On an emulated host ([`hosts`]) those run that need a KVM, built static and
//! shipped in, where `lab test metal` runs them as it would on any machine. What came of it is counted from records
//! ([`tally`]), never from what is printed. A bed that is missing is an entry of the skip list, never a silent pass.

pub(crate) mod clock;
mod debuggers;
mod fuzz;
mod here;
mod hosts;
mod kernels;
pub(crate) mod programs;
mod readers;
pub(crate) mod setup;
mod slurm;
pub(crate) mod tally;

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use harness::record::{self, Record};

use crate::architecture::Architecture;
use crate::bed::{BEDS, Emulated, arm64, svm};
use crate::form::Output;
use crate::{Error, Result, kernel};
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
    /// Linux guests that move between two of them.
    Pair,
    /// Every series in kernel-patches/.
    Kernels,
    /// The fuzz targets.
    Fuzz,
    /// Live migration, for as long as it takes to see all of it.
    Migration,
    /// Plans on a Slurm cluster of this machine alone.
    Fleet,
}

impl ValueEnum for Bed {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Bed>> = LazyLock::new(|| {
            let emulated = BEDS.into_iter().map(Bed::Emulated);
            [Bed::Local, Bed::Metal]
                .into_iter()
                .chain(emulated)
                .chain([Bed::Linux, Bed::Pair, Bed::Kernels, Bed::Fuzz, Bed::Migration, Bed::Fleet])
                .collect()
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
            Bed::Pair => (
                "pair",
                "Linux guests that move from an emulated AMD host with one kernel to one with another, and back; only when asked for"
                    .into(),
            ),
            Bed::Kernels => (
                "kernels",
                "Every series in kernel-patches/: applies, compiles, and boots under the oracle".into(),
            ),
            Bed::Fuzz => (
                "fuzz",
                "The parsers' fuzz targets, guided by coverage, for --time together; only when asked for".into(),
            ),
            Bed::Migration => (
                "migration",
                "Live migration with all that it has: hours on this machine, then Linux guests on emulated AMD hosts; only when asked for"
                    .into(),
            ),
            Bed::Fleet => (
                "fleet",
                "Plans on a Slurm cluster in namespaces of its own, daemons that are killed included; a run without a bed has a short one"
                    .into(),
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
    /// The emulated hosts of [`Bed::Linux`], where not those of svm.
    pub hosts: Option<Emulated>,
    /// How long all fuzz targets together take.
    pub time: Option<Duration>,
    /// What the test programs are told: which tests, above all.
    pub arguments: Vec<String>,
    /// Where each test goes as a case of one result, where that is wanted.
    pub form: Option<Output>,
}

/// Huge pages that `--setup` reserves: what the largest bed test asks for.
const HUGEPAGES: u32 = 96;

impl Options {
    /// Whether what is asked for goes together.
    fn check(&self) -> Result<()> {
        if self.prebuilt.is_some() && self.bed != Some(Bed::Metal) {
            return Err(Error::Usage(
                "--prebuilt names the tests for one bed: cargo lab test metal --prebuilt DIR".into(),
            ));
        }
        if self.npt.is_some()
            && !matches!(self.bed, Some(Bed::Emulated(_) | Bed::Linux | Bed::Pair | Bed::Migration))
        {
            return Err(Error::Usage(
                "--npt chooses among emulated hosts: cargo lab test svm, linux, pair or migration".into(),
            ));
        }
        if self.hosts.is_some() && self.bed != Some(Bed::Linux) {
            return Err(Error::Usage(
                "--bed names the hosts of Linux guests: cargo lab test linux --bed vmx".into(),
            ));
        }
        if self.hosts.is_some_and(|bed| bed.architecture() != Architecture::X86) {
            return Err(Error::Usage("--bed: the Linux guests here are of x86-64; use svm or vmx".into()));
        }
        if self.time.is_some() && self.bed != Some(Bed::Fuzz) {
            return Err(Error::Usage(
                "--time is how long targets are fuzzed: cargo lab test fuzz --time 10m".into(),
            ));
        }
        if !self.arguments.is_empty() && matches!(self.bed, None | Some(Bed::Kernels | Bed::Pair)) {
            return Err(Error::Usage(format!(
                "-- {}: arguments are for the test programs of one bed: local, metal, svm, linux, fuzz, fleet or migration",
                self.arguments.join(" ")
            )));
        }
        Ok(())
    }
}

/// Whether the tests on `bed`, or those of a run without one, call `tool`.
fn needs(bed: Option<Bed>, tool: &str) -> bool {
    match bed {
        None | Some(Bed::Local | Bed::Metal | Bed::Migration) => true,
        Some(Bed::Emulated(_) | Bed::Linux | Bed::Pair) => debuggers::TOOLS.contains(&tool),
        Some(Bed::Fleet) => slurm::TOOLS.contains(&tool),
        Some(Bed::Kernels | Bed::Fuzz) => false,
    }
}

/// Runs the tests; the exit code is 0 where none failed.
pub fn run(mut options: Options) -> Result<u8> {
    options.check()?;
    let form = options.form.take();
    let options = &options;
    let wants = |bed| options.bed.is_none_or(|asked| asked == bed);
    let record = Record::new(std::env::var_os(record::VARIABLE).map(PathBuf::from));
    let mut tally = match &form {
        Some(_) => Tally::kept(record, "lab test"),
        None => Tally::new(record),
    };
    if setup::is_held_to(options.setup) {
        tally.hold_to_setup();
    }
    if options.setup {
        setup::tools(|tool| needs(options.bed, tool), &mut tally);
        tally.lap("setup", "what the tests of this machine call");
    }
    let on_host = wants(Bed::Local) || options.bed == Some(Bed::Metal);
    if on_host {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, &mut tally)).flatten();
        match options.bed {
            Some(Bed::Metal) => here::metal(options, &mut tally)?,
            // This runs metal's tests too, on the same KVM.
            _ => here::local(options, &mut tally)?,
        }
    }
    // One kind of host is enough for a run without a bed: each takes long.
    if let Bed::Emulated(bed) = options.bed.unwrap_or(Bed::Emulated(BEDS[0]))
        && setup::packages(bed.programs(), options.setup, bed.name(), &mut tally)?
    {
        hosts::emulated(bed, options, &mut tally)?;
    }
    // That of another architecture is built and tried in short there.
    if options.bed.is_none() && setup::packages(arm64::BED.programs(), options.setup, "arm64", &mut tally)? {
        hosts::short(arm64::BED, &mut tally)?;
    }
    if wants(Bed::Linux) {
        let needs = [options.hosts.unwrap_or(svm::BED).programs(), &["lz4", "zstd"]].concat();
        if setup::packages(&needs, options.setup, "linux", &mut tally)? {
            hosts::linux(options, &mut tally)?;
        }
    }
    if wants(Bed::Kernels) {
        let needs = [BEDS[0].programs(), kernel::PROGRAMS].concat();
        if setup::packages(&needs, options.setup, "kernels", &mut tally)? {
            kernels::run(&mut tally)?;
        }
    }
    if options.bed == Some(Bed::Fuzz) && setup::packages(&fuzz::PROGRAMS, options.setup, "fuzz", &mut tally)?
    {
        let _signals = setup::Signals::catch();
        fuzz::run(options, &mut tally)?;
    }
    if options.bed == Some(Bed::Migration) {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, &mut tally)).flatten();
        here::migration(options, &mut tally)?;
    }
    if options.bed == Some(Bed::Fleet) {
        let _signals = setup::Signals::catch();
        let _pages = options.setup.then(|| setup::huge_pages(HUGEPAGES, &mut tally)).flatten();
        here::fleet(options, &mut tally)?;
    }
    // Arguments name trials of this machine's part.
    let moves =
        options.bed == Some(Bed::Pair) || options.bed == Some(Bed::Migration) && options.arguments.is_empty();
    let needs = [svm::BED.programs(), &["lz4", "zstd"]].concat();
    if moves && setup::packages(&needs, options.setup, "migration", &mut tally)? {
        if options.bed == Some(Bed::Migration) {
            let under_load = Options {
                bed: Some(Bed::Linux),
                setup: options.setup,
                prebuilt: None,
                npt: options.npt,
                hosts: None,
                time: None,
                arguments: vec!["moves_under_load".into()],
                form: None,
            };
            hosts::linux(&under_load, &mut tally)?;
        }
        hosts::pair(options, &mut tally)?;
    }
    tally.close();
    let status = tally.status();
    if let (Some(form), Some(report)) = (form, tally.into_report()) {
        form.deliver(&report)?;
    }
    Ok(status)
}
