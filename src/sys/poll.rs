//! Waits for descriptors with ppoll(2), for threads whose sandbox forbids epoll.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A set of descriptors to wait for, until one of them is ready.
#[derive(Default)]
pub struct Poll<'fd>(Vec<PollFd<'fd>>);

impl<'fd> Poll<'fd> {
    /// Adds a descriptor, ready when it is readable.
    pub fn readable(&mut self, of: &'fd impl AsRawFd) {
        self.add(of, PollFlags::IN);
    }

    /// Adds a descriptor, ready when it is writable.
    pub fn writable(&mut self, of: &'fd impl AsRawFd) {
        self.add(of, PollFlags::OUT);
    }

    /// Adds an open /proc/PID/mountinfo, ready when a mount came or went since it was last waited
    /// for (proc_pid_mountinfo(5)).
    pub fn changed(&mut self, of: &'fd impl AsRawFd) {
        self.add(of, PollFlags::PRI);
    }

    /// Takes AsRawFd, because vmm-sys-util's EventFd does not implement AsFd.
    fn add(&mut self, of: &'fd impl AsRawFd, events: PollFlags) {
        // SAFETY: the descriptor's owner is borrowed for as long as this value and keeps it open.
        let fd = unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) };
        self.0.push(PollFd::from_borrowed_fd(fd, events));
    }

    /// Waits until one of them is ready, a signal arrives, or `timeout` elapses. `None` waits
    /// forever. Returns whether one is ready.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        // A time too long for the kernel means forever.
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut self.0, timeout.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the last [`Poll::wait`] found the descriptor ready, broken or closed.
    pub fn is_ready(&self, of: &impl AsRawFd) -> bool {
        let is_it = |entry: &&PollFd<'_>| entry.as_fd().as_raw_fd() == of.as_raw_fd();
        self.0.iter().filter(is_it).any(|entry| !entry.revents().is_empty())
    }
}
