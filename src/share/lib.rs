//! Shares a host directory with a guest as a file system.
//!
//! | file | contents |
//! |---|---|
//! | [`fuse`] | requests and answers of the FUSE protocol, without I/O |
//! | [`nodes`] | the files that the guest knows, and their descriptors |
//! | [`server`] | executes requests: `files` opens and lists, `changes` modifies |
//! | [`mounts`] | which file systems below the directory are shared |
//! | [`process`] | the server's process, its sandbox, and the channel for requests |
//!
//! `vellum_devices::virtio::fs` is the device that carries requests. It reads and writes files
//! itself, with descriptors that the server has opened. The server never sees guest memory, and the
//! VMM opens nothing.
//!
//! The guest is hostile. It names single entries of directories that it knows, never paths, so it
//! cannot reach anything outside the directory. Landlock enforces that for the whole process when it
//! opens, makes, renames and removes files, but not when it changes modes, owners, times and extended
//! attributes. So a server that runs as root would, if a guest took it over, have its capabilities for
//! every file of the host.
//! Only regular files and directories are opened. The server enforces read-only shares, whatever
//! the guest's mount options.

mod changes;
mod files;
pub mod fuse;
pub mod mounts;
pub mod nodes;
pub mod process;
pub mod server;

use serde::{Deserialize, Serialize};

/// What the guest may cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Data until the next open of the file. An open sees the host's changes.
    #[default]
    Auto,
    /// Everything, with write-back. For directories that only this guest changes.
    Always,
    /// Nothing.
    None,
}

/// The configuration of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Whether the guest may change the directory.
    pub writable: bool,
    /// Whether to hide from the guest where other file systems are mounted below the directory, so
    /// that it sees one file system. An overlay needs this: the guest's kernel treats such mounts
    /// as automounts, and overlayfs rejects them in a lower layer (EREMOTE).
    pub joined: bool,
    /// What the guest may cache.
    pub cache: Cache,
    /// Whether the guest may set setuid and setgid bits.
    pub setid: bool,
    /// Whether the guest may create device nodes.
    pub devices: bool,
    /// Whether the guest may set attributes in `security.` and `trusted.`.
    pub privileged_xattrs: bool,
}
