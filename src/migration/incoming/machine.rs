//! The session's view of an arrival: until the machine runs here there is little to say or do, and from then on it answers itself.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::Incoming;
use crate::fetching;
use crate::migratable::Error;
use crate::receiver::ReceiverCommand;
use vellum_control::Do;
use vellum_control::operation::{Asker, News, UnderWay};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::dirty::{self, DirtyTracker, Method};
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::vcpu::Throttle;
use vellum_machine::handoff::HandoffFds;
use vellum_machine::{Disk, EventSources, Machine, MachineInfo, Progress, Section};
use vellum_sandbox::ThreadKind;

impl Machine for Incoming {
    type Error = Error;

    fn event_sources(&mut self) -> EventSources {
        let mut serves = self.machine().map(|machine| machine.event_sources()).unwrap_or_default();
        if !std::mem::replace(&mut self.served, true) {
            serves.wakes.push(self.wake.clone());
        }
        serves
    }

    fn confinement(&self) -> ThreadKind {
        ThreadKind::Receiver
    }

    fn start(&mut self) -> Result<(), Error> {
        let Some(bringer) = self.bringer.take() else { return Ok(()) };
        let sandbox = self.sandbox;
        let body = move || match sandbox.enter(ThreadKind::Migration, "migration") {
            Ok(()) => bringer.run(),
            Err(error) => tracing::error!("{error}"),
        };
        // It ends when this side of its channels is gone, or when the source has understood.
        let started = std::thread::Builder::new().name("migration".into()).spawn(body);
        started.map_err(|error| Error::Host("the thread of the migration", error))?;
        // What comes is being read, or waited for.
        if let Some(host) = &mut self.host {
            host.begun = PreparedVm::new(&host.kvm);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Exit>, Error> {
        let _ = self.wake.read();
        self.serve();
        let over = self.over;
        if let Some(machine) = self.machine() {
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
            // A vCPU that waits for a page cannot be had out of the guest by every kernel.
            return Err(Error::Severed);
        }
        self.machine().map_or(Err(Error::Absent), Machine::pause)
    }

    fn resume(&mut self) {
        if let Some(machine) = self.machine() {
            machine.resume();
        }
    }

    fn request_end(&mut self) -> bool {
        if self.lacks == Some(true) {
            // What waits for pages would wait for ever, and so would whoever waits for that.
            fetching::end("the machine was ended while the link to the source was cut");
        }
        match self.machine() {
            Some(machine) => machine.request_end(),
            None => false,
        }
    }

    fn info(&self) -> MachineInfo {
        self.view().map(Machine::info).unwrap_or_default()
    }

    fn progress(&self) -> Option<Progress> {
        self.view().and_then(Machine::progress)
    }

    fn is_paused(&self) -> bool {
        self.view().is_some_and(Machine::is_paused)
    }

    fn tracker(&self) -> Option<&'static str> {
        self.view().and_then(Machine::tracker)
    }

    fn standing(&self) -> Option<&'static str> {
        match self.view() {
            Some(_) if self.lacks == Some(true) => Some("postcopy-paused"),
            Some(machine) => machine.standing().or(self.lacks.map(|_| "postcopy")),
            None => Some(self.standing),
        }
    }

    fn news(&mut self) -> Vec<News> {
        let mut news: Vec<News> = self.news.drain(..).map(News::from).collect();
        if let Some(machine) = self.machine() {
            news.append(&mut machine.news());
        }
        news
    }

    fn client_gone(&mut self, connection: u64) {
        if let Some(machine) = self.machine() {
            machine.client_gone(connection);
        }
    }

    fn under_way(&self) -> Option<UnderWay> {
        self.view().and_then(Machine::under_way)
    }

    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        if let Some(machine) = self.machine() {
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
        if let Some(machine) = self.machine() {
            machine.stop();
        }
    }

    fn describe(&self) -> Value {
        self.view().map_or(Value::Null, Machine::describe)
    }

    fn memory(&self) -> Vec<Slot> {
        self.view().map(Machine::memory).unwrap_or_default()
    }

    fn ram(&self) -> Memory {
        self.view().map(Machine::ram).expect("nobody asks for the memory of a machine that has not come")
    }

    fn disks(&self) -> Vec<Disk> {
        self.view().map(Machine::disks).unwrap_or_default()
    }

    fn throttle(&self) -> Throttle {
        // Of no vCPU, while there is none.
        self.view().map_or_else(|| Throttle::new(&[]), Machine::throttle)
    }

    fn track(&mut self, method: Method) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        self.machine().map_or(Err(dirty::Error::TooLate), |machine| machine.track(method))
    }

    fn save(&mut self) -> Result<Vec<Section>, Error> {
        self.machine().map_or(Err(Error::Absent), Machine::save)
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Error> {
        self.machine().map_or(Err(Error::Absent), |machine| machine.restore(sections, meanwhile))
    }

    fn commit(&mut self) -> Result<(), Error> {
        self.machine().map_or(Err(Error::Absent), Machine::commit)
    }

    fn renew(&mut self) -> Result<(), Error> {
        self.machine().map_or(Err(Error::Absent), Machine::renew)
    }

    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String> {
        self.machine().map_or(Err(Error::Absent.to_string()), |machine| machine.lend(lent))
    }

    fn successor(&mut self) -> Option<OwnedFd> {
        self.machine().and_then(Machine::successor)
    }

    fn release(&mut self) {
        if let Some(machine) = self.machine() {
            machine.release();
        }
    }

    fn retake(&mut self) -> Result<(), Error> {
        self.machine().map_or(Err(Error::Absent), Machine::retake)
    }

    fn take_typed(&mut self) -> Vec<u8> {
        self.machine().map(Machine::take_typed).unwrap_or_default()
    }

    fn give_typed(&mut self, typed: &[u8]) {
        self.machine().into_iter().for_each(|machine| machine.give_typed(typed));
    }

    fn flushed(&mut self) -> bool {
        self.machine().is_none_or(Machine::flushed)
    }
}
