//! Waiting for descriptors by ppoll(2), for threads whose sandbox has no epoll.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A set of descriptors to wait for until one of them is ready.
#[derive(Default)]
pub struct Poll<'fd>(Vec<PollFd<'fd>>);

impl<'fd> Poll<'fd> {
    /// Waits until this one can be read, too.
    pub fn readable(&mut self, of: &'fd impl AsRawFd) {
        self.add(of, PollFlags::IN);
    }

    /// Waits until this one can be written, too.
    pub fn writable(&mut self, of: &'fd impl AsRawFd) {
        self.add(of, PollFlags::OUT);
    }

    /// Not by AsFd: an eventfd of vmm-sys-util has none.
    fn add(&mut self, of: &'fd impl AsRawFd, events: PollFlags) {
        // SAFETY: the owner of the descriptor is borrowed for as long as this is, and keeps it open.
        let fd = unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) };
        self.0.push(PollFd::from_borrowed_fd(fd, events));
    }

    /// Returns when one of them is ready, a signal has come, or `timeout` is over; `None` waits for ever. Whether one is ready.
    ///
    /// # Errors
    /// Where the kernel refuses to wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        // A time that the kernel cannot hold is for ever.
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
