//! This program, driven by its own command line.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::process::Process;
use super::{COPIES, DISK, KERNEL, Round, Scenario, Trouble, is_silent, version_of};
use vellum_sys::program::own;

/// How long a machine that a fork has made may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    let own = own().map_err(Trouble::io("this program"))?;
    version_of(round, &own.get_program().to_string_lossy(), "--version", "")
}

impl Round<'_> {
    /// A command whose machines have their sockets in the round's directory.
    fn vellum(&self, arguments: &[&str]) -> Result<Command, Trouble> {
        let mut command = own().map_err(Trouble::io("this program"))?;
        // A path may have commas, which end it in an argument of a disk.
        command.args(arguments).env("XDG_RUNTIME_DIR", self.dir).current_dir(self.dir);
        Ok(command)
    }

    /// A command with the name of a machine, its console in a file, and its disk.
    fn machine(&self, name: &str, arguments: &[&str]) -> Result<Command, Trouble> {
        let serial = format!("file={}", self.path(&format!("{name}.log")).display());
        let mut command = self.vellum(arguments)?;
        command.args(["--name", name, "--serial", &serial, "--disk", &format!("{DISK},readonly")]);
        Ok(command)
    }

    /// Starts a machine.
    fn start(&self, name: &str, arguments: &[&str]) -> Result<Process, Trouble> {
        let mut command = self.machine(name, arguments)?;
        Process::start(command.args(&self.setup.arguments), self.path(&format!("{name}.err")))
    }

    /// Runs a command that must succeed.
    fn succeeds(&self, arguments: &[&str]) -> Result<(), Trouble> {
        let mut command = self.vellum(arguments)?;
        self.succeeded(&mut command, arguments[0])
    }

    fn succeeded(&self, command: &mut Command, what: &str) -> Result<(), Trouble> {
        Process::succeeds(command, self.path("ask.err"), Stdio::null(), self.setup.limit, what)
    }

    /// Forks the first machine, which stands still, so that it is known what it has printed.
    fn forks(&self, first: &mut Process) -> Result<(), Trouble> {
        self.succeeds(&["pause", "first"])?;
        self.stood.set(Some(self.first_length()));
        let mut children = Vec::new();
        for name in &COPIES[..2] {
            self.succeeded(&mut self.machine(name, &["fork", "first"])?, "fork")?;
            children.push(Child { round: self, name });
        }
        // The children stand still, as it did.
        for name in ["first", COPIES[0], COPIES[1]] {
            self.succeeds(&["resume", name])?;
        }
        first.ended(self.setup.limit)?;
        for child in children {
            child.ended()?;
        }
        Ok(())
    }
}

/// A machine that a fork has made, which is no child of this process.
struct Child<'a> {
    round: &'a Round<'a>,
    name: &'a str,
}

impl Child<'_> {
    /// Waits for its end. That is the end of its events, too.
    fn ended(self) -> Result<(), Trouble> {
        let mut command = self.round.vellum(&["ctl", self.name, "events"])?;
        Process::start(&mut command, self.round.path("events.err"))?.ended(self.round.setup.limit)
    }
}

impl Drop for Child<'_> {
    fn drop(&mut self) {
        // It may have ended. A signal does not keep this from it, and a machine that hangs does not
        // keep the driver.
        let Ok(mut command) = self.round.vellum(&["ctl", self.name, "stop"]) else { return };
        if let Ok(mut process) = Process::start(&mut command, self.round.path("stop.err")) {
            process.ends_within(STOP_TIMEOUT);
        }
    }
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    let (setup, limit) = (round.setup, round.setup.limit);
    let backing = if scenario == Scenario::Fork { ",backing=memfd" } else { "" };
    let [cpus, memory, kernel] = [
        setup.cpus.to_string(),
        format!("{}m{backing}", setup.memory),
        round.path(KERNEL).display().to_string(),
    ];
    let line = ["run", "-k", &kernel, "-c", &cpus, "-m", &memory, "-p", &setup.cmdline];
    let mut first = round.start("first", &line)?;
    if scenario == Scenario::Boot {
        return first.ended(limit);
    }
    round.has_begun(&mut first)?;
    let (dir, socket) =
        (round.path("saved").display().to_string(), round.path("socket").display().to_string());
    match scenario {
        Scenario::Boot => {}
        Scenario::Pause => {
            round.succeeds(&["pause", "first"])?;
            is_silent(round)?;
            round.succeeds(&["resume", "first"])?;
            first.ended(limit)?;
        }
        Scenario::Fork => round.forks(&mut first)?,
        Scenario::Snapshot | Scenario::SnapshotDiff | Scenario::Restore => {
            if scenario == Scenario::SnapshotDiff {
                round.succeeds(&["snapshot", "first", &dir, "--follow"])?;
                let before = round.pass();
                round.goes_on(&mut first, before)?;
            }
            round.succeeds(&["snapshot", "first", &dir, "--stop"])?;
            first.ended(limit)?;
            (setup.between)(&round.path("saved")).map_err(Trouble::io("the snapshot"))?;
            round.restores(scenario, |name| round.start(name, &["restore", &dir]))?;
        }
        Scenario::Migrate | Scenario::MigratePostcopy => {
            let to = format!("unix:{socket}");
            let mut second = round.start("second", &["receive", "--listen", &to])?;
            second.until(limit, "its socket", || Ok(round.path("socket").exists().then_some(())))?;
            let mode = if scenario == Scenario::Migrate { "precopy" } else { "postcopy" };
            round.succeeds(&["migrate", "first", "--to", &to, "--mode", mode])?;
            first.ended(limit)?;
            round.copy_ends(&mut second, "second")?;
        }
    }
    Ok(())
}
