//! `vellum live-update save`.
//!
//! All that can be checked is checked before anything is done to a machine, and all that is wrong is
//! told at once ([`checks`](super::checks)). Then their memory is preserved while they run, and only then
//! are they paused and saved. Closing the session undoes the first, and closing the connections the
//! second: in this order, so that no guest runs on memory that a kexec would hand over. That is also
//! what happens if this process is killed before the kexec.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::super::client::{failure, heard, listen, may_leave, status};
use super::super::control::Resident;
use super::super::failure::Failure;
use super::super::line::VERSION;
use super::super::output::{print, say};
use super::super::starting::{Starting, inherited, this_program};
use super::super::upgrade::borrow;
use super::checks::{Wrong, check_disks, check_kept, check_kernel, check_loaded, check_memory, lacks_room};
use super::host_side::{host_side, started_as};
use super::keeper::InKernel;
use super::note::Note;
use super::restore::start_keeper;
use super::{SESSION, orchestrator, restore_of, session};
use vellum_control::client::Client;
use vellum_control::{Do, Event, Status, names};
use vellum_host::topology;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::live_update::{self, HostSide, List, RECORD, Saved};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::file::taken;
use vellum_sys::liveupdate::{Orchestrator, Session};
use vellum_sys::mmap::memfd;
use vellum_sys::poll::Poll;
use vellum_sys::{signal, socket};

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

    /// Succeed if no machine of this user runs, and save nothing
    #[arg(long, conflicts_with = "machines")]
    if_any: bool,

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

    /// Only check whether the machines can be saved, with this command line
    #[arg(long, conflicts_with_all = ["hold", "detach", "hand_over"])]
    check: bool,

    /// Save before the next kernel is loaded
    #[arg(long)]
    not_loaded: bool,

    /// Return when all is saved, and leave a process behind that keeps it so
    #[arg(long, conflicts_with_all = ["hold", "hand_over"])]
    detach: bool,

    /// Send what keeps the machines saved to the unix socket at this path, and return: the session's
    /// descriptor first, then a connection to each machine, in one message or several. To undo it, close
    /// them in this order
    #[arg(long, value_name = "SOCKET", conflicts_with = "hold")]
    hand_over: Option<PathBuf>,

    /// Save even if machines of an earlier save have not been restored yet: a kexec loses them
    #[arg(long)]
    lose_kept: bool,

    /// Write as JSON how long each step took
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Be the process that --detach leaves behind, which tells on a descriptor that all is saved
    #[arg(long, value_name = "N", hide = true)]
    child: Option<RawFd>,
}

const EXAMPLES: &str = "\
Examples:
  vellum live-update save web db --kernel /boot/vmlinuz-7.3
  vellum live-update save --all --detach
  vellum live-update save --all --check            could it?
Load the next kernel first, by kexec_file_load. The machines stand still from here
to the kexec. If this process ends before, they run on, and nothing is saved.";

/// How long a machine may take until it is saved. Its memory is preserved by then.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);

/// How often signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// Runs `vellum live-update save`.
pub fn run(args: &SaveArgs) -> Result<Exit, Failure> {
    if args.if_any && running()?.is_empty() {
        return Ok(Exit::PowerOff);
    }
    if args.detach {
        return detach();
    }
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let Checked { orchestrator, machines, receiver, times } = check(args)?;
    if args.check {
        let names: Vec<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
        print(format_args!("nothing was done; these can be saved: {}\n", names.join(", ")))?;
        return Ok(Exit::PowerOff);
    }
    let created = orchestrator.create(&live_update::session(&args.session));
    let session = created.map_err(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => Failure::usage(format!(
            "--session {}: a session of this name is there already: end the process that holds it, or choose another name",
            args.session
        )),
        _ => Failure::host(format!("--session {}: {error}", args.session)),
    })?;
    drop(orchestrator);
    let held = Held { session, machines, memory: Vec::new(), record: record()? };
    held.save(args, receiver, times)
}

/// What a save begins with.
struct Checked {
    orchestrator: Orchestrator,
    machines: Vec<Machine>,
    /// The process that `--hand-over` is for.
    receiver: Option<UnixStream>,
    /// The file of `--json`.
    times: Option<File>,
}

/// Checks everything. Nothing is done to a machine.
///
/// # Errors
/// All that is wrong, in one line.
fn check(args: &SaveArgs) -> Result<Checked, Failure> {
    let mut wrong = Wrong(None);
    let orchestrator = wrong.note(orchestrator());
    if let Some(kernel) = &args.kernel {
        let named = |failed: Failure| failed.under(&format!("--kernel {}: ", kernel.display()));
        wrong.note(check_kernel(kernel).map_err(named));
    }
    if !args.not_loaded {
        wrong.note(check_loaded());
    }
    if !args.lose_kept {
        wrong.note(check_kept());
    }
    let mut machines = Vec::new();
    for (name, path) in wrong.note(targets(args)).unwrap_or_default() {
        let checked = Machine::check(&name, &path).map_err(|failed| failed.under(&format!("{name}: ")));
        machines.extend(wrong.note(checked));
    }
    let receiver = args.hand_over.as_deref().and_then(|path| {
        let named = |error| Failure::usage(format!("--hand-over {}: {error}", path.display()));
        wrong.note(UnixStream::connect(path).map_err(named))
    });
    let times = args.json.as_deref().and_then(|path| {
        let named = |error| Failure::usage(format!("--json {}: {error}", path.display()));
        wrong.note(File::options().write(true).create(true).truncate(false).open(path).map_err(named))
    });
    match (wrong.0, orchestrator) {
        (None, Some(orchestrator)) => Ok(Checked { orchestrator, machines, receiver, times }),
        (Some(wrong), _) => Err(wrong),
        (None, None) => unreachable!("it is wrong that it is not there"),
    }
}

/// Runs this command again in a process that outlives this one. Waits until all is saved.
fn detach() -> Result<Exit, Failure> {
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    // Pipes: whoever waits for the end of this process's output must not wait for the kexec.
    let mut command = this_program(words, [Stdio::piped(), Stdio::piped()])?;
    // The kill at the end of a shutdown by systemd spares processes of root with such a name.
    command.arg0("@vellum");
    let mut holder = Starting::spawn("the holder", command, |waits, _| (waits, Vec::new()), None)?;
    holder.ready()?;
    let mut told = vec![0; 64 << 10];
    let said = holder.child.stdout.take().map_or(Ok(0), |mut out| out.read(&mut told));
    print(String::from_utf8_lossy(&told[..said.map_err(Failure::host)?]))?;
    Ok(Exit::PowerOff)
}

/// The machines, by their names and sockets.
fn targets(args: &SaveArgs) -> Result<Vec<(String, PathBuf)>, Failure> {
    if !args.all {
        let find = |name: &String| Ok((name.clone(), names::find(name).map_err(failure)?));
        return args.machines.iter().map(find).collect();
    }
    let running = running()?;
    match running.is_empty() {
        true => Err(Failure::usage("--all: no machine of this user runs")),
        false => Ok(running),
    }
}

/// The machines of this user that run.
fn running() -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut running = names::all().map_err(failure)?;
    running.retain(|(_, path)| UnixStream::connect(path).is_ok());
    Ok(running)
}

/// The file for the record.
fn record() -> Result<File, Failure> {
    memfd(c"vellum-live-update", 0, None).map_err(Failure::host)
}

/// A machine that is being saved.
struct Machine {
    name: String,
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
        let (list, descriptors) = borrow(&mut client)?;
        let name = match &list.control {
            Some(control) => {
                control.path.file_stem().map_or(name.into(), |stem| stem.to_string_lossy().into_owned())
            }
            None => name.to_owned(),
        };
        check_disks(&list, &descriptors)?;
        let line = std::fs::read(format!("/proc/{}/cmdline", status.pid)).unwrap_or_default();
        let host = host_side(list, &descriptors, status.pid);
        Ok(Self { name, client, status, line: started_as(&line), host, id: 0 })
    }

    /// Begins the operation. Returns the machine's memory, which gives back no page from now on, its
    /// position, and the files for its state.
    fn begin(&mut self) -> Result<(File, u64, Files), Failure> {
        self.try_to_begin().map_err(|failed| failed.under(&format!("{}: ", self.name)))
    }

    fn try_to_begin(&mut self) -> Result<(File, u64, Files), Failure> {
        let file = |name| memfd(name, 0, None).map_err(Failure::host);
        let [ram, map, state] = [
            file(c"vellum-live-update-pages")?,
            file(c"vellum-live-update-map")?,
            file(c"vellum-live-update-state")?,
        ];
        let descriptors: [BorrowedFd<'_>; 3] = [&ram, &map, &state].map(AsFd::as_fd);
        self.client.ask_with(&Do::LiveUpdate {}, &descriptors).map_err(failure)?;
        self.id = self.client.last_id();
        let (_, memory) = self.client.ask_for(&Do::LiveUpdateMemory {}).map_err(failure)?;
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

/// What is saved, or being saved. The session is closed before the connections.
struct Held {
    session: Session,
    machines: Vec<Machine>,
    /// The memory of each, once it is preserved.
    memory: Vec<File>,
    record: File,
}

impl Held {
    /// Saves the machines, and holds them.
    fn save(
        mut self,
        args: &SaveArgs,
        receiver: Option<UnixStream>,
        times: Option<File>,
    ) -> Result<Exit, Failure> {
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
        for (machine, (memory, position, own)) in self.machines.iter_mut().zip(begun) {
            self.memory.push(memory);
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
        if let Some(mut file) = times {
            let memory: Vec<u64> = self.machines.iter().map(|machine| machine.status.memory).collect();
            let steps = json!({
                "memory": memory, "preserve_us": preserve_us, "pause_us": pause_us,
                "record_us": start.elapsed().as_micros() as u64
            });
            let written = file.set_len(0).and_then(|()| file.write_all(steps.to_string().as_bytes()));
            written.map_err(|error| Failure::host(format!("--json: {error}")))?;
        }
        let names = self.machines.iter().map(|machine| machine.name.clone()).collect();
        let holder = receiver
            .as_ref()
            .map_or(Ok(std::process::id()), |at| socket::peer_pid(at).map(i32::cast_unsigned));
        let written = holder.map_err(Failure::host).and_then(|pid| Note::write(&args.session, pid, names));
        if let Err(failed) = written {
            say(&format!("if the next kernel loses the machines, no restore will tell: {}", failed.message));
        }
        let (session, own) = (&args.session, std::process::id());
        told += &match &args.hand_over {
            Some(path) => format!("session {session}: it goes to {}\n", path.display()),
            None => format!("session {session}: kexec now, or end process {own}, and they run on\n"),
        };
        print(told)?;
        if let Some(receiver) = receiver {
            return self.hand_over(&receiver);
        }
        if let Some(list) = args.child {
            let waits: RawFd = inherited(list)?;
            let waits = taken(waits)
                .ok_or_else(|| Failure::usage(format!("--child {list}: no such descriptor is open")))?;
            UnixStream::from(waits).write_all(&[1]).map_err(Failure::host)?;
        }
        self.hold(args)
    }

    /// Holds what is saved until the kexec.
    fn hold(mut self, args: &SaveArgs) -> Result<Exit, Failure> {
        // In turns, because each connection is looked at by its own reader.
        let mut ended = vec![false; self.machines.len()];
        loop {
            if signal::take().is_some() {
                return Err(self.give_up(&ended, args, "it was cancelled"));
            }
            let mut poll = Poll::default();
            for (machine, _) in self.machines.iter().zip(&ended).filter(|(_, ended)| !**ended) {
                poll.readable(machine.client.connection());
            }
            if !poll.wait(Some(LOOK)).map_err(Failure::host)? {
                continue;
            }
            let mut gone = None;
            for (machine, ended) in self.machines.iter_mut().zip(&mut ended).filter(|(_, ended)| !**ended) {
                match heard(&mut machine.client, Some(machine.id), "the kexec") {
                    Ok(Some(line)) => {
                        if let Ok(Event::NotPreserved { why }) = serde_json::from_value(line) {
                            gone = Some(format!("{}: {why}", machine.name));
                        }
                    }
                    Ok(None) => {}
                    Err(_) => {
                        say(&format!("the process of {} has ended; it stays saved", machine.name));
                        *ended = true;
                    }
                }
            }
            if let Some(why) = gone {
                return Err(self.give_up(&ended, args, &why));
            }
        }
    }

    /// Gives up what is preserved. Machines run on, and a keeper gets those whose processes have
    /// `ended`. Returns what to tell.
    fn give_up(self, ended: &[bool], args: &SaveArgs, why: &str) -> Failure {
        let Self { session, machines, memory, record } = self;
        drop(session);
        Note::remove(&args.session);
        let names = |is: bool| {
            let named = machines.iter().zip(ended).filter(move |(_, ended)| **ended == is);
            named.map(|(machine, _)| machine.name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let (running, ended_names) = (names(false), names(true));
        drop(machines);
        let mut told = format!("nothing is saved any more: {why}");
        if !running.is_empty() {
            told += &format!("; running on: {running}");
        }
        if !ended_names.is_empty() {
            let memory = memory.iter().zip(ended).map(|(file, ended)| ended.then(|| file.as_raw_fd()));
            let saved = InKernel { record: record.as_raw_fd(), memory: memory.collect() };
            let restore = restore_of(&args.session);
            told += &match start_keeper(&args.session, Some(saved)) {
                Ok(()) => format!("; kept, as their processes have ended: {ended_names}: {restore}"),
                Err(failed) => {
                    format!("; lost, as their processes have ended: {ended_names}: {}", failed.message)
                }
            };
        }
        Failure::host(told)
    }

    /// Sends what holds it to the process at the other end.
    fn hand_over(self, receiver: &UnixStream) -> Result<Exit, Failure> {
        let connections = self.machines.iter().map(|machine| machine.client.connection().as_fd());
        let descriptors: Vec<BorrowedFd<'_>> =
            [self.session.as_fd()].into_iter().chain(connections).collect();
        send_all(receiver, &descriptors).map_err(|error| Failure::host(format!("--hand-over: {error}")))?;
        Ok(Exit::PowerOff)
    }
}

/// Sends descriptors in order, as many in each message as it takes.
fn send_all(receiver: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut messages = descriptors.chunks(socket::MAX_DESCRIPTORS);
    messages.try_for_each(|part| socket::send(receiver, b"vellum live-update\n", part))
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

/// Fails if the host lacks memory for the pages that the kernel allocates: those of the holes in the
/// machines' memory, and those that are swapped.
fn check_room(machines: &[Machine], begun: &[(File, u64, Files)]) -> Result<(), Failure> {
    let (mut holes, mut swapped, mut all) = (0, 0, 0);
    for (machine, (memory, ..)) in machines.iter().zip(begun) {
        // Pages that are swapped count as present.
        let present = memory.metadata().map_err(Failure::host)?.blocks() * 512;
        holes += machine.status.memory.saturating_sub(present);
        swapped += Resident::of(machine.status.pid.into()).map_or(0, |resident| resident.swapped);
        all += machine.status.memory;
    }
    lacks_room(topology::preservable(), [holes, swapped, all]).map_or(Ok(()), |why| Err(Failure::host(why)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn any_number_of_descriptors_is_handed_over_in_order() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let files: Vec<File> = (0..41).map(|at| memfd(c"test", at, None).unwrap()).collect();
        let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        send_all(&ours, &descriptors).unwrap();
        drop(ours);
        let (mut came, mut buffer) = (Vec::<OwnedFd>::new(), [0; 64]);
        while socket::receive(&theirs, &mut buffer, &mut came).unwrap() > 0 {}
        let lengths = came.into_iter().map(|fd| File::from(fd).metadata().unwrap().len());
        assert_eq!(lengths.collect::<Vec<_>>(), (0..41).collect::<Vec<_>>());
    }
}
