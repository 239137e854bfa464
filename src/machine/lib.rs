//! What a machine of either kind, the PC with a kernel or a built-in guest, is to the crates above.
//!
//! A machine owns vCPUs, memory and devices, and knows nothing of signals, sockets, time limits or the terminal: those are the
//! session's (`session/`), which asks one machine after every turn of its event loop.
//!
//! Each trait adds what one kind of user needs:
//!
//! | trait | a machine that | who needs it |
//! |---|---|---|
//! | [`Machine`] | runs | everybody |
//! | [`Inspect`] | can be read | debugger, core dump |
//! | [`RestoreState`] | is made from saved state | migration's target, restore |
//! | [`SaveState`] | can be saved | migration's source, snapshot |
//! | [`HandOver`] | can be handed over to another process | upgrade |
//! | [`SessionMachine`] | has operations under way | session |

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
use vellum_control::{Cr3Cache, DirtyRings, Do, MachineState, MigrationBlocker};
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

/// A machine that runs.
pub trait Machine {
    /// Why it cannot go on.
    type Error: std::error::Error;

    /// What the session's event loop is to serve for it from now on: each once. Asked after every turn of the loop.
    fn event_sources(&mut self) -> EventSources;

    /// Lets its vCPUs run for the first time: from the beginning, or from where it was [restored](RestoreState::restore).
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

    /// Does what only this kind of machine can be asked for, with the descriptors that came along.
    ///
    /// # Errors
    /// In words for whoever asked.
    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String>;

    /// Ends its vCPUs, where there are any left.
    fn stop(&mut self);

    /// Whether all output of its guest has been read. Where it has not, the event loop goes on for the reader's sake.
    fn flushed(&mut self) -> bool;
}

/// A machine whose memory and vCPUs can be read: what a debugger and a core dump need.
pub trait Inspect: Machine {
    /// All memory that moves with it, in the order of KVM's numbers.
    fn memory(&self) -> Vec<Slot>;

    /// Its RAM, which the first of [`Inspect::memory`] are cut from.
    fn ram(&self) -> Memory;

    /// Its vCPUs, for its debugger.
    fn debug_handle(&self) -> VcpusDebugHandle;

    /// The registers of the vCPU by which its guest has ended, and which that was.
    fn last_core(&self) -> Option<(usize, Core)>;

    /// Whether its guest has panicked, if it has ended so.
    fn has_panicked(&self, exit: Exit) -> bool;
}

/// A machine that can be made from saved state, before it runs for the first time.
pub trait RestoreState: Inspect {
    /// Its disks, which do not move with it.
    fn disks(&self) -> Vec<Disk>;

    /// Takes time from its vCPUs.
    fn throttle(&self) -> Throttle;

    /// Takes over what [`SaveState::save`] gave, in a machine that was made for it and has never run. Neither KVM nor a device
    /// writes to guest memory: what would is held back until [`RestoreState::commit`].
    ///
    /// # Errors
    /// Where `sections` are not the state of the like of it, or KVM refuses. It cannot be used for anything then.
    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Self::Error>;

    /// After [`RestoreState::restore`], when its memory is complete and nobody else runs it: restores what was held back, takes the
    /// locks of its disks, and tells its networks where it is now. [`Machine::start`] lets it run.
    ///
    /// # Errors
    /// Where somebody else has one of its disks, or KVM refuses. It has not run then.
    fn commit(&mut self) -> Result<(), Self::Error>;

    /// After [`RestoreState::commit`] of a state that other machines may start from too: tells its guest, where that can be told,
    /// that it is not the only one.
    ///
    /// # Errors
    /// Where the host has no random numbers.
    fn renew(&mut self) -> Result<(), Self::Error>;

    /// Takes the locks of its disks.
    ///
    /// # Errors
    /// Where somebody else has one.
    fn retake(&mut self) -> Result<(), Self::Error>;

    /// Gives its guest the input that [`SaveState::take_typed`] returned elsewhere.
    fn give_typed(&mut self, typed: &[u8]);
}

/// A machine that can be saved.
pub trait SaveState: RestoreState {
    /// What it is, so that the like of it can be made elsewhere: an object whose `kind` says of which kind of machine, and whose
    /// other fields are of that kind's `Description`.
    fn describe(&self) -> Value;

    /// Follows who writes to [`Inspect::memory`]: from now on the VMM's writes, and from [`DirtyTracker::enable`] on the guest's.
    /// While it is paused.
    ///
    /// # Errors
    /// Where this KVM cannot, or somebody follows it already.
    fn track(&mut self, method: dirty::Method) -> Result<Box<dyn DirtyTracker>, dirty::Error>;

    /// Its whole state beside its memory; while it is paused, and for as long as it stays so: input for its guest is held
    /// meanwhile. KVM may write to guest memory on the way, which is why the last collection of dirty pages comes afterwards.
    ///
    /// # Errors
    /// Where it is not paused, KVM refuses, or its guest has something that cannot be saved.
    fn save(&mut self) -> Result<Vec<Section>, Self::Error>;

    /// Gives up the locks of its disks, so that another process can take them; while it is paused. [`RestoreState::retake`] takes
    /// them again.
    fn release(&mut self);

    /// After [`SaveState::save`], when the guest runs elsewhere: the input that was held since, of which its guest is given nothing
    /// here.
    fn take_typed(&mut self) -> Vec<u8>;
}

/// A machine that can be handed over to another process of this host, with its memory and its open files.
pub trait HandOver: Machine {
    /// Adds what it has open on the host, for a process that is to take it over. It goes on here as before.
    ///
    /// # Errors
    /// In words for whoever asked.
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String>;
}

/// A machine as a session runs it, with the operations that clients ask for.
pub trait SessionMachine: HandOver {
    /// What the thread of the event loop may call from before [`Machine::start`] on.
    fn confinement(&self) -> ThreadKind;

    /// What it is doing.
    fn state(&self) -> MachineState;

    /// Whether a user has paused it, whatever else is done with it.
    fn is_paused(&self) -> bool;

    /// How its dirty pages are collected, while they are.
    fn tracker(&self) -> Option<&'static str>;

    /// Events for those who listen, since this was last asked.
    fn news(&mut self) -> Vec<News>;

    /// A client has gone: the operation that it owns ends, unless that goes on without it.
    fn client_gone(&mut self, connection: u64);

    /// The operation that it has under way.
    fn under_way(&self) -> Option<UnderWay>;

    /// When it has moved to a process that stands in for this one: the socket that ties the two together, once.
    fn successor(&mut self) -> Option<OwnedFd>;
}
