//! Operations: what a machine does besides running its guest, one at a time.
//!
//! An operation has the number of its request. The answer and the events carry that number
//! (`"id"`) on every connection, so clients do not mistake each other's events for their own. The
//! connection that sent the request owns the operation.
//!
//! A second operation is refused with one line that names the current one and its client.
//! `vellum migrate --attach` follows a migration that is under way.
//!
//! | operation | if its client disconnects | how to end it |
//! |---|---|---|
//! | snapshot | `no-snapshot`, the guest continues | any client: `snapshot-cancel` |
//! | fork | `not-forked`, the guest continues | its owner: disconnect |
//! | live-update | `not-preserved`, the guest continues | its owner: disconnect |
//! | dump | `not-dumped`, the guest continues | its owner: disconnect |
//! | upgrade | `stayed`, unless the guest is handed over already | any client: `migrate-cancel` |
//! | migration | it continues | any client: `migrate-cancel` |
//!
//! Only the owner of a snapshot can name its files. A cancel that names a finished operation
//! ([`Do::MigrateCancel`](super::Do::MigrateCancel)) is refused and ends no other. The end of the
//! guest or the machine ends any operation. A machine with a debugger can only be dumped.

use serde::{Deserialize, Serialize};

use super::{Event, MachineState};

/// Why an operation ended when its client disconnected.
pub const CLIENT_GONE: &str = "its client disconnected";

/// The client and its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The connection's number, given by the server.
    pub connection: u64,
    /// The request's number, given by the client.
    pub id: u64,
    /// The client's process.
    pub pid: Option<i32>,
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Writes memory and state to files.
    Snapshot,
    /// Freezes memory for other machines, and writes what differs from it and the state to files.
    Fork,
    /// Writes the state beside memory that is preserved for the host's next kernel.
    LiveUpdate,
    /// Writes memory to a core dump.
    Dump,
    /// Moves the machine to another process.
    Migration,
    /// Moves the machine to a process that replaces this one.
    Upgrade,
}

impl Kind {
    /// The kind's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Fork => "fork",
            Self::LiveUpdate => "live-update",
            Self::Dump => "dump",
            Self::Migration => "migration",
            Self::Upgrade => "upgrade",
        }
    }

    /// The machine's state during the operation.
    pub fn state(self) -> MachineState {
        match self {
            Self::Snapshot => MachineState::Snapshotting,
            Self::Fork => MachineState::Forking,
            Self::LiveUpdate => MachineState::LiveUpdating,
            Self::Dump => MachineState::Dumping,
            Self::Migration => MachineState::Migrating,
            Self::Upgrade => MachineState::Upgrading,
        }
    }

    /// Whether the operation continues when its client disconnects.
    pub fn outlives_client(self) -> bool {
        self == Self::Migration
    }

    /// How another client can end it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Snapshot => "to end it, use snapshot-cancel or stop its client",
            Self::Dump | Self::Fork | Self::LiveUpdate => "to end it, stop its client",
            Self::Migration => "to end it, use migrate-cancel; another client can follow it",
            Self::Upgrade => "to end it, use migrate-cancel or stop its client",
        }
    }
}

/// The current operation of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnderWay {
    /// The operation's kind.
    pub kind: Kind,
    /// The request's number. The dump of a panicked guest has none.
    pub id: Option<u64>,
    /// The process that requested it, while it is connected.
    pub client: Option<i32>,
}

impl std::fmt::Display for UnderWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        match (self.client, self.id) {
            (Some(pid), _) => write!(f, " for process {pid}"),
            (None, Some(_)) => f.write_str(" whose client disconnected"),
            (None, None) => f.write_str(" of a guest that panicked"),
        }
    }
}

/// An event and its request, if it has one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct News {
    /// The request's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

impl From<Event> for News {
    fn from(event: Event) -> Self {
        Self { id: None, event }
    }
}
