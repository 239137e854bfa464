//! The answer to [`Do::Status`](crate::Do::Status).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::operation::UnderWay;
use crate::state::MachineState;

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
    /// Whether the memory was forked. No descriptor has all of it then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forked: bool,
    /// The process of the machine that this one was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<u32>,
    /// The pages that a built-in guest has accessed so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<u64>,
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
    /// The names of the virtio devices.
    #[serde(default)]
    pub devices: Vec<String>,
    /// The names of the disks.
    #[serde(default)]
    pub disks: Vec<String>,
    /// The disks whose overlay a fork copies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<String>,
    /// The device that blocks snapshots and migration, if any.
    #[serde(default)]
    pub stays: Option<MigrationBlocker>,
    /// The device that blocks forks, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_stays: Option<MigrationBlocker>,
    /// The devices that each child gets anew, if the machine waits to be forked for commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub children: Option<Vec<ChildDevice>>,
    /// The process ends after this many milliseconds (`--duration`, `--timeout`). The limit does
    /// not migrate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
}

/// A device that a forked machine opens for itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChildDevice {
    /// The key of its kind.
    pub kind: String,
    /// Its configuration, in that kind's own form.
    pub config: Value,
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
