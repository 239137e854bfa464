//! A directory of the host's as a file system of a guest's.
//!
//! | file | what it is |
//! |---|---|
//! | [`fuse`] | requests and answers of the FUSE protocol: pure |
//! | [`nodes`] | the files that the guest knows of, and their descriptors |
//! | [`server`] | what a request does: one answer each. Opening and listing are in `files`, what changes the directory in `changes` |
//! | [`mounts`] | which file systems beneath the directory are shared with it |
//! | [`process`] | the process that it runs in, what that gives up first, and how requests come to it |
//!
//! The device that carries requests is `vellum_devices::virtio::fs`. It reads and writes files itself, by descriptors that the
//! server has opened and passed: the server never sees guest memory, and the VMM opens nothing.
//!
//! The guest is hostile. It names single entries of directories that it was told of, never paths, so that it comes to nothing that does not
//! lie beneath the directory; Landlock says the same to the whole process. Only regular files and directories are opened. What may not
//! be written to is refused here, whatever the guest has mounted how.

mod changes;
mod files;
pub mod fuse;
pub mod mounts;
pub mod nodes;
pub mod process;
pub mod server;

use serde::{Deserialize, Serialize};

/// What a guest may keep of what it has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Data until a file is opened the next time: what the host has changed is seen then.
    #[default]
    Auto,
    /// Everything, and writes go out when the guest wants to: for directories that nobody else changes.
    Always,
    /// Nothing.
    None,
}

/// What the server is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Whether the guest may change the directory.
    pub writable: bool,
    /// Whether the guest is not told where other file systems are mounted beneath it: all of them are one to it. An overlay needs that:
    /// the lower layer of overlayfs may have no automounts, as which a guest's kernel sees them (EREMOTE).
    pub joined: bool,
    /// What it may keep.
    pub cache: Cache,
    /// Whether it may set setuid and setgid bits.
    pub setid: bool,
    /// Whether it may make device nodes.
    pub devices: bool,
    /// Whether it may set attributes in `security.` and `trusted.`.
    pub privileged_xattrs: bool,
}
