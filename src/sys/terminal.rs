//! Terminals: raw mode and its undoing (termios(3)), pseudo-terminals (pts(4)), and whether a write would block.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The terminal that is raw, and how it was before. One process has one terminal, and a panic hook must find it. The descriptor is this
/// one's own: whoever had it made raw may have been taken apart by the time at which it is given back.
static RAW: Mutex<Option<(OwnedFd, libc::termios)>> = Mutex::new(None);

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

/// Whether `fd` is a terminal whose foreground this process is in; the background may not change a terminal's mode.
pub fn in_foreground(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: neither call takes memory.
    unsafe { libc::tcgetpgrp(fd.as_raw_fd()) == libc::getpgrp() }
}

/// What becomes of what is written to a terminal that is raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It is processed as before: a newline begins a line, so that this process's own lines still look right.
    Processed,
    /// It is as it is: what is written comes from a terminal, which has processed it.
    AsIs,
}

/// Gives every key to the guest: no echo, no line editing, no signals. [`restore`] undoes it.
pub fn set_raw(fd: BorrowedFd<'_>, output: Output) -> io::Result<()> {
    let mut old = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: tcgetattr fills `old` where it succeeds.
    let old = unsafe {
        if libc::tcgetattr(fd.as_raw_fd(), old.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        old.assume_init()
    };
    let mut raw = old;
    // SAFETY: `raw` is a valid termios.
    unsafe { libc::cfmakeraw(&mut raw) };
    if output == Output::Processed {
        raw.c_oflag = old.c_oflag;
    }
    let own = fd.try_clone_to_owned()?;
    set(own.as_raw_fd(), &raw)?;
    *RAW.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some((own, old));
    Ok(())
}

/// Gives the terminal back as [`set_raw`] found it. Does nothing where it is not raw. Never blocks, so that a panic hook
/// may call it.
pub fn restore() {
    if let Ok(mut raw) = RAW.try_lock()
        && let Some((fd, old)) = raw.take()
    {
        // Nothing is left to be done for a terminal that has gone away.
        let _ = set(fd.as_raw_fd(), &old);
    }
}

fn set(fd: RawFd, mode: &libc::termios) -> io::Result<()> {
    // SAFETY: `mode` is a valid termios for the duration of the call.
    match unsafe { libc::tcsetattr(fd, libc::TCSANOW, mode) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many characters a line of the terminal `fd` has; `None` where it does not say.
pub fn columns(fd: BorrowedFd<'_>) -> Option<usize> {
    Some(usize::from(size(fd).1)).filter(|columns| *columns > 0)
}

/// The lines of the terminal `fd`, and the characters of one; 0 where it does not say.
pub fn size(fd: BorrowedFd<'_>) -> (u16, u16) {
    let mut size = MaybeUninit::<libc::winsize>::zeroed();
    // SAFETY: TIOCGWINSZ fills a winsize, which zeroed bytes are too.
    let size = unsafe {
        libc::ioctl(fd.as_raw_fd(), libc::TIOCGWINSZ, size.as_mut_ptr());
        size.assume_init()
    };
    (size.ws_row, size.ws_col)
}

/// Whether a write of a byte to `fd` would not block. Files always take one.
pub fn writable(fd: BorrowedFd<'_>) -> bool {
    writable_within(fd, Duration::ZERO)
}

/// The same, or not after `patience`.
pub fn writable_within(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: `poll` is one valid pollfd.
    unsafe { libc::poll(&mut poll, 1, patience.as_millis() as i32) == 1 }
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
    let (mut master, mut slave) = (-1, -1);
    // SAFETY: openpty fills the two descriptors; the other pointers may be null.
    let failed = unsafe {
        libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), std::ptr::null()) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: openpty has just opened both, and nobody else owns them.
    let (master, slave) = unsafe { (File::from_raw_fd(master), File::from_raw_fd(slave)) };
    let mut name = [0u8; 64];
    let mut mode = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: all take valid descriptors; ptsname_r gets its buffer's length, and tcgetattr fills `mode` before it is used.
    let failed = unsafe {
        libc::fcntl(master.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) != 0
            || libc::fcntl(slave.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) != 0
            || libc::ptsname_r(master.as_raw_fd(), name.as_mut_ptr().cast(), name.len()) != 0
            || libc::tcgetattr(slave.as_raw_fd(), mode.as_mut_ptr()) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: filled above.
    let mut mode = unsafe { mode.assume_init() };
    // SAFETY: `mode` is a valid termios.
    unsafe { libc::cfmakeraw(&mut mode) };
    set(slave.as_raw_fd(), &mode)?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    Ok((master, slave, String::from_utf8_lossy(&name[..end]).into_owned()))
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

        let lflag = || {
            let mut mode = MaybeUninit::<libc::termios>::uninit();
            // SAFETY: tcgetattr fills `mode`, which the assertion checks.
            unsafe {
                assert_eq!(libc::tcgetattr(slave.as_raw_fd(), mode.as_mut_ptr()), 0);
                mode.assume_init().c_lflag
            }
        };
        let mut cooked = {
            let mut mode = MaybeUninit::<libc::termios>::uninit();
            // SAFETY: as above.
            unsafe {
                assert_eq!(libc::tcgetattr(slave.as_raw_fd(), mode.as_mut_ptr()), 0);
                mode.assume_init()
            }
        };
        cooked.c_lflag |= libc::ECHO | libc::ICANON;
        set(slave.as_raw_fd(), &cooked).unwrap();
        set_raw(slave.as_fd(), Output::Processed).unwrap();
        assert_eq!(lflag() & (libc::ECHO | libc::ICANON), 0);
        restore();
        assert_eq!(lflag(), cooked.c_lflag);
    }
}
