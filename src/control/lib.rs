//! The control socket of a running machine. Requests are JSON lines `{"id","do",…}`, answered by
//! `{"id","ok"}` or `{"id","error"}`.
//!
//! The client chooses a request's number. The answer carries it, and so does each [`Event`] of the
//! request, on every connection that listens. Clients of one machine must choose different numbers:
//! [`client`] starts at a random one. Older builds send events without numbers; see
//! [`Status::numbered`].
//!
//! A running machine opens no paths. The client opens the files and sockets that a request needs,
//! and sends their descriptors with the request's first byte (SCM_RIGHTS, unix(7)).
//! [`Do::descriptors`] says how many.
//!
//! This file has the requests, answers and events. [`operation`] says which operations exclude each
//! other. [`server`] is the machine's side, on its event loop. [`client`] is the side of `vellum
//! ctl` and `list`. [`names`] finds the socket of a named machine, and [`agent`] talks to the guest
//! agent. The machine itself carries out the requests (`machine/`).

pub mod agent;
pub mod client;
pub mod names;
pub mod operation;
pub mod server;
mod state;

use serde::{Deserialize, Serialize};

use self::operation::UnderWay;
pub use self::state::MachineState;
use vellum_sys::socket::MAX_DESCRIPTORS;

/// The longest request in bytes, including its newline.
pub const MAX_LINE: usize = 64 << 10;

/// A request and its number.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The number, chosen by the client. The answer carries it.
    pub id: u64,
    /// The request.
    pub what: Do,
}

/// The requests. An unknown field is an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Do {
    /// Stop all vCPUs and devices. The answer comes once they have stopped.
    Pause {},
    /// Resume the guest.
    Resume {
        /// Resume even a guest that may run elsewhere. The caller asserts that the target is not
        /// running.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// Get a [`Status`].
    Status {},
    /// End the machine as if the guest had powered off.
    Stop {},
    /// Set how much memory the guest's balloon takes.
    Balloon {
        /// The size in bytes.
        bytes: u64,
    },
    /// Send [`Event`]s on this connection from now on.
    Events {},
    /// Migrate to the process at the other end of the descriptors, which are connected stream
    /// sockets.
    Migrate(MigrateRequest),
    /// Resume a migration whose link dropped. The descriptor is a new connection to the target.
    MigrateLink {},
    /// Resume a postcopy whose link dropped. The two descriptors are new connections to the target:
    /// one for the migration and one for faulting pages.
    MigrateRecover {},
    /// Cancel a migration.
    MigrateCancel {
        /// The number of the request that started it. Without a number, the current one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<u64>,
    },
    /// Change the limits of the current migration.
    MigrateSet {
        /// The longest pause of the guest in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        downtime_ms: Option<u64>,
        /// The bandwidth limit in bytes per second.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<u64>,
    },
    /// Write memory and state to the three files whose descriptors come with this: pages, map,
    /// state. The descriptors of the disk clones follow.
    Snapshot(Snapshot),
    /// The snapshot's files are on disk and renamed to their final names.
    SnapshotNamed {},
    /// Cancel a snapshot.
    SnapshotCancel {
        /// As in [`Do::MigrateCancel`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<u64>,
    },
    /// Stop dirty tracking.
    SnapshotEnd {},
    /// Lend descriptors of all open files to a process that takes the machine over. The answer is a
    /// [`Lending`] with the descriptors from this number on, as many as fit into a message.
    Lend {
        /// The first descriptor to send.
        from: usize,
    },
    /// Write a core dump to the empty file whose descriptor comes with this.
    Dump {},
    /// Inject an NMI into the guest.
    Nmi {},
    /// Send a magic SysRq key to the guest's kernel: a break on the serial line and the key.
    Sysrq {
        /// The key, an ASCII character.
        key: char,
    },
    /// Send the output of the guest's serial port to the file, pipe, socket or terminal whose
    /// descriptor comes with this. Unread output goes there too.
    Serial {
        /// Whether to truncate a file first.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncate: bool,
    },
}

impl Do {
    /// The number of descriptors that come with the request.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Serial { .. } | Self::MigrateLink {} | Self::Dump {} => 1,
            // Larger numbers than fit into one message are rejected.
            Self::MigrateRecover {} => 2,
            Self::Snapshot(asked) => 3 + asked.clones.min(MAX_DESCRIPTORS as u32) as usize,
            Self::Migrate(asked) => {
                let connections = asked.connections.clamp(1, MAX_DESCRIPTORS as u32) as usize;
                connections
                    + usize::from(asked.fence)
                    + usize::from(asked.postcopies())
                    + usize::from(asked.succeeded)
            }
            Self::Pause {}
            | Self::Resume { .. }
            | Self::Status {}
            | Self::Stop {}
            | Self::Balloon { .. }
            | Self::MigrateCancel { .. }
            | Self::MigrateSet { .. }
            | Self::SnapshotNamed {}
            | Self::SnapshotCancel { .. }
            | Self::SnapshotEnd {}
            | Self::Lend { .. }
            | Self::Nmi {}
            | Self::Sysrq { .. }
            | Self::Events {} => 0,
        }
    }
}

/// The answer to [`Do::Lend`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lending {
    /// A `payload::handoff::List`.
    pub list: serde_json::Value,
    /// The number of descriptors that the list names.
    pub descriptors: usize,
}

/// The parameters of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The longest pause of the guest in milliseconds.
    pub downtime_ms: u64,
    /// The time limit of the migration in milliseconds. `None` means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What to do when the time limit expires.
    #[serde(default)]
    pub then: Then,
    /// The bandwidth limit in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// How to slow down a guest that writes faster than the link.
    #[serde(default)]
    pub throttle: Throttling,
    /// How to collect dirty pages: a name of `dirty::Method`. `None` picks the machine's best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// Which pages the host loses with an initially-set dirty log. The default tracker depends on
    /// it.
    #[serde(default, skip_serializing_if = "Loses::is_nothing")]
    pub loses: Loses,
    /// How long the target may be silent when it has to answer, in milliseconds.
    pub liveness_ms: u64,
    /// The number of connections for pages. As many descriptors come with the request.
    #[serde(default = "default_one")]
    pub connections: u32,
    /// Whether a sealed memfd follows the connections. Two processes on one host use it to decide
    /// which of them owns the guest.
    #[serde(default)]
    pub fence: bool,
    /// How to compress pages that get smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress: Option<Compression>,
    /// Whether to compare every page on both sides before the hand-over, while the guest is paused.
    #[serde(default)]
    pub verify: bool,
    /// How to transfer memory.
    #[serde(default)]
    pub link: Link,
    /// Whether the target replaces this process (upgrade). The last descriptor connects the two.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub succeeded: bool,
    /// When to transfer memory.
    #[serde(default)]
    pub mode: Mode,
}

impl MigrateRequest {
    /// The request for a pause of `downtime_ms` at most, with a target that may be silent for
    /// `liveness_ms`. All else has its default.
    pub fn new(downtime_ms: u64, liveness_ms: u64) -> Self {
        Self {
            downtime_ms,
            timeout_ms: None,
            then: Then::default(),
            bandwidth: None,
            throttle: Throttling::default(),
            tracker: None,
            loses: Loses::Nothing,
            liveness_ms,
            connections: default_one(),
            fence: false,
            compress: None,
            verify: false,
            link: Link::default(),
            succeeded: false,
            mode: Mode::default(),
        }
    }

    /// Whether the guest may run on the target before all of its memory is there. One more
    /// connection then follows the others.
    pub fn postcopies(&self) -> bool {
        self.mode != Mode::Precopy || self.timeout_ms.is_some() && self.then == Then::Postcopy
    }
}

/// When memory is transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Before the guest runs on the target.
    #[default]
    Precopy,
    /// After the guest runs on the target.
    Postcopy,
    /// One pass before, and the pages written meanwhile after.
    Hybrid,
}

impl Mode {
    /// The mode's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }
}

/// The parameters of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The longest pause of the guest in milliseconds.
    pub downtime_ms: u64,
    /// After this many milliseconds the guest may be paused for longer, if it writes faster than
    /// the passes copy.
    pub timeout_ms: u64,
    /// How to collect dirty pages, as in [`MigrateRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// As in [`MigrateRequest`].
    #[serde(default, skip_serializing_if = "Loses::is_nothing")]
    pub loses: Loses,
    /// Whether the machine ends at the pause, once the files have their final names.
    #[serde(default)]
    pub stop: bool,
    /// The ID of the snapshot directory.
    pub chain: String,
    /// The number of this point in the chain.
    pub number: u32,
    /// Whether to keep tracking writes, so that the next point holds only the changes.
    #[serde(default)]
    pub follow: bool,
    /// The number of files for disk clones: none, or one for each disk in order.
    #[serde(default)]
    pub clones: u32,
}

/// A disk at the time of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The disk's name: `disk0`, …
    pub name: String,
    /// Its absolute path.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its modification time in nanoseconds since 1970. Block devices have none.
    pub changed: Option<i64>,
    /// The modification time of its clone, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone_changed: Option<i64>,
}

/// Which pages a kernel loses with an initially-set dirty log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loses {
    /// No loss is known.
    #[default]
    Nothing,
    /// The first page of a huge page, if a clear ends on it. Whether one does depends on the
    /// memslot's start.
    Edges,
    /// Other pages.
    Pages,
}

impl Loses {
    fn is_nothing(&self) -> bool {
        *self == Self::Nothing
    }
}

fn default_one() -> u32 {
    1
}

fn is_nothing(count: &u64) -> bool {
    *count == 0
}

/// How memory gets to the target of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// The source sends the pages.
    #[default]
    Stream,
    /// The target is on the same host and gets a descriptor of the memory.
    Memfd,
}

/// What to do when a migration's time limit expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Then {
    /// Cancel it. The guest stays.
    #[default]
    Cancel,
    /// Move the guest, no matter how long it pauses.
    Force,
    /// Move the guest and send the rest of its memory afterwards.
    Postcopy,
}

/// How to slow down a guest that writes faster than the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Throttling {
    /// Do not slow it down.
    #[default]
    Off,
    /// Take more of its time with each pass that did not reduce the dirty pages enough.
    Steps,
    /// After the first such pass, limit the guest to writing at half the link's rate. With dirty
    /// rings, only vCPUs that write more than their share are slowed down.
    DirtyLimit,
}

/// How to compress pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Zstandard (RFC 8878).
    Zstd,
}

/// The phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Copying memory while the guest runs.
    Copying,
    /// Sending the last pages and the state while the guest is paused.
    Final,
    /// Sending the rest of the memory while the guest runs on the target.
    Postcopy,
}

/// The status of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The process ID.
    pub pid: u32,
    /// What it is doing.
    pub state: MachineState,
    /// Whether events carry their requests' numbers.
    #[serde(default)]
    pub numbered: bool,
    /// The current operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<UnderWay>,
    /// The number of vCPUs.
    pub vcpus: usize,
    /// The size of RAM in bytes.
    pub memory: u64,
    /// The memory backing: `anonymous`, `memfd`, …
    #[serde(default)]
    pub backing: Option<String>,
    /// The size of the balloon, if there is one.
    pub balloon: Option<u64>,
    /// The unix socket that leads to the guest's vsock.
    pub vsock: Option<String>,
    /// The dirty rings of the vCPUs, if there are any.
    #[serde(default)]
    pub dirty_ring: Option<DirtyRings>,
    /// The CR3 cache, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cr3_cache: Option<Cr3Cache>,
    /// How dirty pages are collected, during a migration.
    #[serde(default)]
    pub tracker: Option<String>,
    /// The names of the disks.
    #[serde(default)]
    pub disks: Vec<String>,
    /// The device that blocks snapshots and migration, if any.
    #[serde(default)]
    pub stays: Option<MigrationBlocker>,
    /// The process ends after this many milliseconds (`--duration`, `--timeout`). The limit does
    /// not migrate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
}

/// A device that cannot be migrated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationBlocker {
    /// Its key on the command line.
    pub key: String,
    /// Its name.
    pub name: String,
    /// The reason.
    pub why: String,
}

/// The dirty rings of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyRings {
    /// The entries of each vCPU's ring.
    pub entries: u32,
    /// How often a ring was full.
    pub full: u64,
}

/// The CR3 cache of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cr3Cache {
    /// The number of address spaces that a vCPU can switch between without an exit.
    pub entries: u32,
    /// The VM's directory in debugfs, which has the cache's counters. A confined machine cannot
    /// open them, so `vellum ctl` adds them.
    pub debugfs: String,
}

/// A completed pass over memory. Times are microseconds of the host's CLOCK_MONOTONIC, which all
/// its processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// The pass's number, from 1.
    pub pass: u32,
    /// Whether the guest was paused during the pass.
    pub last: bool,
    /// The start of the pass, after the dirty pages were collected.
    pub began: u64,
    /// When the kernel had accepted the last page.
    pub ended: u64,
    /// The number of pages to send.
    pub pages: u64,
    /// The bytes sent.
    pub bytes: u64,
    /// The number of pages written meanwhile.
    pub dirty: u64,
    /// How long collecting the dirty pages took, in microseconds.
    pub harvest: u64,
    /// How long the longest clear of the log took, in microseconds. A chunk's clear if the tracker
    /// clears in chunks.
    #[serde(default)]
    pub clear: u64,
}

/// What the source reports of a finished migration. Times are as in [`Pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The start of the migration.
    pub began: u64,
    /// When the guest was told to pause.
    pub pausing: u64,
    /// When the guest had paused.
    pub paused: u64,
    /// When the state was saved.
    pub saved: u64,
    /// When the kernel had accepted the last page.
    pub sent: u64,
    /// The number of passes, including the last.
    pub passes: u32,
    /// Bytes sent.
    pub bytes: u64,
    /// Bytes saved by compression.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub spared: u64,
    /// Whether the guest could be moved within its downtime limit. Otherwise the time limit
    /// expired.
    pub converged: bool,
    /// The expected downtime at the start of the last pass, in microseconds.
    pub expected_downtime: Option<u64>,
    /// The downtime estimated after the first pass. `None` if no end was in sight.
    pub estimated_downtime: Option<u64>,
    /// The total duration estimated after the first pass.
    pub estimated_total: Option<u64>,
}

/// What the target reports of a machine that has arrived. Times are as in [`Pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    /// When all data had arrived.
    pub complete: u64,
    /// When the state was restored.
    pub restored: u64,
    /// When the vCPUs started.
    pub runs: u64,
}

/// Memory that was loaded on demand and is now complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// The number of faults.
    pub faults: u64,
    /// The number of 4 KiB pages loaded.
    pub pages: u64,
    /// The total time in microseconds.
    pub us: u64,
}

/// How long a guest waited for pages that are loaded on demand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waited {
    /// The total wait of each vCPU in microseconds.
    pub vcpus_us: Vec<u64>,
    /// The number of faults, including those of devices and Vellum.
    pub faults: u64,
    /// The median wait in microseconds.
    pub median_us: u64,
    /// The longest wait in microseconds.
    pub longest_us: u64,
}

/// What a machine reports to listeners.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The guest is paused.
    Paused {
        /// How long pausing took, in microseconds.
        us: u64,
    },
    /// The guest resumed.
    Resumed {},
    /// The progress of the workload, once a second. Only for guests without an OS.
    Progress {
        /// Pages accessed so far.
        done: u64,
        /// Pages to access, if the workload ends.
        of: Option<u64>,
    },
    /// The progress of a migration.
    Migrating {
        /// The current phase.
        phase: Phase,
        /// The pass over memory, from 1.
        pass: u32,
        /// Bytes sent so far.
        sent: u64,
        /// Bytes saved by compression so far.
        #[serde(default, skip_serializing_if = "is_nothing")]
        spared: u64,
        /// Bytes of memory still to send.
        left: u64,
        /// Bytes per second that the guest dirtied during the last pass.
        dirty_rate: Option<u64>,
        /// Bytes per second that the link carried during the last pass.
        bandwidth: Option<u64>,
        /// The downtime if the guest moved now, in milliseconds.
        expected_downtime_ms: Option<u64>,
        /// The expected total duration after the first pass, in milliseconds. `None` before that,
        /// or if no end was in sight.
        expected_total_ms: Option<u64>,
        /// The percentage of its time taken from the vCPU that is slowed down most.
        throttle_percent: u32,
    },
    /// A pass over memory completed during a migration.
    Pass(Pass),
    /// The link dropped after the target was told to run the guest, so the source does not know
    /// whether it runs there. A new connection resolves it.
    Unconfirmed {},
    /// The guest runs on the target. The source sends the rest of its memory.
    Ahead {
        /// The guest's downtime as seen by the source, in microseconds.
        us: u64,
    },
    /// The link dropped during postcopy. Faulting vCPUs wait until a new connection continues it.
    Severed {},
    /// How long the guest waited for pages after postcopy.
    Waited(Waited),
    /// A migration ended and the guest continues here.
    Stayed {
        /// The reason.
        why: String,
    },
    /// A migration ended and the guest runs elsewhere.
    Moved {
        /// The guest's downtime as seen by the source, in microseconds.
        us: u64,
        /// The number of pages compared and found equal, if verification was requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compared: Option<u64>,
        /// How dirty pages were collected.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tracker: Option<String>,
        /// Why the cheapest tracker was not used: this kernel loses pages with it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tracker_why: Option<String>,
        /// The dirty rings, if there are any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dirty_ring: Option<DirtyRings>,
        /// How long the guest waited on the target for pages after postcopy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waited: Option<Waited>,
        /// The timing of the migration.
        left: Left,
    },
    /// A snapshot's files are on disk. The client must now give them their final names.
    Snapshot {
        /// The downtime in microseconds. `None` if the guest is still paused.
        us: Option<u64>,
        /// Whether the snapshot has all of memory, not only the changes since the previous point.
        full: bool,
        /// When the guest was paused, in nanoseconds since 1970.
        taken: u64,
        /// The number of passes over memory.
        passes: u32,
        /// The number of pages in total.
        pages: u64,
        /// The number of pages with content in the files.
        present: u64,
        /// The number of zero pages.
        zero: u64,
        /// The CRC32C of the map.
        map_crc: u32,
        /// The size of the state in bytes.
        state_bytes: u64,
        /// The CRC32C of the state.
        state_crc: u32,
        /// How dirty pages were collected.
        tracker: Option<String>,
        /// The disks.
        #[serde(default)]
        disks: Vec<Disk>,
    },
    /// Memory that was loaded on demand is complete.
    Fetched(Fetched),
    /// A snapshot is finished: its files have their final names.
    SnapshotOver {},
    /// A snapshot failed. The guest continues.
    NoSnapshot {
        /// The reason.
        why: String,
    },
    /// A dump is complete.
    Dumped {
        /// The length of the file.
        bytes: u64,
        /// The bytes of the file that are not holes.
        content: u64,
        /// The release of the guest's kernel, if found in its memory.
        release: Option<String>,
        /// The kernel's KASLR offset.
        kaslr: Option<u64>,
        /// The distance of the kernel's image from its link address.
        phys_base: Option<i64>,
    },
    /// A dump failed. The guest continues.
    NotDumped {
        /// The reason.
        why: String,
    },
    /// The machine arrived from another process or a snapshot, and runs here.
    Arrived {
        /// The timing of the arrival.
        came: Came,
    },
    /// The machine ended.
    Ended {
        /// The exit status of the process.
        status: u8,
    },
    /// This client did not read and missed events: progress, and those of other clients. The end of
    /// an operation is always reported.
    Missed {
        /// The number of missed events.
        events: u64,
    },
}

impl Event {
    /// Whether a client that does not read may miss the event: the next one of its kind repeats it,
    /// or no one waits for it.
    pub(crate) fn may_be_missed(&self) -> bool {
        matches!(
            self,
            Self::Paused { .. }
                | Self::Resumed {}
                | Self::Progress { .. }
                | Self::Migrating { .. }
                | Self::Pass(_)
                | Self::Missed { .. }
        )
    }
}

/// Parses a request. The error has the number to answer with, or 0 if the line has none.
pub fn parse(line: &[u8]) -> Result<Request, (u64, String)> {
    let mut fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(line).map_err(|error| (0, format!("not a JSON object: {error}")))?;
    let id = fields.remove("id").and_then(|id| id.as_u64());
    let id = id.ok_or((0, "`id` must be a number".to_owned()))?;
    let what = serde_json::from_value(fields.into()).map_err(|error| (id, error.to_string()))?;
    Ok(Request { id, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_strictly() {
        let request = parse(br#"{"id":7,"do":"balloon","bytes":4096}"#).unwrap();
        assert_eq!(request, Request { id: 7, what: Do::Balloon { bytes: 4096 } });
        for (line, id, says) in [
            (&b"pause"[..], 0, "JSON"),
            (b"[1]", 0, "JSON"),
            (br#"{"do":"pause"}"#, 0, "`id`"),
            (br#"{"id":-1,"do":"pause"}"#, 0, "`id`"),
            (br#"{"id":1,"do":"puase"}"#, 1, "pause"),
            (br#"{"id":1,"do":"pause","now":true}"#, 1, "now"),
            (br#"{"id":1,"do":"balloon"}"#, 1, "bytes"),
            (b"\xff\xfe", 0, "JSON"),
        ] {
            let (number, error) = parse(line).unwrap_err();
            assert!(number == id && error.contains(says), "{error}");
        }
    }
}
