//! The guard: a process that outlives this one briefly, to remove the names of its sockets. A
//! confined VMM may not unlink, and one that is killed cannot. A confined VMM may not name a file
//! either, so its guard does that on its signal.
//!
//! The guard is forked before there are threads, guest memory or a sandbox. It closes all
//! descriptors but the two for a file to be named. It blocks all signals but SIGKILL, has no
//! controlling terminal, and reads nothing that the VMM could write. It only waits for the VMM's
//! end and for the signal to name the file, and may only make the calls that this needs.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, FileType, Stat};
use rustix::process::{PidfdFlags, getpid, pidfd_open, setsid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout, stderr, stdin, stdout};
use rustix::thread::set_name;
use vmm_sys_util::eventfd::EventFd;

use super::seccomp::exit_now;
use super::signal::Blocked;
use super::socket::Name;

/// A file that was opened without a name (O_TMPFILE), for the guard to name.
#[derive(Debug)]
pub struct Naming {
    file: File,
    said: EventFd,
    before: CString,
    name: CString,
}

impl Naming {
    /// Names `file` `name` once `said` is written to, replacing what has that name. For a moment it
    /// is called `before`.
    ///
    /// # Errors
    /// A path has a zero byte, or no descriptor is left.
    pub fn new(file: &File, said: &EventFd, before: &Path, name: &Path) -> io::Result<Self> {
        let path = |path: &Path| CString::new(path.as_os_str().as_bytes());
        Ok(Self {
            file: file.try_clone()?,
            said: said.try_clone()?,
            before: path(before)?,
            name: path(name)?,
        })
    }

    /// Names the file, in the guard, where it is standard error. If a call fails, the old file
    /// stays.
    fn perform(&self) {
        let (before, name) = (self.before.as_c_str(), self.name.as_c_str());
        let _ = rustix::fs::unlink(before);
        if rustix::fs::linkat(CWD, c"/proc/self/fd/2", CWD, before, AtFlags::SYMLINK_FOLLOW).is_ok() {
            let _ = rustix::fs::rename(before, name);
        }
    }
}

/// The name of the file that standard error goes to.
struct Log {
    path: CString,
    /// The file's device and number. Another process may give its own file the name.
    file: (u64, u64),
}

impl Log {
    fn new(path: &Path) -> io::Result<Self> {
        let file = rustix::fs::fstat(stderr())?;
        Ok(Self { path: CString::new(path.as_os_str().as_bytes())?, file: (file.st_dev, file.st_ino) })
    }

    /// Removes the name if the file is empty.
    fn remove_empty(&self) {
        let is_empty = |stat: Stat| {
            (stat.st_dev, stat.st_ino) == self.file
                && stat.st_size == 0
                && FileType::from_raw_mode(stat.st_mode).is_file()
        };
        if rustix::fs::lstat(self.path.as_c_str()).is_ok_and(is_empty) {
            let _ = rustix::fs::unlink(self.path.as_c_str());
        }
    }
}

/// A guard that has been started. It holds this process's descriptors until it has closed them.
/// Dropping this waits for that, because otherwise a socket of a process that has ended by then
/// would be taken for a live one.
#[derive(Debug)]
pub struct Started(Option<File>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut open) = self.0.take() {
            // The end of the pipe: nothing is written to it.
            let _ = open.read(&mut [0]);
        }
    }
}

/// Starts the guard of `names`, of the name `log` of standard error's file, and of a file to be
/// named. The guard removes those names that are sockets without a listener, and that of an empty
/// log. It never holds sockets that are
/// bound after this call. `confine` is its last act before it waits, and allocates nothing.
///
/// # Errors
/// The host refuses a process or a pipe.
pub fn start(
    names: Vec<Name>,
    log: Option<&Path>,
    naming: Option<Naming>,
    confine: impl Fn() -> io::Result<()>,
) -> io::Result<Started> {
    if names.is_empty() && naming.is_none() {
        return Ok(Started(None));
    }
    let log = log.map(Log::new).transpose()?;
    let (open, closes) = io::pipe()?;
    // A pidfd becomes readable when everything of the process is closed. The end of a pipe may come
    // earlier.
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    // SAFETY: the child calls nothing that allocates or locks, so the state of other threads does
    // not matter.
    match unsafe { libc::fork() } {
        0 => watch(&this, &names, log.as_ref(), naming.as_ref(), confine),
        child => {
            let open = File::from(OwnedFd::from(open));
            let result = if child < 0 { Err(io::Error::last_os_error()) } else { Ok(Started(Some(open))) };
            drop(closes);
            result
        }
    }
}

/// Runs the guard. Its descriptors are the pidfd as standard input, and for a file to be named the
/// eventfd and the file as standard output and error.
fn watch(
    process: &OwnedFd,
    names: &[Name],
    log: Option<&Log>,
    mut naming: Option<&Naming>,
    confine: impl Fn() -> io::Result<()>,
) -> ! {
    std::mem::forget(Blocked::all());
    let _ = setsid();
    let moved = dup2_stdin(process).and_then(|()| match naming {
        None => Ok(1),
        Some(naming) => {
            // SAFETY: `naming` owns it and lives until the end.
            dup2_stdout(unsafe { BorrowedFd::borrow_raw(naming.said.as_raw_fd()) })?;
            dup2_stderr(&naming.file)?;
            Ok(3)
        }
    });
    let Ok(first) = moved else { exit_now(1) };
    // SAFETY: takes numbers only. All other descriptors are closed for good. Nothing here uses
    // them, because this function never returns.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    // The name is set after the descriptors are closed: a guard with this name holds no socket that
    // was bound before it started.
    let _ = set_name(c"vellum-guard");
    if confine().is_err() {
        // The VMM is confined by the same calls and reports why they fail.
        exit_now(1);
    }
    let mut fds = [stdin(), stdout()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        let waited = if naming.is_some() { &mut fds[..] } else { &mut fds[..1] };
        if poll(waited, None).is_err() {
            continue;
        }
        // A word written before the VMM's end is still handled.
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
        // The next process that wants the name finds it stale and removes it.
        let _ = name.remove_stale();
    }
    if let Some(log) = log {
        log.remove_empty();
    }
    exit_now(0)
}
