//! The requests to a machine, and what each asks for.

use serde::{Deserialize, Serialize};

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
    /// Get a [`crate::Status`].
    Status {},
    /// End the machine as if the guest had powered off.
    Stop {},
    /// Set how much memory the guest's balloon takes.
    Balloon {
        /// The size in bytes.
        bytes: u64,
    },
    /// Send [`crate::Event`]s on this connection from now on.
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
    /// Fork the machine: freeze its memory as a base, and write what differs from it, and the
    /// machine's state, to the first three files whose descriptors come with this: pages, map,
    /// state. The fourth is a sealed memfd as long as memory, which becomes the base if too much
    /// differs from the one before. Empty files for copies of its overlays follow.
    Fork {
        /// The number of these files.
        #[serde(default)]
        overlays: u32,
        /// The bytes of memory that another base may take. None if that is not known.
        #[serde(default)]
        available: Option<u64>,
    },
    /// Get a descriptor of the base that this machine shares with those forked from it. It comes
    /// with the answer `{"base": …}`, the base's number.
    ForkBase {},
    /// Save the machine for a live update of the host's kernel: its RAM stays in the memfd that it is
    /// in, the pages of other memory and the state go to the files whose descriptors come with this:
    /// pages, map, state. First, memory is kept from giving pages back to the host, and the client
    /// may preserve it ([`Do::LiveUpdateMemory`]). [`Do::LiveUpdatePause`] then pauses the guest. It
    /// does not run again unless the client disconnects.
    LiveUpdate {},
    /// Get a descriptor of the RAM of a machine that is being saved for a live update.
    LiveUpdateMemory {},
    /// The memory of the machine is preserved: pause it, and write its state.
    LiveUpdatePause {},
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
            Self::LiveUpdate {} => 3,
            Self::Fork { overlays, .. } => 4 + (*overlays).min(MAX_DESCRIPTORS as u32) as usize,
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
            | Self::ForkBase {}
            | Self::LiveUpdateMemory {}
            | Self::LiveUpdatePause {}
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
    /// When the machine of the directory's newest point was paused for it, in nanoseconds since
    /// 1970. The new point holds only the changes if the machine has taken that point itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Whether to keep tracking writes, so that the next point holds only the changes.
    #[serde(default)]
    pub follow: bool,
    /// The number of files for disk clones: none, or one for each disk in order.
    #[serde(default)]
    pub clones: u32,
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
