//! userfaultfd (ioctl_userfaultfd(2), include/uapi/linux/userfaultfd.h): page faults that this
//! process resolves itself.
//!
//! It covers only what guest memory needs: missing pages, and minor faults of shared memory. KVM
//! faults on behalf of its guests, so a descriptor for user-mode faults alone is not enough.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};

use rustix::mm::{UserfaultfdFlags, userfaultfd};
use vmm_sys_util::eventfd::EventFd;

use super::mmap::Mapping;
use super::poll::Poll;

/// The kind of faults that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The page is missing: resolved by [`Uffd::copy`].
    Missing,
    /// The page is in the file but not mapped here: resolved by [`Uffd::map`].
    Minor,
}

/// A userfaultfd, which reports faults.
#[derive(Debug)]
pub struct Uffd(File);

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct Continue {
    range: Range,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct Zeropage {
    range: Range,
    mode: u64,
    zeroed: i64,
}

/// `_IOWR(0xAA, number, T)`.
const fn request<T>(number: u64) -> u64 {
    3 << 30 | (size_of::<T>() as u64) << 16 | 0xaa << 8 | number
}

const UFFDIO_API: u64 = request::<Api>(0x3f);
const UFFDIO_REGISTER: u64 = request::<Register>(0x00);
const UFFDIO_UNREGISTER: u64 = 2 << 30 | (size_of::<Range>() as u64) << 16 | 0xaa << 8 | 0x01;
const UFFDIO_COPY: u64 = request::<Copy>(0x03);
const UFFDIO_ZEROPAGE: u64 = request::<Zeropage>(0x04);
const UFFDIO_CONTINUE: u64 = request::<Continue>(0x07);
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
/// The requests on a descriptor that resolves missing pages, for a thread's filter.
pub const REQUESTS: &[u32] =
    &[UFFDIO_REGISTER as u32, UFFDIO_UNREGISTER as u32, UFFDIO_COPY as u32, UFFDIO_ZEROPAGE as u32];
const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Faults name the thread that caused them.
const FEATURE_THREAD_ID: u64 = 1 << 8;
const EVENT_PAGEFAULT: u8 = 0x12;
/// `struct uffd_msg`.
const MESSAGE: usize = 32;
/// The maximum number of faults per read.
pub const BATCH: usize = 16;

fn call<T>(fd: &File, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: every request above is made with its own type, which lives through the call. The
    // ranges in it were checked to lie inside a mapping of ours.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn inside(mapping: &Mapping, offset: u64, len: u64) -> io::Result<u64> {
    match offset.checked_add(len) {
        Some(end) if end <= mapping.len() && len > 0 => Ok(mapping.as_ptr() as u64 + offset),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// A new descriptor from the system call.
///
/// # Errors
/// This user may not have one that reports the kernel's faults.
pub fn by_call() -> io::Result<File> {
    // SAFETY: no memory is registered with it, so no access waits for it.
    let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?;
    Ok(fd.into())
}

/// A new descriptor from `/dev/userfaultfd` (Linux 6.1), which requires permission on the node
/// instead of privileges.
///
/// # Errors
/// The node does not exist, or this user may not open it.
pub fn by_device() -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the request takes flags only and makes a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    Ok(unsafe { File::from_raw_fd(fd) })
}

impl Uffd {
    /// A new descriptor, from the system call or from `/dev/userfaultfd`, with the features that
    /// `mode` needs on any backing.
    pub fn new(mode: Mode) -> io::Result<Self> {
        let file = by_call().or_else(|refused| by_device().map_err(|_| refused))?;
        let features = match mode {
            Mode::Missing => FEATURE_MISSING_HUGETLBFS | FEATURE_MISSING_SHMEM | FEATURE_THREAD_ID,
            Mode::Minor => FEATURE_MINOR_HUGETLBFS | FEATURE_MINOR_SHMEM,
        };
        call(&file, UFFDIO_API, &mut Api { api: 0xaa, features, ioctls: 0 })?;
        Ok(Self(file))
    }

    /// Reports faults in `[offset, offset + len)` of `mapping` from now on. A thread that touches
    /// the range waits until its fault is resolved. Dropping the descriptor releases all waiting
    /// threads.
    pub fn register(&self, mapping: &Mapping, offset: u64, len: u64, mode: Mode) -> io::Result<()> {
        let start = inside(mapping, offset, len)?;
        let mode = if mode == Mode::Missing { 1 } else { 4 };
        call(&self.0, UFFDIO_REGISTER, &mut Register { range: Range { start, len }, mode, ioctls: 0 })
    }

    /// Stops reporting faults there. Waiting threads continue.
    pub fn unregister(&self, mapping: &Mapping, offset: u64, len: u64) -> io::Result<()> {
        let start = inside(mapping, offset, len)?;
        call(&self.0, UFFDIO_UNREGISTER, &mut Range { start, len })
    }

    /// Waits for faults. Returns false once `quit` is readable.
    pub fn wait(&self, quit: &EventFd) -> io::Result<bool> {
        let mut poll = Poll::default();
        poll.readable(&self.0);
        poll.readable(quit);
        while !poll.wait(None)? {}
        Ok(!poll.is_ready(quit))
    }

    /// The descriptor, readable when there are faults.
    pub fn descriptor(&self) -> &File {
        &self.0
    }

    /// Takes waiting faults, as host-virtual addresses. Returns how many; 0 if another reader was
    /// faster.
    pub fn take(&self, addresses: &mut [u64; BATCH]) -> io::Result<usize> {
        let mut faults = [(0, 0); BATCH];
        let count = self.take_faults(&mut faults)?;
        addresses.iter_mut().zip(&faults[..count]).for_each(|(to, (address, _))| *to = *address);
        Ok(count)
    }

    /// Like `Uffd::take`, with the thread that waits for each. For [`Mode::Missing`].
    pub fn take_faults(&self, faults: &mut [(u64, u32); BATCH]) -> io::Result<usize> {
        let mut buffer = [0u8; MESSAGE * BATCH];
        let read = match (&self.0).read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            result => result?,
        };
        let mut count = 0;
        for message in buffer[..read].as_chunks::<MESSAGE>().0 {
            if message[0] == EVENT_PAGEFAULT {
                let (mut word, mut thread) = ([0; 8], [0; 4]);
                word.copy_from_slice(&message[16..24]);
                thread.copy_from_slice(&message[24..28]);
                faults[count] = (u64::from_ne_bytes(word), u32::from_ne_bytes(thread));
                count += 1;
            }
        }
        Ok(count)
    }

    /// Fills `[offset, offset + source.len())` of `mapping` and wakes the threads that wait for it.
    /// Pages that are already filled stay as they are.
    pub fn copy(&self, mapping: &Mapping, offset: u64, source: &[u8], page: u64) -> io::Result<()> {
        let len = source.len() as u64;
        let start = inside(mapping, offset, len)?;
        resolve(len, page, |done| {
            let mut copy = Copy {
                dst: start + done,
                src: source.as_ptr() as u64 + done,
                len: len - done,
                mode: 0,
                copied: 0,
            };
            let result = call(&self.0, UFFDIO_COPY, &mut copy);
            (result, copy.copied)
        })
    }

    /// Fills `[offset, offset + len)` of `mapping` with zeroes and wakes the threads that wait for
    /// it. Its pages must have the usual size. Pages that are already there stay as they are.
    ///
    /// # Errors
    /// The kernel's error: EINVAL for huge pages of a pool, which are [copied](Self::copy).
    pub fn zero(&self, mapping: &Mapping, offset: u64, len: u64, page: u64) -> io::Result<()> {
        let start = inside(mapping, offset, len)?;
        resolve(len, page, |done| {
            let range = Range { start: start + done, len: len - done };
            let mut zero = Zeropage { range, mode: 0, zeroed: 0 };
            let result = call(&self.0, UFFDIO_ZEROPAGE, &mut zero);
            (result, zero.zeroed)
        })
    }

    /// Maps the file's pages behind `[offset, offset + len)` of `mapping`, and wakes the threads
    /// that wait for them.
    pub fn map(&self, mapping: &Mapping, offset: u64, len: u64, page: u64) -> io::Result<()> {
        let start = inside(mapping, offset, len)?;
        resolve(len, page, |done| {
            let mut map =
                Continue { range: Range { start: start + done, len: len - done }, mode: 0, mapped: 0 };
            let result = call(&self.0, UFFDIO_CONTINUE, &mut map);
            (result, map.mapped)
        })
    }
}

/// Repeats a call that may stop half way. A page that is already there is skipped. While the
/// address space changes, the call is retried.
fn resolve(len: u64, page: u64, mut once: impl FnMut(u64) -> (io::Result<()>, i64)) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let (result, moved) = once(done);
        done += u64::try_from(moved).unwrap_or(0);
        match result {
            Ok(()) => return Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => done += page,
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmap::{PAGE_SIZE, Source};

    #[test]
    fn ranges_outside_are_refused() {
        let mapping = Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap();
        assert!(inside(&mapping, PAGE_SIZE, PAGE_SIZE).is_err());
        assert!(inside(&mapping, u64::MAX, 2).is_err());
        assert!(inside(&mapping, 0, 0).is_err());
    }
}
