//! The session's interface of an incoming machine. Until the machine runs here, few requests are
//! possible. From then on the machine answers.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::Incoming;
use crate::fetching;
use crate::migratable::Error;
use crate::receiver::ReceiverCommand;
use vellum_control::operation::{Asker, News, UnderWay};
use vellum_control::{Do, MachineState};
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::handoff::HandoffFds;
use vellum_machine::{EventSources, HandOver, Machine, MachineInfo, Progress, SessionMachine};
use vellum_sandbox::ThreadKind;

impl Machine for Incoming {
    type Error = Error;

    fn event_sources(&mut self) -> EventSources {
        let mut serves = self.running_mut().map(|machine| machine.event_sources()).unwrap_or_default();
        if !std::mem::replace(&mut self.served, true) {
            serves.wakes.push(self.wake.clone());
        }
        serves
    }

    fn start(&mut self) -> Result<(), Error> {
        let Some(bringer) = self.bringer.take() else { return Ok(()) };
        let sandbox = self.sandbox;
        let body = move || match sandbox.enter(ThreadKind::Migration, "migration") {
            Ok(()) => bringer.run(),
            Err(error) => bringer.fail(error.to_string()),
        };
        // It ends when this side's channels are gone, or when the source has received the outcome.
        let started = std::thread::Builder::new().name("migration".into()).spawn(body);
        started.map_err(|error| Error::Host("the thread of the migration", error))?;
        // Meanwhile the thread reads the snapshot or waits for the source.
        if let Some(host) = &mut self.host {
            host.begun = PreparedVm::new(&host.kvm);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Exit>, Error> {
        let _ = self.wake.read();
        self.serve();
        let over = self.over;
        if let Some(machine) = self.running_mut() {
            return machine.poll();
        }
        if over {
            let gone = || Error::Gone("no machine has come: the source has gone".into());
            return Err(self.gone.take().unwrap_or_else(gone));
        }
        Ok(None)
    }

    fn pause(&mut self) -> Result<(), Error> {
        if self.lacks == Some(true) {
            // Older kernels cannot kick out a vCPU that waits for a page.
            return Err(Error::Severed);
        }
        self.running_mut().map_or(Err(Error::Absent), Machine::pause)
    }

    fn resume(&mut self) {
        if let Some(machine) = self.running_mut() {
            machine.resume();
        }
    }

    fn request_end(&mut self) -> bool {
        if self.lacks == Some(true) {
            // Threads that wait for pages would wait forever, and so would every thread that waits
            // for them.
            fetching::end("the machine was ended while the link to the source was cut");
        }
        match self.running_mut() {
            Some(machine) => machine.request_end(),
            None => false,
        }
    }

    fn info(&self) -> MachineInfo {
        self.running().map(Machine::info).unwrap_or_default()
    }

    fn progress(&self) -> Option<Progress> {
        self.running().and_then(Machine::progress)
    }

    fn silence(&self) -> Option<&'static str> {
        self.running().and_then(Machine::silence)
    }

    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        // The last of its memory may just have arrived.
        self.serve();
        if self.lacks.is_some() && reads_memory(what) {
            return Err(Error::Lacking.to_string());
        }
        if let Some(machine) = self.running_mut() {
            return machine.ask(by, what, descriptors);
        }
        match what {
            Do::Resume { force: true } => self.thread.tell(ReceiverCommand::Force),
            Do::MigrateCancel { of: None } => {
                self.thread.tell(ReceiverCommand::Cancel("it was cancelled on the target".into()))
            }
            _ => return Err(Error::Absent.to_string()),
        }
        Ok(json!({}))
    }

    fn stop(&mut self) {
        if let Some(machine) = self.running_mut() {
            machine.stop();
        }
    }

    fn flushed(&mut self) -> bool {
        self.running_mut().is_none_or(Machine::flushed)
    }
}

/// Whether this thread would wait for the guest's memory, or for a vCPU that waits for memory. It
/// would answer nobody meanwhile, and without a link to the source it would wait forever.
fn reads_memory(what: &Do) -> bool {
    matches!(
        what,
        Do::Migrate(_) | Do::Snapshot(_) | Do::Fork { .. } | Do::LiveUpdate {} | Do::Dump {} | Do::Nmi {}
    )
}

impl HandOver for Incoming {
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String> {
        if self.lacks.is_some() {
            return Err(Error::Lacking.to_string());
        }
        self.running_mut().map_or(Err(Error::Absent.to_string()), |machine| machine.lend(lent))
    }
}

impl SessionMachine for Incoming {
    fn confinement(&self) -> ThreadKind {
        ThreadKind::Receiver
    }

    fn state(&self) -> MachineState {
        let Some(machine) = self.running() else { return self.state };
        match machine.state() {
            _ if self.lacks == Some(true) => MachineState::PostcopyPaused,
            state if state.is_settled() && self.lacks.is_some() => MachineState::Postcopy,
            state => state,
        }
    }

    fn is_paused(&self) -> bool {
        self.running().is_some_and(SessionMachine::is_paused)
    }

    fn may_end(&self) -> Result<(), String> {
        self.running().map_or(Ok(()), SessionMachine::may_end)
    }

    fn tracker(&self) -> Option<&'static str> {
        self.running().and_then(SessionMachine::tracker)
    }

    fn news(&mut self) -> Vec<News> {
        let mut news: Vec<News> = self.news.drain(..).map(News::from).collect();
        if let Some(machine) = self.running_mut() {
            news.append(&mut machine.news());
        }
        news
    }

    fn client_gone(&mut self, connection: u64) {
        if let Some(machine) = self.running_mut() {
            machine.client_gone(connection);
        }
    }

    fn under_way(&self) -> Option<UnderWay> {
        self.running().and_then(SessionMachine::under_way)
    }

    fn base(&mut self) -> Result<(OwnedFd, u64), String> {
        self.running_mut().map_or(Err(Error::Absent.to_string()), |machine| machine.base())
    }

    fn preserved(&mut self) -> Result<OwnedFd, String> {
        self.running_mut().map_or(Err(Error::Absent.to_string()), |machine| machine.preserved())
    }

    fn successor(&mut self) -> Option<OwnedFd> {
        self.running_mut().and_then(SessionMachine::successor)
    }
}
