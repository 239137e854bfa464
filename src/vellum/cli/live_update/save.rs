//! `vellum live-update save`.
//!
//! All machines are checked before anything is done to one of them. Then their memory is preserved
//! while they run, and only then are they paused and saved. Closing the session undoes the first, and
//! closing the connections the second: in this order, so that no guest runs on memory that a kexec
//! would hand over. That is also what happens if this process is killed before the kexec.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::super::client::{failure, heard, listen, may_leave, status};
use super::super::failure::Failure;
use super::super::line::VERSION;
use super::super::output::{print, say};
use super::super::upgrade::borrow;
use super::{SESSION, orchestrator, read_image, session};
use vellum_control::client::Client;
use vellum_control::{ChildDevice, Do, Event, Status, names};
use vellum_devices::virtio::blk;
use vellum_host::live_update::Versions;
use vellum_host::topology;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_launch::config::unpacked;
use vellum_machine::handoff;
use vellum_migration::live_update::{self, HostSide, List, RECORD, Saved};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::file::{path_of, taken};
use vellum_sys::liveupdate::Session;
use vellum_sys::mmap::memfd;
use vellum_sys::poll::Poll;
use vellum_sys::program::detached_with;
use vellum_sys::{file, signal, socket};

/// Save machines in memory that the next kernel takes over
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct SaveArgs {
    /// The machines: their names, or the paths of their control sockets
    #[arg(value_name = "MACHINE", required_unless_present = "all")]
    machines: Vec<String>,

    /// Save all machines of this user
    #[arg(long, conflicts_with = "machines")]
    all: bool,

    /// The name of what is saved; `vellum live-update restore` takes the same one
    #[arg(long, value_name = "NAME", default_value = SESSION, value_parser = session)]
    session: String,

    /// Compare the handover versions of this kernel image with the running kernel's before anything
    /// is done: with other versions the next kernel panics, or has lost the machines
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// Keep it saved by this process, in the foreground, until the kexec: the default
    #[arg(id = "hold", long)]
    _hold: bool,

    /// Return when all is saved, and leave a process behind that keeps it so
    #[arg(long, conflicts_with_all = ["hold", "hand_over"])]
    detach: bool,

    /// Send what keeps the machines saved to the unix socket at this path, and return: the session's
    /// descriptor first, then a connection to each machine. To undo it, close them in this order
    #[arg(long, value_name = "SOCKET", conflicts_with = "hold")]
    hand_over: Option<PathBuf>,

    /// Write as JSON how long each step took
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Be the process that --detach leaves behind, which tells on this descriptor that all is saved
    #[arg(long, value_name = "N", hide = true)]
    holder: Option<RawFd>,
}

const EXAMPLES: &str = "\
Examples:
  vellum live-update save web db --kernel /boot/vmlinuz-7.3
  vellum live-update save --all --detach
Load the next kernel first, by kexec_file_load. The machines stand still from here
to the kexec. If this process ends before, they run on, and nothing is saved.";

/// How long a machine may take until it is saved. Its memory is preserved by then.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);

/// How often signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// Runs `vellum live-update save`.
pub fn run(args: &SaveArgs) -> Result<Exit, Failure> {
    if args.detach {
        return detach();
    }
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    if let Some(kernel) = &args.kernel {
        check_kernel(kernel)
            .map_err(|why| Failure::usage(format!("--kernel {}: {why}", kernel.display())))?;
    }
    let opened = orchestrator()?;
    let mut machines = targets(args)?
        .iter()
        .map(|(name, path)| Machine::check(name, path))
        .collect::<Result<Vec<_>, _>>()?;
    let session = opened.create(&live_update::session(&args.session)).map_err(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => Failure::usage(format!(
            "--session {}: a session of this name is there already: end the process that holds it, or choose another name",
            args.session
        )),
        _ => Failure::host(format!("--session {}: {error}", args.session)),
    })?;
    drop(opened);
    let held = Held { session, machines: std::mem::take(&mut machines), record: record()? };
    held.save(args)
}

/// Runs this command again in a process that outlives this one. Waits until all is saved.
fn detach() -> Result<Exit, Failure> {
    let [waits, theirs] = <[UnixStream; 2]>::from(UnixStream::pair().map_err(Failure::host)?);
    let mut command = Command::new(std::env::current_exe().map_err(Failure::host)?);
    // The kill at the end of a shutdown by systemd spares processes of root with such a name.
    command.arg0("@vellum").args(std::env::args_os().skip(1).filter(|word| word != "--detach"));
    command.arg(format!("--holder={}", theirs.as_raw_fd()));
    // Like this process's, but not these: whoever waits for their end must not wait for the kexec.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    detached_with(&mut command, vec![theirs.as_raw_fd()]);
    let mut child = command.spawn().map_err(Failure::host)?;
    drop(theirs);
    let is_saved = matches!((&waits).read(&mut [0]), Ok(1));
    if !is_saved {
        let ended = child.wait_with_output().map_err(Failure::host)?;
        let why = String::from_utf8_lossy(&ended.stderr);
        let why = why.lines().last().unwrap_or("the process that saves has ended without a word");
        let exit = if ended.status.code() == Some(i32::from(Exit::Usage.code())) {
            Exit::Usage
        } else {
            Exit::Error
        };
        return Err(Failure::ended(exit, why.trim_start_matches("vellum: ")));
    }
    let mut told = vec![0; 64 << 10];
    let count = child.stdout.take().map_or(Ok(0), |mut out| out.read(&mut told)).map_err(Failure::host)?;
    print(String::from_utf8_lossy(&told[..count]))?;
    Ok(Exit::PowerOff)
}

/// The machines, by their names and sockets.
fn targets(args: &SaveArgs) -> Result<Vec<(String, PathBuf)>, Failure> {
    if !args.all {
        let find = |name: &String| Ok((name.clone(), names::find(name).map_err(failure)?));
        return args.machines.iter().map(find).collect();
    }
    let mut running = names::all().map_err(failure)?;
    running.retain(|(_, path)| UnixStream::connect(path).is_ok());
    match running.is_empty() {
        true => Err(Failure::usage("--all: no machine of this user runs")),
        false => Ok(running),
    }
}

/// Compares the versions of the running kernel with those in the image `next`.
fn check_kernel(next: &Path) -> Result<(), String> {
    let here = Versions::running().map_err(|why| {
        format!("what the running kernel hands over cannot be told ({why}); it takes CONFIG_KEXEC_HANDOVER_DEBUGFS, and debugfs mounted")
    })?;
    let image = read_image(next)?;
    let image = unpacked(&image).unwrap_or(image);
    here.differences(&Versions::within(&image)).map_or(Ok(()), Err)
}

/// The file for the record.
fn record() -> Result<File, Failure> {
    memfd(c"vellum-live-update", 0, None).map_err(Failure::host)
}

/// A machine that is being saved.
struct Machine {
    name: String,
    path: PathBuf,
    client: Client,
    status: Status,
    line: Vec<String>,
    host: HostSide,
    /// The number of its request.
    id: u64,
}

impl Machine {
    /// Checks that the machine can be saved. Nothing is done to it.
    fn check(name: &str, path: &Path) -> Result<Self, Failure> {
        let mut client = listen(path)?;
        let status = status(&mut client)?;
        may_leave(&status)?;
        check_memory(name, &status)?;
        let (list, descriptors) = borrow(path)?;
        let name = match &list.control {
            Some(control) => {
                control.path.file_stem().map_or(name.into(), |stem| stem.to_string_lossy().into_owned())
            }
            None => name.to_owned(),
        };
        check_disks(&name, &list, &descriptors)?;
        let line = std::fs::read(format!("/proc/{}/cmdline", status.pid)).unwrap_or_default();
        let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let mut line: Vec<String> = words.collect();
        line.pop();
        let host = host_side(list, &descriptors);
        Ok(Self { name, path: path.to_owned(), client, status, line, host, id: 0 })
    }

    /// Begins the operation. Returns the machine's memory, which gives back no page from now on, its
    /// position, and the files for its state.
    fn begin(&mut self) -> Result<(File, u64, Files), Failure> {
        let file = |name| memfd(name, 0, None).map_err(Failure::host);
        let [ram, map, state] = [
            file(c"vellum-live-update-pages")?,
            file(c"vellum-live-update-map")?,
            file(c"vellum-live-update-state")?,
        ];
        let descriptors: [BorrowedFd<'_>; 3] = [&ram, &map, &state].map(AsFd::as_fd);
        self.client.ask_with(&Do::LiveUpdate {}, &descriptors).map_err(failure)?;
        self.id = self.client.last_id();
        let (_, memory) = Client::borrow(&self.path, &Do::LiveUpdateMemory {}).map_err(failure)?;
        let memory = memory.into_iter().next().ok_or_else(|| Failure::host("no memory came"))?;
        let (memory, position) = live_update::marked(&memory.into()).map_err(Failure::host)?;
        Ok((memory, position, Files { ram, map, state, clones: Vec::new() }))
    }

    /// Waits until it is saved. Returns what is in its files, and how long it has been paused.
    fn saved(&mut self) -> Result<(Point, u64), Failure> {
        let mut left = SAVE_TIMEOUT;
        loop {
            if signal::take().is_some() {
                return Err(Failure::host("nothing is saved: it was cancelled"));
            }
            let Some(line) = heard(&mut self.client, Some(self.id), "it was saved")? else {
                left = left.saturating_sub(LOOK);
                if left.is_zero() {
                    let seconds = SAVE_TIMEOUT.as_secs();
                    return Err(Failure::host(format!("{} was not saved within {seconds} s", self.name)));
                }
                continue;
            };
            match serde_json::from_value::<Event>(line) {
                Ok(Event::Preserved { us, written }) => return Ok((Point::of(0, false, written), us)),
                Ok(Event::NotPreserved { why }) => {
                    return Err(Failure::host(format!("{} was not saved: {why}", self.name)));
                }
                _ => {}
            }
        }
    }
}

/// Fails if kernels do not preserve such memory.
fn check_memory(name: &str, status: &Status) -> Result<(), Failure> {
    let backing = status.backing.as_deref().unwrap_or("unknown");
    if status.forked {
        return Err(Failure::usage(format!(
            "the memory of {name} was forked, and no descriptor has all of it; vellum ctl {name} upgrade {} copies it, and \
             then it can be saved",
            std::env::current_exe().map_or("vellum".into(), |path| path.display().to_string())
        )));
    }
    match backing {
        "memfd" => Ok(()),
        huge if huge.contains("hugetlb") => Err(Failure::usage(format!(
            "the memory of {name} is {huge}, which kernels do not preserve; start it with --memory SIZE,backing=memfd"
        ))),
        other => Err(Failure::usage(format!(
            "the memory of {name} is {other}, which belongs to its process; start it with --memory SIZE,backing=memfd"
        ))),
    }
}

/// Fails if a disk would be gone after the kexec.
fn check_disks(
    name: &str,
    list: &handoff::List,
    descriptors: &[std::os::fd::OwnedFd],
) -> Result<(), Failure> {
    let disks = list.devices.iter().filter(|device| device.kind == blk::KIND.key);
    for descriptor in disks.flat_map(|disk| &disk.descriptors).filter_map(|at| descriptors.get(*at)) {
        let opened = File::from(descriptor.try_clone().map_err(Failure::host)?);
        let about = opened.metadata().map_err(Failure::host)?;
        let path = std::fs::read_link(path_of(&opened)).unwrap_or_default();
        if about.is_file() && about.nlink() == 0 {
            return Err(Failure::usage(format!(
                "--disk: {name} has an overlay without a name, which ends with its process: start it with overlay=FILE"
            )));
        }
        if about.is_file() && file::is_in_memory(&opened).map_err(Failure::host)? {
            return Err(Failure::usage(format!(
                "--disk: {} of {name} is on a file system in memory, which a kexec ends: move it to a disk",
                path.display()
            )));
        }
    }
    Ok(())
}

/// What a machine's process has of the host.
fn host_side(list: handoff::List, descriptors: &[std::os::fd::OwnedFd]) -> HostSide {
    let output = list.serial.as_ref().and_then(|serial| descriptors.get(serial.output?));
    let serial = match (output, list.serial.as_ref().is_some_and(|serial| serial.slave.is_some())) {
        (_, true) => "pty".to_owned(),
        (Some(output), false) => {
            let path = std::fs::read_link(path_of(output)).unwrap_or_default();
            let is_file = std::fs::metadata(&path).is_ok_and(|about| about.is_file());
            if is_file { format!("file={}", path.display()) } else { "null".into() }
        }
        (None, false) => "null".into(),
    };
    HostSide {
        serial,
        sandbox: list.sandbox,
        user: list.user,
        limit_ms: list.limit_ms,
        result: list.result,
        lock: list.lock,
        dirty_ring: list.dirty_ring,
        devices: list
            .devices
            .into_iter()
            .map(|device| ChildDevice { kind: device.kind, config: device.written })
            .collect(),
    }
}

/// What is saved, or being saved. The session is closed before the connections.
struct Held {
    session: Session,
    machines: Vec<Machine>,
    record: File,
}

impl Held {
    /// Saves the machines, and holds them.
    fn save(mut self, args: &SaveArgs) -> Result<Exit, Failure> {
        let mut begun = Vec::with_capacity(self.machines.len());
        for machine in &mut self.machines {
            begun.push(machine.begin()?);
        }
        check_room(&self.machines, &begun)?;
        let mut preserve_us = Vec::new();
        for (at, (machine, (memory, ..))) in self.machines.iter().zip(&begun).enumerate() {
            let start = Instant::now();
            let preserved = self.session.preserve(memory, live_update::token(at));
            preserve_us.push(start.elapsed().as_micros() as u64);
            preserved.map_err(|error| not_preserved(&format!("the memory of {}", machine.name), &error))?;
        }
        for machine in &mut self.machines {
            machine.client.ask(&Do::LiveUpdatePause {}).map_err(failure)?;
        }
        let mut list = List { vellum: VERSION.into(), machines: Vec::new() };
        let (mut files, mut told, mut pause_us) = (Vec::new(), String::new(), Vec::new());
        for (machine, (_, position, own)) in self.machines.iter_mut().zip(begun) {
            let (point, us) = machine.saved()?;
            let (name, line, host) = (machine.name.clone(), machine.line.clone(), machine.host.clone());
            told += &format!("{name} is saved, and had stood still for {:.1} ms\n", us as f64 / 1000.0);
            pause_us.push(us);
            list.machines.push(Saved { name, line, host, position, point, files: Default::default() });
            files.push(own);
        }
        let start = Instant::now();
        live_update::write(&self.record, &mut list, &files).map_err(Failure::host)?;
        drop(files);
        let preserved = self.session.preserve(&self.record, RECORD);
        preserved.map_err(|error| not_preserved("the state of the machines", &error))?;
        if let Some(path) = &args.json {
            let memory: Vec<u64> = self.machines.iter().map(|machine| machine.status.memory).collect();
            let times = json!({
                "memory": memory, "preserve_us": preserve_us, "pause_us": pause_us,
                "record_us": start.elapsed().as_micros() as u64
            });
            std::fs::write(path, times.to_string())
                .map_err(|error| Failure::usage(format!("--json {}: {error}", path.display())))?;
        }
        let (session, own) = (&args.session, std::process::id());
        told += &match &args.hand_over {
            Some(path) => format!("session {session}: it goes to {}\n", path.display()),
            None => format!("session {session}: kexec now, or end process {own}, and they run on\n"),
        };
        print(told)?;
        if let Some(path) = &args.hand_over {
            return self.hand_over(path);
        }
        if let Some(holder) = args.holder {
            let waits =
                taken(holder).ok_or_else(|| Failure::usage("--holder: no such descriptor is open"))?;
            UnixStream::from(waits).write_all(&[1]).map_err(Failure::host)?;
        }
        self.hold()
    }

    /// Holds what is saved until the kexec.
    fn hold(mut self) -> Result<Exit, Failure> {
        // In turns, because each connection is looked at by its own reader.
        let mut ended = vec![false; self.machines.len()];
        loop {
            if signal::take().is_some() {
                return Err(Failure::host(
                    "nothing is saved any more: it was cancelled, and the machines run on",
                ));
            }
            let mut poll = Poll::default();
            for (machine, _) in self.machines.iter().zip(&ended).filter(|(_, ended)| !**ended) {
                poll.readable(machine.client.connection());
            }
            if !poll.wait(Some(LOOK)).map_err(Failure::host)? {
                continue;
            }
            for (machine, ended) in self.machines.iter_mut().zip(&mut ended).filter(|(_, ended)| !**ended) {
                match heard(&mut machine.client, Some(machine.id), "the kexec") {
                    Ok(Some(line)) => {
                        if let Ok(Event::NotPreserved { why }) = serde_json::from_value(line) {
                            let name = &machine.name;
                            return Err(Failure::host(format!(
                                "nothing is saved any more: {name} runs on: {why}"
                            )));
                        }
                    }
                    Ok(None) => {}
                    Err(_) => {
                        say(&format!("the process of {} has ended; it stays saved", machine.name));
                        *ended = true;
                    }
                }
            }
        }
    }

    /// Sends what holds it to the process that listens at `path`.
    fn hand_over(self, path: &Path) -> Result<Exit, Failure> {
        let failed =
            |error: std::io::Error| Failure::usage(format!("--hand-over {}: {error}", path.display()));
        let stream = UnixStream::connect(path).map_err(failed)?;
        let connections = self.machines.iter().map(|machine| machine.client.connection().as_fd());
        let descriptors: Vec<BorrowedFd<'_>> =
            [self.session.as_fd()].into_iter().chain(connections).collect();
        if descriptors.len() > socket::MAX_DESCRIPTORS {
            let most = socket::MAX_DESCRIPTORS - 1;
            return Err(failed(std::io::Error::other(format!("at most {most} machines can be handed over"))));
        }
        socket::send(&stream, b"vellum live-update\n", &descriptors).map_err(failed)?;
        Ok(Exit::PowerOff)
    }
}

fn not_preserved(what: &str, error: &std::io::Error) -> Failure {
    let remedy = match error.raw_os_error() {
        Some(libc::ENOMEM) => "; the kernel has too little memory for it",
        Some(libc::EBUSY) => {
            "; another session has it, or the last one was not finished: vellum live-update restore"
        }
        _ => "",
    };
    Failure::host(format!("nothing is saved: the kernel does not preserve {what}: {error}{remedy}"))
}

/// Fails if the host lacks memory for the holes of the machines' memory, each of which gets a page.
fn check_room(machines: &[Machine], begun: &[(File, u64, Files)]) -> Result<(), Failure> {
    // The kernel moves preserved pages out of its scratch area.
    let available = topology::memory().available.saturating_sub(topology::movable_only());
    let mut needed = 0;
    for (machine, (memory, ..)) in machines.iter().zip(begun) {
        let present = memory.metadata().map_err(Failure::host)?.blocks() * 512;
        needed += machine.status.memory.saturating_sub(present);
    }
    if available > 0 && needed > available {
        let [needed, available] = [needed, available].map(|bytes| bytes >> 20);
        return Err(Failure::host(format!(
            "nothing is saved: {needed} MiB of the machines' memory were never written to and would be allocated, and \
             {available} MiB are available"
        )));
    }
    Ok(())
}
