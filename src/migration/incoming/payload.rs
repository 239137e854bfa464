//! The session's view of an arrival: until the machine runs here there is little to say or do, and from then on it answers itself.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::Incoming;
use crate::fetching;
use crate::mobile::Error;
use crate::receiver::Told;
use vellum_control::Do;
use vellum_control::operation::{Asker, News, UnderWay};
use vellum_kvm::arch::begun::Begun;
use vellum_kvm::arch::clocks::Meanwhile;
use vellum_kvm::dirty::{self, DirtyTracker, Method};
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::vcpu::Throttle;
use vellum_machine::lent::Lent;
use vellum_machine::{Disk, Outline, Payload, Progress, Section, Serves};
use vellum_sandbox::ThreadKind;

impl Payload for Incoming {
    type Error = Error;

    fn serves(&mut self) -> Serves {
        let mut serves = self.payload().map(Payload::serves).unwrap_or_default();
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
            host.begun = Begun::new(&host.kvm);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Exit>, Error> {
        let _ = self.wake.read();
        self.serve();
        let over = self.over;
        if let Some(payload) = self.payload() {
            return payload.poll();
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
        self.payload().map_or(Err(Error::Absent), Payload::pause)
    }

    fn resume(&mut self) {
        if let Some(payload) = self.payload() {
            payload.resume();
        }
    }

    fn request_end(&mut self) -> bool {
        if self.lacks == Some(true) {
            // What waits for pages would wait for ever, and so would whoever waits for that.
            fetching::end("the machine was ended while the link to the source was cut");
        }
        match self.payload() {
            Some(payload) => payload.request_end(),
            None => false,
        }
    }

    fn outline(&self) -> Outline {
        self.view().map(Payload::outline).unwrap_or_default()
    }

    fn progress(&self) -> Option<Progress> {
        self.view().and_then(Payload::progress)
    }

    fn is_paused(&self) -> bool {
        self.view().is_some_and(Payload::is_paused)
    }

    fn tracker(&self) -> Option<&'static str> {
        self.view().and_then(Payload::tracker)
    }

    fn standing(&self) -> Option<&'static str> {
        match self.view() {
            Some(_) if self.lacks == Some(true) => Some("postcopy-paused"),
            Some(payload) => payload.standing().or(self.lacks.map(|_| "postcopy")),
            None => Some(self.standing),
        }
    }

    fn news(&mut self) -> Vec<News> {
        let mut news: Vec<News> = self.news.drain(..).map(News::from).collect();
        if let Some(payload) = self.payload() {
            news.append(&mut payload.news());
        }
        news
    }

    fn client_gone(&mut self, connection: u64) {
        if let Some(payload) = self.payload() {
            payload.client_gone(connection);
        }
    }

    fn under_way(&self) -> Option<UnderWay> {
        self.view().and_then(Payload::under_way)
    }

    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        if let Some(payload) = self.payload() {
            return payload.ask(by, what, descriptors);
        }
        match what {
            Do::Resume { force: true } => self.thread.tell(Told::Force),
            Do::MigrateCancel { of: None } => {
                self.thread.tell(Told::Cancel("it was cancelled on the target".into()))
            }
            _ => return Err(Error::Absent.to_string()),
        }
        Ok(json!({}))
    }

    fn stop(&mut self) {
        if let Some(payload) = self.payload() {
            payload.stop();
        }
    }

    fn describe(&self) -> Value {
        self.view().map_or(Value::Null, Payload::describe)
    }

    fn memory(&self) -> Vec<Slot> {
        self.view().map(Payload::memory).unwrap_or_default()
    }

    fn ram(&self) -> Memory {
        self.view().map(Payload::ram).expect("nobody asks for the memory of a machine that has not come")
    }

    fn disks(&self) -> Vec<Disk> {
        self.view().map(Payload::disks).unwrap_or_default()
    }

    fn throttle(&self) -> Throttle {
        // Of no vCPU, while there is none.
        self.view().map_or_else(|| Throttle::new(&[]), Payload::throttle)
    }

    fn track(&mut self, method: Method) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        self.payload().map_or(Err(dirty::Error::TooLate), |payload| payload.track(method))
    }

    fn save(&mut self) -> Result<Vec<Section>, Error> {
        self.payload().map_or(Err(Error::Absent), Payload::save)
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: Meanwhile) -> Result<(), Error> {
        self.payload().map_or(Err(Error::Absent), |payload| payload.restore(sections, meanwhile))
    }

    fn commit(&mut self) -> Result<(), Error> {
        self.payload().map_or(Err(Error::Absent), Payload::commit)
    }

    fn renew(&mut self) -> Result<(), Error> {
        self.payload().map_or(Err(Error::Absent), Payload::renew)
    }

    fn lend(&mut self, lent: &mut Lent) -> Result<(), String> {
        self.payload().map_or(Err(Error::Absent.to_string()), |payload| payload.lend(lent))
    }

    fn successor(&mut self) -> Option<OwnedFd> {
        self.payload().and_then(Payload::successor)
    }

    fn release(&mut self) {
        if let Some(payload) = self.payload() {
            payload.release();
        }
    }

    fn retake(&mut self) -> Result<(), Error> {
        self.payload().map_or(Err(Error::Absent), Payload::retake)
    }

    fn take_typed(&mut self) -> Vec<u8> {
        self.payload().map(Payload::take_typed).unwrap_or_default()
    }

    fn give_typed(&mut self, typed: &[u8]) {
        self.payload().into_iter().for_each(|payload| payload.give_typed(typed));
    }

    fn flushed(&mut self) -> bool {
        self.payload().is_none_or(Payload::flushed)
    }
}
