//! kvmtool, driven by its own commands (Documentation/kvmtool.1 in kvmtool). It finds its machines
//! by sockets in `.lkvm` in the home directory, which is the round's here.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use super::process::Process;
use super::{DISK, FIRST, Round, Scenario, Trouble, cannot, is_silent, program, version_of};
use crate::image::{Arch, Format, image};

const PROGRAM: &str = "lkvm";
const KERNEL: &str = "judge.kvmtool";

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    let remedy = "build it from a checkout, and name the directory of its program in VELLUM_VMMS";
    version_of(round, PROGRAM, "--version", remedy)
}

fn lkvm(round: &Round, arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM);
    command.current_dir(round.dir).env("HOME", round.dir).args(arguments);
    command
}

/// Has the machine paused or resumed.
fn ask(round: &Round, what: &str) -> Result<(), Trouble> {
    let mut command = lkvm(round, &[what, "--name", "first"]);
    Process::succeeds(&mut command, round.path("ask.err"), Stdio::null(), round.setup.limit, what)
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    if !matches!(scenario, Scenario::Boot | Scenario::Pause) {
        return cannot("kvmtool has neither snapshots nor migration", "--scenario boot or pause");
    }
    let setup = round.setup;
    // It takes no ELF files.
    let format = if setup.arch == Arch::X86_64 { Format::BzImage } else { setup.arch.format() };
    fs::write(round.path(KERNEL), image(format)).map_err(Trouble::io("the image"))?;
    let [cpus, memory, disk] = [setup.cpus.to_string(), setup.memory.to_string(), format!("{DISK},ro")];
    let machine = ["run", "--name", "first", "-k", KERNEL, "-c", &cpus, "-m", &memory, "-p", &setup.cmdline];
    let devices = ["--console", "serial", "--network", "mode=none", "--disk", &disk];
    let mut command = lkvm(round, &[&machine[..], &devices[..]].concat());
    command.args(&setup.arguments);
    let console = File::create(round.path(FIRST)).map_err(Trouble::io("the console"))?;
    let mut first = Process::start_with(&mut command, round.path("first.err"), console.into())?;
    if scenario == Scenario::Pause {
        round.has_begun(&mut first)?;
        ask(round, "pause")?;
        is_silent(round)?;
        ask(round, "resume")?;
    }
    first.ended(setup.limit)
}
