//! Cloud Hypervisor, driven by its REST API (docs/api.md, docs/snapshot_restore.md and
//! docs/live_migration.md in Cloud Hypervisor). A machine that is restored or received opens the
//! files that the first one has named. So the second process runs in a directory of its own, where
//! these names are other files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use super::http::Api;
use super::process::Process;
use super::{COPIES, DISK, FIRST, KERNEL, Round, Scenario, Trouble, cannot, is_silent, program, version_of};

const PROGRAM: &str = "cloud-hypervisor";
const REMEDY: &str = "build it from a checkout, and name the directory of its program in VELLUM_VMMS";
/// The first version that migrates by postcopy. Earlier ones ignore what asks for it.
const POSTCOPY: u32 = 54;

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    version_of(round, PROGRAM, "--version", REMEDY)
}

struct CloudHypervisor {
    process: Process,
    api: Api,
}

/// Starts the program in `dir`.
fn start(round: &Round, dir: &Path, arguments: &[&str]) -> Result<Process, Trouble> {
    let mut command = program(PROGRAM);
    command.current_dir(dir).args(["--api-socket", "api"]).args(arguments).args(&round.setup.arguments);
    Process::start(&mut command, dir.join("first.err"))
}

/// Refuses a version without postcopy.
fn has_postcopy(round: &Round) -> Result<(), Trouble> {
    let version = version(round)?;
    // As in `cloud-hypervisor v54.0.0`.
    let number: Option<u32> =
        version.split_whitespace().find_map(|word| word.strip_prefix('v')?.split('.').next()?.parse().ok());
    match number {
        Some(number) if number < POSTCOPY => cannot(
            &format!("Cloud Hypervisor {number} has no postcopy"),
            &format!("version {POSTCOPY} or newer"),
        ),
        _ => Ok(()),
    }
}

impl CloudHypervisor {
    /// The program that was started in `dir`, when it listens.
    fn of(mut process: Process, round: &Round, dir: &Path) -> Result<Self, Trouble> {
        let api = Api::of(&mut process, &dir.join("api"), round.setup.limit)?;
        Ok(Self { process, api })
    }

    fn put(&self, action: &str, body: Option<&Value>) -> Result<(), Trouble> {
        self.api.request("PUT", &format!("/api/v1/{action}"), body)
    }
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    match scenario {
        Scenario::SnapshotDiff => {
            cannot("Cloud Hypervisor has no snapshots of changed pages alone", "--scenario snapshot")
        }
        Scenario::Fork => cannot("Cloud Hypervisor does not fork machines", "--scenario restore"),
        _ => {
            if scenario == Scenario::MigratePostcopy {
                has_postcopy(round)?;
            }
            moves(round, scenario)
        }
    }
}

/// A process of its own directory, which waits to be told what machine it runs.
fn copy(round: &Round, name: &str) -> Result<CloudHypervisor, Trouble> {
    let dir = round.path(name);
    fs::create_dir(&dir).map_err(Trouble::io("a directory"))?;
    for name in [DISK, KERNEL] {
        symlink(round.path(name), dir.join(name)).map_err(Trouble::io("a directory"))?;
    }
    CloudHypervisor::of(start(round, &dir, &[])?, round, &dir)
}

fn moves(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    let (setup, limit) = (round.setup, round.setup.limit);
    let [cpus, memory] = [format!("boot={}", setup.cpus), format!("size={}M", setup.memory)];
    let [serial, disk] = [format!("file={FIRST}"), format!("path={DISK},readonly=on")];
    let line = ["--kernel", KERNEL, "--cmdline", &setup.cmdline, "--cpus", &cpus, "--memory", &memory];
    let devices = ["--serial", &serial, "--console", "off", "--disk", &disk];
    let mut process = start(round, round.dir, &[&line[..], &devices[..]].concat())?;
    if scenario == Scenario::Boot {
        return process.ended(limit);
    }
    let mut first = CloudHypervisor::of(process, round, round.dir)?;
    round.has_begun(&mut first.process)?;
    if matches!(scenario, Scenario::Migrate | Scenario::MigratePostcopy) {
        return migrates(round, &mut first, scenario == Scenario::MigratePostcopy);
    }
    first.put("vm.pause", None)?;
    is_silent(round)?;
    if scenario == Scenario::Pause {
        first.put("vm.resume", None)?;
        return first.process.ended(limit);
    }
    let saved = round.path("saved");
    fs::create_dir(&saved).map_err(Trouble::io("a directory"))?;
    let url = format!("file://{}", saved.display());
    first.put("vm.snapshot", Some(&json!({ "destination_url": url })))?;
    drop(first);
    (setup.between)(&saved).map_err(Trouble::io("the snapshot"))?;
    round.restores(scenario, |name| {
        let second = copy(round, name)?;
        second.put("vm.restore", Some(&json!({ "source_url": url })))?;
        second.put("vm.resume", None)?;
        Ok(second.process)
    })
}

fn migrates(round: &Round, first: &mut CloudHypervisor, postcopy: bool) -> Result<(), Trouble> {
    let limit = round.setup.limit;
    let mut second = copy(round, COPIES[0])?;
    let socket = round.path("socket");
    let url = format!("unix:{}", socket.display());
    let mode = if postcopy { "Postcopy" } else { "Precopy" };
    let body = json!({ "receiver_url": url, "memory_mode": mode });
    let receives = second.api.ask("PUT", "/api/v1/vm.receive-migration", Some(&body))?;
    second.process.until(limit, "its socket", || Ok(socket.exists().then_some(())))?;
    first.put(
        "vm.send-migration",
        Some(&json!({ "destination_url": url, "local": false, "memory_mode": mode })),
    )?;
    // The first one may answer before it has sent anything. The second one answers when it has the
    // machine.
    receives.answer().map_err(|trouble| match trouble {
        // Where the first one failed, it has the reason.
        Trouble::Failed(why) => Trouble::Failed(format!("{why}{}", first.process.said())),
        other => other,
    })?;
    let moved = round.first_length();
    round.copy_ends(&mut second.process, COPIES[0])?;
    round.has_not_grown(moved)
}
