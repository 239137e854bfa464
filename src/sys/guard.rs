//! A process that outlives this one by a moment, to remove the names of its sockets: a confined VMM may unlink nothing, and
//! one that is killed cannot. Nor may it name a file, which its guard does once it says so.
//!
//! It is forked before there are threads, guest memory or a sandbox. It closes every descriptor but those two of a file to be named, hears
//! no signal but SIGKILL, belongs to no terminal, and reads nothing that the VMM could write: it only waits for its end, and for that word,
//! and may call no more than that takes.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD};
use rustix::process::{PidfdFlags, getpid, pidfd_open, setsid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout, stdin, stdout};
use rustix::thread::set_name;
use vmm_sys_util::eventfd::EventFd;

use super::seccomp::exit_now;
use super::signal::Blocked;
use super::socket::Name;

/// A file that was opened without a name (O_TMPFILE) and that the guard names.
#[derive(Debug)]
pub struct Naming {
    file: File,
    said: EventFd,
    before: CString,
    name: CString,
}

impl Naming {
    /// `file` is to be called `name`, in place of what has that name, once `said` is written to. For a moment it is called `before`.
    ///
    /// # Errors
    /// Where a path has a zero byte, or there is no descriptor left.
    pub fn new(file: &File, said: &EventFd, before: &Path, name: &Path) -> io::Result<Self> {
        let path = |path: &Path| CString::new(path.as_os_str().as_bytes());
        Ok(Self {
            file: file.try_clone()?,
            said: said.try_clone()?,
            before: path(before)?,
            name: path(name)?,
        })
    }

    /// Names it: in the guard, where the file is standard error. Where a call fails the old file stays.
    fn perform(&self) {
        let (before, name) = (self.before.as_c_str(), self.name.as_c_str());
        let _ = rustix::fs::unlink(before);
        if rustix::fs::linkat(CWD, c"/proc/self/fd/2", CWD, before, AtFlags::SYMLINK_FOLLOW).is_ok() {
            let _ = rustix::fs::rename(before, name);
        }
    }
}

/// A guard that has been started. It has this process's descriptors until it has closed them, which is waited for when this goes: a
/// socket of a process that has ended by then would be taken for a live one.
#[derive(Debug)]
pub struct Started(Option<File>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut open) = self.0.take() {
            // The end of the pipe: nobody writes to it.
            let _ = open.read(&mut [0]);
        }
    }
}

/// Starts the guard of `names`, and of a file to be named. It removes those names that are sockets on which nobody listens any more.
/// Those that are bound only later it never has. `confine` is its last act before it waits, and allocates
/// nothing.
///
/// # Errors
/// Where the host refuses a process or a pipe.
pub fn start(
    names: Vec<Name>,
    naming: Option<Naming>,
    confine: impl Fn() -> io::Result<()>,
) -> io::Result<Started> {
    if names.is_empty() && naming.is_none() {
        return Ok(Started(None));
    }
    let (open, closes) = io::pipe()?;
    // Unlike the end of a pipe, which may come before, a pidfd becomes readable when everything of the process is closed.
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    // SAFETY: the child calls nothing that allocates or locks, so it does not matter what other threads were doing.
    match unsafe { libc::fork() } {
        0 => watch(&this, &names, naming.as_ref(), confine),
        child => {
            let open = File::from(OwnedFd::from(open));
            let result = if child < 0 { Err(io::Error::last_os_error()) } else { Ok(Started(Some(open))) };
            drop(closes);
            result
        }
    }
}

/// The guard's descriptors are its process, as standard input, and of a file to be named the word and the file, as standard output
/// and error.
fn watch(
    process: &OwnedFd,
    names: &[Name],
    mut naming: Option<&Naming>,
    confine: impl Fn() -> io::Result<()>,
) -> ! {
    std::mem::forget(Blocked::all());
    let _ = setsid();
    let moved = dup2_stdin(process).and_then(|()| match naming {
        None => Ok(1),
        Some(naming) => {
            // SAFETY: `naming` has it, and lives until the end.
            dup2_stdout(unsafe { BorrowedFd::borrow_raw(naming.said.as_raw_fd()) })?;
            dup2_stderr(&naming.file)?;
            Ok(3)
        }
    });
    let Ok(first) = moved else { exit_now(1) };
    // SAFETY: takes numbers only. Every descriptor but those that it keeps is closed for good, and nobody here uses one of them: this
    // never returns.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    // Last: until here it holds what was bound before it was started.
    let _ = set_name(c"vellum-guard");
    if confine().is_err() {
        // The VMM is confined by the same calls, and says why they fail.
        exit_now(1);
    }
    let mut fds = [stdin(), stdout()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        let waited = if naming.is_some() { &mut fds[..] } else { &mut fds[..1] };
        if poll(waited, None).is_err() {
            continue;
        }
        // What was said before the end is heard.
        if !fds[1].revents().is_empty()
            && let Some(naming) = naming.take()
        {
            naming.perform();
        }
        if !fds[0].revents().is_empty() {
            break;
        }
    }
    for name in names {
        // What cannot be removed is found stale by the next to want it.
        let _ = name.remove_stale();
    }
    exit_now(0)
}
