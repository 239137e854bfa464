//! A thread that serves a device's requests, and the hand-over of queues between it and the device.
//! For devices whose requests go to files, which may take long.
//!
//! A request may hang for ever, for example on a hard-mounted NFS server that is gone. So a caller
//! that wants the queues back gives a time limit, and withdraws its request when that passes.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::queue::Chain;
use super::{Active, Hang, PAUSE_TIMEOUT, StartError};
use vellum_sys::poll::Poll;

/// The work of the thread.
pub trait Work: Send + 'static {
    /// Data passed to it along with the queues.
    type Notice: Send;
    /// A request in progress, for status messages.
    type Request: fmt::Display + Send;

    /// The thread owns `active`'s queues from now on.
    fn begin(&mut self, active: &Active, told: Self::Notice);

    /// Answers one request. Calls `begins` before it starts. Returns the number of bytes written to
    /// the guest. `None`: it stopped in the middle because the queues `are_wanted` back. It then
    /// begins anew when the thread has them again, so only a request that may be repeated can stop.
    fn answer(
        &mut self,
        chain: &mut Chain<'_>,
        begins: impl FnOnce(Self::Request),
        are_wanted: &dyn Fn() -> bool,
    ) -> Option<u32>;

    /// Called before the thread returns its queues.
    fn rest(&mut self) {}
}

/// A handle to the thread. Dropping it ends the thread, unless that hangs.
pub(crate) struct Worker<W: Work> {
    shared: Arc<Shared<W>>,
    thread: Option<JoinHandle<()>>,
    /// It did not answer the last request to stop. Dropping the handle does not wait again.
    hangs: bool,
}

/// The owner of the queues.
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
    /// Asks the worker to return the queues. It checks this between requests, and between the pieces
    /// of a long one. Written with `queues`
    /// locked.
    stop: AtomicBool,
    /// The machine has ended.
    over: AtomicBool,
    /// Wakes a worker that waits for requests.
    wake: EventFd,
    /// The request in progress.
    busy: Mutex<Option<(W::Request, Instant)>>,
    /// The target of requests.
    target: String,
}

impl<W: Work> Shared<W> {
    fn lock(&self) -> MutexGuard<'_, Queues<W::Notice>> {
        self.queues.lock().expect("the lock is not poisoned")
    }

    /// Whether the worker shall return its queues.
    fn is_asked(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.over.load(Ordering::Acquire)
    }

    /// What the worker is doing. Without a request in progress, the time counts from `asked`.
    fn hang(&self, asked: Instant) -> Hang {
        let busy = self.busy.lock().expect("the lock is not poisoned");
        let (what, since) = match &*busy {
            Some((request, since)) => (format!("{request} of {}", self.target), *since),
            None => (format!("the thread of {}", self.target), asked),
        };
        Hang { what, since: since.elapsed() }
    }
}

impl<W: Work> Worker<W> {
    /// Starts the thread called `name`, whose requests go to `target`, for messages. It calls `begin`
    /// first, which drops privileges and makes the thread's work. This returns when that has
    /// succeeded.
    ///
    /// # Errors
    /// The host refuses the thread, or `begin` fails.
    pub fn start(
        name: &str,
        target: String,
        begin: impl FnOnce() -> Result<W, StartError> + Send + 'static,
    ) -> Result<Self, StartError> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues::Nobody),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            over: AtomicBool::new(false),
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            busy: Mutex::new(None),
            target,
        });
        let (begun, ready) = std::sync::mpsc::channel();
        let mine = shared.clone();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || match begin() {
            Err(error) => drop(begun.send(Err(error))),
            Ok(mut work) => {
                if begun.send(Ok(())).is_ok() {
                    run(&mine, &mut work);
                }
            }
        })?;
        let gone = || io::Error::other("the device's worker is gone");
        ready.recv().unwrap_or_else(|_| Err(gone().into()))?;
        Ok(Worker { shared, thread: Some(thread), hangs: false })
    }

    /// Gives the thread the queues.
    pub fn give(&self, active: Active, told: W::Notice) {
        *self.shared.lock() = Queues::Given(active, told);
        self.shared.changed.notify_all();
    }

    /// Takes the queues back when the request in flight is finished or has stopped. `None` if the
    /// thread has none.
    ///
    /// # Errors
    /// That takes longer than `patience`. The thread then continues.
    pub fn take(&mut self, patience: Duration) -> Result<Option<Active>, Hang> {
        let shared = &*self.shared;
        let asked = Instant::now();
        let mut queues = shared.lock();
        shared.stop.store(true, Ordering::Release);
        shared.changed.notify_all();
        let _ = shared.wake.write(1);
        let at_work = |queues: &mut Queues<W::Notice>| matches!(queues, Queues::Worker);
        queues =
            shared.changed.wait_timeout_while(queues, patience, at_work).expect("the lock is not poisoned").0;
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
        // A caller that was already told of the hang does not wait again.
        let patience = if self.hangs { Duration::ZERO } else { PAUSE_TIMEOUT };
        let taken = self.take(patience);
        self.shared.changed.notify_all();
        match (taken, self.thread.take()) {
            // A worker that panicked has already logged it.
            (Ok(_), Some(thread)) => drop(thread.join()),
            // The kernel ends the thread with the process, or when the request returns. Until then
            // it keeps the guest memory of the request.
            (Err(hang), _) => tracing::error!("virtio: {hang}; its thread is abandoned"),
            (Ok(_), None) => {}
        }
    }
}

/// The thread's main function.
fn run<W: Work>(shared: &Shared<W>, work: &mut W) {
    while let Some((mut active, told)) = wait_for_queues(shared) {
        work.begin(&active, told);
        loop {
            if let Err(error) = serve(shared, work, &mut active) {
                tracing::error!("{} no longer serves requests: {error}", shared.target);
                // Wait until the device is reset, or the machine pauses and resumes.
                drop(shared.changed.wait_while(shared.lock(), |_| !shared.is_asked()));
            }
            work.rest();
            let mut queues = shared.lock();
            // The caller may have withdrawn its request meanwhile.
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
    let mut queues = shared.changed.wait_while(shared.lock(), nothing).expect("the lock is not poisoned");
    match std::mem::replace(&mut *queues, Queues::Worker) {
        Queues::Given(active, told) => Some((active, told)),
        other => {
            *queues = other;
            None
        }
    }
}

/// Serves all queues in turn until asked to stop.
fn serve<W: Work>(shared: &Shared<W>, work: &mut W, active: &mut Active) -> io::Result<()> {
    let Active { memory, queues, .. } = active;
    let mut chain = Chain::default();
    loop {
        let mut busy = false;
        for queue in queues.iter_mut() {
            if shared.is_asked() {
                return Ok(());
            }
            busy |= queue.serve_one(memory, &mut chain, |chain| answer(shared, work, chain));
        }
        // Every queue must enable notifications before the worker sleeps, so `any` would be wrong
        // here.
        if busy || queues.iter_mut().fold(false, |news, queue| news | queue.listen(memory)) {
            continue;
        }
        let mut doorbells = Poll::default();
        let events = queues.iter().map(|queue| queue.event()).chain([&shared.wake]);
        events.for_each(|event| doorbells.readable(event));
        doorbells.wait(None)?;
        let _ = shared.wake.read();
        for queue in queues.iter() {
            let _ = queue.event().read();
        }
    }
}

/// Answers one request, and publishes it while it is in progress.
fn answer<W: Work>(shared: &Shared<W>, work: &mut W, chain: &mut Chain<'_>) -> Option<u32> {
    let busy = |request| *shared.busy.lock().expect("the lock is not poisoned") = request;
    let begins = |request| busy(Some((request, Instant::now())));
    let written = work.answer(chain, begins, &|| shared.is_asked());
    busy(None);
    written
}
