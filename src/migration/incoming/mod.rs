//! An incoming machine: what a session runs while it waits for a machine, and then that machine.
//! This is the event loop's side of an arrival. It executes the demands of the
//! [`receiver`](super::receiver)'s thread. [`assembly`] makes the machine, and [`machine`] is the
//! session's interface.
//!
//! The source determines what the guest sees: the number of vCPUs, the interrupt controller, the
//! size of memory, the devices. This process determines the host's side: the backing of memory, and
//! the targets of disks, networks and the serial port.

mod assembly;
mod machine;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvm_ioctls::Kvm;
use vmm_sys_util::eventfd::EventFd;

use self::assembly::{Refused, assemble};
use super::commit_flag::{CommitFlag, Ownership};
use super::fetching::{self, Fetching, Gate};
use super::loading::{Loading, Origin};
use super::message::Misfit;
use super::migratable::{Error, HELD, HELD_VERSION, HeldState, MigratableMachine, now};
use super::populating::Populating;
use super::receiver::lanes::Lanes;
use super::receiver::{Demand, Done, Offer, Place, ReceiverCommand, Receiving, Said};
use super::threads;
use crate::snapshot::disk;
use vellum_control::{self as control, Came, Event, MachineState};
use vellum_devices::console;
use vellum_guests::run::BuiltinMachine;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::memory::{Backing, MemoryConfig, Room};
use vellum_linux::{LinuxMachine, Opened};
use vellum_machine::section::Sections;
use vellum_machine::{RestoreState, Section, SessionMachine};
use vellum_sandbox::{Sandbox, ThreadKind};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};
use vellum_sys::uffd::Uffd;

/// This process's resources for an incoming machine.
pub struct Host {
    /// KVM, opened before the sandbox was entered.
    pub kvm: Kvm,
    /// A VM that was prepared before the machine was known.
    pub begun: Option<PreparedVm>,
    /// The host's side of its devices.
    pub devices: Opened,
    /// The target of its serial port.
    pub serial: console::Opened,
    /// The configuration of its memory. The source determines the size.
    pub memory: MemoryConfig,
    /// How much memory is available.
    pub room: Room,
    /// Tells which pages of its memory were touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// The resources for fetching memory on demand, if requested.
    pub fetching: Option<fetching::Opened>,
    /// The userfaultfd for postcopy, or the reason for its absence and the remedy.
    pub userfault: Option<Result<Uffd, String>>,
    /// Whether to accept a guest with a TSC frequency that this host cannot provide.
    pub other_tsc: bool,
    /// The sandbox that each thread enters.
    pub sandbox: Sandbox,
}

/// A machine that has arrived, of either kind.
pub enum Arrived {
    /// A machine with a kernel.
    Pc(Box<MigratableMachine<LinuxMachine>>),
    /// A built-in guest.
    BuiltIn(Box<MigratableMachine<BuiltinMachine>>),
}

impl Arrived {
    fn running(&self) -> &dyn SessionMachine<Error = Error> {
        match self {
            Self::Pc(machine) => &**machine,
            Self::BuiltIn(run) => &**run,
        }
    }

    fn running_mut(&mut self) -> &mut dyn SessionMachine<Error = Error> {
        match self {
            Self::Pc(machine) => &mut **machine,
            Self::BuiltIn(run) => &mut **run,
        }
    }

    fn arriving(&self) -> &dyn RestoreState<Error = Error> {
        match self {
            Self::Pc(machine) => &**machine,
            Self::BuiltIn(run) => &**run,
        }
    }

    fn arriving_mut(&mut self) -> &mut dyn RestoreState<Error = Error> {
        match self {
            Self::Pc(machine) => &mut **machine,
            Self::BuiltIn(run) => &mut **run,
        }
    }

    fn arrive_paused(&mut self, paused: bool) {
        match self {
            Self::Pc(machine) => machine.arrive_paused(paused),
            Self::BuiltIn(run) => run.arrive_paused(paused),
        }
    }
}

/// A machine that is to arrive, or has arrived.
pub struct Incoming {
    host: Option<Host>,
    sandbox: Sandbox,
    machine: Option<Arrived>,
    thread: threads::MachineEnd<Said, ReceiverCommand>,
    wake: Arc<EventFd>,
    served: bool,
    state: MachineState,
    /// Whether it runs here.
    runs: bool,
    /// Whether some of its memory is missing, and if so, whether the link to it has dropped.
    lacks: Option<bool>,
    /// Why it will not arrive.
    gone: Option<Error>,
    over: bool,
    /// When the steps of the arrival happened.
    came: Came,
    news: Vec<Event>,
    /// The thread that makes it, until it is started.
    bringer: Option<Bringer>,
    /// How its clocks treat the time since it was saved.
    meanwhile: ClockPolicy,
    /// Whether it stays paused until it is resumed, even if it was not saved so.
    paused: bool,
    /// Whether other machines may be restored from the same state.
    restored: bool,
    /// Whether the machine that it is a copy of runs on.
    forked: bool,
    /// Whether changed disks are accepted.
    disk_changed: bool,
}

/// The origin of a machine.
#[derive(Debug)]
pub enum Arrival {
    /// A source. The duration is how long it may be silent.
    Process(Duration),
    /// Files, from which other machines may be made too.
    Files {
        /// The files.
        origin: Origin,
        /// How its clocks treat the time since it was saved.
        meanwhile: ClockPolicy,
        /// Whether it stays paused until it is resumed.
        paused: bool,
        /// Whether changed disks are accepted.
        disk_changed: bool,
    },
}

/// The thread that makes the machine.
enum Bringer {
    Receiving(Box<Receiving>),
    Loading(Loading),
}

impl Bringer {
    fn run(self) {
        match self {
            Self::Receiving(receiving) => receiving.run(),
            Self::Loading(loading) => loading.run(),
        }
    }

    /// Reports that its thread cannot run.
    fn fail(self, why: String) {
        match self {
            Self::Receiving(receiving) => receiving.fail(why),
            Self::Loading(loading) => loading.fail(why),
        }
    }
}

impl Incoming {
    /// A machine that is to arrive on `host`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(host: Host, arrival: Arrival) -> io::Result<Self> {
        let wake = threads::event()?;
        let (mine, thread) = threads::pair(wake.clone())?;
        // A preserved machine is the only one of its state.
        let restored =
            matches!(&arrival, Arrival::Files { origin, .. } if !matches!(origin, Origin::Preserved(_)));
        let forked = matches!(&arrival, Arrival::Files { origin: Origin::Fork(_), .. });
        let mut accepted = false;
        let (bringer, state, meanwhile, paused) = match arrival {
            Arrival::Process(liveness) => {
                let receiving = Box::new(Receiving::new(mine, liveness));
                (Bringer::Receiving(receiving), MachineState::Waiting, ClockPolicy::Passes, false)
            }
            Arrival::Files { origin, meanwhile, paused, disk_changed } => {
                accepted = disk_changed;
                let loading = Loading::new(mine, origin);
                (Bringer::Loading(loading), MachineState::Restoring, meanwhile, paused)
            }
        };
        Ok(Self {
            sandbox: host.sandbox,
            host: Some(host),
            machine: None,
            thread,
            wake,
            served: false,
            state,
            runs: false,
            lacks: None,
            gone: None,
            over: false,
            came: Came::default(),
            news: Vec::new(),
            bringer: Some(bringer),
            meanwhile,
            paused,
            restored,
            forked,
            disk_changed: accepted,
        })
    }

    /// Lets the migration's thread accept connections on this socket. The event loop's thread
    /// cannot: it may wait for memory of a source that has yet to reconnect there.
    pub fn listen(&self, socket: OwnedFd) {
        self.thread.tell(ReceiverCommand::Listen(socket));
    }

    /// Provides an open connection.
    pub fn connected(&self, socket: OwnedFd) {
        self.thread.tell(ReceiverCommand::Connected(socket));
    }

    /// The machine, if it has arrived and has run here.
    pub fn into_machine(self) -> Option<Arrived> {
        self.machine.filter(|_| self.runs)
    }

    fn serve(&mut self) {
        while let Some(said) = self.thread.heard() {
            match said {
                Said::Demand(demand) => {
                    let done = self.answer(demand);
                    self.thread.tell(ReceiverCommand::Done(done));
                }
                Said::Typed(typed) => {
                    if let Some(machine) = self.machine.as_mut().filter(|_| self.runs) {
                        machine.arriving_mut().give_typed(&typed);
                    }
                }
                Said::Uncommitted(waits) => {
                    self.state = if waits { MachineState::Uncommitted } else { MachineState::Incoming }
                }
                Said::Gone(why) => self.gone = Some(Error::Gone(format!("no machine has come: {why}"))),
                Said::Refused(why) => self.gone = Some(Error::Refused(why)),
                Said::DiskChanged(why) => self.gone = Some(Error::DiskChanged(why)),
                Said::OtherTsc(why) => self.gone = Some(Error::OtherTsc(why)),
                Said::Lacks(lacks) => self.lacks = lacks,
                Said::Severed(why) => {
                    self.lacks = Some(true);
                    self.news.push(Event::Severed { why });
                }
                Said::Waited(waited) => self.news.push(Event::Waited(waited)),
                Said::Fetched(fetched) => self.news.push(Event::Fetched(fetched)),
                Said::Over => self.over = true,
            }
        }
    }

    fn answer(&mut self, demand: Demand) -> Done {
        match demand {
            Demand::Judge(offer) => self.judge(offer),
            Demand::Restore(sections) => match self.restore(sections) {
                Ok(()) => Done::Done,
                Err(error) => Done::Failed(error),
            },
            Demand::Start(fence, gate) => match self.begin(fence.as_deref(), gate.as_deref()) {
                Ok(()) => Done::Done,
                Err(error) => Done::Failed(error),
            },
            Demand::Free => {
                self.machine = None;
                Done::Done
            }
        }
    }

    fn judge(&mut self, Offer { config, connections, ram, postcopy, disks }: Offer) -> Done {
        let Some(mut host) = self.host.take() else {
            return Done::Failed("a machine has come already".into());
        };
        let pagemap = host.pagemap.clone();
        match host.userfault.take().filter(|_| postcopy) {
            Some(Ok(uffd)) => host.fetching = Some(fetching::Opened { uffd, recording: None }),
            Some(Err(why)) => return Done::Misfits(vec![why_not(why)]),
            None => {}
        }
        let fetching = host.fetching.take().map(|opened| Fetching::start(opened, self.sandbox)).transpose();
        let fetching = match fetching {
            Ok(fetching) => fetching,
            Err(why) => return Done::Failed(why),
        };
        let lanes = match start_lanes(connections, self.sandbox) {
            Ok(lanes) => lanes,
            Err(why) => return Done::Failed(why),
        };
        match assemble(host, config, ram) {
            Ok(machine) => {
                let (memory, ram) = (machine.arriving().memory(), machine.arriving().ram());
                // Nothing is in memory yet. Linux before 5.18 refuses this for a pool's huge pages.
                let empties = || ram.mapping.advise(libc::MADV_DONTNEED);
                if postcopy
                    && matches!(ram.config.backing, Backing::Hugetlb(_))
                    && let Err(error) = empties()
                {
                    let why = format!("{} cannot be emptied ({error}) before Linux 5.18", ram.config.backing);
                    return Done::Misfits(vec![why_not(why)]);
                }
                let populate = || Populating::start(ram.clone(), self.sandbox);
                // With postcopy, memory is populated once no page is missing.
                let early = ram.config.prealloc && !postcopy;
                let populating = match early.then(populate).transpose() {
                    Ok(populating) => populating,
                    Err(why) => return Done::Failed(why),
                };
                let vcpus = machine.arriving().throttle();
                self.machine = Some(machine);
                if let Some(claimed) = disks.and_then(|disks| self.claim(&disks).err()) {
                    return claimed;
                }
                if self.state == MachineState::Waiting {
                    self.state = MachineState::Incoming;
                }
                Done::Fits(Box::new(Place { memory, ram, pagemap, lanes, populating, fetching, vcpus }))
            }
            Err(Refused::Misfits(misfits)) => Done::Misfits(misfits),
            Err(Refused::Failed(why)) => Done::Failed(why),
        }
    }

    /// Locks the disks and then checks whether they have changed.
    fn claim(&mut self, then: &[control::Disk]) -> Result<(), Done> {
        let machine = self.machine.as_mut().ok_or(Done::Failed("nothing has been assembled".into()))?;
        machine.arriving_mut().retake().map_err(|error| Done::Failed(error.to_string()))?;
        match disk::differences(then, &machine.arriving().disks()) {
            Ok(Some(what)) if !self.disk_changed && !plant::is(Mistake::DisksUnchecked) => {
                return Err(Done::DiskChanged(what));
            }
            Ok(Some(what)) => tracing::warn!("{what}"),
            Ok(None) => {}
            Err(why) => return Err(Done::Failed(why)),
        }
        Ok(())
    }

    fn restore(&mut self, sections: Vec<Section>) -> Result<(), String> {
        let complete = now();
        let machine = self.machine.as_mut().ok_or("nothing has been assembled")?;
        let (held, state): (Vec<_>, Vec<_>) = sections.into_iter().partition(|section| section.name == HELD);
        let mut held = Sections::new(held).map_err(|error| error.to_string())?;
        let held: HeldState = held.take(HELD, HELD_VERSION).map_err(|error| error.to_string())?;
        // An attempt that was given up may have said something else.
        machine.arrive_paused(held.user || self.paused);
        machine.arriving_mut().restore(state, self.meanwhile).map_err(|error| error.to_string())?;
        self.came = Came { complete, restored: now(), runs: 0 };
        Ok(())
    }

    fn begin(&mut self, fence: Option<&CommitFlag>, gate: Option<&Gate>) -> Result<(), String> {
        let machine = self.machine.as_mut().ok_or("nothing has been assembled")?;
        let refused = || Err("the source has taken it back".to_owned());
        if fence.is_some_and(|fence| {
            fence.step(Ownership::Committed, Ownership::Committed) != Ownership::Committed
        }) {
            return refused();
        }
        machine.arriving_mut().commit(self.forked).map_err(|error| error.to_string())?;
        if self.restored {
            machine.arriving_mut().renew().map_err(|error| error.to_string())?;
        }
        // Before its guest runs, the process gives up the permissions that running a machine does
        // not need.
        self.sandbox.enter(ThreadKind::Main, "main").map_err(|error| error.to_string())?;
        if gate.is_some_and(|gate| !gate.runs()) {
            return Err("the link to the source was cut".into());
        }
        // From here on this side has the guest, whatever happens to the other.
        if fence.is_some_and(|fence| fence.step(Ownership::Committed, Ownership::Ran) != Ownership::Ran) {
            return refused();
        }
        if let Err(error) = machine.arriving_mut().start() {
            fence.map(|fence| fence.step(Ownership::Ran, Ownership::Withdrawn));
            return Err(error.to_string());
        }
        self.runs = true;
        self.came.runs = now();
        self.news.push(Event::Arrived { came: self.came });
        Ok(())
    }

    /// The machine, once it runs here.
    fn running(&self) -> Option<&dyn SessionMachine<Error = Error>> {
        self.machine.as_ref().filter(|_| self.runs).map(Arrived::running)
    }

    fn running_mut(&mut self) -> Option<&mut dyn SessionMachine<Error = Error>> {
        self.machine.as_mut().filter(|_| self.runs).map(Arrived::running_mut)
    }
}

/// The misfit of a host without postcopy.
fn why_not(why: String) -> Misfit {
    Misfit {
        what: "postcopy".into(),
        source: "asked for".into(),
        target: why,
        remedy: "or migrate by precopy".into(),
    }
}

/// Starts a thread for each connection but the first. It waits for its connection.
fn start_lanes(connections: u32, sandbox: Sandbox) -> Result<Lanes, String> {
    let (lanes, threads) = Lanes::new(connections)?;
    for (number, lane) in (1..).zip(threads) {
        let name = format!("migration{number}");
        let body = move || match sandbox.enter(ThreadKind::Connection, &format!("migration{number}")) {
            Ok(()) => lane.run(),
            Err(error) => tracing::error!("{error}"),
        };
        let started = std::thread::Builder::new().name(name).spawn(body);
        started.map_err(|error| format!("the thread of connection {number}: {error}"))?;
    }
    Ok(lanes)
}
