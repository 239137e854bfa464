//! The connection on which a target asks for pages that somebody waits for, and its thread, which sends these at once: beside the thread
//! that sends the rest, and beside whatever cap there is on that. The guest stands still here by then.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lanes::Common;
use crate::link::{self, Link};
use crate::message::Message;
use crate::pages::Block;
use crate::threads::{self, MachineEnd, Mine};
use crate::wire::{Frame, MAX_PAGES};
use rustix::net::{Shutdown, shutdown};
use vellum_sys::poll::Poll;
use vmm_sys_util::eventfd::EventFd;

/// Bytes that are read at once: some requests, which many vCPUs may make in a moment.
const AT_ONCE: usize = 1 << 10;

/// What the thread says.
enum News {
    /// The connection is one of the migration's.
    Joined,
    /// It is of no use any more.
    Broken(String),
}

/// The thread, before it is started.
pub struct Server {
    number: u32,
    common: Arc<Common>,
    liveness: Duration,
    mine: Mine<News, Link>,
}

/// The thread, as that of the migration has it.
pub(super) struct Serving {
    thread: MachineEnd<News, Link>,
    wake: Arc<EventFd>,
    socket: Option<OwnedFd>,
    joined: bool,
}

impl Serving {
    /// For the connection of this number.
    pub fn new(number: u32, common: Arc<Common>, liveness: Duration) -> Result<(Self, Server), link::Error> {
        let wake = threads::event()?;
        let (mine, thread) = threads::pair(wake.clone())?;
        Ok((Self { thread, wake, socket: None, joined: false }, Server { number, common, liveness, mine }))
    }

    /// Has what is asked for on this connection sent from now on.
    pub fn serve(&mut self, link: Link) -> Result<(), link::Error> {
        // What the last one has said means nothing any more.
        while self.thread.heard().is_some() {}
        (self.socket, self.joined) = (Some(link.duplicate()?), false);
        self.thread.tell(link);
        Ok(())
    }

    /// Readable when there is news.
    pub fn descriptor(&self) -> &EventFd {
        &self.wake
    }

    /// Whether the connection is one of the migration's, or why it never will be.
    pub fn has_joined(&mut self) -> Result<bool, String> {
        let _ = self.wake.read();
        while let Some(news) = self.thread.heard() {
            match news {
                News::Joined => self.joined = true,
                News::Broken(_) if self.socket.is_none() => {}
                News::Broken(why) => return Err(format!("the connection for pages that are wanted: {why}")),
            }
        }
        Ok(self.joined)
    }

    /// Cuts the connection.
    pub fn cut(&mut self) {
        if let Some(socket) = self.socket.take() {
            let _ = shutdown(&socket, Shutdown::Both);
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Server {
    /// It cannot be started.
    pub fn fail(self, why: String) {
        let _ = self.mine.say(News::Broken(why));
    }

    /// Goes on until the migration's thread is gone.
    pub fn run(self) {
        while let Ok(link) = self.mine.wait() {
            let Err(why) = self.serve(link);
            if self.mine.say(News::Broken(why)).is_err() {
                return;
            }
        }
    }

    fn serve(&self, mut link: Link) -> Result<std::convert::Infallible, String> {
        let say = |error: link::Error| error.to_string();
        link.say(&Message::Join { connection: self.number }).map_err(say)?;
        let since = Instant::now();
        let mut joined = false;
        let mut block = Block::new();
        let regions: Vec<u64> = self.common.owed.slots().map(|slot| slot.pages()).collect();
        let mut came = false;
        loop {
            // What follows a frame may be here; after a part of one the rest has to come.
            if !came || !link.has_more() {
                let mut poll = Poll::default();
                poll.readable(link.descriptor());
                let _ = poll.wait(Some(self.liveness));
            }
            let frame = link.receive().map_err(say)?;
            came = frame.is_some();
            let run = match frame {
                Some(Frame::Message(Message::Joined {})) if !joined => {
                    joined = true;
                    link.admit();
                    link.read_ahead(AT_ONCE);
                    self.mine.say(News::Joined).map_err(|_| String::new())?;
                    continue;
                }
                Some(Frame::Wanted(run)) if joined => run,
                Some(frame) => return Err(format!("the target said {} on it", frame.name())),
                None if !joined && since.elapsed() > self.liveness => {
                    return Err(format!("the target has been silent for {:?}", self.liveness));
                }
                None => continue,
            };
            run.check(&regions).map_err(|error| error.to_string())?;
            let outgoing = self.common.owed.outgoing(run.region as usize);
            let (mut at, end) = (run.first, run.first + u64::from(run.pages));
            while at < end {
                let part = at..end.min(at + u64::from(MAX_PAGES));
                at = part.end;
                // The other connections need not send them any more.
                self.common.owed.settle(outgoing, part.clone());
                outgoing.tell(part.clone());
                let taken = block.fill(outgoing, part, 1, link.encoder());
                let before = link.sent;
                link.send(block.bytes()).map_err(say)?;
                self.common.served(link.sent - before, taken.pages + taken.zeroes);
            }
        }
    }
}
