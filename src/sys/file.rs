//! Open files: whether one can be written to and whether that waits, space that is set aside for one (fallocate(2)), and locks of
//! open file descriptions (F_OFD_SETLK). These belong to the open file and not to the process, so they last exactly as long as the
//! descriptor, and two opens in one process exclude each other too.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, AtFlags, CWD, FallocateFlags, FlockOperation, OFlags};
use rustix::io::{Errno, FdFlags};

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
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(!flags.contains(OFlags::PATH) && flags & OFlags::RWMODE != OFlags::RDONLY)
}

/// Has the file system set `len` bytes of `file` aside, so that a write within them does not fail for lack of space; the file is
/// as long at least from then on. Where a file system cannot promise that, nothing happens.
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Gives the space of `len` bytes of `file` from `offset` on back; they read as zeroes.
///
/// # Errors
/// Where a write fails, on a file system that cannot give space back.
pub fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.write_all_at(&vec![0; len as usize], offset),
        Err(error) => Err(error.into()),
    }
}

/// Has the kernel begin to read `len` bytes of `file` from `offset` on, which somebody will want soon. Of no consequence where it does not.
pub fn will_need(file: &File, offset: u64, len: u64) {
    let _ = rustix::fs::fadvise(file, offset, NonZeroU64::new(len), Advice::WillNeed);
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
    Ok(rustix::fs::ioctl_ficlone(to, from)?)
}

/// Whether reads and writes of `file` return instead of waiting.
pub fn is_nonblocking(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Makes them return. That is so for all descriptors of this open file, in whichever process.
pub fn set_nonblocking(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags | OFlags::NONBLOCK)?)
}

/// Whether another open file holds a lock that keeps this one from a writer's: one of [`lock`]'s, or of another program's that
/// locks by fcntl(2).
pub fn is_locked(file: &File) -> io::Result<bool> {
    is_locked_within(file, whole(libc::F_WRLCK))
}

fn is_locked_within(file: &File, mut range: libc::flock) -> io::Result<bool> {
    ask(file, libc::F_OFD_GETLK, &mut range)?;
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

/// What no crate has: locks of open file descriptions.
fn ask(file: &File, command: libc::c_int, range: &mut libc::flock) -> io::Result<()> {
    // SAFETY: `range` is a valid struct flock for the duration of the call, which writes it.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(range)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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

fn set_lock(file: &File, mut range: libc::flock) -> io::Result<bool> {
    match ask(file, libc::F_OFD_SETLK, &mut range) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives up what [`lock`] took.
pub fn unlock(file: &File) -> io::Result<()> {
    ask(file, libc::F_OFD_SETLK, &mut whole(libc::F_UNLCK))
}

/// Locks a directory, which is open for reading alone (flock(2)), for as long as it is open; false where somebody else has.
///
/// # Errors
/// On a file system without locks.
pub fn lock_directory(directory: &File) -> io::Result<bool> {
    match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
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
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, open, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// The descriptor `fd` that this process was started with, for good: once. `None` where there is none.
pub fn taken(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: what is beyond the standard ones belongs to nobody who was not told. Where it is not open, this is an error.
    let there =
        fd > 2 && rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::CLOEXEC).is_ok();
    // SAFETY: it is open, and its caller's, who takes it once.
    there.then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A copy of the descriptor `fd` that this process was started with; `None` where there is none.
pub fn inherited(fd: RawFd) -> Option<OwnedFd> {
    if fd < 0 {
        return None;
    }
    // SAFETY: whoever has it keeps it open meanwhile. Where it is not open, the call is an error.
    rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 3).ok()
}
