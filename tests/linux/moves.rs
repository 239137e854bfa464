//! A busy Linux guest migrates to another process in every way, again and again: memory, disk,
//! clocks, network and vsock.

use std::os::unix::fs::symlink;

use guest_agent::{Event, MemoryWork, Pattern, Request};
use support::{Failed, LIMIT, ensure, eventually};

use crate::VELLUM;
use crate::guest::{CLOCKSOURCE, Ended, Guest, Image, scratch};
use crate::wires::{Outage, Reported, Wires};
use crate::work::{self, Clock, count};

/// Data in the guest with a known checksum.
const DATA_MIB: u64 = 48;
/// The seconds for which the guest writes memory in each hop, unless the file [`ENOUGH`] ends it
/// sooner. The migration must end earlier.
const LOAD: u64 = 300;
/// A file that the test makes in the guest when the migration is over.
const ENOUGH: &str = "/enough";

/// How a guest gets to another process.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Memory over a stream, with each page compared.
    Stream,
    /// Memory as a descriptor.
    Memfd,
    /// The guest first, then its memory.
    Postcopy,
    /// All memory once, the guest, and then the pages that it wrote meanwhile.
    Hybrid,
    /// An upgrade to another build of Vellum, with the name and open files.
    Upgrade,
}

/// Two migrations by streams.
pub const THERE_AND_BACK: &[Way] = &[Way::Stream; 2];
/// Each other way, one after the other.
pub const IN_OTHER_WAYS: &[Way] = &[Way::Upgrade, Way::Memfd, Way::Postcopy, Way::Hybrid];

impl Way {
    /// Whether the target is started by the test, with the host's side of its devices.
    fn has_target(self) -> bool {
        !matches!(self, Self::Upgrade)
    }

    /// The flags of `vellum migrate`.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Stream => &["--downtime", "5s", "--verify"],
            Self::Memfd => &["--downtime", "1m", "--link", "memfd"],
            Self::Postcopy => &["--downtime", "1m", "--mode", "postcopy"],
            Self::Hybrid => &["--downtime", "1m", "--mode", "hybrid"],
            Self::Upgrade => &["--downtime", "1m"],
        }
    }

    /// A part of the migration's output.
    fn says(self) -> &'static str {
        match self {
            Self::Stream => "pages, all alike",
            Self::Postcopy | Self::Hybrid => "waited",
            Self::Memfd | Self::Upgrade => "",
        }
    }
}

/// A guest with 2 vCPUs migrates by each of `ways` while the agent writes memory, and others write
/// a disk, check the clocks and report over TCP.
pub fn under_load(image: &Image, irqchip: &str, ways: &[Way]) -> Result<(), Failed> {
    let scratch = scratch()?;
    let disk = scratch.path("disk");
    work::empty(&disk)?;
    let wires = Wires::new(&scratch)?;
    let devices = |machine: usize| {
        let [net, tap] = wires.flags(machine);
        ["--disk".into(), disk.display().to_string(), net, tap, "--rng".into(), "--balloon".into()]
    };
    let step = |what: &str| eprintln!("linux {} {irqchip} moves: {what}", image.version);

    // Memory that is handed over must have a descriptor.
    let handed = ways.iter().any(|way| matches!(way, Way::Memfd | Way::Upgrade));
    let memory = if handed { "320m,backing=memfd" } else { "320m" };
    let mut flags = ["--cpus", "2", "--memory", memory, "--irqchip", irqchip].map(str::to_owned).to_vec();
    flags.extend(devices(0));
    let mut guest = Guest::start(image, "", &flags.iter().map(String::as_str).collect::<Vec<_>>())?;
    step("boots");
    guest.ready()?;
    // On a busy host the guest's kernel reports stalls, in the middle of a line of the agent's.
    guest.shell("dmesg -n 1")?;
    wires.up(&guest)?;
    work::begin(&guest, DATA_MIB)?;
    let mut told = Reported::begin(&guest)?;
    let mut machines = 0;
    for (hop, way) in (1..).zip(ways) {
        step(&format!("hop {hop}, {way:?}"));
        // The request goes over the serial port, which migrates with the guest. A vsock connection
        // would be reset.
        guest.shell(&format!("rm -f {ENOUGH}"))?;
        let load = MemoryWork {
            mib: 64,
            rate_mib: 8,
            pattern: Pattern::Random,
            seconds: LOAD,
            seed: hop,
            until: Some(ENOUGH.into()),
        };
        guest.type_line(&serde_json::to_string(&Request::Memory(load))?)?;
        let mut serial = String::new();
        guest.hears(&mut serial, "\"event\":\"memory\"")?;
        let flushed = count(&guest)?;
        let before = Clock::read(&guest)?;
        let connections = vsock_connections(&guest)?;
        let small = MemoryWork {
            mib: 1,
            rate_mib: 1,
            pattern: Pattern::Once,
            seconds: 10 * LOAD,
            seed: hop,
            until: None,
        };
        let mut open = guest.ask(&Request::Memory(small))?;
        eventually(LIMIT, "a vsock connection is open", || {
            Ok((vsock_connections(&guest)? > connections).then_some(()))
        })?;

        let outage = Outage::watch()?;
        machines += usize::from(way.has_target());
        let devices = devices(machines);
        let ended = goes(&mut guest, *way, &devices.iter().map(String::as_str).collect::<Vec<_>>())?;
        eprintln!("its network was silent for {:.0?} at most", outage.longest()?);

        // The guest's clock has advanced as far as the host's and never went back, and an open TCP
        // connection goes on.
        let after = Clock::read(&guest)?;
        after.agrees_with(&before)?;
        told.past(after.guest)?;
        work::is_as_it_was(&guest)?;
        // The vsock connection has ended on this side, and in the guest.
        ensure(open.any(|event| event.is_err()), || "a vsock connection has outlived its machine".into())?;
        eventually(LIMIT, "the guest knows that its vsock connection is gone", || {
            Ok((vsock_connections(&guest)? <= connections).then_some(()))
        })?;
        let still = count(&guest)?;
        ensure(still > flushed, || format!("the disk's writer stands still at {still}"))?;
        guest.shell("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | sha256sum")?;
        // The serial output of both machines together lacks no byte.
        serial += ended.as_ref().map_or("", |ended| &ended.console);
        ensure(!serial.contains("\"event\":\"done\""), || "the load was over before the move was".into())?;
        guest.shell(&format!("touch {ENOUGH}"))?;
        guest.hears(&mut serial, "\"event\":\"done\"")?;
        seconds_are_right(&serial)?;
    }
    let Event::Facts { cpus: 2, clocksource, .. } = guest.ask_one(&Request::Facts)? else {
        return Err("no facts, or a CPU is lost".into());
    };
    ensure(clocksource == CLOCKSOURCE, || format!("its clock is {clocksource} now"))?;
    let flushed = count(&guest)?;
    // The machine ends without notice to its guest. Flushed data is on the disk.
    guest.ctl(&["stop"])?;
    let ended = guest.wait()?.with(0)?;
    ensure(ended.errors.is_empty(), || format!("vellum had to say: {}", ended.errors))?;
    work::holds(&disk, flushed)
}

/// Moves the guest to another process by `way`. `devices` are the host's side of its devices there.
/// Returns the end of the old machine, if it has ended.
pub fn goes(guest: &mut Guest, way: Way, devices: &[&str]) -> Result<Option<Ended>, Failed> {
    if !way.has_target() {
        let process = |guest: &Guest| Ok::<_, Failed>(guest.ctl(&["status"])?["pid"].as_u64());
        let (first, scratch) = (process(guest)?, scratch()?);
        let build = scratch.path("other-build");
        symlink(VELLUM, &build)?;
        let build = build.display().to_string();
        let line = [&["ctl", guest.name(), "upgrade"], way.flags(), &[&build]].concat();
        let upgraded = guest.vellum(&line)?;
        ensure(upgraded.status.success(), || format!("{way:?}: {upgraded:?}"))?;
        eprint!("{}", String::from_utf8_lossy(&upgraded.stdout));
        let now = guest.status_when(|status| status["state"] == "running")?;
        ensure(now["pid"].as_u64() != first, || format!("it is in the process that it was in: {now}"))?;
        return Ok(None);
    }
    let (there, address) = Guest::to_come(devices)?;
    let moved = guest.vellum(&[&["migrate", guest.name(), "--to", &address], way.flags()].concat())?;
    ensure(moved.status.success(), || format!("{way:?}: {moved:?}"))?;
    let said = String::from_utf8_lossy(&moved.stdout).into_owned();
    ensure(said.contains(way.says()), || said.clone())?;
    eprint!("{said}");
    let ended = guest.wait()?.with(15)?;
    *guest = there;
    Ok(Some(ended))
}

/// The agent's connections, each with a thread.
fn vsock_connections(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("ls /proc/1/task | wc -l")?.trim().parse()?)
}

/// Checks that every second was reported, in order, and that no page was wrong.
fn seconds_are_right(serial: &str) -> Result<(), Failed> {
    let mut seconds = 0;
    // The console also echoes what was typed.
    for line in serial.lines().filter_map(|line| Some(&line[line.find("{\"event\"")?..])) {
        match serde_json::from_str(line).map_err(|error| format!("{line:?}: {error}"))? {
            Event::Memory { second, wrong: 0, .. } if second == seconds + 1 => seconds = second,
            Event::Ready { .. } | Event::Done => {}
            event => return Err(format!("{event:?}").into()),
        }
    }
    ensure(seconds > 0, || format!("no second was told:\n{serial}"))
}
