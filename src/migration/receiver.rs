//! The target's thread: it drives [`Target`], reads what comes, and writes pages into memory. What it needs done with the machine,
//! which belongs to the event loop's thread, it [demands](Demand) there.

pub mod lanes;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use self::lanes::Lanes;
use super::bits::Bits;
use super::fence::{Fence, Word};
use super::fetching::{self, Fetching, Following, Gate};
use super::landing::Landing;
use super::link::Link;
use super::message::{Message, Misfit, SessionId, Waited};
use super::pages::{Incoming, fresh};
use super::populating::Populating;
use super::share::MOST_CONNECTIONS;
use super::target::{Action, Event, State, Target};
use super::threads::{Mine, Orphaned};
use super::verify::{self, Comparison};
use super::wire::{Frame, MOST_MAPPED, Run};
use crate::control::{Disk, Fetched};
use crate::memory::{Backing, Memory, Slot};
use crate::payload::Section;
use crate::sys::mmap::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use crate::sys::poll::Poll;
use crate::sys::socket;
use crate::vm::vcpu::Throttle;

/// What the event loop's thread is to do.
#[derive(Debug)]
pub enum Demand {
    /// Compare this configuration with the host, and assemble the machine where it fits.
    Judge(Offer),
    /// Take the locks of its disks, which must be as they were.
    Claim(Vec<Disk>),
    /// Restore the state.
    Restore(Vec<Section>),
    /// Take locks, write what was held back, and run, where neither the fence nor the gate says that it is too late.
    Start(Option<Arc<Fence>>, Option<Arc<Gate>>),
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
}

impl Offer {
    /// One whose memory is still to be filled.
    pub fn new(config: Value) -> Self {
        Self { config, connections: 1, ram: None, postcopy: false }
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
    /// To [`Demand::Claim`]: they are not, and how.
    DiskChanged(String),
    /// It is done.
    Done,
    /// It cannot be done.
    Failed(String),
}

/// What comes from the event loop's thread.
#[derive(Debug)]
pub enum Told {
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
    /// For how long its guest has waited for pages.
    Waited(Waited),
    /// The source has understood, or needs nothing any more.
    Over,
}

/// Where it is the source's turn, its silence is looked at this often.
const LOOK: Duration = Duration::from_millis(100);

/// Connections that have not said yet what they are about.
const MOST_STRANGERS: usize = 8 + MOST_CONNECTIONS as usize;

/// The thread.
pub struct Receiving {
    target: Target,
    machine: Mine<Said, Told>,
    /// The connection that speaks for the source.
    link: Option<Link>,
    session: Option<SessionId>,
    fence: Option<Arc<Fence>>,
    /// RAM, if it has come as a descriptor; and whether it is the machine's.
    ram: Option<File>,
    handed: bool,
    strangers: Vec<(Link, Instant)>,
    place: Option<Place>,
    memory: Arc<Vec<Incoming>>,
    /// Set from the end of a pass until it has ended on every connection.
    barrier: Option<u32>,
    comparing: Option<Comparison>,
    /// Where sources connect, if they do.
    listener: Option<OwnedFd>,
    /// The connection for pages that somebody waits for, until it is handed on, and its number.
    faults: Option<Link>,
    faults_number: Option<u32>,
    /// What the source has said of what follows: a bit a page, of each region.
    lacking: Vec<Bits>,
    /// Memory of which some follows.
    landing: Option<Arc<Landing>>,
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
    pub fn new(machine: Mine<Said, Told>, liveness: Duration) -> Self {
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

    /// What the thread says that answers faults.
    fn fetched(&mut self) -> Result<Option<Event>, Orphaned> {
        let Some(fetching) = self.place.as_ref().and_then(|place| place.fetching.as_ref()) else {
            return Ok(None);
        };
        Ok(match fetching.heard() {
            Some(fetching::Said::Cut(why)) => {
                Some(self.cut(format!("the connection for pages that are wanted: {why}")))
            }
            Some(fetching::Said::Over(whole)) => {
                let fetching::Whole { fetched, waited, link } = *whole;
                self.faults = link;
                self.waited = waited.clone();
                // What still comes is there already, and nobody writes it over that.
                self.memory = Arc::default();
                self.machine.say(Said::Lacks(None))?;
                self.machine.say(Said::Waited(waited))?;
                self.machine.say(Said::Fetched(fetched))?;
                Some(Event::Whole)
            }
            _ => None,
        })
    }

    /// Lets in who connects.
    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let mut came = Vec::new();
        while self.strangers.len() + came.len() < MOST_STRANGERS
            && let Ok(socket) = socket::accept(listener)
        {
            came.push(socket);
        }
        for socket in came {
            self.event(Told::Connected(socket));
        }
    }

    fn event(&mut self, told: Told) -> Option<Event> {
        match told {
            Told::Done(_) => None,
            Told::Listen(listener) => {
                self.listener = Some(listener);
                None
            }
            Told::Force => Some(Event::Force),
            Told::Cancel(why) => Some(Event::Cancel(why)),
            Told::Connected(socket) => {
                if self.strangers.len() < MOST_STRANGERS
                    && let Ok(link) = Link::new(socket, self.session, PAGE_SIZE as u32)
                {
                    self.strangers.push((link, Instant::now()));
                }
                None
            }
        }
    }

    /// Whether a further connection is cut while pages come; whether they are at the end of a pass that has ended on the first.
    fn lanes_are_cut(&mut self) -> Option<Event> {
        if self.target.state != State::Receiving {
            return None;
        }
        let lanes = &mut self.place.as_mut()?.lanes;
        if lanes.have_moved() {
            self.heard = Instant::now();
        }
        match lanes.have_ended(self.barrier.unwrap_or(0)) {
            Ok(true) => self.barrier = None,
            Ok(false) => {}
            Err(why) => return Some(self.cut(why)),
        }
        None
    }

    /// The next message of the source; pages and state are taken on the way.
    fn heard(&mut self) -> Option<Event> {
        loop {
            if self.barrier.is_some() {
                return None;
            }
            let link = self.link.as_mut()?;
            let receiving = self.target.state == State::Receiving;
            let behind = self.target.state == State::Running && self.target.lacks();
            let ready = matches!(self.target.state, State::Ready { .. });
            let taken = match link.receive() {
                Ok(None) => return None,
                Ok(Some(Frame::Message(message))) => {
                    self.heard = Instant::now();
                    if let Message::PassEnd { pass, .. } = message {
                        self.barrier = Some(pass).filter(|_| receiving);
                    }
                    return Some(Event::Said(message));
                }
                Ok(Some(Frame::Run(run, data))) if receiving => match run.check(&self.regions) {
                    Ok(())
                        if self.handed
                            && self.place.as_ref().is_some_and(|place| place.is_ram(run.region)) =>
                    {
                        Err(format!("{run:?} came, which was handed over"))
                    }
                    Ok(()) if self.place.as_ref().is_some_and(|place| !place.lanes.first().holds(&run)) => {
                        Err(format!("{run:?} came, which is another connection's"))
                    }
                    Ok(()) => {
                        self.pages += u64::from(run.pages);
                        self.memory[run.region as usize].take(&run, data);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                // Nothing that is there is written over, whatever connection it comes on.
                Ok(Some(Frame::Run(run, data))) if behind && (run.region as usize) < self.memory.len() => {
                    run.check(&self.regions).map_err(|error| error.to_string()).map(|()| {
                        self.memory[run.region as usize].take(&run, data);
                    })
                }
                // All has been there when it came.
                Ok(Some(Frame::Run(..))) if self.landing.is_some() => Ok(()),
                Ok(Some(Frame::Missing(run, bits))) if receiving => match run.check(&self.regions) {
                    Ok(()) => {
                        if self.lacking.is_empty() {
                            self.lacking = self.regions.iter().map(|pages| Bits::new(*pages)).collect();
                        }
                        self.lacking[run.region as usize].add_at(run.first, &bits);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(Frame::Sums(run, sums))) if ready => match run.check(&self.regions) {
                    Ok(()) => {
                        let sums = sums.to_vec();
                        let mut comparison = self.comparison();
                        comparison.take(&run, &sums);
                        self.comparing = Some(comparison);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(Frame::Section(section))) if receiving => {
                    self.sections.push(Section {
                        name: section.name.to_owned(),
                        version: section.version,
                        body: section.body.to_vec(),
                    });
                    // More than any machine has: a peer that fills this process's memory.
                    let bytes: usize = self.sections.iter().map(|section| section.body.len()).sum();
                    if self.sections.len() > MOST_SECTIONS || bytes > MOST_STATE {
                        Err("the source sends more state than any machine has".to_owned())
                    } else {
                        Ok(())
                    }
                }
                Ok(Some(_)) => Err("the source sent pages or state out of turn".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            self.heard = Instant::now();
            if let Err(why) = taken {
                return Some(self.cut(why));
            }
        }
    }

    /// What has been compared so far of memory that stands still.
    fn comparison(&mut self) -> Comparison {
        self.comparing.take().unwrap_or_else(|| {
            let touched =
                |place: &Place| verify::touched(&place.ram, place.pagemap.as_deref(), place.memory.iter());
            Comparison::new(self.place.as_ref().map(touched).unwrap_or_default())
        })
    }

    fn cut(&mut self, why: String) -> Event {
        self.link = None;
        self.place.iter_mut().for_each(|place| place.lanes.cut());
        // The cut of one is the cut of all.
        self.place.iter().filter_map(|place| place.fetching.as_ref()).for_each(Fetching::cut);
        self.broken = Some(why);
        Event::Cut
    }

    /// The first message of somebody who has connected: a source that begins, or the one that was here and was cut off.
    fn stranger(&mut self) -> Option<Event> {
        let mut at = 0;
        while at < self.strangers.len() {
            let (link, since) = &mut self.strangers[at];
            let said = match link.receive() {
                Ok(None) if since.elapsed() < self.liveness => {
                    at += 1;
                    continue;
                }
                Ok(Some(Frame::Message(message))) => Some(message),
                _ => None,
            };
            let (mut link, _) = self.strangers.swap_remove(at);
            let first = matches!(said, Some(Message::Hello { .. })) && self.session.is_none();
            let again = self.session.is_some() && link.session() == self.session;
            let again = again && matches!(said, Some(Message::Query {} | Message::Abort { .. }));
            if let (Some(Message::Join { connection }), true) = (&said, self.session.is_some())
                && link.session() == self.session
                && Some(*connection) == self.faults_number
            {
                self.joined(link);
                continue;
            }
            if let (Some(Message::Join { connection }), true) = (&said, self.session.is_some())
                && link.session() == self.session
                && self.target.state == State::Receiving
                && let Some(place) = &mut self.place
            {
                // One that is none of its numbers, or whose number is taken, is closed.
                place.lanes.join(*connection, link, &self.memory, &self.regions);
                continue;
            }
            if let Some(message) = said.filter(|_| first || again) {
                self.session = link.session();
                if first {
                    // What is none is not shared, and WELCOME says so.
                    let mut came = link.take_descriptors().into_iter();
                    let fence = came.next().and_then(|file| Fence::new(file).ok());
                    self.ram = came.next().map(File::from);
                    self.target.fenced = fence.is_some();
                    self.fence = fence.map(Arc::new);
                }
                link.admit();
                self.link = Some(link);
                self.heard = Instant::now();
                if again {
                    self.pending.push(Event::Said(message));
                    return Some(Event::Linked);
                }
                return Some(Event::Said(message));
            }
        }
        None
    }

    /// The connection for pages that somebody waits for is there.
    fn joined(&mut self, mut link: Link) {
        link.admit();
        link.set_liveness(self.liveness);
        if link.say(&Message::Joined {}).is_err() {
            return;
        }
        match (&self.landing, self.place.as_ref().and_then(|place| place.fetching.as_ref())) {
            (Some(_), Some(fetching)) => fetching.link(link),
            _ => self.faults = Some(link),
        }
    }

    /// Begins to have faults answered: the pages that the source has named, and what shares a huge page with them, follow.
    fn begin_to_land(&mut self, pages: u64) -> Result<(), String> {
        let place = self.place.as_mut().ok_or("nothing has been assembled")?;
        let fetching = place.fetching.as_mut().ok_or("nobody has asked for that")?;
        let named: u64 = self.lacking.iter().map(Bits::count).sum();
        if named != pages {
            return Err(format!("the map names {named} pages, and the source {pages}"));
        }
        let page = place.ram.config.backing.page_size();
        let unit = page / PAGE_SIZE;
        let missing = Bits::new(place.ram.mapping.len() / page);
        for (at, bits) in self.lacking.iter().enumerate() {
            let slot = &place.memory[at];
            let mut from = 0;
            while let Some(run) = bits.first_run(from..slot.pages()) {
                from = run.end;
                if !Arc::ptr_eq(slot.mapping(), &place.ram.mapping) {
                    return Err("pages that are no RAM are said to follow".into());
                }
                let first = slot.offset() / PAGE_SIZE;
                missing.set((first + run.start) / unit..(first + run.end).div_ceil(unit));
            }
        }
        self.lacking.clear();
        let mut link = self.faults.take().ok_or("the connection for pages that are wanted is not there")?;
        link.set_liveness(self.liveness);
        // Locked, it could not be emptied.
        if place.ram.config.lock {
            place.ram.mapping.unlock().map_err(|error| format!("unlocking memory: {error}"))?;
        }
        place.ram.mapping.keep(true);
        let mut will_be = Vec::new();
        let mut from = 0;
        while let Some(run) = missing.first_run(from..place.ram.mapping.len() / page) {
            from = run.end;
            will_be.push(run.start * page..run.end * page);
        }
        // Whoever asks what of memory was ever touched, while some of it has not come yet, is told of that too.
        let _ = place.ram.shown.set(will_be);
        let uffd = fetching.take_uffd().ok_or("it has begun")?;
        let landing = Arc::new(Landing::new(uffd, place.ram.mapping.clone(), page, missing, fetching.wake()));
        let gate = Arc::new(Gate::new(self.fence.clone()));
        let vcpus = place.vcpus.threads();
        let (ram, own) = (place.ram.clone(), gate.clone());
        fetching.follow(Following { landing: landing.clone(), ram, link, gate: own, vcpus })?;
        let shared =
            matches!(place.ram.config.backing, Backing::SharedHugetlb(_) | Backing::Shmem | Backing::Memfd);
        landing.empty(shared)?;
        for (slot, memory) in place.memory.iter().zip(self.memory.iter()) {
            if Arc::ptr_eq(slot.mapping(), &place.ram.mapping) {
                memory.land(&landing);
            }
        }
        (self.landing, self.gate) = (Some(landing), Some(gate));
        Ok(())
    }

    /// Says which pages are missing.
    fn lack(&mut self) -> Result<(), super::link::Error> {
        let (Some(landing), Some(place), Some(link)) = (&self.landing, &self.place, &mut self.link) else {
            return Ok(());
        };
        let mut pages = 0;
        for (region, slot) in (0u32..).zip(place.ram.slots()) {
            let bits = Bits::new(slot.pages());
            let first = slot.offset() / PAGE_SIZE;
            let unit = landing.unit();
            let units = first / unit..(first + slot.pages()).div_ceil(unit);
            let mut from = units.start;
            while let Some(run) = landing.missing().first_run(from..units.end) {
                from = run.end;
                let (start, end) =
                    ((run.start * unit).max(first), (run.end * unit).min(first + slot.pages()));
                bits.set(start - first..end - first);
            }
            pages += bits.count();
            send_map(link, region, &bits, slot.pages())?;
        }
        link.say(&Message::Lacking { pages })
    }

    fn wait(&mut self) {
        let mut poll = Poll::default();
        self.listener.iter().for_each(|listener| poll.readable(std::os::fd::AsRawFd::as_raw_fd(listener)));
        let fetching = self.place.as_ref().and_then(|place| place.fetching.as_ref());
        fetching.iter().for_each(|fetching| poll.readable(fetching.descriptor()));
        poll.readable(self.machine.descriptor());
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

    fn demand(&mut self, demand: Demand) -> Result<Done, Orphaned> {
        self.machine.say(Said::Demand(demand))?;
        loop {
            match self.machine.wait()? {
                Told::Done(done) => return Ok(done),
                told => {
                    let event = self.event(told);
                    self.pending.extend(event);
                }
            }
        }
    }

    /// Has a machine like this one made.
    fn judge(
        &mut self,
        config: Value,
        connections: u32,
        handed: bool,
        postcopy: bool,
    ) -> Result<Done, Orphaned> {
        let ram = self.ram.take().filter(|_| handed);
        self.handed = ram.is_some();
        self.demand(Demand::Judge(Offer { config, connections, ram, postcopy }))
    }

    /// Waits until all memory is there that is to be. What is told meanwhile is kept for later.
    fn populated(&mut self) -> Result<Result<(), String>, Orphaned> {
        while let Some(populating) = self.place.as_ref().and_then(|place| place.populating.as_ref()) {
            match populating.is_done(LOOK) {
                Ok(false) => {}
                Ok(true) => self.place.iter_mut().for_each(|place| place.populating = None),
                Err(why) => return Ok(Err(why)),
            }
            while let Some(told) = self.machine.heard()? {
                let event = self.event(told);
                self.pending.extend(event);
            }
        }
        Ok(Ok(()))
    }

    fn perform(&mut self, action: Action) -> Result<(), Orphaned> {
        match action {
            Action::Send(message) => {
                if let Message::Ready { .. } = message {
                    self.machine.say(Said::Uncommitted(true))?;
                }
                if let Some(link) = &mut self.link
                    && let Err(error) = link.say(&message)
                {
                    let event = self.cut(error.to_string());
                    self.pending.push(event);
                }
            }
            Action::Judge { handed: true, connections, postcopy, .. }
                if self.ram.is_none() || connections != 1 || postcopy =>
            {
                self.pending.push(Event::Judged(vec![not_handed()]));
            }
            Action::Judge { config, connections, handed, postcopy } => {
                match self.judge(config, connections, handed, postcopy)? {
                    Done::Fits(place) => {
                        self.faults_number = postcopy.then_some(connections);
                        self.regions = place.memory.iter().map(Slot::pages).collect();
                        let fresh = fresh(&place.memory);
                        let slots = place.memory.iter().cloned().zip(fresh);
                        self.memory =
                            Arc::new(slots.map(|(slot, fresh)| Incoming::new(slot, fresh)).collect());
                        // Their time begins now: they had to wait for the judgement.
                        self.strangers.iter_mut().for_each(|(_, since)| *since = Instant::now());
                        self.place = Some(*place);
                        // The guest is paused as soon as it fits: what takes long comes before.
                        let populated = if handed { self.populated()? } else { Ok(()) };
                        self.pending.push(match populated {
                            Ok(()) => Event::Judged(Vec::new()),
                            Err(why) => Event::Failed(why),
                        });
                    }
                    Done::Misfits(misfits) => self.pending.push(Event::Judged(misfits)),
                    Done::Failed(why) => self.pending.push(Event::Failed(why)),
                    Done::DiskChanged(_) | Done::Done => {
                        self.pending.push(Event::Failed("nobody judged it".into()));
                    }
                }
            }
            Action::Restore { pages, sections, lacking } => {
                let state = std::mem::take(&mut self.sections);
                let came = self.pages + self.place.as_ref().map_or(0, |place| place.lanes.pages());
                let event = if pages != came || sections as usize != state.len() {
                    Event::Failed(format!(
                        "{} pages and {} parts of the state came, and the source sent {pages} and {sections}",
                        came,
                        state.len()
                    ))
                } else if let Err(why) = self.populated()? {
                    Event::Failed(why)
                } else if let Err(why) = lacking.map_or(Ok(()), |pages| self.begin_to_land(pages)) {
                    Event::Failed(why)
                } else {
                    match self.demand(Demand::Restore(state))? {
                        Done::Failed(why) => Event::Failed(why),
                        _ => Event::Restored,
                    }
                };
                self.pending.push(event);
            }
            Action::Compare { attempt, pages } => {
                let mut comparison = self.comparison();
                comparison.finish();
                let Comparison { wrong, first, .. } = comparison;
                let event = if comparison.pages == pages {
                    Event::Compared(Message::Compared { attempt, pages, wrong, first })
                } else {
                    self.cut(format!("sums of {} pages came, and the source sent {pages}", comparison.pages))
                };
                self.pending.push(event);
            }
            Action::Start => {
                let event = match self.demand(Demand::Start(self.fence.clone(), self.gate.clone()))? {
                    Done::Failed(why) => Event::NotStarted(why),
                    _ => Event::Started,
                };
                if event == Event::Started && self.target.lacks() {
                    self.heard = Instant::now();
                    self.machine.say(Said::Lacks(Some(false)))?;
                }
                self.pending.push(event);
            }
            Action::Lack => {
                self.machine.say(Said::Lacks(Some(self.link.is_none())))?;
                self.heard = Instant::now();
                if let Err(error) = self.lack() {
                    let event = self.cut(error.to_string());
                    self.pending.push(event);
                }
            }
            Action::Complete => {
                let waited = self.waited.clone();
                if let Some(link) = &mut self.link
                    && let Err(error) = link.say(&Message::Complete { waited })
                {
                    let event = self.cut(error.to_string());
                    self.pending.push(event);
                }
            }
            Action::Sever => {
                let left =
                    self.landing.as_ref().map_or(0, |landing| landing.left() * landing.unit() * PAGE_SIZE);
                let why = self.broken.take().unwrap_or_default();
                tracing::warn!(
                    "the link was cut ({why}), and {} of this guest's memory is at the source alone: who wants that waits until the migration \
                     is recovered there; without the source it cannot go on",
                    crate::memory::short_size(left)
                );
                self.machine.say(Said::Lacks(Some(true)))?;
            }
            Action::Settle => {
                let word = self.fence.as_ref().map(|fence| fence.step(Word::Open, Word::Withdrawn));
                self.pending.extend(word.map(Event::Fenced));
            }
            Action::Withdraw => {
                if let Some(fence) = &self.fence {
                    fence.step(Word::Open, Word::Withdrawn);
                    fence.step(Word::Committed, Word::Withdrawn);
                }
            }
            Action::Free => {
                self.memory = Arc::default();
                (self.place, self.comparing, self.landing, self.faults) = (None, None, None, None);
                self.demand(Demand::Free)?;
            }
            Action::Report(why) => {
                let why = match self.broken.take() {
                    Some(broken) => format!("{why}: {broken}"),
                    None => why,
                };
                self.machine.say(Said::Gone(why))?;
            }
        }
        Ok(())
    }
}

/// Sends a map of `pages` pages, where any is missing.
pub(super) fn send_map(
    link: &mut Link,
    region: u32,
    bits: &Bits,
    pages: u64,
) -> Result<(), super::link::Error> {
    let words = bits.words();
    for (at, words) in (0..).step_by(MOST_MAPPED as usize).zip(words.chunks(MOST_MAPPED as usize / 64)) {
        if words.iter().all(|word| *word == 0) {
            continue;
        }
        let run = Run { region, pass: 1, first: at, pages: (pages - at).min(MOST_MAPPED.into()) as u32 };
        let frame = link.encoder().missing(&run, words);
        link.send(&frame)?;
    }
    Ok(())
}

/// Memory that should have come, and has not.
fn not_handed() -> Misfit {
    Misfit {
        what: "memory".into(),
        source: "handed over as a descriptor, over one connection".into(),
        target: "not come".into(),
        remedy: "connect the two by a unix socket with nothing in between, or have it copied".into(),
    }
}

/// The most sections, and the most bytes in them: a PC of 255 vCPUs has some 300, of 40 KiB each.
const MOST_SECTIONS: usize = 4096;
const MOST_STATE: usize = 256 << 20;
