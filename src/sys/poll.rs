//! poll(2), for threads whose sandbox has no epoll.

use std::io;
use std::os::fd::RawFd;

/// A set of descriptors to wait for until one can be read.
#[derive(Default)]
pub struct Readable(Vec<libc::pollfd>);

impl Readable {
    /// Waits for these too.
    pub fn add(&mut self, fd: RawFd) {
        self.0.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    }

    /// Returns when one of them can be read or a signal has come.
    pub fn wait(&mut self) -> io::Result<()> {
        // SAFETY: the vector holds as many entries as it says; the kernel writes their `revents`.
        match unsafe { libc::poll(self.0.as_mut_ptr(), self.0.len() as libc::nfds_t, -1) } {
            -1 => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
                error => Err(error),
            },
            _ => Ok(()),
        }
    }
}
