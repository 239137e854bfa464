//! The source's thread: it drives [`Source`], tracks dirty pages, and sends. The machine belongs to
//! the event loop's thread, which receives [demands](Demand) for whatever must be done with it.
//!
//! This file receives events. `performing` executes the resulting actions, [`passes`] has the
//! passes over memory, and [`pending`](super::pending) knows which pages are still to be sent.

mod handing;
mod lanes;
mod passes;
mod performing;
mod postcopy;
mod serving;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

pub use self::lanes::Lane;
use self::lanes::{Common, Lanes};
use self::passes::Pass;
pub use self::serving::Server;
use self::serving::Serving;
use super::bits::Bits;
use super::commit_flag::{CommitFlag, Ownership as Decided};
use super::events::{Demand, Done, Moving, Options, Progress, Said, SenderCommand, SenderEvent};
use super::link::{self, GiveUp, Link};
use super::message::{Message, OLDEST, SessionId, VERSION};
use super::pages::Block;
use super::pending::PendingPages;
use super::plan::Plan;
use super::share::Share;
use super::source::{Event, Source, State};
use super::threads::{Mine, Orphaned};
use super::verify::Sums;
use super::wire::Frame;
use vellum_control::{Left, Phase, Waited};
use vellum_kvm::memory::Memory;
use vellum_kvm::vm::vcpu::Throttle;
use vellum_sys::clock::{self, micros};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::Pagemap;
use vellum_sys::poll::Poll;

/// The thread.
pub(crate) struct Sending {
    source: Source,
    options: Options,
    describe: Value,
    link: Option<Link>,
    session: SessionId,
    give_up: GiveUp,
    fence: Option<CommitFlag>,
    machine: Mine<Said, SenderCommand>,
    common: Arc<Common>,
    /// The further connections. `share` is the first connection's share of the pages.
    lanes: Lanes,
    share: Share,
    /// Whether further connections are still joining. `None` before they begin.
    joining: Option<bool>,
    block: Block,
    /// Bytes that compression has saved on the first connection.
    spared: u64,
    pass: Option<Pass>,
    /// The connection for faulting pages, until it joins. `serving` is the thread that sends them.
    faults: Option<OwnedFd>,
    serving: Option<Serving>,
    /// The pages that the target has reported missing, one bitmap per memslot.
    lacking: Vec<Bits>,
    /// Whether the current pass sends these pages.
    streaming: bool,
    waited: Option<Waited>,
    /// The attempt whose memory is being compared, and the checksums still to be sent.
    comparing: Option<(u32, Sums)>,
    /// How many pages both sides have found equal. `to_compare` is how many were to be compared.
    compared: Option<u64>,
    to_compare: u64,
    /// The figures for the final report.
    left: Left,
    /// How long collections have taken since the last pass began.
    harvest: Duration,
    passes: u32,
    pages: u64,
    sent_before: u64,
    ram: Memory,
    pagemap: Option<Arc<Pagemap>>,
    plan: Plan,
    throttle: Throttle,
    disks: Vec<vellum_machine::Disk>,
    /// When the guest was last throttled.
    napped: Instant,
    began: Instant,
    /// When the guest was paused for the final pass.
    paused: Option<Instant>,
    /// Since when an answer of the target is awaited.
    waits: Option<Instant>,
    /// Why the link broke, for the report of a cut. `unserved` says why the connection for faulting
    /// pages ended, if it ended first.
    broken: Option<String>,
    unserved: Option<String>,
    pending: Vec<Event>,
    told_at: Instant,
}

/// A throttled guest loses its share of time once per period.
const PERIOD: Duration = Duration::from_millis(10);

/// How often progress is reported to the operator.
const TELLING: Duration = Duration::from_millis(200);

impl Sending {
    /// A migration of `what` to the target over `sockets`. Each connection but the first needs a
    /// thread.
    ///
    /// # Errors
    /// A connection is not a stream socket.
    ///
    /// # Panics
    /// There is no connection.
    pub fn new(
        mut sockets: Vec<OwnedFd>,
        fence: Option<CommitFlag>,
        session: SessionId,
        options: Options,
        what: Moving,
        machine: Mine<Said, SenderCommand>,
        give_up: GiveUp,
    ) -> Result<(Self, Vec<Lane>, Option<Server>), link::Error> {
        let faults = options.postcopies.then(|| sockets.pop()).flatten();
        let Moving { describe, memory, ram, pagemap, throttle, disks } = what;
        let further = sockets.split_off(1);
        let socket = sockets.remove(0);
        let connections = further.len() as u32 + 1;
        let cap = options.bandwidth.map(|all| all / u64::from(connections));
        let common = Arc::new(Common::new(PendingPages::new(memory), cap, options.compress));
        let (lanes, threads) = Lanes::new(further, session, common.clone(), options.liveness)?;
        let serving = faults.as_ref().map(|_| Serving::new(connections, common.clone(), options.liveness));
        let (serving, server) = serving.transpose()?.unzip();
        let now = Instant::now();
        let mut sending = Self {
            source: Source::new()
                .verifying(options.verify)
                .compressing(options.compress)
                .handing_over(options.hands_over)
                .postcopying(options.postcopies)
                .fenced(fence.is_some()),
            describe,
            link: None,
            session,
            give_up,
            fence,
            machine,
            common,
            lanes,
            share: Share::new(0, connections),
            joining: None,
            block: Block::new().packing(options.compress),
            spared: 0,
            pass: None,
            faults,
            serving,
            lacking: Vec::new(),
            streaming: false,
            waited: None,
            comparing: None,
            compared: None,
            to_compare: 0,
            left: Left { began: micros(clock::monotonic()), ..Left::default() },
            harvest: Duration::ZERO,
            passes: 0,
            pages: 0,
            sent_before: 0,
            ram,
            pagemap,
            plan: Plan::new(options.downtime, options.timeout, cap).throttling(options.throttling),
            throttle,
            disks,
            napped: now,
            began: now,
            paused: None,
            waits: Some(now),
            broken: None,
            unserved: None,
            pending: Vec::new(),
            told_at: now,
            options,
        };
        sending.link = Some(sending.linked(socket)?);
        Ok((sending, threads, server))
    }

    fn linked(&self, socket: OwnedFd) -> Result<Link, link::Error> {
        let mut link = Link::new(socket, Some(self.session), PAGE_SIZE as u32)?;
        link.set_liveness(self.options.liveness);
        link.set_give_up(self.give_up.clone(), self.machine.descriptor().clone());
        Ok(link)
    }

    /// Runs until the guest has moved or stays, or the event loop's thread is gone.
    pub fn run(mut self) {
        clock::wait_exactly();
        let hello = Message::Hello { versions: [OLDEST, VERSION] };
        let memory = self.handed_over();
        match (&mut self.link, &self.fence) {
            (Some(link), Some(fence)) => {
                let descriptors =
                    [fence.descriptor()].into_iter().chain(memory.as_ref().map(|file| file.as_fd()));
                if let Err(error) = link.say_with(&hello, &descriptors.collect::<Vec<_>>()) {
                    let event = self.cut(error.to_string());
                    self.pending.push(event);
                }
            }
            _ => self.say(&hello),
        }
        while !matches!(self.source.state, State::Moved | State::Stayed) {
            if self.turn().is_err() {
                return;
            }
        }
    }

    fn turn(&mut self) -> Result<(), Orphaned> {
        if let Some(event) = self.next()? {
            let before = self.source.state.clone();
            let actions = self.source.step(event);
            if self.source.state != before {
                // What was awaited has come. A message that changes nothing ends no deadline.
                self.waits = None;
            }
            for action in actions {
                self.perform(action)?;
            }
        }
        Ok(())
    }

    /// The next event, after at most one block of pages or a short wait.
    fn next(&mut self) -> Result<Option<Event>, Orphaned> {
        if !self.pending.is_empty() {
            return Ok(Some(self.pending.remove(0)));
        }
        if let Some(event) = self.next_event()? {
            return Ok(Some(event));
        }
        if let Some(event) = self.heard() {
            return Ok(Some(event));
        }
        if let Some(event) = self.late() {
            return Ok(Some(event));
        }
        if self.joining == Some(true) && self.source.state == State::Copying {
            let served = self.serving.as_mut().map_or(Ok(true), Serving::has_joined);
            match self.lanes.are_done().and_then(|done| Ok(done & served?)) {
                Ok(true) => {
                    self.joining = Some(false);
                    self.copy()?;
                }
                Ok(false) => self.wait(),
                Err(why) => return Ok(Some(self.cut(why))),
            }
            return Ok(None);
        }
        if let Some(event) = self.served() {
            return Ok(Some(event));
        }
        if self.pass.is_some() {
            if let Some(event) = self.go_on()? {
                return Ok(Some(event));
            }
            self.tell()?;
            return Ok(None);
        }
        if self.comparing.is_some() {
            return Ok(self.go_on_comparing());
        }
        self.wait();
        Ok(None)
    }

    /// The next command of the event loop's thread. Answers are skipped.
    fn next_event(&mut self) -> Result<Option<Event>, Orphaned> {
        while let Some(told) = self.machine.heard()? {
            if let Some(event) = self.event(told) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn event(&mut self, told: SenderCommand) -> Option<Event> {
        match told {
            SenderCommand::Done(_) | SenderCommand::Named | SenderCommand::Preserved => None,
            SenderCommand::Cancel(why) => Some(Event::Cancel(why)),
            SenderCommand::Force => Some(Event::Force),
            SenderCommand::Linked(socket) => {
                self.link = self.linked(socket).ok();
                self.link.is_some().then_some(Event::Linked)
            }
            SenderCommand::Recovered(socket, faults) => self.recovered(socket, faults),
            SenderCommand::Set { downtime, bandwidth } => {
                self.options.bandwidth = bandwidth.or(self.options.bandwidth);
                let cap = bandwidth.map(|all| all / u64::from(self.share.of()));
                self.plan.set(downtime, cap);
                if cap.is_some() {
                    self.lanes.set_cap(cap);
                }
                None
            }
        }
    }

    /// The next message of the target.
    fn heard(&mut self) -> Option<Event> {
        let heard = match self.link.as_mut()?.receive() {
            Ok(None) => return None,
            Ok(Some(Frame::Message(message))) => Ok(message),
            Ok(Some(Frame::Missing(run, bits))) if self.source.state == State::Serving => {
                return match self.lacks(&run, &bits) {
                    Ok(()) => None,
                    Err(why) => Some(self.cut(why)),
                };
            }
            Ok(Some(_)) => Err("the target sent pages or state".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        Some(match heard {
            Ok(message) => {
                if message == Message::ALIVE && self.source.state == State::Offering {
                    self.waits = Some(Instant::now());
                }
                if let Message::Compared { pages, wrong: 0, .. } = message
                    && self.source.state == State::Comparing
                {
                    if pages != self.to_compare {
                        return Some(Event::Cancel(format!(
                            "the target says that it has compared {pages} pages, which is not what it was sent"
                        )));
                    }
                    self.compared = Some(pages);
                    self.left.compared = micros(clock::monotonic());
                }
                if let Message::Complete { waited } = &message {
                    self.waited = Some(waited.clone());
                }
                if let Message::Lacking { pages } = message
                    && self.lacking.iter().map(Bits::count).sum::<u64>() != pages
                {
                    return Some(
                        self.cut(format!(
                            "the target said that it lacks {pages} pages, and did not say which"
                        )),
                    );
                }
                Event::Said(message)
            }
            Err(why) => self.cut(why),
        })
    }

    /// Drops the link, which cannot be used any longer.
    fn cut(&mut self, why: String) -> Event {
        if let Some(link) = self.link.take() {
            self.sent_before += link.sent;
        }
        self.lanes.cut();
        self.serving.iter_mut().for_each(Serving::cut);
        (self.broken, self.waits) = (Some(self.unserved.take().unwrap_or(why)), None);
        Event::Cut
    }

    /// The event of an expired deadline.
    fn late(&mut self) -> Option<Event> {
        let liveness = self.options.liveness;
        if self.waits.is_some_and(|since| since.elapsed() > liveness) && self.link.is_some() {
            return Some(self.cut(format!("the other side has been silent for {liveness:?}")));
        }
        if self.source.state == State::Finishing && self.until().is_some_and(|until| Instant::now() > until) {
            let paused = self.paused.take().map_or(Duration::ZERO, |since| since.elapsed());
            return Some(match self.plan.overran(paused, self.began.elapsed()) {
                Ok(()) => Event::Overrun,
                Err(why) => Event::Cancel(why),
            });
        }
        if self.source.state == State::Copying
            && let Some(why) = self.plan.is_over(self.began.elapsed())
        {
            return Some(Event::Cancel(why));
        }
        // Not before the first pass begins.
        let copying = self.source.state == State::Copying && self.pass.is_some();
        if copying && self.plan.is_to_follow(self.began.elapsed()) {
            return Some(match self.lanes.stop() {
                Ok(()) => Event::Ahead,
                Err(why) => self.cut(why),
            });
        }
        None
    }

    /// When the current final pass is given up.
    fn until(&self) -> Option<Instant> {
        // With postcopy, little is sent during the pause, and no limit applies.
        let paused = self.paused.filter(|_| !self.source.is_ahead())?;
        Some(paused + self.plan.most_downtime(self.began.elapsed())?)
    }

    /// Changes the commit flag, if there is one. Returns its value.
    fn move_flag(&self, from: Decided, to: Decided) -> Decided {
        self.fence.as_ref().map_or(Decided::Open, |fence| fence.step(from, to))
    }

    fn wait(&mut self) {
        // Deadlines are checked this often. Input ends the wait at once.
        self.wait_for(Duration::from_millis(20));
    }

    fn wait_for(&mut self, time: Duration) {
        let mut poll = Poll::default();
        poll.readable(&**self.machine.descriptor());
        if let Some(link) = &self.link {
            poll.readable(link.descriptor());
        }
        if let Some(serving) = self.serving.as_ref().filter(|_| self.hears_serving()) {
            poll.readable(serving.descriptor());
        }
        if matches!(self.source.state, State::Copying | State::Finishing | State::Serving) {
            poll.readable(self.lanes.descriptor());
        }
        let _ = poll.wait(Some(time));
    }

    fn tell(&mut self) -> Result<(), Orphaned> {
        if self.told_at.elapsed() < TELLING {
            return Ok(());
        }
        self.told_at = Instant::now();
        let progress = Progress {
            phase: match () {
                () if self.source.state == State::Serving => Phase::Postcopy,
                () if self.paused.is_some() => Phase::Final,
                () => Phase::Copying,
            },
            pass: self.passes,
            sent: self.sent(),
            spared: self.spared(),
            owed: self.common.owed.count(),
            measured: self.plan.last(),
            downtime: self.plan.expected_downtime(),
            total: self.plan.estimate().map(|estimate| estimate.total),
            taken: self.plan.taken(),
        };
        self.machine.say(Said::SenderEvent(SenderEvent::Progress(progress)))
    }
}
