//! A guest's buffers as a sequence of bytes: the readable or the writable half of one descriptor
//! chain.
//!
//! Addresses were checked when the slices were taken from guest memory (`queue.rs`), so every call
//! here stays inside it. Writes are marked in the memory's dirty bitmap, because KVM's dirty log
//! does not contain the VMM's own writes. The vectors are kept from one request to the next, so a
//! busy device allocates nothing.

use std::io;
use std::os::fd::AsRawFd;

use vm_memory::bitmap::{Bitmap, MS};
use vm_memory::volatile_memory::VolatileSlice;

use super::GuestMemory;
use vellum_sys::mmap::host_page;

/// A contiguous range of guest memory.
pub type Slice<'m> = VolatileSlice<'m, MS<'m, GuestMemory>>;

/// The maximum number of buffers in one readv, writev, preadv or pwritev (Linux's UIO_MAXIOV).
const IOV_MAX: usize = 1024;

/// One half of a chain, consumed from the front.
#[derive(Default)]
pub struct Slices<'m> {
    items: Vec<Slice<'m>>,
    /// The first slice with bytes left.
    first: usize,
    left: usize,
    consumed: usize,
    iov: Vec<libc::iovec>,
}

impl<'m> Slices<'m> {
    /// Removes all slices but keeps the allocation.
    pub fn clear(&mut self) {
        self.items.clear();
        (self.first, self.left, self.consumed) = (0, 0, 0);
    }

    /// Appends `slice`.
    pub fn push(&mut self, slice: Slice<'m>) {
        self.left += slice.len();
        self.items.push(slice);
    }

    /// Bytes not yet consumed.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Bytes read or written so far.
    pub fn consumed(&self) -> usize {
        self.consumed
    }

    /// Copies as many bytes as fit into `buf`. Returns their number.
    pub fn read(&mut self, buf: &mut [u8]) -> usize {
        self.each(buf.len(), |slice, at| slice.copy_to(&mut buf[at..at + slice.len()]))
    }

    /// Reads exactly `N` bytes, or none if there are fewer.
    pub fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (self.left >= N).then(|| self.read(&mut bytes)).map(|_| bytes)
    }

    /// Copies as much of `buf` as there is room for. Returns the number of bytes.
    pub fn write(&mut self, buf: &[u8]) -> usize {
        self.each(buf.len(), |slice, at| {
            slice.copy_from(&buf[at..at + slice.len()]);
            slice.len()
        })
    }

    /// Writes up to `count` zeroes. Returns their number.
    pub fn zero(&mut self, count: usize) -> usize {
        static ZEROS: [u8; 4096] = [0; 4096];
        self.each(count, |slice, _| {
            let mut at = 0;
            while at < slice.len() {
                let part = slice.offset(at).expect("inside the slice");
                part.copy_from(&ZEROS[..part.len().min(ZEROS.len())]);
                at += ZEROS.len();
            }
            slice.len()
        })
    }

    /// Copies `bytes` to `offset` from the current position, as far as there is room. Consumes
    /// nothing.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) {
        let (mut at, end) = (0, offset + bytes.len());
        self.for_each(end, |slice| {
            let from = offset.clamp(at, at + slice.len());
            slice
                .offset(from - at)
                .expect("inside the slice")
                .copy_from(&bytes[from.saturating_sub(offset)..]);
            at += slice.len();
        });
    }

    /// Skips `count` bytes, or all that are left.
    pub fn skip(&mut self, count: usize) {
        self.each(count, |slice, _| slice.len());
    }

    /// Calls `f` with each whole or partial slice of the next `count` bytes. Consumes nothing.
    pub fn for_each(&self, count: usize, mut f: impl FnMut(&Slice<'m>)) {
        let mut count = count.min(self.left);
        for slice in &self.items[self.first..] {
            if count == 0 {
                break;
            }
            let part = count.min(slice.len());
            f(&slice.subslice(0, part).expect("part of the slice"));
            count -= part;
        }
    }

    /// Moves the next `count` bytes, or all that are left, to `front`.
    pub fn split_front(&mut self, count: usize, front: &mut Slices<'m>) {
        front.clear();
        self.each(count, |slice, _| {
            front.push(*slice);
            slice.len()
        });
    }

    /// Removes the last byte and returns it. Block requests end in a status byte, however the
    /// driver divides its buffers.
    pub fn take_last_byte(&mut self) -> Option<Slice<'m>> {
        while self.items.len() > self.first {
            let last = self.items.pop()?;
            let Some(rest) = last.len().checked_sub(1) else { continue };
            let (body, byte) = last.split_at(rest).expect("split inside the slice");
            if rest > 0 {
                self.items.push(body);
            }
            self.left -= 1;
            return Some(byte);
        }
        None
    }

    /// readv(2) into the next `max` bytes at most.
    pub fn readv(&mut self, from: &impl AsRawFd, max: usize) -> io::Result<usize> {
        let (iov, len) = self.iov(max);
        // SAFETY: the iovecs lie in guest memory, which outlives 'm and to which there are no Rust
        // references.
        self.filled(unsafe { libc::readv(from.as_raw_fd(), iov, len) })
    }

    /// writev(2) of the next `max` bytes at most.
    pub fn writev(&mut self, to: &impl AsRawFd, max: usize) -> io::Result<usize> {
        let (iov, len) = self.iov(max);
        // SAFETY: as in readv; the kernel only reads.
        self.emptied(unsafe { libc::writev(to.as_raw_fd(), iov, len) })
    }

    /// preadv(2) into the next `max` bytes at most.
    pub fn preadv(&mut self, from: &impl AsRawFd, offset: u64, max: usize) -> io::Result<usize> {
        let (iov, len) = self.iov(max);
        // SAFETY: as in readv.
        self.filled(unsafe { libc::preadv64(from.as_raw_fd(), iov, len, offset as i64) })
    }

    /// pwritev(2) of the next `max` bytes at most.
    pub fn pwritev(&mut self, to: &impl AsRawFd, offset: u64, max: usize) -> io::Result<usize> {
        let (iov, len) = self.iov(max);
        // SAFETY: as in readv; the kernel only reads.
        self.emptied(unsafe { libc::pwritev64(to.as_raw_fd(), iov, len, offset as i64) })
    }

    fn filled(&mut self, result: isize) -> io::Result<usize> {
        let count = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
        Ok(self.each(count, |slice, _| {
            slice.bitmap().mark_dirty(0, slice.len());
            slice.len()
        }))
    }

    fn emptied(&mut self, result: isize) -> io::Result<usize> {
        let count = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
        Ok(self.each(count, |slice, _| slice.len()))
    }

    fn iov(&mut self, max: usize) -> (*const libc::iovec, i32) {
        let mut iov = std::mem::take(&mut self.iov);
        iov.clear();
        self.for_each(max, |slice| {
            if iov.len() < IOV_MAX {
                let iov_base = slice.ptr_guard_mut().as_ptr().cast();
                iov.push(libc::iovec { iov_base, iov_len: slice.len() });
            }
        });
        self.iov = iov;
        (self.iov.as_ptr(), self.iov.len() as i32)
    }

    /// Consumes up to `count` bytes, slice by slice. `f` gets each slice and its offset from the
    /// start of this call.
    fn each(&mut self, count: usize, mut f: impl FnMut(&Slice<'m>, usize) -> usize) -> usize {
        let count = count.min(self.left);
        let mut done = 0;
        while done < count {
            let slice = &mut self.items[self.first];
            let part = slice.len().min(count - done);
            let (head, rest) = slice.split_at(part).expect("part of the slice");
            f(&head, done);
            done += part;
            *slice = rest;
            if slice.is_empty() {
                self.first += 1;
            }
        }
        self.left -= done;
        self.consumed += done;
        done
    }
}

/// Returns the whole pages of `slice` to the host. They read as zeroes afterwards, or, in a machine
/// that was forked, as they did then: the driver must not rely on either. Pages stay if
/// the backing cannot drop single small pages (hugetlb, locked memory).
pub fn discard(slice: &Slice<'_>) {
    // Only whole pages: the kernel rounds the length up, so it would discard all of a page whose
    // first part is in the range.
    let page = host_page() as usize;
    let addr = slice.ptr_guard_mut().as_ptr();
    let skip = addr.align_offset(page);
    let len = slice.len().saturating_sub(skip) & !(page - 1);
    if len == 0 || slice.bitmap().log().keeps() {
        return;
    }
    // SAFETY: the range is inside a mapping of guest memory, whose contents nothing in this process
    // relies on. MADV_REMOVE is for shared mappings; private ones refuse it.
    let dropped = unsafe {
        libc::madvise(addr.add(skip).cast(), len, libc::MADV_REMOVE) == 0
            || libc::madvise(addr.add(skip).cast(), len, libc::MADV_DONTNEED) == 0
    };
    if dropped {
        slice.bitmap().mark_dirty(skip, len);
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    use crate::memory::plan::Space;
    use crate::memory::{Memory, MemoryConfig};

    /// If a page were discarded while others are still missing, it would count as one of those.
    #[test]
    fn nothing_is_given_back_of_memory_that_is_kept() {
        const BELOW: &[std::ops::Range<u64>] = std::slice::from_ref(&(0..1 << 30));
        let memory = Memory::map(Space(BELOW), MemoryConfig::new(1 << 20)).unwrap();
        memory.guest.write_obj(7u64, GuestAddress(4096)).unwrap();
        for (kept, left) in [(true, 7u64), (false, 0)] {
            memory.mapping.keep(kept);
            super::discard(&memory.guest.get_slice(GuestAddress(4096), 4096).unwrap());
            assert_eq!(memory.guest.read_obj::<u64>(GuestAddress(4096)).unwrap(), left);
        }
    }
}
