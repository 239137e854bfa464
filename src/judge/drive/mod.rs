//! Other VMMs: each is started with the image, driven through a scenario, and ended. What they say
//! is not believed: the consoles of all copies are read, and the one that was moved away must have
//! fallen silent.

mod cloud_hypervisor;
mod firecracker;
mod http;
mod process;
mod qemu;
mod vellum;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{self, Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::image::{Format, image};
use crate::read::{Log, read};
use crate::sectors;
use process::Process;

/// What happens to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Nothing.
    Boot,
    /// It is paused and goes on.
    Pause,
    /// It is saved into a file, ended, and restored.
    Snapshot,
    /// The same, of a snapshot and what has changed since.
    SnapshotDiff,
    /// It moves to another process.
    Migrate,
    /// It moves, and its memory follows.
    MigratePostcopy,
}

impl Scenario {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 6] = [
        ("boot", Self::Boot),
        ("pause", Self::Pause),
        ("snapshot", Self::Snapshot),
        ("snapshot-diff", Self::SnapshotDiff),
        ("migrate", Self::Migrate),
        ("migrate-postcopy", Self::MigratePostcopy),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, scenario)| *scenario == self).map_or("", |(name, _)| name)
    }
}

/// Which VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vmm {
    /// `cloud-hypervisor`.
    CloudHypervisor,
    /// `firecracker`.
    Firecracker,
    /// `qemu-system-x86_64`.
    Qemu,
    /// This program.
    Vellum,
}

impl Vmm {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 4] = [
        ("cloud-hypervisor", Self::CloudHypervisor),
        ("firecracker", Self::Firecracker),
        ("qemu", Self::Qemu),
        ("vellum", Self::Vellum),
    ];
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Setup {
    /// vCPUs.
    pub cpus: u32,
    /// MiB of memory.
    pub memory: u64,
    /// The image's options.
    pub cmdline: String,
    /// How long each step may take.
    pub limit: Duration,
    /// What happens to a snapshot, whose file or directory this gets, before it is restored: tests
    /// plant faults there.
    pub between: fn(&Path) -> std::io::Result<()>,
}

/// Why there is no log to read.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The VMM or the feature is missing: what, and what to do about it.
    Missing(String, String),
    /// A step failed.
    Failed(String),
}

impl Trouble {
    fn failed(what: impl Into<String>) -> Self {
        Self::Failed(what.into())
    }

    fn io(what: &str) -> impl Fn(std::io::Error) -> Self {
        move |error| Self::Failed(format!("{what}: {error}"))
    }
}

/// The version of a VMM, as it prints it.
///
/// # Errors
/// Where it is not installed.
pub fn version(vmm: Vmm) -> Result<String, Trouble> {
    match vmm {
        Vmm::CloudHypervisor => cloud_hypervisor::version(),
        Vmm::Firecracker => firecracker::version(),
        Vmm::Qemu => qemu::version(),
        Vmm::Vellum => vellum::version(),
    }
}

/// Runs a scenario once, in a directory of its own, and reads what the machine printed.
///
/// # Errors
/// Where it did not come to an end.
pub fn run(vmm: Vmm, scenario: Scenario, setup: &Setup, dir: &Path) -> Result<Log, Trouble> {
    let round = Round { setup, dir };
    fs::write(round.path(KERNEL), image(Format::Elf)).map_err(Trouble::io("the image"))?;
    write_disk(&round.path(DISK)).map_err(Trouble::io("the disk"))?;
    match vmm {
        Vmm::CloudHypervisor => cloud_hypervisor::run(&round, scenario)?,
        Vmm::Firecracker => firecracker::run(&round, scenario)?,
        Vmm::Qemu => qemu::run(&round, scenario)?,
        Vmm::Vellum => vellum::run(&round, scenario)?,
    }
    let mut text = Vec::new();
    for console in ["first.log", "second.log"] {
        text.extend(fs::read(dir.join(console)).unwrap_or_default());
    }
    Ok(read(&text))
}

/// The directory with the VMMs' programs that are not in PATH.
const DIRECTORY: &str = "VELLUM_VMMS";

/// A command of this program: in [`DIRECTORY`], or in PATH.
fn program(name: &str) -> Command {
    let own = std::env::var_os(DIRECTORY).map(|dir| Path::new(&dir).join(name));
    // A path that is not absolute would be one in the command's directory.
    let own = own.and_then(|path| path::absolute(path).ok()).filter(|path| path.exists());
    own.map_or_else(|| Command::new(name), Command::new)
}

/// The first line that a program prints of its version. A program that does not start is missing,
/// with this remedy.
fn version_of(name: &str, remedy: &str) -> Result<String, Trouble> {
    let output = program(name)
        .arg("--version")
        .output()
        .map_err(|error| Trouble::Missing(format!("{name} does not start: {error}"), remedy.into()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().chars().take(200).collect())
}

const GOES_ON: &str = "the first copy goes on after it was stopped or migrated";

/// The first machine stands still: its console does not grow while it could report ten times.
fn is_silent(round: &Round) -> Result<(), Trouble> {
    let before = round.first_length();
    thread::sleep(Duration::from_millis(500));
    match round.first_length() == before {
        true => Ok(()),
        false => Err(Trouble::failed(GOES_ON)),
    }
}

/// The image, in the directory of a round.
const KERNEL: &str = "judge.elf";
/// Its disk there.
const DISK: &str = "judge.raw";
/// Sectors of the disk that each machine has.
const SECTORS: u64 = 2048;

fn write_disk(path: &Path) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    (0..SECTORS).try_for_each(|number| file.write_all(&sectors::sector(number)))?;
    file.flush()
}

/// One run of a scenario.
struct Round<'a> {
    setup: &'a Setup,
    dir: &'a Path,
}

impl Round<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Waits until the first console has a second pass: each page has been written twice, and can
    /// be old.
    fn has_begun(&self, process: &mut Process) -> Result<(), Trouble> {
        process.until(self.setup.limit, "the image has begun a pass", || {
            Ok((self.pass() > Some(1)).then_some(()))
        })
    }

    /// The pass that the first console has last.
    fn pass(&self) -> Option<u64> {
        read(&fs::read(self.path("first.log")).unwrap_or_default()).pass
    }

    /// Waits until the pass after `before` is over, so that all pages have changed.
    fn goes_on(&self, process: &mut Process, before: Option<u64>) -> Result<(), Trouble> {
        process.until(self.setup.limit, "another pass", || {
            Ok((self.pass() > before.map(|pass| pass + 1)).then_some(()))
        })
    }

    /// The length of the first console.
    fn first_length(&self) -> u64 {
        fs::metadata(self.path("first.log")).map_or(0, |about| about.len())
    }
}
