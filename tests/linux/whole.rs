//! One guest with every device, with all of them used and checked from both sides.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use guest_agent::{DiskWork, Event, MemoryWork, Pattern, Request};
use serde_json::{Value, json};
use support::{Failed, LIMIT, Scratch, ensure, eventually};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_control::names;

use crate::guest::{CLOCKSOURCE, Ended, Guest, Image, host, noise, scratch, short_name};
use crate::segments::Segments;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 1 << 30;
/// The addresses of host and guest.
const HOST: &str = "192.168.77.1";
const GUEST: &str = "192.168.77.2";
/// Bytes over TCP through the tap, in each direction.
const TRANSFER: usize = 16 << 20;
/// The largest frame without offloads: 1500 bytes and a header.
const ETHERNET: usize = 1514;
/// The size of the writable disk.
const DISK: u64 = 16 * MIB;

/// The tap: created by vellum, or by the test before.
#[derive(Clone, Copy, PartialEq)]
pub enum Tap {
    Ours,
    Others,
}

/// A guest with 2 vCPUs, 1 GiB, two disks, a network, a vsock, a console, entropy and a balloon.
pub fn every_device(image: &Image, irqchip: &str, tap: Tap) -> Result<(), Failed> {
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    let scratch = scratch()?;
    let (known, written, console) = (scratch.path("known"), scratch.path("written"), scratch.path("console"));
    let content = noise(seed, 8 << 20);
    fs::write(&known, &content)?;
    fs::write(&written, noise(seed + 1, DISK as usize))?;
    let network = Network::new(&scratch, tap)?;

    let mut flags = vec!["--kernel".to_owned(), image.kernel()];
    let mut flag = |name: &str, value: String| flags.extend([name.to_owned(), value]);
    flag("--cpus", "2".into());
    flag("--memory", "1g".into());
    flag("--irqchip", irqchip.into());
    flag("--disk", format!("{},readonly,serial=known", known.display()));
    flag("--disk", format!("{},queues=2", written.display()));
    flag("--net", network.flag());
    flag("--vsock", scratch.path("vsock").display().to_string());
    flag("--console", format!("file={}", console.display()));
    flags.extend(["--rng".to_owned(), "--balloon".into()]);
    // A long run prints its steps.
    let step = |what: &str| eprintln!("linux {} {irqchip}: {what}", image.version);
    let mut guest = Guest::start_as(scratch, image, "", flags)?;
    step("boots");
    guest.ready()?;
    let mut listener = Client::connect(&names::socket(guest.name())?)?;
    listener.ask(&Do::Events {})?;
    step("processors and memory");
    processors_and_memory(&guest, image)?;
    step("entropy");
    entropy(&guest)?;
    step("vsock");
    vsock(&guest)?;
    step("disks");
    disks(&guest, &known, &written)?;
    step("network");
    network.round_trip(&guest, seed)?;
    step("console");
    guest.shell("echo over the console > /dev/hvc0")?;
    step("pause under load");
    pause_under_load(&guest, &mut listener)?;
    step("balloon");
    balloon(&guest)?;
    step("clocks");
    clocks(&guest)?;
    step("power-off");
    let ended: Ended = guest.power_off()?.with(0)?;
    ensure(ended.errors.is_empty(), || format!("vellum had to say: {}", ended.errors))?;
    ensure(listener.line()? == json!({"event": "ended", "status": 0}), || {
        "the last event is the end".into()
    })?;
    let said = fs::read_to_string(&console)?;
    ensure(said.trim_end() == "over the console", || format!("the console said {said:?}"))?;
    ensure(fs::read(&known)? == content, || "a read-only disk has changed".into())?;
    after_erasing(&fs::read(&written)?)
}

fn processors_and_memory(guest: &Guest, image: &Image) -> Result<(), Failed> {
    let Event::Facts { cpus, clocksource, kernel, .. } = guest.ask_one(&Request::Facts)? else {
        return Err("no facts".into());
    };
    let right = cpus == 2 && clocksource == CLOCKSOURCE && kernel.starts_with(&format!("{}.", image.version));
    ensure(right, || format!("{cpus} CPUs, {clocksource}, {kernel}"))?;
    // All except the hole below 1 MiB, and the page at 0 that Linux reserves.
    let ram = system_ram(&guest.shell("cat /proc/iomem")?);
    ensure((MEMORY - MIB..=MEMORY).contains(&ram), || format!("the guest sees {ram} bytes of RAM"))?;
    let interrupts = guest.shell("cat /proc/interrupts")?;
    let names = ["virtio0", "virtio1", "virtio2", "virtio3", "virtio4", "virtio5", "virtio6"];
    ensure(names.iter().all(|name| interrupts.contains(name)), || format!("7 devices:\n{interrupts}"))
}

/// The bytes of `System RAM` in /proc/iomem.
fn system_ram(iomem: &str) -> u64 {
    let range = |line: &str| {
        let (first, last) = line.strip_suffix(" : System RAM")?.split_once('-')?;
        Some(u64::from_str_radix(last, 16).ok()? - u64::from_str_radix(first, 16).ok()? + 1)
    };
    iomem.lines().filter_map(range).sum()
}

pub fn entropy(guest: &Guest) -> Result<(), Failed> {
    let source = guest.shell("cat /sys/class/misc/hw_random/rng_current")?;
    ensure(source.starts_with("virtio_rng"), || format!("entropy comes from {source:?}"))?;
    let draw = || guest.shell("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | sha256sum");
    let (one, two) = (draw()?, draw()?);
    ensure(one != two, || format!("twice the same: {one}"))
}

/// A command's output, error output and status arrive unchanged, and the agent continues after an
/// invalid command.
pub fn vsock(guest: &Guest) -> Result<(), Failed> {
    let line = ["exec", guest.name(), "--", "sh", "-c", "echo out; echo err >&2; exit 7"];
    let output = guest.vellum(&line)?;
    let right = output.status.code() == Some(7) && output.stdout == b"out\n" && output.stderr == b"err\n";
    ensure(right, || format!("{output:?}"))?;
    let output = guest.vellum(&["exec", guest.name(), "--", "no-such-command"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(14) && said.contains("no-such-command"), || format!("{output:?}"))?;
    let output = guest.vellum(&["exec", guest.name(), "--request", r#"{"do":"facts"}"#])?;
    let facts: Event = serde_json::from_slice(&output.stdout)?;
    ensure(matches!(facts, Event::Facts { cpus: 2, .. }), || format!("{facts:?}"))
}

/// Checks that the guest's checksum of `device` is the host's of the file behind it.
pub fn is_read(guest: &Guest, device: &str, file: &Path) -> Result<(), Failed> {
    let sum = |text: String| text.split_whitespace().next().unwrap_or_default().to_owned();
    let ours = sum(host(&["sha256sum", &file.to_string_lossy()])?);
    let theirs = sum(guest.shell(&format!("sha256sum {device}"))?);
    ensure(ours == theirs, || format!("{ours} was read as {theirs}"))
}

/// The disk to read: the guest's checksum equals the host's. The disk to write: the guest verifies
/// each stamp, and [`after_erasing`] checks the file.
fn disks(guest: &Guest, known: &Path, written: &Path) -> Result<(), Failed> {
    is_read(guest, "/dev/vda", known)?;
    let facts =
        guest.shell("cat /sys/block/vda/ro /sys/block/vda/serial; echo; ls /sys/block/vdb/mq | wc -l")?;
    let facts: Vec<&str> = facts.split_whitespace().collect();
    ensure(facts == ["1", "known", "2"], || format!("read-only, serial, queues: {facts:?}"))?;

    let work = DiskWork { path: "/dev/vdb".into(), mib: DISK / MIB, passes: 2 };
    let passes = guest.ask(&Request::Disk(work))?.collect::<Result<Vec<_>, _>>()?;
    for (at, event) in (1..).zip(&passes) {
        let Event::Disk { pass, bytes: DISK, wrong: 0, .. } = event else {
            return Err(format!("{event:?}").into());
        };
        ensure(*pass == at, || format!("pass {at} is called {pass}"))?;
    }
    ensure(passes.len() == 2, || format!("{passes:?}"))?;

    // A quarter each: discarded, zeroed and given back, zeroed and kept, left alone.
    let before = fs::metadata(written)?.blocks();
    guest.shell("blkdiscard -o 0 -l 4194304 /dev/vdb")?;
    for (offset, unmap) in [(4 * MIB, true), (8 * MIB, false)] {
        let zero = Request::Zero { path: "/dev/vdb".into(), offset, bytes: 4 * MIB, unmap };
        guest.ask(&zero)?.collect::<Result<Vec<_>, _>>()?;
    }
    let given_back = before.saturating_sub(fs::metadata(written)?.blocks()) * 512;
    // The file system may allocate or free its own blocks meanwhile.
    ensure(given_back.abs_diff(8 * MIB) < MIB / 4, || format!("{given_back} bytes were given back of 8 MiB"))
}

/// What [`disks`] has left: zeros, then the stamps of the second pass.
fn after_erasing(disk: &[u8]) -> Result<(), Failed> {
    let (zeros, rest) = disk.split_at(12 << 20);
    ensure(zeros.iter().all(|&byte| byte == 0), || "what was erased is not zero".into())?;
    for (block, bytes) in (zeros.len() as u64 / 4096..).zip(rest.chunks(4096)) {
        let stamp = (block << 16 | 2).to_le_bytes();
        let wrong = bytes.chunks(8).position(|word| word != stamp);
        ensure(wrong.is_none(), || format!("block {block}, word {wrong:?}: not what the guest wrote"))?;
    }
    Ok(())
}

/// A tap with this machine on it. It is removed when this is dropped.
struct Network {
    tap: String,
    made_by: Tap,
}

impl Network {
    fn new(scratch: &Scratch, made_by: Tap) -> Result<Self, Failed> {
        let this = Self { tap: short_name(scratch), made_by };
        if made_by == Tap::Others {
            host(&["ip", "tuntap", "add", &this.tap, "mode", "tap"])
                .or_else(|_| host(&["tunctl", "-t", &this.tap]))?;
            host(&["ip", "addr", "add", &format!("{HOST}/24"), "dev", &this.tap])?;
            host(&["ip", "link", "set", &this.tap, "up"])?;
        }
        Ok(this)
    }

    fn flag(&self) -> String {
        let mac = "mac=02:00:00:00:77:02";
        match self.made_by {
            Tap::Ours => format!("tap={},{mac},host={HOST}/24", self.tap),
            Tap::Others => format!("tap={},{mac}", self.tap),
        }
    }

    /// Sends random data to the guest and back over TCP, with offloads: segments larger than an
    /// Ethernet frame cross the tap.
    fn round_trip(&self, guest: &Guest, seed: u64) -> Result<(), Failed> {
        let listener = TcpListener::bind((HOST, 0))?;
        let port = listener.local_addr()?.port();
        let sent = noise(seed, TRANSFER);
        let segments = Segments::watch(&self.tap)?;
        let copy = sent.clone();
        let peer = thread::spawn(move || -> std::io::Result<Vec<u8>> {
            let (mut stream, _) = listener.accept()?;
            stream.write_all(&copy)?;
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut Vec::new())?;
            let (mut stream, _) = listener.accept()?;
            let mut back = Vec::new();
            stream.read_to_end(&mut back).map(|_| back)
        });
        let address = guest.shell("cat /sys/class/net/eth0/address")?;
        ensure(address.trim() == "02:00:00:00:77:02", || format!("the guest's address is {address}"))?;
        // nc writes 1024 bytes at once. If each of these is acknowledged before the next, as on a
        // host with shadow paging, TCP never has more than one segment to send.
        guest.shell(&format!(
            "set -e; ip addr add {GUEST}/24 dev eth0; ip link set eth0 up
             nc {HOST} {port} > /tmp/got; nc {HOST} {port} -e dd if=/tmp/got bs=64k status=none; rm /tmp/got"
        ))?;
        let back = peer.join().map_err(|_| "the peer panicked")??;
        ensure(back == sent, || format!("{} bytes came back of {TRANSFER}, or others", back.len()))?;
        for (way, largest) in ["from the guest", "to the guest"].into_iter().zip(segments.largest()?) {
            ensure(largest > ETHERNET, || format!("{way} no segment was larger than {largest} bytes"))?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if self.made_by == Tap::Others {
            let _ = host(&["ip", "link", "del", &self.tap]).or_else(|_| host(&["tunctl", "-d", &self.tap]));
        }
    }
}

/// A guest that is paused while it writes memory stands still, and loses nothing.
fn pause_under_load(guest: &Guest, listener: &mut Client) -> Result<(), Failed> {
    let work =
        MemoryWork { mib: 400, rate_mib: 0, pattern: Pattern::Random, seconds: 2, seed: 7, until: None };
    let mut seconds = guest.ask(&Request::Memory(work))?;
    let first = seconds.next().ok_or("no event")??;
    let resident = resident_mib(guest)?;
    ensure(resident >= 400, || format!("400 MiB are in use, {resident} MiB resident"))?;
    let took = guest.ctl(&["pause"])?;
    ensure(took.as_str().is_some_and(|said| said.starts_with("paused after ")), || format!("{took}"))?;
    let status = guest.ctl(&["status"])?;
    ensure(status["state"] == "paused" && status["vcpus"] == 2 && status["memory"] == MEMORY, || {
        format!("{status}")
    })?;
    let before = guest_ticks(guest)?;
    ensure(before.iter().all(|&ticks| ticks > 0), || format!("vCPUs that never ran: {before:?}"))?;
    // A slow operation. It ends with the machine still paused.
    for _ in 0..10 {
        guest.ctl(&["pause"])?;
    }
    let after = guest_ticks(guest)?;
    ensure(before == after, || format!("vCPUs ran while paused: {before:?}, {after:?}"))?;
    guest.ctl(&["resume"])?;
    ensure(guest.ctl(&["status"])?["state"] == "running", || "it goes on".into())?;
    let mut all = vec![first];
    all.extend(seconds.collect::<Result<Vec<_>, _>>()?);
    for event in &all {
        let Event::Memory { pages: 1.., p50_ns, p99_ns, max_ns, wrong: 0, .. } = event else {
            return Err(format!("{event:?}").into());
        };
        ensure(p50_ns <= p99_ns && p99_ns <= max_ns, || format!("{event:?}"))?;
    }
    ensure(all.len() == 2, || format!("2 seconds, {} events", all.len()))?;
    let events = [listener.line()?, listener.line()?];
    ensure(events[0]["event"] == "paused" && events[1]["event"] == "resumed", || format!("{events:?}"))
}

/// The ticks that each vCPU thread spent in the guest. Ticks in its own code do not count, because
/// it may be asked again to pause.
fn guest_ticks(guest: &Guest) -> Result<Vec<u64>, Failed> {
    let mut all = Vec::new();
    for task in fs::read_dir(format!("/proc/{}/task", guest.pid()))? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        if stat.contains("(vcpu") {
            // Field 43 of proc(5), guest_time. The first two fields end with the parenthesis.
            all.push(fields[40].parse()?);
        }
    }
    ensure(all.len() == 2, || format!("{} vCPU threads", all.len()))?;
    Ok(all)
}

/// Inflated, the balloon takes that much of the guest's memory. Deflated, it gives it back.
///
/// Linux counts the pages exactly. Of MemFree only a bound is known, and the test waits for it:
/// Linux takes pages off its free lists while it reports them to the balloon, at most 32 blocks of
/// 4 MiB, so what is free once says little about what is free a moment later.
fn balloon(guest: &Guest) -> Result<(), Failed> {
    const BALLOON: u64 = 256;
    let number = |file: &str, key: &str| -> Result<u64, Failed> {
        Ok(guest.shell(&format!("awk '/^{key}/ {{print $2}}' /proc/{file}"))?.trim().parse()?)
    };
    let counted = |key: &str| Ok::<_, Failed>(number("vmstat", key)? * 4 / 1024);
    let free_when = |what: &str, wanted: &dyn Fn(u64) -> bool| {
        let mut free = 0;
        let found = eventually(LIMIT, what, || {
            free = number("meminfo", "MemFree:")? >> 10;
            Ok(wanted(free).then_some(()))
        });
        found.or_else(|failed| {
            let (why, all) = (failed.message().unwrap_or_default(), guest.shell("cat /proc/meminfo")?);
            Err(Failed::from(format!("{why}: MemFree is {free} MiB:\n{all}")))
        })
    };
    // Linux would reclaim the page cache for the balloon, and it would not come back.
    guest.shell("echo 3 > /proc/sys/vm/drop_caches")?;
    let total = number("meminfo", "MemTotal:")? >> 10;
    let (inflated, deflated) = (counted("balloon_inflate")?, counted("balloon_deflate")?);
    free_when("the balloon is empty", &|free| free + BALLOON > total)?;
    guest.ctl(&["balloon", &format!("{BALLOON}m")])?;
    guest.status_when(|status| status["balloon"] == BALLOON * MIB).map_err(|failed| stuck(guest, failed))?;
    let took = counted("balloon_inflate")? - inflated;
    ensure(took == BALLOON, || format!("a balloon of {BALLOON} MiB took {took} MiB"))?;
    free_when("the balloon is up", &|free| free + BALLOON <= total)?;
    guest.ctl(&["balloon", "0"])?;
    guest.status_when(|status| status["balloon"] == 0).map_err(|failed| stuck(guest, failed))?;
    let gave = counted("balloon_deflate")? - deflated;
    ensure(gave == BALLOON, || format!("a balloon of {BALLOON} MiB gave {gave} MiB back"))?;
    free_when("the balloon is down", &|free| free + BALLOON > total)
}

/// Finds which message a stuck balloon has lost. A resume makes the device look at its queues
/// again: if that helps, a notification from the guest was lost. A new request interrupts the
/// guest, whose driver looks at its queues: if that helps, an interrupt was lost.
fn stuck(guest: &Guest, failed: Failed) -> Failed {
    let size = || -> Result<Value, Failed> { Ok(guest.ctl(&["status"])?["balloon"].clone()) };
    let moves = |words: &[&[&str]]| -> Result<String, Failed> {
        let before = size()?;
        words.iter().try_for_each(|words| guest.ctl(words).map(drop))?;
        let after = guest.status_when(|status| status["balloon"] != before);
        Ok(format!("{words:?}: {}", if after.is_ok() { "it moves" } else { "it stays" }))
    };
    let mut said = vec![failed.message().unwrap_or_default().to_owned()];
    // The guest itself may not answer, so it is asked last.
    for words in [&[&["pause"][..], &["resume"]][..], &[&["balloon", "128m"]]] {
        said.push(moves(words).unwrap_or_else(|failed| format!("{failed:?}")));
    }
    eprintln!("{}", said.join("\n"));
    let look = "cat /proc/interrupts; echo w > /proc/sysrq-trigger; dmesg | tail -n 60; cat /proc/buddyinfo";
    said.push(guest.shell(look).unwrap_or_else(|failed| format!("{failed:?}")));
    said.join("\n").into()
}

fn resident_mib(guest: &Guest) -> Result<u64, Failed> {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? >> 10)
}

fn clocks(guest: &Guest) -> Result<(), Failed> {
    let event = guest.ask_one(&Request::Clock { seconds: 1 })?;
    let Event::Clock { backwards: 0, drift_ns, .. } = event else { return Err(format!("{event:?}").into()) };
    // The clock is not adjusted, so the two differ only by the time between the two readings.
    ensure(drift_ns.abs() < 50_000_000, || format!("{event:?}"))
}
