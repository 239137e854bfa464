//! The process around a machine: its signals, the guard of its sockets, privileges, sandbox,
//! control socket, event loop, progress and logs. One session runs one [`SessionMachine`].
//! [`kernel`] and [`builtin`] start the two kinds of machine.
//!
//! A start has these steps, each once:
//!
//! 1. [`Session::open`]: block signals, fork the guard, bind the control socket. There are no
//!    threads yet.
//! 2. Open the machine's files and map its memory.
//! 3. [`Session::confine`]: drop privileges and the ability to open paths.
//! 4. Start the machine's threads. Each enters the sandbox itself.
//! 5. [`Session::run`]: main enters the sandbox. After that the first vCPU enters the guest.

pub mod builtin;
mod config;
mod error;
pub mod incoming;
pub mod kernel;
pub mod log;
pub mod progress;
mod requests;
pub mod supervisor;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{
    EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberId, SubscriberOps,
};
use kvm_ioctls::Kvm;
use vmm_sys_util::eventfd::EventFd;

pub use self::config::{Config, Gdb, Supervised};
pub use self::error::Error;
use vellum_control::Event;
use vellum_control::server::{Control, Heard, Listeners};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::gdb;
use vellum_machine::{EventSources, SessionMachine, Subscriber};
use vellum_sandbox::{OfGuard, Sandbox, user};
use vellum_sys::file;
use vellum_sys::guard::{self, Naming};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::program::{SETTLING, release_start_up_code};
use vellum_sys::signal::{ENDING, KILL, REPEATS, STOPPING, SignalFd, UNUSED};
use vellum_sys::socket::{self, Listener, Name, SocketError};
use vellum_sys::terminal;

/// How long a guest may take to stop after it was asked.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a guest may print nothing before the user is told.
const SILENCE: Duration = Duration::from_secs(10);
/// The interval of progress events on the control socket.
const TELLING: Duration = Duration::from_secs(1);
/// The interval at which the progress bar is redrawn.
const REDRAWING: Duration = Duration::from_millis(100);

/// What ended a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The guest ended by itself.
    Guest,
    /// The time limit.
    Limit,
    /// A request on the control socket.
    Stop,
    /// A signal.
    Signal(i32),
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The exit status of the process.
    pub exit: Exit,
    /// What ended the run.
    pub cause: Cause,
}

/// The process around one machine.
pub struct Session {
    events: EventManager<Subscriber>,
    signals: Receiver<i32>,
    /// A signal that ended the wait for a slow reader of the guest's output.
    unheard: Option<i32>,
    heard: Receiver<Heard>,
    listeners: Listeners,
    sandbox: Sandbox,
    /// The configuration that the session was opened with.
    config: Config,
    /// When the time limit ends.
    deadline: Option<Instant>,
    /// The control socket.
    control: Option<Arc<Mutex<Control>>>,
    /// The sender for signals that arrive from the supervisor. It is `Some` until the machine runs
    /// here: until then the previous process uses the control socket and the supervisor.
    stands_in: Option<Sender<i32>>,
    /// The socket that a debugger connects to.
    gdb: Option<Listener>,
    /// Subscribers of the event loop other than signals.
    served: Vec<SubscriberId>,
    /// The guards, until they have closed this process's descriptors.
    guards: Vec<guard::Started>,
}

/// The subscriber for signals.
struct Signals {
    descriptor: SignalFd,
    caught: Sender<i32>,
}

impl MutEventSubscriber for Signals {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Watching a signalfd cannot fail.
        let _ = ops.add(Events::new(&self.descriptor, EventSet::IN));
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        let Some(signal) = self.descriptor.read() else { return };
        if STOPPING.contains(&signal) {
            terminal::stop(signal);
        } else {
            // The receiver lives as long as the event loop.
            let _ = self.caught.send(signal);
        }
    }
}

/// The subscriber for a machine's eventfds. An event ends a turn of the loop, and the machine is
/// polled afterwards.
struct Wakes(Vec<Arc<EventFd>>);

impl MutEventSubscriber for Wakes {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for event in &self.0 {
            // Watching an eventfd cannot fail.
            let _ = ops.add(Events::new(&**event, EventSet::IN));
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {}
}

/// Whether only root gives names in this directory.
fn is_of_root(directory: Option<&Path>) -> bool {
    let about = directory.and_then(|directory| std::fs::metadata(directory).ok());
    about.is_some_and(|about| about.uid() == 0 && about.mode() & 0o022 == 0)
}

impl Session {
    /// Takes over the process: blocks signals, starts the guard and binds the control socket. The
    /// guard removes the control socket and `sockets` when this process ends, and gives the file of
    /// `naming` its name when that is written. Called before there are threads.
    ///
    /// # Errors
    /// The host refuses, or the name of the control socket is in use.
    pub fn open<'a>(
        config: &'a Config,
        sockets: impl IntoIterator<Item = &'a Path>,
        naming: Option<Naming>,
    ) -> Result<Self, Error> {
        let (ask, heard) = channel();
        let lent = config.lent.as_ref().and_then(|lent| lent.control.clone());
        let bind = |path: &Path| match &lent {
            Some(socket) => socket
                .try_clone()
                .and_then(|socket| Control::handed_over(socket, path, ask))
                .map_err(|source| SocketError::Io { path: path.into(), source }),
            None => Control::bind(path, ask),
        };
        // The guard starts first, so that it inherits none of the sockets bound below. It uses
        // their names only after this process has ended.
        let door = config.gdb.as_ref().map(|gdb| gdb.socket.as_path());
        let own = config.control.as_deref().into_iter().chain(door);
        // Root removes no name that the machine's user has chosen or can give to another file.
        let user = config.user.filter(|_| config.opens_as_user);
        let is_users = |path: &Path| user.is_some() && !is_of_root(path.parent());
        let (mut names, mut of_user): (Vec<_>, Vec<_>) = own.partition(|path| !is_users(path));
        if user.is_some() { &mut of_user } else { &mut names }.extend(sockets);
        let names_of =
            |paths: Vec<&Path>| paths.into_iter().filter_map(|path| Name::new(path).ok()).collect();
        let confined = OfGuard::new(config.sandbox);
        let failed = |error| Error::Host("the guard of its sockets", error);
        let guard = guard::start(names_of(names), config.log.as_deref(), naming, || confined.enter());
        let mut guards = vec![guard.map_err(failed)?];
        if let Some(user) = user {
            let confine = || {
                user::drop_privileges(user).map_err(|error| error.source)?;
                confined.enter()
            };
            guards.push(guard::start(names_of(of_user), None, None, confine).map_err(failed)?);
        }
        let control = config.control.as_deref().map(bind).transpose();
        let control = control.map_err(Error::Control)?;
        if let Some(log) = &config.log {
            name_log(log).map_err(|error| Error::Host("the name of its log", error))?;
        }
        let gdb = config.gdb.as_ref().map(|gdb| Listener::bind(&gdb.socket)).transpose();
        let gdb = gdb.map_err(gdb::Error::Socket)?;
        let descriptor = SignalFd::new(&[&ENDING[..], &STOPPING, &UNUSED].concat())
            .map_err(|error| Error::Host("signalfd", error))?;
        let (caught, signals) = channel();
        let mut events = EventManager::<Subscriber>::new()?;
        events.add_subscriber(Arc::new(Mutex::new(Signals { descriptor, caught: caught.clone() })));
        if let Some(waits) = config.waits.clone().filter(|_| !config.outlives_client) {
            events.add_subscriber(Arc::new(Mutex::new(supervisor::ClientSocket(waits, caught.clone()))));
        }
        let listeners = control.as_ref().map(Control::listeners).unwrap_or_default();
        let mut session = Self {
            events,
            signals,
            unheard: None,
            heard,
            listeners,
            sandbox: Sandbox::new(config.sandbox),
            config: config.clone(),
            deadline: None,
            control: control.map(|control| Arc::new(Mutex::new(control))),
            stands_in: config.lent.as_ref().map(|_| caught),
            gdb,
            served: Vec::new(),
            guards,
        };
        if let Some(control) = session.control.clone().filter(|_| session.stands_in.is_none()) {
            session.serve(control);
        }
        Ok(session)
    }

    /// Drops privileges and the ability to open paths, for the whole process. Each thread started
    /// from now on gets the returned sandbox and enters it right before its loop.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn confine(&mut self) -> Result<Sandbox, Error> {
        self.guards.clear();
        if let Some(user) = self.config.user {
            user::drop_privileges(user)?;
        }
        self.sandbox.process()?;
        Ok(self.sandbox)
    }

    /// Opens the socket for a debugger, if this KVM can debug a guest.
    fn door(&mut self, kvm: &Kvm) -> Result<Option<gdb::Door>, Error> {
        let Some(gdb) = &self.config.gdb else { return Ok(None) };
        Ok(self.gdb.take().map(|listener| gdb::Door::open(listener, gdb.waits, kvm)).transpose()?)
    }

    /// Opens the pagemap, which shows which memory of this process was ever touched, for machines
    /// that can migrate. Called before [`Session::confine`]. Without it a migration reads all
    /// memory once.
    fn pagemap(process: &Config) -> Option<Arc<Pagemap>> {
        process.control.as_ref().and_then(|_| Pagemap::open().ok()).map(Arc::new)
    }

    /// The state of the sandbox, for results.
    pub(crate) fn sandbox_status(&self) -> String {
        self.sandbox.status()
    }

    /// Registers the new event sources of `machine`.
    fn serve_for<P: SessionMachine>(&mut self, machine: &mut P) {
        let EventSources { subscribers, wakes } = machine.event_sources();
        subscribers.into_iter().for_each(|subscriber| self.serve(subscriber));
        if !wakes.is_empty() {
            self.serve(Arc::new(Mutex::new(Wakes(wakes))));
        }
    }

    /// Registers `subscriber`.
    pub fn serve(&mut self, subscriber: Subscriber) {
        self.served.push(self.events.add_subscriber(subscriber));
    }

    /// Runs `machine` until it ends, the user ends it, or its time is over.
    ///
    /// # Errors
    /// The machine cannot go on, or the event loop fails.
    pub fn run<P: SessionMachine>(&mut self, machine: &mut P) -> Result<End, Error>
    where
        Error: From<P::Error>,
    {
        self.serve_for(machine);
        self.sandbox.enter(machine.confinement(), "main")?;
        machine.start()?;
        let deadline = self.config.limit.map(|limit| Instant::now() + limit);
        self.deadline = deadline;
        let end = self.turns(machine, deadline)?;
        self.listeners.tell(&Event::Ended { status: end.exit.code() }.into());
        machine.stop();
        self.flush(machine, end.cause, deadline)?;
        Ok(end)
    }

    /// Runs the event loop until the machine has ended.
    fn turns<P: SessionMachine>(&mut self, machine: &mut P, deadline: Option<Instant>) -> Result<End, Error>
    where
        Error: From<P::Error>,
    {
        let bar = progress::of(machine.progress(), self.config.limit);
        let mut told = Instant::now();
        let mut silence = self.config.tells_of_silence.then(|| Instant::now() + SILENCE);
        let mut settled = false;
        let mut ending: Option<(Cause, Instant)> = None;
        let mut asked: Option<(i32, Instant)> = None;
        loop {
            let polled = machine.poll();
            machine.news().iter().for_each(|news| self.listeners.tell(news));
            self.serve_for(machine);
            if !machine.state().is_arriving() {
                self.stand_in();
                if let Some(waits) = self.config.waits.take() {
                    // If the client has ended, the event loop notices that next.
                    let _ = socket::send_some(&waits, &[1]);
                }
            }
            if let Some(exit) = polled? {
                bar.finish_and_clear();
                let cause = ending.map_or(Cause::Guest, |(cause, _)| cause);
                let exit = match cause {
                    Cause::Signal(signal) if exit == Exit::PowerOff => Exit::Signal(signal),
                    _ => exit,
                };
                return Ok(End { exit, cause });
            }
            let left = deadline.filter(|_| ending.is_none());
            if let Some((_, since)) = ending.as_mut().filter(|_| !machine.state().is_settled()) {
                // A migration that is under way, or was handed over, ends by itself.
                *since = Instant::now();
            }
            let left = left.or(ending.map(|(_, since)| since + END_TIMEOUT));
            let left = left.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            // Without a terminal or listeners, only events and the deadline matter.
            let tells = machine.progress().is_some() && !self.listeners.is_empty();
            let waits = [
                left,
                silence.map(|at| at.saturating_duration_since(Instant::now())),
                terminal::regain().then_some(terminal::LOOK),
                (!bar.is_hidden()).then_some(REDRAWING),
                tells.then(|| TELLING.saturating_sub(told.elapsed())),
            ];
            let wait = waits.into_iter().flatten().min();
            let settling = wait.map_or(SETTLING, |wait| wait.min(SETTLING));
            let first = if settled { wait } else { Some(settling) };
            if self.events.run_with_timeout(milliseconds(first))? == 0 && !settled {
                // Unmapping makes vCPUs fault too, so it waits until the guest has started. It is
                // the last act before main sleeps, because code that main runs afterwards is mapped
                // again.
                settled = true;
                release_start_up_code();
                let rest = wait.map(|wait| wait.saturating_sub(settling));
                self.events.run_with_timeout(milliseconds(rest))?;
            }
            if machine.is_paused() {
                silence = silence.map(|_| Instant::now() + SILENCE);
            }
            if silence.take_if(|at| Instant::now() >= *at).is_some()
                && let Some(lacks) = machine.silence().filter(|_| ending.is_none())
            {
                let seconds = SILENCE.as_secs();
                tracing::warn!(
                    "the guest has printed nothing for {seconds} s; its kernel may lack {lacks}; vellum doctor says whether \
                     this host's KVM runs Linux guests"
                );
            }
            let mut cause = None;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                cause = Some(Cause::Limit);
            }
            cause = self.obey(machine).or(cause);
            let is_repeat = |signal| {
                signal != KILL && asked.is_some_and(|(first, at)| first == signal && at.elapsed() < REPEATS)
            };
            if let Some(signal) = self.signals.try_recv().ok().filter(|signal| !is_repeat(*signal)) {
                asked = Some((signal, Instant::now()));
                if signal == KILL || matches!(ending, Some((Cause::Signal(_), _))) {
                    // The second signal: end without waiting for the guest.
                    return Ok(End { exit: Exit::Signal(signal), cause: Cause::Signal(signal) });
                }
                cause = Some(Cause::Signal(signal));
                ending = None;
            }
            if let (None, Some(cause)) = (ending, cause) {
                // A paused guest cannot see the request to end.
                self.resume(machine, None);
                if !machine.request_end() {
                    return Ok(End { exit: abrupt(cause), cause });
                }
                ending = Some((cause, Instant::now()));
            }
            if let Some((cause, since)) = ending {
                if since.elapsed() >= END_TIMEOUT && machine.state().is_settled() {
                    tracing::warn!(
                        "the guest has not stopped within {} s: it is cut off",
                        END_TIMEOUT.as_secs()
                    );
                    // The result reads guest memory.
                    machine.pause()?;
                    return Ok(End { exit: abrupt(cause), cause });
                }
                // The guest may have been paused again, and would then never see the request to
                // end.
                self.resume(machine, None);
            }
            if let Some(progress) = machine.progress() {
                bar.set_position(progress.done);
                if told.elapsed() >= TELLING {
                    told = Instant::now();
                    let told = Event::Progress { done: progress.done, of: progress.of };
                    self.listeners.tell(&told.into());
                }
            }
        }
    }

    /// Takes over the sockets that the previous process lent, once the machine runs here. From now
    /// on clients and signals come to this process, and its exit status is reported to the previous
    /// process.
    fn stand_in(&mut self) {
        let (Some(caught), Some(lent)) = (self.stands_in.take(), &self.config.lent) else { return };
        supervisor::set(lent.supervisor.clone());
        let supervisor = supervisor::SupervisorSocket(lent.supervisor.clone(), caught);
        self.serve(Arc::new(Mutex::new(supervisor)));
        if let Some(control) = self.control.clone() {
            self.serve(control);
        }
    }

    /// Waits for the process that took over the machine. Called when nothing of the machine is left
    /// here. Signals are passed on, and the exit status of that process is returned. A process that
    /// took over from another does not wait, because its successor has the supervisor.
    pub fn wait_for(&mut self, successor: OwnedFd) -> Exit {
        while let Ok(heard) = self.heard.try_recv() {
            if let Heard::Asked(asked) = heard {
                asked.elsewhere();
            }
        }
        self.control = None;
        self.listeners.clear();
        for served in std::mem::take(&mut self.served) {
            let _ = self.events.remove_subscriber(served);
        }
        if self.config.lent.take().is_some() {
            supervisor::clear();
            return Exit::Moved;
        }
        let (tell, told) = channel();
        let successor = Arc::new(successor);
        self.serve(Arc::new(Mutex::new(supervisor::SuccessorSocket(successor.clone(), tell))));
        loop {
            if let Ok(said) = told.try_recv() {
                return said.map_or_else(
                    || {
                        tracing::error!(
                            "the process that has taken this one's machine over has ended without a word"
                        );
                        Exit::Error
                    },
                    Exit::Guest,
                );
            }
            if let Err(error) = self.events.run_with_timeout(-1) {
                tracing::error!("the event loop: {error}");
                return Exit::Error;
            }
            while let Some(signal) = self.unheard.take().or_else(|| self.signals.try_recv().ok()) {
                // A failure means that the successor has ended. The loop sees that next.
                let _ = socket::send_some(&successor, &[signal as u8]);
            }
        }
    }

    /// Waits for a slow reader of the guest's output. If the guest ended by itself, the reader has
    /// the time that is left of the run, unless the user ends it.
    fn flush<P: SessionMachine>(
        &mut self,
        machine: &mut P,
        cause: Cause,
        deadline: Option<Instant>,
    ) -> Result<(), Error>
    where
        Error: From<P::Error>,
    {
        while cause == Cause::Guest && !machine.flushed() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break;
            }
            self.events.run_with_timeout(milliseconds(left))?;
            // A signal is passed on if another process has taken the machine over.
            self.unheard = self.signals.try_recv().ok();
            let had_enough = self.unheard.is_some() || machine.poll()?.is_some();
            if had_enough || self.obey(machine).is_some() {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        terminal::restore();
    }
}

/// Gives the file that is standard error this name. The name is this process's, because its control
/// socket has the same one. The file of an earlier machine loses it.
fn name_log(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => file::name(&io::stderr(), path),
    }
}

/// The exit status of a machine that is ended without the guest's cooperation.
fn abrupt(cause: Cause) -> Exit {
    match cause {
        Cause::Guest | Cause::Stop => Exit::PowerOff,
        Cause::Limit => Exit::Timeout,
        Cause::Signal(signal) => Exit::Signal(signal),
    }
}

/// The timeout for epoll: rounded up, so that the last millisecond is not spent spinning. -1 waits
/// for ever.
fn milliseconds(left: Option<Duration>) -> i32 {
    left.map_or(-1, |left| i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX))
}
