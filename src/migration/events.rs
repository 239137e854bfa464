//! What the thread that sends or saves a machine and the event loop's thread say to each other.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::plan::Measured;
use crate::since::Since;
use crate::snapshot::layer;
use vellum_control::{Disk, Left, Mode, Pass, Phase, Then, Throttling, Waited};
use vellum_kvm::dirty::{DirtyTracker, Method};
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::vcpu::Throttle;
use vellum_machine::Section;
use vellum_sys::pagemap::Pagemap;

/// What is asked of a migration.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long the guest may stand still: a limit, not an aim.
    pub downtime: Duration,
    /// When it ends that has not converged, and how.
    pub timeout: Option<(Duration, Then)>,
    /// Bytes a second at most.
    pub bandwidth: Option<u64>,
    /// Whether the guest is slowed down.
    pub throttling: Throttling,
    /// How dirty pages are collected; what the machine has, where nothing is asked for.
    pub method: Option<Method>,
    /// How long the target may be silent where it is its turn.
    pub liveness: Duration,
    /// Whether pages are compressed where that pays.
    pub compress: bool,
    /// Whether all memory is compared while both sides stand still.
    pub verify: bool,
    /// Whether RAM is handed over as a descriptor, and not copied.
    pub hands_over: bool,
    /// When memory goes.
    pub mode: Mode,
    /// Whether the guest may have to run on the target before all of it is there.
    pub postcopies: bool,
}

/// What the event loop's thread is to do with the machine.
#[derive(Debug)]
pub enum Demand {
    /// Follow who writes to its memory, in this way or the best that it has.
    Track(Option<Method>),
    /// Pause it and save its state.
    Save,
    /// Let it run on.
    Resume,
    /// Give up the locks of its disks.
    Release,
    /// Take them again.
    Retake,
    /// The guest runs on the target: say what has been typed for it meanwhile.
    Typed,
}

/// The answer to a [`Demand`].
pub enum Done {
    /// To [`Demand::Track`].
    Tracker(Box<dyn DirtyTracker>),
    /// To [`Demand::Save`].
    Saved(Vec<Section>),
    /// To [`Demand::Typed`].
    Typed(Vec<u8>),
    /// To the others.
    Done,
    /// It cannot be done.
    Failed(String),
}

/// What the thread says without expecting an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum SenderEvent {
    /// How far it is.
    Progress(Progress),
    /// A pass has ended.
    Pass(Pass),
    /// The link was cut after COMMIT: the client is to bring another one.
    Unconfirmed,
    /// The guest runs on the target, which lacks some of its memory.
    Ahead,
    /// The link was cut meanwhile, and why.
    Severed(String),
    /// There is a link again.
    Recovered,
    /// The guest stays, and why.
    Stayed(String),
    /// The guest runs on the target.
    Moved {
        /// How many pages were compared before, where that was asked for.
        compared: Option<u64>,
        /// For how long it has waited there for pages that followed it.
        waited: Option<Waited>,
        /// What this thread knows of it.
        left: Left,
    },
    /// A snapshot is written: its files are on the disk, and get their names next.
    Written(Written),
    /// They have them.
    Named,
}

/// What a snapshot came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Whether it has all of memory.
    pub full: bool,
    /// When the machine was paused for it, in nanoseconds since 1970.
    pub taken: u64,
    /// How many passes over memory there were.
    pub passes: u32,
    /// Its pages.
    pub layer: layer::Written,
    /// Bytes of its state.
    pub state_bytes: u64,
    /// Their sum.
    pub state_crc: u32,
    /// The machine's disks.
    pub disks: Vec<Disk>,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it is at.
    pub phase: Phase,
    /// Which pass, from 1.
    pub pass: u32,
    /// Bytes sent so far.
    pub sent: u64,
    /// Bytes that compression has spared the link so far.
    pub spared: u64,
    /// Pages owed.
    pub owed: u64,
    /// What the last pass measured, once there is one.
    pub measured: Option<Measured>,
    /// How long the guest would stand still if the final pass began now.
    pub downtime: Option<Duration>,
    /// How long all of it was expected to take after the first pass.
    pub total: Option<Duration>,
    /// Percent of its time that is taken from the guest.
    pub taken: u32,
}

/// The machine, as far as this thread has a part in it.
pub(crate) struct Moving {
    /// What it is.
    pub describe: Value,
    /// Its memory.
    pub memory: Vec<Slot>,
    /// Its RAM.
    pub ram: Memory,
    /// Tells what of that was ever touched.
    pub pagemap: Option<Arc<Pagemap>>,
    /// Takes time from it.
    pub throttle: Throttle,
}

/// What comes from the event loop's thread.
pub(crate) enum SenderCommand {
    /// The answer to the last demand.
    Done(Done),
    /// The operator does not want it, or the guest has ended.
    Cancel(String),
    /// The operator takes the guest back.
    Force,
    /// The files of a snapshot have their names.
    Named,
    /// A new connection to the target.
    Linked(OwnedFd),
    /// The same where the target lacks memory, with one for pages that somebody waits for.
    Recovered(OwnedFd, OwnedFd),
    /// Other limits from now on.
    Set {
        /// How long the guest may stand still.
        downtime: Option<Duration>,
        /// Bytes a second.
        bandwidth: Option<u64>,
    },
}

/// What the thread says.
#[derive(Debug)]
pub enum Said {
    /// To be answered.
    Demand(Demand),
    /// Not to be answered.
    SenderEvent(SenderEvent),
    /// Who has written to memory since a snapshot, for the next one.
    Kept(Box<Since>),
}
