//! The session's interface of a machine that can leave. The inner machine answers, except where a
//! migration or a snapshot takes part.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Error, MigratableMachine, NEEDED};
use crate::events::SenderCommand;
use crate::share::MAX_CONNECTIONS;
use vellum_control::operation::{Asker, Kind, News, UnderWay};
use vellum_control::{Do, MachineState};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::handoff::HandoffFds;
use vellum_machine::{
    EventSources, HandOver, Machine, MachineInfo, Progress, SaveState, SessionMachine, Subscriber,
};
use vellum_sandbox::ThreadKind;
use vellum_sys::sigbus;

impl<P: SaveState> Machine for MigratableMachine<P>
where
    Error: From<P::Error>,
{
    type Error = Error;

    fn event_sources(&mut self) -> EventSources {
        let mut serves = self.machine.event_sources();
        if !std::mem::replace(&mut self.served, true) {
            serves.wakes.push(self.wake.clone());
        }
        let wire = self.debugger.as_mut().and_then(|debugger| debugger.event_sources());
        serves.subscribers.extend(wire.map(|wire| wire as Subscriber));
        serves
    }

    fn start(&mut self) -> Result<(), Error> {
        Ok(self.let_run()?)
    }

    fn poll(&mut self) -> Result<Option<Exit>, Error> {
        let _ = self.wake.read();
        self.serve();
        self.serve_debugger();
        if let Some(exit) = self.serve_dump() {
            return Ok(self.over(exit));
        }
        if self.operation.is_of_panic() {
            return Ok(None);
        }
        if self.moved {
            return Ok(Some(Exit::Moved));
        }
        if self.stopped {
            return Ok(Some(Exit::PowerOff));
        }
        if self.held.migration || self.held.unconfirmed {
            // The target reports how the guest ended. If the guest resumes here, the inner machine
            // does.
            return Ok(None);
        }
        let ended = self.machine.poll().map_err(|error| match sigbus::shortened() {
            Some(file) => Error::Shortened(file),
            None => error.into(),
        })?;
        let Some(exit) = ended else { return Ok(None) };
        self.call_off("the guest has ended");
        if self.is_dumped_for_a_client() {
            self.over_with_dump(Err(io::Error::other("the guest has ended")));
        }
        if self.dumps(exit) {
            return Ok(None);
        }
        Ok(self.over(exit))
    }

    fn pause(&mut self) -> Result<(), Error> {
        // A snapshot or a fork resumes it soon, unless the user has paused it.
        let resumes = matches!(self.operation.kind(), Some(Kind::Snapshot | Kind::Fork));
        if self.held.unconfirmed || self.held.migration && !resumes {
            return Err(Error::HandedOver);
        }
        if !self.stands() {
            self.machine.pause()?;
        }
        self.held.user = true;
        Ok(())
    }

    fn resume(&mut self) {
        self.held.user = false;
        if let Err(error) = self.let_run() {
            tracing::error!("it cannot be started: {error}");
        }
    }

    fn request_end(&mut self) -> bool {
        if self.is_needed() {
            tracing::warn!(
                "{NEEDED}: this process ends once all of it is there; a second signal ends it now"
            );
            self.ends = true;
            return true;
        }
        if self.held.unconfirmed {
            // The guest may run elsewhere, so its end is not awaited here.
            return false;
        }
        if self.operation.leaving().is_some_and(|leaving| leaving.preserved) {
            // Its memory and state are preserved, and would differ once the guest has run. It ends as if
            // a snapshot of it had been asked for.
            self.stopped = true;
            return false;
        }
        self.call_off("its machine is being ended");
        if self.is_dumped_for_a_client() {
            // Only a running guest sees that it is to end.
            self.end_dump(Err(io::Error::other("its machine is being ended")));
        }
        self.dismiss_debugger();
        self.machine.request_end()
    }

    fn info(&self) -> MachineInfo {
        MachineInfo { stays: self.stays(), fork_stays: self.fork_stays(), ..self.machine.info() }
    }

    fn progress(&self) -> Option<Progress> {
        self.machine.progress()
    }

    fn silence(&self) -> Option<&'static str> {
        self.machine.silence()
    }

    fn ask(&mut self, by: Asker, what: &Do, mut descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        let under_way = "no migration of this machine is under way";
        let kind = self.operation.kind();
        match what {
            Do::Snapshot(asked) => return self.snapshot(by, asked, descriptors),
            Do::Fork { available, .. } => return self.fork(by, *available, descriptors),
            Do::LiveUpdate {} => return self.live_update(by, descriptors),
            Do::LiveUpdatePause {}
                if !self.operation.is_of(by.connection) || kind != Some(Kind::LiveUpdate) =>
            {
                return Err("no live update of this client is under way".into());
            }
            Do::LiveUpdatePause {} => {
                self.operation.leaving().ok_or(under_way)?.tell(SenderCommand::Preserved);
            }
            Do::SnapshotEnd {} => {
                self.since = None;
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.keeps_log = false;
                }
            }
            Do::SnapshotNamed {} | Do::SnapshotCancel { .. } if kind != Some(Kind::Snapshot) => {
                return Err("no snapshot of this machine is under way".into());
            }
            Do::SnapshotNamed {} if !self.operation.is_of(by.connection) => {
                return Err("the snapshot that is under way is another client's".into());
            }
            Do::SnapshotNamed {} => {
                self.operation.leaving().ok_or(under_way)?.tell(SenderCommand::Named);
            }
            Do::MigrateLink {}
            | Do::MigrateRecover {}
            | Do::MigrateCancel { .. }
            | Do::MigrateSet { .. }
            | Do::Resume { force: true }
                if !matches!(kind, Some(Kind::Migration | Kind::Upgrade)) =>
            {
                return Err(under_way.into());
            }
            Do::SnapshotCancel { of: Some(of) } | Do::MigrateCancel { of: Some(of) }
                if self.operation.id() != Some(*of) =>
            {
                return Err("it is over, and another one is under way".into());
            }
            Do::SnapshotCancel { .. } => self.cancel("it was cancelled"),
            Do::Migrate(asked) => {
                if !(1..=MAX_CONNECTIONS).contains(&asked.connections) {
                    return Err(format!("connections: 1 to {MAX_CONNECTIONS} are possible"));
                }
                return self.leave(by, asked, descriptors);
            }
            Do::MigrateLink {} => {
                let socket = descriptors.pop().ok_or("it takes a descriptor")?;
                let asks = self.operation.leaving().is_some_and(|leaving| leaving.ahead.is_none());
                if !self.held.unconfirmed || !asks {
                    return Err("the target is not to be asked for the outcome: no link is missing".into());
                }
                self.operation.leaving().ok_or(under_way)?.tell(SenderCommand::Linked(socket));
            }
            Do::MigrateRecover {} => {
                let (Some(faults), Some(socket)) = (descriptors.pop(), descriptors.pop()) else {
                    return Err("it takes two descriptors".into());
                };
                let leaving = self.operation.leaving().ok_or(under_way)?;
                if !leaving.severed {
                    return Err("the link to its target is not cut: there is nothing to recover".into());
                }
                leaving.tell(SenderCommand::Recovered(socket, faults));
            }
            Do::MigrateCancel { .. } | Do::Resume { force: true }
                if self
                    .operation
                    .leaving()
                    .is_some_and(|leaving| leaving.ahead.is_some() && !leaving.severed) =>
            {
                return Err(
                    "the guest runs on the target already, and needs what is here of its memory".into()
                );
            }
            Do::MigrateCancel { .. } => self.cancel("it was cancelled"),
            Do::MigrateSet { downtime_ms, bandwidth } => {
                let told = SenderCommand::Set {
                    downtime: downtime_ms.map(Duration::from_millis),
                    bandwidth: *bandwidth,
                };
                self.operation.leaving().ok_or(under_way)?.tell(told);
            }
            Do::Resume { force: true } => {
                if self.held.unconfirmed {
                    // A disk that the target has locked shows that the guest runs there.
                    let locked = |error| format!("the target still has the guest's disks: {error}");
                    self.machine.retake().map_err(locked)?;
                }
                let leaving = self.operation.leaving().ok_or(under_way)?;
                if leaving.has_ended() {
                    self.stay("the operator took it back".into());
                } else {
                    leaving.tell(SenderCommand::Force);
                }
            }
            Do::Dump {} => {
                let file = descriptors.pop().ok_or("it takes a descriptor")?;
                self.dump(by, file.into())?;
            }
            Do::Balloon { .. } | Do::Nmi {} | Do::Sysrq { .. } | Do::Serial { .. }
                if self.operation.leaving().is_some_and(|leaving| leaving.preserved) =>
            {
                return Err(
                    "it is saved for a live update of the host's kernel, and the restored machine would not have it".into()
                );
            }
            Do::Balloon { .. } | Do::Nmi {} | Do::Sysrq { .. } | Do::Serial { .. }
                if (self.held.migration || self.held.unconfirmed)
                    && matches!(kind, Some(Kind::Migration | Kind::Upgrade)) =>
            {
                // The state that the target has, or gets, does not contain what this would change.
                return Err(Error::HandedOver.to_string());
            }
            // vCPUs can be queried only while they are paused.
            Do::Nmi {} => {
                let stood = self.stands();
                if !stood {
                    self.machine.pause().map_err(|error| error.to_string())?;
                }
                let answer = self.machine.ask(by, what, descriptors);
                if !stood {
                    self.machine.resume();
                }
                return answer;
            }
            what => return self.machine.ask(by, what, descriptors),
        }
        Ok(json!({}))
    }

    fn stop(&mut self) {
        self.operation.end();
        self.machine.stop();
    }

    fn flushed(&mut self) -> bool {
        self.machine.flushed()
    }
}

impl<P: SaveState + HandOver> HandOver for MigratableMachine<P>
where
    Error: From<P::Error>,
{
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String> {
        self.may_leave()?;
        // Of forked memory, the other process gets a copy.
        if !self.machine.ram().is_forked() {
            self.machine.ram().can_be_handed_over()?;
        }
        self.machine.lend(lent)
    }
}

impl<P: SaveState + HandOver> SessionMachine for MigratableMachine<P>
where
    Error: From<P::Error>,
{
    fn confinement(&self) -> ThreadKind {
        ThreadKind::Main
    }

    fn state(&self) -> MachineState {
        let leaving = self.operation.leaving().filter(|leaving| leaving.ahead.is_some());
        match leaving.map(|leaving| leaving.severed) {
            Some(true) => return MachineState::PostcopyPaused,
            Some(false) => return MachineState::Postcopy,
            None => {}
        }
        match self.operation.kind() {
            _ if self.held.unconfirmed => MachineState::HandoverUnconfirmed,
            _ if self.held.debugger => MachineState::Debugged,
            Some(kind) => kind.state(),
            None if self.held.user => MachineState::Paused,
            None => MachineState::Running,
        }
    }

    fn is_paused(&self) -> bool {
        self.held.user
    }

    fn may_end(&self) -> Result<(), String> {
        if self.is_needed() { Err(NEEDED.into()) } else { Ok(()) }
    }

    fn tracker(&self) -> Option<&'static str> {
        let since = self.since.as_ref().map(|since| since.method);
        Some(self.operation.leaving().and_then(|leaving| leaving.tracker).or(since)?.name())
    }

    fn news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    fn client_gone(&mut self, connection: u64) {
        self.end_of_client(connection);
    }

    fn under_way(&self) -> Option<UnderWay> {
        self.operation.under_way()
    }

    fn base(&mut self) -> Result<(OwnedFd, u64), String> {
        let (base, number) = self.machine.ram().base().map_err(|error| error.to_string())?;
        Ok((base.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?, number))
    }

    fn preserved(&mut self) -> Result<OwnedFd, String> {
        if self.operation.kind() != Some(Kind::LiveUpdate) {
            return Err("no live update of this machine is under way".into());
        }
        self.machine
            .ram()
            .shared_file()
            .ok_or("its memory has no file")?
            .try_clone()
            .map(OwnedFd::from)
            .map_err(|error| error.to_string())
    }

    fn successor(&mut self) -> Option<OwnedFd> {
        self.successor.take().filter(|_| self.moved)
    }
}
