//! Other VMMs: each is started with the image, driven through a scenario, and ended. What they say is not believed: the
//! consoles of all copies are read, and the one that was moved away must have fallen silent.

mod process;
mod qemu;
mod vellum;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
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
    /// It moves to another process.
    Migrate,
    /// It moves, and its memory follows.
    MigratePostcopy,
}

impl Scenario {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 5] = [
        ("boot", Self::Boot),
        ("pause", Self::Pause),
        ("snapshot", Self::Snapshot),
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
    /// `qemu-system-x86_64`.
    Qemu,
    /// This program.
    Vellum,
}

impl Vmm {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 2] = [("qemu", Self::Qemu), ("vellum", Self::Vellum)];
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
    /// What happens to a snapshot, whose file or directory this gets, before it is restored: tests plant faults there.
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
        Vmm::Qemu => qemu::run(&round, scenario)?,
        Vmm::Vellum => vellum::run(&round, scenario)?,
    }
    let mut text = Vec::new();
    for console in ["first.log", "second.log"] {
        text.extend(fs::read(dir.join(console)).unwrap_or_default());
    }
    Ok(read(&text))
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

    /// Waits until the first console has a second pass: each page has been written twice, and can be old.
    fn has_begun(&self, process: &mut Process) -> Result<(), Trouble> {
        process.until(self.setup.limit, "the image has begun a pass", || {
            Ok((read(&fs::read(self.path("first.log")).unwrap_or_default()).pass > Some(1)).then_some(()))
        })
    }

    /// The length of the first console.
    fn first_length(&self) -> u64 {
        fs::metadata(self.path("first.log")).map_or(0, |about| about.len())
    }
}
