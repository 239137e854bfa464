//! The further connections of a migration. Each has a thread that sends the owed pages of its
//! share, pass by pass. The migration's thread has the first connection. It starts each pass and
//! waits until every thread has sent its part.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::link::{self, Link};
use crate::message::{Message, SessionId};
use crate::pace::Pace;
use crate::pages::Block;
use crate::pending::{At, PendingPages};
use crate::share::Share;
use crate::threads::{self, MachineEnd, Mine, Orphaned};
use crate::wire::Frame;
use rustix::net::{Shutdown, shutdown};
use vellum_sys::clock;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::poll::Poll;
use vmm_sys_util::eventfd::EventFd;

/// The state that the threads of one migration share.
pub(super) struct Common {
    /// The pages still to be sent.
    pub owed: PendingPages,
    /// Bytes and pages that the further connections have sent.
    bytes: AtomicU64,
    pages: AtomicU64,
    /// Bytes that compression has saved on them. `compress` says whether pages are compressed.
    spared: AtomicU64,
    compress: bool,
    /// The cap of each further connection in bytes per second. 0 for no cap.
    cap: AtomicU64,
    /// Whether the current pass is given up.
    stop: AtomicBool,
}

impl Common {
    /// The shared state of a migration that owes `owed`. Each connection may send `cap` bytes per
    /// second.
    pub fn new(owed: PendingPages, cap: Option<u64>, compress: bool) -> Self {
        let [bytes, pages, spared] = [const { AtomicU64::new(0) }; 3];
        let (cap, stop) = (AtomicU64::new(cap.unwrap_or(0)), AtomicBool::new(false));
        Self { owed, bytes, pages, spared, compress, cap, stop }
    }
}

impl Common {
    /// Counts bytes and pages that were sent on request.
    pub fn served(&self, bytes: u64, pages: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }
}

/// An order to a thread.
#[derive(Clone, Copy)]
enum Order {
    /// Join the migration.
    Join,
    /// Send the owed pages, then PASS_END for pass `number`. At `until` the thread stops, and the
    /// rest stays owed. The cap does not apply to a `last` pass, because the guest is paused for
    /// it.
    Pass { number: u32, until: Option<Instant>, last: bool },
}

/// A message of a thread.
enum News {
    /// The thread has joined or has ended its part of a pass. `whole` is false if time ran out or
    /// the pass was stopped, so that the part is incomplete.
    Done { whole: bool },
    /// The connection cannot be used any longer.
    Broken(String),
}

/// One connection's thread, before it is started.
pub struct Lane {
    link: Link,
    share: Share,
    number: u32,
    common: Arc<Common>,
    liveness: Duration,
    mine: Mine<News, Order>,
}

/// The migration thread's handle on one further connection.
struct Further {
    thread: MachineEnd<News, Order>,
    socket: OwnedFd,
    /// How many orders its thread has not finished. A pass of missing pages may be ordered before
    /// the previous one has ended.
    unfinished: u32,
}

/// The migration thread's handle on the further connections.
pub(super) struct Lanes {
    common: Arc<Common>,
    lanes: Vec<Further>,
    /// Whether one of them did not complete its part.
    short: bool,
    wake: Arc<EventFd>,
}

impl Lanes {
    /// Further connections over `sockets`, and a thread to start for each.
    ///
    /// # Errors
    /// A socket is not a stream socket, or no descriptor is left.
    pub fn new(
        sockets: Vec<OwnedFd>,
        session: SessionId,
        common: Arc<Common>,
        liveness: Duration,
    ) -> Result<(Self, Vec<Lane>), link::Error> {
        let wake = threads::event()?;
        let of = sockets.len() as u32 + 1;
        let (mut lanes, mut started) = (Vec::new(), Vec::new());
        for (number, socket) in (1..).zip(sockets) {
            let (mine, thread) = threads::pair(wake.clone())?;
            lanes.push(Further { thread, socket: socket.try_clone()?, unfinished: 0 });
            let mut link = Link::new(socket, Some(session), PAGE_SIZE as u32)?;
            link.set_liveness(liveness);
            let share = Share::new(number, of);
            started.push(Lane { link, share, number, common: common.clone(), liveness, mine });
        }
        Ok((Self { common, lanes, short: false, wake }, started))
    }

    /// Whether there are no further connections.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Readable when a thread has sent a message.
    pub fn descriptor(&self) -> &EventFd {
        &self.wake
    }

    /// Bytes sent on them.
    pub fn bytes(&self) -> u64 {
        self.common.bytes.load(Ordering::Relaxed)
    }

    /// Bytes that compression has saved on them.
    pub fn spared(&self) -> u64 {
        self.common.spared.load(Ordering::Relaxed)
    }

    /// Pages sent on them.
    pub fn pages(&self) -> u64 {
        self.common.pages.load(Ordering::Relaxed)
    }

    /// Sets the cap of each in bytes per second.
    pub fn set_cap(&self, cap: Option<u64>) {
        self.common.cap.store(cap.unwrap_or(0), Ordering::Relaxed);
    }

    fn order(&mut self, order: Order) {
        self.common.stop.store(false, Ordering::Relaxed);
        self.short = false;
        for lane in &mut self.lanes {
            lane.unfinished += 1;
            lane.thread.tell(order);
        }
    }

    /// Orders all of them to join the migration.
    pub fn join(&mut self) {
        self.order(Order::Join);
    }

    /// Orders all of them to send their part of a pass. `last` says that the guest is paused for
    /// it.
    pub fn pass(&mut self, number: u32, until: Option<Instant>, last: bool) {
        self.order(Order::Pass { number, until, last });
    }

    /// Whether all have finished all orders. An error if one never will.
    pub fn are_done(&mut self) -> Result<bool, String> {
        let _ = self.wake.read();
        for (number, lane) in (1..).zip(&mut self.lanes) {
            while let Some(news) = lane.thread.heard() {
                match news {
                    News::Done { whole } => {
                        lane.unfinished = lane.unfinished.saturating_sub(1);
                        self.short |= !whole;
                    }
                    News::Broken(why) => {
                        lane.unfinished = 0;
                        return Err(format!("connection {number}: {why}"));
                    }
                }
            }
        }
        Ok(!self.are_busy())
    }

    fn are_busy(&self) -> bool {
        self.lanes.iter().any(|lane| lane.unfinished > 0)
    }

    /// Whether one did not complete its part.
    pub fn are_short(&self) -> bool {
        self.short
    }

    /// Stops the current pass and waits until every thread has stopped. This takes at most until
    /// the end of a frame, or of the pass's time.
    pub fn stop(&mut self) -> Result<(), String> {
        self.common.stop.store(true, Ordering::Relaxed);
        while !self.are_done()? {
            let mut poll = Poll::default();
            poll.readable(self.descriptor());
            let _ = poll.wait(Some(Duration::from_millis(100)));
        }
        Ok(())
    }

    /// Shuts the connections down and waits until every thread has stopped. Afterwards, no thread
    /// settles owed pages or waits for its peer.
    pub fn cut(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        for lane in &self.lanes {
            let _ = shutdown(&lane.socket, Shutdown::Both);
        }
        while self.are_busy() {
            let _ = self.are_done();
            if self.are_busy() {
                let mut poll = Poll::default();
                poll.readable(self.descriptor());
                let _ = poll.wait(Some(Duration::from_millis(100)));
            }
        }
        self.lanes.clear();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Lane {
    /// Reports that the thread cannot be started.
    pub fn fail(self, why: String) {
        let _ = self.mine.say(News::Broken(why));
    }

    /// Runs until the migration's thread or the connection is gone.
    pub fn run(mut self) {
        clock::wait_exactly();
        loop {
            let Ok(order) = self.mine.wait() else { return };
            let done = match order {
                Order::Join => self.join().map(|()| true),
                Order::Pass { number, until, last } => self.pass(number, until, last),
            };
            let news = done.map_or_else(News::Broken, |whole| News::Done { whole });
            let broken = matches!(news, News::Broken(_));
            let said: Result<(), Orphaned> = self.mine.say(news);
            if said.is_err() || broken {
                return;
            }
        }
    }

    fn join(&mut self) -> Result<(), String> {
        let say = |error: link::Error| error.to_string();
        self.link.say(&Message::Join { connection: self.number }).map_err(say)?;
        let since = Instant::now();
        loop {
            match self.link.receive().map_err(say)? {
                Some(Frame::Message(Message::Joined {})) => return Ok(()),
                Some(frame) => return Err(format!("the target answered {}", frame.name())),
                None if since.elapsed() > self.liveness => {
                    return Err(format!("the target has been silent for {:?}", self.liveness));
                }
                None => {
                    let mut poll = Poll::default();
                    poll.readable(self.link.descriptor());
                    let _ = poll.wait(Some(self.liveness.saturating_sub(since.elapsed())));
                }
            }
        }
    }

    /// Sends its part of a pass. Returns whether the kernel has taken all of it, including
    /// PASS_END.
    fn pass(&mut self, number: u32, until: Option<Instant>, last: bool) -> Result<bool, String> {
        let common = self.common.clone();
        let began = Instant::now();
        let (mut at, mut pace) = (At::default(), Pace::default());
        let mut block = Block::new().packing(common.compress);
        let (mut pages, late) = (0, |now: Instant| until.is_some_and(|until| now >= until));
        self.link.set_until(until);
        let cap = || Some(common.cap.load(Ordering::Relaxed)).filter(|cap| *cap > 0 && !last);
        let share = self.share.in_pass(number);
        while let Some((outgoing, run)) = common.owed.next(&mut at, &share).map_err(|e| e.to_string())? {
            pace.set(cap());
            while let Some(wait) = pace.holds_back(began.elapsed()) {
                if common.stop.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                std::thread::sleep(wait.min(Duration::from_millis(20)));
                pace.set(cap());
            }
            if common.stop.load(Ordering::Relaxed) || late(Instant::now()) {
                return Ok(false);
            }
            common.owed.settle(outgoing, run.clone());
            let taken = block.fill(outgoing, run, number, self.link.encoder());
            let before = self.link.sent;
            self.link.send(block.bytes()).map_err(|error| error.to_string())?;
            let bytes = self.link.sent - before;
            common.bytes.fetch_add(bytes, Ordering::Relaxed);
            common.spared.fetch_add(taken.spared, Ordering::Relaxed);
            common.pages.fetch_add(taken.pages + taken.zeroes, Ordering::Relaxed);
            pages += taken.pages + taken.zeroes;
            pace.sent(bytes, began.elapsed());
        }
        self.link.say(&Message::PassEnd { pass: number, pages }).map_err(|error| error.to_string())?;
        Ok(self.link.is_sent())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::bits::Bits;
    use crate::link::LIVENESS;
    use vellum_kvm::memory::Slot;
    use vellum_sys::mmap::{Mapping, Source};

    const SESSION: SessionId = SessionId([3; 16]);

    /// `count` further connections of a migration that owes `owed` of 2048 pages and may send one
    /// byte per second, and the sockets of the target.
    fn further(count: usize, owed: &[u64]) -> (Lanes, Vec<Lane>, Vec<UnixStream>) {
        let mapping = Arc::new(Mapping::new(8 << 20, PAGE_SIZE, Source::Anonymous).unwrap());
        let pending = PendingPages::new(vec![Slot::new(0, 0, &mapping, 0..8 << 20).unwrap()]);
        let bits = Bits::new(2048);
        owed.iter().for_each(|page| bits.set(*page..*page + 1));
        pending.owe(0, &bits);
        let common = Arc::new(Common::new(pending, Some(1), false));
        let (here, there): (Vec<OwnedFd>, _) =
            (0..count).map(|_| UnixStream::pair().unwrap()).map(|(here, there)| (here.into(), there)).unzip();
        let (lanes, threads) = Lanes::new(here, SESSION, common, LIVENESS).unwrap();
        (lanes, threads, there)
    }

    /// A forced last pass has no time limit. Its guest is paused all the same.
    #[test]
    fn a_paused_guest_does_not_wait_for_the_cap() {
        // The second chunk belongs to the further connection. The cap holds its second frame back.
        let (mut lanes, threads, _there) = further(1, &[512, 600]);
        threads.into_iter().for_each(|lane| drop(std::thread::spawn(|| lane.run())));
        lanes.pass(1, None, true);
        let mut poll = Poll::default();
        poll.readable(lanes.descriptor());
        assert!(poll.wait(Some(Duration::from_secs(60))).unwrap(), "the pass waits for the cap");
        assert_eq!((lanes.are_done(), lanes.pages()), (Ok(true), 2));
    }

    /// The target may send its map of missing pages twice. The second pass is then ordered while
    /// the first is being sent.
    #[test]
    fn a_pass_has_not_ended_before_all_connections_have_ended_it() {
        let (mut lanes, threads, _there) = further(2, &[]);
        let done = |lane: usize| assert!(threads[lane].mine.say(News::Done { whole: true }).is_ok());
        lanes.pass(1, None, false);
        done(0);
        lanes.pass(2, None, false);
        done(0);
        assert_eq!(lanes.are_done(), Ok(false));
        done(1);
        assert_eq!(lanes.are_done(), Ok(false));
        done(1);
        assert_eq!(lanes.are_done(), Ok(true));
        // A connection that breaks finishes none of its orders, and nothing waits for them.
        lanes.pass(3, None, false);
        lanes.pass(4, None, false);
        assert!(threads[0].mine.say(News::Broken("it is cut".into())).is_ok());
        assert_eq!(lanes.are_done(), Err("connection 1: it is cut".into()));
        (0..2).for_each(|_| done(1));
        assert_eq!(lanes.are_done(), Ok(true));
    }
}
