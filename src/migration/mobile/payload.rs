//! A machine that can leave, as the session sees it: the machine's own answers, but where a migration or a snapshot has a say.

use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::{Value, json};

use super::leaving::Errand;
use super::{Error, Mobile, not_handed_over};
use crate::arch::clocks::Meanwhile;
use crate::control::{Do, Event};
use crate::dirty::{self, DirtyTracker, Method};
use crate::memory::{Memory, Slot};
use crate::migration::sender::Told;
use crate::migration::share::MOST_CONNECTIONS;
use crate::payload::lent::Lent;
use crate::payload::{Disk, Outline, Payload, Progress, Section, Serves, Subscriber};
use crate::sys::sigbus;
use crate::vm::lifecycle::Exit;
use crate::vm::vcpu::Throttle;

impl<P: Payload> Payload for Mobile<P>
where
    Error: From<P::Error>,
{
    type Error = Error;

    fn serves(&mut self) -> Serves {
        let mut serves = self.machine.serves();
        if !std::mem::replace(&mut self.served, true) {
            serves.wakes.push(self.wake.clone());
        }
        let wire = self.debugger.as_mut().and_then(|debugger| debugger.serves());
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
        if self.is_dumping_its_end() {
            return Ok(None);
        }
        if self.moved {
            return Ok(Some(Exit::Moved));
        }
        if self.stopped {
            return Ok(Some(Exit::PowerOff));
        }
        if self.held.migration || self.held.unconfirmed {
            // What it has come to is the target's to tell, or its own once it goes on.
            return Ok(None);
        }
        let ended = self.machine.poll().map_err(|error| match sigbus::shortened() {
            Some(file) => Error::Shortened(file),
            None => error.into(),
        })?;
        let Some(exit) = ended else { return Ok(None) };
        self.call_off("the guest has ended");
        if self.dumps(exit) {
            return Ok(None);
        }
        Ok(self.over(exit))
    }

    fn pause(&mut self) -> Result<(), Error> {
        if self.held.migration || self.held.unconfirmed {
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
        if self.held.unconfirmed {
            // It may run elsewhere: nothing here waits for its guest.
            return false;
        }
        self.call_off("its machine is being ended");
        self.dismiss_debugger();
        self.machine.request_end()
    }

    fn outline(&self) -> Outline {
        let outline = self.machine.outline();
        Outline { stays: self.stays_for_debugger().or(outline.stays), ..outline }
    }

    fn progress(&self) -> Option<Progress> {
        self.machine.progress()
    }

    fn is_paused(&self) -> bool {
        self.held.user
    }

    fn standing(&self) -> Option<&'static str> {
        let leaving = self.leaving.as_ref().filter(|leaving| leaving.ahead.is_some());
        match leaving.map(|leaving| leaving.severed) {
            Some(true) => return Some("postcopy-paused"),
            Some(false) => return Some("postcopy"),
            None => {}
        }
        match () {
            () if self.held.unconfirmed => Some("handover-unconfirmed"),
            () if self.held.debugger => Some("debugged"),
            () if self.dumping.is_some() => Some("dumping"),
            () => self.leaving.as_ref().map(|leaving| match leaving.errand {
                Errand::Migration => "migrating",
                Errand::Snapshot { .. } => "snapshotting",
            }),
        }
    }

    fn tracker(&self) -> Option<&'static str> {
        let since = self.since.as_ref().map(|since| since.method());
        Some(self.leaving.as_ref().and_then(|leaving| leaving.tracker).or(since)?.name())
    }

    fn news(&mut self) -> Vec<Event> {
        let mut news = self.machine.news();
        news.append(&mut self.news);
        news
    }

    fn ask(&mut self, what: &Do, mut descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        let under_way = "no migration of this machine is under way";
        let errand = self.leaving.as_ref().map(|leaving| leaving.errand);
        match what {
            Do::Snapshot(asked) => return self.snapshot(asked, descriptors),
            Do::SnapshotEnd {} => self.since = None,
            Do::SnapshotNamed {} | Do::SnapshotCancel {} => {
                let Some(Errand::Snapshot { .. }) = errand else {
                    return Err("no snapshot of this machine is under way".into());
                };
                let told = match what {
                    Do::SnapshotNamed {} => Told::Named,
                    _ => Told::Cancel("it was cancelled".into()),
                };
                self.leaving.as_ref().ok_or(under_way)?.tell(told);
            }
            Do::MigrateLink {}
            | Do::MigrateRecover {}
            | Do::MigrateCancel {}
            | Do::MigrateSet { .. }
            | Do::Resume { force: true }
                if errand != Some(Errand::Migration) =>
            {
                return Err(under_way.into());
            }
            Do::Migrate(asked) => {
                if !(1..=MOST_CONNECTIONS).contains(&asked.connections) {
                    return Err(format!("connections: 1 to {MOST_CONNECTIONS} are possible"));
                }
                return self.leave(asked, descriptors);
            }
            Do::MigrateLink {} => {
                let socket = descriptors.pop().ok_or("it takes a descriptor")?;
                self.leaving.as_ref().ok_or(under_way)?.tell(Told::Linked(socket));
            }
            Do::MigrateRecover {} => {
                let (Some(faults), Some(socket)) = (descriptors.pop(), descriptors.pop()) else {
                    return Err("it takes two descriptors".into());
                };
                let leaving = self.leaving.as_ref().ok_or(under_way)?;
                if !leaving.severed {
                    return Err("the link to its target is not cut: there is nothing to recover".into());
                }
                leaving.tell(Told::Recovered(socket, faults));
            }
            Do::MigrateCancel {} | Do::Resume { force: true }
                if self
                    .leaving
                    .as_ref()
                    .is_some_and(|leaving| leaving.ahead.is_some() && !leaving.severed) =>
            {
                return Err(
                    "the guest runs on the target already, and needs what is here of its memory".into()
                );
            }
            Do::MigrateCancel {} => {
                let leaving = self.leaving.as_ref().ok_or(under_way)?;
                // A link that takes nothing holds up nobody who has had enough. After COMMIT the target is asked first.
                if !self.held.unconfirmed {
                    leaving.give_up.now();
                }
                leaving.tell(Told::Cancel("it was cancelled".into()));
            }
            Do::MigrateSet { downtime_ms, bandwidth } => {
                let told =
                    Told::Set { downtime: downtime_ms.map(Duration::from_millis), bandwidth: *bandwidth };
                self.leaving.as_ref().ok_or(under_way)?.tell(told);
            }
            Do::Resume { force: true } => {
                let leaving = self.leaving.as_ref().ok_or(under_way)?;
                if leaving.has_ended() {
                    self.machine.retake().map_err(|error| error.to_string())?;
                    self.stay("the operator took it back".into());
                } else {
                    leaving.tell(Told::Force);
                }
            }
            Do::Dump {} => {
                let file = descriptors.pop().ok_or("it takes a descriptor")?;
                self.dump(file.into())?;
            }
            // vCPUs are asked while they stand still.
            Do::Nmi {} => {
                let stood = self.stands();
                if !stood {
                    self.machine.pause().map_err(|error| error.to_string())?;
                }
                let answer = self.machine.ask(what, descriptors);
                if !stood {
                    self.machine.resume();
                }
                return answer;
            }
            what => return self.machine.ask(what, descriptors),
        }
        Ok(json!({}))
    }

    fn stop(&mut self) {
        self.leaving = None;
        self.machine.stop();
    }

    fn describe(&self) -> Value {
        self.machine.describe()
    }

    fn memory(&self) -> Vec<Slot> {
        self.machine.memory()
    }

    fn ram(&self) -> Memory {
        self.machine.ram()
    }

    fn disks(&self) -> Vec<Disk> {
        self.machine.disks()
    }

    fn throttle(&self) -> Throttle {
        self.machine.throttle()
    }

    fn track(&mut self, method: Method) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        self.machine.track(method)
    }

    fn save(&mut self) -> Result<Vec<Section>, Error> {
        Ok(self.machine.save()?)
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: Meanwhile) -> Result<(), Error> {
        Ok(self.machine.restore(sections, meanwhile)?)
    }

    fn commit(&mut self) -> Result<(), Error> {
        Ok(self.machine.commit()?)
    }

    fn renew(&mut self) -> Result<(), Error> {
        Ok(self.machine.renew()?)
    }

    fn lend(&mut self, lent: &mut Lent) -> Result<(), String> {
        self.is_idle()?;
        let backing = self.machine.ram().config.backing;
        if !backing.can_be_handed_over() {
            return Err(not_handed_over(backing));
        }
        self.machine.lend(lent)
    }

    fn successor(&mut self) -> Option<OwnedFd> {
        self.successor.take().filter(|_| self.moved)
    }

    fn release(&mut self) {
        self.machine.release();
    }

    fn retake(&mut self) -> Result<(), Error> {
        Ok(self.machine.retake()?)
    }

    fn take_typed(&mut self) -> Vec<u8> {
        self.machine.take_typed()
    }

    fn give_typed(&mut self, typed: &[u8]) {
        self.machine.give_typed(typed);
    }

    fn flushed(&mut self) -> bool {
        self.machine.flushed()
    }
}
