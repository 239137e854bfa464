//! Open files: whether one can be written to and whether that waits, space that is set aside for one (fallocate(2)), and locks of
//! open file descriptions (F_OFD_SETLK). These belong to the open file and not to the process, so they last exactly as long as the
//! descriptor, and two opens in one process exclude each other too.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Who may hold the lock at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Any number of readers.
    Shared,
    /// One writer.
    Exclusive,
}

/// Whether `file` was opened for writing.
pub fn is_writable(file: &File) -> io::Result<bool> {
    // SAFETY: takes numbers only.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_RDONLY)
}

/// Has the file system set `len` bytes of `file` aside, so that a write within them does not fail for lack of space; the file is
/// as long at least from then on. Where a file system cannot promise that, nothing happens.
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    // SAFETY: takes numbers only.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => Ok(()),
        _ => Err(error),
    }
}

/// Whether reads and writes of `file` return instead of waiting.
pub fn is_nonblocking(file: &File) -> bool {
    // SAFETY: takes numbers only.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// Makes them return. That is so for all descriptors of this open file, in whichever process.
pub fn set_nonblocking(file: &File) -> io::Result<()> {
    // SAFETY: takes numbers only.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: takes numbers only.
    if flags < 0 || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether another open file holds a lock that keeps this one from a writer's: one of [`lock`]'s, or of another program's that
/// locks by fcntl(2).
pub fn is_locked(file: &File) -> io::Result<bool> {
    let mut range = whole(libc::F_WRLCK);
    // SAFETY: `range` is a valid struct flock for the duration of the call, which writes it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut range) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

/// A lock of this kind on a whole file: a length of 0 reaches to its end, wherever that is.
fn whole(kind: libc::c_int) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 }
}

/// Locks the whole file without waiting; false if somebody else's lock is in the way.
pub fn lock(file: &File, lock: Lock) -> io::Result<bool> {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
    };
    let range = whole(kind);
    // SAFETY: `range` is a valid struct flock for the duration of the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}
