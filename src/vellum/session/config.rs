//! The configuration of the process around a machine.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use super::supervisor;
use vellum_control::ChildDevice;
use vellum_sandbox as sandbox;
use vellum_sandbox::user::User;

/// The configuration of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The path of the control socket.
    pub control: Option<PathBuf>,
    /// The sandbox that this process enters before the guest runs.
    pub sandbox: sandbox::Mode,
    /// The user and group that this process switches to from root.
    pub user: Option<User>,
    /// The time limit of the machine.
    pub limit: Option<Duration>,
    /// The path of the result, for a process that takes over the machine.
    pub result: Option<PathBuf>,
    /// What the previous process lent to this one: its control socket and the [supervisor].
    pub lent: Option<Supervised>,
    /// Where a debugger connects.
    pub gdb: Option<Gdb>,
    /// The socket to the client that waits until the machine runs. See
    /// [`supervisor::ClientSocket`].
    pub waits: Option<Arc<OwnedFd>>,
    /// Whether root opens the devices and the serial port's target as `user`: a process of that user
    /// has named them.
    pub opens_as_user: bool,
    /// Whether the machine goes on if that client ends before it runs.
    pub outlives_client: bool,
    /// Whether the user is told of a guest that prints nothing.
    pub tells_of_silence: bool,
    /// The name for the file that is this process's standard error. The file has no name before
    /// the control socket has one. The name is removed at the end if the file is empty.
    pub log: Option<PathBuf>,
    /// The process of the machine that this one was forked from.
    pub forked_from: Option<u32>,
    /// The devices of the machine's children, if it waits to be forked for commands.
    pub children: Option<Vec<ChildDevice>>,
}

/// Where a debugger connects.
#[derive(Clone, Debug)]
pub struct Gdb {
    /// The unix socket.
    pub socket: PathBuf,
    /// The machine waits for the debugger before it runs.
    pub waits: bool,
}

/// What a process gets from the one that it takes over from.
#[derive(Clone, Debug)]
pub struct Supervised {
    /// The control socket. The other process listens on it until the machine runs here.
    pub control: Option<Arc<OwnedFd>>,
    /// The socket between the two processes. It carries signals and the exit status.
    pub supervisor: Arc<OwnedFd>,
}

impl Default for Config {
    /// No control socket, no sandbox, no limit.
    fn default() -> Self {
        Self {
            control: None,
            sandbox: sandbox::Mode::Off,
            user: None,
            limit: None,
            result: None,
            lent: None,
            gdb: None,
            waits: None,
            opens_as_user: false,
            outlives_client: false,
            tells_of_silence: false,
            log: None,
            forked_from: None,
            children: None,
        }
    }
}
