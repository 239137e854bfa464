//! ppoll(2), for threads whose sandbox has no epoll.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// A set of descriptors to wait for until one of them is ready.
#[derive(Default)]
pub struct Poll(Vec<libc::pollfd>);

impl Poll {
    /// Waits for none any more. What it has allocated stays, for those who wait often.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Waits until this one can be read, too.
    pub fn readable(&mut self, fd: RawFd) {
        self.0.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    }

    /// Waits until this one can be written, too.
    pub fn writable(&mut self, fd: RawFd) {
        self.0.push(libc::pollfd { fd, events: libc::POLLOUT, revents: 0 });
    }

    /// Returns when one of them is ready, a signal has come, or `timeout` is over; `None` waits for ever. Whether one is ready.
    ///
    /// # Errors
    /// Where the kernel refuses to wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        // In nanoseconds: who keeps to a rate waits for less than the millisecond that poll(2) counts in.
        let timeout = timeout.map(|left| libc::timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the vector holds as many entries as it says; the kernel writes their `revents`. The time, where there is one, outlives
        // the call.
        match unsafe {
            libc::ppoll(self.0.as_mut_ptr(), self.0.len() as libc::nfds_t, timeout, std::ptr::null())
        } {
            -1 => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
            ready => Ok(ready > 0),
        }
    }

    /// Whether the last [`Poll::wait`] found `fd` ready, broken or closed.
    pub fn is_ready(&self, fd: RawFd) -> bool {
        self.0.iter().any(|entry| entry.fd == fd && entry.revents != 0)
    }
}
