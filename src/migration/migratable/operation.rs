//! The current operation of a machine and its owner, as seen by the event loop's thread. There is
//! at most one. An operation that moves memory and state out of the machine has a thread.
//! [`SaveOperation`] communicates with the thread and holds what has been measured and decided so
//! far.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::MigratableMachine;
use crate::events::{Said, SenderCommand};
use crate::link::GiveUp;
use crate::threads;
use vellum_control::Event;
use vellum_control::operation::{Asker, CLIENT_GONE, Kind, News, UnderWay};
use vellum_kvm::dirty::Method;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::Inspect;
use vellum_machine::dump::Dumping;

/// The current operation.
pub(super) struct Operation {
    kind: Kind,
    /// The number of the request, which its events carry.
    id: Option<u64>,
    /// The client that requested it, while it is connected.
    owner: Option<Asker>,
    work: Work,
}

/// How the operation is executed.
pub(super) enum Work {
    /// By a thread.
    SaveOperation(Box<SaveOperation>),
    /// By turns of the event loop.
    Dumping(Box<DumpJob>),
}

/// The destination of a dump if the guest panics.
#[derive(Debug)]
pub struct OnPanic {
    /// The file, without a name.
    pub file: File,
    /// Its future name.
    pub name: String,
    /// Signals the process's guard to name it.
    pub written: EventFd,
}

/// A dump in progress.
pub(super) struct DumpJob {
    pub(super) dumping: Dumping,
    /// How the guest has ended, if that is the reason for the dump.
    pub(super) ended: Option<(Exit, OnPanic)>,
}

impl Operation {
    /// An operation that `by` has requested.
    pub(super) fn new(kind: Kind, by: Option<Asker>, work: Work) -> Self {
        Self { kind, id: by.map(|by| by.id), owner: by, work }
    }
}

/// At most one operation.
#[derive(Default)]
pub(super) struct AtMostOne(Option<Operation>);

impl AtMostOne {
    /// Begins an operation. None may be in progress.
    pub(super) fn begin(&mut self, operation: Operation) {
        debug_assert!(self.0.is_none(), "an operation is under way");
        self.0 = Some(operation);
    }

    /// Ends the operation. If it has a thread, the thread is gone afterwards.
    pub(super) fn end(&mut self) {
        self.0 = None;
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        Some(self.0.as_ref()?.kind)
    }

    /// The number that its events carry.
    pub(super) fn id(&self) -> Option<u64> {
        self.0.as_ref()?.id
    }

    /// Whether the client of this connection requested it.
    pub(super) fn is_of(&self, connection: u64) -> bool {
        let owner = self.0.as_ref().and_then(|operation| operation.owner);
        owner.is_some_and(|owner| owner.connection == connection)
    }

    pub(super) fn under_way(&self) -> Option<UnderWay> {
        let Operation { kind, id, owner, .. } = self.0.as_ref()?;
        Some(UnderWay { kind: *kind, id: *id, client: owner.and_then(|owner| owner.pid) })
    }

    pub(super) fn leaving(&self) -> Option<&SaveOperation> {
        match &self.0.as_ref()?.work {
            Work::SaveOperation(leaving) => Some(leaving),
            Work::Dumping(_) => None,
        }
    }

    pub(super) fn leaving_mut(&mut self) -> Option<&mut SaveOperation> {
        match &mut self.0.as_mut()?.work {
            Work::SaveOperation(leaving) => Some(leaving),
            Work::Dumping(_) => None,
        }
    }

    pub(super) fn dumping(&mut self) -> Option<&mut DumpJob> {
        match &mut self.0.as_mut()?.work {
            Work::Dumping(job) => Some(job),
            Work::SaveOperation(_) => None,
        }
    }

    /// Whether it is a dump of a guest that has panicked.
    pub(super) fn is_of_panic(&self) -> bool {
        self.0.as_ref().is_some_and(|operation| operation.kind == Kind::Dump && operation.id.is_none())
    }

    /// Takes the dump, to end it.
    pub(super) fn take_dump(&mut self) -> Option<DumpJob> {
        match self.0.take() {
            Some(Operation { work: Work::Dumping(job), .. }) => Some(*job),
            other => {
                self.0 = other;
                None
            }
        }
    }

    /// Its client has disconnected.
    fn disown(&mut self) {
        if let Some(operation) = &mut self.0 {
            operation.owner = None;
        }
    }
}

impl<P: Inspect> MigratableMachine<P> {
    /// Reports an event of the current operation to subscribers.
    pub(super) fn tell(&mut self, event: Event) {
        self.news.push(News { id: self.operation.id(), event });
    }

    /// Fails if an operation is in progress. Only one is possible at a time: the dirty log has one
    /// user, and a dump shows one moment.
    pub(super) fn is_idle(&self) -> Result<(), String> {
        match self.operation.under_way() {
            None => Ok(()),
            Some(busy) => Err(format!("another operation is under way ({busy}): {}", busy.kind.remedy())),
        }
    }

    /// The client of this connection has disconnected. Ends its operation unless that continues
    /// without a client.
    pub(super) fn end_of_client(&mut self, connection: u64) {
        let Some(kind) = self.operation.kind().filter(|_| self.operation.is_of(connection)) else { return };
        self.operation.disown();
        match kind {
            kind if kind.outlives_client() => {}
            Kind::Dump => self.end_dump(Err(std::io::Error::other(CLIENT_GONE))),
            _ => self.cancel(CLIENT_GONE),
        }
    }

    /// Cancels the thread of a migration, an upgrade or a snapshot.
    pub(super) fn cancel(&self, why: &str) {
        let Some(leaving) = self.operation.leaving() else { return };
        // A blocked link must not delay a cancellation. After COMMIT the target is asked first.
        if !self.held.unconfirmed {
            leaving.give_up.now();
        }
        leaving.tell(SenderCommand::Cancel(why.into()));
    }
}

/// A migration, an upgrade or a snapshot.
pub(super) struct SaveOperation {
    /// Whether the machine ends once it is saved.
    pub(super) stop: bool,
    /// The descriptor that connects this process to the one that replaces it.
    pub(super) successor: Option<OwnedFd>,
    /// None once the thread is to find its channel disconnected.
    pub(super) thread_end: Option<threads::MachineEnd<Said, SenderCommand>>,
    pub(super) give_up: GiveUp,
    pub(super) thread: Option<JoinHandle<()>>,
    /// When the machine was paused for the final pass.
    pub(super) paused: Option<Instant>,
    /// How long it was paused, once it has resumed.
    pub(super) stood: Option<Duration>,
    /// When the pause was requested, when the machine was paused, and when its state was saved, in
    /// microseconds of CLOCK_MONOTONIC.
    pub(super) steps: [u64; 3],
    /// How its dirty pages are collected, once tracking is on.
    pub(super) tracker: Option<Method>,
    /// Whether dirty tracking may continue after a snapshot.
    pub(super) keeps_log: bool,
    /// Why the method with the lowest cost for the guest is not used.
    pub(super) distrust: Option<&'static str>,
    /// With postcopy, how long the guest had been paused when it started on the target, in
    /// microseconds.
    pub(super) ahead: Option<u64>,
    /// Whether some of the guest's memory was not sent before its hand-over.
    pub(super) needed: bool,
    /// Whether the link to the target has dropped.
    pub(super) severed: bool,
    /// Whether its state is written for a live update. The guest must not run then.
    pub(super) preserved: bool,
}

impl SaveOperation {
    /// An operation whose thread is still to be started. `thread_end` is this side's end of the
    /// channel.
    pub(super) fn new(
        thread_end: threads::MachineEnd<Said, SenderCommand>,
        distrust: Option<&'static str>,
    ) -> Self {
        Self {
            stop: false,
            successor: None,
            thread_end: Some(thread_end),
            give_up: GiveUp::default(),
            thread: None,
            paused: None,
            stood: None,
            steps: [0; 3],
            tracker: None,
            keeps_log: true,
            distrust,
            ahead: None,
            needed: false,
            severed: false,
            preserved: false,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    pub(super) fn tell(&self, told: SenderCommand) {
        if let Some(thread) = &self.thread_end {
            thread.tell(told);
        }
    }
}

impl Drop for SaveOperation {
    fn drop(&mut self) {
        self.give_up.now();
        self.tell(SenderCommand::Cancel("its machine is being ended".into()));
        // The thread then finds its channel disconnected, whatever it is doing.
        self.thread_end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
