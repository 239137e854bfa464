//! A Linux guest with all of its devices on a PCI bus. Each works, also after its driver was
//! unbound and bound again. An interrupt is moved to another vCPU. All of that also works after a
//! restore from a snapshot and after a migration.

use std::fs;
use std::path::Path;

use guest_agent::{Argument, Request};
use support::{Failed, LIMIT, ensure, eventually};

use crate::guest::{Guest, Image, noise, scratch};
use crate::moves::{self, Way};
use crate::whole;
use crate::wires::{Wires, answers_soon};
use crate::work::{self, Clock, count};

/// Two disks, a network, a vsock, a console, entropy and a balloon.
const DEVICES: usize = 7;
/// Data in the guest with a known checksum.
const DATA_MIB: u64 = 16;
/// Taken by the balloon and given back, in MiB.
const BALLOON: u64 = 16;

/// Unbinds each function's driver and binds it again.
const REBIND: &str = "cd /sys/bus/pci/drivers/virtio-pci && for it in 0*; do echo $it > unbind && echo $it > bind || exit 1; done";

/// Checks a guest with 2 vCPUs and [`DEVICES`], and again after a snapshot and after a migration.
pub fn works_moves_and_comes_back(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = scratch()?;
    let [disk, known, dir] = ["disk", "known", "saved"].map(|name| scratch.path(name));
    work::empty(&disk)?;
    fs::write(&known, noise(23, 4 << 20))?;
    let wires = Wires::new(&scratch)?;
    // Each machine has its own console. A migration takes the other tap.
    let console = |machine: usize| scratch.path(&format!("console{machine}"));
    let devices = |machine: usize, moves: usize| {
        let mut flags = ["--rng", "--balloon", "--disk"].map(str::to_owned).to_vec();
        flags.extend([disk.display().to_string(), "--disk".into(), format!("{},readonly", known.display())]);
        flags.extend(["--console".into(), format!("file={}", console(machine).display())]);
        flags.extend(wires.flags(moves));
        flags
    };
    let step = |what: &str| eprintln!("linux {} {irqchip} on PCI: {what}", image.version);

    let mut flags = ["--transport", "pci", "--cpus", "2", "--memory", "256m", "--irqchip", irqchip]
        .map(str::to_owned)
        .to_vec();
    flags.extend(devices(0, 0));
    let mut guest = Guest::start(image, "", &words(&flags))?;
    step("boots");
    guest.ready()?;
    are_on_the_bus(&guest)?;
    step("drivers");
    rebind(&mut guest)?;
    are_on_the_bus(&guest)?;
    wires.up(&guest)?;
    step("devices");
    all_work(&guest, &known, &console(0))?;
    whole::vsock(&guest)?;
    step("an interrupt");
    interrupt_moves(&guest)?;
    work::begin(&guest, DATA_MIB)?;
    eventually(LIMIT, "the disk's writer has begun", || Ok((count(&guest)? > 0).then_some(())))?;

    step("is saved");
    let (flushed, before) = (count(&guest)?, Clock::read(&guest)?);
    let into = dir.display().to_string();
    let saved = guest.vellum(&["snapshot", guest.name(), &into, "--downtime", "5s", "--stop"])?;
    ensure(saved.status.success(), || format!("{saved:?}"))?;
    guest.wait()?.with(0)?;
    let mut guest = Guest::restored(&into, &[&["--clock", "advance"][..], &words(&devices(1, 0))].concat())?;
    Clock::read(&guest)?.agrees_with(&before)?;
    works_on(&guest, flushed, &known, &console(1))?;

    step("moves");
    let flushed = count(&guest)?;
    moves::goes(&mut guest, Way::Stream, &words(&devices(2, 1)))?;
    works_on(&guest, flushed, &known, &console(2))?;

    let flushed = count(&guest)?;
    guest.ctl(&["stop"])?;
    guest.wait()?.with(0)?;
    work::holds(&disk, flushed)
}

fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Checks that each device is a function of the bus, and has vectors.
fn are_on_the_bus(guest: &Guest) -> Result<(), Failed> {
    let found = guest.shell("ls -d /sys/bus/pci/devices/*/msi_irqs /sys/bus/pci/devices/*/virtio*")?;
    let with = |part: &str| found.lines().filter(|path| path.contains(part)).count();
    ensure(with("/msi_irqs") == DEVICES && with("/virtio") == DEVICES, || found.clone())
}

/// Rebinds every driver. That of the vsock too, so the request goes over the serial port, whose
/// interrupt is not one of the bus.
fn rebind(guest: &mut Guest) -> Result<(), Failed> {
    let command = ["sh", "-c", REBIND].map(Argument::from).to_vec();
    guest.type_line(&serde_json::to_string(&Request::Exec { command })?)?;
    let mut said = String::new();
    guest.hears(&mut said, "\"event\":\"exit\"")?;
    ensure(said.contains("\"code\":0"), || said.clone())
}

/// Checks each device except the vsock, which carries the checks.
fn all_work(guest: &Guest, known: &Path, console: &Path) -> Result<(), Failed> {
    whole::entropy(guest)?;
    whole::is_read(guest, "/dev/vdb", known)?;
    answers_soon()?;
    guest.shell("echo over the console > /dev/hvc0")?;
    eventually(LIMIT, "the console is heard", || {
        Ok(fs::read_to_string(console)?.contains("over the console").then_some(()))
    })?;
    for size in [BALLOON, 0] {
        guest.ctl(&["balloon", &format!("{size}m")])?;
        guest.status_when(|status| status["balloon"] == size << 20)?;
    }
    Ok(())
}

/// Checks that the network's receive interrupt can be moved from one vCPU to the other.
fn interrupt_moves(guest: &Guest) -> Result<(), Failed> {
    let number = guest.shell("grep -e -input.0 /proc/interrupts | cut -d: -f1")?;
    let number = number.trim();
    let counts = || -> Result<[u64; 2], Failed> {
        let line = guest.shell(&format!("grep '^ *{number}:' /proc/interrupts"))?;
        let mut counts = line.split_whitespace().skip(1).map_while(|word| word.parse().ok());
        Ok([(); 2].map(|()| counts.next().unwrap_or_default()))
    };
    for (cpu, other) in [(0, 1), (1, 0)] {
        guest.shell(&format!("echo {cpu} > /proc/irq/{number}/smp_affinity_list"))?;
        // Linux moves it while it handles the next interrupt, which may still come on the other
        // vCPU.
        for round in ["it has moved", "it stays there"] {
            let before = counts()?;
            let now = eventually(LIMIT, round, || {
                answers_soon()?;
                let now = counts()?;
                Ok((now[cpu] > before[cpu]).then_some(now))
            })?;
            let moved = round == "it has moved" || now[other] == before[other];
            ensure(moved, || format!("vCPU {cpu} is interrupted, and {other} too: {before:?}, {now:?}"))?;
        }
    }
    Ok(())
}

/// Checks that the guest's programs run on with their data, and that each device works.
fn works_on(guest: &Guest, flushed: u64, known: &Path, console: &Path) -> Result<(), Failed> {
    are_on_the_bus(guest)?;
    work::is_as_it_was(guest)?;
    let went = count(guest)?;
    ensure(went >= flushed, || format!("its disk was at {flushed}, and is at {went}"))?;
    eventually(LIMIT, "the disk's writer goes on", || Ok((count(guest)? > went).then_some(())))?;
    all_work(guest, known, console)?;
    interrupt_moves(guest)
}
