//! Open files: whether one can be written to and whether that waits, space that is set aside for one (fallocate(2)), and locks of
//! open file descriptions (F_OFD_SETLK). These belong to the open file and not to the process, so they last exactly as long as the
//! descriptor, and two opens in one process exclude each other too.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

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

/// Gives the space of `len` bytes of `file` from `offset` on back; they read as zeroes.
///
/// # Errors
/// Where a write fails, on a file system that cannot give space back.
pub fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (from, bytes) = (offset as libc::off_t, len as libc::off_t);
    // SAFETY: takes numbers only.
    if unsafe { libc::fallocate(file.as_raw_fd(), mode, from, bytes) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => file.write_all_at(&vec![0; len as usize], offset),
        _ => Err(error),
    }
}

/// Has the kernel begin to read `len` bytes of `file` from `offset` on, which somebody will want soon. Of no consequence where it does not.
pub fn will_need(file: &File, offset: u64, len: u64) {
    let (from, bytes) = (offset as libc::off_t, len as libc::off_t);
    // SAFETY: takes numbers only.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), from, bytes, libc::POSIX_FADV_WILLNEED) };
}

/// Has the kernel begin to write `len` bytes of `file` from `offset` on to the disk, without waiting for that (sync_file_range(2)): a later
/// fsync(2) has the less to do. It promises nothing, and is of no consequence where the kernel refuses.
pub fn begin_write_back(file: &File, offset: u64, len: u64) {
    let (from, bytes) = (offset as libc::off64_t, len as libc::off64_t);
    // SAFETY: takes numbers only.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), from, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Makes `to` a clone of `from`: the same content in the same blocks, which a write to either parts (FICLONE, ioctl_ficlone(2)).
///
/// # Errors
/// Where the file system cannot, or they are on two.
pub fn clone_into(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: takes numbers only; both descriptors are open for as long as the call lasts.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE as _, from.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
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
    is_locked_within(file, whole(libc::F_WRLCK))
}

fn is_locked_within(file: &File, mut range: libc::flock) -> io::Result<bool> {
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

/// The byte, far behind the end of any file, that the writer of a log locks: so its lock is told from a disk's, which is on all of a file.
const LOG_BYTE: libc::off_t = libc::off_t::MAX - 1;

/// Who has a file that a log is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLock {
    /// This open file, from now on.
    Mine,
    /// Another writer of a log.
    Writers,
    /// Another user, by a lock of [`lock`]'s or another program's.
    Others,
}

/// Locks `file` as a log's writer, without waiting.
///
/// # Errors
/// On a file system without locks.
pub fn lock_log(file: &File) -> io::Result<LogLock> {
    let all_but_log = libc::flock { l_len: LOG_BYTE, ..whole(libc::F_WRLCK) };
    if is_locked_within(file, all_but_log)? {
        return Ok(LogLock::Others);
    }
    let log = libc::flock { l_start: LOG_BYTE, l_len: 1, ..whole(libc::F_WRLCK) };
    Ok(if set_lock(file, log)? { LogLock::Mine } else { LogLock::Writers })
}

/// Locks the whole file without waiting; false if somebody else's lock is in the way.
pub fn lock(file: &File, lock: Lock) -> io::Result<bool> {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
    };
    set_lock(file, whole(kind))
}

fn set_lock(file: &File, range: libc::flock) -> io::Result<bool> {
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

/// Gives up what [`lock`] took.
pub fn unlock(file: &File) -> io::Result<()> {
    let range = whole(libc::F_UNLCK);
    // SAFETY: `range` is a valid struct flock for the duration of the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
/// Locks a directory, which is open for reading alone (flock(2)), for as long as it is open; false where somebody else has.
///
/// # Errors
/// On a file system without locks.
pub fn lock_directory(directory: &File) -> io::Result<bool> {
    // SAFETY: takes numbers only.
    if unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
}

/// A file without a name (O_TMPFILE) on the file system of `directory`, which this user alone may read.
///
/// # Errors
/// What the kernel says, and what would work where the file system has none.
pub fn unnamed(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
    options.open(directory).map_err(|error| match error.raw_os_error() {
        // EISDIR is what a kernel says that takes it for opening the directory.
        Some(libc::EOPNOTSUPP | libc::EISDIR) => io::Error::new(
            io::ErrorKind::Unsupported,
            "this file system has no files without a name (O_TMPFILE); ext4, xfs, btrfs and tmpfs have them",
        ),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
            io::Error::new(error.kind(), format!("{error}; choose a directory that you may write to"))
        }
        _ => error,
    })
}

/// Names a file that was opened without a name (O_TMPFILE), on its own file system.
///
/// # Errors
/// Where there is such a name already, among others.
pub fn name(file: &File, path: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = CString::new(path.as_os_str().as_bytes())?;
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both are strings that end with a zero byte and live until the call returns.
    match unsafe { libc::linkat(here, from.as_ptr(), here, to.as_ptr(), follow) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The descriptor `fd` that this process was started with, for good: once. `None` where there is none.
pub fn taken(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: takes numbers only; what is beyond the standard ones belongs to nobody who was not told.
    let there = fd > 2 && unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
    // SAFETY: it is open, and its caller's, who takes it once.
    there.then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A copy of the descriptor `fd` that this process was started with; `None` where there is none.
pub fn inherited(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: takes numbers only; what comes back is new, and nobody else's.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: as above.
    (copy >= 0).then(|| unsafe { OwnedFd::from_raw_fd(copy) })
}
