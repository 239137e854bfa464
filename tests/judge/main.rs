//! `vellum judge`: the image boots and judges under Vellum and QEMU, and survives each kind of
//! move, as the built-in guest does. It reports what a planted fault loses. An incomplete log never
//! passes. `VELLUM_JUDGE=all` runs what takes minutes, too.

mod arm64;
mod drivers;
mod faults;
mod many;
mod qemu;
mod reader;
mod stream;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use serde_json::Value;
use support::env::{Machine, TestEnv};
use support::hosts::{kvm, real};
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test, tools};
use vellum_judge::image::{Format, image};
use vellum_judge::read::{Log, Verdict, read};
use vellum_judge::sectors;

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    // Each test is one machine that fills its memory.
    for (cpus, memory, protocol) in
        [(1, "64m", "pvh"), (2, "64m", "linux64"), (4, "64m", "pvh"), (2, "2g", "pvh")]
    {
        // An emulated host takes minutes to fill this much.
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

/// The image is for x86-64 only.
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

/// Whether the tests run that take long.
fn is_long() -> bool {
    std::env::var("VELLUM_JUDGE").is_ok_and(|value| value == "all")
}

/// Writes the image to a file.
fn elf(env: &TestEnv) -> Result<PathBuf, Failed> {
    let path = env.path("judge.elf");
    if !path.exists() {
        fs::write(&path, image(Format::Elf))?;
    }
    Ok(path)
}

/// The arguments of a disk for the image.
fn disk(env: &TestEnv) -> Result<String, Failed> {
    let path = env.path("judge.raw");
    if !path.exists() {
        let sectors: Vec<u8> = (0..2048).flat_map(sectors::sector).collect();
        fs::write(&path, sectors)?;
    }
    Ok(format!("--disk {},readonly", path.display()))
}

/// The arguments of a machine that boots the image with its console in the file `console`.
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
    // A bzImage was not seen to start on `microvm`. Its virtio-mmio has version 1 or 2.
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

/// Without a serial port. The virtio console is on PCI or on virtio-mmio, transitional or modern.
#[test(emulator())]
fn the_image_prints_on_a_virtio_console() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (machine, device) in [
        ("pc", "virtio-serial-pci"),
        ("pc", "virtio-serial-pci,disable-legacy=on"),
        ("microvm,isa-serial=off", "virtio-serial-device"),
    ] {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", machine, "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "16", "-no-reboot"]);
        qemu.args(["-nodefaults", "-display", "none", "-append", "passes=1", "-chardev", "stdio,id=c"]);
        qemu.args(["-device", device, "-device", "virtconsole,chardev=c", "-kernel"]).arg(elf(&env)?);
        let output = qemu.output()?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        whole(&read(&output.stdout)).map_err(|why| format!("{device}: {why:?}"))?;
    }
    Ok(())
}

/// The options of an image that is moved. It runs for some seconds with little work, so that a busy
/// host does not make them minutes. It reports progress only twice a second: its stack is in use
/// while it prints, and an image that loses its stack cannot report.
const MOVING: &str = "passes=16 rate=8000 seed=5 report=500ms";

/// Waits until this console has a report of a pass that has begun.
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

/// The log of a machine that printed to these files in turn.
fn logged(env: &TestEnv, consoles: &[&str]) -> Result<Log, Failed> {
    let mut text = Vec::new();
    for console in consoles {
        text.extend(fs::read(env.path(console))?);
    }
    Ok(read(&text))
}

/// Starts the image as `here`, with memory that can be handed over.
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

/// Moves the image to `there`, where it runs to its end.
fn migrates(mode: &str) -> Result<Log, Failed> {
    let env = TestEnv::new()?;
    ends(moves(&env, mode)?, 0)?;
    logged(&env, &["here.log", "there.log"])
}

/// Moves the built-in guest in the same way. All of its pages must be right.
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

fn right(json: &Path) -> Result<(), Failed> {
    ensure(every_page_is_right(json)?, || format!("{}: a page is wrong", json.display()))
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

/// Takes a snapshot of the running image, which runs on, and restores it in each way. The restored
/// console begins in the middle.
#[test(boots())]
fn a_snapshot_and_each_restore_are_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = starts(&env)?;
    let dir = env.path("snap");
    succeeds(env.vellum(&format!("snapshot here {} --paused", dir.display()))?)?;
    // What it prints later is not of the restored machines.
    let before = fs::read(env.path("here.log"))?;
    succeeds(env.vellum("ctl here resume")?)?;
    for memory in ["eager", "map", "demand"] {
        let console = env.path("restored.log");
        let serial = format!("--serial file={} {}", console.display(), disk(&env)?);
        let restored = env.restore("restored", &format!("{} --memory {memory} {serial}", dir.display()))?;
        // It was saved while paused.
        succeeds(env.vellum("ctl restored resume")?)?;
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
    upgrades(&env)?;
    ends(here, 0)?;
    whole(&logged(&env, &["here.log"])?)?;
    // The built-in guest, in the same way.
    let env = TestEnv::new()?;
    let (here, json) = built_in_on_memfd(&env)?;
    upgrades(&env)?;
    succeeds(env.vellum("ctl here stop")?)?;
    ends(here, 0)?;
    right(&json)
}

/// The machine `here` goes on in another build.
fn upgrades(env: &TestEnv) -> Result<(), Failed> {
    let build = env.path("other-build");
    std::os::unix::fs::symlink(VELLUM, &build)?;
    succeeds(env.vellum(&format!("ctl here upgrade --downtime 1m {}", build.display()))?)
}

/// The built-in guest, as `here`, and where its result goes.
fn built_in_on_memfd(env: &TestEnv) -> Result<(Machine, PathBuf), Failed> {
    let json = env.path("here.json");
    let workload = "--passes 0 --workload write,order=random,rate=20000,write=80";
    let line = format!("run --cpus 2 --memory 16m,backing=memfd {workload} --json {}", json.display());
    let here = env.run("here", &line)?;
    env.has_written("here", 10_000)?;
    Ok((here, json))
}

/// A fork of the image, which goes on beside it; the driver forks it in the same way. And one of
/// the built-in guest.
#[test(boots())]
fn a_fork_is_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = starts(&env)?;
    let serial = format!("--serial file={} {}", env.path("forked.log").display(), disk(&env)?);
    succeeds(env.vellum("ctl here pause")?)?;
    let before = fs::read(env.path("here.log"))?;
    succeeds(env.vellum(&format!("fork here --name forked {serial}"))?)?;
    for name in ["here", "forked"] {
        succeeds(env.vellum(&format!("ctl {name} resume"))?)?;
    }
    ends(here, 0)?;
    whole(&logged(&env, &["here.log"])?)?;
    let forked = || Ok::<Log, Failed>(read(&[before.clone(), fs::read(env.path("forked.log"))?].concat()));
    whole(&eventually(LIMIT, "the fork's end", || {
        let log = forked()?;
        Ok((!matches!(log.verdict(), Verdict::Crashed(_))).then_some(log))
    })?)?;
    let env = TestEnv::new()?;
    let (here, json) = built_in_on_memfd(&env)?;
    let of_fork = env.path("forked.json");
    succeeds(env.vellum(&format!("fork here --name forked --json {}", of_fork.display()))?)?;
    for (name, json) in [("forked", &of_fork), ("here", &json)] {
        succeeds(env.vellum(&format!("ctl {name} stop"))?)?;
        // The file is there before the result is in it.
        let is_whole = || fs::read(json).is_ok_and(|text| serde_json::from_slice::<Value>(&text).is_ok());
        eventually(LIMIT, "its result", || Ok(is_whole().then_some(())))?;
        right(json)?;
    }
    ends(here, 0)
}

/// The image refuses invalid options with one line and without a verdict.
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
