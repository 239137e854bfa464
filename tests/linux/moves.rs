//! A Linux guest moves to another process while it works, and there and back again: memory, disk, clocks, network and vsock.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use guest_agent::{Event, MemoryWork, Pattern, Request};
use harness::{Failed, LIMIT, ensure, eventually};

use crate::guest::{Guest, Image, Scratch};
use crate::wires::{Outage, Told, Wires};

/// Data that the guest has the sum of.
const DATA_MIB: u64 = 48;
/// For how many seconds the guest writes memory in each hop, which must be over before.
const LOAD: u64 = 90;
/// Of the disk that is written, in sectors.
const SECTORS: u64 = 2048;
/// By how much the guest's clock may have left the host's in a move.
const CLOCK: f64 = 0.05;

/// What runs in the guest while it moves.
const WORKERS: &str = "\
    (i=0; while i=$((i+1)); do
       printf %-512d $i | dd of=/dev/vda bs=512 seek=$((i % 2048)) conv=notrunc,fsync 2>/dev/null && echo $i > /tmp/flushed.new &&
         mv /tmp/flushed.new /tmp/flushed; done) > /dev/null 2>&1 &
    (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
       [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &";

/// 2 vCPUs move twice while the agent writes memory, others write a disk, look at the clocks and tell over TCP.
pub fn under_load(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    fs::write(&disk, vec![0; SECTORS as usize * 512])?;
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
    guest.shell(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={DATA_MIB} 2>/dev/null && sha256sum /tmp/data > /tmp/sum"
    ))?;
    guest.shell(WORKERS)?;
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
        guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null")?;
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
    holds(&disk, flushed)
}

/// How often the writer of the disk has been round.
fn count(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("cat /tmp/flushed")?.trim().parse()?)
}

/// The agent's connections: its threads.
fn vsock_connections(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("ls /proc/1/task | wc -l")?.trim().parse()?)
}

/// That each sector that was flushed before number `last` was holds its number, or one that came later.
fn holds(disk: &Path, last: u64) -> Result<(), Failed> {
    let disk = fs::File::open(disk)?;
    for number in last.saturating_sub(SECTORS).max(1)..=last {
        let mut sector = [0; 512];
        disk.read_exact_at(&mut sector, number % SECTORS * 512)?;
        let text = String::from_utf8_lossy(&sector).trim().to_owned();
        let found: u64 =
            text.parse().map_err(|_| format!("number {number} was flushed, and {text:?} is there"))?;
        let later = found >= number && (found - number).is_multiple_of(SECTORS);
        ensure(later, || format!("number {number} was flushed, and {found} is there"))?;
    }
    Ok(())
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

/// The guest's uptime, and between which times of this host it was read; in seconds.
struct Clock {
    guest: f64,
    host: [f64; 2],
}

impl Clock {
    fn read(guest: &Guest) -> Result<Self, Failed> {
        static EPOCH: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        let from = EPOCH.elapsed().as_secs_f64();
        let uptime = guest.shell("cat /proc/uptime")?;
        let guest = uptime.split_whitespace().next().unwrap_or_default().parse()?;
        Ok(Self { guest, host: [from, EPOCH.elapsed().as_secs_f64()] })
    }

    /// Whether as much time has passed there as here since `before`; how long reading took is not known to either.
    fn agrees_with(&self, before: &Self) -> Result<(), Failed> {
        let there = self.guest - before.guest;
        let here = self.host[0] - before.host[1]..=self.host[1] - before.host[0];
        eprintln!("{there:.2} s passed in the guest, {:.2} to {:.2} s here", here.start(), here.end());
        ensure((here.start() - CLOCK..=here.end() + CLOCK).contains(&there), || {
            format!("{there} s passed in the guest, {here:?} s here")
        })
    }
}
