//! Runs a machine that comes from another process or a snapshot, in a session.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Config, End, Error, Session, builtin, kernel};
use vellum_devices::console;
use vellum_host::Facts;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::memory::{MemoryConfig, Room};
use vellum_kvm::vm;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux::{self as machine, Opened};
use vellum_machine::SessionMachine;
use vellum_migration::fetching::{self, Recording};
use vellum_migration::incoming::{Arrival, Arrived, Host, Incoming};
use vellum_migration::loading::{self, Forked, Origin, Way};
use vellum_migration::migratable;
use vellum_migration::snapshot::source::Source;
use vellum_migration::snapshot::working_set::Unnamed;
use vellum_sandbox::user::User;
use vellum_sys::guard::Naming;
use vellum_sys::pagemap::Pagemap;
use vellum_sys::socket::Listener;
use vellum_sys::uffd::{Mode, Uffd};
use vellum_sys::{identity, kick, sigbus};

/// The source of the machine.
#[derive(Debug)]
pub enum Listen {
    /// A source connects to the unix socket at this path.
    Unix(PathBuf),
    /// A source connects to this TCP port.
    Tcp(TcpListener),
    /// The source is connected already.
    Connected(OwnedFd),
    /// The source is connected already, and this process takes over from it. The source has lent
    /// the files of its serial port.
    Lent(OwnedFd, console::Opened),
    /// The machine is in the files of a snapshot.
    Snapshot(Restore),
    /// A fork of a machine on this host.
    Fork(Fork),
    /// A machine that the host's last kernel has handed over.
    Preserved(Preserved),
}

/// A machine that is forked from another.
#[derive(Debug)]
pub struct Fork {
    /// What the other machine left.
    pub forked: Box<Forked>,
    /// Whether the new machine waits for a resume.
    pub paused: bool,
    /// Whether its disks may differ from the other machine's disks.
    pub disk_changed: bool,
}

/// A machine that was saved for a live update of the host's kernel.
#[derive(Debug)]
pub struct Preserved {
    /// What the live update has preserved.
    pub preserved: Box<loading::Preserved>,
    /// The guest's clocks stand still or advance by the time of the live update.
    pub meanwhile: ClockPolicy,
    /// Whether the machine waits for a resume.
    pub paused: bool,
    /// Whether its disks may differ from those that it had.
    pub disk_changed: bool,
}

/// What is restored, and how.
#[derive(Debug)]
pub struct Restore {
    /// The files.
    pub source: Source,
    /// The number of the point. `None` restores the newest.
    pub point: Option<u32>,
    /// The guest's clocks stand still or advance by the time since the snapshot.
    pub meanwhile: ClockPolicy,
    /// The machine stays paused until it is resumed.
    pub paused: bool,
    /// Disks may differ from those at the time of the snapshot.
    pub disk_changed: bool,
    /// How memory is loaded.
    pub memory: Brings,
}

/// How memory is loaded from a snapshot. This is [`Way`] before files are opened for it.
#[derive(Debug)]
pub enum Brings {
    /// All memory is read before the guest runs.
    Eager,
    /// Memory maps the files.
    Map,
    /// Pages are read on demand.
    Demand {
        /// Pages that the recorded restore wanted are read first.
        prefetch: bool,
        /// Record which pages are wanted: for how long, and into which directory.
        record: Option<(Duration, PathBuf)>,
    },
}

/// What is tolerated from a source.
#[derive(Clone, Copy, Debug)]
pub struct Lenience {
    /// The longest time that the source may be silent.
    pub liveness: Duration,
    /// The guest's TSC may have a frequency that this host cannot provide.
    pub other_tsc: bool,
}

/// The outcome of a machine that arrived and ended.
pub enum Outcome {
    /// A PC.
    Kernel(kernel::Outcome),
    /// A built-in guest.
    BuiltIn(Box<builtin::Outcome>),
    /// Another process took over the machine and ended with this status.
    Succeeded(Exit),
}

/// What `open` opens, as the machine's user if that one has named it.
fn opened<T>(process: &Config, open: impl FnOnce() -> T) -> Result<T, Error> {
    match process.user.filter(|_| process.opens_as_user) {
        Some(User { uid, gid }) => identity::as_user(uid, gid, open)
            .map_err(|error| Error::Host("opening devices as the machine's user", error)),
        None => Ok(open()),
    }
}

/// Waits for a machine and runs it. `memory` says what backs its memory. `config` says where its
/// devices and its serial port lead. The source sends the rest.
///
/// # Errors
/// The machine cannot arrive or cannot go on.
pub fn run(
    process: &Config,
    listen: Listen,
    memory: MemoryConfig,
    config: machine::Config,
    Lenience { liveness, other_tsc }: Lenience,
) -> Result<Outcome, Error> {
    let (fetching, naming) = match &listen {
        Listen::Snapshot(restore) => fetching(&restore.memory)?,
        _ => (None, None),
    };
    let kvm = vm::open()?;
    let (listen, serial) = match listen {
        Listen::Lent(socket, serial) => (Listen::Connected(socket), serial),
        listen => {
            // A machine that is forked goes on, and so does its output.
            let open = || match &listen {
                Listen::Fork(_) => config.serial.open(),
                _ => config.serial.open_beside(),
            };
            let serial = opened(process, open)?.map_err(machine::Error::from)?;
            if matches!(listen, Listen::Preserved(_)) {
                // The output of the same machine continues.
                serial.hand_over();
            }
            (listen, serial)
        }
    };
    if let Some(entries) = config.dirty_ring {
        let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
        vm::ring::check(&probe, entries).map_err(vm::Error::from)?;
    }
    let cr3_cache = config.cr3_cache.decided(&kvm).map_err(vm::Error::from)?;
    let open = || Opened::open(machine::Config { cr3_cache, incoming: true, ..config });
    let devices = opened(process, open)??;
    let path = match &listen {
        Listen::Unix(path) => Some(path.clone()),
        _ => None,
    };
    let mut session = Session::open(process, devices.sockets().chain(path.as_deref()), naming)?;
    let process_comes = Arrival::Process(liveness);
    let (accept, socket, arrival) = match listen {
        Listen::Unix(path) => {
            let listener = Listener::bind(&path).map_err(Error::Listen)?;
            // The guard removes its name.
            (Some(listener.lend().map_err(|error| Error::Host(LISTENER, error))?), None, process_comes)
        }
        Listen::Tcp(listener) => (Some(OwnedFd::from(listener)), None, process_comes),
        Listen::Connected(socket) | Listen::Lent(socket, _) => (None, Some(socket), process_comes),
        Listen::Snapshot(Restore { source, point, meanwhile, paused, disk_changed, memory }) => {
            let source = Box::new(source);
            let way = match memory {
                Brings::Eager => Way::Eager,
                Brings::Map => map()?,
                Brings::Demand { prefetch, .. } => Way::Demand { prefetch },
            };
            let origin = Origin::Snapshot { source, point, way };
            (None, None, Arrival::Files { origin, meanwhile, paused, disk_changed })
        }
        Listen::Fork(Fork { forked, paused, disk_changed }) => {
            // For both guests, the same time has passed.
            let (origin, meanwhile) = (Origin::Fork(forked), ClockPolicy::Passes);
            (None, None, Arrival::Files { origin, meanwhile, paused, disk_changed })
        }
        Listen::Preserved(Preserved { preserved, meanwhile, paused, disk_changed }) => {
            let origin = Origin::Preserved(preserved);
            (None, None, Arrival::Files { origin, meanwhile, paused, disk_changed })
        }
    };
    // Needed if the guest runs before all of its memory has arrived. The source says whether it
    // does.
    let comes = matches!(arrival, Arrival::Process(_));
    let uffd = || Uffd::new(Mode::Missing).map_err(|error| Error::Userfaultfd(error).to_string());
    let userfault = comes.then(uffd);
    let mut facts = Facts::collect(String::new());
    let room = Room::read(memory.backing);
    kick::install().map_err(|error| Error::Host("the signal that interrupts vCPUs", error))?;
    // For the next migration, and to compare memory without reading untouched pages.
    let pagemap = Pagemap::open().ok().map(Arc::new);
    let sandbox = session.confine()?;
    facts.sandbox = session.sandbox_status();
    let host = Host {
        kvm,
        begun: None,
        devices,
        serial,
        memory,
        room,
        pagemap,
        fetching,
        userfault,
        other_tsc,
        sandbox,
    };
    let mut incoming = Incoming::new(host, arrival).map_err(|error| Error::Host("eventfd", error))?;
    // It is closed once the migration is over.
    if let Some(listener) = accept {
        incoming.listen(listener);
    }
    if let Some(socket) = socket {
        incoming.connected(socket);
    }
    let end: End = session.run(&mut incoming)?;
    if let Some(successor) = incoming.successor() {
        drop(incoming);
        return Ok(Outcome::Succeeded(session.wait_for(successor)));
    }
    Ok(match incoming.into_machine() {
        Some(Arrived::Pc(mut machine)) => Outcome::Kernel(kernel::Outcome::of(&mut machine.machine, end)),
        Some(Arrived::BuiltIn(run)) => Outcome::BuiltIn(Box::new(builtin::Outcome::of(*run, facts, end))),
        // A signal is reported by the exit status. Other ends report that no machine came.
        None if end.exit != Exit::PowerOff => Outcome::Kernel(kernel::Outcome::none(end)),
        None => return Err(migratable::Error::Gone("it was stopped before a machine came".into()).into()),
    })
}

const LISTENER: &str = "the socket that listens";

/// Opens what demand paging needs before the process is confined. Returns also the file that the
/// guard names.
fn fetching(memory: &Brings) -> Result<(Option<fetching::Opened>, Option<Naming>), Error> {
    let Brings::Demand { record, .. } = memory else { return Ok((None, None)) };
    let uffd = Uffd::new(Mode::Missing).map_err(Error::Userfaultfd)?;
    let Some((lasts, dir)) = record else {
        return Ok((Some(fetching::Opened { uffd, recording: None }), None));
    };
    let (file, naming) = Unnamed::create(dir)?;
    let recording = Some(Recording { lasts: *lasts, file });
    Ok((Some(fetching::Opened { uffd, recording }), Some(naming)))
}

/// Mappings that are not of the snapshot's files: the program and the files it opens, threads and
/// their stacks, the heap.
const OTHER_MAPPINGS: u64 = 2000;

/// Prepares mapping of the snapshot's files, before the process is confined.
fn map() -> Result<Way, Error> {
    let host = |what| move |error| Error::Host(what, error);
    sigbus::install().map_err(host("the handler of SIGBUS"))?;
    let most =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").map_err(host("/proc/sys/vm/max_map_count"))?;
    Ok(Way::Map { mappings: most.trim().parse().unwrap_or(u64::MAX).saturating_sub(OTHER_MAPPINGS) })
}
