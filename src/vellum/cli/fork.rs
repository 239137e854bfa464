//! `vellum fork`, the client of a fork. The machine freezes its memory as the base, and writes its
//! state and the pages that differ from the base to memfds of the client. Then the client starts a
//! process for each new machine, which restores it from these files as `vellum restore` does from a
//! snapshot. If the client is killed, nothing is left: a new machine whose client has ended ends
//! too.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::client::{failure, heard, listen, may_fork, other_user, status};
use super::devices;
use super::failure::Failure;
use super::flags::Flags;
use super::host::{self, HostArgs};
use super::output::print;
use super::starting::{Log, Starting, inherited, this_program};
use crate::session::incoming::{Fork, Listen};
use crate::session::log::{self, Beside};
use vellum_control::client::{Client, Error};
use vellum_control::{ChildDevice, Do, Event, MachineState, Status, names};
use vellum_devices::virtio::{fs, net};
use vellum_disk::overlay;
use vellum_host::density::{self, Resource, Shape};
use vellum_host::{hugepages, topology};
use vellum_kvm::memory::{Backing, MemoryConfig, short_size};
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_migration::link::LIVENESS;
use vellum_migration::loading::{self, Forked};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sandbox::Mode;
use vellum_sandbox::user::User;
use vellum_sys::diagnose::Field;
use vellum_sys::file::taken;
use vellum_sys::mmap::{PAGE_SIZE, empty_memfd, freezable_memfd, freeze, memfd};
use vellum_sys::poll::Poll;
use vellum_sys::{keyvalue, signal};

/// Make further machines of a running one: they share its memory until they write to it
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
#[command(mut_arg("json", |json| json.num_args(0..=1).default_missing_value("-").help(JSON)))]
pub struct ForkArgs {
    /// The machine: its name (--name), or the path of its control socket. The backing of its memory
    /// is memfd, shared-hugetlb-2m, anonymous or thp; the first fork copies the latter two
    #[arg(value_name = "MACHINE")]
    machine: String,

    /// Make N machines; in every argument, `%d` is replaced with the number of the machine, from 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_COUNT), requires = "name")]
    count: Option<u32>,

    /// Let the machines wait for `vellum resume NAME`
    #[arg(long)]
    paused: bool,

    /// Accept disks that differ from those of the machine; the guest does not expect what it finds
    /// on them
    #[arg(long)]
    disk_changed: bool,

    /// Be one of the machines, from the file of this descriptor
    #[arg(long, value_name = "N", hide = true, requires = "name")]
    child: Option<RawFd>,

    #[command(flatten)]
    host: HostArgs,
}

const EXAMPLES: &str = "\
Examples:
  vellum fork web --name web2                        a second machine
  vellum fork web --count 100 --name w%d             w0 to w99
  vellum fork web --count 100 --name w%d --json      the same, told as lines of JSON
  vellum fork web --name web2 --serial file=web2.log
  vellum fork web --name web2 --disk copy.img --net user
The guest stands still while its state is saved. New machines have no terminal.
Name the host's side of their devices, as for vellum restore. A disk that can be
written to belongs to one machine: give the others a copy.";

/// The help of `--json`.
const JSON: &str = "Write the result of each built-in guest to FILE when it ends; without FILE, or as `-`, print \
    this command's own result: a line of JSON for the fork, and one for each machine";

/// The most machines of one call.
const MAX_COUNT: i64 = 10_000;

/// How many machines start at the same time. More would share the same CPUs.
const AT_ONCE: usize = 8;

/// How often a machine is asked again that refuses a fork, and has no operation under way.
const MAX_UNEXPLAINED: u32 = 16;

/// The flag of each field.
pub(super) const FLAGS: Flags = &[host::FLAGS, &[(Field::DiskChanged, "--disk-changed accepts it:")]];

/// The contents of the file behind the hidden argument.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Inherited {
    point: Point,
    /// Pages, map, state and base.
    files: [RawFd; 4],
    /// The copies of overlays, by the names of their disks.
    overlays: Vec<(String, RawFd)>,
    /// The socket to the client, which waits for the machine to run.
    waits: RawFd,
    /// The process of the machine that it is forked from.
    from: u32,
    /// The file that standard error goes to, if that is the machine's alone.
    log: Option<PathBuf>,
    /// Devices that the command line does not name.
    devices: Vec<ChildDevice>,
    /// The time after which the machine ends.
    limit: Option<Duration>,
    /// The user of the machine that it is forked from, if root forks it.
    user: Option<User>,
    /// Whether its memory is to have transparent huge pages.
    transparent: bool,
    /// See [`host::Fork::pinned_before`].
    pinned_before: usize,
}

/// Runs the command: as the client, or as one of the new machines.
pub fn run(args: ForkArgs) -> Result<Exit, Failure> {
    match args.child {
        Some(list) => be(args, list),
        None => fork(&args),
    }
}

/// Runs one of the new machines.
fn be(args: ForkArgs, list: RawFd) -> Result<Exit, Failure> {
    log::start(tracing::Level::INFO, Beside::Console);
    let wrong = |what: &dyn std::fmt::Display| Failure::usage(format!("what it is forked from: {what}"));
    let own = |fd: RawFd| taken(fd).ok_or_else(|| wrong(&format_args!("descriptor {fd} is not open")));
    let Inherited {
        point,
        files,
        overlays,
        waits,
        from,
        log,
        devices,
        limit,
        user,
        transparent,
        pinned_before,
    } = inherited(list)?;
    let [ram, map, state, base] = files;
    let [ram, map, state, base] = [own(ram)?, own(map)?, own(state)?, own(base)?].map(File::from);
    let files = Files { ram, map, state, clones: Vec::new() };
    let own_end = Some(Arc::new(own(waits)?));
    let forked = Box::new(Forked { point, files, base });
    let listen = Listen::Fork(Fork { forked, paused: args.paused, disk_changed: args.disk_changed });
    // Otherwise the base determines the backing of the memory.
    let backing = if transparent { Backing::Thp } else { Backing::Anonymous };
    let memory = MemoryConfig { backing, ..MemoryConfig::new(0) };
    let overlays = overlays.into_iter().map(|(name, fd)| Ok((name, own(fd)?.into())));
    let overlays = overlays.collect::<Result<Vec<(String, File)>, Failure>>()?;
    let from = Some(from);
    let fork = host::Fork { waits: own_end, from, log, limit, user, pinned_before, ..host::Fork::default() };
    let host = args.host.forked(fork).with_devices(devices, &overlays).map_err(Failure::usage)?;
    drop(overlays);
    host.run(listen, memory, LIVENESS, FLAGS)
}

fn fork(args: &ForkArgs) -> Result<Exit, Failure> {
    let path = names::find(&args.machine).map_err(failure)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let mut machine = listen(&path)?;
    let has = status(&mut machine)?;
    may_fork(&has)?;
    let names = names_of(args)?;
    check_backing(&args.machine, &has)?;
    check_room(names.len() as u64, &has)?;
    check_devices(&args.machine, &has.devices, &args.host.device_names())?;
    let own = args.host.overlays();
    if let Some(lacks) = has.overlays.iter().find(|name| !own.contains(name)) {
        return Err(Failure::usage(devices::lacks_overlay(lacks)));
    }
    let (source, us) = Source::of(&args.machine, machine, &has, false)?;
    check_copies(names.len() as u64, &source, &has)?;
    // A machine that is forked while it is paused is paused in the fork too.
    let stands = args.paused || has.state == MachineState::Paused;
    let is_json = args.host.is_json_printed();
    if is_json {
        let base = File::from(source.base.try_clone().map_err(Failure::host)?);
        // Blocks have 512 bytes (stat(2)).
        let shared_bytes = base.metadata().map_err(Failure::host)?.blocks() * 512;
        let machine = args.machine.clone();
        let copied_bytes = source.copied_bytes(&has)?;
        line(&Line::Fork { machine, pause_us: us, base: source.number, shared_bytes, copied_bytes })?;
    }
    let mut running = 0;
    for (at, batch) in names.chunks(AT_ONCE).enumerate() {
        let first = at * AT_ONCE;
        let start = |(number, name): (usize, &String)| {
            let words = std::env::args_os().skip(1).map(|word| match args.count {
                Some(_) => numbered(word, number),
                None => word,
            });
            let log = Log::new(name)?;
            let outputs = [Stdio::null(), log.output()?];
            let new = NewMachine { name, number, devices: Vec::new(), limit: None };
            source.start(new, words, outputs, Some(log))
        };
        let started = (first..).zip(batch).map(start);
        let started: Result<Vec<_>, _> = started.collect();
        let mut started = started.map_err(|failed| some_run(failed, running, names.len()))?;
        for at in 0..started.len() {
            if let Err(failed) = started[at].runs() {
                started.iter_mut().skip(at).for_each(Starting::give_up);
                return Err(some_run(failed, running, names.len()));
            }
            running += 1;
            let (name, pid) = (&started[at].name, started[at].child.id());
            if is_json {
                let state = if stands { MachineState::Paused } else { MachineState::Running };
                line(&Line::Machine { name: name.clone(), pid, state })?;
            } else {
                let stands = if stands { "is paused" } else { "runs" };
                print(format_args!("{name} {stands}, process {pid}\n"))?;
            }
            // The machine ends if this process ends before it has reported the machine.
            (&started[at].waits).write_all(&[1]).map_err(Failure::host)?;
        }
    }
    if is_json {
        return Ok(Exit::PowerOff);
    }
    print(format_args!(
        "{} stood still for {:.1} ms; {} pages differ from what they share\n",
        args.machine,
        us as f64 / 1000.0,
        source.differ()
    ))?;
    Ok(Exit::PowerOff)
}

/// A line of the output with `--json`. The first is the fork's.
#[derive(Debug, Serialize)]
#[serde(tag = "line", rename_all = "lowercase")]
enum Line {
    Fork {
        /// As it was named.
        machine: String,
        /// How long it stood still, in microseconds.
        pause_us: u64,
        /// The number of the base that the new machines share, from 0.
        base: u64,
        /// The size of the base.
        shared_bytes: u64,
        /// What each new machine has copied, because it differs from the base and is not mapped.
        copied_bytes: u64,
    },
    Machine {
        name: String,
        pid: u32,
        state: MachineState,
    },
}

fn line(line: &Line) -> Result<(), Failure> {
    print(format_args!("{}\n", serde_json::to_string(line).map_err(Failure::host)?)).map(drop)
}

/// Adds to the error that some machines run.
fn some_run(failed: Failure, running: usize, of: usize) -> Failure {
    match running {
        0 => failed,
        running => Failure { message: format!("{}; {running} of {of} run", failed.message), ..failed },
    }
}

/// The names of the new machines. No running machine has one of them.
fn names_of(args: &ForkArgs) -> Result<Vec<String>, Failure> {
    let Some(name) = &args.host.name else {
        return Err(Failure::usage("--name NEW: a new machine needs a name, by which it is found"));
    };
    let mut exclusive = args.host.exclusive();
    exclusive.insert(0, ("--name".into(), name.clone()));
    let is_same = |(_, what): &&(String, String)| !what.contains("%d");
    if let Some((flag, what)) = exclusive.iter().find(is_same).filter(|_| args.count.is_some_and(|n| n > 1)) {
        return Err(Failure::usage(format!(
            "{flag} {what}: with --count it has a %d, for the number of each"
        )));
    }
    if args.host.lacks_address() {
        return Err(Failure::usage(
            "--net tap=: on a bridge the new machine would take the packets of the first one; name an address with mac=ADDRESS",
        ));
    }
    let numbered = |number: u32| match args.count {
        Some(_) => name.replace("%d", &number.to_string()),
        None => name.clone(),
    };
    let names: Vec<String> = (0..args.count.unwrap_or(1)).map(numbered).collect();
    for name in &names {
        let socket = names::own_socket(name).map_err(|error| Failure::of(&error, FLAGS))?;
        if UnixStream::connect(&socket).is_ok() {
            return Err(Failure::usage(format!("--name {name}: a machine of this name runs already")));
        }
    }
    Ok(names)
}

/// Fails if the memory of the machine cannot be a base.
fn check_backing(name: &str, status: &Status) -> Result<(), Failure> {
    if status.state.is_arriving() {
        return Err(Failure::usage(format!("{name} has not come yet ({})", status.state)));
    }
    let backing = status.backing.as_deref().unwrap_or("unknown");
    let instead = match backing {
        "memfd" | "anonymous" | "thp" => return Ok(()),
        shared if shared.starts_with("shared-") => return Ok(()),
        huge if huge.starts_with("hugetlb-") => format!("shared-{huge}"),
        _ => "memfd".into(),
    };
    Err(Failure::usage(format!(
        "the memory of {name} is {backing}, which others cannot share; start it with --memory SIZE,backing={instead}"
    )))
}

/// Fails if a machine with the devices `given` cannot become one with the devices `has`.
fn check_devices(name: &str, has: &[String], given: &[String]) -> Result<(), Failure> {
    let flag = |device: &str| devices::flag(device.trim_end_matches(|c: char| c.is_ascii_digit()));
    if let Some(missing) = has.iter().find(|device| !given.contains(device)) {
        let flag = flag(missing);
        return Err(Failure::usage(format!("{flag} {name} has {missing}: give the new machine one too")));
    }
    if let Some(other) = given.iter().find(|device| !has.contains(device)) {
        return Err(Failure::usage(format!("{} {name} has no {other}: leave it out", flag(other))));
    }
    Ok(())
}

/// Fails if this host lacks resources for `count` more machines like the one with this `status`.
fn check_room(count: u64, status: &Status) -> Result<(), Failure> {
    let lacks = |what: String| Err(Failure::host(what));
    let huge = status.backing.as_deref().and_then(|backing| backing.strip_prefix("shared-hugetlb-"));
    if let Some(page) = huge.and_then(|size| keyvalue::size(size, 1).ok()).filter(|page| *page > 0) {
        // Every huge page that a machine may write to must be reserved. The first fork also
        // reserves the machine's own pages again.
        let machines = count + u64::from(!status.forked);
        let (needs, free) = (machines * (status.memory / page), hugepages::free(page));
        if needs > free {
            let page = short_size(page);
            return lacks(format!("{count} machines take {needs} huge pages of {page}, and {free} are free"));
        }
        // Its own pages are charged to its own group. Beyond a limit there, a write is a SIGBUS.
        let (own, free) = (status.memory / page, hugepages::free_of(status.pid, page));
        if !status.forked && own > free {
            let page = short_size(page);
            return lacks(format!(
                "its own memory takes {own} huge pages of {page} again, and it may have {free}"
            ));
        }
    }
    let served = [fs::KIND.key, fs::ROOT.key, net::KIND.key];
    let is_served = |name: &&String| served.iter().any(|key| name.starts_with(key));
    let servers = status.devices.iter().filter(is_served).count() as u64;
    let shape = Shape { vcpus: status.vcpus as u64, servers, memory: status.memory };
    match density::resources(shape).iter().find(|resource| resource.machines() < count) {
        Some(Resource { name, limit, left, each }) => lacks(format!(
            "{count} machines take about {} {name} beside their guests' pages, and {left} are left ({limit})",
            count * each
        )),
        None => Ok(()),
    }
}

/// Fails if this host lacks memory for the pages that each of `count` machines like the one with this
/// `status` copies.
fn check_copies(count: u64, source: &Source, status: &Status) -> Result<(), Failure> {
    let available = topology::memory().available;
    let is_enough = |each: u64| available == 0 || each.saturating_mul(count) <= available;
    // Huge pages of the pool are reserved already.
    if is_of_pool(status) || is_enough(source.differ().saturating_mul(PAGE_SIZE)) {
        return Ok(());
    }
    let each = source.copied_bytes(status)?;
    if is_enough(each) {
        return Ok(());
    }
    let [each, all, available] = [each, each.saturating_mul(count), available].map(|bytes| bytes >> 20);
    Err(Failure::host(format!(
        "{count} machines copy {each} MiB each, which differ from what they share: {all} MiB, and {available} MiB are available"
    )))
}

/// Whether its memory is huge pages of the pool.
fn is_of_pool(status: &Status) -> bool {
    status.backing.as_deref().is_some_and(|backing| backing.starts_with("shared-"))
}

/// Waits until the machine is forked. Returns the contents of the files, the downtime in
/// microseconds, and the number of its base.
fn forked(name: &str, machine: &mut Client) -> Result<(Point, u64, u64), Failure> {
    let of = machine.last_id();
    loop {
        if signal::take().is_some() {
            // The machine cancels the fork when this process ends.
            return Err(Failure::host(format!("{name} was not forked: it was cancelled")));
        }
        let Some(line) = heard(machine, Some(of), "it was forked")? else { continue };
        match serde_json::from_value::<Event>(line) {
            Ok(Event::Forked { us, base, written, .. }) => {
                return Ok((Point::of(0, false, written), us, base));
            }
            Ok(Event::NotForked { why }) => {
                return Err(Failure::host(format!("{name} was not forked: {why}")));
            }
            _ => {}
        }
    }
}

/// The source of the new machines.
struct Source {
    point: Point,
    files: [File; 3],
    /// The copies of overlays, by the names of their disks.
    overlays: Vec<(String, File)>,
    base: OwnedFd,
    /// The number of the base.
    number: u64,
    /// Its machine's process.
    from: u32,
    /// The user of that process, if this one is root.
    user: Option<User>,
    /// Whether its memory has transparent huge pages.
    transparent: bool,
    vcpus: usize,
}

/// One of the new machines, besides what its command line says.
struct NewMachine<'a> {
    name: &'a str,
    /// From 0.
    number: usize,
    /// Devices that the command line does not name.
    devices: Vec<ChildDevice>,
    /// The time after which it ends.
    limit: Option<Duration>,
}

/// Waits until an operation of `machine` is over that another client asked for. Returns whether
/// there was one.
fn another_ends(machine: &mut Client) -> Result<bool, Failure> {
    let mut was_one = false;
    while status(machine)?.operation.is_some() {
        was_one = true;
        // Its end is an event.
        heard(machine, None, "it was forked")?;
    }
    Ok(was_one)
}

/// Forks `zygote`, which waits for commands, for one of them. The new machine has its vsock at
/// `vsock`. It ends when the returned value is dropped, or this process ends, or after `limit`. Also
/// returns its console's output.
pub(super) fn for_command(
    zygote: &str,
    vsock: &Path,
    sandbox: Mode,
    limit: Option<Duration>,
) -> Result<(ForCommand, File), Failure> {
    let path = names::find(zygote).map_err(failure)?;
    let mut machine = listen(&path)?;
    if let Some(User { uid, .. }) = other_user(&machine)? {
        // Its process names the files and directories that the fork opens, and root can open all.
        return Err(Failure::usage(format!(
            "--from {zygote}: it runs as user {uid}, and root opens nothing on that user's word: run vellum as that user"
        )));
    }
    let has = status(&mut machine)?;
    let Some(devices) = has.children.clone() else {
        return Err(Failure::usage(format!(
            "--from {zygote}: this machine does not wait for commands; start one by vellum run --zygote NAME"
        )));
    };
    may_fork(&has)?;
    check_room(1, &has)?;
    let (source, _) = Source::of(zygote, machine, &has, true)?;
    check_copies(1, &source, &has)?;
    let name = format!("from-{}", std::process::id());
    let mut words: Vec<OsString> = vec!["fork".into(), path.into(), "--name".into(), (&name).into()];
    words.extend(["--vsock".into(), vsock.into(), "--sandbox".into(), sandbox.to_string().into()]);
    words.extend(has.dirty_ring.map(|rings| format!("--dirty-ring={}", rings.entries).into()));
    words.extend(has.cr3_cache.is_some().then(|| "--cr3-cache=auto".into()));
    let new = NewMachine { name: &name, number: 0, devices, limit };
    let started = source.start(new, words, [Stdio::piped(), Stdio::inherit()], None)?;
    let mut started = ForCommand(started);
    // If it does not run, its process has said why, and the console ends.
    let _ = started.0.runs();
    let console = started.0.child.stdout.take().expect("it is a pipe");
    Ok((started, File::from(OwnedFd::from(console))))
}

/// A machine that was forked for a command. It is never told that somebody knows of it, so that it
/// ends with this process.
pub(super) struct ForCommand(Starting);

impl ForCommand {
    /// Waits for its end. Returns its exit status, or 128 plus the signal that ended it.
    pub fn wait(&mut self) -> Result<u8, Failure> {
        self.0.child.wait().map(status_of).map_err(Failure::host)
    }

    /// The same if it ends within this time.
    pub fn ends_within(&mut self, time: Duration) -> Result<Option<u8>, Failure> {
        // Its process has the other end. It sends nothing after it has run.
        let until = Instant::now() + time;
        let mut bytes = [0; 8];
        loop {
            if let Some(ended) = self.0.child.try_wait().map_err(Failure::host)? {
                return Ok(Some(status_of(ended)));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut poll = Poll::default();
            poll.readable(&self.0.waits);
            if poll.wait(Some(left)).map_err(Failure::host)?
                && !matches!((&self.0.waits).read(&mut bytes), Ok(1..))
            {
                return self.wait().map(Some);
            }
        }
    }
}

/// The exit status, or 128 plus the signal that ended it.
fn status_of(ended: ExitStatus) -> u8 {
    ended.code().unwrap_or_else(|| ended.signal().map_or(0, |signal| 128 + signal)) as u8
}

impl Source {
    /// The number of pages that differ from the base.
    fn differ(&self) -> u64 {
        // Another process says it.
        self.point.present.saturating_add(self.point.zero)
    }

    /// The bytes that each new machine of the machine with this `status` copies.
    fn copied_bytes(&self, status: &Status) -> Result<u64, Failure> {
        let [pages, map, _] = &self.files;
        let copied = match is_of_pool(status) {
            true => self.differ(),
            false => loading::copied(&self.point, [pages, map], status.memory / PAGE_SIZE)
                .map_err(|error| Failure::host(format!("what it is forked from: {error}")))?,
        };
        Ok(copied.saturating_mul(PAGE_SIZE))
    }

    /// Has the machine `name`, of this status, forked. Also returns how long it stood still, in
    /// microseconds. If it `waits`, it lets operations of others end first.
    fn of(name: &str, mut machine: Client, has: &Status, waits: bool) -> Result<(Self, u64), Failure> {
        let file = |name| memfd(name, 0, None).map_err(Failure::host);
        let user = other_user(&machine)?;
        loop {
            // The new machines map parts of it.
            let pages = empty_memfd(c"vellum-fork-pages").map_err(Failure::host)?;
            let files = [pages, file(c"vellum-fork-map")?, file(c"vellum-fork-state")?];
            // Where memory is huge pages of the pool it is not used.
            let next = freezable_memfd(c"vellum-guest", has.memory, None).map_err(Failure::host)?;
            let copy = |name: &String| Ok((name.clone(), overlay::unnamed().map_err(Failure::host)?));
            let overlays = has.overlays.iter().map(copy).collect::<Result<Vec<_>, Failure>>()?;
            let copies = overlays.iter().map(|(_, file)| file);
            let descriptors = files.iter().chain([&next]).chain(copies).map(AsFd::as_fd).collect::<Vec<_>>();
            let mut unexplained = 0;
            let available = Some(topology::memory_of(has.pid).available).filter(|bytes| *bytes > 0);
            let fork = Do::Fork { overlays: overlays.len() as u32, available };
            while let Err(error) = machine.ask_with(&fork, &descriptors) {
                let is_refusal = matches!(error, Error::Refused(_));
                if !waits || !is_refusal || unexplained == MAX_UNEXPLAINED {
                    return Err(failure(error));
                }
                // The operation that it was refused for may be over already.
                unexplained += u32::from(!another_ends(&mut machine)?);
            }
            drop(next);
            let (point, us, of) = forked(name, &mut machine)?;
            freeze(&files[0]).map_err(Failure::host)?;
            // On the same connection: by the path, another process may answer by now.
            let (answer, base) = match machine.ask_for(&Do::ForkBase {}) {
                // Another client's fork has memory show a new base just now. It must be over first.
                Err(Error::Refused(_)) => {
                    another_ends(&mut machine)?;
                    continue;
                }
                answer => answer.map_err(failure)?,
            };
            // Another client may have forked it since, on a new base.
            if answer["base"] == of {
                let base = base.into_iter().next().ok_or_else(|| Failure::host("no base came"))?;
                let transparent = has.backing.as_deref() == Some("thp");
                let (from, vcpus) = (has.pid, has.vcpus);
                let source =
                    Self { point, files, overlays, base, number: of, from, user, transparent, vcpus };
                return Ok((source, us));
            }
        }
    }

    /// Starts the process of a machine by the words of a command line. Its standard output and error
    /// go to `outputs`, the latter to `log`, if that is the machine's alone.
    fn start(
        &self,
        new: NewMachine<'_>,
        words: impl IntoIterator<Item = OsString>,
        outputs: [Stdio; 2],
        log: Option<Log>,
    ) -> Result<Starting, Failure> {
        let NewMachine { name, number, devices, limit } = new;
        let [ram, map, state] = self.files.each_ref().map(AsRawFd::as_raw_fd);
        let files = [ram, map, state, self.base.as_raw_fd()];
        let overlays = self.overlays.iter().map(|(name, file)| (name.clone(), file.as_raw_fd()));
        let overlays: Vec<_> = overlays.collect();
        let descriptors = files.into_iter().chain(overlays.iter().map(|(_, fd)| *fd)).collect();
        let inherit = |waits, log| {
            let inherited = Inherited {
                point: self.point.clone(),
                files,
                overlays,
                waits,
                from: self.from,
                log,
                devices,
                limit,
                user: self.user,
                transparent: self.transparent,
                pinned_before: number * self.vcpus,
            };
            (inherited, descriptors)
        };
        Starting::spawn(name, this_program(words, outputs)?, inherit, log)
    }
}

/// An argument for machine `number`.
fn numbered(word: OsString, number: usize) -> OsString {
    match word.to_str() {
        Some(text) => text.replace("%d", &number.to_string()).into(),
        None => word,
    }
}
