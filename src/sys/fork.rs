//! A second process of this program, before it has threads (fork(2)): one of the two becomes a machine, and the other stays with the
//! user's standard streams.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// A child process that has not been waited for.
#[derive(Debug)]
pub struct Child(libc::pid_t);

/// What this process is after [`fork`].
#[derive(Debug)]
pub enum Forked {
    /// The one that was there before.
    Parent(Child),
    /// The new one. It is told to end (SIGTERM) when the other one has gone.
    Child,
}

/// Makes a second process, which reads nothing and writes its standard output to `output`.
///
/// # Errors
/// Where the host refuses a process.
pub fn fork(output: &OwnedFd) -> io::Result<Forked> {
    let nothing = File::open("/dev/null")?;
    // SAFETY: takes numbers only.
    let parent = unsafe { libc::getpid() };
    // SAFETY: there is one thread, so that the child may do whatever this process may.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: calls with numbers and descriptors that are open; 0 and 1 belong to nobody in particular.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                libc::dup2(nothing.as_raw_fd(), 0);
                libc::dup2(output.as_raw_fd(), 1);
                // It may have gone before that was set.
                if libc::getppid() != parent {
                    libc::_exit(1);
                }
            }
            Ok(Forked::Child)
        }
        child => Ok(Forked::Parent(Child(child))),
    }
}

impl Child {
    /// Waits for its end: its exit status, or 128 and its signal.
    ///
    /// # Errors
    /// Where somebody else has waited for it.
    pub fn wait(self) -> io::Result<u8> {
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call.
            if unsafe { libc::waitpid(self.0, &mut status, 0) } == self.0 {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        let code = match libc::WIFEXITED(status) {
            true => libc::WEXITSTATUS(status),
            false => 128 + libc::WTERMSIG(status),
        };
        Ok(code as u8)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// Forked by a shell, since a test program has threads.
    #[test]
    #[allow(clippy::zombie_processes, reason = "it is waited for by what is tested")]
    fn the_kernel_says_how_a_child_ended() {
        for (line, code) in [("exit 7", 7), ("kill -9 $$", 128 + 9)] {
            let child = Command::new("sh").args(["-ec", line]).spawn().unwrap();
            assert_eq!(super::Child(child.id() as i32).wait().unwrap(), code);
        }
    }
}
