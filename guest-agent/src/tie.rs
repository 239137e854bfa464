//! Ends a command when the connection that requested it ends.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsRawFd;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::sys;

/// How long a command may run after SIGHUP.
const GRACE: Duration = Duration::from_secs(2);

/// Ties a command that leads a process group to its connection.
pub struct Tie {
    group: u32,
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Tie {
    /// A tie for the process group that process `group` leads.
    pub fn new(group: u32) -> Self {
        Self { group, is_over: Mutex::new(false), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().expect("the lock is not poisoned")
    }

    /// The command has ended, and all its output was read. Processes that it left behind are not
    /// ended.
    pub fn loosen(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// The connection has ended: sends SIGHUP to the group, and SIGKILL if that does not end it. A
    /// group keeps its number while one of its processes lives, even after its leader has ended.
    pub fn pull(&self) {
        for signal in [libc::SIGHUP, libc::SIGKILL] {
            let is_over = self.lock();
            if *is_over || sys::signal_group(self.group, signal).is_err() {
                return;
            }
            drop(self.changed.wait_timeout_while(is_over, GRACE, |is_over| !*is_over));
        }
    }

    /// Calls [`Tie::pull`] when `connection` ends, unless `over` ends before.
    pub fn watch(&self, connection: &impl AsRawFd, over: &PipeReader) {
        if let Ok([false, true]) = sys::wait_for_end([over.as_raw_fd(), connection.as_raw_fd()]) {
            self.pull();
        }
    }
}

/// A pipe for [`Tie::watch`]: dropping the writer ends the watch, which waits for the reader.
pub fn over() -> io::Result<(PipeReader, PipeWriter)> {
    io::pipe()
}
