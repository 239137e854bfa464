//! Memory that is fetched from a source after the hand-over. Faulting pages are requested on a
//! separate connection. The rest arrives on the migration's other connections, in other threads.
//!
//! If the connection drops, waiting threads keep waiting. Before Linux 6.2, a waiting vCPU cannot
//! be kicked out of the guest, so nothing here depends on that. On the next connection, all awaited
//! pages are requested again.

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

/// Whether the guest may run. It is decided once, by the first of two threads: the event loop's
/// thread that starts the guest, or the fetching thread that cannot provide a page which the former
/// waits for.
#[derive(Debug, Default)]
pub struct Gate {
    word: AtomicU8,
    /// The commit flag, which decides between the two sides if both are on one host.
    pub fence: Option<Arc<CommitFlag>>,
}

const OPEN: u8 = 0;
const RAN: u8 = 1;
const SHUT: u8 = 2;

impl Gate {
    /// A gate. `fence` is the commit flag that is shared with the source, if there is one.
    pub fn new(fence: Option<Arc<CommitFlag>>) -> Self {
        Self { word: AtomicU8::new(OPEN), fence }
    }

    /// Lets the guest run unless it was decided otherwise. Returns whether it may run.
    pub fn runs(&self) -> bool {
        self.word.compare_exchange(OPEN, RAN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn has_run(&self) -> bool {
        self.word.load(Ordering::SeqCst) == RAN
    }

    /// Decides that the guest never runs. Returns false if it was decided otherwise.
    fn shut(&self) -> bool {
        let shut = self.word.compare_exchange(OPEN, SHUT, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if shut && let Some(fence) = &self.fence {
            fence.step(Ownership::Open, Ownership::Withdrawn);
            fence.step(Ownership::Committed, Ownership::Withdrawn);
        }
        shut
    }
}

/// Bytes that are read at once from the source: a base page and its frame's header.
const AT_ONCE: usize = PAGE_SIZE as usize + (1 << 10);

/// The next step of the thread.
pub(super) enum Next {
    /// Data has arrived or time has passed. `faults` says whether there may be faults.
    More {
        faults: bool,
    },
    Whole,
    /// The memory is no longer needed.
    Forsaken,
}

/// The connection, and what is needed to request pages on it.
pub(super) struct Asking {
    postcopy: Arc<PostcopyMemory>,
    ram: Memory,
    link: Option<Link>,
    gate: Arc<Gate>,
    vcpus: Vec<u32>,
    told: Receiver<FetchCommand>,
    wake: Arc<EventFd>,
    /// The reason if the link broke during a request.
    broken: Option<String>,
    /// Whether `wake` and the link may be readable. If not, a system call is saved.
    woken: bool,
    speaks: bool,
}

impl Asking {
    pub fn new(following: Following, told: Receiver<FetchCommand>, wake: Arc<EventFd>) -> Self {
        let Following { postcopy, ram, mut link, gate, vcpus } = following;
        link.read_ahead(AT_ONCE);
        let (link, broken) = (Some(link), None);
        Self { postcopy, ram, link, gate, vcpus, told, wake, broken, woken: true, speaks: true }
    }

    /// Handles a fault of `thread` on a unit.
    pub fn supply(&mut self, unit: u64, thread: u32) -> Result<(), String> {
        let first = self.postcopy.waits(unit, thread);
        if self.postcopy.missing().first_run(unit..unit + 1).is_none() {
            return self.postcopy.zero(unit..unit + 1);
        }
        if first {
            self.ask(unit);
        }
        Ok(())
    }

    /// Requests a unit, with one request for each memslot that contains part of it.
    fn ask(&mut self, unit: u64) {
        let pages = unit * self.postcopy.unit()..(unit + 1) * self.postcopy.unit();
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

    /// Takes what arrives, or waits for it.
    pub fn go_on(&mut self, say: &dyn Fn(Said)) -> Result<Next, String> {
        if self.postcopy.left() == 0 {
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
                    self.postcopy.awaited().into_iter().for_each(|unit| self.ask(unit));
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
            && !self.postcopy.awaited().is_empty()
            && self.gate.shut()
        {
            // The guest never runs here. The waiting thread is the event loop's. It gets zeroes, finds
            // the gate shut and gives the machine up. The source is answered as for any other reason.
            self.postcopy.unregister()?;
            return Ok(Next::Forsaken);
        }
        let (faults, link) = (self.postcopy.uffd().descriptor(), self.link.as_ref().map(Link::descriptor));
        let mut poll = Poll::default();
        poll.readable(faults);
        poll.readable(&*self.wake);
        link.iter().for_each(|link| poll.readable(*link));
        poll.wait(Some(LOOK)).map_err(|error| format!("poll: {error}"))?;
        self.woken = poll.is_ready(&*self.wake);
        self.speaks = link.is_some_and(|link| poll.is_ready(link));
        Ok(Next::More { faults: poll.is_ready(faults) })
    }

    /// Takes arrived frames. Returns the reason if the link cannot be used any longer.
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
                    self.postcopy.take(first..first + u64::from(run.pages), data)?;
                }
                Ok(Some(_)) => return Ok(Some("the source sent more than pages".into())),
                Err(error) => return Ok(Some(error.to_string())),
            }
        }
        Ok(None)
    }

    /// Ends fetching when no page is missing. Also returns the memory, for [`hold`].
    pub fn finish(self) -> Result<(Waited, Option<Link>, Memory), String> {
        self.postcopy.unregister()?;
        let waited = self.postcopy.waited(&self.vcpus);
        self.ram.mapping.keep(false);
        Ok((waited, self.link, self.ram))
    }
}

/// Locks and populates memory as configured. The guest runs and has all of its memory, so a failure
/// is only reported.
pub(super) fn hold(ram: &Memory) {
    if ram.config.lock
        && let Err(error) = ram.mapping.lock(true)
    {
        tracing::warn!("the guest's memory is not locked: {error}");
    }
    if ram.config.prealloc
        && let Err(error) = ram.populate_here(|_| true)
    {
        tracing::warn!("the guest's memory is not all populated: {error}");
    }
}

/// The first page of a memslot, numbered over its mapping.
fn first_of(slot: &Slot) -> u64 {
    slot.offset() / PAGE_SIZE
}
