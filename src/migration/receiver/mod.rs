//! The target's thread: it drives [`Target`], reads frames, and writes pages into memory. The
//! machine belongs to the event loop's thread, which receives [demands](Demand) for whatever must
//! be done with it.
//!
//! `hearing` receives frames, `performing` executes actions, and `following` handles memory that
//! arrives after the guest has started.

mod following;
mod hearing;
pub mod lanes;
mod performing;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use self::lanes::Lanes;
use super::bits::Bits;
use super::commit_flag::CommitFlag;
use super::fetching::{Fetching, Gate};
use super::link::Link;
use super::message::{Message, Misfit, SessionId, Waited};
use super::pages::Incoming;
use super::populating::Populating;
use super::postcopy_memory::PostcopyMemory;
use super::share::MAX_CONNECTIONS;
use super::target::{Event, State, Target};
use super::threads::{Mine, Orphaned};
use super::verify::Comparison;
use vellum_control::{Disk, Fetched};
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::vcpu::Throttle;
use vellum_machine::Section;
use vellum_sys::pagemap::Pagemap;
use vellum_sys::poll::Poll;

/// A demand on the event loop's thread.
#[derive(Debug)]
pub enum Demand {
    /// Compare this configuration with the host, and assemble the machine if it fits.
    Judge(Offer),
    /// Restore the state.
    Restore(Vec<Section>),
    /// Take locks, do deferred writes, and run, unless the commit flag or the gate says that it is
    /// too late.
    Start(Option<Arc<CommitFlag>>, Option<Arc<Gate>>),
    /// Free everything.
    Free,
}

/// The machine that is to arrive.
#[derive(Debug)]
pub struct Offer {
    /// Its configuration.
    pub config: Value,
    /// The number of connections that carry its pages.
    pub connections: u32,
    /// Its RAM, if it exists already.
    pub ram: Option<Ram>,
    /// Whether the guest may run before all pages have arrived.
    pub postcopy: bool,
    /// The saved state of its disks if no source holds their locks. The locks are then taken here,
    /// and the disks must be unchanged.
    pub disks: Option<Vec<Disk>>,
}

/// RAM that is there before its machine is.
#[derive(Debug)]
pub enum Ram {
    /// Another process hands it over.
    Handed(File),
    /// It shows the base of a fork.
    Base(File),
}

impl Offer {
    /// An offer of a machine whose memory is still to be filled.
    pub fn new(config: Value) -> Self {
        Self { config, connections: 1, ram: None, postcopy: false, disks: None }
    }
}

/// The memory for an incoming machine, and its threads.
#[derive(Debug)]
pub struct Place {
    /// Its memslots.
    pub memory: Vec<Slot>,
    /// Its RAM.
    pub ram: Memory,
    /// Tells which pages of RAM were ever touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// The further connections, whose threads wait for them.
    pub lanes: Lanes,
    /// The thread that populates all memory, if requested.
    pub populating: Option<Populating>,
    /// The thread that fetches memory on demand, if requested.
    pub fetching: Option<Fetching>,
    /// Its vCPUs.
    pub vcpus: Throttle,
}

impl Place {
    /// Whether memslot `region` is a part of RAM.
    fn is_ram(&self, region: u32) -> bool {
        self.memory.get(region as usize).is_some_and(|slot| self.ram.holds(slot))
    }
}

/// The answer to a [`Demand`].
#[derive(Debug)]
pub enum Done {
    /// The machine fits, and its memory is mapped.
    Fits(Box<Place>),
    /// The machine does not fit.
    Misfits(Vec<Misfit>),
    /// The machine fits, but its disks have changed. Describes how.
    DiskChanged(String),
    /// The demand is done.
    Done,
    /// The demand failed.
    Failed(String),
}

/// A command from the event loop's thread.
#[derive(Debug)]
pub enum ReceiverCommand {
    /// The answer to the last demand.
    Done(Done),
    /// A new connection.
    Connected(OwnedFd),
    /// A listening socket for sources.
    Listen(OwnedFd),
    /// The operator runs the guest, whatever the source says.
    Force,
    /// The operator cancels.
    Cancel(String),
}

/// What the thread says.
#[derive(Debug)]
pub enum Said {
    /// A demand, which is to be answered.
    Demand(Demand),
    /// Whether everything is restored and paused, and COMMIT is awaited.
    Uncommitted(bool),
    /// Input that the guest has not been given on the source.
    Typed(Vec<u8>),
    /// The migration ended without a guest. Contains the reason.
    Gone(String),
    /// As `Gone`, because the machine cannot run here.
    Refused(String),
    /// As `Gone`, because its disks have changed.
    DiskChanged(String),
    /// As `Gone`, because its TSC would have another frequency.
    OtherTsc(String),
    /// All memory has been fetched.
    Fetched(Fetched),
    /// Some memory is missing, and whether the link to it has dropped. None when all memory has
    /// arrived.
    Lacks(Option<bool>),
    /// The link dropped while memory is missing. Contains the reason.
    Severed(String),
    /// How long the guest has waited for pages.
    Waited(Waited),
    /// The source has received the outcome and needs nothing more.
    Over,
}

/// How often a silent source's deadline is checked.
const LOOK: Duration = Duration::from_millis(100);

/// The maximum number of connections that have not sent a first message.
const MAX_STRANGERS: usize = 8 + MAX_CONNECTIONS as usize;

/// The thread.
pub struct Receiving {
    target: Target,
    machine: Mine<Said, ReceiverCommand>,
    /// The connection with the source's messages.
    link: Option<Link>,
    session: Option<SessionId>,
    fence: Option<Arc<CommitFlag>>,
    /// RAM that has arrived as a descriptor. `handed` says whether the machine uses it.
    ram: Option<File>,
    handed: bool,
    strangers: Vec<(Link, Instant)>,
    place: Option<Place>,
    memory: Arc<Vec<Incoming>>,
    /// Set from the end of a pass on the first connection until it has ended on every connection.
    barrier: Option<u32>,
    comparing: Option<Comparison>,
    /// The listening socket for sources, if there is one. Without it, the connection that
    /// `connected` records is the only one.
    listener: Option<OwnedFd>,
    connected: bool,
    /// When a connection could last not be accepted.
    refused: Option<Instant>,
    /// The connection for faulting pages until it is passed on, and its number.
    faults: Option<Link>,
    faults_number: Option<u32>,
    /// The source's map of pages that follow, one bitmap per region.
    lacking: Vec<Bits>,
    /// The memory with missing pages.
    postcopy: Option<Arc<PostcopyMemory>>,
    gate: Option<Arc<Gate>>,
    waited: Waited,
    /// Pages of each region.
    regions: Arc<[u64]>,
    pages: u64,
    sections: Vec<Section>,
    pending: Vec<Event>,
    liveness: Duration,
    /// When the source was last heard.
    heard: Instant,
    broken: Option<String>,
    /// The source has sent BYE.
    bye: bool,
}

impl Receiving {
    /// A target that waits for a source to connect.
    pub fn new(machine: Mine<Said, ReceiverCommand>, liveness: Duration) -> Self {
        Self {
            target: Target::new(),
            machine,
            link: None,
            session: None,
            fence: None,
            ram: None,
            handed: false,
            strangers: Vec::new(),
            place: None,
            memory: Arc::default(),
            barrier: None,
            comparing: None,
            listener: None,
            connected: false,
            refused: None,
            faults: None,
            faults_number: None,
            lacking: Vec::new(),
            postcopy: None,
            gate: None,
            waited: Waited::default(),
            regions: Arc::default(),
            pages: 0,
            sections: Vec::new(),
            pending: Vec::new(),
            liveness,
            heard: Instant::now(),
            broken: None,
            bye: false,
        }
    }

    /// Runs until this side is no longer needed.
    pub fn run(mut self) {
        while self.target.state != State::Ended {
            if self.turn().is_err() {
                return;
            }
        }
        let _ = self.machine.say(Said::Over);
    }

    /// Ends at once. Contains the reason.
    pub(crate) fn fail(self, why: String) {
        let _ = (self.machine.say(Said::Gone(why)), self.machine.say(Said::Over));
    }

    fn turn(&mut self) -> Result<(), Orphaned> {
        let Some(mut event) = self.next()? else { return Ok(()) };
        if let Event::Said(Message::Again { .. }) = event {
            // What has arrived of the attempt that was given up.
            self.sections.clear();
            self.lacking.clear();
            self.comparing = None;
            self.machine.say(Said::Uncommitted(false))?;
        }
        if let Event::Said(Message::Bye { typed }) = &mut event
            && self.target.state == State::Running
            && !std::mem::replace(&mut self.bye, true)
        {
            self.machine.say(Said::Typed(std::mem::take(typed)))?;
        }
        for action in self.target.step(event) {
            self.perform(action)?;
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Event>, Orphaned> {
        if !self.pending.is_empty() {
            return Ok(Some(self.pending.remove(0)));
        }
        if let Some(told) = self.machine.heard()? {
            return Ok(self.event(told));
        }
        if let Some(event) = self.fetched()? {
            return Ok(Some(event));
        }
        self.accept();
        if let Some(event) = self.lanes_are_cut().or_else(|| self.heard()) {
            return Ok(Some(event));
        }
        if let Some(event) = self.stranger() {
            return Ok(Some(event));
        }
        if std::mem::take(&mut self.connected) {
            let only = self.listener.is_none() && self.session.is_none();
            self.connected = only && !self.strangers.is_empty();
            if only && !self.connected {
                return Ok(Some(Event::Cancel("its only connection has ended before a source spoke".into())));
            }
        }
        if self.link.is_some() && self.awaits_the_source() && self.heard.elapsed() > self.liveness {
            let why = format!("the source has been silent for {:?}", self.liveness);
            return Ok(Some(self.cut(why)));
        }
        self.wait();
        Ok(None)
    }

    /// Whether it is the source's turn. Once the guest runs here with all its memory, or is gone,
    /// no deadline applies.
    fn awaits_the_source(&self) -> bool {
        matches!(self.target.state, State::Listening | State::Welcomed | State::Receiving)
            || self.target.state == State::Running && self.target.lacks()
    }

    fn wait(&mut self) {
        let mut poll = Poll::default();
        let listener = self.listener.iter().filter(|_| self.accepts());
        listener.for_each(|listener| poll.readable(listener));
        let fetching = self.place.as_ref().and_then(|place| place.fetching.as_ref());
        fetching.iter().for_each(|fetching| poll.readable(fetching.descriptor()));
        poll.readable(&**self.machine.descriptor());
        // At a barrier, the first connection waits for the others.
        let first = self.link.iter().filter(|_| self.barrier.is_none());
        let links = first.chain(self.strangers.iter().map(|(link, _)| link));
        links.for_each(|link| poll.readable(link.descriptor()));
        if self.target.state == State::Receiving
            && let Some(place) = &self.place
        {
            poll.readable(place.lanes.descriptor());
        }
        let _ = poll.wait(Some(LOOK));
    }
}
