//! Memory that is fetched on demand. A thread resolves the userfaultfd faults of vCPUs, of disk
//! threads and of the event loop's thread. It places the missing page, in the size of the backing.
//! An [`Origin`] provides the pages: the [`files`] of a snapshot, from which the thread also
//! fetches the rest in the background, or a source after the hand-over ([`asking`]), which sends
//! the rest unasked on another connection. Once all pages are present, the memory is like any
//! other.
//!
//! The thread lets the kernel copy (UFFDIO_COPY). It never accesses the memory through the mapping,
//! because it would wait for itself. It does not wait for other threads either. So a thread that
//! waits for a page, even with locks held, waits only for a file to be read or for the source.
//!
//! Faults on two other kinds of pages are resolved with zeroes: pages that are zero at the origin,
//! and pages that were present and have been discarded since, as by a balloon. Neither is fetched
//! in the background. A damaged page is never placed. If one is wanted, the process ends, because
//! the waiting thread may be the event loop's.
//!
//! The order in which pages are wanted can be [recorded](Recording). Meanwhile nothing is fetched
//! in the background. The next restore fetches these pages first.

mod asking;
mod files;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use self::asking::Asking;
pub use self::asking::{Gate, Link};
use self::files::Files;
use super::message::Waited;
use super::postcopy_memory::PostcopyMemory;
use super::threads;
use crate::snapshot::layer::Layers;
use crate::snapshot::working_set::{Unnamed, WorkingSet};
use vellum_control::Fetched;
use vellum_kvm::memory::Memory;
use vellum_sandbox::{Sandbox, ThreadKind};
use vellum_sys::mmap::{Mapping, PAGE_SIZE};
use vellum_sys::uffd::{BATCH, Uffd};
use vellum_sys::{seccomp, terminal};

/// Resources that are opened before the sandbox.
#[derive(Debug)]
pub struct Opened {
    /// The userfaultfd.
    pub uffd: Uffd,
    /// The recording of the order, if requested.
    pub recording: Option<Recording>,
}

/// Recording of the order in which pages are wanted.
#[derive(Debug)]
pub struct Recording {
    /// How long it lasts, from when the machine runs.
    pub lasts: Duration,
    /// The file that it is written to.
    pub file: Unnamed,
}

/// The memory and its contents.
#[derive(Debug)]
pub struct Work {
    /// All RAM, which is zero. Its pages are the machine's first, in order.
    pub mapping: Arc<Mapping>,
    /// The page size of its backing in bytes.
    pub page: u64,
    /// Its contents.
    pub layers: Layers,
    /// The pages to fetch first.
    pub first: Option<WorkingSet>,
}

/// Memory that a source sends after the hand-over.
#[derive(Debug)]
pub struct Following {
    /// The memory, and which of it is missing.
    pub postcopy: Arc<PostcopyMemory>,
    /// All RAM. It is populated or locked, if configured, once no page is missing.
    pub ram: Memory,
    /// The connection for faulting pages.
    pub link: Link,
    /// Decides whether the guest may run.
    pub gate: Arc<Gate>,
    /// The threads of the vCPUs.
    pub vcpus: Vec<u32>,
}

enum FetchCommand {
    Begin(Box<(Work, Uffd)>),
    Follow(Box<Following>),
    /// A new connection to the source.
    Link(Box<Link>),
    /// The connection to the source has dropped.
    Cut,
    Runs,
}

/// A message of the thread.
#[derive(Debug)]
pub enum Said {
    /// Faults are resolved from now on, or the reason why not.
    Answers(Result<(), String>),
    /// The connection to the source cannot be used any longer.
    Cut(String),
    /// All pages are present. The value holds the connection to the source: if it closed now, a
    /// source that has not yet heard that nothing is missing would see a lost link.
    Over(Box<Whole>),
}

/// Memory without missing pages.
#[derive(Debug)]
pub struct Whole {
    /// The figures.
    pub fetched: Fetched,
    /// How long threads waited, if a source sent the pages.
    pub waited: Waited,
    /// The connection to that source.
    pub link: Option<Link>,
}

/// A handle on the thread.
#[derive(Debug)]
pub struct Fetching {
    tell: Sender<FetchCommand>,
    /// Signalled for commands in the middle of the thread's work.
    wake: Arc<EventFd>,
    said: Receiver<Said>,
    news: Arc<EventFd>,
    /// The userfaultfd, until fetching begins.
    uffd: Option<Uffd>,
}

impl Fetching {
    /// Starts the thread, which waits for its work.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(opened: Opened, sandbox: Sandbox) -> Result<Self, String> {
        let ((tell, told), (say, said)) = (channel(), channel());
        let event = || threads::event().map_err(|error| format!("eventfd: {error}"));
        let (wake, news) = (event()?, event()?);
        let (wakes, tells) = (wake.clone(), news.clone());
        let Opened { uffd, recording } = opened;
        let body = move || {
            let speaks = |what| {
                // Fails only if the handle was dropped.
                let _ = (say.send(what), tells.write(1));
            };
            if let Err(error) = sandbox.enter(ThreadKind::Fetching, "fetching") {
                return speaks(Said::Answers(Err(error.to_string())));
            }
            let mut thread = match told.recv() {
                Ok(FetchCommand::Begin(work)) => Thread::of_files(*work, recording, told, wakes),
                Ok(FetchCommand::Follow(following)) => Thread::of_a_source(*following, told, wakes),
                _ => return,
            };
            let registered = thread.postcopy.register();
            let fails = registered.is_err();
            speaks(Said::Answers(registered));
            if fails {
                return;
            }
            // On failure the process ends while this thread still has its userfaultfd. If it were
            // closed, waiting threads would get zeroes.
            match thread.run(&speaks) {
                Ok(true) => match thread.finish() {
                    Ok((whole, ram)) => {
                        // Said first: the source waits for this, and needs not wait for the rest.
                        speaks(Said::Over(Box::new(whole)));
                        ram.iter().for_each(asking::hold);
                    }
                    Err(why) => end(&why),
                },
                Ok(false) => {}
                Err(why) => end(&why),
            }
        };
        let started = std::thread::Builder::new().name("fetching".into()).spawn(body);
        started.map_err(|error| format!("the thread that fetches memory: {error}"))?;
        Ok(Self { tell, wake, said, news, uffd: Some(uffd) })
    }

    /// An eventfd that wakes the thread.
    pub fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// Takes the userfaultfd for the memory that is to be fetched.
    pub(crate) fn take_uffd(&mut self) -> Option<Uffd> {
        self.uffd.take()
    }

    fn answered(&self, told: FetchCommand) -> Result<(), String> {
        let gone = "the thread that fetches memory has failed";
        self.tell.send(told).map_err(|_| gone)?;
        match self.said.recv() {
            Ok(Said::Answers(result)) => result,
            _ => Err(gone.into()),
        }
    }

    /// Starts to resolve faults, until all pages are present.
    ///
    /// # Errors
    /// The kernel refuses. Nothing has changed then.
    pub fn begin(&mut self, work: Work) -> Result<(), String> {
        let uffd = self.take_uffd().ok_or("it has begun")?;
        self.answered(FetchCommand::Begin(Box::new((work, uffd))))
    }

    /// Starts to resolve faults with pages of a source.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn follow(&self, following: Following) -> Result<(), String> {
        self.answered(FetchCommand::Follow(Box::new(following)))
    }

    fn tell(&self, what: FetchCommand) {
        // A thread that has ended has fetched everything.
        let _ = (self.tell.send(what), self.wake.write(1));
    }

    /// The machine runs.
    pub fn runs(&self) {
        self.tell(FetchCommand::Runs);
    }

    /// Provides a new connection to the source.
    pub fn link(&self, link: Link) {
        self.tell(FetchCommand::Link(Box::new(link)));
    }

    /// Reports that the connection to the source has dropped.
    pub fn cut(&self) {
        self.tell(FetchCommand::Cut);
    }

    /// Readable when the thread has sent a message.
    pub fn descriptor(&self) -> &EventFd {
        &self.news
    }

    /// The next message of the thread, if there is one.
    pub fn heard(&self) -> Option<Said> {
        let _ = self.news.read();
        self.said.try_recv().ok()
    }

    /// Waits until all pages are present. If they cannot be fetched, the process ends.
    pub fn is_over(&self) -> Option<Fetched> {
        self.said.iter().find_map(|said| match said {
            Said::Over(whole) => Some(whole.fetched),
            _ => None,
        })
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        // The thread finds its channel disconnected. It ends at once, or when all pages of files
        // are present.
        self.tell = channel().0;
        let _ = self.wake.write(1);
    }
}

/// Ends the process, because no error can reach a thread that waits for a page.
pub(super) fn end(why: &str) -> ! {
    terminal::restore();
    seccomp::write_stderr(format!("vellum: the guest's memory cannot be brought: {why}\n").as_bytes());
    seccomp::exit_now(1)
}

/// The origin of pages.
enum Origin {
    Files(Files),
    Source(Box<Asking>),
}

/// The state of the thread.
struct Thread {
    postcopy: Arc<PostcopyMemory>,
    origin: Origin,
    began: Instant,
    faults: u64,
}

impl Thread {
    fn of_files(
        (work, uffd): (Work, Uffd),
        recording: Option<Recording>,
        told: Receiver<FetchCommand>,
        wake: Arc<EventFd>,
    ) -> Self {
        let Work { mapping, page, layers, first } = work;
        let missing = files::missing(&layers, page / PAGE_SIZE, mapping.len() / page);
        let postcopy = Arc::new(PostcopyMemory::new(uffd, mapping, page, missing, wake));
        let files = Files::new(&postcopy, layers, first, recording, told);
        Self { postcopy, origin: Origin::Files(files), began: Instant::now(), faults: 0 }
    }

    fn of_a_source(following: Following, told: Receiver<FetchCommand>, wake: Arc<EventFd>) -> Self {
        let postcopy = following.postcopy.clone();
        let asking = Asking::new(following, told, wake);
        Self { postcopy, origin: Origin::Source(Box::new(asking)), began: Instant::now(), faults: 0 }
    }

    /// Runs until all pages are present. Returns false if the memory is no longer needed.
    fn run(&mut self, say: &dyn Fn(Said)) -> Result<bool, String> {
        let mut faults = true;
        loop {
            if faults {
                self.answer()?;
            }
            let more = match &mut self.origin {
                Origin::Files(files) => files.go_on(&self.postcopy)?,
                Origin::Source(asking) => match asking.go_on(say)? {
                    asking::Next::More { faults: came } => {
                        faults = came;
                        true
                    }
                    asking::Next::Whole => false,
                    asking::Next::Forsaken => return Ok(false),
                },
            };
            if !more {
                return Ok(true);
            }
        }
    }

    /// Ends fetching. Returns the figures, and memory that is still to be locked or populated as
    /// configured.
    fn finish(self) -> Result<(Whole, Option<Memory>), String> {
        let us = self.began.elapsed().as_micros() as u64;
        let (waited, link, ram) = match self.origin {
            // Threads that still wait, for pages that were discarded, get zeroes.
            Origin::Files(_) => {
                self.postcopy.unregister()?;
                (Waited::default(), None, None)
            }
            Origin::Source(asking) => {
                let (waited, link, ram) = asking.finish()?;
                (waited, link, Some(ram))
            }
        };
        let fetched = Fetched { faults: self.faults, pages: self.postcopy.brought(), us };
        Ok((Whole { fetched, waited, link }, ram))
    }

    /// Resolves all pending faults.
    fn answer(&mut self) -> Result<(), String> {
        let mut waiting = [(0, 0); BATCH];
        loop {
            let taken = self
                .postcopy
                .uffd()
                .take_faults(&mut waiting)
                .map_err(|error| format!("userfaultfd: {error}"))?;
            for (address, thread) in &waiting[..taken] {
                let unit = self.postcopy.unit_at(*address);
                self.faults += 1;
                match &mut self.origin {
                    Origin::Files(files) => files.supply(&self.postcopy, unit)?,
                    Origin::Source(asking) => asking.supply(unit, *thread)?,
                }
            }
            // A batch that is not full was the last.
            if taken < BATCH {
                return Ok(());
            }
        }
    }
}
