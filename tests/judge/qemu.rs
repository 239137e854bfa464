//! Faults planted in QEMU's migration streams, and a source that goes on after its machine has
//! moved. The image must report the kind and the address of each fault, and the driver the source.
//!
//! A proxy is between source and target. It reads all of a precopy migration, and the target gets
//! the stream when the source stands still. So nothing that is planted races with the guest. While
//! the proxy has read each page once, it stops reading until the guest has written all pages again:
//! the stream then has an older and a newer copy of each.
//!
//! QEMU on TCG may lose a page by itself. So a target gets each stream unchanged first. A stream that
//! is not whole then is named, and not used.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use support::env::{Process, TestEnv};
use support::hosts::kvm;
use support::{Completion, Failed, LIMIT, ensure, eventually, test, tools};
use vellum_judge::drive::{Scenario, Setup, Vmm, run};
use vellum_judge::image::Arch;
use vellum_judge::read::{Log, Verdict, read};
use vellum_judge::sectors;

use crate::stream::{PAGE, SEED, Stream};
use crate::{arm64, disk, elf, emulator, is_long};

/// What is planted in a stream, with the address of the page, and as which kind the image reports
/// it. A huge page has 512 pages, so each is inside one.
const PLANTED: [(u64, &str, &str); 6] = [
    (0x40_0000, "older", "lost-write"),
    (0x48_0000, "swapped", "other-address"),
    (0x50_1000, "shifted", "other-address"),
    (0x58_0000, "torn", "torn"),
    (0x67_3000, "zeroed", "zeroes"),
    (0x78_0000, "dropped", "zeroes"),
];
/// The distance of two pages that are swapped, and the number of pages that are shifted.
const DISTANCE: u64 = 0x1_0000;
const SHIFTED: u64 = 4;

/// The pages that a fault is about.
fn pages(address: u64, change: &str) -> Vec<u64> {
    match change {
        "swapped" => vec![address, address + DISTANCE],
        "shifted" => (0..SHIFTED).map(|at| address + at * PAGE as u64).collect(),
        _ => vec![address],
    }
}

/// What the image must report of [`PLANTED`]. RAM begins at `base`.
pub(crate) fn expected(base: u64) -> BTreeSet<(&'static str, u64)> {
    let of =
        |(address, change, kind)| pages(address, change).into_iter().map(move |page| (kind, base + page));
    PLANTED.into_iter().flat_map(of).collect()
}

/// Plants all of [`PLANTED`].
pub(crate) fn plant(stream: &mut Stream) -> Result<(), Failed> {
    for (address, change, _) in PLANTED {
        let page = stream.newest(address)?;
        match change {
            "older" => stream.put(address, stream.older(address)?)?,
            "swapped" => {
                stream.put(address, stream.newest(address + DISTANCE)?)?;
                stream.put(address + DISTANCE, page)?;
            }
            "shifted" => {
                for address in pages(address, change) {
                    stream.put(address, stream.newest(address - PAGE as u64)?)?;
                }
            }
            "torn" => {
                let half = &stream.older(address)?[PAGE / 2..];
                stream.put(address, [&page[..PAGE / 2], half].concat())?;
            }
            "zeroed" => stream.zero(address)?,
            _ => stream.drop_copies(address, "all")?,
        }
    }
    Ok(())
}

/// Each fault of a log: its kind and page.
pub(crate) fn found(log: &Log) -> BTreeSet<(&'static str, u64)> {
    log.faults.iter().map(|fault| (fault.kind, fault.address & !(PAGE as u64 - 1))).collect()
}

/// Changes a file of QEMU's migration stream.
fn damage(path: &Path) -> std::io::Result<()> {
    let other = |error: Failed| std::io::Error::other(format!("{error:?}"));
    let mut stream = Stream::new(fs::read(path)?).map_err(other)?;
    plant(&mut stream).map_err(other)?;
    fs::write(path, stream.changed())
}

#[test(emulator())]
fn pages_that_a_snapshot_of_qemu_loses_are_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let cmdline = format!("passes=16 rate=30000 report=50ms seed={SEED} order=sequential");
    let setup = Setup {
        arch: Arch::X86_64,
        cpus: 2,
        memory: 16,
        cmdline,
        command: Vec::new(),
        arguments: Vec::new(),
        limit: LIMIT,
        between: damage,
    };
    let shown = run(Vmm::Qemu, Scenario::Snapshot, &setup, env.dir());
    ensure(shown.trouble.is_none(), || format!("{:?}", shown.trouble))?;
    let [machine] = &shown.machines[..] else {
        return Err(format!("{} machines", shown.machines.len()).into());
    };
    let log = &machine.log;
    ensure(log.verdict() == Verdict::Lost, || format!("{log:?}"))?;
    let found = found(log);
    ensure(found == expected(0), || format!("{found:x?}"))
}

/// A QMP connection of the test's own, which is ready for commands.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn of(socket: &Path) -> Result<Self, Failed> {
        let stream = eventually(LIMIT, "a monitor", || Ok(UnixStream::connect(socket).ok()))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// One command, and what it returns.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Failed> {
        writeln!(self.0.get_mut(), "{}", json!({ "execute": command, "arguments": arguments }))?;
        loop {
            let mut line = String::new();
            ensure(self.0.read_line(&mut line)? > 0, || format!("the monitor is closed: {command}"))?;
            let answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}").into());
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }

    fn is(&mut self, state: &str) -> Result<bool, Failed> {
        Ok(self.ask("query-status", json!({}))?["status"] == state)
    }
}

/// The machines of a test.
pub(crate) struct Bed {
    env: TestEnv,
    arch: Arch,
    has_disk: bool,
    /// Whether they run on TCG although there is KVM.
    emulated: bool,
}

impl Bed {
    /// The program, and the arguments that depend on the architecture.
    fn command(&self) -> Result<Command, Failed> {
        if self.arch == Arch::Aarch64 {
            return arm64::command(&self.env, "gic-version=3", "cortex-a57");
        }
        let mut command = Command::new("qemu-system-x86_64");
        // As the driver starts it.
        match !self.emulated && kvm().is_ok() {
            true => command.args(["-accel", "kvm", "-cpu", "host,-arch-capabilities"]),
            false => command.args(["-accel", "tcg", "-cpu", "max"]),
        };
        command.args(["-M", "pc", "-nodefaults", "-display", "none", "-kernel"]).arg(elf(&self.env)?);
        Ok(command)
    }
}

/// A QEMU that runs the image.
pub(crate) struct Qemu {
    process: Process,
    monitor: Monitor,
    console: PathBuf,
}

/// The number of passes within which the image has compared each page: one that has begun, and one
/// from its start on.
const COMPARED: u64 = 3;
/// The number of reports of an image that no longer goes on: some seconds.
const WAITING: usize = 200;

impl Qemu {
    /// Starts a machine. With `incoming` it takes a stream from there, and stands still.
    fn start(bed: &Bed, name: &str, incoming: Option<&Path>) -> Result<Self, Failed> {
        let env = &bed.env;
        let (console, socket) = (env.path(&format!("{name}.log")), env.path(&format!("{name}.qmp")));
        let mut command = bed.command()?;
        command.args(["-smp", "2", "-m", "16", "-no-reboot"]);
        // Without an end: how far the image is when it moves depends on the host.
        command.args(["-append", &format!("passes=0 seed={SEED} report=20ms")]);
        command.args(["-serial", &format!("file:{}", console.display())]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
        if bed.has_disk {
            disk(env)?;
            let file = env.path("judge.raw");
            let drive = format!("if=none,id=d,format=raw,readonly=on,file={}", file.display());
            command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=d"]);
        }
        if let Some(from) = incoming {
            command.args(["-S", "-incoming", &format!("unix:{}", from.display())]);
        }
        let process = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
        let monitor = Monitor::of(&socket)?;
        Ok(Self { process, monitor, console })
    }

    /// What it has printed after `before`.
    fn log(&self, before: &[u8]) -> Result<Log, Failed> {
        // QEMU may not have created it yet.
        Ok(read(&[before, &fs::read(&self.console).unwrap_or_default()].concat()))
    }

    /// Waits until the image, which had printed `before`, has compared and written each page. An
    /// image that has found a fault may end, or wait for a vCPU whose position was lost.
    fn goes_on(&mut self, before: &[u8]) -> Result<Log, Failed> {
        let reports =
            |console: &Path| fs::read_to_string(console).map_or(0, |text| text.matches("# pass").count());
        let first = reports(&self.console);
        let mut begins = None;
        eventually(LIMIT, "more passes", || {
            let ended = self.process.try_wait()?.is_some();
            let reports = reports(&self.console);
            let log = self.log(before)?;
            // An earlier report may be many passes old.
            if reports > first + 1 && begins.is_none() {
                begins = log.pass;
            }
            let waits = !log.faults.is_empty() && reports > first + WAITING;
            let is_over = begins.is_some_and(|pass| log.pass > Some(pass + COMPARED));
            Ok((ended || waits || is_over).then_some(log))
        })
    }

    /// Moves the machine into a stream. It stands still then. With `twice`, the pages up to [`HELD`]
    /// are in the stream at least twice.
    fn leaves(&mut self, bed: &Bed, twice: bool) -> Result<Stream, Failed> {
        let path = bed.env.path("leaves");
        let listener = UnixListener::bind(&path)?;
        self.limits_downtime(if twice { 0 } else { DOWNTIME })?;
        self.monitor.ask("migrate", json!({ "uri": format!("unix:{}", path.display()) }))?;
        let (mut proxy, _) = listener.accept()?;
        fs::remove_file(&path)?;
        proxy.set_read_timeout(Some(LIMIT))?;
        let mut bytes = Vec::new();
        if twice {
            while !Stream::new(bytes.clone())?.pages.contains_key(&HELD) {
                let read = (&proxy).take(1 << 20).read_to_end(&mut bytes)?;
                ensure(read > 0, || "the source has closed its stream".into())?;
            }
            self.goes_on(&[])?;
            self.limits_downtime(LIMIT.as_millis())?;
        }
        proxy.read_to_end(&mut bytes)?;
        eventually(LIMIT, "it has moved", || Ok(self.monitor.is("postmigrate")?.then_some(())))?;
        let stream = Stream::new(bytes)?;
        ensure(stream.is_whole, || "the stream has no end".into())?;
        Ok(stream)
    }

    /// Sets for how many ms the machine may stand still when it moves. With 0 it goes on.
    fn limits_downtime(&mut self, limit: u128) -> Result<(), Failed> {
        self.monitor.ask("migrate-set-parameters", json!({ "downtime-limit": limit as u64 })).map(drop)
    }

    /// Moves the machine by a stream that a target gets unchanged, and has both go on. Returns the
    /// stream, what the image had printed, and whether the target had all that the source has.
    fn moves(&mut self, bed: &Bed, twice: bool) -> Result<(Stream, Vec<u8>, bool), Failed> {
        let stream = self.leaves(bed, twice)?;
        let before = fs::read(&self.console)?;
        let log = arrives(bed, &stream, &before)?;
        let is_whole = log.faults.is_empty() && log.verdict() == unfinished();
        if !is_whole {
            eprintln!("QEMU lost this by itself: {:x?}, {:?}", log.faults, log.verdict());
        }
        self.monitor.ask("cont", json!({}))?;
        let here = self.goes_on(&[])?;
        ensure(here.faults.is_empty() && here.verdict() == unfinished(), || format!("the source: {here:?}"))?;
        Ok((stream, before, is_whole))
    }

    /// A stream with each page twice by which QEMU loses nothing: the faults of a changed one are
    /// those of its changes. Returns it with what the image had printed.
    pub(crate) fn moves_whole(&mut self, bed: &Bed) -> Result<(Stream, Vec<u8>), Failed> {
        eventually(LIMIT, "a stream that is whole", || {
            let (stream, before, is_whole) = self.moves(bed, true)?;
            Ok(is_whole.then_some((stream, before)))
        })
    }
}

/// The verdict of an image without an end that has found nothing.
pub(crate) fn unfinished() -> Verdict {
    Verdict::Crashed("the log ends without a verdict".into())
}

/// Gives a changed stream to a target. Returns the log when the image, which had printed `before`,
/// has compared each page.
pub(crate) fn arrives(bed: &Bed, stream: &Stream, before: &[u8]) -> Result<Log, Failed> {
    let path = bed.env.path("arrives");
    let mut target = Qemu::start(bed, "target", Some(&path))?;
    let mut proxy = eventually(LIMIT, "the target listens", || Ok(UnixStream::connect(&path).ok()))?;
    proxy.write_all(&stream.changed())?;
    drop(proxy);
    let mut arrived = || Ok((!target.monitor.is("inmigrate")?).then_some(()));
    eventually(LIMIT, "it has arrived", &mut arrived)?;
    target.monitor.ask("cont", json!({}))?;
    let log = target.goes_on(before)?;
    fs::remove_file(&target.console)?;
    Ok(log)
}

/// QEMU's own limit of the downtime, in ms.
const DOWNTIME: u128 = 300;
/// The address up to which the proxy reads at first: above all that is planted.
const HELD: u64 = 0xa0_0000;

/// Starts the image as a source that has written each page more than once.
pub(crate) fn source(arch: Arch, has_disk: bool, emulated: bool) -> Result<(Bed, Qemu), Failed> {
    let bed = Bed { env: TestEnv::new()?, arch, has_disk, emulated };
    let mut source = Qemu::start(&bed, "source", None)?;
    eventually(LIMIT, "two passes", || Ok((source.log(&[])?.pass > Some(1)).then_some(())))?;
    source.goes_on(&[])?;
    Ok((bed, source))
}

#[test(emulator())]
fn pages_that_a_migration_of_qemu_loses_are_named() -> Result<(), Failed> {
    names_what_is_planted(Arch::X86_64, 0)
}

/// Plants faults in a migration of a machine whose RAM begins at `base`.
pub(crate) fn names_what_is_planted(arch: Arch, base: u64) -> Result<(), Failed> {
    let (bed, mut source) = source(arch, false, false)?;
    let (mut stream, before) = source.moves_whole(&bed)?;
    plant(&mut stream)?;
    // The last copy alone: an older one is left.
    let last = 0x70_0000;
    stream.drop_copies(last, "last")?;
    let log = arrives(&bed, &stream, &before)?;
    let (mut wanted, found) = (expected(base), found(&log));
    wanted.insert(("lost-write", base + last));
    ensure(found == wanted && log.verdict() == Verdict::Lost, || format!("{found:x?}, {:?}", log.verdict()))
}

/// What a device has written: one of the disk's buffers, and the index of the used ring.
#[test(emulator())]
fn what_a_device_writes_and_a_migration_of_qemu_loses_is_named() -> Result<(), Failed> {
    names_a_device_s_writes(Arch::X86_64, 0)
}

/// Plants older device writes in a migration of a machine whose RAM begins at `base`.
pub(crate) fn names_a_device_s_writes(arch: Arch, base: u64) -> Result<(), Failed> {
    let (bed, mut source) = source(arch, true, false)?;
    let (mut stream, before) = source.moves_whole(&bed)?;
    // Buffers begin at the second word of 32 bits (`Memory` in the image's disk.rs).
    let is_buffer = |page: &[u8]| {
        page[4..].as_chunks::<512>().0.iter().all(|bytes| {
            let number = u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes"));
            number < 1 << 20 && *bytes == sectors::sector(number)
        })
    };
    let buffers: Vec<u64> = stream
        .pages
        .keys()
        .copied()
        .filter(|page| stream.newest(*page).is_ok_and(|page| is_buffer(&page)))
        .collect();
    ensure(buffers.len() == 8, || format!("buffers: {buffers:x?}"))?;
    let buffer = buffers[0];
    let older = stream.earlier(buffer)?.ok_or("the buffer has not changed")?;
    // The used ring's index, in the page before: as it was two answers ago. QEMU refuses a machine
    // whose ring has more answers to come than entries.
    let ring = buffer - PAGE as u64;
    let mut older_ring = stream.newest(ring)?;
    let index = u16::from_le_bytes(older_ring[2..4].try_into()?).wrapping_sub(2);
    older_ring[2..4].copy_from_slice(&index.to_le_bytes());
    for (kind, address, content) in [("disk-data", buffer, older), ("disk-ring", ring, older_ring)] {
        stream.changes.clear();
        stream.put(address, content)?;
        let log = arrives(&bed, &stream, &before)?;
        let found = found(&log);
        ensure(found == BTreeSet::from([(kind, base + address)]), || {
            format!("{kind} {address:x}: {found:x?}")
        })?;
    }
    Ok(())
}

/// One vCPU's registers of an older stream, with all the rest of a newer one.
#[test(emulator())]
fn registers_of_an_older_stream_are_named() -> Result<(), Failed> {
    names_old_registers(Arch::X86_64, has_same_stack)
}

/// Gives vCPU 1 older registers, of a stream for which `is_safe` says so of the older and the newer
/// one.
pub(crate) fn names_old_registers(
    arch: Arch,
    is_safe: impl Fn(&Stream, &Stream) -> Result<bool, Failed>,
) -> Result<(), Failed> {
    let (bed, mut source) = source(arch, false, false)?;
    let mut old = source.moves_whole(&bed)?.0;
    let (mut new, before) = eventually(LIMIT, "a stack that both have", || {
        let (new, before) = source.moves_whole(&bed)?;
        let is_same = is_safe(&old, &new)?;
        let older = std::mem::replace(&mut old, new);
        Ok(is_same.then(|| (std::mem::replace(&mut old, older), before)))
    })?;
    for part in ["cpu_common", "cpu"] {
        let registers = old.bytes[old.device(part, 1)?].to_vec();
        new.change(new.device(part, 1)?, registers);
    }
    let log = arrives(&bed, &new, &before)?;
    let of = |kind| log.faults.iter().filter(move |fault| fault.kind == kind);
    let future = of("future").any(|fault| fault.vcpu == 1 && fault.found > fault.expected);
    ensure(future && of("position").count() > 0, || format!("{:x?}, {:?}", log.faults, log.verdict()))
}

/// Whether vCPU 1 is in user mode in `old`, and its stack there is also in `new`. Otherwise the
/// image may crash before it judges, because it returns to where it never was.
fn has_same_stack(old: &Stream, new: &Stream) -> Result<bool, Failed> {
    // 16 registers in the order of their encoding, RIP, RFLAGS, and the flags of TCG
    // (vmstate_x86_cpu in QEMU).
    let registers = &old.bytes[old.device("cpu", 1)?];
    let rsp = u64::from_be_bytes(registers[4 * 8..][..8].try_into()?);
    let flags = u32::from_be_bytes(registers[18 * 8..][..4].try_into()?);
    let page = rsp & !(PAGE as u64 - 1);
    let is_same = || {
        Ok::<bool, Failed>(
            old.newest(page)?[(rsp - page) as usize..] == new.newest(page)?[(rsp - page) as usize..],
        )
    };
    Ok(flags & 3 == 3 && is_same()?)
}

/// How often QEMU on TCG loses something by itself, while its source has all.
#[test(emulator())]
fn what_qemu_loses_by_itself_is_counted() -> Result<Completion, Failed> {
    if !is_long() {
        return Ok(Completion::ignored_with("takes minutes; VELLUM_JUDGE=all has it run"));
    }
    let ((bed, mut source), mut lost) = (source(Arch::X86_64, false, true)?, 0);
    for _ in 0..STREAMS {
        lost += u64::from(!source.moves(&bed, false)?.2);
    }
    eprintln!("seed {SEED}: QEMU on TCG lost something in {lost} of {STREAMS} migrations");
    Ok(Completion::Completed)
}

/// Streams that are counted.
const STREAMS: u64 = 100;

/// The source is resumed after its machine has moved. The driver must report that, whatever the
/// image says.
#[test(emulator())]
fn a_source_of_qemu_that_goes_on_is_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let real = tools::find("qemu-system-x86_64").ok_or("no qemu")?;
    let (bin, first, second) = (env.path("bin"), env.path("first-monitor"), env.path("second-monitor"));
    fs::create_dir(&bin)?;
    // Each has a second monitor. The target does not run before it is told to (-S), so that the
    // driver cannot see its end before the source is resumed.
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n*first.qmp*) set -- \"$@\" -qmp unix:{},server=on,wait=off ;;\n*second.qmp*) set -- \"$@\" -S -qmp unix:{},server=on,wait=off ;;\nesac\nexec {} \"$@\"\n",
        first.display(),
        second.display(),
        real.display()
    );
    support::executable(&bin.join("qemu-system-x86_64"), script.as_bytes())?;
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = env.command("judge run --vmm qemu --memory 16m --scenario migrate --format ktap");
    let driver = Process::spawn(command.env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let mut source = Monitor::of(&first)?;
    eventually(LIMIT, "it has moved", || Ok(source.is("postmigrate")?.then_some(())))?;
    source.ask("cont", json!({}))?;
    Monitor::of(&second)?.ask("cont", json!({}))?;
    let output = driver.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(1) && said.contains("the first copy goes on");
    ensure(right, || format!("{output:?}"))
}
