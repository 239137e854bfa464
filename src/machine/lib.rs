//! What a machine of either kind, a PC with a kernel or a built-in guest, is to the crates above.
//!
//! A machine owns vCPUs, memory and devices. Signals, sockets, time limits and the terminal belong
//! to the session (`session/`), which polls one machine after every turn of its event loop.
//!
//! Each trait adds what one kind of user needs:
//!
//! | trait | a machine that | user |
//! |---|---|---|
//! | [`Machine`] | runs | all |
//! | [`Inspect`] | can be read | debugger, core dump |
//! | [`RestoreState`] | is created from saved state | migration's target, restore |
//! | [`SaveState`] | can be saved | migration's source, snapshot |
//! | [`HandOver`] | can be handed over to another process | upgrade |
//! | [`SessionMachine`] | runs operations | session |

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

/// A subscriber of the session's event loop.
pub type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A machine's sources for the event loop.
#[derive(Default)]
pub struct EventSources {
    /// Devices and other subscribers with their own descriptors.
    pub subscribers: Vec<Subscriber>,
    /// Descriptors that become readable when [`Machine::poll`] has a result. `poll` reads them.
    pub wakes: Vec<Arc<EventFd>>,
}

/// A summary of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineInfo {
    /// The number of vCPUs.
    pub vcpus: usize,
    /// Its RAM in bytes.
    pub memory: u64,
    /// What backs its RAM.
    pub backing: Option<Backing>,
    /// Whether it shares memory with machines that were forked from it, or that it was forked from.
    pub forked: bool,
    /// The size of the balloon in bytes, if there is one.
    pub balloon: Option<u64>,
    /// The unix socket that connects to the guest's sockets, if there is one.
    pub vsock: Option<PathBuf>,
    /// Its dirty rings, if it has any.
    pub dirty_ring: Option<DirtyRings>,
    /// Its CR3 cache, if it has one.
    pub cr3_cache: Option<Cr3Cache>,
    /// The names of its virtio devices.
    pub devices: Vec<String>,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// Those of its disks whose overlay a fork copies.
    pub overlays: Vec<String>,
    /// What prevents it from being saved and migrated, if anything does.
    pub stays: Option<MigrationBlocker>,
    /// What prevents it from being forked, if anything does.
    pub fork_stays: Option<MigrationBlocker>,
}

/// A disk of a machine.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its name: `disk0`, …
    pub name: String,
    /// Its image.
    pub image: Arc<DiskImage>,
}

/// The state of a machine's dirty rings, for the answer to a state request.
pub fn dirty_rings(ring: &DirtyRing) -> DirtyRings {
    DirtyRings { entries: ring.entries(), full: ring.relieved() }
}

/// The progress of a machine that knows its goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Pages accessed so far.
    pub done: u64,
    /// Pages to access, if there is an end.
    pub of: Option<u64>,
}

/// A machine that runs.
pub trait Machine {
    /// Why it cannot continue.
    type Error: std::error::Error;

    /// Its new sources for the session's event loop, each returned once. Called after every turn of
    /// the loop.
    fn event_sources(&mut self) -> EventSources;

    /// Runs its vCPUs for the first time: from the beginning, or from where it was
    /// [restored](RestoreState::restore).
    ///
    /// # Errors
    /// A vCPU's thread never became ready.
    fn start(&mut self) -> Result<(), Self::Error>;

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// It cannot continue although its guest has not ended.
    fn poll(&mut self) -> Result<Option<Exit>, Self::Error>;

    /// Stops vCPUs, then devices. Afterwards none of them touches guest memory.
    ///
    /// # Errors
    /// Something does not stop in time. Everything that had stopped then continues.
    fn pause(&mut self) -> Result<(), Self::Error>;

    /// Resumes devices, then vCPUs. Call it only after [`Machine::pause`].
    fn resume(&mut self);

    /// Asks the guest to end by itself. Returns false if it cannot, and then the machine ends at
    /// once.
    fn request_end(&mut self) -> bool;

    /// A summary of the machine.
    fn info(&self) -> MachineInfo;

    /// Its progress, if it has a goal.
    fn progress(&self) -> Option<Progress>;

    /// What may keep its guest from being heard, as long as the guest has printed nothing although
    /// its output leads somewhere.
    fn silence(&self) -> Option<&'static str>;

    /// Performs a request that only this kind of machine supports, with the descriptors that came
    /// with it.
    ///
    /// # Errors
    /// In words for the client.
    fn ask(&mut self, by: Asker, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String>;

    /// Ends its vCPUs, if any are left.
    fn stop(&mut self);

    /// Whether all output of its guest has been read. If not, the event loop continues for the
    /// reader's sake.
    fn flushed(&mut self) -> bool;
}

/// A machine whose memory and vCPUs can be read, for a debugger and a core dump.
pub trait Inspect: Machine {
    /// All memory that moves with it, in the order of KVM's slot numbers.
    fn memory(&self) -> Vec<Slot>;

    /// Its RAM, which the first slots of [`Inspect::memory`] divide.
    fn ram(&self) -> Memory;

    /// Its vCPUs, for its debugger.
    fn debug_handle(&self) -> VcpusDebugHandle;

    /// The index and the registers of the vCPU that ended its guest.
    fn last_core(&self) -> Option<(usize, Core)>;

    /// Whether its guest has panicked, if it has ended with `exit`.
    fn has_panicked(&self, exit: Exit) -> bool;
}

/// A machine that can be created from saved state, before it runs for the first time.
pub trait RestoreState: Inspect {
    /// Its disks, which do not move with it.
    fn disks(&self) -> Vec<Disk>;

    /// Throttles its vCPUs.
    fn throttle(&self) -> Throttle;

    /// Restores what [`SaveState::save`] returned, in a machine that was created for it and has
    /// never run. Neither KVM nor a device writes to guest memory: such state is held back until
    /// [`RestoreState::commit`].
    ///
    /// # Errors
    /// `sections` are not the state of such a machine, or KVM refuses. The machine is then
    /// unusable.
    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Self::Error>;

    /// Called after [`RestoreState::restore`], when its memory is complete and it runs nowhere
    /// else. Restores what was held back, takes the locks of its disks, and announces its new place
    /// to its networks. [`Machine::start`] then runs it. `forked` says that the machine that it is a
    /// copy of runs on, with the same network addresses.
    ///
    /// # Errors
    /// A disk is in use elsewhere, or KVM refuses. The machine has not run then.
    fn commit(&mut self, forked: bool) -> Result<(), Self::Error>;

    /// Called after [`RestoreState::commit`] of a state that other machines may start from too.
    /// Tells its guest that it may not be the only copy, if the guest can be told.
    ///
    /// # Errors
    /// The host has no random numbers.
    fn renew(&mut self) -> Result<(), Self::Error>;

    /// Takes the locks of its disks.
    ///
    /// # Errors
    /// A disk is locked elsewhere.
    fn retake(&mut self) -> Result<(), Self::Error>;

    /// Passes its guest the input that [`SaveState::take_typed`] returned elsewhere.
    fn give_typed(&mut self, typed: &[u8]);
}

/// A machine that can be saved.
pub trait SaveState: RestoreState {
    /// Its description, from which an equal machine can be created elsewhere: an object whose
    /// `kind` is the kind of machine. The other fields are those of that kind's `Description`.
    fn describe(&self) -> Value;

    /// Starts tracking writes to [`Inspect::memory`]: the VMM's from now on, and the guest's from
    /// [`DirtyTracker::enable`] on. The machine must be paused.
    ///
    /// # Errors
    /// This KVM cannot, or the memory is tracked already.
    fn track(&mut self, method: dirty::Method) -> Result<Box<dyn DirtyTracker>, dirty::Error>;

    /// Its whole state except its memory. The machine must be paused, and input for its guest is
    /// held as long as it stays paused. KVM may write to guest memory here, so the last collection
    /// of dirty pages comes afterwards.
    ///
    /// # Errors
    /// It is not paused, KVM refuses, or its guest has state that cannot be saved.
    fn save(&mut self) -> Result<Vec<Section>, Self::Error>;

    /// Releases the locks of its disks, so that another process can take them. The machine must be
    /// paused. [`RestoreState::retake`] takes them again.
    fn release(&mut self);

    /// Called after [`SaveState::save`], when the guest runs elsewhere. Returns the input that was
    /// held since. The guest here gets none of it.
    fn take_typed(&mut self) -> Vec<u8>;
}

/// A machine that can be handed over to another process of this host, with its memory and its open
/// files.
pub trait HandOver: Machine {
    /// Adds its open files on the host to `lent`, for a process that takes it over. It continues
    /// here as before.
    ///
    /// # Errors
    /// In words for the client.
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String>;
}

/// A machine as a session runs it, with the operations that clients request.
pub trait SessionMachine: HandOver {
    /// The kind of thread that the event loop's thread is, for its sandbox, from before
    /// [`Machine::start`] on.
    fn confinement(&self) -> ThreadKind;

    /// Its current state.
    fn state(&self) -> MachineState;

    /// Whether a user has paused it, independent of operations.
    fn is_paused(&self) -> bool;

    /// Fails if its end would take the guest's memory from another process that runs the guest.
    /// Contains the reason.
    fn may_end(&self) -> Result<(), String> {
        Ok(())
    }

    /// The method by which its dirty pages are collected, if they are.
    fn tracker(&self) -> Option<&'static str>;

    /// Events for listening clients since the last call.
    fn news(&mut self) -> Vec<News>;

    /// Reports that a client has gone. The operation that it owns ends, unless it continues without
    /// its owner.
    fn client_gone(&mut self, connection: u64);

    /// The operation in progress.
    fn under_way(&self) -> Option<UnderWay>;

    /// The frozen file that it shares with machines that were forked from it, and its number: each
    /// new base has the next one.
    ///
    /// # Errors
    /// Why there is none.
    fn base(&mut self) -> Result<(OwnedFd, u64), String>;

    /// The file of its RAM, which the kernel is to preserve in a live update that is under way.
    ///
    /// # Errors
    /// Why there is none.
    fn preserved(&mut self) -> Result<OwnedFd, String>;

    /// The socket to the process that it has moved to, if that process stands in for this one.
    /// Returned once.
    fn successor(&mut self) -> Option<OwnedFd>;
}
