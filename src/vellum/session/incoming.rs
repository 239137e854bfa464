//! A machine that comes from another process and the session around it, put together.

use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
use vellum_migration::loading::Way;
use vellum_migration::migratable;
use vellum_migration::snapshot::source::Source;
use vellum_migration::snapshot::working_set::Unnamed;
use vellum_sys::guard::Naming;
use vellum_sys::pagemap::Pagemap;
use vellum_sys::socket::Listener;
use vellum_sys::uffd::{Mode, Uffd};
use vellum_sys::{kick, sigbus};

/// Where a machine comes from.
#[derive(Debug)]
pub enum Listen {
    /// A source connects at a unix socket of this name.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(TcpListener),
    /// It is connected already.
    Connected(OwnedFd),
    /// The same, and this process is to stand in for it: what its serial port leads to is lent.
    Lent(OwnedFd, console::Opened),
    /// Nobody connects: it is in files.
    Snapshot(Restore),
}

/// What is restored, and how.
#[derive(Debug)]
pub struct Restore {
    /// The files.
    pub source: Source,
    /// Which point of it; the newest, where none is asked for.
    pub point: Option<u32>,
    /// What becomes of the time since.
    pub meanwhile: ClockPolicy,
    /// Whether it waits to be resumed.
    pub paused: bool,
    /// Whether its disks need not be as they were.
    pub disk_changed: bool,
    /// How its memory comes.
    pub memory: Brings,
}

/// How memory comes out of a snapshot: as [`Way`], before anything is opened for it.
#[derive(Debug)]
pub enum Brings {
    /// All of it is read.
    Eager,
    /// It shows the files.
    Map,
    /// It is fetched as somebody wants it.
    Demand {
        /// Whether what the recorded restore wanted comes first.
        prefetch: bool,
        /// Whether what this one wants is recorded, for how long, and in which directory.
        record: Option<(Duration, PathBuf)>,
    },
}

/// What a source may do.
#[derive(Clone, Copy, Debug)]
pub struct Lenience {
    /// Be silent for so long.
    pub liveness: Duration,
    /// Send a guest whose TSC has a frequency that this host cannot give it.
    pub other_tsc: bool,
}

/// What came of a machine that has come and has ended.
pub enum Outcome {
    /// A PC.
    Kernel(kernel::Outcome),
    /// A built-in guest.
    BuiltIn(Box<builtin::Outcome>),
    /// Another process stood in for this one, and ended so.
    Succeeded(Exit),
}

enum Accept {
    Unix(Listener),
    Tcp(TcpListener),
}

impl AsFd for Accept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Waits for a machine, and runs it when it has come. What backs its memory is said by `memory`, where its devices and its serial
/// port lead by `config`; the rest comes with it.
///
/// # Errors
/// Where it cannot come, or cannot go on.
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
        listen => (listen, config.serial.open_beside().map_err(machine::Error::from)?),
    };
    if let Some(entries) = config.dirty_ring {
        let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
        vm::ring::check(&probe, entries).map_err(vm::Error::from)?;
    }
    let cr3_cache = config.cr3_cache.decided(&kvm).map_err(vm::Error::from)?;
    let devices = Opened::open(machine::Config { cr3_cache, incoming: true, ..config })?;
    let path = match &listen {
        Listen::Unix(path) => Some(path.clone()),
        _ => None,
    };
    let mut session = Session::open(process, devices.sockets().chain(path.as_deref()), naming)?;
    let process_comes = Arrival::Process(liveness);
    let (accept, socket, arrival) = match listen {
        Listen::Unix(path) => {
            (Some(Accept::Unix(Listener::bind(&path).map_err(Error::Listen)?)), None, process_comes)
        }
        Listen::Tcp(listener) => (Some(Accept::Tcp(listener)), None, process_comes),
        Listen::Connected(socket) | Listen::Lent(socket, _) => (None, Some(socket), process_comes),
        Listen::Snapshot(Restore { source, point, meanwhile, paused, disk_changed, memory }) => {
            let source = Box::new(source);
            let way = match memory {
                Brings::Eager => Way::Eager,
                Brings::Map => map()?,
                Brings::Demand { prefetch, .. } => Way::Demand { prefetch },
            };
            (None, None, Arrival::Snapshot { source, point, meanwhile, paused, disk_changed, way })
        }
    };
    // For a guest that runs before all of its memory has come; whether one does, its source says.
    let comes = matches!(arrival, Arrival::Process(_));
    let uffd = || Uffd::new(Mode::Missing).map_err(|error| Error::Userfaultfd(error).to_string());
    let userfault = comes.then(uffd);
    let mut facts = Facts::collect(String::new());
    let room = Room::read(memory.backing);
    kick::install().map_err(|error| Error::Host("the signal that interrupts vCPUs", error))?;
    // For its next move, and to compare what has come without reading what nobody has touched.
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
    // It listens for as long as this is here.
    if let Some(listener) = &accept {
        let listens = listener.as_fd().try_clone_to_owned();
        incoming.listen(listens.map_err(|error| Error::Host("the socket that listens", error))?);
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
        // A signal says what it was; whoever else ended it is told that nothing has come.
        None if end.exit != Exit::PowerOff => Outcome::Kernel(kernel::Outcome::none(end)),
        None => return Err(migratable::Error::Gone("it was stopped before a machine came".into()).into()),
    })
}

/// What memory that is fetched needs of a process that is not confined yet; and what its guard is to name.
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

/// Whatever takes mappings beside those of files: the program and what it opens, threads and their stacks, the heap.
const OTHER_MAPPINGS: u64 = 2000;

/// What memory that shows files needs of a process that is not confined yet.
fn map() -> Result<Way, Error> {
    let host = |what| move |error| Error::Host(what, error);
    sigbus::install().map_err(host("the handler of SIGBUS"))?;
    let most =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").map_err(host("/proc/sys/vm/max_map_count"))?;
    Ok(Way::Map { mappings: most.trim().parse().unwrap_or(u64::MAX).saturating_sub(OTHER_MAPPINGS) })
}
