//! What is asked of a process around a machine.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use super::supervisor;
use vellum_sandbox as sandbox;
use vellum_sandbox::user::User;

/// What is asked of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the control socket is to be.
    pub control: Option<PathBuf>,
    /// What this process gives up before the guest runs.
    pub sandbox: sandbox::Mode,
    /// For whom it gives up root.
    pub user: Option<User>,
    /// How long the machine may run.
    pub limit: Option<Duration>,
    /// Where its result goes, for a process that takes it over.
    pub result: Option<PathBuf>,
    /// What was lent by the process that this one is to stand in for: its control socket, and the [supervisor].
    pub lent: Option<Supervised>,
    /// Where a debugger may connect.
    pub gdb: Option<Gdb>,
}

/// Where a debugger may connect.
#[derive(Clone, Debug)]
pub struct Gdb {
    /// The unix socket.
    pub socket: PathBuf,
    /// Whether the machine waits for it before it runs.
    pub waits: bool,
}

/// What a process has of the one that it is to stand in for.
#[derive(Clone, Debug)]
pub struct Supervised {
    /// The control socket, at which the other listens until its machine runs here.
    pub control: Option<Arc<OwnedFd>>,
    /// What ties the two together.
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
        }
    }
}
