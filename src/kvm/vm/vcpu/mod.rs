//! vCPU threads.
//!
//! [`Vcpu`] is the handle to one. `run.rs` has the thread's loop, `cycle.rs` decides its next step,
//! `throttle.rs` makes it sleep. Each vCPU is a thread around `KVM_RUN` and a small state machine,
//! controlled by commands:
//!
//! ```text
//!            Resume                    the guest ended, or Stop
//!   Paused ----------> Running ------------------------------> Exited
//!      ^                  |
//!      +------------------+  Pause: kicked by a signal, acknowledged by the thread
//! ```
//!
//! The *meaning* of an exit is not decided here: the loop passes it to a closure (workload guests
//! ring doorbells, a machine with devices asks its bus) and obeys the returned [`Flow`]. `debug.rs`
//! handles debug exits.

mod cycle;
mod debug;
mod run;
#[cfg(test)]
mod tests;
mod throttle;

use std::any::Any;
use std::error::Error as StdError;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_guest_debug;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::Processor;
use super::exits::Exits;
use super::lifecycle::Exit;
use vellum_sys::affinity;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::kick::{self, Kick, RunPage};

use cycle::Command;
pub use cycle::Flow;
pub use debug::{SLOTS, Trap, Traps, VcpusDebugHandle};
pub use throttle::Throttle;

/// The state of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// Out of `KVM_RUN`, with nothing pending in KVM: its state can be read and changed.
    Paused,
    /// In its loop.
    Running,
    /// Its loop has ended.
    Exited,
}

/// How long a vCPU may take to acknowledge a command before that is an error: far beyond any
/// scheduling delay.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a waiting caller checks whether waiting still makes sense.
const ASKING: Duration = Duration::from_millis(100);

/// Why a vCPU thread cannot be created or did not obey.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host refuses another thread.
    #[error("cannot start the thread of vCPU {0}: {1}; raise the limit on processes (ulimit -u)")]
    Spawn(usize, #[source] io::Error),
    /// The thread cannot be pinned to the CPU.
    #[error("cannot pin vCPU {0} to CPU {1}: {2}")]
    Pin(usize, usize, #[source] io::Error),
    /// The sandbox cannot be entered.
    #[error("vCPU {0}: {1}")]
    Sandbox(usize, #[source] io::Error),
    /// The initial state cannot be set.
    #[error("vCPU {0}: {1}")]
    Prepare(usize, #[source] Unprepared),
    /// The vCPU did not answer.
    #[error("vCPU {0} did not acknowledge within {1:?}: is the host overloaded?")]
    Unresponsive(usize, Duration),
    /// The vCPU should not run.
    #[error("vCPU {0} is not paused")]
    NotPaused(usize),
    /// The vCPU has exited.
    #[error("vCPU {0} has exited")]
    Gone(usize),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Pin(..) => ErrorOrigin::host(Field::Pin),
            Self::Sandbox(..) => ErrorOrigin::host(Field::Sandbox),
            Self::Spawn(..)
            | Self::Prepare(..)
            | Self::Unresponsive(..)
            | Self::NotPaused(_)
            | Self::Gone(_) => ErrorOrigin::HOST,
        }
    }
}

/// How a vCPU ended.
#[derive(Debug)]
pub struct Ended {
    /// The reason.
    pub exit: Exit,
    /// `KVM_RUN`'s error, if it failed.
    pub error: Option<kvm_ioctls::Error>,
    /// The registers and the last exits, a line each, if the guest or KVM failed.
    pub trace: Option<String>,
    /// The result of [`Thread::keep`].
    pub kept: Option<Kept>,
}

/// State kept of an ended vCPU. Its type belongs to the machine.
pub type Kept = Box<dyn Any + Send>;

/// Why the initial state cannot be set.
pub type Unprepared = Box<dyn StdError + Send + Sync>;

type Call = Box<dyn FnOnce(&VcpuFd) + Send>;
type Life = Box<dyn FnOnce(&Shared) -> Result<Ended, Error> + Send>;

struct Inner {
    state: RunState,
    /// How to interrupt the thread, while it is in its loop.
    kick: Option<Kick>,
    /// The thread's work with its vCPU, from [`Vcpu::give`] until it starts.
    life: Option<Life>,
    call: Option<Call>,
    exits: Exits,
    /// Why the thread never entered its loop.
    failed: Option<Error>,
    ended: Option<Ended>,
    /// The latest value of [`Shared::flushes`] that the thread saw while out of `KVM_RUN`.
    flushed: u64,
    /// The end of its sleep.
    nap: Option<Instant>,
    /// The debug mode.
    debug: kvm_guest_debug,
}

impl Inner {
    /// Makes the thread look at its command.
    fn interrupt(&self) {
        // A thread that is paused, or not in its loop yet, looks before it enters the guest.
        if let Some(kick) = self.kick.as_ref().filter(|_| self.state == RunState::Running) {
            kick.kick();
        }
    }
}

struct Shared {
    index: usize,
    command: AtomicU8,
    /// How often [`Vcpu::request_flush`] was called.
    flushes: AtomicU64,
    /// Whether it may have to sleep.
    throttled: AtomicBool,
    /// Its debugger, if any.
    traps: OnceLock<Arc<Traps>>,
    /// Whether its debugger holds it back.
    parked: AtomicBool,
    describe: fn(&VcpuFd) -> String,
    keep: fn(&VcpuFd) -> Option<Kept>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A poisoned lock means that a vCPU thread panicked. The state is still the last one it
        // reported.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn command(&self) -> Command {
        Command::from_u8(self.command.load(Ordering::SeqCst))
    }

    /// Turns the command to run into one to pause. Other commands stay.
    fn pause_itself(&self) {
        let (run, pause) = (Command::Run as u8, Command::Pause as u8);
        let _ = self.command.compare_exchange(run, pause, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Waits for [`Vcpu::give`]. `None` if the vCPU is stopped before.
    fn life(&self) -> Option<Life> {
        let stopped = || self.command() == Command::Stop;
        let until = |inner: &mut Inner| inner.life.is_none() && !stopped();
        let inner = self.changed.wait_while(self.lock(), until);
        inner.unwrap_or_else(PoisonError::into_inner).life.take()
    }

    /// [`Vcpu::begin`].
    fn begin<R: Send + 'static>(
        &self,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<Answer<R>, Error> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        {
            let mut inner = self.wait_unless(
                |inner| inner.state != RunState::Running && inner.call.is_none(),
                || Ok::<_, Error>(()),
            )?;
            if inner.state == RunState::Exited {
                return Err(Error::Gone(self.index));
            }
            inner.call = Some(Box::new(move |fd| {
                let _ = sender.send(call(fd));
            }));
        }
        self.changed.notify_all();
        Ok(Answer { index: self.index, receiver })
    }

    /// Waits for a condition that should hold soon. Meanwhile checks repeatedly with `hopeful` that
    /// it still can.
    fn wait_unless<E: From<Error>>(
        &self,
        until: impl Fn(&Inner) -> bool,
        hopeful: impl Fn() -> Result<(), E>,
    ) -> Result<MutexGuard<'_, Inner>, E> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let mut inner = self.lock();
        while !until(&inner) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Unresponsive(self.index, READY_TIMEOUT).into());
            }
            hopeful()?;
            let changed = self.changed.wait_timeout(inner, left.min(ASKING));
            inner = changed.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(inner)
    }
}

/// A handle to a vCPU's thread. Dropping it stops the vCPU.
pub struct Vcpu {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The future result of a call on a vCPU's thread.
pub struct Answer<R> {
    index: usize,
    receiver: Receiver<R>,
}

impl<R> Answer<R> {
    /// Waits for the result.
    ///
    /// # Errors
    /// The vCPU has exited meanwhile.
    pub fn wait(self) -> Result<R, Error> {
        self.receiver.recv().map_err(|_| Error::Gone(self.index))
    }
}

/// What a vCPU's thread needs before it has a vCPU.
pub struct Thread {
    /// The vCPU's number, from 0.
    pub index: usize,
    /// The CPU to pin the thread to.
    pub pin: Option<usize>,
    /// Formats the registers for a failure's report.
    pub describe: fn(&VcpuFd) -> String,
    /// Extracts state of a vCPU whose guest did not end by power-off.
    pub keep: fn(&VcpuFd) -> Option<Kept>,
    /// Enters the sandbox, after all other preparations.
    pub enter: Box<dyn FnOnce() -> io::Result<()> + Send>,
    /// Called once on its thread when the vCPU has exited or failed to start
    /// ([`Vcpu::take_failed`]).
    pub on_end: Box<dyn FnOnce() + Send>,
}

impl Vcpu {
    /// Starts the thread, which pins and sandboxes itself while the caller creates the vCPU: both
    /// take about the same time. It runs nothing before [`Vcpu::give`].
    pub fn spawn(thread: Thread) -> Result<Self, Error> {
        let Thread { index, pin, describe, keep, enter, on_end } = thread;
        kick::install().map_err(|e| Error::Spawn(index, e))?;
        let shared = Arc::new(Shared {
            index,
            command: AtomicU8::new(Command::Pause as u8),
            flushes: AtomicU64::new(0),
            throttled: AtomicBool::new(false),
            traps: OnceLock::new(),
            parked: AtomicBool::new(false),
            describe,
            keep,
            inner: Mutex::new(Inner {
                state: RunState::Running,
                kick: None,
                life: None,
                call: None,
                exits: Exits::default(),
                failed: None,
                ended: None,
                flushed: 0,
                nap: None,
                debug: kvm_guest_debug::default(),
            }),
            changed: Condvar::new(),
        });
        let mine = shared.clone();
        let body = move || {
            let prepared = pin
                .map_or(Ok(()), |cpu| affinity::pin(cpu).map_err(|e| Error::Pin(index, cpu, e)))
                .and_then(|()| enter().map_err(|e| Error::Sandbox(index, e)));
            let ended = match prepared.and_then(|()| mine.life().map(|life| life(&mine)).transpose()) {
                Ok(ended) => ended,
                Err(error) => {
                    mine.lock().failed = Some(error);
                    None
                }
            };
            let mut inner = mine.lock();
            inner.state = RunState::Exited;
            inner.ended = ended;
            // A waiting caller gets no answer.
            inner.call = None;
            drop(inner);
            mine.changed.notify_all();
            on_end();
        };
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{index}"))
            // The loop is shallow. Hundreds of vCPUs should not reserve gigabytes of address space.
            .stack_size(256 << 10)
            .spawn(body)
            .map_err(|e| Error::Spawn(index, e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Gives the thread its vCPU: KVM's descriptor, a closure that sets the initial state, and the
    /// handler of its exits. The thread sets the state while the caller continues. Then it is
    /// `Paused`, unless it is resumed before.
    pub fn give<P, F>(&self, processor: Processor, prepare: P, on_exit: F)
    where
        P: FnOnce(&VcpuFd) -> Result<(), Unprepared> + Send + 'static,
        F: FnMut(VcpuExit<'_>) -> Flow + Send + 'static,
    {
        self.run_on(processor.page.clone(), processor, |processor| prepare(processor), on_exit);
    }

    fn run_on<V, P, F>(&self, page: Arc<RunPage>, mut vcpu: V, prepare: P, mut on_exit: F)
    where
        V: run::Run + Send + 'static,
        P: FnOnce(&V) -> Result<(), Unprepared> + Send + 'static,
        F: FnMut(VcpuExit<'_>) -> Flow + Send + 'static,
    {
        let life = move |shared: &Shared| {
            prepare(&vcpu).map_err(|error| Error::Prepare(shared.index, error))?;
            shared.lock().kick = Some(Kick::of_this_thread(page.clone()));
            let mut on_exit = |exit: VcpuExit<'_>| run::one_by_one(exit, page.port_size(), &mut on_exit);
            let ended = run::run(shared, &mut vcpu, &mut on_exit);
            // Before the vCPU is dropped.
            shared.lock().kick = None;
            Ok(ended)
        };
        self.shared.lock().life = Some(Box::new(life));
        self.shared.changed.notify_all();
    }

    /// Waits until the thread is ready, or returns why it never will be. Called once, before it is
    /// resumed.
    pub fn ready(&self) -> Result<(), Error> {
        let mut inner = self.wait(|inner| inner.state != RunState::Running)?;
        inner.failed.take().map_or(Ok(()), Err)
    }

    /// The vCPU's number.
    pub fn index(&self) -> usize {
        self.shared.index
    }

    /// The current state.
    pub fn state(&self) -> RunState {
        self.shared.lock().state
    }

    /// Whether it is out of the guest and stays out. A vCPU that was told to run may still be
    /// paused for a moment.
    pub(crate) fn stands_still(&self) -> bool {
        let inner = self.shared.lock();
        match inner.state {
            RunState::Running => false,
            RunState::Paused => self.shared.command() != Command::Run,
            RunState::Exited => true,
        }
    }

    /// Lets it run, unless its debugger holds it back.
    pub fn resume(&self) {
        if !self.shared.parked.load(Ordering::SeqCst) {
            self.command(Command::Run);
        }
    }

    /// Asks it to pause. [`Vcpu::wait_paused`] waits for that.
    pub(crate) fn request_pause(&self) {
        self.command(Command::Pause);
    }

    /// Waits until it is out of the guest: paused or exited.
    pub fn wait_paused(&self) -> Result<(), Error> {
        self.wait(|inner| inner.state != RunState::Running).map(drop)
    }

    /// Ends it. The guest's state is lost.
    pub fn request_stop(&self) {
        self.command(Command::Stop);
    }

    /// Takes the reason why it never ran, if so.
    pub fn take_failed(&self) -> Option<Error> {
        self.shared.lock().failed.take()
    }

    /// Takes how it ended, once it has.
    pub fn take_ended(&self) -> Option<Ended> {
        self.shared.lock().ended.take()
    }

    /// Exits by reason; exact when it is not running.
    pub fn exits(&self) -> Exits {
        self.shared.lock().exits
    }

    fn request_flush(&self) -> u64 {
        let inner = self.shared.lock();
        let ticket = self.shared.flushes.fetch_add(1, Ordering::SeqCst) + 1;
        inner.interrupt();
        drop(inner);
        // A sleeping vCPU is already out of the guest. It reports that when woken.
        self.shared.changed.notify_all();
        ticket
    }

    /// Runs `call` on the vCPU's own thread while it is paused, and returns its result.
    pub fn with<R: Send + 'static>(
        &self,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.begin(call)?.wait()
    }

    /// Like [`Vcpu::with`], but does not wait for the call.
    pub fn begin<R: Send + 'static>(
        &self,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<Answer<R>, Error> {
        self.shared.begin(call)
    }

    fn command(&self, command: Command) {
        let inner = self.shared.lock();
        self.shared.command.store(command as u8, Ordering::SeqCst);
        inner.interrupt();
        drop(inner);
        self.shared.changed.notify_all();
    }

    fn wait(&self, until: impl Fn(&Inner) -> bool) -> Result<MutexGuard<'_, Inner>, Error> {
        self.shared.wait_unless(until, || Ok(()))
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.request_stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Pauses all of `vcpus`. Returns when each has acknowledged, with the time that took.
pub fn pause_all(vcpus: &[Vcpu]) -> Result<Duration, Error> {
    pause_all_unless(vcpus, || Ok(()))
}

/// Like [`pause_all`], but gives up with `hopeful`'s error soon after it returns one.
pub fn pause_all_unless<E: From<Error>>(
    vcpus: &[Vcpu],
    hopeful: impl Fn() -> Result<(), E>,
) -> Result<Duration, E> {
    let start = Instant::now();
    vcpus.iter().for_each(Vcpu::request_pause);
    let paused = |inner: &Inner| inner.state != RunState::Running;
    vcpus.iter().try_for_each(|vcpu| vcpu.shared.wait_unless(paused, &hopeful).map(drop))?;
    Ok(start.elapsed())
}

/// Takes all of `vcpus` out of `KVM_RUN` once and lets them continue. Returns when each has been
/// out. Anything that KVM or the processor held back (a page of PML entries, a half-served fault)
/// is then in the dirty log.
pub fn flush_all(vcpus: &[Vcpu]) -> Result<(), Error> {
    let tickets: Vec<u64> = vcpus.iter().map(Vcpu::request_flush).collect();
    vcpus.iter().zip(tickets).try_for_each(|(vcpu, ticket)| {
        vcpu.wait(|inner| inner.flushed >= ticket || inner.state != RunState::Running).map(drop)
    })
}

/// Lets all of `vcpus` run.
pub fn resume_all(vcpus: &[Vcpu]) {
    vcpus.iter().for_each(Vcpu::resume);
}
