//! What ties a command to the connection that asked for it: it does not outlive that.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsRawFd;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::sys;

/// How long a command has after SIGHUP.
const GRACE: Duration = Duration::from_secs(2);

/// Of a command that leads a process group.
pub struct Tie {
    group: u32,
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Tie {
    /// Of the group that process `group` leads.
    pub fn new(group: u32) -> Self {
        Self { group, is_over: Mutex::new(false), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().expect("nobody panics with it")
    }

    /// The command has ended, and all that it wrote was read: what it has left behind is not tied.
    pub fn loosen(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// The connection has ended: the group gets SIGHUP, and SIGKILL where that does not end it. A group whose leader has ended still
    /// has its number, as long as one of its processes lives.
    pub fn pull(&self) {
        for signal in [libc::SIGHUP, libc::SIGKILL] {
            let is_over = self.lock();
            if *is_over || sys::signal_group(self.group, signal).is_err() {
                return;
            }
            drop(self.changed.wait_timeout_while(is_over, GRACE, |is_over| !*is_over));
        }
    }

    /// [`Tie::pull`]s when `connection` ends, unless `over` ends before.
    pub fn watch(&self, connection: &impl AsRawFd, over: &PipeReader) {
        if let Ok([false, true]) = sys::wait_for_end([over.as_raw_fd(), connection.as_raw_fd()]) {
            self.pull();
        }
    }
}

/// What ends [`Tie::watch`] when it is dropped, and what that waits for.
pub fn over() -> io::Result<(PipeReader, PipeWriter)> {
    io::pipe()
}
