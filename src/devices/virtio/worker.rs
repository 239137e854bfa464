//! A thread that does a device's work, and how the queues pass between it and the device: for devices whose requests go to files, which
//! may take long.
//!
//! A request may hang for ever (a hard-mounted NFS server that is gone): whoever asks for the queues waits only as long as
//! it wants to, and takes its word back if it has waited in vain.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::queue::Chain;
use super::{Active, Hang, PAUSE_TIMEOUT};
use vellum_sys::poll::Poll;

/// What the thread does.
pub trait Work: Send + 'static {
    /// What it is told with the queues.
    type Notice: Send;
    /// A request, for whoever asks what the thread is at.
    type Request: fmt::Display + Send;

    /// What requests go to, in messages.
    fn target(&self) -> String;

    /// It has `active`'s queues from now on.
    fn begin(&mut self, active: &Active, told: Self::Notice);

    /// Answers one request, which it says before it begins; the number of bytes written to the guest is the result.
    fn answer(&mut self, chain: &mut Chain<'_>, begins: impl FnOnce(Self::Request)) -> u32;
}

/// A handle on the thread. Dropping it ends the thread, unless that hangs.
pub struct Worker<W: Work> {
    shared: Arc<Shared<W>>,
    thread: Option<JoinHandle<()>>,
    /// It did not answer when it was last asked: nobody waits for it again at the end.
    hangs: bool,
}

/// Who has the queues.
enum Queues<T> {
    Nobody,
    /// On their way to the worker.
    Given(Active, T),
    Worker,
    /// On their way back.
    Returned(Active),
}

struct Shared<W: Work> {
    queues: Mutex<Queues<W::Notice>>,
    changed: Condvar,
    /// The worker is to return them: looked at between requests. Written under the lock of `queues`.
    stop: AtomicBool,
    /// The machine is over.
    over: AtomicBool,
    /// Wakes a worker that waits for requests.
    wake: EventFd,
    /// The request that is being served.
    busy: Mutex<Option<(W::Request, Instant)>>,
    /// What it goes to.
    target: String,
}

impl<W: Work> Shared<W> {
    fn lock(&self) -> MutexGuard<'_, Queues<W::Notice>> {
        self.queues.lock().expect("nobody panics with the queues")
    }

    /// Whether the worker is to return its queues.
    fn is_asked(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.over.load(Ordering::Acquire)
    }

    /// What the worker is at, since it was `asked` to stop at the latest.
    fn hang(&self, asked: Instant) -> Hang {
        let busy = self.busy.lock().expect("nobody panics with it");
        let (what, since) = match &*busy {
            Some((request, since)) => (format!("{request} of {}", self.target), *since),
            None => (format!("the thread of {}", self.target), asked),
        };
        Hang { what, since: since.elapsed() }
    }
}

impl<W: Work> Worker<W> {
    /// Starts the thread, `name`. Its first act is `enter`, where it gives up what it does not need; it is there when that has
    /// succeeded.
    ///
    /// # Errors
    /// Where the host refuses the thread, or what it is to give up.
    pub fn start(
        name: &str,
        mut work: W,
        enter: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues::Nobody),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            over: AtomicBool::new(false),
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            busy: Mutex::new(None),
            target: work.target(),
        });
        let (entered, ready) = std::sync::mpsc::channel();
        let mine = shared.clone();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let result = enter();
            let failed = result.is_err();
            if entered.send(result).is_ok() && !failed {
                run(&mine, &mut work);
            }
        })?;
        let gone = || io::Error::other("the device's worker is gone");
        ready.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(Worker { shared, thread: Some(thread), hangs: false })
    }

    /// Gives it the queues.
    pub fn give(&self, active: Active, told: W::Notice) {
        *self.shared.lock() = Queues::Given(active, told);
        self.shared.changed.notify_all();
    }

    /// Takes the queues back when the request in flight is finished; `None` where it has none.
    ///
    /// # Errors
    /// Where that takes longer than `patience`: then it goes on as if it had not been asked.
    pub fn take(&mut self, patience: Duration) -> Result<Option<Active>, Hang> {
        let shared = &*self.shared;
        let asked = Instant::now();
        let mut queues = shared.lock();
        shared.stop.store(true, Ordering::Release);
        shared.changed.notify_all();
        let _ = shared.wake.write(1);
        let at_work = |queues: &mut Queues<W::Notice>| matches!(queues, Queues::Worker);
        queues = shared
            .changed
            .wait_timeout_while(queues, patience, at_work)
            .expect("nobody panics with the queues")
            .0;
        shared.stop.store(false, Ordering::Release);
        self.hangs = at_work(&mut queues);
        if self.hangs {
            return Err(shared.hang(asked));
        }
        Ok(match std::mem::replace(&mut *queues, Queues::Nobody) {
            Queues::Given(active, _) | Queues::Returned(active) => Some(active),
            Queues::Nobody | Queues::Worker => None,
        })
    }
}

impl<W: Work> Drop for Worker<W> {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        // Whoever has been told of a hang once need not wait for it again.
        let patience = if self.hangs { Duration::ZERO } else { PAUSE_TIMEOUT };
        let taken = self.take(patience);
        self.shared.changed.notify_all();
        match (taken, self.thread.take()) {
            // A worker that panicked has said so already.
            (Ok(_), Some(thread)) => drop(thread.join()),
            // The kernel ends the thread with the process, or when the request comes back. Until then it holds the guest's
            // memory that the request is about.
            (Err(hang), _) => tracing::error!("virtio: {hang}; it is left behind"),
            (Ok(_), None) => {}
        }
    }
}

/// The thread's own part.
fn run<W: Work>(shared: &Shared<W>, work: &mut W) {
    while let Some((mut active, told)) = wait_for_queues(shared) {
        work.begin(&active, told);
        loop {
            if let Err(error) = serve(shared, work, &mut active) {
                tracing::error!("{} serves no more requests: {error}", shared.target);
                // Until it is reset, or the machine pauses and resumes.
                drop(shared.changed.wait_while(shared.lock(), |_| !shared.is_asked()));
            }
            let mut queues = shared.lock();
            // Whoever asked may have lost patience meanwhile.
            if shared.is_asked() {
                *queues = Queues::Returned(active);
                shared.changed.notify_all();
                break;
            }
        }
    }
}

fn wait_for_queues<W: Work>(shared: &Shared<W>) -> Option<(Active, W::Notice)> {
    let nothing = |queues: &mut Queues<W::Notice>| {
        !matches!(queues, Queues::Given(..)) && !shared.over.load(Ordering::Acquire)
    };
    let mut queues =
        shared.changed.wait_while(shared.lock(), nothing).expect("nobody panics with the queues");
    match std::mem::replace(&mut *queues, Queues::Worker) {
        Queues::Given(active, told) => Some((active, told)),
        other => {
            *queues = other;
            None
        }
    }
}

/// EventSources all queues in turn until it is asked to stop.
fn serve<W: Work>(shared: &Shared<W>, work: &mut W, active: &mut Active) -> io::Result<()> {
    let Active { memory, queues, .. } = active;
    let mut doorbells = Poll::default();
    queues
        .iter()
        .map(|queue| queue.event())
        .chain([&shared.wake])
        .for_each(|event| doorbells.readable(event.as_raw_fd()));
    let mut chain = Chain::default();
    loop {
        let mut busy = false;
        for queue in queues.iter_mut() {
            if shared.is_asked() {
                return Ok(());
            }
            busy |= queue.serve_one(memory, &mut chain, |chain| answer(shared, work, chain));
        }
        // Every queue must listen before the worker sleeps, so no `any` here.
        if busy || queues.iter_mut().fold(false, |news, queue| news | queue.listen(memory)) {
            continue;
        }
        doorbells.wait(None).map(drop)?;
        let _ = shared.wake.read();
        for queue in queues.iter() {
            let _ = queue.event().read();
        }
    }
}

/// Answers one request, and lets others see meanwhile which it is.
fn answer<W: Work>(shared: &Shared<W>, work: &mut W, chain: &mut Chain<'_>) -> u32 {
    let busy = |request| *shared.busy.lock().expect("nobody panics with it") = request;
    let written = work.answer(chain, |request| busy(Some((request, Instant::now()))));
    busy(None);
    written
}
