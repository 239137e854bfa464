//! What a machine does beside running its guest: one operation at a time, of one client.
//!
//! An operation has the number of the request that asked for it. Its answer and its events carry that number (`"id"`), on whichever
//! connection they are heard, so that a client takes no other client's events for its own. It has an owner, the connection that asked.
//!
//! | operation | while it lasts, another one | a client that goes away | who may end it |
//! |---|---|---|---|
//! | snapshot | is refused | ends it: `no-snapshot`, the guest goes on | any client: `snapshot-cancel`. Its owner alone names its files |
//! | dump | is refused | ends it: `not-dumped`, the guest goes on | its owner, by going away |
//! | upgrade | is refused | ends it until the guest is handed over: `stayed` | any client: `migrate-cancel` |
//! | migration | is refused; `vellum migrate --attach` follows it | leaves it under way | any client: `migrate-cancel` |
//!
//! None waits for another: a client that is refused is told in one line what is under way, and for which process. What is over by then
//! is refused too: a cancel that names an operation ([`Do::MigrateCancel`](super::Do::MigrateCancel)) ends no other one. A guest that
//! ends, and a machine that is stopped, end whatever is under way. A machine with a debugger can be dumped and nothing else.

use serde::{Deserialize, Serialize};

use super::Event;

/// Why an operation is over whose client has gone.
pub const CLIENT_GONE: &str = "the client that asked for it has gone";

/// Who has asked for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The connection, by a number that the server gives it.
    pub connection: u64,
    /// The request, by the number that the client gave it.
    pub id: u64,
    /// The client's process.
    pub pid: Option<i32>,
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Memory and state are written into files.
    Snapshot,
    /// Memory is written into a core dump.
    Dump,
    /// The machine moves to another process.
    Migration,
    /// It moves to a process that stands in for its own.
    Upgrade,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Dump => "dump",
            Self::Migration => "migration",
            Self::Upgrade => "upgrade",
        }
    }

    /// How a machine stands that has it under way.
    pub fn standing(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshotting",
            Self::Dump => "dumping",
            Self::Migration => "migrating",
            Self::Upgrade => "upgrading",
        }
    }

    /// Whether it goes on when its client has gone.
    pub fn outlives_client(self) -> bool {
        self == Self::Migration
    }

    /// How somebody else ends it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot-cancel, or the end of its client, ends it",
            Self::Dump => "the end of its client ends it",
            Self::Migration => "migrate-cancel ends it; another client can follow it",
            Self::Upgrade => "migrate-cancel, or the end of its client, ends it",
        }
    }
}

/// The operation that a machine has under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnderWay {
    /// What it is.
    pub kind: Kind,
    /// The number of the request. A dump of a guest that has panicked has none.
    pub id: Option<u64>,
    /// The process that asked for it, while that is connected.
    pub client: Option<i32>,
}

impl std::fmt::Display for UnderWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        match (self.client, self.id) {
            (Some(pid), _) => write!(f, " for process {pid}"),
            (None, Some(_)) => f.write_str(" whose client has gone"),
            (None, None) => f.write_str(" of a guest that has panicked"),
        }
    }
}

/// An event, and the request that it comes of, if it comes of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct News {
    /// The number of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// What has happened.
    #[serde(flatten)]
    pub event: Event,
}

impl From<Event> for News {
    fn from(event: Event) -> Self {
        Self { id: None, event }
    }
}
