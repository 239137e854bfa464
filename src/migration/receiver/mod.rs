//! The target's thread: it drives [`Target`], reads what comes, and writes pages into memory. What it needs done with the machine,
//! which belongs to the event loop's thread, it [demands](Demand) there. What comes is in `hearing`, what is done about it in `performing`, and memory
//! that comes after its guest in `following`.

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

/// What the event loop's thread is to do.
#[derive(Debug)]
pub enum Demand {
    /// Compare this configuration with the host, and assemble the machine where it fits.
    Judge(Offer),
    /// Restore the state.
    Restore(Vec<Section>),
    /// Take locks, write what was held back, and run, where neither the fence nor the gate says that it is too late.
    Start(Option<Arc<CommitFlag>>, Option<Arc<Gate>>),
    /// Give everything back.
    Free,
}

/// A machine that is to come.
#[derive(Debug)]
pub struct Offer {
    /// What it is.
    pub config: Value,
    /// Over how many connections its pages come.
    pub connections: u32,
    /// Its RAM, where that was handed over.
    pub ram: Option<File>,
    /// Whether it may have to run before all of its pages have come.
    pub postcopy: bool,
    /// What its disks were, where nobody has them who gives them up later: their locks are taken, and they must be as they were.
    pub disks: Option<Vec<Disk>>,
}

impl Offer {
    /// One whose memory is still to be filled.
    pub fn new(config: Value) -> Self {
        Self { config, connections: 1, ram: None, postcopy: false, disks: None }
    }
}

/// Memory for what comes.
#[derive(Debug)]
pub struct Place {
    /// Its memslots.
    pub memory: Vec<Slot>,
    /// Its RAM.
    pub ram: Memory,
    /// Tells what of that was ever touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// The further connections, whose threads wait for them.
    pub lanes: Lanes,
    /// Where all of its memory is to be there: the thread that sees to that.
    pub populating: Option<Populating>,
    /// Where it comes as it is wanted: the thread that brings it.
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
    /// It fits, and its memory is here.
    Fits(Box<Place>),
    /// It does not.
    Misfits(Vec<Misfit>),
    /// It does, and its disks are not as they were: how they are.
    DiskChanged(String),
    /// It is done.
    Done,
    /// It cannot be done.
    Failed(String),
}

/// What comes from the event loop's thread.
#[derive(Debug)]
pub enum ReceiverCommand {
    /// The answer to the last demand.
    Done(Done),
    /// Somebody has connected.
    Connected(OwnedFd),
    /// Where sources connect: a socket that listens.
    Listen(OwnedFd),
    /// The operator runs it, whatever the source says.
    Force,
    /// The operator does not want it.
    Cancel(String),
}

/// What the thread says.
#[derive(Debug)]
pub enum Said {
    /// To be answered.
    Demand(Demand),
    /// Whether everything is here and paused, and waits for COMMIT.
    Uncommitted(bool),
    /// What was typed for the guest where it was before.
    Typed(Vec<u8>),
    /// It is over without a guest, and why.
    Gone(String),
    /// The same, where what came cannot be a machine here.
    Refused(String),
    /// The same, where its disks are not as they were.
    DiskChanged(String),
    /// All memory is there, which came as it was wanted.
    Fetched(Fetched),
    /// It lacks some of its memory, and whether it is cut off from what has that; or lacks nothing any more.
    Lacks(Option<bool>),
    /// The link was cut while it lacks some of its memory, and why.
    Severed(String),
    /// For how long its guest has waited for pages.
    Waited(Waited),
    /// The source has understood, or needs nothing any more.
    Over,
}

/// Where it is the source's turn, its silence is looked at this often.
const LOOK: Duration = Duration::from_millis(100);

/// Connections that have not said yet what they are about.
const MAX_STRANGERS: usize = 8 + MAX_CONNECTIONS as usize;

/// The thread.
pub struct Receiving {
    target: Target,
    machine: Mine<Said, ReceiverCommand>,
    /// The connection that speaks for the source.
    link: Option<Link>,
    session: Option<SessionId>,
    fence: Option<Arc<CommitFlag>>,
    /// RAM, if it has come as a descriptor; and whether it is the machine's.
    ram: Option<File>,
    handed: bool,
    strangers: Vec<(Link, Instant)>,
    place: Option<Place>,
    memory: Arc<Vec<Incoming>>,
    /// Set from the end of a pass until it has ended on every connection.
    barrier: Option<u32>,
    comparing: Option<Comparison>,
    /// Where sources connect, if they do; and whether one was connected already, which where nobody listens is the only one.
    listener: Option<OwnedFd>,
    connected: bool,
    /// The connection for pages that somebody waits for, until it is handed on, and its number.
    faults: Option<Link>,
    faults_number: Option<u32>,
    /// What the source has said of what follows: a bit a page, of each region.
    lacking: Vec<Bits>,
    /// Memory of which some follows.
    landing: Option<Arc<PostcopyMemory>>,
    gate: Option<Arc<Gate>>,
    waited: Waited,
    /// Pages of each region.
    regions: Arc<[u64]>,
    pages: u64,
    sections: Vec<Section>,
    pending: Vec<Event>,
    liveness: Duration,
    /// When the source was last heard of.
    heard: Instant,
    broken: Option<String>,
    /// The source has said BYE.
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
            faults: None,
            faults_number: None,
            lacking: Vec::new(),
            landing: None,
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

    /// Goes on until nobody needs this side any more.
    pub fn run(mut self) {
        while self.target.state != State::Ended {
            if self.turn().is_err() {
                return;
            }
        }
        let _ = self.machine.say(Said::Over);
    }

    fn turn(&mut self) -> Result<(), Orphaned> {
        let Some(mut event) = self.next()? else { return Ok(()) };
        if let Event::Said(Message::Again { .. }) = event {
            // What has come of the attempt that was given up.
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

    /// Whether it is the source's turn: a guest that is here, or gone, waits for nobody.
    fn awaits_the_source(&self) -> bool {
        matches!(self.target.state, State::Listening | State::Welcomed | State::Receiving)
            || self.target.state == State::Running && self.target.lacks()
    }

    fn wait(&mut self) {
        let mut poll = Poll::default();
        self.listener.iter().for_each(|listener| poll.readable(listener));
        let fetching = self.place.as_ref().and_then(|place| place.fetching.as_ref());
        fetching.iter().for_each(|fetching| poll.readable(fetching.descriptor()));
        poll.readable(&**self.machine.descriptor());
        // At a barrier the first connection has to wait for the others.
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
