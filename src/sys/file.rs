//! Open files: whether one is writable and whether that blocks, space reservation (fallocate(2)),
//! and locks of open file descriptions (F_OFD_SETLK). Such a lock belongs to the open file and not
//! to the process. So it lasts exactly as long as the descriptor, and two opens in one process
//! exclude each other too.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, AtFlags, CWD, FallocateFlags, FlockOperation, OFlags};
use rustix::io::{Errno, FdFlags};

use super::mmap::PAGE_SIZE;
use super::pagemap;

/// The kind of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Any number of readers may hold it.
    Shared,
    /// One writer holds it.
    Exclusive,
}

/// Whether `file` was opened for writing.
pub fn is_writable(file: &File) -> io::Result<bool> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(!flags.contains(OFlags::PATH) && flags & OFlags::RWMODE != OFlags::RDONLY)
}

/// Reserves `len` bytes of `file`, so that a write within them does not fail for lack of space. The
/// file becomes at least that long. Does nothing if the file system cannot reserve space.
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Frees the space of `len` bytes of `file` from `offset` on. They then read as zeroes.
///
/// # Errors
/// A write fails on a file system that cannot punch holes.
pub fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(file, offset, len),
        Err(error) => Err(error.into()),
    }
}

/// Writes `len` zeroes from `offset` on.
///
/// # Errors
/// The kernel's error.
pub fn write_zeros(file: &File, offset: u64, len: u64) -> io::Result<()> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let part = (end - at).min(ZEROS.len() as u64) as usize;
        file.write_all_at(&ZEROS[..part], at)?;
        at += part as u64;
    }
    Ok(())
}

/// Makes the kernel start to read `len` bytes of `file` from `offset` on, ahead of their use. A
/// refusal has no consequences.
pub fn will_need(file: &File, offset: u64, len: u64) {
    let _ = rustix::fs::fadvise(file, offset, NonZeroU64::new(len), Advice::WillNeed);
}

/// Drops what the page cache has of `file`, but for what is not written back or is mapped. A refusal
/// has no consequences.
pub fn will_not_need(file: &File) {
    let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
}

/// Starts write-back of `len` bytes of `file` from `offset` on, without waiting for it
/// (sync_file_range(2)). A later fsync(2) then has less to do. This guarantees nothing, and a
/// refusal has no consequences.
pub fn begin_write_back(file: &File, offset: u64, len: u64) {
    let (from, bytes) = (offset as libc::off64_t, len as libc::off64_t);
    // SAFETY: takes numbers only.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), from, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Makes `to` a clone of `from` (FICLONE, ioctl_ficlone(2)). Both share blocks until one of them
/// writes.
///
/// # Errors
/// The file system does not support it, or the files are on different ones.
pub fn clone_into(from: &File, to: &File) -> io::Result<()> {
    Ok(rustix::fs::ioctl_ficlone(to, from)?)
}

/// Copies `from` to the empty file `to`, on the same file system by sharing blocks if that can do it.
/// Holes stay holes.
///
/// # Errors
/// The host's.
pub fn copy_into(from: &File, to: &File) -> io::Result<()> {
    if clone_into(from, to).is_ok() {
        return Ok(());
    }
    let len = from.metadata()?.len();
    to.set_len(len)?;
    let mut runs = Vec::new();
    pagemap::data(from, 0, len.div_ceil(PAGE_SIZE), |run| runs.push(run))?;
    let mut buffer = vec![0; 1 << 20];
    for run in runs {
        let (mut at, end) = (run.start * PAGE_SIZE, len.min(run.end * PAGE_SIZE));
        while at < end {
            let most = buffer.len() as u64;
            let bytes = &mut buffer[..most.min(end - at) as usize];
            from.read_exact_at(bytes, at)?;
            to.write_all_at(bytes, at)?;
            at += bytes.len() as u64;
        }
    }
    Ok(())
}

/// Whether `file` is on a file system without a medium (tmpfs, ramfs).
///
/// # Errors
/// The host's.
pub fn is_in_memory(file: &File) -> io::Result<bool> {
    /// TMPFS_MAGIC and RAMFS_MAGIC (include/uapi/linux/magic.h).
    const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
    Ok(IN_MEMORY.contains(&(rustix::fs::fstatfs(file)?.f_type as u64)))
}

/// Whether reads and writes of `file` return instead of blocking.
pub fn is_nonblocking(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Makes reads and writes of `file` nonblocking. This affects all descriptors of this open file, in
/// every process.
pub fn set_nonblocking(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags | OFlags::NONBLOCK)?)
}

/// Whether another open file holds a lock that conflicts with a write lock on this one: one taken
/// by [`lock`], or by another program with fcntl(2).
pub fn is_locked(file: &File) -> io::Result<bool> {
    is_locked_within(file, whole(libc::F_WRLCK))
}

fn is_locked_within(file: &File, mut range: libc::flock) -> io::Result<bool> {
    ask(file, libc::F_OFD_GETLK, &mut range)?;
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

/// Calls fcntl(2) for a lock of the open file description, which no crate wraps.
fn ask(file: &File, command: libc::c_int, range: &mut libc::flock) -> io::Result<()> {
    // SAFETY: `range` is a valid struct flock for the duration of the call, which writes it.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(range)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A lock of this kind on a whole file: a length of 0 extends to the end of the file, wherever that
/// is.
fn whole(kind: libc::c_int) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 }
}

/// The byte, far beyond the end of any file, that a log's writer locks. It distinguishes a log's
/// lock from a disk's, which covers the whole file.
const LOG_BYTE: libc::off_t = libc::off_t::MAX - 1;

/// Who holds the lock on a file that is to become a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLock {
    /// This open file, from now on.
    Mine,
    /// Another writer of a log.
    Writers,
    /// Another user, through [`lock`] or another program's lock.
    Others,
}

/// Locks `file` as a log's writer, without waiting.
///
/// # Errors
/// The file system has no locks.
pub fn lock_log(file: &File) -> io::Result<LogLock> {
    let all_but_log = libc::flock { l_len: LOG_BYTE, ..whole(libc::F_WRLCK) };
    if is_locked_within(file, all_but_log)? {
        return Ok(LogLock::Others);
    }
    let log = libc::flock { l_start: LOG_BYTE, l_len: 1, ..whole(libc::F_WRLCK) };
    Ok(if set_lock(file, log)? { LogLock::Mine } else { LogLock::Writers })
}

/// Locks the whole file without waiting. Returns false if another lock conflicts.
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

/// Releases the lock that [`lock`] took.
pub fn unlock(file: &File) -> io::Result<()> {
    ask(file, libc::F_OFD_SETLK, &mut whole(libc::F_UNLCK))
}

/// Locks a directory, which can only be open for reading, for as long as it is open (flock(2)).
/// Returns false if it is already locked.
///
/// # Errors
/// The file system has no locks.
pub fn lock_directory(directory: &File) -> io::Result<bool> {
    match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A file without a name (O_TMPFILE) on the file system of `directory`. Only this user may read it.
///
/// # Errors
/// The kernel's error, or, if the file system has no such files, what would work.
pub fn unnamed(directory: &Path) -> io::Result<File> {
    unnamed_with(directory, 0o600)
}

/// The same with another `mode`, of which the umask is taken off.
///
/// # Errors
/// As there.
pub fn unnamed_with(directory: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(mode).custom_flags(libc::O_TMPFILE);
    options.open(directory).map_err(|error| match error.raw_os_error() {
        // A kernel that does not know O_TMPFILE reports EISDIR, because it opens the directory
        // itself.
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

/// Gives a name on its own file system to a file that was opened without one (O_TMPFILE).
///
/// # Errors
/// Among others, the name exists already.
pub fn name(file: &impl AsRawFd, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, path_of(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// A path by which this process can open `file` anew, as long as it is open.
pub fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Takes ownership of the descriptor `fd` that this process was started with. Call it once for
/// each. `None` if `fd` is not open.
pub fn taken(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: a descriptor beyond the standard ones belongs to the caller, who was told of it. If
    // it is not open, the call fails.
    let there =
        fd > 2 && rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::CLOEXEC).is_ok();
    // SAFETY: it is open and belongs to the caller, who takes it once.
    there.then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A copy of the descriptor `fd` that this process was started with; `None` if it is not open.
pub fn inherited(fd: RawFd) -> Option<OwnedFd> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the owner keeps it open meanwhile. If it is not open, the call fails.
    rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 3).ok()
}
