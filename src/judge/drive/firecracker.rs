//! Firecracker, driven by its REST API (src/firecracker/swagger/firecracker.yaml in Firecracker).
//! The guest's serial port is its standard output; it ends when the guest resets itself by the
//! i8042.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use serde_json::{Value, json};

use super::http::Api;
use super::process::Process;
use super::{DISK, KERNEL, Round, Scenario, Trouble, cannot, is_silent, program, version_of};
use crate::schedule::PAGE;
use vellum_sys::pagemap::data;

const PROGRAM: &str = "firecracker";
const REMEDY: &str = "get a release of Firecracker, or name the directory of its program in VELLUM_VMMS";

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    version_of(round, PROGRAM, "--version", REMEDY)
}

struct Firecracker {
    process: Process,
    api: Api,
}

impl Firecracker {
    fn start(round: &Round, name: &str) -> Result<Self, Trouble> {
        let mut command = program(PROGRAM);
        let socket = format!("{name}.api");
        // It would log to its standard output, in the middle of the guest's lines.
        let log = format!("{name}.said");
        command.current_dir(round.dir).args(["--api-sock", &socket, "--log-path", &log]);
        command.args(&round.setup.arguments);
        let console = File::create(round.path(&format!("{name}.log"))).map_err(Trouble::io("the console"))?;
        let error = round.path(&format!("{name}.err"));
        let mut process = Process::start_with(&mut command, error, console.into())?;
        let api = Api::of(&mut process, &round.path(&socket), round.setup.limit)?;
        Ok(Self { process, api })
    }

    fn put(&self, path: &str, body: &Value) -> Result<(), Trouble> {
        self.api.request("PUT", path, Some(body))
    }

    fn boot(&self, round: &Round) -> Result<(), Trouble> {
        let setup = round.setup;
        let machine =
            json!({ "vcpu_count": setup.cpus, "mem_size_mib": setup.memory, "track_dirty_pages": true });
        self.put("/machine-config", &machine)?;
        self.put("/boot-source", &json!({ "kernel_image_path": KERNEL, "boot_args": setup.cmdline }))?;
        let disk = json!({
            "drive_id": "disk", "path_on_host": DISK, "is_root_device": false, "is_read_only": true
        });
        self.put("/drives/disk", &disk)?;
        self.put("/actions", &json!({ "action_type": "InstanceStart" }))
    }

    fn set_state(&self, state: &str) -> Result<(), Trouble> {
        self.api.request("PATCH", "/vm", Some(&json!({ "state": state })))
    }

    fn save(&self, kind: &str, memory: &str) -> Result<(), Trouble> {
        let files = json!({ "snapshot_type": kind, "snapshot_path": "state", "mem_file_path": memory });
        self.put("/snapshot/create", &files)
    }
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    let limit = round.setup.limit;
    match scenario {
        Scenario::Migrate | Scenario::MigratePostcopy => {
            return cannot("Firecracker has no migration", "judge snapshots instead: --scenario snapshot");
        }
        Scenario::Fork => return cannot("Firecracker does not fork machines", "--scenario restore"),
        _ => {}
    }
    let mut first = Firecracker::start(round, "first")?;
    first.boot(round)?;
    if scenario == Scenario::Boot {
        return first.process.ended(limit);
    }
    round.has_begun(&mut first.process)?;
    first.set_state("Paused")?;
    match scenario {
        Scenario::Pause => {
            is_silent(round)?;
            first.set_state("Resumed")?;
            return first.process.ended(limit);
        }
        Scenario::SnapshotDiff => {
            first.save("Full", "saved")?;
            let before = round.pass();
            first.set_state("Resumed")?;
            round.goes_on(&mut first.process, before)?;
            first.set_state("Paused")?;
            first.save("Diff", "diff")?;
            merge(&round.path("diff"), &round.path("saved")).map_err(Trouble::io("the diff"))?;
        }
        _ => first.save("Full", "saved")?,
    }
    is_silent(round)?;
    drop(first);
    (round.setup.between)(&round.path("saved")).map_err(Trouble::io("the snapshot"))?;
    let memory = json!({ "backend_path": "saved", "backend_type": "File" });
    let load = json!({ "snapshot_path": "state", "mem_backend": memory, "resume_vm": true });
    round.restores(scenario, |name| {
        let second = Firecracker::start(round, name)?;
        second.put("/snapshot/load", &load)?;
        Ok(second.process)
    })
}

/// Copies what a sparse file of dirty pages holds into the file of the snapshot before, as
/// Firecracker's snapshot-editor does.
fn merge(diff: &Path, base: &Path) -> io::Result<()> {
    let (mut from, mut to) = (File::open(diff)?, OpenOptions::new().write(true).open(base)?);
    let mut extents = Vec::new();
    data(&from, 0, from.metadata()?.len() / PAGE, |pages| extents.push(pages))?;
    for pages in extents {
        from.seek(SeekFrom::Start(pages.start * PAGE))?;
        to.seek(SeekFrom::Start(pages.start * PAGE))?;
        io::copy(&mut (&from).take((pages.end - pages.start) * PAGE), &mut to)?;
    }
    Ok(())
}
