//! A Linux guest moves to another process while it works, and there and back again: memory, disk, clocks, network and vsock.

use guest_agent::{Event, MemoryWork, Pattern, Request};
use harness::{Failed, LIMIT, ensure, eventually};

use crate::guest::{Guest, Image, Scratch};
use crate::wires::{Outage, Told, Wires};
use crate::work::{self, Clock, count};

/// Data that the guest has the sum of.
const DATA_MIB: u64 = 48;
/// For how many seconds the guest writes memory in each hop, which must be over before.
const LOAD: u64 = 90;

/// 2 vCPUs move twice while the agent writes memory, others write a disk, look at the clocks and tell over TCP.
pub fn under_load(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    work::empty(&disk)?;
    let wires = Wires::new(&scratch)?;
    let devices = |moves: usize| {
        let [net, tap] = wires.flags(moves);
        ["--disk".into(), disk.display().to_string(), net, tap, "--rng".into(), "--balloon".into()]
    };
    let step = |what: &str| eprintln!("linux {} {irqchip} moves: {what}", image.version);

    let mut flags = ["--cpus", "2", "--memory", "320m", "--irqchip", irqchip].map(str::to_owned).to_vec();
    flags.extend(devices(0));
    let mut guest = Guest::start(image, "", &flags.iter().map(String::as_str).collect::<Vec<_>>())?;
    step("boots");
    guest.ready()?;
    wires.up(&guest)?;
    work::begin(&guest, DATA_MIB)?;
    let mut told = Told::begin(&guest)?;
    for hop in 1..=2 {
        step(&format!("hop {hop}"));
        // By the serial port, which moves with the guest: a vsock connection would be reset.
        let load = MemoryWork { mib: 64, rate_mib: 8, pattern: Pattern::Random, seconds: LOAD, seed: hop };
        guest.type_line(&serde_json::to_string(&Request::Memory(load))?)?;
        let mut serial = String::new();
        guest.hears(&mut serial, "\"event\":\"memory\"")?;
        let flushed = count(&guest)?;
        let before = Clock::read(&guest)?;
        let connections = vsock_connections(&guest)?;
        let small = MemoryWork { mib: 1, rate_mib: 1, pattern: Pattern::Once, seconds: 10 * LOAD, seed: hop };
        let mut open = guest.ask(&Request::Memory(small))?;
        eventually(LIMIT, "a vsock connection is open", || {
            Ok((vsock_connections(&guest)? > connections).then_some(()))
        })?;

        let devices = devices(hop as usize);
        let (there, address) = Guest::to_come(&devices.iter().map(String::as_str).collect::<Vec<_>>())?;
        let outage = Outage::watch()?;
        let arguments = ["migrate", guest.name(), "--to", &address, "--downtime", "5s", "--verify"];
        let moved = guest.vellum(&arguments)?;
        ensure(moved.status.success(), || format!("hop {hop}: {moved:?}"))?;
        let said = String::from_utf8_lossy(&moved.stdout).into_owned();
        ensure(said.contains("pages were compared, all alike"), || said.clone())?;
        eprint!("{said}");
        let ended = guest.wait()?.with(15)?;
        guest = there;
        eprintln!("its network was silent for {:.0?} at most", outage.longest()?);

        // The clocks: as far as the host's, and never back; a connection of before goes on.
        let after = Clock::read(&guest)?;
        after.agrees_with(&before)?;
        told.past(after.guest)?;
        work::is_as_it_was(&guest)?;
        // The connection by vsock ended here, and in the guest.
        ensure(open.any(|event| event.is_err()), || "a vsock connection has outlived its machine".into())?;
        eventually(LIMIT, "the guest knows that its vsock connection is gone", || {
            Ok((vsock_connections(&guest)? <= connections).then_some(()))
        })?;
        let still = count(&guest)?;
        ensure(still > flushed, || format!("the disk's writer stands still at {still}"))?;
        guest.shell("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | sha256sum")?;
        // What the guest said by the serial port, from machine to machine without a byte too few.
        serial += &ended.console;
        ensure(!serial.contains("\"event\":\"done\""), || "the load was over before the move was".into())?;
        guest.hears(&mut serial, "\"event\":\"done\"")?;
        seconds_are_right(&serial)?;
    }
    let Event::Facts { cpus: 2, clocksource, .. } = guest.ask_one(&Request::Facts)? else {
        return Err("no facts, or a CPU is lost".into());
    };
    ensure(clocksource == "kvm-clock", || format!("its clock is {clocksource} now"))?;
    let flushed = count(&guest)?;
    // The machine ends without a word to its guest: what was flushed is on the disk.
    guest.ctl(&["stop"])?;
    let ended = guest.wait()?.with(0)?;
    ensure(ended.errors.is_empty(), || format!("vellum had to say: {}", ended.errors))?;
    work::holds(&disk, flushed)
}

/// The agent's connections: its threads.
fn vsock_connections(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("ls /proc/1/task | wc -l")?.trim().parse()?)
}

/// That every second was told, and no page was wrong.
fn seconds_are_right(serial: &str) -> Result<(), Failed> {
    let mut seconds = 0;
    // The console shows what was typed, too.
    for line in serial.lines().filter_map(|line| Some(&line[line.find("{\"event\"")?..])) {
        match serde_json::from_str(line).map_err(|error| format!("{line:?}: {error}"))? {
            Event::Memory { wrong: 0, .. } => seconds += 1,
            Event::Ready { .. } | Event::Done => {}
            event => return Err(format!("{event:?}").into()),
        }
    }
    ensure(seconds == LOAD, || format!("{seconds} of {LOAD} seconds were told:\n{serial}"))
}
