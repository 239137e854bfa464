//! The control socket of a running machine: JSON lines, `{"id","do",…}` answered by `{"id","ok"}` or `{"id","error"}`.
//!
//! The client chooses a request's number. What comes of a request carries it: the answer, and each [`Event`] on every connection
//! that listens. Clients that share a machine choose different numbers: [`client`] begins with a random one. Builds before numbered
//! events send them without, and take no part of that; [`Status::numbered`] tells them apart.
//!
//! A running machine opens no path. What a request needs of files and sockets the client opens, and sends the descriptors
//! with the request's first byte (SCM_RIGHTS, unix(7)), as many as [`Do::descriptors`] says.
//!
//! Here are the words of both sides. Which operations exclude each other is a table of [`operation`]. [`server`] is the machine's side, on its event loop; [`client`] is what `vellum ctl`
//! and `list` use; [`names`] says where the socket of a named machine is; [`agent`] speaks to the agent in its guest. What
//! a request does to the machine is decided where the machine runs (`machine/`).

pub mod agent;
pub mod client;
pub mod names;
pub mod operation;
pub mod server;

use serde::{Deserialize, Serialize};

use self::operation::UnderWay;
use vellum_sys::socket::MAX_DESCRIPTORS;

/// The longest request in bytes, its newline included.
pub const MAX_LINE: usize = 64 << 10;

/// A request with the number that its answer carries.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Chosen by the client.
    pub id: u64,
    /// What to do.
    pub what: Do,
}

/// What can be asked. An unknown field is refused rather than ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Do {
    /// Stop all vCPUs and devices. The answer comes when they stand still.
    Pause {},
    /// Let them go on.
    Resume {
        /// Whether also a guest goes on that may run elsewhere: whoever says this knows that it does not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// The answer is a [`Status`].
    Status {},
    /// End the machine as if it had switched itself off.
    Stop {},
    /// Ask the guest to lend this much of its memory.
    Balloon {
        /// In bytes.
        bytes: u64,
    },
    /// Send [`Event`]s on this connection from now on.
    Events {},
    /// Move to the process at the other end of the descriptors that come with this, connected stream sockets.
    Migrate(Migrate),
    /// The descriptor that comes with this is another connection to the target of a migration whose link was cut.
    MigrateLink {},
    /// The two descriptors that come with this are new connections to the target of a migration whose link was cut while the target
    /// lacked memory: one for the migration, and one for pages that somebody waits for.
    MigrateRecover {},
    /// Give a migration up.
    MigrateCancel {
        /// The number of the request that began it; the one that is under way, where none is named.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<u64>,
    },
    /// Change the limits of a migration that is under way.
    MigrateSet {
        /// How long the guest may stand still, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        downtime_ms: Option<u64>,
        /// Bytes a second at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<u64>,
    },
    /// Write memory and state into the three files whose descriptors come with this: pages, map, state. Those of the clones of its
    /// disks follow.
    Snapshot(Snapshot),
    /// They have been written, are on the disk, and have their names now.
    SnapshotNamed {},
    /// Give a snapshot up.
    SnapshotCancel {
        /// As in [`Do::MigrateCancel`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<u64>,
    },
    /// Follow no longer who writes to memory.
    SnapshotEnd {},
    /// Lend descriptors of all that the machine has open, for a process that is to take it over. The answer is a [`Lending`], and those
    /// from this number on come with it, as many as one message takes.
    Lend {
        /// From which one on.
        from: usize,
    },
    /// Write its memory into the empty file whose descriptor comes with this, as a core dump.
    Dump {},
    /// Give its guest a non-maskable interrupt.
    Nmi {},
    /// Have its kernel obey a key of its magic ones: a break of the serial line, and that key.
    Sysrq {
        /// Which, a character of ASCII.
        key: char,
    },
    /// Let what the guest writes to its serial port go to the file, pipe, socket or terminal whose descriptor comes with
    /// this. What has not been read yet goes there too.
    Serial {
        /// Whether a file loses first what it holds.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncate: bool,
    },
}

impl Do {
    /// How many descriptors come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Serial { .. } | Self::MigrateLink {} | Self::Dump {} => 1,
            // More than can come in one message are refused.
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

/// What is lent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lending {
    /// A `payload::handoff::List`.
    pub list: serde_json::Value,
    /// How many descriptors it names.
    pub descriptors: usize,
}

/// What is asked of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migrate {
    /// How long the guest may stand still, in milliseconds.
    pub downtime_ms: u64,
    /// How long all of it may take, in milliseconds; without it, as long as it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What then.
    #[serde(default)]
    pub then: Then,
    /// Bytes a second at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Whether the guest is slowed down where it writes faster than the link takes.
    #[serde(default)]
    pub throttle: Throttling,
    /// How dirty pages are collected: a name of `dirty::Method`; the best that the machine has, where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// What its host is known to lose of a dirty log that is all set at first: where nothing else is asked for, how pages are collected
    /// depends on it.
    #[serde(default, skip_serializing_if = "Loses::is_nothing")]
    pub loses: Loses,
    /// How long the target may be silent where it is its turn, in milliseconds.
    pub liveness_ms: u64,
    /// How many connections its pages go over; so many descriptors come with this.
    #[serde(default = "default_one")]
    pub connections: u32,
    /// Whether a sealed file in memory follows them, by which two processes of one host decide who has the guest.
    #[serde(default)]
    pub fence: bool,
    /// How pages are compressed, where that pays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress: Option<Compression>,
    /// Whether every page is compared before it is handed over, while it stands still on both sides.
    #[serde(default)]
    pub verify: bool,
    /// How its memory gets there.
    #[serde(default)]
    pub link: Link,
    /// Whether the target stands in for this process: the last descriptor ties the two together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub succeeded: bool,
    /// When its memory goes.
    #[serde(default)]
    pub mode: Mode,
}

impl Migrate {
    /// Whether the guest may have to run on the target before all of its memory is there: one more connection then comes with this,
    /// behind the others.
    pub fn postcopies(&self) -> bool {
        self.mode != Mode::Precopy || self.timeout_ms.is_some() && self.then == Then::Postcopy
    }
}

/// When memory goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All of it before the guest runs on the target.
    #[default]
    Precopy,
    /// After that.
    Postcopy,
    /// A pass before that, and what was written meanwhile after it.
    Hybrid,
}

impl Mode {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }
}

/// What is asked of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// How long the guest may stand still, in milliseconds.
    pub downtime_ms: u64,
    /// After how many milliseconds it is paused for longer, where it writes faster than passes end.
    pub timeout_ms: u64,
    /// How dirty pages are collected, as in [`Migrate`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// As in [`Migrate`].
    #[serde(default, skip_serializing_if = "Loses::is_nothing")]
    pub loses: Loses,
    /// Whether the machine ends where it was paused, once its files have their names.
    #[serde(default)]
    pub stop: bool,
    /// Which directory it goes to.
    pub chain: String,
    /// Which of its points this becomes.
    pub number: u32,
    /// Whether it is followed from then on who writes to memory, so that the next point has only what has changed.
    #[serde(default)]
    pub follow: bool,
    /// How many files follow that its disks are to be cloned into: none, or one for each in their order.
    #[serde(default)]
    pub clones: u32,
}

/// A disk as it was when its machine was paused for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// `disk0`, …
    pub name: String,
    /// Its absolute path then.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was last written to, in nanoseconds since 1970. A block device does not tell.
    pub changed: Option<i64>,
    /// The same of its clone, where it was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone_changed: Option<i64>,
}

/// What a kernel is known to lose of a dirty log that is all set at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loses {
    /// Nothing is known.
    #[default]
    Nothing,
    /// The first page of a huge one where a clear ends on it, which depends on where a memslot begins.
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
    /// Its pages are sent.
    #[default]
    Stream,
    /// The target is another process of this host, and is handed a descriptor.
    Memfd,
}

/// What becomes of a migration whose time is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Then {
    /// The guest stays.
    #[default]
    Cancel,
    /// It moves, however long it has to stand still.
    Force,
    /// It moves, and what is left of its memory follows.
    Postcopy,
}

/// Whether a guest that writes faster than its link takes is slowed down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Throttling {
    /// It is not.
    #[default]
    Off,
    /// More and more of its time is taken, a step for each pass that did not pay.
    Steps,
    /// As much is taken as leaves it half of what the link takes to write, from the first pass on that did not pay: where dirty rings tell
    /// who writes, from those vCPUs alone that write more than their share.
    DirtyLimit,
}

/// How pages are compressed on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// As Zstandard, RFC 8878.
    Zstd,
}

/// What a migration is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Passes over memory while the guest runs.
    Copying,
    /// The last pages and the state, while it stands still.
    Final,
    /// What the target lacks, while it runs there.
    Postcopy,
}

/// A machine in a few words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// `running`, `paused`, `debugged`, `dumping`, `migrating`, `upgrading`, `snapshotting`, `handover-unconfirmed`, `postcopy`, `postcopy-paused`; of a machine that is to come, `waiting`, `incoming` or `uncommitted`.
    pub state: String,
    /// Whether its events carry the numbers of the requests that they come of.
    #[serde(default)]
    pub numbered: bool,
    /// What it has under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<UnderWay>,
    /// How many vCPUs it has.
    pub vcpus: usize,
    /// Its RAM in bytes.
    pub memory: u64,
    /// What backs that: `anonymous`, `memfd`, …
    #[serde(default)]
    pub backing: Option<String>,
    /// What the guest has lent of it, if there is a balloon.
    pub balloon: Option<u64>,
    /// The unix socket that leads to the guest's sockets.
    pub vsock: Option<String>,
    /// The dirty rings of its vCPUs, if it has any.
    #[serde(default)]
    pub dirty_ring: Option<DirtyRings>,
    /// Its CR3 cache, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cr3_cache: Option<Cr3Cache>,
    /// How its dirty pages are collected, while a migration is under way.
    #[serde(default)]
    pub tracker: Option<String>,
    /// The names of its disks.
    #[serde(default)]
    pub disks: Vec<String>,
    /// What keeps it from being saved and from moving, if anything does.
    #[serde(default)]
    pub stays: Option<MigrationBlocker>,
    /// After how many milliseconds it ends by `--duration` or `--timeout`: a limit of this process, which does not move with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
}

/// A device that keeps its machine where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationBlocker {
    /// Its kind, by the key that the command line has for it.
    pub key: String,
    /// Its name.
    pub name: String,
    /// Why.
    pub why: String,
}

/// The dirty rings of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyRings {
    /// Entries of each vCPU's.
    pub entries: u32,
    /// How often one was full.
    pub full: u64,
}

/// The CR3 cache of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cr3Cache {
    /// How many address spaces each vCPU can switch among without an exit.
    pub entries: u32,
    /// What debugfs calls the VM, whose counters it has. A confined machine cannot open them: `vellum ctl` adds them.
    pub debugfs: String,
}

/// A pass over memory that has ended. Times are microseconds of the host's CLOCK_MONOTONIC, which all its processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Its number, from 1.
    pub pass: u32,
    /// Whether the guest stands still meanwhile.
    pub last: bool,
    /// When it began: who has written what was collected before.
    pub began: u64,
    /// When the last of its pages was handed to the kernel.
    pub ended: u64,
    /// Pages that it had to send.
    pub pages: u64,
    /// Bytes that it sent.
    pub bytes: u64,
    /// Pages that were written meanwhile.
    pub dirty: u64,
    /// How long it took to collect what it had to send, in microseconds.
    pub harvest: u64,
    /// How long the longest clear of its log took, in microseconds: a chunk's, where the tracker clears chunk by chunk.
    #[serde(default)]
    pub clear: u64,
}

/// What the source knows of a migration that is over. Times are as those of [`Pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// When it began.
    pub began: u64,
    /// When the guest was to stand still.
    pub pausing: u64,
    /// When it did.
    pub paused: u64,
    /// When its state had been saved.
    pub saved: u64,
    /// When the last page had been handed to the kernel.
    pub sent: u64,
    /// Passes, the last one included.
    pub passes: u32,
    /// Bytes sent.
    pub bytes: u64,
    /// Bytes that compression has spared the link.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub spared: u64,
    /// Whether passes left so little that the guest could be moved within its limit: otherwise its time was over.
    pub converged: bool,
    /// For how long the guest was expected to stand still when the last pass began, in microseconds.
    pub expected_downtime: Option<u64>,
    /// The same as it was estimated after the first pass; nothing where there was no end in sight.
    pub estimated_downtime: Option<u64>,
    /// How long all of it would take, by the same estimate.
    pub estimated_total: Option<u64>,
}

/// What the target knows of a machine that has come. Times are as those of [`Pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    /// When everything was there.
    pub complete: u64,
    /// When the state had been restored.
    pub restored: u64,
    /// When the vCPUs were let go.
    pub runs: u64,
}

/// Memory that came as somebody wanted it, and is all there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// How often somebody waited for it.
    pub faults: u64,
    /// Pages that were brought, of the usual size.
    pub pages: u64,
    /// How long all of it took, in microseconds.
    pub us: u64,
}

/// How long a guest has waited for pages that came only when somebody wanted them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waited {
    /// Each vCPU in all, in microseconds.
    pub vcpus_us: Vec<u64>,
    /// How often somebody waited, devices and Vellum itself included.
    pub faults: u64,
    /// For how long half of these waited at most, in microseconds.
    pub median_us: u64,
    /// For how long the one that waited longest did, in microseconds.
    pub longest_us: u64,
}

/// What a machine tells those who listen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// It stands still.
    Paused {
        /// How long that took, in microseconds.
        us: u64,
    },
    /// It goes on.
    Resumed {},
    /// How far its workload has come; once a second, from guests without an OS.
    Progress {
        /// Pages accessed so far.
        done: u64,
        /// Pages to access, where there is an end.
        of: Option<u64>,
    },
    /// It is on its way to another process, and how far.
    Migrating {
        /// What is under way.
        phase: Phase,
        /// Which pass over memory, from 1.
        pass: u32,
        /// Bytes sent so far.
        sent: u64,
        /// Bytes that compression has spared the link so far.
        #[serde(default, skip_serializing_if = "is_nothing")]
        spared: u64,
        /// Bytes of memory that are still to be sent.
        left: u64,
        /// Bytes of memory that the guest wrote anew in a second of the last pass.
        dirty_rate: Option<u64>,
        /// Bytes a second that the link took in the last pass.
        bandwidth: Option<u64>,
        /// How long the guest would stand still if it were moved now, in milliseconds.
        expected_downtime_ms: Option<u64>,
        /// How long all of it was expected to take when the first pass had ended, in milliseconds; none before, and where there was
        /// no end in sight.
        expected_total_ms: Option<u64>,
        /// Percent of its time that is taken from the guest, from the vCPU that loses most.
        throttle_percent: u32,
    },
    /// It is on its way, and a pass over memory has ended.
    Pass(Pass),
    /// The link was cut after the target was told to run it: nobody here knows whether it does. Another connection resolves it.
    Unconfirmed {},
    /// It runs on the target, and what that lacks of its memory is sent.
    Ahead {
        /// How long it stood still here until that was known, in microseconds.
        us: u64,
    },
    /// The link was cut while the target lacked some of its memory: whoever wants that waits. Another link goes on.
    Severed {},
    /// For how long its guest has waited for pages that followed it here.
    Waited(Waited),
    /// A migration is over, and it runs here as before.
    Stayed {
        /// Why.
        why: String,
    },
    /// A migration is over, and it runs elsewhere.
    Moved {
        /// How long it stood still here until that was known, in microseconds.
        us: u64,
        /// How many pages were compared before and found alike, where that was asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compared: Option<u64>,
        /// How its dirty pages were collected.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tracker: Option<String>,
        /// Why not in the way that costs the guest least, where this kernel is known to lose pages of that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tracker_why: Option<String>,
        /// Its dirty rings, if it has any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dirty_ring: Option<DirtyRings>,
        /// For how long it has waited on the target for pages that followed it, where such were.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waited: Option<Waited>,
        /// When what of it was done.
        left: Left,
    },
    /// A snapshot of it is written: its files are on the disk, and want to be named.
    Snapshot {
        /// How long it stood still, in microseconds; none where it does still.
        us: Option<u64>,
        /// Whether it has all of memory, and not only what has changed since the point before.
        full: bool,
        /// When it was paused, in nanoseconds since 1970.
        taken: u64,
        /// How many passes over its memory there were.
        passes: u32,
        /// All pages of it.
        pages: u64,
        /// Those whose content is in the files.
        present: u64,
        /// Those that are zero.
        zero: u64,
        /// CRC32C of the map.
        map_crc: u32,
        /// Bytes of the state.
        state_bytes: u64,
        /// CRC32C of the state.
        state_crc: u32,
        /// How its dirty pages were collected.
        tracker: Option<String>,
        /// Its disks.
        #[serde(default)]
        disks: Vec<Disk>,
    },
    /// All of its memory is there, which came as somebody wanted it.
    Fetched(Fetched),
    /// A snapshot of it is over: it knows that its files have their names.
    SnapshotOver {},
    /// No snapshot comes of it, and it goes on as before.
    NoSnapshot {
        /// Why.
        why: String,
    },
    /// A dump of it is written.
    Dumped {
        /// How long the file is.
        bytes: u64,
        /// How much of it is no hole.
        content: u64,
        /// Which kernel its guest has, where that says so in its memory.
        release: Option<String>,
        /// By how much that kernel's addresses were moved at random.
        kaslr: Option<u64>,
        /// By how much its image lies elsewhere than it was linked to.
        phys_base: Option<i64>,
    },
    /// No dump comes of it, and it goes on as before.
    NotDumped {
        /// Why.
        why: String,
    },
    /// It has come from another process or out of a snapshot, and runs here.
    Arrived {
        /// When what of it was done.
        came: Came,
    },
    /// It has ended.
    Ended {
        /// The exit status of its process.
        status: u8,
    },
    /// This client did not read, and was not told of so many events: progress, and what other clients did. How an operation ended is told.
    Missed {
        /// How many.
        events: u64,
    },
}

impl Event {
    /// Whether a client that does not read may miss it: the next one of its kind says as much, or nothing waits for it.
    pub fn may_be_missed(&self) -> bool {
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

/// Reads a request; the error has the number to answer with, 0 if the line has none.
pub fn parse(line: &[u8]) -> Result<Request, (u64, String)> {
    let mut fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(line).map_err(|error| (0, format!("no JSON object: {error}")))?;
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
