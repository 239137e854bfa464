//! crosvm, driven by its own commands, which ask the machine by its control socket
//! (src/crosvm/cmdline.rs and docs/book/src/architecture/snapshotting.md in crosvm).

use std::process::{Command, Stdio};

use super::process::Process;
use super::{DISK, KERNEL, Round, Scenario, Trouble, cannot, is_silent, program, version_of};

const PROGRAM: &str = "crosvm";

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    let remedy = "build it from a checkout, and name the directory of its program in VELLUM_VMMS";
    version_of(round, PROGRAM, "version", remedy)
}

fn crosvm(round: &Round, arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM);
    command.current_dir(round.dir).args(arguments);
    command
}

/// Starts a machine, or restores it with the same devices.
fn start(round: &Round, name: &str, restore: &[&str]) -> Result<Process, Trouble> {
    let setup = round.setup;
    let [cpus, memory, socket] = [setup.cpus.to_string(), setup.memory.to_string(), format!("{name}.sock")];
    let serial = format!("type=file,path={name}.log,hardware=serial,num=1,console=true");
    let disk = format!("path={DISK},ro=true");
    // A sandbox's processes have other directories.
    let machine = ["run", "--disable-sandbox", "--socket", &socket, "--cpus", &cpus, "--mem", &memory];
    let devices = ["--no-usb", "--serial", &serial, "--block", &disk, "--params", &setup.cmdline];
    let mut command = crosvm(round, &[&machine[..], &devices, restore].concat());
    command.args(&setup.arguments).arg(KERNEL);
    Process::start(&mut command, round.path(&format!("{name}.err")))
}

/// A command that the machine answers.
fn ask(round: &Round, arguments: &[&str]) -> Result<(), Trouble> {
    let mut command = crosvm(round, arguments);
    Process::succeeds(&mut command, round.path("ask.err"), Stdio::null(), round.setup.limit, arguments[0])
}

/// Waits until the machine can be asked.
fn listens(round: &Round, process: &mut Process, name: &str) -> Result<(), Trouble> {
    let socket = round.path(&format!("{name}.sock"));
    process.until(round.setup.limit, "its control socket", || Ok(socket.exists().then_some(())))
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    match scenario {
        Scenario::SnapshotDiff => {
            return cannot("crosvm has no snapshots of changed pages alone", "--scenario snapshot");
        }
        Scenario::Migrate | Scenario::MigratePostcopy => {
            return cannot("crosvm has no migration", "--scenario snapshot");
        }
        Scenario::Fork => return cannot("crosvm does not fork machines", "--scenario restore"),
        Scenario::Boot | Scenario::Pause | Scenario::Snapshot | Scenario::Restore => {}
    }
    let limit = round.setup.limit;
    let mut first = start(round, "first", &[])?;
    if scenario == Scenario::Boot {
        return first.ended(limit);
    }
    round.has_begun(&mut first)?;
    // With --full it stops devices, too.
    ask(round, &["suspend", "first.sock", "--full"])?;
    is_silent(round)?;
    if scenario == Scenario::Pause {
        ask(round, &["resume", "first.sock", "--full"])?;
        return first.ended(limit);
    }
    ask(round, &["snapshot", "take", "saved", "first.sock"])?;
    drop(first);
    (round.setup.between)(&round.path("saved")).map_err(Trouble::io("the snapshot"))?;
    round.restores(scenario, |name| {
        let mut copy = start(round, name, &["--restore", "saved"])?;
        listens(round, &mut copy, name)?;
        // It does nothing to a machine that runs.
        ask(round, &["resume", &format!("{name}.sock"), "--full"])?;
        Ok(copy)
    })
}
