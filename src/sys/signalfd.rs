//! The signals that end a run, as a descriptor for event loops.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// SIGINT, SIGTERM and SIGHUP, blocked in this thread and all that it will start.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals and opens the descriptor. To be called before any other thread exists.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the set is initialised by sigemptyset before it is used, and outlives the calls; signalfd returns a
        // new descriptor that nobody else owns.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(&mut set, signal);
            }
            let result = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            if result != 0 {
                return Err(io::Error::from_raw_os_error(result));
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// The number of the next signal that has arrived, if any.
    pub fn take(&self) -> Option<i32> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        // SAFETY: the buffer is as long as the call is told.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) };
        // The number is the structure's first field, a u32 (signalfd(2)).
        (read == info.len() as isize).then(|| i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
