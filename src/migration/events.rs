//! Messages between the thread that sends or saves a machine and the event loop's thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::plan::Measured;
use crate::since::Since;
use crate::snapshot::layer;
use vellum_control::{Disk, Left, Mode, Pass, Phase, Then, Throttling, Waited, WrittenPoint};
use vellum_kvm::dirty::{DirtyTracker, Method};
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::vcpu::Throttle;
use vellum_machine::Section;
use vellum_sys::pagemap::Pagemap;

/// The options of a migration.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long the guest may be paused: a limit, not a target.
    pub downtime: Duration,
    /// When a migration that has not converged ends, and how.
    pub timeout: Option<(Duration, Then)>,
    /// The maximum bandwidth in bytes per second.
    pub bandwidth: Option<u64>,
    /// Whether the guest is throttled.
    pub throttling: Throttling,
    /// How dirty pages are collected. None for the machine's own method.
    pub method: Option<Method>,
    /// How long the target may be silent when it has to answer.
    pub liveness: Duration,
    /// Whether pages are compressed where that saves bytes.
    pub compress: bool,
    /// Whether all memory is compared while both sides are paused.
    pub verify: bool,
    /// Whether RAM is handed over as a descriptor instead of copied.
    pub hands_over: bool,
    /// When memory is sent.
    pub mode: Mode,
    /// Whether the guest may run on the target before all of its memory is there.
    pub postcopies: bool,
}

/// A demand on the event loop's thread, about the machine.
#[derive(Debug)]
pub enum Demand {
    /// Start dirty tracking with this method, or with the best that the machine has.
    Track(Option<Method>),
    /// Pause the machine. It resumes before its state is saved.
    Pause,
    /// Pause the machine and save its state.
    Save,
    /// Let the machine continue.
    Resume,
    /// Release the locks of its disks.
    Release {
        /// Whether the guest is to run on the target before all of its memory is there.
        ahead: bool,
    },
    /// Take the locks again.
    Retake,
    /// The guest runs on the target. Return the input that arrived for it meanwhile.
    Typed,
}

/// The answer to a [`Demand`].
pub enum Done {
    /// The answer to [`Demand::Track`].
    Tracker(Box<dyn DirtyTracker>),
    /// The answer to [`Demand::Save`].
    Saved(Vec<Section>),
    /// The answer to [`Demand::Typed`].
    Typed(Vec<u8>),
    /// The answer to every other demand.
    Done,
    /// The demand failed.
    Failed(String),
}

/// What the thread reports without expecting an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum SenderEvent {
    /// The progress so far.
    Progress(Progress),
    /// A pass has ended.
    Pass(Pass),
    /// The link dropped after COMMIT. The client is to supply another one.
    Unconfirmed,
    /// The guest runs on the target, which lacks some of its memory.
    Ahead,
    /// The link dropped while the target lacked memory. Contains the reason.
    Severed(String),
    /// A new link has been accepted.
    Recovered,
    /// The guest stays. Contains the reason.
    Stayed(String),
    /// The guest runs on the target.
    Moved {
        /// How many pages were compared before, if a comparison was requested.
        compared: Option<u64>,
        /// How long the guest has waited on the target for pages that followed it.
        waited: Option<Waited>,
        /// What this thread knows about the migration.
        left: Left,
    },
    /// A snapshot's files are on disk under temporary names. They are renamed next.
    Written(Written),
    /// The files have their final names.
    Named,
    /// The machine is paused, and its state is in the files of a live update.
    Preserved(Written),
    /// The machine was forked; the number of its base, and what differs from that.
    Forked {
        /// The pauses in which memory came to show a new base, and the sum of their times.
        parts: (u64, Duration),
        /// From 0.
        base: u64,
        /// What is in the files.
        written: Written,
    },
}

/// The result of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Whether it contains all of memory.
    pub full: bool,
    /// When the machine was paused for it, in nanoseconds since 1970.
    pub taken: u64,
    /// How many passes over memory there were.
    pub passes: u32,
    /// Its pages.
    pub layer: layer::Written,
    /// The size of its state in bytes.
    pub state_bytes: u64,
    /// The checksum of its state.
    pub state_crc: u32,
    /// The machine's disks.
    pub disks: Vec<Disk>,
}

impl From<Written> for WrittenPoint {
    fn from(written: Written) -> Self {
        let Written { taken, layer, state_bytes, state_crc, disks, .. } = written;
        let layer::Written { pages, present, zero, map_crc } = layer;
        Self { taken, pages, present, zero, map_crc, state_bytes, state_crc, disks }
    }
}

/// The progress of a migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// The number of the pass, from 1.
    pub pass: u32,
    /// Bytes sent so far.
    pub sent: u64,
    /// Bytes that compression has saved on the link so far.
    pub spared: u64,
    /// The number of pages still to be sent.
    pub owed: u64,
    /// What the last pass measured. None before the first ends.
    pub measured: Option<Measured>,
    /// How long the guest would be paused if the final pass began now.
    pub downtime: Option<Duration>,
    /// The total time expected after the first pass.
    pub total: Option<Duration>,
    /// The percentage of time taken from the guest by throttling.
    pub taken: u32,
}

/// What this thread uses of the machine.
pub(crate) struct Moving {
    /// The machine's configuration.
    pub describe: Value,
    /// Its memory.
    pub memory: Vec<Slot>,
    /// Its RAM.
    pub ram: Memory,
    /// Tells which pages of it were ever touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// Throttles the vCPUs.
    pub throttle: Throttle,
    /// The disks, which stay where they are.
    pub disks: Vec<vellum_machine::Disk>,
}

/// A command from the event loop's thread.
pub(crate) enum SenderCommand {
    /// The answer to the last demand.
    Done(Done),
    /// The operator cancels, or the guest has ended.
    Cancel(String),
    /// The operator takes the guest back.
    Force,
    /// The files of a snapshot have their final names.
    Named,
    /// The memory of a machine that is saved for a live update is preserved.
    Preserved,
    /// A new connection to the target.
    Linked(OwnedFd),
    /// A new connection to a target that lacks memory, and a second one for faulting pages.
    Recovered(OwnedFd, OwnedFd),
    /// New limits.
    Set {
        /// How long the guest may be paused.
        downtime: Option<Duration>,
        /// Bytes per second.
        bandwidth: Option<u64>,
    },
}

/// What the thread says.
#[derive(Debug)]
pub enum Said {
    /// A demand, which is to be answered.
    Demand(Demand),
    /// An event, which is not to be answered.
    SenderEvent(SenderEvent),
    /// The dirty log since a snapshot, for the next one.
    Kept(Box<Since>),
}
