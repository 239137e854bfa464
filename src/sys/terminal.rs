//! Terminals: raw mode and its undoing (termios(3)), pseudo-terminals (pts(4)), and whether a write would block.

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

/// The terminal that is to be raw. One process has one terminal, and a panic hook must find it.
static RAW: Mutex<Option<Raw>> = Mutex::new(None);

/// How often a terminal is looked at that is not this process's to change: no signal tells a process that runs in the background that it
/// comes to the foreground.
pub const LOOK: Duration = Duration::from_millis(200);

/// A terminal that is raw while this process is in its foreground and runs.
struct Raw {
    /// Its own: whoever had the terminal made raw may have been taken apart by the time at which it is given back.
    fd: OwnedFd,
    output: Output,
    /// This process's group.
    group: Pid,
    /// How it was before, while it is raw.
    before: Option<Termios>,
    /// Signalled when it is this process's again.
    back: Option<Arc<EventFd>>,
}

impl Raw {
    /// Whether others have it in the foreground.
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
        // It can only fail by overflowing, and then it is signalled anyway.
        drop(self.back.as_ref().map(|back| back.write(1)));
        Ok(())
    }

    fn give_back(&mut self) {
        if let Some(before) = self.before.take().filter(|_| !self.is_behind()) {
            // Nothing is left to be done for a terminal that has gone away.
            let _ = tcsetattr(&self.fd, OptionalActions::Now, &before);
        }
    }
}

/// Ctrl-a.
const ESCAPE: u8 = 1;

/// The keys of a terminal that all go to a guest but the escape key: Ctrl-a x is for this process, Ctrl-a Ctrl-a (or Ctrl-a a) is one
/// Ctrl-a for the guest.
#[derive(Debug)]
pub struct Keys {
    /// Whether there is an escape key: on terminals only.
    pub escape: bool,
    /// Whether the key before was the escape key.
    pub pending: bool,
}

impl Keys {
    /// Hands on what of the first `n` of `bytes` is for the guest; whether it is to end.
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

/// Whether `fd` is this process's terminal, and it is in its foreground; the background may not change a terminal's mode.
pub fn in_foreground(fd: BorrowedFd<'_>) -> Option<bool> {
    is_foreground(fd, getpgrp())
}

/// Whether process group `group` is in the foreground of `fd`, where that is this process's terminal.
fn is_foreground(fd: BorrowedFd<'_>, group: Pid) -> Option<bool> {
    match tcgetpgrp(fd) {
        Ok(foreground) => Some(foreground == group),
        // The kernel says 0: one in a namespace that this process does not see.
        Err(Errno::OPNOTSUPP) => Some(false),
        Err(_) => None,
    }
}

/// Reads from `fd`. Where that is this process's terminal and others have it in the foreground, it waits until they have not, and does
/// not stop the process as a plain read does.
pub fn read_in_foreground(fd: BorrowedFd<'_>, to: &mut [u8]) -> io::Result<usize> {
    loop {
        let read = {
            // One that does not take SIGTTIN is told of an error.
            let _blocked = Blocked::all();
            rustix::io::read(fd, &mut *to)
        };
        match read {
            Err(Errno::IO) if in_foreground(fd) == Some(false) => std::thread::sleep(LOOK),
            result => return Ok(result?),
        }
    }
}

/// What becomes of what is written to a terminal that is raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It is processed as before: a newline begins a line, so that this process's own lines still look right.
    Processed,
    /// It is as it is: what is written comes from a terminal, which has processed it.
    AsIs,
}

/// Gives every key to the guest: no echo, no line editing, no signals. [`restore`] undoes it. Where this process is not in the foreground
/// of `fd` it is raw once it is; `back` is signalled then.
pub fn set_raw(fd: BorrowedFd<'_>, output: Output, back: Option<Arc<EventFd>>) -> io::Result<()> {
    let mut raw = Raw { fd: fd.try_clone_to_owned()?, output, group: getpgrp(), before: None, back };
    raw.take_back()?;
    *RAW.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(raw);
    Ok(())
}

/// Whether there is a terminal that is to be raw, and others have it in the foreground.
pub fn is_behind() -> bool {
    RAW.lock().is_ok_and(|mut raw| {
        let raw = raw.as_mut().filter(|raw| raw.is_behind());
        raw.map(|raw| raw.before = None).is_some()
    })
}

/// Makes the terminal raw that is to be and is not, if this process has come to its foreground; whether that is to be looked at again.
pub fn regain() -> bool {
    RAW.lock().is_ok_and(|mut raw| {
        raw.as_mut().filter(|raw| raw.before.is_none()).is_some_and(|raw| {
            // One that cannot be changed has gone away.
            raw.take_back().is_ok() && raw.before.is_none()
        })
    })
}

/// Makes the terminal raw again where it is to be and this process has come to its foreground.
pub fn take_back() {
    if let Ok(mut raw) = RAW.lock()
        && let Some(raw) = raw.as_mut()
    {
        // One that is not to be changed is as it is.
        let _ = raw.take_back();
    }
}

/// Does what one of [`STOPPING`](signal::STOPPING) is for, which this thread has read. While this process is stopped the terminal is as
/// it was before.
pub fn stop(signal: i32) {
    if signal != signal::CONTINUE {
        if let Ok(mut raw) = RAW.lock() {
            raw.iter_mut().for_each(Raw::give_back);
        }
        signal::stop_by(signal);
    }
    take_back();
}

/// Gives the terminal back as [`set_raw`] found it. Does nothing where it is not raw. Never blocks, so that a panic hook
/// may call it.
pub fn restore() {
    if let Ok(mut raw) = RAW.try_lock()
        && let Some(mut raw) = raw.take()
    {
        raw.give_back();
    }
}

/// How many characters a line of the terminal `fd` has; `None` where it does not say.
pub fn columns(fd: BorrowedFd<'_>) -> Option<usize> {
    Some(usize::from(size(fd).1)).filter(|columns| *columns > 0)
}

/// The lines of the terminal `fd`, and the characters of one; 0 where it does not say.
pub fn size(fd: BorrowedFd<'_>) -> (u16, u16) {
    tcgetwinsize(fd).map_or((0, 0), |size| (size.ws_row, size.ws_col))
}

/// Whether a write of a byte to `fd` would not block. Files always take one.
pub fn writable(fd: BorrowedFd<'_>) -> bool {
    writable_within(fd, Duration::ZERO)
}

/// The same, or not after `patience`.
pub fn writable_within(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).ok();
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], patience.as_ref()) == Ok(1)
}

/// Whether a guest's console stands in the middle of a line where standard error is too.
static MID_LINE: AtomicBool = AtomicBool::new(false);

/// Whether what is written to `file` appears where standard error does: the same terminal or pipe.
pub fn beside_stderr(file: &File) -> bool {
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let names = stderr.and_then(|stderr| Ok((file.metadata()?, stderr.metadata()?)));
    names.is_ok_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// Told by a console that is [`beside_stderr`]: what it wrote ended with `last`.
pub fn wrote(last: u8) {
    MID_LINE.store(last != b'\n', Ordering::Relaxed);
}

/// Whether a console's line is to be ended before another is written. It is as good as ended afterwards.
pub fn end_line() -> bool {
    MID_LINE.swap(false, Ordering::Relaxed)
}

/// A new pseudo-terminal: its master, its slave, and the slave's path. The slave is raw; while it is held open the
/// master never reports a hang-up.
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
        // Whoever had it meanwhile has changed it.
        set(&cooked);
        take_back();
        assert_eq!((modes().intersects(typed), is_behind(), regain()), (false, false, false));
        restore();
        assert_eq!(modes(), cooked.local_modes);
        take_back();
        assert_eq!(modes(), cooked.local_modes);
    }
}
