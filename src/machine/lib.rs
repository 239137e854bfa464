//! What a session runs: a machine of either kind, the PC with a kernel or a built-in guest, as the process around it sees it.
//!
//! A machine owns vCPUs, memory and devices, and knows nothing of signals, sockets, time limits or the terminal: those are the
//! session's (`session/`), which asks one machine after every turn of its event loop.

pub mod dump;
pub mod gdb;
pub mod handoff;
pub mod section;
pub mod state;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use event_manager::MutEventSubscriber;
use serde_json::Value;
use vmm_sys_util::eventfd::EventFd;

use self::handoff::HandoffFds;
pub use self::section::Section;
use vellum_control::operation::{Asker, News, UnderWay};
use vellum_control::{Cr3Cache, DirtyRings, Do, MigrationBlocker};
use vellum_disk::DiskImage;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::core::Core;
use vellum_kvm::dirty::{self, DirtyTracker};
use vellum_kvm::memory::{Backing, Memory, Slot};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::ring::DirtyRing;
use vellum_kvm::vm::vcpu::{Throttle, VcpusDebugHandle};
use vellum_sandbox::ThreadKind;

/// Something that the session's event loop serves.
pub type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// What a machine has for the event loop.
#[derive(Default)]
pub struct EventSources {
    /// Devices and whatever else has descriptors of its own.
    pub subscribers: Vec<Subscriber>,
    /// Descriptors that become readable when [`Machine::poll`] has something to say. `poll` reads them.
    pub wakes: Vec<Arc<EventFd>>,
}

/// What a machine is, in a few words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineInfo {
    /// How many vCPUs it has.
    pub vcpus: usize,
    /// Its RAM in bytes.
    pub memory: u64,
    /// What backs that.
    pub backing: Option<Backing>,
    /// What the guest has lent of it, if there is a balloon.
    pub balloon: Option<u64>,
    /// The unix socket that leads to the guest's sockets, if there is one.
    pub vsock: Option<PathBuf>,
    /// Its dirty rings, if it has any.
    pub dirty_ring: Option<DirtyRings>,
    /// Its CR3 cache, if it has one.
    pub cr3_cache: Option<Cr3Cache>,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// What keeps it from being saved and from moving, if anything does.
    pub stays: Option<MigrationBlocker>,
}

/// A disk of a machine.
#[derive(Clone, Debug)]
pub struct Disk {
    /// `disk0`, …
    pub name: String,
    /// What it is.
    pub image: Arc<DiskImage>,
}

/// What those who ask for the state of a machine are told of its rings.
pub fn dirty_rings(ring: &DirtyRing) -> DirtyRings {
    DirtyRings { entries: ring.entries(), full: ring.relieved() }
}

/// How far a machine has come that knows how far it has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Pages accessed so far.
    pub done: u64,
    /// Pages to access, where there is an end.
    pub of: Option<u64>,
}

/// A machine that a session runs.
pub trait Machine {
    /// Why it cannot go on.
    type Error: std::error::Error;

    /// What the session's event loop is to serve for it from now on: each once. Asked after every turn of the loop.
    fn event_sources(&mut self) -> EventSources;

    /// What the thread of the event loop may call from before [`Machine::start`] on.
    fn confinement(&self) -> ThreadKind {
        ThreadKind::Main
    }

    /// Lets its vCPUs run for the first time: from the beginning, or from where it was [restored](Machine::restore).
    ///
    /// # Errors
    /// Where a vCPU's thread never came to be ready.
    fn start(&mut self) -> Result<(), Self::Error>;

    /// How it has ended, once it has.
    ///
    /// # Errors
    /// Where it cannot go on although its guest has not ended.
    fn poll(&mut self) -> Result<Option<Exit>, Self::Error>;

    /// Stops vCPUs, then devices: afterwards nothing of it touches guest memory.
    ///
    /// # Errors
    /// Where something does not stop in time. Everything that had stopped goes on then.
    fn pause(&mut self) -> Result<(), Self::Error>;

    /// Lets devices, then vCPUs go on. After [`Machine::pause`] alone.
    fn resume(&mut self);

    /// Asks the guest to come to its own end. False where it has no way to: then it is over at once.
    fn request_end(&mut self) -> bool;

    /// What it is.
    fn info(&self) -> MachineInfo;

    /// How far it has come, where it has an idea of that.
    fn progress(&self) -> Option<Progress>;

    /// Whether whoever runs it has paused it.
    fn is_paused(&self) -> bool {
        false
    }

    /// Where it stands, where that is neither running nor paused by whoever runs it.
    fn standing(&self) -> Option<&'static str> {
        None
    }

    /// How its dirty pages are collected, while somebody does.
    fn tracker(&self) -> Option<&'static str> {
        None
    }

    /// What those who listen to it are to be told since this was last asked.
    fn news(&mut self) -> Vec<News> {
        Vec::new()
    }

    /// Does what only this kind of machine can be asked for, with the descriptors that came along.
    ///
    /// # Errors
    /// In words for whoever asked.
    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String>;

    /// A client has gone: what it owns ends, unless that goes on without it.
    fn client_gone(&mut self, _connection: u64) {}

    /// The operation that it has under way.
    fn under_way(&self) -> Option<UnderWay> {
        None
    }

    /// Ends its vCPUs, where there are any left.
    fn stop(&mut self);

    /// What it is, so that the like of it can be made elsewhere: an object whose `kind` says of which kind of machine, and whose
    /// other fields are of that kind's `Description`.
    fn describe(&self) -> Value;

    /// All memory that moves with it, in the order of KVM's numbers.
    fn memory(&self) -> Vec<Slot>;

    /// Its RAM, which the first of [`Machine::memory`] are cut from.
    fn ram(&self) -> Memory;

    /// Its disks, which do not move with it.
    fn disks(&self) -> Vec<Disk> {
        Vec::new()
    }

    /// Takes time from its vCPUs.
    fn throttle(&self) -> Throttle;

    /// Whether its guest has panicked, which has ended so.
    fn has_panicked(&self, exit: Exit) -> bool {
        exit == Exit::Panic
    }

    /// The registers of the vCPU by which its guest has ended, and which that was.
    fn last_core(&self) -> Option<(usize, Core)> {
        None
    }

    /// Its vCPUs for its debugger; none of a machine that nobody debugs.
    fn reins(&self) -> VcpusDebugHandle {
        VcpusDebugHandle::new(&[])
    }

    /// Follows who writes to [`Machine::memory`], from now on what the VMM writes, and from [`DirtyTracker::enable`] on what the
    /// guest writes. While it is paused.
    ///
    /// # Errors
    /// Where this KVM cannot, or somebody follows it already.
    fn track(&mut self, method: dirty::Method) -> Result<Box<dyn DirtyTracker>, dirty::Error>;

    /// Its whole state beside its memory; while it is paused, and for as long as it stays so: what is typed for its guest meanwhile
    /// is held. KVM may write to guest memory on the
    /// way, which is why the last collection of dirty pages comes afterwards.
    ///
    /// # Errors
    /// Where it is not paused, KVM refuses, or its guest has something that cannot be saved.
    fn save(&mut self) -> Result<Vec<Section>, Self::Error>;

    /// Takes over what [`Machine::save`] gave, in a machine that was made for it and has never run. Neither KVM nor a device writes
    /// to guest memory: what would is held back until [`Machine::commit`].
    ///
    /// # Errors
    /// Where `sections` are not the state of the like of it, or KVM refuses. It cannot be used for anything then.
    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Self::Error>;

    /// After [`Machine::restore`], when its memory is complete and nobody else runs it: restores what was held back, takes the locks
    /// of its disks, and tells its networks where it is now. [`Machine::start`] lets it run.
    ///
    /// # Errors
    /// Where somebody else has one of its disks, or KVM refuses. It has not run then.
    fn commit(&mut self) -> Result<(), Self::Error>;

    /// After [`Machine::commit`] of a state that other machines may go on from too: tells its guest, where that can be told, that it is not
    /// the only one.
    ///
    /// # Errors
    /// Where the host has no random numbers.
    fn renew(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Adds what it has open on the host, for a process that is to take it over. It goes on here as before.
    ///
    /// # Errors
    /// In words for whoever asked.
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String>;

    /// When it has moved to a process that stands in for this one: what ties the two together, once.
    fn successor(&mut self) -> Option<OwnedFd> {
        None
    }

    /// Gives up the locks of its disks, so that another process can take them; while it is paused.
    fn release(&mut self);

    /// Takes them again.
    ///
    /// # Errors
    /// Where somebody else has one.
    fn retake(&mut self) -> Result<(), Self::Error>;

    /// After [`Machine::save`], when the guest runs elsewhere: what has been typed for it since, which it is given nothing of here.
    fn take_typed(&mut self) -> Vec<u8> {
        Vec::new()
    }

    /// Gives its guest what [`Machine::take_typed`] gave elsewhere.
    fn give_typed(&mut self, _typed: &[u8]) {}

    /// Whether what its guest has said has all been read. Where it has not, the event loop goes on for the reader's sake.
    fn flushed(&mut self) -> bool;
}
