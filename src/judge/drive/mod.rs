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
mod stream;
mod vellum;

use std::cell::Cell;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{self, Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::image::{Arch, image};
use crate::read::{Log, Verdict, first_progress, read};
use crate::sectors;
pub use command::PLACEHOLDERS;
use process::{Process, printable};
use vellum_sys::keyvalue;

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

    /// The machines besides the first one. Each of them must print to the end.
    fn copies(self) -> &'static [&'static str] {
        match self {
            Self::Boot | Self::Pause => &[],
            Self::Snapshot | Self::SnapshotDiff | Self::Migrate | Self::MigratePostcopy => &COPIES[..1],
            Self::Fork => &COPIES[..2],
            Self::Restore => &COPIES,
        }
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
    /// `qemu-system-x86_64` or `qemu-system-aarch64`.
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
    /// The architecture of the machine's processors.
    pub arch: Arch,
    /// vCPUs.
    pub cpus: u32,
    /// MiB of memory.
    pub memory: u64,
    /// The image's options.
    pub cmdline: String,
    /// The words of [`Vmm::Command`], with [`PLACEHOLDERS`] in them. Empty for the other VMMs.
    pub command: Vec<String>,
    /// Further arguments of a VMM that starts a machine.
    pub arguments: Vec<String>,
    /// How long each step may take.
    pub limit: Duration,
    /// What happens to a snapshot, whose file or directory this gets, before it is restored: tests
    /// plant faults there.
    pub between: fn(&Path) -> std::io::Result<()>,
}

impl Setup {
    /// Whether this placeholder's value reaches the machine. A command may leave it out.
    fn gives(&self, placeholder: &str) -> bool {
        self.command.is_empty() || self.command.iter().any(|word| word.contains(placeholder))
    }

    /// Why `log` is not of the machine that was asked for: another seed, another number of passes
    /// or of vCPUs.
    pub fn differs(&self, log: &Log) -> Option<String> {
        let start = log.start.as_ref()?;
        let cmdline = if self.gives("{cmdline}") { self.cmdline.as_str() } else { "" };
        let cpus = self.gives("{cpus}").then_some(u64::from(self.cpus));
        [
            ("seed", start.seed, asked(cmdline, "seed")),
            ("passes", start.passes, asked(cmdline, "passes")),
            ("vcpus", start.given, cpus),
        ]
        .into_iter()
        .find_map(|(name, found, asked)| {
            let asked = asked.filter(|asked| *asked != found)?;
            Some(format!("the log is of another machine: {name}={found}, and not {asked}"))
        })
        .or_else(|| self.unlisted(log))
    }

    /// How much of the machine's memory the log neither has as judged nor as left out.
    fn unlisted(&self, log: &Log) -> Option<String> {
        let judged = log.ranges.iter().map(|range| range.end - range.start);
        let listed = judged.chain(log.left_out_bytes()).fold(0u64, u64::saturating_add);
        let missing = self.memory.saturating_sub(listed >> 20);
        (self.gives("{memory}") && missing > MAX_UNLISTED)
            .then(|| format!("{missing} MiB of the memory are neither judged nor left out"))
    }

    /// The time between two reports of the image.
    fn interval(&self) -> Duration {
        let asked = value(&self.cmdline, "report").and_then(|text| keyvalue::duration(text).ok());
        asked.unwrap_or(Duration::from_secs(1))
    }

    /// Why the machine's disk was not judged, if it was not.
    pub fn disk_left_out(&self, log: &Log) -> Option<String> {
        if !self.gives("{disk}") || !log.disks.is_empty() {
            return None;
        }
        let why = log.left_out.iter().find_map(|line| line.split_once(" a disk: "));
        Some(why.map_or("the image found none".into(), |(_, why)| why.into()))
    }
}

/// The number that the image takes for `key`.
pub fn asked(cmdline: &str, key: &str) -> Option<u64> {
    value(cmdline, key)?.parse().ok()
}

/// The text that the image takes for `key`: the last one counts.
fn value<'a>(cmdline: &'a str, key: &str) -> Option<&'a str> {
    let mut values = cmdline.split_whitespace().filter_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    values.next_back()
}

/// Why there is no log to read.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The VMM or the feature is missing: what, and what to do about it.
    Missing(String, String),
    /// A step failed.
    Failed(String),
    /// The first copy ran on after it was stopped or migrated.
    GoesOn,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(what, remedy) => write!(f, "{what}: {remedy}"),
            Self::Failed(why) => f.write_str(why),
            Self::GoesOn => f.write_str("the first copy goes on after it was stopped or migrated"),
        }
    }
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
    let round = Round { setup, dir, stood: Cell::new(None) };
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

/// The result of a round.
#[derive(Debug)]
pub struct Shown {
    /// Each machine that went on to the end. With `trouble`, also the first machine.
    pub machines: Vec<Machine>,
    /// The reason why the scenario did not come to its end.
    pub trouble: Option<Trouble>,
}

/// What a machine has printed.
#[derive(Debug)]
pub struct Machine {
    /// Its log, after what the first machine had printed before.
    pub log: Log,
    /// Whether it has run for a full pass since it was moved, and so has compared each page.
    pub is_compared: bool,
}

/// Runs a scenario once, in a directory of its own. Reads the consoles of all its machines, also if
/// a step fails: an image that has lost something may not end.
pub fn run(vmm: Vmm, scenario: Scenario, setup: &Setup, dir: &Path) -> Shown {
    let round = Round { setup, dir, stood: Cell::new(None) };
    let trouble = round.run(vmm, scenario).err();
    Shown { machines: round.machines(scenario, trouble.is_some()), trouble }
}

/// Whether the first machine of a round in `dir` came to its end by itself, and lost nothing.
pub fn is_over(setup: &Setup, dir: &Path) -> bool {
    read(&Round { setup, dir, stood: Cell::new(None) }.console("first")).verdict() == Verdict::Whole
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
    match text.lines().map(printable).find(|line| !line.trim().is_empty()) {
        Some(line) => Ok(line),
        None => Err(Trouble::failed(format!("{name} {word} says nothing"))),
    }
}

/// What a VMM cannot do.
fn cannot<T>(what: &str, remedy: &str) -> Result<T, Trouble> {
    Err(Trouble::Missing(what.into(), remedy.into()))
}

/// The first machine stands still: its console does not grow while it could report ten times.
fn is_silent(round: &Round) -> Result<(), Trouble> {
    let before = round.first_length();
    round.stood.set(Some(before));
    let begun = Instant::now();
    while begun.elapsed() < 10 * round.setup.interval() && round.first_length() == before {
        process::wait(begun, round.setup.limit, "ten times report=")?;
    }
    match round.first_length() == before {
        true => Ok(()),
        false => Err(Trouble::GoesOn),
    }
}

/// The console of the first machine.
const FIRST: &str = "first.log";
/// The image, in the directory of a round.
const KERNEL: &str = "judge.kernel";
/// Its disk there.
const DISK: &str = "judge.raw";
/// MiB of its memory that a machine's firmware and its memory map may take.
const MAX_UNLISTED: u64 = 2;
/// Bytes of a console.
const MAX_CONSOLE: u64 = 64 << 20;
/// Bytes of a version.
const MAX_VERSION: u64 = 4096;
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

impl Machine {
    /// A machine that printed `own` after it had been moved.
    fn new(before: &[u8], own: &[u8]) -> Self {
        let log = read(&[before, own].concat());
        // A line that was begun before the move may have a position of then.
        let is_begun = before.last().is_some_and(|byte| *byte != b'\n');
        let end = own.iter().position(|byte| *byte == b'\n').filter(|_| is_begun).unwrap_or(0);
        // All processors begin a pass together, after each has ended the one before. So the passes
        // after the one that was reported began after the move.
        let is_compared = first_progress(&own[end..])
            .zip(log.start.as_ref())
            .is_some_and(|(progress, start)| progress.pass < start.passes);
        Self { log, is_compared }
    }
}

/// One run of a scenario.
struct Round<'a> {
    setup: &'a Setup,
    dir: &'a Path,
    /// The length of the first console when that machine last stood still.
    stood: Cell<Option<u64>>,
}

impl Round<'_> {
    fn run(&self, vmm: Vmm, scenario: Scenario) -> Result<(), Trouble> {
        fs::write(self.path(KERNEL), image(self.setup.arch.format())).map_err(Trouble::io("the image"))?;
        write_disk(&self.path(DISK)).map_err(Trouble::io("the disk"))?;
        match vmm {
            Vmm::CloudHypervisor => cloud_hypervisor::run(self, scenario),
            Vmm::Crosvm => crosvm::run(self, scenario),
            Vmm::Firecracker => firecracker::run(self, scenario),
            Vmm::Kvmtool => kvmtool::run(self, scenario),
            Vmm::Qemu => qemu::run(self, scenario),
            Vmm::Vellum => vellum::run(self, scenario),
            Vmm::Command => command::run(self, scenario),
        }
    }

    /// Each machine of a scenario. A copy goes on where the first one was. A first one that was
    /// paused or forked goes on by itself.
    fn machines(&self, scenario: Scenario, is_broken_off: bool) -> Vec<Machine> {
        let first = self.console("first");
        let goes_on = matches!(scenario, Scenario::Boot | Scenario::Pause | Scenario::Fork);
        let stood = self.stood.get().filter(|_| goes_on).map_or(first.len(), |at| at as usize);
        let (before, after) = first.split_at(stood.min(first.len()));
        // The console of a copy that was not started, or printed nothing, is empty: its log then
        // has no end.
        let consoles = scenario.copies().iter().map(|name| self.console(name));
        let mut machines: Vec<Machine> = consoles.map(|own| Machine::new(before, &own)).collect();
        if scenario == Scenario::Boot {
            machines.push(Machine { log: read(&first), is_compared: true });
        } else if goes_on || is_broken_off {
            machines.push(Machine::new(before, after));
        }
        machines
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
            for (process, name) in running.iter_mut().zip(*names) {
                self.copy_ends(process, name)?;
            }
        }
        Ok(())
    }

    /// Waits for the end of a copy, which must have printed something.
    fn copy_ends(&self, process: &mut Process, name: &str) -> Result<(), Trouble> {
        process.ended(self.setup.limit)?;
        match self.console(name).is_empty() {
            true => Err(Trouble::failed(format!("the copy printed nothing{}", process.said()))),
            false => Ok(()),
        }
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
        read(&self.console("first")).pass
    }

    /// What a machine has printed. A longer console is cut, and then has no verdict.
    fn console(&self, name: &str) -> Vec<u8> {
        let mut text = Vec::new();
        // A copy may have a directory of its own, where its console has the first one's name.
        let own = self.path(name).join(FIRST);
        let path = if own.exists() { own } else { self.path(&format!("{name}.log")) };
        // A console that does not exist is empty.
        let _ = File::open(path).and_then(|file| file.take(MAX_CONSOLE).read_to_end(&mut text));
        text
    }

    /// Waits until the pass after `before` is over, so that all pages have changed.
    fn goes_on(&self, process: &mut Process, before: Option<u64>) -> Result<(), Trouble> {
        process.until(self.setup.limit, "another pass", || {
            Ok((self.pass() > before.map(|pass| pass + 1)).then_some(()))
        })
    }

    /// The first machine printed nothing since its console had this length, and prints nothing.
    fn has_not_grown(&self, length: u64) -> Result<(), Trouble> {
        match self.first_length() == length {
            true => is_silent(self),
            false => Err(Trouble::GoesOn),
        }
    }

    /// The length of the first console.
    fn first_length(&self) -> u64 {
        fs::metadata(self.path(FIRST)).map_or(0, |about| about.len())
    }
}
