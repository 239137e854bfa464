//! `vellum judge`: the image boots and judges, under Vellum and QEMU; it survives each kind of
//! move, beside the built-in guest; what a planted fault loses is named; and no log passes that is
//! not whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

use support::env::{Machine, Process, TestEnv};
use support::hosts::{kvm, real};
use support::{Completion, Failed, LIMIT, Need, Tests, ensure, eventually, test, tools};
use vellum_judge::drive::{Scenario, Setup, Vmm, run};
use vellum_judge::image::{Format, image};
use vellum_judge::read::{Log, Start, Verdict, page, read};
use vellum_judge::sectors;
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE};

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    // Each is one machine that fills its memory.
    for (cpus, memory, protocol) in
        [(1, "64m", "pvh"), (2, "64m", "linux64"), (4, "64m", "pvh"), (2, "2g", "pvh")]
    {
        // An emulated host takes minutes to fill as much.
        let need = if memory == "2g" { boots().and(real()) } else { boots() };
        tests.add(format!("{cpus}_vcpus_and_{memory}_by_{protocol}_are_whole"), need, move || {
            boots_under_vellum(cpus, memory, protocol)
        });
    }
    for machine in ["microvm", "pc"] {
        tests.add(format!("qemu_s_{machine}_is_whole"), emulator(), move || boots_under_qemu(machine));
    }
    for (name, more) in [
        ("pages_left_out", "write=30"),
        ("a_hot_set", "hot=10:90"),
        ("the_order_of_addresses", "order=sequential"),
        ("a_rate", "rate=500000"),
        ("reads_alone", "write=0"),
        ("a_look_at_the_neighbour_at_the_end", "verify=end"),
    ] {
        tests.add(format!("{name}_make_the_checksums_that_the_reader_computes"), boots(), move || {
            let env = TestEnv::new()?;
            let log = runs(&env, 2, "64m", &format!("passes=2 seed=3 {more}"), "")?;
            whole(&log)
        });
    }
    tests.run()
}

/// The image is for x86-64 alone.
fn boots() -> Need {
    kvm()?;
    match cfg!(target_arch = "x86_64") {
        true => Ok(()),
        false => Err("the image is for x86-64".into()),
    }
}

fn emulator() -> Need {
    tools::program("qemu-system-x86_64")
}

/// The image in a file.
fn elf(env: &TestEnv) -> Result<PathBuf, Failed> {
    let path = env.path("judge.elf");
    if !path.exists() {
        fs::write(&path, image(Format::Elf))?;
    }
    Ok(path)
}

/// The arguments of a disk that the image reads.
fn disk(env: &TestEnv) -> Result<String, Failed> {
    let path = env.path("judge.raw");
    if !path.exists() {
        let sectors: Vec<u8> = (0..2048).flat_map(sectors::sector).collect();
        fs::write(&path, sectors)?;
    }
    Ok(format!("--disk {},readonly", path.display()))
}

/// The arguments of a machine that the image runs, whose console is a file called `console`.
fn line(env: &TestEnv, cpus: u32, memory: &str, cmdline: &str, console: &str) -> Result<Command, Failed> {
    let mut command = env.command(&format!("run --kernel {} --cpus {cpus}", elf(env)?.display()));
    command.args(["--memory", memory, "--cmdline", cmdline]);
    command.args(["--serial", &format!("file={}", env.path(console).display())]);
    Ok(command)
}

fn runs(env: &TestEnv, cpus: u32, memory: &str, cmdline: &str, more: &str) -> Result<Log, Failed> {
    let output = line(env, cpus, memory, cmdline, "console")?.args(more.split_whitespace()).output()?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    Ok(read(&fs::read(env.path("console"))?))
}

fn whole(log: &Log) -> Result<(), Failed> {
    let verdict = log.verdict();
    ensure(verdict == Verdict::Whole, || format!("{verdict:?}: {log:?}"))
}

fn boots_under_vellum(cpus: u32, memory: &str, protocol: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let transport = if cpus == 1 { "mmio" } else { "pci" };
    let more = format!("--protocol {protocol} --transport {transport} {}", disk(&env)?);
    let log = runs(&env, cpus, memory, "passes=2 seed=7 clock=60s", &more)?;
    whole(&log)?;
    ensure(log.disks == [(transport.into(), 2048)], || format!("{:?}", log.disks))?;
    let start = log.start.as_ref().ok_or("no first line")?;
    let has_clocks = start.kvmclock && start.timer;
    ensure(has_clocks && (start.vcpus, start.given) == (cpus.into(), cpus.into()), || format!("{start:?}"))
}

fn boots_under_qemu(machine: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    disk(&env)?;
    let drive = format!("if=none,id=d,format=raw,readonly=on,file={}", env.path("judge.raw").display());
    // On `microvm` a bzImage was not seen to start. Its virtio-mmio is of version 1, or of version
    // 2.
    let (ways, device, transport) = match machine {
        "pc" => ([(Format::Elf, "on"), (Format::BzImage, "on")], "virtio-blk-pci", "pci"),
        _ => ([(Format::Elf, "on"), (Format::Elf, "off")], "virtio-blk-device", "mmio"),
    };
    for (format, legacy) in ways {
        let path = env.path("image");
        fs::write(&path, image(format))?;
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", machine, "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "64", "-no-reboot"]);
        qemu.args(["-nodefaults", "-display", "none", "-serial", "stdio", "-append", "passes=2 seed=7"]);
        qemu.args(["-global", &format!("virtio-mmio.force-legacy={legacy}")]);
        qemu.args(["-drive", &drive, "-device", &format!("{device},drive=d")]);
        let output = qemu.arg("-kernel").arg(&path).output()?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let log = read(&output.stdout);
        whole(&log)?;
        let timer = log.start.as_ref().is_some_and(|start| start.timer);
        ensure(timer && log.disks == [(transport.into(), 2048)], || format!("{log:?}"))?;
    }
    Ok(())
}

/// The options of an image that moves. It takes some seconds, in which it does little, so that a
/// busy host does not make them minutes. It says twice a second how far it is: while it prints, its
/// stack is in use, and an image that loses its stack says nothing of use.
const MOVING: &str = "passes=16 rate=8000 seed=5 report=500ms";

/// Waits until the image has reported a pass that began in the console of this name.
fn has_passed(env: &TestEnv, console: &str) -> Result<(), Failed> {
    let path = env.path(console);
    eventually(LIMIT, "the image has begun a pass", || {
        let log = read(&fs::read(&path).unwrap_or_default());
        Ok((log.pass > Some(0)).then_some(()))
    })
}

fn ends(machine: Machine, status: i32) -> Result<(), Failed> {
    let output = machine.end()?;
    ensure(output.status.code() == Some(status), || format!("not status {status}: {output:?}"))
}

fn succeeds(output: Output) -> Result<(), Failed> {
    ensure(output.status.success(), || format!("{output:?}"))
}

/// The log of a machine that printed into each of these files in turn.
fn logged(env: &TestEnv, consoles: &[&str]) -> Result<Log, Failed> {
    let mut text = Vec::new();
    for console in consoles {
        text.extend(fs::read(env.path(console))?);
    }
    Ok(read(&text))
}

/// Starts the image as `here`, with memory that may be handed over.
fn starts(env: &TestEnv) -> Result<Machine, Failed> {
    let mut command = line(env, 2, "16m,backing=memfd", MOVING, "here.log")?;
    let machine = env.start("here", command.args(disk(env)?.split(' ')))?;
    has_passed(env, "here.log")?;
    Ok(machine)
}

/// Moves the image to `there`.
fn moves(env: &TestEnv, mode: &str) -> Result<Machine, Failed> {
    let here = starts(env)?;
    let serial = format!("--serial file={} {}", env.path("there.log").display(), disk(env)?);
    let there = env.receive("there", &serial)?;
    succeeds(env.migrate("here", "there", mode)?)?;
    ends(here, 15)?;
    Ok(there)
}

/// Moves the image to `there`, where it ends.
fn migrates(mode: &str) -> Result<Log, Failed> {
    let env = TestEnv::new()?;
    ends(moves(&env, mode)?, 0)?;
    logged(&env, &["here.log", "there.log"])
}

/// The built-in guest moves in the same way; every page is right.
fn built_in_migrates(mode: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let workload = "--passes 0 --workload write,order=random,rate=20000,write=80";
    let here = env.run("here", &format!("run --cpus 2 --memory 16m {workload}"))?;
    env.has_written("here", 10_000)?;
    let json = env.path("json");
    let there = env.receive("there", &format!("--json {}", json.display()))?;
    succeeds(env.migrate("here", "there", mode)?)?;
    ends(here, 15)?;
    succeeds(env.vellum("ctl there stop")?)?;
    ends(there, 0)?;
    right(&json)
}

fn right(json: &PathBuf) -> Result<(), Failed> {
    let result: serde_json::Value = serde_json::from_slice(&fs::read(json)?)?;
    let figures = result["figures"].as_array().ok_or("no figures")?;
    let wrong =
        figures.iter().find(|figure| figure["name"] == "wrong_stamps").ok_or("nothing was checked")?;
    ensure(wrong["value"].as_f64() == Some(0.0), || format!("{wrong}"))
}

#[test(boots())]
fn a_migration_is_whole() -> Result<(), Failed> {
    whole(&migrates("--downtime 1s --timeout 10s,then=force")?)?;
    built_in_migrates("--downtime 1s --timeout 10s,then=force")
}

#[test(boots())]
fn a_postcopy_migration_is_whole() -> Result<(), Failed> {
    whole(&migrates("--mode postcopy")?)?;
    built_in_migrates("--mode postcopy")
}

/// A snapshot while the image runs, which goes on; and each way to restore it, whose console begins
/// in the middle.
#[test(boots())]
fn a_snapshot_and_each_restore_are_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = starts(&env)?;
    let dir = env.path("snap");
    succeeds(env.vellum(&format!("snapshot here {} --downtime 1s --timeout 10s", dir.display()))?)?;
    let before = fs::read(env.path("here.log"))?;
    for memory in ["eager", "map", "demand"] {
        let console = env.path("restored.log");
        let serial = format!("--serial file={} {}", console.display(), disk(&env)?);
        let restored = env.restore("restored", &format!("{} --memory {memory} {serial}", dir.display()))?;
        ends(restored, 0)?;
        whole(&read(&[before.clone(), fs::read(&console)?].concat()))?;
        fs::remove_file(&console)?;
    }
    ends(here, 0)?;
    whole(&logged(&env, &["here.log"])?)?;
    built_in_is_restored()
}

fn built_in_is_restored() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let workload = "--passes 0 --workload write,order=random,rate=20000,write=80";
    let here = env.run("here", &format!("run --cpus 2 --memory 16m {workload}"))?;
    env.has_written("here", 10_000)?;
    let dir = env.path("snap");
    succeeds(env.vellum(&format!("snapshot here {} --downtime 1s --timeout 10s", dir.display()))?)?;
    for memory in ["eager", "map", "demand"] {
        let json = env.path(&format!("{memory}.json"));
        let line = format!("{} --memory {memory} --json {}", dir.display(), json.display());
        let restored = env.restore("restored", &line)?;
        succeeds(env.vellum("ctl restored stop")?)?;
        ends(restored, 0)?;
        right(&json)?;
    }
    succeeds(env.vellum("ctl here stop")?)?;
    ends(here, 0)
}

#[test(boots())]
fn an_upgrade_is_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = starts(&env)?;
    let build = env.path("other-build");
    std::os::unix::fs::symlink(VELLUM, &build)?;
    succeeds(env.vellum(&format!("ctl here upgrade --downtime 1m {}", build.display()))?)?;
    ends(here, 0)?;
    whole(&logged(&env, &["here.log"])?)
}

/// Faults that a debug build makes: the log is LOST, and what is older than it should be is named
/// with its address.
#[test(boots())]
fn pages_that_a_migration_loses_are_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    // What is lost depends on the moment: some of a vCPU's own pages, the array of positions alone,
    // nothing, where no vCPU ran between the last pass and the end, or the stack of an image that
    // prints, which may print without end.
    eventually(LIMIT, "a page is lost and named", || {
        let env = TestEnv::planted(Some("no-last-harvest"))?;
        let mut there = moves(&env, "--downtime 1s --timeout 10s,then=force")?;
        let names = |log: &Log| {
            log.faults.iter().any(|fault| {
                let is_kind = ["lost-write", "position"].contains(&fault.kind);
                is_kind && fault.address >= 1 << 20 && fault.found < fault.expected
            })
        };
        eventually(LIMIT, "it has judged", || {
            let ended = there.child.try_wait()?.is_some();
            let log = logged(&env, &["here.log", "there.log"])?;
            let babbles = fs::metadata(env.path("there.log"))?.len() > 1 << 16;
            Ok((ended || names(&log) || babbles).then_some(()))
        })?;
        // It may have ended by itself meanwhile, and in any way.
        env.vellum("ctl there stop")?;
        there.end()?;
        let log = logged(&env, &["here.log", "there.log"])?;
        let verdict = log.verdict();
        ensure(verdict != Verdict::Lost || !log.faults.is_empty(), || format!("{log:?}"))?;
        Ok(names(&log).then_some(()))
    })?;
    Ok(Completion::Completed)
}

/// A snapshot's files, which a restore that maps them does not compare with their sums.
struct Files {
    env: TestEnv,
    before: Vec<u8>,
    /// The arguments of its devices.
    devices: String,
}

const PAGE: usize = 4096;

impl Files {
    /// Of two points that the image has been saved at, the second one, and in the directory `old`
    /// the first.
    fn new() -> Result<Self, Failed> {
        Self::of(TestEnv::new()?, "", String::new())
    }

    /// The same in `env`, of an image with more options and a machine with these devices.
    fn of(env: TestEnv, more: &str, devices: String) -> Result<Self, Failed> {
        let cmdline = format!("passes=40 rate=8000 seed=5 report=500ms {more}");
        let mut command = line(&env, 2, "16m", &cmdline, "here.log")?;
        let here = env.start("here", command.args(devices.split_whitespace()))?;
        has_passed(&env, "here.log")?;
        // While the image prints, its stack is in use. It is to judge with the memory of another
        // time.
        let save = |dir: &str| {
            eventually(LIMIT, "it does not print", || {
                succeeds(env.vellum(&format!("snapshot here {} --paused", env.path(dir).display()))?)?;
                let prints = !fs::read(env.path("here.log"))?.ends_with(b"\n");
                if prints {
                    fs::remove_dir_all(env.path(dir))?;
                    succeeds(env.vellum("ctl here resume")?)?;
                }
                Ok((!prints).then_some(()))
            })
        };
        save("old")?;
        let pass = logged(&env, &["here.log"])?.pass;
        succeeds(env.vellum("ctl here resume")?)?;
        // Two passes further, so that every part has changed.
        eventually(LIMIT, "two passes are over", || {
            Ok((logged(&env, &["here.log"])?.pass > pass.map(|pass| pass + 2)).then_some(()))
        })?;
        save("new")?;
        succeeds(env.vellum("ctl here stop")?)?;
        ends(here, 0)?;
        let before = fs::read(env.path("here.log"))?;
        Ok(Self { env, before, devices })
    }

    fn ram(&self, dir: &str) -> Result<Vec<u8>, Failed> {
        Ok(fs::read(self.env.path(dir).join("ram-0"))?)
    }

    /// What the image says that is restored from the second point with this RAM, until it has found
    /// all of these: a kind, and the address of the page, if there is one. Of nothing to be found,
    /// until it ends.
    fn restored(&self, ram: &[u8], wanted: &[(&str, Option<usize>)]) -> Result<Log, Failed> {
        let log = self.runs_on(ram, wanted)?;
        let right = match wanted {
            [] => log.verdict() == Verdict::Whole,
            _ => log.verdict() == Verdict::Lost && wanted.iter().all(|(kind, at)| finds(&log, kind, *at)),
        };
        ensure(right, || format!("{wanted:x?}: {:?}, {:x?}", log.verdict(), log.faults))?;
        Ok(log)
    }

    fn runs_on(&self, ram: &[u8], wanted: &[(&str, Option<usize>)]) -> Result<Log, Failed> {
        let dir = self.env.path("new");
        fs::write(dir.join("ram-0"), ram)?;
        let console = self.env.path("restored.log");
        let more = format!("--memory map --serial file={} {}", console.display(), self.devices);
        let line = format!("{} {more}", dir.display());
        let mut restored = self.env.restore("restored", &line)?;
        // It was saved as it stood still.
        succeeds(self.env.vellum("ctl restored resume")?)?;
        let log = || Ok::<Log, Failed>(read(&[self.before.clone(), fs::read(&console)?].concat()));
        eventually(LIMIT, "it finds what is wrong", || {
            let ended = restored.child.try_wait()?.is_some();
            let log = log()?;
            let found = !wanted.is_empty() && wanted.iter().all(|(kind, at)| finds(&log, kind, *at));
            Ok((ended || found).then_some(()))
        })?;
        if !wanted.is_empty() {
            // It may have ended by itself meanwhile; a machine that neither ends nor stops fails
            // below.
            self.env.vellum("ctl restored stop")?;
        }
        ends(restored, 0)?;
        let log = log()?;
        fs::remove_file(&console)?;
        Ok(log)
    }
}

/// Whether a fault of this kind is there, in the page at this address.
fn finds(log: &Log, kind: &str, at: Option<usize>) -> bool {
    let is_at = |address: u64| at.is_none_or(|at| address as usize & !(PAGE - 1) == at);
    log.faults.iter().any(|fault| fault.kind == kind && is_at(fault.address))
}

/// One page, or part of it, is not what it was: the first fault has the kind, and each page is
/// named.
#[test(boots())]
fn what_is_wrong_with_a_page_is_named() -> Result<(), Failed> {
    let files = Files::new()?;
    let (new, old) = (files.ram("new")?, files.ram("old")?);
    files.restored(&new, &[])?;
    // Pages of vCPU 0's, in the middle of its own ones.
    let (a, b) = (4 << 20, (4 << 20) + 5 * PAGE);
    let page = |ram: &[u8], at: usize| ram[at..at + PAGE].to_vec();
    ensure(page(&new, a) != page(&old, a), || "the page has not changed".into())?;
    let half = |ram: &[u8]| ram[a..a + PAGE / 2].to_vec();
    let shifted = vec![(a + PAGE, new[a..b].to_vec())];
    let changes = [
        ("lost-write", vec![(a, page(&old, a))], vec![a]),
        ("other-address", vec![(a, page(&new, b)), (b, page(&new, a))], vec![a, b]),
        ("other-address", shifted, (1..=5).map(|page| a + page * PAGE).collect()),
        ("torn", vec![(a, half(&old))], vec![a]),
        ("zeroes", vec![(a, vec![0; PAGE])], vec![a]),
        ("foreign", vec![(a, vec![0x5a; PAGE])], vec![a]),
    ];
    for (kind, writes, named) in changes {
        let mut ram = new.clone();
        for (at, bytes) in writes {
            ram[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let wanted: Vec<_> = named.iter().map(|at| (kind, Some(*at))).collect();
        let log = files.restored(&ram, &wanted)?;
        ensure(log.faults.iter().all(|fault| fault.kind == kind), || format!("{kind}: {:x?}", log.faults))?;
    }
    Ok(())
}

/// All of memory is older than the registers, and the other way around.
#[test(boots())]
fn registers_and_memory_of_two_times_are_named() -> Result<(), Failed> {
    let files = Files::new()?;
    let (new, old) = (files.ram("new")?, files.ram("old")?);
    files.restored(&old, &[("lost-write", None), ("position", None)])?;
    // The state of the first point with the memory of the second.
    fs::remove_dir_all(files.env.path("new"))?;
    fs::rename(files.env.path("old"), files.env.path("new"))?;
    files.restored(&new, &[("future", None), ("position", None)])?;
    Ok(())
}

/// State that is older, or newer, than memory; a clock, an interrupt and what a device writes that
/// are lost.
#[test(boots())]
fn state_that_a_snapshot_loses_is_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    for (planted, kinds) in [
        ("old-vcpu", &["future", "position"][..]),
        ("devices-ahead", &["disk-lost"]),
        ("clock-set-back", &["kvmclock-back"]),
        ("timer-lost", &["timer"]),
    ] {
        let wanted: Vec<_> = kinds.iter().map(|kind| (*kind, None)).collect();
        // Where a stack is in use that is newer than the registers, the image crashes before it has
        // judged.
        let log = eventually(LIMIT, planted, || {
            let env = TestEnv::planted(Some(planted))?;
            let disk = disk(&env)?;
            let files = Files::of(env, "late=1s", disk)?;
            let log = files.runs_on(&files.ram("new")?, &wanted)?;
            let named = kinds.iter().all(|kind| finds(&log, kind, None));
            let crashed = planted == "old-vcpu" && matches!(log.verdict(), Verdict::Crashed(_));
            // A clock that is set back has caught up, where the machine stands still for a second
            // before it goes on.
            let late = planted == "clock-set-back" && log.verdict() == Verdict::Whole;
            ensure(named || crashed || late, || format!("{planted}: {log:?}"))?;
            Ok(named.then_some(log))
        })?;
        let found = |kind| log.faults.iter().filter(move |fault| fault.kind == kind);
        let right = match planted {
            // The vCPU whose registers are old takes its own pages for newer ones.
            "old-vcpu" => found("future").all(|fault| fault.vcpu == 1 && fault.found > fault.expected),
            "clock-set-back" => found("kvmclock-back").all(|fault| fault.found < fault.expected),
            _ => kinds.iter().all(|kind| found(kind).all(|fault| fault.address >= 1 << 20)),
        };
        ensure(right, || format!("{planted}: {log:?}"))?;
    }
    Ok(Completion::Completed)
}

#[test(boots())]
fn what_a_device_writes_and_a_migration_loses_is_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    // Whether a request ends between the last look at its buffer and the end, depends on the
    // moment.
    eventually(LIMIT, "a device's write is lost and named", || {
        let env = TestEnv::planted(Some("vmm-writes-left-out"))?;
        ends(moves(&env, "--downtime 1s --timeout 10s,then=force")?, 0)?;
        let log = logged(&env, &["here.log", "there.log"])?;
        let named = log
            .faults
            .iter()
            .any(|fault| ["disk-data", "disk-ring"].contains(&fault.kind) && fault.address >= 1 << 20);
        ensure(named == (log.verdict() == Verdict::Lost), || format!("{log:?}"))?;
        Ok(named.then_some(()))
    })?;
    Ok(Completion::Completed)
}

/// Changes pages in a file of QEMU's migration stream: a record is its offset in RAM with flags, in
/// big-endian order, and the page (docs/devel/migration in QEMU). A page of the image has its
/// address in its first word, so that nothing else is taken for one.
fn damage(path: &Path) -> std::io::Result<()> {
    let mut file = fs::read(path)?;
    let mut pages = BTreeMap::new();
    let mut at = 0;
    while at + 8 + PAGE <= file.len() {
        let number = u64::from_be_bytes(file[at..at + 8].try_into().expect("8 bytes"));
        let (address, flags) = (number & !0xfff, number & 0xfff);
        // RAM_SAVE_FLAG_PAGE, and RAM_SAVE_FLAG_CONTINUE: of the same block as the record before.
        if address >= 2 << 20 && flags == 0x28 && file[at + 8..at + 16] == address.to_le_bytes() {
            pages.insert(address, at);
            at += 8 + PAGE;
        } else {
            at += 1;
        }
    }
    let missing = || std::io::Error::other("a page is not in the stream");
    let at = |address: u64| pages.get(&address).map(|at| at + 8..at + 8 + PAGE).ok_or_else(missing);
    for (address, change) in DAMAGED {
        let here = at(address)?;
        match change {
            "older" => {
                let pass = u64::from_le_bytes(file[here.start + 8..here.start + 16].try_into().expect("8"));
                let start = Start { seed: 1, ..Start::default() };
                let [first, second, last] = page(&start, address, pass - 1).map(u64::to_le_bytes);
                file[here.start..here.start + 8].copy_from_slice(&first);
                file[here.start + 8..here.start + 16].copy_from_slice(&second);
                file[here.end - 8..here.end].copy_from_slice(&last);
            }
            "swapped" => {
                let (a, b) = (file[here.clone()].to_vec(), at(address + 0x10000)?);
                let b_bytes = file[b.clone()].to_vec();
                file[here].copy_from_slice(&b_bytes);
                file[b].copy_from_slice(&a);
            }
            "shifted" => {
                let bytes = file[here].to_vec();
                file[at(address + 0x1000)?].copy_from_slice(&bytes);
            }
            "torn" => {
                let end = here.end;
                let pass = u64::from_le_bytes(file[here.start + 8..here.start + 16].try_into().expect("8"));
                let start = Start { seed: 1, ..Start::default() };
                file[end - 8..end].copy_from_slice(&page(&start, address, pass - 1)[2].to_le_bytes());
            }
            "zeroed" => file[here].fill(0),
            // The last one, because what is behind it moves.
            _ => drop(file.drain(here.start - 8..here.end)),
        }
    }
    fs::write(path, file)
}

/// What is done to the pages from these addresses on.
const DAMAGED: [(u64, &str); 6] = [
    (0x40_0000, "older"),
    (0x48_0000, "swapped"),
    (0x50_0000, "shifted"),
    (0x58_0000, "torn"),
    // In the middle of what could be a huge page.
    (0x67_3000, "zeroed"),
    (0x78_0000, "dropped"),
];

#[test(emulator())]
fn pages_that_a_snapshot_of_qemu_loses_are_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let cmdline = "passes=16 rate=30000 report=50ms seed=1 order=sequential".into();
    let setup = Setup { cpus: 2, memory: 16, cmdline, limit: LIMIT, between: damage };
    let log =
        run(Vmm::Qemu, Scenario::Snapshot, &setup, env.dir()).map_err(|trouble| format!("{trouble:?}"))?;
    ensure(log.verdict() == Verdict::Lost, || format!("{log:?}"))?;
    let wanted = BTreeSet::from([
        ("lost-write", 0x40_0000),
        ("other-address", 0x48_0000),
        ("other-address", 0x49_0000),
        ("other-address", 0x50_1000),
        ("torn", 0x58_0000),
        ("zeroes", 0x67_3000),
        ("zeroes", 0x78_0000),
    ]);
    let found = log.faults.iter().map(|fault| (fault.kind, fault.address & !(PAGE as u64 - 1))).collect();
    ensure(wanted == found, || format!("{found:x?}"))
}

/// The source is told to go on when it has moved: the driver says so, whatever the image says.
#[test(emulator())]
fn a_source_of_qemu_that_goes_on_is_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let real = tools::find("qemu-system-x86_64").ok_or("no qemu")?;
    let (bin, socket) = (env.path("bin"), env.path("second-monitor"));
    fs::create_dir(&bin)?;
    // The source has another monitor.
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *first.qmp*) set -- \"$@\" -qmp unix:{},server=on,wait=off ;; esac\nexec {} \"$@\"\n",
        socket.display(),
        real.display()
    );
    fs::write(bin.join("qemu-system-x86_64"), script)?;
    fs::set_permissions(bin.join("qemu-system-x86_64"), fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = env.command("judge run --vmm qemu --memory 16m --scenario migrate --format ktap");
    let driver = Process::spawn(command.env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let monitor = eventually(LIMIT, "the source's monitor", || Ok(UnixStream::connect(&socket).ok()))?;
    let mut lines = BufReader::new(monitor.try_clone()?);
    let mut ask = |command: &str| -> Result<String, Failed> {
        writeln!(&monitor, "{{\"execute\":\"{command}\"}}")?;
        loop {
            let mut line = String::new();
            ensure(lines.read_line(&mut line)? > 0, || "the monitor is closed".into())?;
            if line.contains("\"return\"") || line.contains("\"error\"") {
                return Ok(line);
            }
        }
    };
    ask("qmp_capabilities")?;
    eventually(LIMIT, "it has moved", || Ok(ask("query-status")?.contains("postmigrate").then_some(())))?;
    ask("cont")?;
    let output = driver.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(1) && said.contains("the first copy goes on");
    ensure(right, || format!("{output:?}"))
}

/// A log of the image that is whole.
fn log() -> Result<Vec<u8>, Failed> {
    Ok(fs::read("tests/fuzz/corpus/judge/whole.log")?)
}

fn judged(env: &TestEnv, log: &[u8], more: &str) -> Result<Output, Failed> {
    let path = env.path("log");
    fs::write(&path, log)?;
    env.vellum(&format!("judge read {} {more}", path.display()))
}

#[test]
fn a_log_passes_only_if_it_is_whole() -> Result<(), Failed> {
    let log = log()?;
    ensure(read(&log).verdict() == Verdict::Whole, || format!("{:?}", read(&log)))?;
    // Without any of its lines, and cut anywhere.
    let lines: Vec<&[u8]> = log.split_inclusive(|byte| *byte == b'\n').collect();
    for without in 0..lines.len() {
        let rest = [&lines[..without], &lines[without + 1..]].concat().concat();
        let needed = !["KTAP", "# left", "1..", "# pass"]
            .iter()
            .any(|start| lines[without].starts_with(start.as_bytes()));
        let passes = read(&rest).verdict() == Verdict::Whole;
        ensure(passes != needed, || format!("without {}", String::from_utf8_lossy(lines[without])))?;
    }
    let end = log.len() - lines.last().map_or(0, |line| line.len());
    for cut in 0..end + "# end WHOL".len() {
        ensure(read(&log[..cut]).verdict() != Verdict::Whole, || format!("cut at {cut}"))?;
    }
    // Twice: the machine was started again.
    let twice = read(&[log.clone(), log.clone()].concat()).verdict();
    ensure(matches!(twice, Verdict::Crashed(_)), || format!("{twice:?}"))?;
    // With another digit of a checksum, or of the seed.
    let text = String::from_utf8(log)?;
    for (from, to) in [("checksum=0x", "checksum=0x1"), ("seed=", "seed=1"), ("# ram 0x1", "# ram 0x2")] {
        let changed = read(text.replacen(from, to, 1).as_bytes()).verdict();
        ensure(matches!(changed, Verdict::Crashed(_)), || format!("{to}: {changed:?}"))?;
    }
    Ok(())
}

#[test]
fn noise_around_the_lines_does_not_matter() -> Result<(), Failed> {
    let noise = b"\x1b[2J\x1b[01;01HSeaBIOS (version 1.16)\r\n\xff\xfe\x00\x07\r\n\x1b[0m";
    let log = [&noise[..], &log()?, b"\x1bc[ 1.0] reboot: Power down\n"].concat();
    ensure(read(&log).verdict() == Verdict::Whole, || format!("{:?}", read(&log)))
}

#[test]
fn a_verdict_is_an_exit_status_and_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let whole = String::from_utf8(log()?)?;
    let fault = "# fault lost-write vcpu=1 address=0x200000 expected=0x3 found=0x2\r\n1..";
    for (log, status, says) in [
        (whole.clone(), 0, ""),
        (
            whole.replacen("1..", fault, 1),
            1,
            "LOST: 1 faults; the first is lost-write at 0x200000, seen by vCPU 1",
        ),
        (whole.replace("# end WHOLE", ""), 1, "no verdict: the log ends without a verdict"),
        ("Bail out! too little memory".into(), 1, "the image judged nothing: too little memory"),
        (String::new(), 1, "no verdict: the image's first line is missing"),
    ] {
        let output = judged(&env, log.as_bytes(), "--format ktap")?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status) && error.contains(says);
        ensure(right && error.lines().count() == usize::from(status != 0), || format!("{output:?}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(text.contains("not ok") == (status != 0), || text)?;
    }
    let missing = env.vellum("judge read /nonexistent")?;
    ensure(missing.status.code() == Some(2), || format!("{missing:?}"))
}

#[test]
fn an_image_is_a_new_file_in_each_format() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (name, format) in Format::NAMES {
        let path = env.path(name);
        succeeds(env.vellum(&format!("judge image --out {} --format {name}", path.display()))?)?;
        ensure(fs::read(&path)? == image(format), || name.into())?;
        let again = env.vellum(&format!("judge image --out {}", path.display()))?;
        let said = String::from_utf8_lossy(&again.stderr).into_owned();
        ensure(again.status.code() == Some(2) && said.contains("exists"), || format!("{again:?}"))?;
    }
    Ok(())
}

/// A driver and what it says of each scenario, as KTAP.
fn driven(vmm: &str, scenarios: &[&str]) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut command = env.command(&format!("judge run --vmm {vmm} --memory 16m --format ktap"));
    // QEMU splits at commas, and shells at the others.
    command.arg("--logs").arg(env.path("o'dd, path"));
    for scenario in scenarios {
        command.args(["--scenario", scenario]);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let right = output.status.success() && scenarios.iter().all(|name| text.contains(&format!(" {name}\n")));
    ensure(right && !text.contains("not ok"), || format!("{output:?}"))
}

#[test(boots())]
fn a_driven_vellum_is_whole_in_each_scenario() -> Result<(), Failed> {
    driven("vellum", &["boot", "pause", "snapshot", "snapshot-diff", "migrate", "migrate-postcopy"])
}

#[test(emulator())]
fn a_driven_qemu_is_whole_in_each_scenario() -> Result<(), Failed> {
    driven("qemu", &["boot", "pause", "snapshot", "migrate"])
}

/// A directory with a program of this name that answers as the real one does by its documents
/// (`tests/data/fake-vmm.py`).
fn fake(env: &TestEnv, name: &str, scenario: &str) -> Result<Command, Failed> {
    let vmms = env.path("vmms");
    fs::create_dir(&vmms)?;
    let [script, log] = ["tests/data/fake-vmm.py", "tests/fuzz/corpus/judge/whole.log"].map(fs::canonicalize);
    std::os::unix::fs::symlink(script?, vmms.join(name))?;
    let mut command = env.command(&format!("judge run --vmm {name} --scenario {scenario} --format ktap"));
    command.env("VELLUM_VMMS", vmms).env("FAKE_LOG", log?).env("FAKE_REQUESTS", env.path("requests"));
    if scenario == "boot" {
        command.env("FAKE_BOOTS", "1");
    }
    Ok(command)
}

fn python() -> Need {
    tools::program("python3")
}

/// Each driver sends what the documents of its VMM say, in this order, and reads both consoles.
/// `DIR` is the round's.
#[test(python())]
fn drivers_of_rest_apis_send_what_is_documented() -> Result<(), Failed> {
    let machine = [
        r#"PUT /machine-config {"mem_size_mib":64,"track_dirty_pages":true,"vcpu_count":2}"#,
        r#"PUT /boot-source {"boot_args":"CMDLINE","kernel_image_path":"judge.elf"}"#,
        r#"PUT /drives/disk {"drive_id":"disk","is_read_only":true,"is_root_device":false,"path_on_host":"judge.raw"}"#,
        r#"PUT /actions {"action_type":"InstanceStart"}"#,
    ];
    let [paused, resumed] = [r#"PATCH /vm {"state":"Paused"}"#, r#"PATCH /vm {"state":"Resumed"}"#];
    let full =
        r#"PUT /snapshot/create {"mem_file_path":"saved","snapshot_path":"state","snapshot_type":"Full"}"#;
    let diff =
        r#"PUT /snapshot/create {"mem_file_path":"diff","snapshot_path":"state","snapshot_type":"Diff"}"#;
    let load = r#"PUT /snapshot/load {"mem_backend":{"backend_path":"saved","backend_type":"File"},"resume_vm":true,"snapshot_path":"state"}"#;
    let (whole, merged) = (format!("{load} AAAA"), format!("{load} AABA"));
    let [pause, resume] = ["PUT /api/v1/vm.pause", "PUT /api/v1/vm.resume"];
    for (vmm, scenario, expected) in [
        ("firecracker", "boot", &[][..]),
        ("firecracker", "pause", &[paused, resumed]),
        ("firecracker", "snapshot", &[paused, full, &whole]),
        ("firecracker", "snapshot-diff", &[paused, full, resumed, paused, diff, &merged]),
        ("cloud-hypervisor", "boot", &[]),
        ("cloud-hypervisor", "pause", &[pause, resume]),
        (
            "cloud-hypervisor",
            "snapshot",
            &[
                pause,
                r#"PUT /api/v1/vm.snapshot {"destination_url":"file://DIR/saved"}"#,
                r#"PUT /api/v1/vm.restore {"source_url":"file://DIR/saved"}"#,
                resume,
            ],
        ),
        (
            "cloud-hypervisor",
            "migrate",
            &[
                r#"PUT /api/v1/vm.receive-migration {"receiver_url":"unix:DIR/socket"}"#,
                r#"PUT /api/v1/vm.send-migration {"destination_url":"unix:DIR/socket","local":false}"#,
            ],
        ),
    ] {
        let env = TestEnv::new()?;
        let logs = env.path("logs");
        let output = fake(&env, vmm, scenario)?.arg("--logs").arg(&logs).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let right = output.status.success() && text.contains(&format!("ok 1 {scenario}\n"));
        ensure(right, || format!("{vmm} {scenario}: {output:?}"))?;
        let dir = format!("{}/{scenario}-1", fs::canonicalize(&logs)?.display());
        let requests = fs::read_to_string(env.path("requests")).unwrap_or_default().replace(&dir, "DIR");
        let cmdline = if scenario == "boot" { "passes=3" } else { "passes=16 rate=30000" };
        let requests = requests.replace(&format!("{cmdline} report=50ms seed=1 "), "CMDLINE");
        let mut sent: Vec<&str> = requests.lines().collect();
        // Who is asked to receive answers when it has.
        sent.sort_by_key(|line| line.contains("send-migration"));
        let start = if vmm == "firecracker" { &machine[..] } else { &[] };
        ensure(sent == [start, expected].concat(), || format!("{vmm} {scenario}: {sent:#?}"))?;
    }
    Ok(())
}

/// A VMM that answers something else is a crash, in one line.
#[test(python())]
fn an_answer_that_is_none_is_one_line() -> Result<(), Failed> {
    for (vmm, answer, says) in [
        ("firecracker", "nonsense\n", "PUT /machine-config: the answer is not HTTP"),
        ("cloud-hypervisor", "HTTP/1.1 500 No\n\n", "PUT /api/v1/vm.pause: status 500"),
        ("cloud-hypervisor", "HTTP/1.1 204 Yes\nno colon\n", "PUT /api/v1/vm.pause: the answer is not HTTP"),
        ("firecracker", "HTTP/1.1 400 No\nContent-Length: 4\n\nwhy?", "status 400: why?"),
    ] {
        let env = TestEnv::new()?;
        let output = fake(&env, vmm, "pause")?.env("FAKE_ANSWER", answer).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(1) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{vmm} {answer}: {output:?}"))?;
    }
    Ok(())
}

#[test]
fn what_a_driver_cannot_do_is_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (arguments, path, status, says) in [
        ("--vmm nonsense", None, 2, "nonsense"),
        ("--vmm qemu --scenario fork", None, 2, "fork"),
        ("--vmm qemu", Some("/nonexistent"), 4, "apt-get install qemu-system-x86"),
        ("--vmm firecracker", Some("/nonexistent"), 4, "VELLUM_VMMS"),
        ("--vmm cloud-hypervisor", Some("/nonexistent"), 4, "VELLUM_VMMS"),
    ] {
        let mut command = env.command(&format!("judge run {arguments}"));
        if let Some(path) = path {
            command.env("PATH", path);
        }
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{arguments}: {output:?}"))?;
    }
    Ok(())
}

/// A VMM that ends at once is a crash, with its last line as the reason.
#[test]
fn what_a_vmm_says_before_it_ends_is_the_reason() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let qemu = env.path("qemu-system-x86_64");
    fs::write(&qemu, "#!/bin/sh\necho begins >&2\necho no such machine >&2\nexit 1\n")?;
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755))?;
    let mut command = env.command("judge run --vmm qemu --scenario boot");
    let output = command.env("PATH", env.dir()).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(1) && said.contains("QMP socket: no such machine");
    ensure(right && said.lines().count() == 1, || format!("{output:?}"))
}

/// The image's own bad input: one line, and no verdict.
#[test(boots())]
fn what_the_image_is_asked_wrongly_it_refuses() -> Result<(), Failed> {
    for (memory, cmdline, says) in [
        ("16m", "passes=many", "passes= is not a number"),
        ("16m", "hot=50", "hot= is not PAGES:SHARE"),
        ("16m", "order=random", "order= is neither"),
        ("2m", "", "too little memory"),
    ] {
        let env = TestEnv::new()?;
        let log = runs(&env, 4, memory, cmdline, "")?;
        let verdict = log.verdict();
        let refused = matches!(&verdict, Verdict::Refused(why) if why.contains(says));
        ensure(refused, || format!("{cmdline}: {verdict:?}"))?;
    }
    Ok(())
}
