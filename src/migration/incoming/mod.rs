//! A machine that is to come: what a session runs while it waits for one, and then that machine. Here is the event loop's side
//! of an arrival, which does what the [`receiver`](super::receiver)'s thread demands; [`assembly`] makes the machine, and [`machine`] is what the
//! session sees.
//!
//! What the guest sees comes from the source: how many vCPUs, which interrupt controller, how much memory, which devices. What the
//! host sees is this process's own: what backs memory, where disks, networks and the serial port lead.

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
use super::loading::{Loading, Way};
use super::message::Misfit;
use super::migratable::{Error, HELD, HELD_VERSION, HeldState, MigratableMachine, now};
use super::populating::Populating;
use super::receiver::lanes::Lanes;
use super::receiver::{Demand, Done, Offer, Place, ReceiverCommand, Receiving, Said};
use super::threads;
use crate::snapshot::disk;
use crate::snapshot::source::Source;
use vellum_control::{self as control, Came, Event, MachineState};
use vellum_devices::console;
use vellum_guests::run::BuiltinMachine;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::memory::{MemoryConfig, Room};
use vellum_linux::{LinuxMachine, Opened};
use vellum_machine::section::Sections;
use vellum_machine::{RestoreState, Section, SessionMachine};
use vellum_sandbox::{Sandbox, ThreadKind};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};
use vellum_sys::uffd::Uffd;

/// What this process has for a machine that comes.
pub struct Host {
    /// KVM, opened before the sandbox was entered.
    pub kvm: Kvm,
    /// What of a machine was made of it, while it was not known which one comes.
    pub begun: Option<PreparedVm>,
    /// The host's side of its devices.
    pub devices: Opened,
    /// Where its serial port leads.
    pub serial: console::Opened,
    /// What is to back its memory; the size is the source's.
    pub memory: MemoryConfig,
    /// How much of that there is.
    pub room: Room,
    /// Tells which of its memory somebody has touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// What it takes to bring memory as it is wanted, where it is to come so.
    pub fetching: Option<fetching::Opened>,
    /// Where faults arrive of a guest that runs before all of its memory has come; or why there is no such thing, and what to do about it.
    pub userfault: Option<Result<Uffd, String>>,
    /// Whether a guest is taken whose TSC has a frequency that this host cannot give it.
    pub other_tsc: bool,
    /// What each thread enters.
    pub sandbox: Sandbox,
}

/// A machine that has come, of either kind.
pub enum Arrived {
    /// A PC with a kernel.
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

    fn arrive_paused(&mut self) {
        match self {
            Self::Pc(machine) => machine.arrive_paused(),
            Self::BuiltIn(run) => run.arrive_paused(),
        }
    }
}

/// A machine that is to come, or has.
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
    /// Whether some of its memory is missing, and whether what has that is cut off.
    lacks: Option<bool>,
    /// Why it will not come.
    gone: Option<Error>,
    over: bool,
    /// When what of the arrival was done.
    came: Came,
    news: Vec<Event>,
    /// What brings it, until that is started.
    bringer: Option<Bringer>,
    /// What becomes of the time since it was saved.
    meanwhile: ClockPolicy,
    /// Whether it waits to be resumed, however it was saved.
    paused: bool,
    /// Whether other machines may come out of the same state.
    restored: bool,
    /// Whether its disks need not be as they were.
    disk_changed: bool,
}

/// Where a machine comes from.
#[derive(Debug)]
pub enum Arrival {
    /// A source that may be silent for so long.
    Process(Duration),
    /// A snapshot, of which this point is wanted, or the newest.
    Snapshot {
        /// Its files.
        source: Box<Source>,
        /// The point.
        point: Option<u32>,
        /// What becomes of the time since.
        meanwhile: ClockPolicy,
        /// Whether it waits to be resumed.
        paused: bool,
        /// Whether its disks need not be as they were.
        disk_changed: bool,
        /// How its memory comes.
        way: Way,
    },
}

/// The thread that brings it.
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
}

impl Incoming {
    /// A machine that is to come to `host`.
    ///
    /// # Errors
    /// Where the host refuses a descriptor.
    pub fn new(host: Host, arrival: Arrival) -> io::Result<Self> {
        let wake = threads::event()?;
        let (mine, thread) = threads::pair(wake.clone())?;
        let restored = matches!(arrival, Arrival::Snapshot { .. });
        let mut accepted = false;
        let (bringer, state, meanwhile, paused) = match arrival {
            Arrival::Process(liveness) => {
                let receiving = Box::new(Receiving::new(mine, liveness));
                (Bringer::Receiving(receiving), MachineState::Waiting, ClockPolicy::Passes, false)
            }
            Arrival::Snapshot { source, point, meanwhile, paused, disk_changed, way } => {
                accepted = disk_changed;
                let loading = Loading::new(mine, *source, point, way);
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
            disk_changed: accepted,
        })
    }

    /// Has the thread of the migration let in who connects to this socket: the event loop's may be the one that waits for what a source
    /// has which connects there anew.
    pub fn listen(&self, socket: OwnedFd) {
        self.thread.tell(ReceiverCommand::Listen(socket));
    }

    /// Somebody has connected already.
    pub fn connected(&self, socket: OwnedFd) {
        self.thread.tell(ReceiverCommand::Connected(socket));
    }

    /// The machine, if it has come and has run here.
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
                let populate = || Populating::start(ram.clone(), self.sandbox);
                // Memory that may follow when the guest runs is made to be there when nothing follows any more.
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

    /// Looks at the disks once nobody else can write to them.
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
        if held.user || self.paused {
            machine.arrive_paused();
        }
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
        machine.arriving_mut().commit().map_err(|error| error.to_string())?;
        if self.restored {
            machine.arriving_mut().renew().map_err(|error| error.to_string())?;
        }
        // What a process that only runs a machine does not need is given up before its guest runs.
        self.sandbox.enter(ThreadKind::Main, "main").map_err(|error| error.to_string())?;
        if gate.is_some_and(|gate| !gate.runs()) {
            return Err("the link to the source was cut".into());
        }
        // From here on it is this side's, whatever becomes of the other.
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

/// A host on which no guest runs before all of its memory has come.
fn why_not(why: String) -> Misfit {
    Misfit {
        what: "postcopy".into(),
        source: "asked for".into(),
        target: why,
        remedy: "or migrate by precopy".into(),
    }
}

/// A thread for each connection but the first, which waits for it.
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
