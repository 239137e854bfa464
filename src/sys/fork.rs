//! Forks a second process of this program, before it has threads (fork(2)). One of the two becomes
//! a machine, and the other keeps the user's standard streams.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, waitpid};
use rustix::stdio::{dup2_stdin, dup2_stdout};

use super::seccomp::exit_now;

/// A child process that has not been waited for.
#[derive(Debug)]
pub struct Child(Pid);

/// Which of the two processes this is after [`fork`].
#[derive(Debug)]
pub enum Forked {
    /// The original process.
    Parent(Child),
    /// The new process. It gets SIGTERM when the parent has ended.
    Child,
}

/// Forks a second process. Its standard input is empty, and its standard output is `output`.
///
/// # Errors
/// The host refuses a new process.
pub fn fork(output: &OwnedFd) -> io::Result<Forked> {
    let nothing = File::open("/dev/null")?;
    let parent = getpid();
    // SAFETY: there is only one thread, so the child may do whatever this process may.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if let Some(child) = Pid::from_raw(child) {
        return Ok(Forked::Parent(Child(child)));
    }
    let detach = || -> rustix::io::Result<bool> {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        dup2_stdin(&nothing)?;
        dup2_stdout(output)?;
        // The parent may have ended before the signal was set.
        Ok(getppid() == Some(parent))
    };
    if detach() == Ok(true) { Ok(Forked::Child) } else { exit_now(1) }
}

impl Child {
    /// Waits for its end. Returns its exit status, or 128 plus the signal that ended it.
    ///
    /// # Errors
    /// It has already been waited for.
    pub fn wait(self) -> io::Result<u8> {
        let ended = rustix::io::retry_on_intr(|| waitpid(Some(self.0), WaitOptions::empty()))?;
        // Without WNOHANG the kernel returns only when the child has ended.
        let (_, status) = ended.ok_or_else(|| io::Error::from(io::ErrorKind::WouldBlock))?;
        let by_signal = || status.terminating_signal().map_or(0, |signal| 128 + signal);
        Ok(status.exit_status().unwrap_or_else(by_signal) as u8)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// A shell is spawned here instead of a fork, because a test program has threads.
    #[test]
    #[allow(clippy::zombie_processes, reason = "it is waited for by what is tested")]
    fn the_kernel_says_how_a_child_ended() {
        for (line, code) in [("exit 7", 7), ("kill -9 $$", 128 + 9)] {
            let child = Command::new("sh").args(["-ec", line]).spawn().unwrap();
            assert_eq!(super::Child(super::Pid::from_child(&child)).wait().unwrap(), code);
        }
    }
}
