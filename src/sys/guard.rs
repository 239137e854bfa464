//! A process that outlives this one by a moment, to remove the names of its sockets: a confined VMM may unlink nothing, and
//! one that is killed cannot. Nor may it name a file, which its guard does once it says so.
//!
//! It is forked before there are threads, guest memory or a sandbox. It closes every descriptor but those two of a file to be named, hears
//! no signal but SIGKILL, belongs to no terminal, and reads nothing that the VMM could write: it only waits for its end, and for that word,
//! and may call no more than that takes.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use vmm_sys_util::eventfd::EventFd;

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

    /// Names it: in the guard, where the file is descriptor [`FILE`].
    fn perform(&self) {
        let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
        let file = c"/proc/self/fd/2";
        // SAFETY: strings that end with a zero byte and live until the calls return. Where one fails the old file stays.
        unsafe {
            libc::unlink(self.before.as_ptr());
            if libc::linkat(here, file.as_ptr(), here, self.before.as_ptr(), follow) == 0 {
                libc::rename(self.before.as_ptr(), self.name.as_ptr());
            }
        }
    }
}

/// The guard's descriptors: its process, the word, and the file.
const PROCESS: libc::c_int = 0;
const SAID: libc::c_int = 1;
const FILE: libc::c_int = 2;

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
    // SAFETY: takes numbers only.
    let this = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) } as libc::c_int;
    if this < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the child calls nothing that allocates or locks, so it does not matter what other threads were doing.
    match unsafe { libc::fork() } {
        0 => watch(this, &names, naming.as_ref(), confine),
        child => {
            let open = File::from(OwnedFd::from(open));
            let result = if child < 0 { Err(io::Error::last_os_error()) } else { Ok(Started(Some(open))) };
            drop(closes);
            // SAFETY: it was opened above and given to nobody.
            unsafe { libc::close(this) };
            result
        }
    }
}

fn watch(
    process: libc::c_int,
    names: &[Name],
    naming: Option<&Naming>,
    confine: impl Fn() -> io::Result<()>,
) -> ! {
    // SAFETY: calls with numbers and with pointers to what lives until the end; no other thread is in this process. Every
    // descriptor but those that it keeps is closed for good, and nobody here owns one of them.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        libc::setsid();
        libc::dup2(process, PROCESS);
        let kept = match naming {
            None => PROCESS,
            Some(naming) => {
                libc::dup2(naming.said.as_raw_fd(), SAID);
                libc::dup2(naming.file.as_raw_fd(), FILE)
            }
        };
        libc::syscall(libc::SYS_close_range, kept + 1, u32::MAX, 0);
        // Last: until here it holds what was bound before it was started.
        libc::prctl(libc::PR_SET_NAME, c"vellum-guard".as_ptr());
    }
    if confine().is_err() {
        // The VMM is confined by the same calls, and says why they fail.
        // SAFETY: ends the process without running anything.
        unsafe { libc::_exit(1) };
    }
    let wait_for = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // The kernel passes over a negative one.
    let mut fds = [wait_for(PROCESS), wait_for(if naming.is_some() { SAID } else { -1 })];
    loop {
        // SAFETY: two valid pollfds for the duration of the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) } < 1 {
            continue;
        }
        // What was said before the end is heard.
        if let (true, Some(naming)) = (fds[1].revents != 0, naming) {
            naming.perform();
            fds[1].fd = -1;
        }
        if fds[0].revents != 0 {
            break;
        }
    }
    for name in names {
        // What cannot be removed is found stale by the next to want it.
        let _ = name.remove_stale();
    }
    // SAFETY: ends the process without running anything.
    unsafe { libc::_exit(0) }
}
