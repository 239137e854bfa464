//! The connection for faulting pages, and its thread. The target requests pages on it, and the
//! thread sends them at once. It works beside the thread that sends the remaining pages and ignores
//! the cap on bandwidth. The guest is paused on this side.

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

/// Bytes that are read at once: several requests, because many vCPUs may fault at the same time.
const AT_ONCE: usize = 1 << 10;

/// A message of the thread.
enum News {
    /// The connection has joined the migration.
    Joined,
    /// The connection cannot be used any longer.
    Broken(String),
}

/// The thread, before it is started.
pub struct Server {
    number: u32,
    common: Arc<Common>,
    liveness: Duration,
    mine: Mine<(u32, News), (u32, Link)>,
}

/// The migration thread's handle on the thread.
pub(super) struct Serving {
    thread: MachineEnd<(u32, News), (u32, Link)>,
    wake: Arc<EventFd>,
    socket: Option<OwnedFd>,
    /// How many connections it has had. Messages about one have its number, and those about an
    /// earlier one are ignored, because they may arrive late.
    links: u32,
    joined: bool,
}

impl Serving {
    /// A thread for connection `number`.
    pub fn new(number: u32, common: Arc<Common>, liveness: Duration) -> Result<(Self, Server), link::Error> {
        let wake = threads::event()?;
        let (mine, thread) = threads::pair(wake.clone())?;
        Ok((
            Self { thread, wake, socket: None, links: 0, joined: false },
            Server { number, common, liveness, mine },
        ))
    }

    /// Serves requests on `link` from now on.
    pub fn serve(&mut self, link: Link) -> Result<(), link::Error> {
        (self.socket, self.joined) = (Some(link.duplicate()?), false);
        self.links += 1;
        self.thread.tell((self.links, link));
        Ok(())
    }

    /// Readable when there is a message.
    pub fn descriptor(&self) -> &EventFd {
        &self.wake
    }

    /// Whether the connection has joined the migration. An error if it never will.
    pub fn has_joined(&mut self) -> Result<bool, String> {
        let _ = self.wake.read();
        while let Some((about, news)) = self.thread.heard() {
            match news {
                _ if about != self.links => {}
                News::Joined => self.joined = true,
                News::Broken(_) if self.socket.is_none() => {}
                News::Broken(why) => return Err(format!("the connection for pages that are wanted: {why}")),
            }
        }
        Ok(self.joined)
    }

    /// Shuts the connection down.
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
    /// Reports that the thread cannot be started.
    pub fn fail(self, why: String) {
        let _ = self.mine.say((1, News::Broken(why)));
    }

    /// Runs until the migration's thread is gone.
    pub fn run(self) {
        while let Ok((about, link)) = self.mine.wait() {
            let Err(why) = self.serve(about, link);
            if self.mine.say((about, News::Broken(why))).is_err() {
                return;
            }
        }
    }

    fn serve(&self, about: u32, mut link: Link) -> Result<std::convert::Infallible, String> {
        let say = |error: link::Error| error.to_string();
        link.say(&Message::Join { connection: self.number }).map_err(say)?;
        let since = Instant::now();
        let mut joined = false;
        let mut block = Block::new();
        let regions: Vec<u64> = self.common.owed.slots().map(|slot| slot.pages()).collect();
        let mut came = false;
        loop {
            // The next frame may have been read already. After a partial frame the rest must arrive
            // first.
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
                    self.mine.say((about, News::Joined)).map_err(|_| String::new())?;
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
                // The other connections do not need to send them.
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::link::LIVENESS;
    use crate::pending::PendingPages;

    /// The thread reports the end of a lost connection after another one has replaced it.
    #[test]
    fn what_is_said_late_of_a_lost_connection_does_not_cut_the_next() {
        let common = Arc::new(Common::new(PendingPages::new(Vec::new()), None, false));
        let (mut serving, server) = Serving::new(1, common, LIVENESS).unwrap();
        let link = || Link::new(UnixStream::pair().unwrap().0.into(), None, 4096).unwrap();
        let broken = || News::Broken("it is cut".into());
        serving.serve(link()).unwrap();
        serving.cut();
        serving.serve(link()).unwrap();
        assert!(server.mine.say((1, broken())).is_ok());
        assert_eq!(serving.has_joined(), Ok(false));
        assert!(server.mine.say((2, News::Joined)).is_ok());
        assert_eq!(serving.has_joined(), Ok(true));
        assert!(server.mine.say((2, broken())).is_ok());
        assert!(serving.has_joined().is_err());
    }

    /// The thread may have failed before it is told of the first connection.
    #[test]
    fn a_thread_that_cannot_start_is_heard() {
        let common = Arc::new(Common::new(PendingPages::new(Vec::new()), None, false));
        let (mut serving, server) = Serving::new(1, common, LIVENESS).unwrap();
        server.fail("no sandbox".into());
        serving.serve(Link::new(UnixStream::pair().unwrap().0.into(), None, 4096).unwrap()).unwrap();
        assert!(serving.has_joined().is_err_and(|why| why.contains("no sandbox")));
    }
}
