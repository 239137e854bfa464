//! Memory that comes when somebody wants it. A thread answers the faults of vCPUs, of disks' threads and of the event loop's own
//! (userfaultfd), each with the page of the backing's size that is missing. Where it comes from is an [`Origin`]: [`files`] of a snapshot,
//! whose rest the thread brings in between, or a source that has handed over its guest ([`asking`]), from which the rest comes unasked on
//! another connection. When all is there the memory is like any other.
//!
//! The thread has the kernel copy: by the mapping it touches nothing of that memory, for it would wait for itself. Nor does it wait for
//! any other thread. So whoever waits for a page, with whatever locks, waits for a file to be read, or for the source, and no longer.
//!
//! Pages that were zero where they come from, and such as were here and have been discarded since (a balloon's), are answered alike, with
//! zeroes; of neither is anything brought unasked. A page that is damaged is given to nobody. The event loop's thread may be the one that
//! waits for it, so that only the end of the process is left.
//!
//! The order in which pages are wanted can be [recorded](Recording): nothing is brought unasked meanwhile. The next restore brings
//! those first.

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

/// What it takes, opened before the sandbox.
#[derive(Debug)]
pub struct Opened {
    /// Where faults arrive.
    pub uffd: Uffd,
    /// The order, where it is recorded.
    pub recording: Option<Recording>,
}

/// The order in which pages are wanted is written down.
#[derive(Debug)]
pub struct Recording {
    /// For how long, from when the machine runs on.
    pub lasts: Duration,
    /// Where to.
    pub file: Unnamed,
}

/// Which memory, and what is to be in it.
#[derive(Debug)]
pub struct Work {
    /// All RAM, which is all zero; its pages are the first of the machine's, in their order.
    pub mapping: Arc<Mapping>,
    /// The size of a page of what backs it, in bytes.
    pub page: u64,
    /// What it becomes.
    pub layers: Layers,
    /// What of it is brought first.
    pub first: Option<WorkingSet>,
}

/// Memory that follows from a source.
#[derive(Debug)]
pub struct Following {
    /// The memory, and which of it is missing.
    pub landing: Arc<PostcopyMemory>,
    /// All RAM, of which all is made to be there, or locked, once nothing is missing.
    pub ram: Memory,
    /// The connection on which pages are asked for.
    pub link: Link,
    /// What decides whether the guest may run.
    pub gate: Arc<Gate>,
    /// The threads of the vCPUs.
    pub vcpus: Vec<u32>,
}

enum FetchCommand {
    Begin(Box<(Work, Uffd)>),
    Follow(Box<Following>),
    /// Another connection to the source.
    Link(Box<Link>),
    /// The source is cut off.
    Cut,
    Runs,
}

/// What the thread says.
#[derive(Debug)]
pub enum Said {
    /// Faults are answered from now on, or why not.
    Answers(Result<(), String>),
    /// The connection to the source is of no use any more.
    Cut(String),
    /// All is there. The connection to the source stays for as long as this does: its end would look like a cut to whoever has not heard
    /// yet that nothing is missing any more.
    Over(Box<Whole>),
}

/// Memory of which nothing is missing any more.
#[derive(Debug)]
pub struct Whole {
    /// What was brought.
    pub fetched: Fetched,
    /// For how long somebody waited, where it came from a source.
    pub waited: Waited,
    /// The connection to that.
    pub link: Option<Link>,
}

/// The thread, as those who wait for it see it.
#[derive(Debug)]
pub struct Fetching {
    tell: Sender<FetchCommand>,
    /// Written where it is told something in the middle of its work.
    wake: Arc<EventFd>,
    said: Receiver<Said>,
    news: Arc<EventFd>,
    /// Where faults arrive, until it begins.
    uffd: Option<Uffd>,
}

impl Fetching {
    /// Starts the thread, which waits for its work.
    ///
    /// # Errors
    /// Where the host refuses a thread.
    pub fn start(opened: Opened, sandbox: Sandbox) -> Result<Self, String> {
        let ((tell, told), (say, said)) = (channel(), channel());
        let event = || threads::event().map_err(|error| format!("eventfd: {error}"));
        let (wake, news) = (event()?, event()?);
        let (wakes, tells) = (wake.clone(), news.clone());
        let Opened { uffd, recording } = opened;
        let body = move || {
            let speaks = |what| {
                // Of no consequence where nobody waits for it any more.
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
            let registered = thread.landing.register();
            let fails = registered.is_err();
            speaks(Said::Answers(registered));
            if fails {
                return;
            }
            // Where it fails the process ends while this thread still has its userfaultfd: once that is closed, whoever waits finds zeroes.
            match thread.run(&speaks) {
                Ok(true) => match thread.finish() {
                    Ok(whole) => speaks(Said::Over(Box::new(whole))),
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

    /// What wakes its thread, where it is written to.
    pub fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// Where faults arrive: for whoever makes the memory that this is to bring.
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

    /// Has faults answered from now on, until all is there.
    ///
    /// # Errors
    /// Where the kernel refuses; nothing has changed then.
    pub fn begin(&mut self, work: Work) -> Result<(), String> {
        let uffd = self.take_uffd().ok_or("it has begun")?;
        self.answered(FetchCommand::Begin(Box::new((work, uffd))))
    }

    /// The same, where pages come from a source.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn follow(&self, following: Following) -> Result<(), String> {
        self.answered(FetchCommand::Follow(Box::new(following)))
    }

    fn tell(&self, what: FetchCommand) {
        // A thread that has ended has brought all.
        let _ = (self.tell.send(what), self.wake.write(1));
    }

    /// The machine runs.
    pub fn runs(&self) {
        self.tell(FetchCommand::Runs);
    }

    /// There is another connection to the source.
    pub fn link(&self, link: Link) {
        self.tell(FetchCommand::Link(Box::new(link)));
    }

    /// The source is cut off.
    pub fn cut(&self) {
        self.tell(FetchCommand::Cut);
    }

    /// Readable when it has said something.
    pub fn descriptor(&self) -> &EventFd {
        &self.news
    }

    /// What it has said, if anything.
    pub fn heard(&self) -> Option<Said> {
        let _ = self.news.read();
        self.said.try_recv().ok()
    }

    /// Waits until all is there. It comes, or the process ends.
    pub fn is_over(&self) -> Option<Fetched> {
        self.said.iter().find_map(|said| match said {
            Said::Over(whole) => Some(whole.fetched),
            _ => None,
        })
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        // A thread that nobody needs any more finds that nobody tells it anything.
        self.tell = channel().0;
        let _ = self.wake.write(1);
    }
}

/// Ends the process: nobody who waits for a page can be told that there is none.
pub(super) fn end(why: &str) -> ! {
    terminal::restore();
    seccomp::write_stderr(format!("vellum: the guest's memory cannot be brought: {why}\n").as_bytes());
    seccomp::exit_now(1)
}

/// Where pages come from.
enum Origin {
    Files(Files),
    Source(Box<Asking>),
}

/// What the thread has.
struct Thread {
    landing: Arc<PostcopyMemory>,
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
        let landing = Arc::new(PostcopyMemory::new(uffd, mapping, page, missing, wake));
        let files = Files::new(&landing, layers, first, recording, told);
        Self { landing, origin: Origin::Files(files), began: Instant::now(), faults: 0 }
    }

    fn of_a_source(following: Following, told: Receiver<FetchCommand>, wake: Arc<EventFd>) -> Self {
        let landing = following.landing.clone();
        let asking = Asking::new(following, told, wake);
        Self { landing, origin: Origin::Source(Box::new(asking)), began: Instant::now(), faults: 0 }
    }

    /// Until all is there; false where nobody needs it any more.
    fn run(&mut self, say: &dyn Fn(Said)) -> Result<bool, String> {
        let mut faults = true;
        loop {
            if faults {
                self.answer()?;
            }
            let more = match &mut self.origin {
                Origin::Files(files) => files.go_on(&self.landing)?,
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

    /// All is there: what was brought.
    fn finish(self) -> Result<Whole, String> {
        let us = self.began.elapsed().as_micros() as u64;
        let (waited, link) = match self.origin {
            // The descriptor is closed with this: who still waits finds zeroes.
            Origin::Files(_) => (Waited::default(), None),
            Origin::Source(asking) => asking.finish()?,
        };
        let fetched = Fetched { faults: self.faults, pages: self.landing.brought(), us };
        Ok(Whole { fetched, waited, link })
    }

    /// Answers all who wait.
    fn answer(&mut self) -> Result<(), String> {
        let mut waiting = [(0, 0); BATCH];
        loop {
            let taken = self
                .landing
                .uffd()
                .take_faults(&mut waiting)
                .map_err(|error| format!("userfaultfd: {error}"))?;
            for (address, thread) in &waiting[..taken] {
                let unit = self.landing.unit_at(*address);
                self.faults += 1;
                match &mut self.origin {
                    Origin::Files(files) => files.supply(&self.landing, unit)?,
                    Origin::Source(asking) => asking.supply(unit, *thread)?,
                }
            }
            // With room left there were no more.
            if taken < BATCH {
                return Ok(());
            }
        }
    }
}
