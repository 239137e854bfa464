//! QEMU, driven by QMP (docs/interop/qmp-spec.rst in QEMU).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{Process, printable, wait};
use super::stream::Stream;
use super::{DISK, KERNEL, Round, Scenario, Trouble, cannot, is_silent, program, version_of};
use crate::image::Arch;

/// Where a machine moves to.
const SOCKET: &str = "unix:socket";
/// Bytes of an answer.
const MAX_ANSWER: u64 = 1 << 20;

pub(super) fn version(round: &Round) -> Result<String, Trouble> {
    let (program, package) = program_of(round.setup.arch);
    let version = version_of(round, program, "--version", &format!("apt-get install {package}"))?;
    // A verdict about one says nothing of the other.
    let accelerator = if has_kvm(round.setup.arch) { "KVM" } else { "TCG" };
    Ok(format!("{version}, {accelerator}"))
}

/// Whether QEMU runs machines of this architecture by KVM here. It emulates them otherwise.
fn has_kvm(arch: Arch) -> bool {
    arch == Arch::HOST && File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// The program that emulates an architecture, and the package of Debian that has it.
fn program_of(arch: Arch) -> (&'static str, &'static str) {
    match arch {
        Arch::X86_64 => ("qemu-system-x86_64", "qemu-system-x86"),
        Arch::Aarch64 => ("qemu-system-aarch64", "qemu-system-arm"),
    }
}

/// A QEMU with its QMP connection.
struct Qemu {
    process: Process,
    qmp: BufReader<Stream>,
    limit: Duration,
}

impl Qemu {
    fn start(round: &Round, name: &str, incoming: Option<&str>) -> Result<Self, Trouble> {
        let setup = round.setup;
        let socket = round.path(&format!("{name}.qmp"));
        let mut command = program(program_of(setup.arch).0);
        // A processor without KVM's bit of arch-capabilities: not every KVM can set it.
        let (machine, host) = match setup.arch {
            Arch::X86_64 => ("pc", "host,-arch-capabilities"),
            Arch::Aarch64 => ("virt,gic-version=max", "host"),
        };
        match has_kvm(setup.arch) {
            true => command.args(["-accel", "kvm", "-cpu", host]),
            false => command.args(["-accel", "tcg", "-cpu", "max"]),
        };
        command.args(["-M", machine, "-nodefaults", "-display", "none", "-no-reboot"]);
        command.args(["-smp", &setup.cpus.to_string(), "-m", &format!("{}M", setup.memory)]);
        // Its files are in its working directory: QEMU splits paths at commas, and has a shell for
        // `exec:`.
        command.current_dir(round.dir).args(["-kernel", KERNEL, "-append", &setup.cmdline]);
        command.args(["-serial", &format!("file:{name}.log")]);
        command.args(["-qmp", &format!("unix:{name}.qmp,server=on,wait=off")]);
        let disk = format!("if=none,id=disk,format=raw,readonly=on,file={DISK}");
        command.args(["-drive", &disk, "-device", "virtio-blk-pci,drive=disk"]);
        if let Some(incoming) = incoming {
            command.args(["-incoming", incoming]);
        }
        command.args(&setup.arguments);
        let mut process = Process::start(&mut command, round.path(&format!("{name}.err")))?;
        let limit = setup.limit;
        let stream = process.until(limit, "its QMP socket", || Ok(Stream::connect(&socket, limit).ok()))?;
        let mut qemu = Self { process, qmp: BufReader::new(stream), limit };
        qemu.ask("qmp_capabilities", &json!({}))?;
        Ok(qemu)
    }

    /// One command and what it returns.
    fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Trouble> {
        self.answer(command, arguments)?.map_err(|why| Trouble::failed(format!("{command}: {why}")))
    }

    /// One command and what it returns, or the reason why QEMU refuses it. Events are passed over.
    fn answer(&mut self, command: &str, arguments: &Value) -> Result<Result<Value, String>, Trouble> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.qmp.get_mut().send(line.as_bytes()).map_err(Trouble::io(command))?;
        loop {
            let mut line = String::new();
            let read = (&mut self.qmp).take(MAX_ANSWER).read_line(&mut line).map_err(Trouble::io(command))?;
            if read == 0 {
                return Err(Trouble::failed(format!("QEMU closed QMP during {command}")));
            }
            let answer: Value = serde_json::from_str(&line)
                .map_err(|error| Trouble::failed(format!("QEMU answered nonsense to {command}: {error}")))?;
            if let Some(error) = answer.get("error") {
                return Ok(Err(printable(error["desc"].as_str().unwrap_or("no reason"))));
            }
            if let Some(value) = answer.get("return") {
                return Ok(Ok(value.clone()));
            }
        }
    }

    fn do_(&mut self, command: &str) -> Result<(), Trouble> {
        self.ask(command, &json!({})).map(drop)
    }

    /// Sends all of the machine's state to `to`. With `postcopy`, the machine moves first.
    fn migrate(&mut self, to: &str, postcopy: bool) -> Result<(), Trouble> {
        self.ask("migrate", &json!({ "uri": to }))?;
        if postcopy {
            self.do_("migrate-start-postcopy")?;
        }
        let begun = Instant::now();
        loop {
            let status =
                self.ask("query-migrate", &json!({}))?["status"].as_str().unwrap_or_default().to_owned();
            match status.as_str() {
                "completed" => return Ok(()),
                "failed" | "cancelled" => return Err(Trouble::failed(format!("the migration has {status}"))),
                _ => wait(begun, self.limit, "the end of the migration")?,
            }
        }
    }

    /// A machine that has moved keeps its state until it is told to go on.
    fn stands_where_it_moved(&mut self) -> Result<(), Trouble> {
        match self.ask("query-status", &json!({})) {
            Ok(state) if state["status"] == "postmigrate" => Ok(()),
            // A guest that went on may be over, and its QEMU with it.
            _ => Err(Trouble::GoesOn),
        }
    }

    fn wants_postcopy(&mut self) -> Result<(), Trouble> {
        let on = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
        // A QEMU that does not answer has failed. One that refuses lacks the feature.
        self.answer("migrate-set-capabilities", &on)?.map(drop).map_err(|why| {
            Trouble::Missing(why, "allow userfaultfd: sysctl vm.unprivileged_userfaultfd=1".into())
        })
    }
}

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    let limit = round.setup.limit;
    match scenario {
        Scenario::SnapshotDiff => {
            return cannot("QEMU has no snapshots of changed pages alone", "--scenario snapshot");
        }
        Scenario::Fork => return cannot("QEMU does not fork machines", "--scenario restore"),
        _ => {}
    }
    let mut first = Qemu::start(round, "first", None)?;
    if scenario == Scenario::Boot {
        return first.process.ended(limit);
    }
    round.has_begun(&mut first.process)?;
    match scenario {
        Scenario::Boot | Scenario::SnapshotDiff | Scenario::Fork => {}
        Scenario::Pause => {
            first.do_("stop")?;
            is_silent(round)?;
            first.do_("cont")?;
            first.process.ended(limit)?;
        }
        Scenario::Snapshot | Scenario::Restore => {
            first.do_("stop")?;
            first.migrate("exec:cat > saved", false)?;
            is_silent(round)?;
            drop(first);
            (round.setup.between)(&round.path("saved")).map_err(Trouble::io("the snapshot"))?;
            round.restores(scenario, |name| {
                let mut second = Qemu::start(round, name, Some("exec:cat saved"))?;
                // It stands still, because it was saved so; and there is nothing to continue before
                // all of it is read.
                let begun = Instant::now();
                while second.ask("query-status", &json!({}))?["status"] == "inmigrate" {
                    wait(begun, limit, "the end of the restore")?;
                }
                second.do_("cont")?;
                Ok(second.process)
            })?;
        }
        Scenario::Migrate | Scenario::MigratePostcopy => {
            let postcopy = scenario == Scenario::MigratePostcopy;
            let mut second = match postcopy {
                false => Qemu::start(round, "second", Some(SOCKET))?,
                true => {
                    let mut second = Qemu::start(round, "second", Some("defer"))?;
                    second.wants_postcopy()?;
                    first.wants_postcopy()?;
                    second.ask("migrate-incoming", &json!({ "uri": SOCKET }))?;
                    second
                }
            };
            first.migrate(SOCKET, postcopy)?;
            let moved = round.first_length();
            round.copy_ends(&mut second.process, "second")?;
            // From its move to the other one's end: both must not have run.
            first.stands_where_it_moved()?;
            round.has_not_grown(moved)?;
        }
    }
    Ok(())
}
