//! Terminals: raw mode and its reversal (termios(3)), pseudo-terminals (pts(4)), and whether a
//! write would block.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, getpgrp};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};
use vmm_sys_util::eventfd::EventFd;

use super::signal::{self, Blocked};

/// The terminal that is to be raw. A process has one terminal, and a panic hook must find it.
static RAW: Mutex<Option<Raw>> = Mutex::new(None);

/// The interval at which a background process checks its terminal. No signal tells a process that
/// it has come to the foreground.
pub const LOOK: Duration = Duration::from_millis(200);

/// A terminal that is raw while this process is in its foreground and runs.
struct Raw {
    /// A descriptor of its own, because the caller's may be closed before the terminal is restored.
    fd: OwnedFd,
    output: Output,
    /// This process's process group.
    group: Pid,
    /// The terminal's mode before it became raw, while it is raw.
    before: Option<Termios>,
    /// Signalled when this process has come back to the foreground.
    back: Option<Arc<EventFd>>,
}

impl Raw {
    /// Whether another process group is in the foreground.
    fn is_behind(&self) -> bool {
        is_foreground(self.fd.as_fd(), self.group) == Some(false)
    }

    fn take_back(&mut self) -> io::Result<()> {
        if self.is_behind() {
            self.before = None;
            return Ok(());
        }
        let now = tcgetattr(&self.fd)?;
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        if self.before.is_some() && !now.local_modes.intersects(cooked) {
            return Ok(());
        }
        let mut raw = now.clone();
        raw.make_raw();
        if self.output == Output::Processed {
            raw.output_modes = now.output_modes;
        }
        tcsetattr(&self.fd, OptionalActions::Now, &raw)?;
        self.before = Some(now);
        // The write fails only on overflow, and then the eventfd is signalled anyway.
        drop(self.back.as_ref().map(|back| back.write(1)));
        Ok(())
    }

    fn give_back(&mut self) {
        if let Some(before) = self.before.take().filter(|_| !self.is_behind()) {
            // A terminal that has gone away needs no restoring.
            let _ = tcsetattr(&self.fd, OptionalActions::Now, &before);
        }
    }
}

/// Ctrl-A.
const ESCAPE: u8 = 1;

/// Filters a terminal's keys. All go to the guest, except after the escape key: Ctrl-A x is for
/// this process, and Ctrl-A Ctrl-A (or Ctrl-A a) sends one Ctrl-A to the guest.
#[derive(Debug)]
pub struct Keys {
    /// Whether there is an escape key. Only terminals have one.
    pub escape: bool,
    /// Whether the previous key was the escape key.
    pub pending: bool,
}

impl Keys {
    /// Passes those of the first `n` of `bytes` that are for the guest to `receive`. Returns
    /// whether the user has asked to quit.
    pub fn press(&mut self, bytes: &mut [u8], n: usize, receive: impl FnOnce(&[u8])) -> bool {
        let (mut kept, mut quit) = (0, false);
        for i in 0..n {
            let key = bytes[i];
            let after_escape = std::mem::take(&mut self.pending);
            match key {
                ESCAPE if self.escape && !after_escape => {
                    self.pending = true;
                    continue;
                }
                b'x' if after_escape => quit = true,
                b'a' if after_escape => bytes[kept] = ESCAPE,
                _ => bytes[kept] = key,
            }
            kept += usize::from(!quit);
        }
        receive(&bytes[..kept]);
        quit
    }
}

/// Whether this process is in the foreground of its terminal `fd`; `None` if `fd` is not its
/// terminal. A background process may not change a terminal's mode.
pub fn in_foreground(fd: BorrowedFd<'_>) -> Option<bool> {
    is_foreground(fd, getpgrp())
}

/// Whether process group `group` is in the foreground of `fd`; `None` if `fd` is not this process's
/// terminal.
fn is_foreground(fd: BorrowedFd<'_>, group: Pid) -> Option<bool> {
    match tcgetpgrp(fd) {
        Ok(foreground) => Some(foreground == group),
        // The kernel returned 0: the foreground group is outside this process's PID namespace.
        Err(Errno::OPNOTSUPP) => Some(false),
        Err(_) => None,
    }
}

/// Reads from `fd`. In the background of its terminal, it waits for the foreground. A plain read
/// would stop the process.
pub fn read_in_foreground(fd: BorrowedFd<'_>, to: &mut [u8]) -> io::Result<usize> {
    loop {
        let read = {
            // A thread that blocks SIGTTIN gets an error instead of being stopped.
            let _blocked = Blocked::all();
            rustix::io::read(fd, &mut *to)
        };
        match read {
            Err(Errno::IO) if in_foreground(fd) == Some(false) => std::thread::sleep(LOOK),
            result => return Ok(result?),
        }
    }
}

/// How output to a raw terminal is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Processed as before: a newline also returns the carriage, so this process's own lines still
    /// look right.
    Processed,
    /// Unchanged: the output comes from another terminal, which has already processed it.
    AsIs,
}

/// Passes every key to the guest: no echo, no line editing, no signals. [`restore`] undoes it. If
/// this process is not in the foreground of `fd`, the terminal becomes raw once it is, and `back`
/// is signalled then.
pub fn set_raw(fd: BorrowedFd<'_>, output: Output, back: Option<Arc<EventFd>>) -> io::Result<()> {
    let mut raw = Raw { fd: fd.try_clone_to_owned()?, output, group: getpgrp(), before: None, back };
    raw.take_back()?;
    *RAW.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(raw);
    Ok(())
}

/// Whether there is a terminal that is to be raw but has another process group in the foreground.
pub fn is_behind() -> bool {
    RAW.lock().is_ok_and(|mut raw| {
        let raw = raw.as_mut().filter(|raw| raw.is_behind());
        raw.map(|raw| raw.before = None).is_some()
    })
}

/// Makes the terminal raw if it should be, is not, and this process has come to its foreground.
/// Returns whether to check again later.
pub fn regain() -> bool {
    RAW.lock().is_ok_and(|mut raw| {
        raw.as_mut().filter(|raw| raw.before.is_none()).is_some_and(|raw| {
            // A terminal that cannot be changed has gone away.
            raw.take_back().is_ok() && raw.before.is_none()
        })
    })
}

/// Makes the terminal raw again if it should be and this process has come to its foreground.
pub fn take_back() {
    if let Ok(mut raw) = RAW.lock()
        && let Some(raw) = raw.as_mut()
    {
        // A terminal that cannot be changed stays as it is.
        let _ = raw.take_back();
    }
}

/// Performs the default action of one of [`STOPPING`](signal::STOPPING), which this thread has
/// read. The terminal has its previous mode while this process is stopped.
pub fn stop(signal: i32) {
    if signal != signal::CONTINUE {
        if let Ok(mut raw) = RAW.lock() {
            raw.iter_mut().for_each(Raw::give_back);
        }
        signal::stop_by(signal);
    }
    take_back();
}

/// Restores the terminal to the mode that [`set_raw`] found. Does nothing if it is not raw. Never
/// blocks, so a panic hook may call it.
pub fn restore() {
    if let Ok(mut raw) = RAW.try_lock()
        && let Some(mut raw) = raw.take()
    {
        raw.give_back();
    }
}

/// The width in characters of the terminal `fd`; `None` if it does not report one.
pub fn columns(fd: BorrowedFd<'_>) -> Option<usize> {
    Some(usize::from(size(fd).1)).filter(|columns| *columns > 0)
}

/// The lines and columns of the terminal `fd`; 0 if it does not report them.
pub fn size(fd: BorrowedFd<'_>) -> (u16, u16) {
    tcgetwinsize(fd).map_or((0, 0), |size| (size.ws_row, size.ws_col))
}

/// Whether a write of a byte to `fd` would not block. Files always accept one.
pub fn writable(fd: BorrowedFd<'_>) -> bool {
    writable_within(fd, Duration::ZERO)
}

/// Like `writable`, but waits up to `patience`.
pub fn writable_within(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).ok();
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], patience.as_ref()) == Ok(1)
}

/// Whether a guest's console that shares a terminal or pipe with standard error is in the middle of
/// a line.
static MID_LINE: AtomicBool = AtomicBool::new(false);

/// Whether `file` is the same terminal or pipe as standard error.
pub fn beside_stderr(file: &File) -> bool {
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let names = stderr.and_then(|stderr| Ok((file.metadata()?, stderr.metadata()?)));
    names.is_ok_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// Called by a console that is [`beside_stderr`]: its output ended with `last`.
pub fn wrote(last: u8) {
    MID_LINE.store(last != b'\n', Ordering::Relaxed);
}

/// Whether a console's line must be ended before another line is written. Assumes that the caller
/// ends it.
pub fn end_line() -> bool {
    MID_LINE.swap(false, Ordering::Relaxed)
}

/// A new pseudo-terminal: its master, its slave, and the slave's path. The slave is raw. While it
/// is open, the master never reports a hang-up.
pub fn open_pty() -> io::Result<(File, File, String)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    unlockpt(&master)?;
    let path = ptsname(&master, Vec::new())?.to_string_lossy().into_owned();
    let slave = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&path)?;
    let mut mode = tcgetattr(&slave)?;
    mode.make_raw();
    tcsetattr(&slave, OptionalActions::Now, &mode)?;
    Ok((master.into(), slave, path))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_pty_carries_bytes_unchanged_and_raw_mode_is_undone() {
        let (mut master, mut slave, path) = open_pty().unwrap();
        assert!(path.starts_with("/dev/pts/"), "{path}");
        master.write_all(b"\r\x03").unwrap();
        let mut bytes = [0; 2];
        slave.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"\r\x03");
        assert!(writable(master.as_fd()));

        let modes = || tcgetattr(&slave).unwrap().local_modes;
        let set = |mode: &Termios| tcsetattr(&slave, OptionalActions::Now, mode).unwrap();
        let typed = LocalModes::ECHO | LocalModes::ICANON;
        let mut cooked = tcgetattr(&slave).unwrap();
        cooked.local_modes |= typed;
        set(&cooked);
        set_raw(slave.as_fd(), Output::Processed, None).unwrap();
        assert!(!modes().intersects(typed));
        // Another process has changed the mode meanwhile.
        set(&cooked);
        take_back();
        assert_eq!((modes().intersects(typed), is_behind(), regain()), (false, false, false));
        restore();
        assert_eq!(modes(), cooked.local_modes);
        take_back();
        assert_eq!(modes(), cooked.local_modes);
    }
}
