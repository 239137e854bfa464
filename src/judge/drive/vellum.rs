//! This program, driven by its own command line.

use std::process::{Command, Stdio};

use super::process::Process;
use super::{DISK, KERNEL, Round, Scenario, Trouble};

pub(super) fn version() -> Result<String, Trouble> {
    let output = program()?.arg("--version").output().map_err(Trouble::io("vellum"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}

fn program() -> Result<Command, Trouble> {
    std::env::current_exe().map(Command::new).map_err(Trouble::io("this program"))
}

impl Round<'_> {
    /// A command whose machines have their sockets in the round's directory.
    fn vellum(&self, arguments: &[&str]) -> Result<Command, Trouble> {
        let mut command = program()?;
        command.args(arguments).env("XDG_RUNTIME_DIR", self.dir);
        Ok(command)
    }

    /// Starts a machine of this name, whose console is a file.
    fn machine(&self, name: &str, arguments: &[&str]) -> Result<Process, Trouble> {
        let serial = format!("file={}", self.path(&format!("{name}.log")).display());
        let mut command = self.vellum(arguments)?;
        command.args(["--name", name, "--serial", &serial]);
        // A path may have commas, which end it here.
        command.current_dir(self.dir).args(["--disk", &format!("{DISK},readonly")]);
        Process::start(&mut command, self.path(&format!("{name}.err")))
    }

    /// Runs a command that must succeed.
    fn succeeds(&self, arguments: &[&str]) -> Result<(), Trouble> {
        let mut command = self.vellum(arguments)?;
        let output = command.stdin(Stdio::null()).output().map_err(Trouble::io("vellum"))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(Trouble::failed(String::from_utf8_lossy(&output.stderr).trim())),
        }
    }
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    let (setup, limit) = (round.setup, round.setup.limit);
    let [cpus, memory, kernel] =
        [setup.cpus.to_string(), format!("{}m", setup.memory), round.path(KERNEL).display().to_string()];
    let line = ["run", "-k", &kernel, "-c", &cpus, "-m", &memory, "-p", &setup.cmdline];
    let mut first = round.machine("first", &line)?;
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
            round.succeeds(&["resume", "first"])?;
            first.ended(limit)?;
        }
        Scenario::Snapshot | Scenario::SnapshotDiff => {
            if scenario == Scenario::SnapshotDiff {
                round.succeeds(&["snapshot", "first", &dir, "--follow"])?;
                let before = round.pass();
                round.goes_on(&mut first, before)?;
            }
            round.succeeds(&["snapshot", "first", &dir, "--stop"])?;
            first.ended(limit)?;
            (setup.between)(&round.path("saved")).map_err(Trouble::io("the snapshot"))?;
            round.machine("second", &["restore", &dir])?.ended(limit)?;
        }
        Scenario::Migrate | Scenario::MigratePostcopy => {
            let to = format!("unix:{socket}");
            let mut second = round.machine("second", &["receive", "--listen", &to])?;
            second.until(limit, "its socket", || Ok(round.path("socket").exists().then_some(())))?;
            let mode = if scenario == Scenario::Migrate { "precopy" } else { "postcopy" };
            round.succeeds(&["migrate", "first", "--to", &to, "--mode", mode])?;
            first.ended(limit)?;
            second.ended(limit)?;
        }
    }
    Ok(())
}
