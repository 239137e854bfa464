//! The further connections of an incoming migration. Each has a thread that writes arriving pages
//! into memory. The migration's thread has the first connection. It lets the others join, and at
//! the end of each pass it waits until the pass has ended on all of them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_sys_util::eventfd::EventFd;

use crate::link::Link;
use crate::message::Message;
use crate::pages::Incoming;
use crate::share::{MAX_CONNECTIONS, Share};
use crate::threads::{self, MachineEnd, Mine};
use crate::wire::Frame;
use rustix::net::{Shutdown, shutdown};
use vellum_sys::poll::Poll;

/// How many passes a connection may be ahead of the first. A fast source with few pages to send can
/// be far ahead.
const MAX_AHEAD: usize = 1 << 16;

/// A connection that has joined.
#[derive(Debug)]
struct Joined {
    link: Link,
    share: Share,
    memory: Arc<Vec<Incoming>>,
    regions: Arc<[u64]>,
    frames: Arc<AtomicU64>,
}

/// A message of a thread.
#[derive(Debug)]
enum News {
    /// This pass has ended on the connection. `pages` counts all pages so far.
    PassEnded { pass: u32, pages: u64 },
    /// The connection cannot be used any longer.
    Broken(String),
}

/// One connection's thread, before it is started. It waits until its connection joins.
#[derive(Debug)]
pub struct Lane(Mine<News, Joined>);

/// The migration thread's handle on one connection.
#[derive(Debug)]
struct Seat {
    thread: MachineEnd<News, Joined>,
    /// The connection, once it has joined.
    socket: Option<OwnedFd>,
    /// The last pass that has ended on the first connection too, and the number of pages by then.
    ended: (u32, u64),
    /// Passes that have ended here but not on the first connection, with the number of pages by
    /// then.
    ahead: VecDeque<(u32, u64)>,
}

/// The migration thread's handle on the further connections.
#[derive(Debug)]
pub struct Lanes {
    seats: Vec<Seat>,
    wake: Arc<EventFd>,
    /// How many frames have arrived on them. `known` is the count at the last check.
    frames: Arc<AtomicU64>,
    known: u64,
}

impl Lanes {
    /// Seats for a migration over `connections` connections, and a thread to start for each but the
    /// first.
    ///
    /// # Errors
    /// There are more connections than a migration may have, or no descriptor is left.
    pub fn new(connections: u32) -> Result<(Self, Vec<Lane>), String> {
        if !(1..=MAX_CONNECTIONS).contains(&connections) {
            return Err(format!("{connections} connections, where 1 to {MAX_CONNECTIONS} are possible"));
        }
        let host = |error: std::io::Error| format!("the host refuses it: {error}");
        let wake = threads::event().map_err(host)?;
        let (mut seats, mut lanes) = (Vec::new(), Vec::new());
        for _ in 1..connections {
            let (mine, thread) = threads::pair(wake.clone()).map_err(host)?;
            seats.push(Seat { thread, socket: None, ended: (0, 0), ahead: VecDeque::new() });
            lanes.push(Lane(mine));
        }
        Ok((Self { seats, wake, frames: Arc::default(), known: 0 }, lanes))
    }

    /// The share of the first connection.
    pub fn first(&self) -> Share {
        Share::new(0, self.seats.len() as u32 + 1)
    }

    /// Readable when a thread has sent a message.
    pub fn descriptor(&self) -> &EventFd {
        &self.wake
    }

    /// Lets a connection join as number `connection`. Returns false if that number is unknown or
    /// taken.
    pub fn join(
        &mut self,
        connection: u32,
        mut link: Link,
        memory: &Arc<Vec<Incoming>>,
        regions: &Arc<[u64]>,
    ) -> bool {
        let of = self.seats.len() as u32 + 1;
        let Some(seat) = connection.checked_sub(1).and_then(|index| self.seats.get_mut(index as usize))
        else {
            return false;
        };
        let Ok(socket) = link.duplicate() else { return false };
        if seat.socket.is_some() {
            return false;
        }
        link.admit();
        seat.socket = Some(socket);
        let (memory, regions, frames) = (memory.clone(), regions.clone(), self.frames.clone());
        seat.thread.tell(Joined { link, share: Share::new(connection, of), memory, regions, frames });
        true
    }

    /// Whether this pass has ended on all of them. An error if it never will.
    pub(crate) fn have_ended(&mut self, pass: u32) -> Result<bool, String> {
        let _ = self.wake.read();
        for (number, seat) in (1..).zip(&mut self.seats) {
            while let Some(news) = seat.thread.heard() {
                match news {
                    News::PassEnded { .. } if seat.ahead.len() == MAX_AHEAD => {
                        return Err(format!("connection {number}: {MAX_AHEAD} passes ahead of the first"));
                    }
                    News::PassEnded { pass, pages } => seat.ahead.push_back((pass, pages)),
                    News::Broken(why) => return Err(format!("connection {number}: {why}")),
                }
            }
            // Not beyond this pass: the source counts the pages that it has sent by its end.
            while seat.ended.0 < pass
                && let Some(ended) = seat.ahead.pop_front()
            {
                seat.ended = ended;
            }
        }
        Ok(self.seats.iter().all(|seat| seat.ended.0 >= pass))
    }

    /// Whether anything has arrived on them since the last call.
    pub(crate) fn have_moved(&mut self) -> bool {
        let frames = self.frames.load(Ordering::Relaxed);
        std::mem::replace(&mut self.known, frames) != frames
    }

    /// Pages that have arrived on them by the end of the last pass that has ended on all
    /// connections.
    pub fn pages(&self) -> u64 {
        self.seats.iter().map(|seat| seat.ended.1).sum()
    }
}

impl Lanes {
    /// Shuts the connections down.
    pub fn cut(&mut self) {
        for socket in self.seats.iter().filter_map(|seat| seat.socket.as_ref()) {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Lane {
    /// Waits until its connection joins, and runs until the connection is gone.
    pub fn run(self) {
        let Ok(mut joined) = self.0.wait() else { return };
        if let Err(error) = joined.link.say(&Message::Joined {}) {
            let _ = self.0.say(News::Broken(error.to_string()));
            return;
        }
        let mut pages = 0;
        let why = loop {
            match joined.take(&mut pages) {
                Ok(Some(pass)) => {
                    if self.0.say(News::PassEnded { pass, pages }).is_err() {
                        return;
                    }
                }
                Ok(None) => {
                    let mut poll = Poll::default();
                    poll.readable(joined.link.descriptor());
                    let _ = poll.wait(None);
                }
                Err(why) => break why,
            }
        };
        let _ = self.0.say(News::Broken(why));
    }
}

impl Joined {
    /// Takes arriving frames up to the end of a pass, and returns its number. `None` if more must
    /// arrive first.
    fn take(&mut self, pages: &mut u64) -> Result<Option<u32>, String> {
        loop {
            match self.link.receive().map_err(|error| error.to_string())? {
                None => return Ok(None),
                Some(Frame::Run(run, data)) => {
                    run.check(&self.regions).map_err(|error| error.to_string())?;
                    if !self.share.holds(&run) {
                        return Err(format!("{run:?} came, which is another connection's"));
                    }
                    self.memory[run.region as usize].take(&run, data);
                    *pages += u64::from(run.pages);
                    self.frames.fetch_add(1, Ordering::Relaxed);
                }
                Some(Frame::Message(Message::PassEnd { pass, .. })) => return Ok(Some(pass)),
                Some(_) => return Err("the source sent more than pages".into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After an overrun, the source sends its next pass while the end of the previous one is still
    /// being checked.
    #[test]
    fn pages_are_counted_up_to_the_pass_that_is_asked_for() {
        let (mut lanes, threads) = Lanes::new(3).unwrap();
        let say =
            |lane: usize, pass, pages| assert!(threads[lane].0.say(News::PassEnded { pass, pages }).is_ok());
        say(0, 1, 10);
        say(0, 2, 25);
        say(0, 2, 25);
        assert_eq!(lanes.have_ended(1), Ok(false));
        say(1, 1, 7);
        assert_eq!((lanes.have_ended(1), lanes.pages()), (Ok(true), 17));
        assert_eq!(lanes.have_ended(2), Ok(false));
        // There was no time for the end of the second pass.
        say(1, 3, 9);
        assert_eq!((lanes.have_ended(2), lanes.pages()), (Ok(true), 34));
        say(0, 3, 26);
        assert_eq!((lanes.have_ended(3), lanes.pages()), (Ok(true), 35));
    }
}
