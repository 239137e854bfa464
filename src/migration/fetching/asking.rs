//! Memory whose pages come from a source that has handed over its guest. Those that somebody waits for are asked for on a connection of
//! their own, ahead of the rest, which comes on the migration's own connections to other threads.
//!
//! When the connection is cut, whoever waits goes on waiting, and a vCPU that does cannot be taken out of the guest by older kernels
//! (before Linux 6.2): nothing here needs that it is. With the next connection everything that somebody waits for is asked for again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::{FetchCommand, Following, Said};
use crate::commit_flag::{CommitFlag, Ownership};
pub use crate::link::Link;
use crate::message::Waited;
use crate::postcopy_memory::PostcopyMemory;
use crate::wire::{Frame, Run};
use vellum_kvm::memory::{Memory, Slot};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::poll::Poll;

const LOOK: Duration = Duration::from_millis(100);

/// Whether the guest may run: decided once, by whoever comes first, the event loop's thread that lets it run or the one that cannot bring
/// a page which that waits for.
#[derive(Debug, Default)]
pub struct Gate {
    word: AtomicU8,
    /// The same between the two sides, where both are on one host.
    pub fence: Option<Arc<CommitFlag>>,
}

const OPEN: u8 = 0;
const RAN: u8 = 1;
const SHUT: u8 = 2;

impl Gate {
    /// One that is shared with the source as `fence`, where there is that.
    pub fn new(fence: Option<Arc<CommitFlag>>) -> Self {
        Self { word: AtomicU8::new(OPEN), fence }
    }

    /// Lets the guest run, where that has not been decided otherwise.
    pub fn runs(&self) -> bool {
        self.word.compare_exchange(OPEN, RAN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn has_run(&self) -> bool {
        self.word.load(Ordering::SeqCst) == RAN
    }

    /// Has it never run; whether that is so.
    fn shut(&self) -> bool {
        let shut = self.word.compare_exchange(OPEN, SHUT, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if shut && let Some(fence) = &self.fence {
            fence.step(Ownership::Open, Ownership::Withdrawn);
            fence.step(Ownership::Committed, Ownership::Withdrawn);
        }
        shut
    }
}

/// Bytes that are read at once from the source: a page of the usual size, and what its frame says of it.
const AT_ONCE: usize = PAGE_SIZE as usize + (1 << 10);

/// What comes next.
pub(super) enum Next {
    /// Something has come, which `faults` says may be a fault.
    More {
        faults: bool,
    },
    Whole,
    /// Nobody needs it any more.
    Forsaken,
}

/// The connection, and what is asked for on it.
pub(super) struct Asking {
    landing: Arc<PostcopyMemory>,
    ram: Memory,
    link: Option<Link>,
    gate: Arc<Gate>,
    vcpus: Vec<u32>,
    told: Receiver<FetchCommand>,
    wake: Arc<EventFd>,
    /// What is to be said of a link that broke while something was asked for.
    broken: Option<String>,
    /// Which of `wake` and the link may have something: what has nothing costs no call of the kernel.
    woken: bool,
    speaks: bool,
}

impl Asking {
    pub fn new(following: Following, told: Receiver<FetchCommand>, wake: Arc<EventFd>) -> Self {
        let Following { landing, ram, mut link, gate, vcpus } = following;
        link.read_ahead(AT_ONCE);
        let (link, broken) = (Some(link), None);
        Self { landing, ram, link, gate, vcpus, told, wake, broken, woken: true, speaks: true }
    }

    /// `thread` waits for a unit.
    pub fn supply(&mut self, unit: u64, thread: u32) -> Result<(), String> {
        let first = self.landing.waits(unit, thread);
        if self.landing.missing().first_run(unit..unit + 1).is_none() {
            return self.landing.zero(unit..unit + 1);
        }
        if first {
            self.ask(unit);
        }
        Ok(())
    }

    /// Asks for a unit: of as many memslots as it lies in.
    fn ask(&mut self, unit: u64) {
        let pages = unit * self.landing.unit()..(unit + 1) * self.landing.unit();
        let Some(link) = &mut self.link else { return };
        for (region, slot) in (0u32..).zip(self.ram.slots()) {
            let (start, end) =
                (pages.start.max(first_of(slot)), pages.end.min(first_of(slot) + slot.pages()));
            if start >= end {
                continue;
            }
            let run = Run { region, pass: 1, first: start - first_of(slot), pages: (end - start) as u32 };
            let frame = link.encoder().wanted(&run);
            if let Err(error) = link.send(&frame) {
                self.broken = Some(error.to_string());
                return;
            }
        }
    }

    /// Takes what comes, or waits for it.
    pub fn go_on(&mut self, say: &dyn Fn(Said)) -> Result<Next, String> {
        if self.landing.left() == 0 {
            return Ok(Next::Whole);
        }
        if self.woken {
            let _ = self.wake.read();
        }
        while self.woken {
            match self.told.try_recv() {
                Ok(FetchCommand::Link(mut link)) => {
                    link.read_ahead(AT_ONCE);
                    (self.link, self.broken, self.speaks) = (Some(*link), None, true);
                    self.landing.awaited().into_iter().for_each(|unit| self.ask(unit));
                }
                Ok(FetchCommand::Cut) => self.link = None,
                Ok(_) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(Next::Forsaken),
            }
        }
        if let Err(why) =
            self.hear()?.map_or(Ok(()), Err).and_then(|()| self.broken.take().map_or(Ok(()), Err))
        {
            self.link = None;
            say(Said::Cut(why));
        }
        if self.link.is_none()
            && !self.gate.has_run()
            && !self.landing.awaited().is_empty()
            && self.gate.shut()
        {
            // Whoever waits is the thread that would have to be told.
            return Err("the link to the source was cut before the guest ran here; it never will".into());
        }
        let (faults, link) = (self.landing.uffd().descriptor(), self.link.as_ref().map(Link::descriptor));
        let mut poll = Poll::default();
        poll.readable(faults);
        poll.readable(&*self.wake);
        link.iter().for_each(|link| poll.readable(*link));
        poll.wait(Some(LOOK)).map_err(|error| format!("poll: {error}"))?;
        self.woken = poll.is_ready(&*self.wake);
        self.speaks = link.is_some_and(|link| poll.is_ready(link));
        Ok(Next::More { faults: poll.is_ready(faults) })
    }

    /// Takes what has come; why nothing more will, where that is so.
    fn hear(&mut self) -> Result<Option<String>, String> {
        let Some(link) = &mut self.link else { return Ok(None) };
        while self.speaks || link.has_more() {
            self.speaks = false;
            match link.receive() {
                Ok(None) => return Ok(None),
                Ok(Some(Frame::Run(run, data))) => {
                    let Some(slot) = self.ram.slots().get(run.region as usize) else {
                        return Ok(Some(format!("{run:?} came, which is no RAM")));
                    };
                    if let Err(error) =
                        run.check(&[&vec![0; run.region as usize][..], &[slot.pages()]].concat())
                    {
                        return Ok(Some(error.to_string()));
                    }
                    let first = first_of(slot) + run.first;
                    self.landing.take(first..first + u64::from(run.pages), data)?;
                }
                Ok(Some(_)) => return Ok(Some("the source sent more than pages".into())),
                Err(error) => return Ok(Some(error.to_string())),
            }
        }
        Ok(None)
    }

    /// Nothing is missing any more: has the memory be like any other.
    pub fn finish(self) -> Result<(Waited, Option<Link>), String> {
        self.landing.unregister()?;
        let waited = self.landing.waited(&self.vcpus);
        self.ram.mapping.keep(false);
        if self.ram.config.lock {
            self.ram.mapping.lock(true).map_err(|error| format!("locking memory: {error}"))?;
        }
        if self.ram.config.prealloc
            && let Err(error) = self.ram.populate_here(|_| true)
        {
            return Err(format!("populating memory: {error}"));
        }
        Ok((waited, self.link))
    }
}

/// The first page of a memslot, counted over its mapping.
fn first_of(slot: &Slot) -> u64 {
    slot.offset() / PAGE_SIZE
}
