//! What a machine reports to listeners.

use serde::{Deserialize, Serialize};

use crate::status::DirtyRings;

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
    /// When the target had all memory that followed its guest, or 0 if none did.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub served: u64,
    /// When both sides had found their memory equal, or 0 without a comparison.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub compared: u64,
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

/// What a snapshot or a fork wrote into its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenPoint {
    /// When the guest was paused, in nanoseconds since 1970.
    pub taken: u64,
    /// The number of pages in total.
    pub pages: u64,
    /// The number of pages with content.
    pub present: u64,
    /// The number of zero pages.
    pub zero: u64,
    /// The CRC32C of the map.
    pub map_crc: u32,
    /// The size of the state in bytes.
    pub state_bytes: u64,
    /// The CRC32C of the state.
    pub state_crc: u32,
    /// The disks.
    #[serde(default)]
    pub disks: Vec<Disk>,
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
    Severed {
        /// The reason. Empty if the machine's Vellum is older than this field.
        #[serde(default)]
        why: String,
    },
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
        /// The number of passes over memory.
        passes: u32,
        /// What was written. Its pages with content are those in the files.
        #[serde(flatten)]
        written: WrittenPoint,
        /// How dirty pages were collected.
        tracker: Option<String>,
    },
    /// The machine was forked and continues. The client now starts the new machines.
    Forked {
        /// The downtime in microseconds.
        us: u64,
        /// How often it was paused before that, each time for a part of memory to show a new base.
        #[serde(default)]
        parts: u64,
        /// The sum of these pauses in microseconds.
        #[serde(default)]
        parts_us: u64,
        /// The number of its base, from 0.
        base: u64,
        /// What was written. Its pages with content, or of zeroes, are those that differ from the
        /// base.
        #[serde(flatten)]
        written: WrittenPoint,
    },
    /// A fork failed. The guest continues.
    NotForked {
        /// The reason.
        why: String,
    },
    /// The machine is paused, and its state is written for the host's next kernel.
    Preserved {
        /// How long the guest has been paused, in microseconds.
        us: u64,
        /// What was written. Its pages are those of memory that is not RAM.
        #[serde(flatten)]
        written: WrittenPoint,
    },
    /// A live update failed, or its client disconnected. The guest continues.
    NotPreserved {
        /// The reason.
        why: String,
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

fn is_nothing(count: &u64) -> bool {
    *count == 0
}
