//! The operation that a machine has under way, as its event loop's thread sees it: at most one, and whose it is. One by which memory and
//! state leave it has a thread of its own; [`SaveOperation`] is the end that speaks to that, and what has been measured and decided so far.

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

/// What is under way.
pub(super) struct Operation {
    kind: Kind,
    /// The number of the request, which events carry.
    id: Option<u64>,
    /// Who asked, while that client is there.
    owner: Option<Asker>,
    work: Work,
}

/// How it is done.
pub(super) enum Work {
    /// By a thread.
    SaveOperation(Box<SaveOperation>),
    /// By turns of the event loop.
    Dumping(Box<DumpJob>),
}

/// Where a guest that panics is dumped to.
#[derive(Debug)]
pub struct OnPanic {
    /// The file, without a name.
    pub file: File,
    /// What it will be called.
    pub name: String,
    /// Has it named, by the process's guard.
    pub written: EventFd,
}

/// A dump that is under way.
pub(super) struct DumpJob {
    pub(super) dumping: Dumping,
    /// How the guest has ended, where that is why.
    pub(super) ended: Option<(Exit, OnPanic)>,
}

impl Operation {
    /// An operation that `by` has asked for.
    pub(super) fn new(kind: Kind, by: Option<Asker>, work: Work) -> Self {
        Self { kind, id: by.map(|by| by.id), owner: by, work }
    }
}

/// At most one operation.
#[derive(Default)]
pub(super) struct AtMostOne(Option<Operation>);

impl AtMostOne {
    /// Begins one, where none is under way.
    pub(super) fn begin(&mut self, operation: Operation) {
        debug_assert!(self.0.is_none(), "an operation is under way");
        self.0 = Some(operation);
    }

    /// Ends it. Its thread, if it has one, is gone then.
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

    /// Whether the client of this connection has asked for it.
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
            Work::Dumping(errand) => Some(errand),
            Work::SaveOperation(_) => None,
        }
    }

    /// Whether it is a dump of a guest that has panicked.
    pub(super) fn is_of_panic(&self) -> bool {
        self.0.as_ref().is_some_and(|operation| operation.kind == Kind::Dump && operation.id.is_none())
    }

    /// Takes a dump that is over, or is to be.
    pub(super) fn take_dump(&mut self) -> Option<DumpJob> {
        match self.0.take() {
            Some(Operation { work: Work::Dumping(errand), .. }) => Some(*errand),
            other => {
                self.0 = other;
                None
            }
        }
    }

    /// Its client has gone.
    fn disown(&mut self) {
        if let Some(operation) = &mut self.0 {
            operation.owner = None;
        }
    }
}

impl<P: Inspect> MigratableMachine<P> {
    /// Tells who listens what happens in the operation that is under way.
    pub(super) fn tell(&mut self, event: Event) {
        self.news.push(News { id: self.operation.id(), event });
    }

    /// One operation is under way at a time: the log of dirty pages is one user's, and a dump is of one moment.
    pub(super) fn is_idle(&self) -> Result<(), String> {
        match self.operation.under_way() {
            None => Ok(()),
            Some(busy) => Err(format!("another operation is under way ({busy}): {}", busy.kind.remedy())),
        }
    }

    /// The client of this connection has gone: what it has asked for ends, unless that goes on without it.
    pub(super) fn end_of_client(&mut self, connection: u64) {
        let Some(kind) = self.operation.kind().filter(|_| self.operation.is_of(connection)) else { return };
        self.operation.disown();
        match kind {
            kind if kind.outlives_client() => {}
            Kind::Dump => self.end_dump(Err(std::io::Error::other(CLIENT_GONE))),
            _ => self.cancel(CLIENT_GONE),
        }
    }

    /// Has the thread of a migration, an upgrade or a snapshot give up.
    pub(super) fn cancel(&self, why: &str) {
        let Some(leaving) = self.operation.leaving() else { return };
        // A link that takes nothing holds up nobody who has had enough. After COMMIT the target is asked first.
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
    /// What ties this process to the one that it moves to, where that stands in for this one.
    pub(super) successor: Option<OwnedFd>,
    /// None once it is to find nobody there.
    pub(super) thread_end: Option<threads::MachineEnd<Said, SenderCommand>>,
    pub(super) give_up: GiveUp,
    pub(super) thread: Option<JoinHandle<()>>,
    /// When the machine was paused for the final pass.
    pub(super) paused: Option<Instant>,
    /// How long it stood still, once it goes on.
    pub(super) stood: Option<Duration>,
    /// When it was to stand still for that, when it did, and when its state had been saved.
    pub(super) steps: [u64; 3],
    /// How its dirty pages are collected, once they are.
    pub(super) tracker: Option<Method>,
    /// Why they are not collected in the way that costs the guest least.
    pub(super) distrust: Option<&'static str>,
    /// For how long the guest had stood still, in microseconds, when it ran on the target, which lacks some of its memory.
    pub(super) ahead: Option<u64>,
    /// Whether the link to that is cut.
    pub(super) severed: bool,
}

impl SaveOperation {
    /// One whose thread is to be started, and is spoken to by `thread_end`.
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
            distrust,
            ahead: None,
            severed: false,
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
        // Then it finds nobody there, whatever it is at.
        self.thread_end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
