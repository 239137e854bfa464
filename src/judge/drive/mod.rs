//! Other VMMs: each is started with the image, driven through a scenario, and ended. What they say
//! is not believed: the consoles of all copies are read, and the one that was moved away must have
//! fallen silent.

mod cloud_hypervisor;
mod command;
mod crosvm;
mod firecracker;
mod http;
mod kvmtool;
mod process;
mod qemu;
mod vellum;

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{self, Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::image::{Format, image};
use crate::read::{Log, read};
use crate::sectors;
pub use command::PLACEHOLDERS;
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
    /// It is saved, ended, and restored three times: by two machines at once, and by one after
    /// these have ended.
    Restore,
    /// It moves to another process.
    Migrate,
    /// It moves, and its memory follows.
    MigratePostcopy,
    /// It is forked twice while it runs, and goes on.
    Fork,
}

impl Scenario {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 8] = [
        ("boot", Self::Boot),
        ("pause", Self::Pause),
        ("snapshot", Self::Snapshot),
        ("snapshot-diff", Self::SnapshotDiff),
        ("restore", Self::Restore),
        ("migrate", Self::Migrate),
        ("migrate-postcopy", Self::MigratePostcopy),
        ("fork", Self::Fork),
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
    /// `crosvm`.
    Crosvm,
    /// `firecracker`.
    Firecracker,
    /// `lkvm`.
    Kvmtool,
    /// `qemu-system-x86_64`.
    Qemu,
    /// This program.
    Vellum,
    /// The command of the [`Setup`].
    Command,
}

impl Vmm {
    /// The names on the command line. A command has none.
    pub const NAMES: [(&str, Self); 6] = [
        ("cloud-hypervisor", Self::CloudHypervisor),
        ("crosvm", Self::Crosvm),
        ("firecracker", Self::Firecracker),
        ("kvmtool", Self::Kvmtool),
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
    /// The words of [`Vmm::Command`], with [`PLACEHOLDERS`] in them.
    pub command: Vec<String>,
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

/// The version of a VMM, as it prints it. What it says goes into files in `dir`.
///
/// # Errors
/// Where it is not installed, fails, or says nothing in this time.
pub fn version(vmm: Vmm, setup: &Setup, dir: &Path) -> Result<String, Trouble> {
    let round = Round { setup, dir };
    match vmm {
        Vmm::CloudHypervisor => cloud_hypervisor::version(&round),
        Vmm::Crosvm => crosvm::version(&round),
        Vmm::Firecracker => firecracker::version(&round),
        Vmm::Kvmtool => kvmtool::version(&round),
        Vmm::Qemu => qemu::version(&round),
        Vmm::Vellum => vellum::version(&round),
        Vmm::Command => Ok(setup.command.join(" ")),
    }
}

/// Runs a scenario once, in a directory of its own, and reads what each machine printed that went
/// on to the end, behind what the first one had printed before.
///
/// # Errors
/// Where it did not come to an end.
pub fn run(vmm: Vmm, scenario: Scenario, setup: &Setup, dir: &Path) -> Result<Vec<Log>, Trouble> {
    let round = Round { setup, dir };
    fs::write(round.path(KERNEL), image(Format::Elf)).map_err(Trouble::io("the image"))?;
    write_disk(&round.path(DISK)).map_err(Trouble::io("the disk"))?;
    match vmm {
        Vmm::CloudHypervisor => cloud_hypervisor::run(&round, scenario)?,
        Vmm::Crosvm => crosvm::run(&round, scenario)?,
        Vmm::Firecracker => firecracker::run(&round, scenario)?,
        Vmm::Kvmtool => kvmtool::run(&round, scenario)?,
        Vmm::Qemu => qemu::run(&round, scenario)?,
        Vmm::Vellum => vellum::run(&round, scenario)?,
        Vmm::Command => command::run(&round, scenario)?,
    }
    Ok(round.logs())
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

/// The first line that a program prints of its version, when it gets this word. A program that does
/// not start is missing, with this remedy.
fn version_of(round: &Round, name: &str, word: &str, remedy: &str) -> Result<String, Trouble> {
    let said = round.path("version");
    let output = File::create(&said).map_err(Trouble::io("the version"))?;
    let mut process = Process::spawn(program(name).arg(word), round.path("version.err"), output.into())
        .map_err(|error| Trouble::Missing(format!("{name} does not start: {error}"), remedy.into()))?;
    process.succeeded(round.setup.limit, "its version")?;
    let mut text = Vec::new();
    let file = File::open(&said).map_err(Trouble::io("the version"))?;
    file.take(MAX_VERSION).read_to_end(&mut text).map_err(Trouble::io("the version"))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let printable = |line: &str| line.chars().filter(|c| !c.is_control()).take(200).collect::<String>();
    match text.lines().map(printable).find(|line| !line.trim().is_empty()) {
        Some(line) => Ok(line),
        None => Err(Trouble::failed(format!("{name} {word} says nothing"))),
    }
}

/// What a VMM cannot do.
fn cannot<T>(what: &str, remedy: &str) -> Result<T, Trouble> {
    Err(Trouble::Missing(what.into(), remedy.into()))
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

/// The console of the first machine.
const FIRST: &str = "first.log";
/// The image, in the directory of a round.
const KERNEL: &str = "judge.elf";
/// Its disk there.
const DISK: &str = "judge.raw";
/// Bytes of a version.
const MAX_VERSION: u64 = 4096;
/// What the first machine had printed when it was forked.
const BEFORE: &str = "before.log";
/// The names of further machines. Those of [`Scenario::Restore`] are restored in these groups.
const COPIES: [&str; 3] = ["second", "third", "fourth"];
const GROUPS: [&[&str]; 2] = [&["second", "third"], &["fourth"]];
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
    /// What each machine has printed: a copy goes on where the first one was. A first one that is
    /// forked goes on by itself.
    fn logs(&self) -> Vec<Log> {
        let text = |name: &str| fs::read(self.path(name)).unwrap_or_default();
        let first = text(FIRST);
        let is_forked = self.path(BEFORE).exists();
        let before = if is_forked { text(BEFORE) } else { first.clone() };
        let copies = COPIES.map(|name| format!("{name}.log"));
        let copies = copies.iter().filter(|name| self.path(name).exists());
        let mut logs: Vec<Log> = copies.map(|name| read(&[before.clone(), text(name)].concat())).collect();
        if is_forked || logs.is_empty() {
            logs.push(read(&first));
        }
        logs
    }

    /// Restores the copies of a scenario by `start`, and waits for their ends.
    fn restores(
        &self,
        scenario: Scenario,
        start: impl Fn(&str) -> Result<Process, Trouble>,
    ) -> Result<(), Trouble> {
        let groups = if scenario == Scenario::Restore { &GROUPS[..] } else { &[&COPIES[..1]] };
        for names in groups {
            let mut running = names.iter().map(|name| start(name)).collect::<Result<Vec<_>, _>>()?;
            for process in &mut running {
                process.ended(self.setup.limit)?;
            }
        }
        Ok(())
    }

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
        read(&fs::read(self.path(FIRST)).unwrap_or_default()).pass
    }

    /// Waits until the pass after `before` is over, so that all pages have changed.
    fn goes_on(&self, process: &mut Process, before: Option<u64>) -> Result<(), Trouble> {
        process.until(self.setup.limit, "another pass", || {
            Ok((self.pass() > before.map(|pass| pass + 1)).then_some(()))
        })
    }

    /// The length of the first console.
    fn first_length(&self) -> u64 {
        fs::metadata(self.path(FIRST)).map_or(0, |about| about.len())
    }
}
