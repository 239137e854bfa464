//! What a machine is doing, as [`Status`](super::Status) tells it.

use serde::{Deserialize, Serialize};

/// What a machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineState {
    /// Its guest runs.
    Running,
    /// A user has paused it.
    Paused,
    /// Its debugger looks at it, and it is paused for that.
    Debugged,
    /// Its memory is written into a core dump.
    Dumping,
    /// It moves to another process.
    Migrating,
    /// It moves to a process that stands in for its own.
    Upgrading,
    /// Its memory and state are written into files.
    Snapshotting,
    /// Its memory becomes a base for other machines.
    Forking,
    /// Its memory is preserved for the host's next kernel.
    LiveUpdating,
    /// It has sent COMMIT, and does not know whether the target runs the guest.
    HandoverUnconfirmed,
    /// The guest runs on the target, and some of its memory is still at the source.
    Postcopy,
    /// The same, and the link between the two is cut.
    PostcopyPaused,
    /// It waits for a source to connect.
    Waiting,
    /// A source has offered a machine that fits, whose memory arrives.
    Incoming,
    /// Everything has arrived, and the source has not sent COMMIT.
    Uncommitted,
    /// A snapshot is read.
    Restoring,
}

impl MachineState {
    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Debugged => "debugged",
            Self::Dumping => "dumping",
            Self::Migrating => "migrating",
            Self::Upgrading => "upgrading",
            Self::Snapshotting => "snapshotting",
            Self::Forking => "forking",
            Self::LiveUpdating => "live-updating",
            Self::HandoverUnconfirmed => "handover-unconfirmed",
            Self::Postcopy => "postcopy",
            Self::PostcopyPaused => "postcopy-paused",
            Self::Waiting => "waiting",
            Self::Incoming => "incoming",
            Self::Uncommitted => "uncommitted",
            Self::Restoring => "restoring",
        }
    }

    /// Whether the guest has not run in this process yet.
    pub fn is_arriving(self) -> bool {
        matches!(self, Self::Waiting | Self::Incoming | Self::Uncommitted | Self::Restoring)
    }

    /// Whether it runs or is paused by a user, and nothing else is done with it.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Running | Self::Paused)
    }
}

impl std::fmt::Display for MachineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [MachineState; 16] = [
        MachineState::Running,
        MachineState::Paused,
        MachineState::Debugged,
        MachineState::Dumping,
        MachineState::Migrating,
        MachineState::Upgrading,
        MachineState::Snapshotting,
        MachineState::Forking,
        MachineState::LiveUpdating,
        MachineState::HandoverUnconfirmed,
        MachineState::Postcopy,
        MachineState::PostcopyPaused,
        MachineState::Waiting,
        MachineState::Incoming,
        MachineState::Uncommitted,
        MachineState::Restoring,
    ];

    #[test]
    fn a_state_has_the_same_name_in_json_and_in_text() {
        for state in ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
            assert_eq!(serde_json::from_value::<MachineState>(state.name().into()).unwrap(), state);
        }
    }

    #[test]
    fn no_settled_machine_is_arriving() {
        assert!(ALL.iter().all(|state| !(state.is_settled() && state.is_arriving())));
    }
}
