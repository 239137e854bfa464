//! Memory mappings with a chosen alignment, and the advice given about them.
//!
//! What a mapping is used for is decided elsewhere (`memory/`).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, memfd_create};
use rustix::io::Errno;

use crate::{seccomp, terminal};

/// The size of the pages in which memory is tracked, sent and stored: the smallest page size of any
/// host. A [`host_page`] holds one or more of them.
pub const PAGE_SIZE: u64 = 4096;

/// The size of this host's pages: 4 KiB, or on Arm 16 or 64 KiB, depending on its kernel. Mappings,
/// and ranges of them that are passed to the kernel, begin and end on a host page. KVM's logs count
/// in host pages.
pub fn host_page() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: takes a number only.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(size).unwrap_or(PAGE_SIZE).max(PAGE_SIZE)
    })
}

/// The alignment in bytes that makes a large copy fast.
const CACHE_LINE: usize = 64;

/// A mapping that lives until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    /// Whether its pages stay, even if a guest reports them as free.
    kept: AtomicBool,
    /// Whether all of its pages are there.
    complete: AtomicBool,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` gives access to its content through atomics (`words`), which threads
// may share, or through a raw pointer (`as_ptr`), whose users state their own reasons.
unsafe impl Sync for Mapping {}

/// The kind of memory to map.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Anonymous and private, without a reservation of swap or overcommit.
    Anonymous,
    /// Anonymous and private from the pool of huge pages of `1 << log2` bytes. The call reserves
    /// all of them.
    Huge {
        /// The base-2 logarithm of the page size.
        log2: u32,
    },
    /// Anonymous and shared: a file on the kernel's internal tmpfs without a descriptor.
    SharedAnonymous,
    /// `MAP_SHARED` of a file, from its start.
    Shared(&'a File),
    /// `MAP_PRIVATE` of a file from its start: a page that is written to parts from it.
    Private {
        /// The file.
        file: &'a File,
        /// Its pages. Those of the pool are reserved by the call.
        pages: Pages,
    },
}

/// The pages of a file in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The host's pages.
    Small,
    /// The host's pages, and transparent huge pages where the host has them for files in memory.
    Transparent,
    /// Huge pages of the pool.
    Pool,
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A private mapping of a file. Huge pages of the pool are reserved, so that a write never finds
/// none (SIGBUS).
fn private(pages: Pages) -> libc::c_int {
    libc::MAP_PRIVATE | if pages == Pages::Pool { 0 } else { libc::MAP_NORESERVE }
}

impl Mapping {
    /// Maps `len` bytes, readable and writable. The address is a multiple of `align`, a power of
    /// two, and of the host's page.
    pub fn new(len: u64, align: u64, source: Source<'_>) -> io::Result<Self> {
        let too_big = || io::Error::from_raw_os_error(libc::ENOMEM);
        let len = usize::try_from(len).map_err(|_| too_big())?;
        let align = usize::try_from(align.max(host_page())).map_err(|_| too_big())?;
        let (flags, fd) = match source {
            Source::Anonymous => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
            Source::Huge { log2 } => {
                let size = (log2 as libc::c_int) << libc::MAP_HUGE_SHIFT;
                (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size, -1)
            }
            Source::SharedAnonymous => (libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
            // Only a file of the pool's huge pages reserves memory here. Another mapping of it
            // reserves nothing more.
            Source::Shared(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            Source::Private { file, pages } => (private(pages), file.as_raw_fd()),
        };
        // The kernel aligns to a page only. So reserve enough address space to contain an aligned
        // range, map over that range, and unmap the rest.
        let span = len.checked_add(align).ok_or_else(too_big)?;
        // SAFETY: a new reservation at an address that the kernel chooses disturbs nothing.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                span,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = (reserved as usize).next_multiple_of(align);
        // SAFETY: [start, start + len) lies inside the reservation made above, which nothing else
        // uses yet.
        let addr = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        if addr == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: the whole reservation is ours and holds nothing.
            unsafe { libc::munmap(reserved, span) };
            return Err(error);
        }
        let end = (start + len).next_multiple_of(host_page() as usize);
        let (head, tail) = (start - reserved as usize, (reserved as usize + span).saturating_sub(end));
        // SAFETY: head and tail are the parts of our reservation outside the mapping, which extends
        // to the end of a page.
        unsafe {
            if head > 0 {
                libc::munmap(reserved, head);
            }
            if tail > 0 {
                libc::munmap(end as *mut libc::c_void, tail);
            }
        }
        let addr = NonNull::new(addr.cast()).ok_or_else(too_big)?;
        Ok(Self { addr, len, kept: AtomicBool::new(false), complete: AtomicBool::new(true) })
    }

    /// The start address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.addr.as_ptr()
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never true: the kernel maps no empty range.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The content as words that other threads, the kernel and the guest may change at any time.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, readable and writable, and lives as long as the
        // borrow. This program creates no other references to its content. The other accesses are
        // those of guests and the kernel, which are not Rust, and those of vm-memory, which are
        // volatile and go through raw pointers.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len / 8) }
    }

    /// Copies `to.len()` bytes from `offset` on. Both are multiples of 8. If the range is written
    /// to meanwhile, each word copied is an old or a new one.
    ///
    /// # Panics
    /// The range is not inside the mapping.
    pub fn copy_to(&self, offset: u64, to: &mut [u8]) {
        let words = self.words_in(offset, to.len());
        if !(to.as_ptr() as usize).is_multiple_of(CACHE_LINE) {
            // glibc copies large blocks with `rep movsb`. With an unaligned target that takes
            // several times as long as this loop.
            let (copies, _) = to.as_chunks_mut();
            for (bytes, word) in copies.iter_mut().zip(words) {
                *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            }
            return;
        }
        // SAFETY: both are valid for that many bytes and do not overlap, because nothing else holds
        // references to a mapping's content. Guests and the kernel may write to the source
        // meanwhile. Any byte is a valid u8, and nothing is read twice.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast(), to.as_mut_ptr(), to.len()) };
    }

    /// Writes `from` to `offset`, while others may read and write there. The length and the offset
    /// are multiples of 8.
    ///
    /// # Panics
    /// The range is not inside the mapping.
    pub fn copy_from(&self, offset: u64, from: &[u8]) {
        let words = self.words_in(offset, from.len());
        // SAFETY: both are valid for that many bytes and do not overlap, because nothing else holds
        // references to a mapping's content. `words` are atomics, which may be written to through a
        // shared reference. Guests and the kernel may access the range meanwhile; synchronizing
        // that is up to them.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), words.as_ptr().cast_mut().cast(), from.len()) };
    }

    fn words_in(&self, offset: u64, len: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && len.is_multiple_of(8), "{len} bytes at {offset}: not in words");
        &self.words()[offset as usize / 8..][..len / 8]
    }

    /// `madvise` over the whole mapping.
    pub fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        self.advise_range(0, self.len as u64, advice)
    }

    /// `madvise` over `[offset, offset + len)`, which must lie inside.
    pub fn advise_range(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len as u64);
        if end.is_none() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the range lies inside our own mapping, and no advice unmaps it. Some advice
        // changes the content (MADV_DONTNEED, MADV_REMOVE), as other writers may do at any time
        // too.
        check(unsafe { libc::madvise(self.as_ptr().add(offset as usize).cast(), len as usize, advice) })
    }

    /// Maps `[from, from + len)` of `file` at `[offset, offset + len)`. The mapping is private, so
    /// a write detaches a page from the file. All three are multiples of [`host_page`].
    ///
    /// # Errors
    /// The range is not inside, or the kernel refuses. The most likely reason is the limit on
    /// mappings (vm.max_map_count).
    pub fn show(&self, offset: u64, len: u64, file: &File, from: u64) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len as u64 && len > 0);
        if end.is_none() || !(offset | len | from).is_multiple_of(host_page()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the new mapping replaces a range inside our own mapping, with the same access.
        // Its content changes as others may change it at any time, and it is only accessed as
        // atomics and through raw pointers. A file that becomes shorter causes a SIGBUS, which ends
        // the process (sys/sigbus.rs).
        let at = unsafe {
            libc::mmap(
                self.as_ptr().add(offset as usize).cast(),
                len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                from as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.advise_range(offset, len, libc::MADV_DONTDUMP)
    }

    /// Replaces `[offset, offset + len)`, whose content is that of the same range of `file`, by a
    /// private mapping of this range. A write then copies the page. A concurrent access finds the
    /// old mapping or the new one: the new one is made elsewhere and moved over the old one. If the
    /// file's `pages` are those of the pool, all of them are reserved. The range is left out of core
    /// dumps. All are multiples of the file's pages.
    ///
    /// mremap(2) unmaps the target before it looks at the mapping that it moves. If it then fails,
    /// nothing is mapped in the range, and the process ends: the next mapping of this process could
    /// be placed there, where KVM lets the guest write. Linux before 5.16 cannot move mappings of
    /// the pool's huge pages at all, so that is tried elsewhere first.
    ///
    /// # Errors
    /// The range is not inside, the pool lacks huge pages, the process has too many mappings, or the
    /// kernel cannot move the new mapping. The old mapping stays.
    pub fn part(&self, offset: u64, len: u64, file: &File, pages: Pages) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len as u64 && len > 0);
        if end.is_none() || !(offset | len).is_multiple_of(host_page()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        if pages == Pages::Pool {
            can_move(file, len)?;
        }
        let (access, length) = (libc::PROT_READ | libc::PROT_WRITE, len as usize);
        // SAFETY: a new mapping at an address that the kernel chooses changes no other.
        let made = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                access,
                private(pages),
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if made == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping made above. No advice here drops content.
        let advise = |advice| check(unsafe { libc::madvise(made, length, advice) });
        let advised = advise(libc::MADV_DONTDUMP);
        // These fail on a kernel without huge pages, which needs no advice.
        let _ = match pages {
            Pages::Small => advise(libc::MADV_NOHUGEPAGE),
            Pages::Transparent => advise(libc::MADV_HUGEPAGE),
            Pages::Pool => Ok(()),
        };
        // SAFETY: the target is inside this mapping. The new mapping has the same access and the
        // same content, as file and offset are the same.
        let moved = advised.and_then(|()| unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            match libc::mremap(made, length, length, flags, self.as_ptr().add(offset as usize)) {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
        if let Err(error) = &moved {
            // This changes nothing. It fails where nothing is mapped.
            let is_there = self.advise_range(offset, len, libc::MADV_NORMAL);
            if is_there.is_err_and(|error| error.raw_os_error() == Some(libc::ENOMEM)) {
                self.lose(offset, length, error);
            }
            // SAFETY: the mapping made above has not moved and has no users.
            unsafe { libc::munmap(made, length) };
        }
        moved
    }

    /// Ends the process, because the range at `offset` is not mapped any more.
    fn lose(&self, offset: u64, length: usize, error: &io::Error) -> ! {
        // Until the process has ended, no other mapping is placed there.
        // SAFETY: the range belongs to this mapping, and nothing else is mapped there.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            libc::mmap(self.as_ptr().add(offset as usize).cast(), length, libc::PROT_NONE, flags, -1, 0);
        }
        terminal::restore();
        let why = format!("vellum: the guest's memory is lost: mremap: {error}\n");
        seccomp::write_stderr(why.as_bytes());
        seccomp::exit_now(1)
    }

    /// Faults in `[offset, offset + len)` for writing, so that a shortage is an error here and not
    /// a signal later.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.advise_range(offset, len, libc::MADV_POPULATE_WRITE) {
            // Linux before 5.14 lacks this advice: touch each page without changing it. A mapping
            // of a pool's huge pages has reserved them, so this causes no signal.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                let page = PAGE_SIZE as usize / 8;
                let range = offset as usize / 8..offset.saturating_add(len) as usize / 8;
                let Some(words) = self.words().get(range) else { return Err(e) };
                // If the compiler knew the value, it would turn this into a load and drop it.
                let nothing = std::hint::black_box(0);
                for word in words.iter().step_by(page) {
                    word.fetch_or(nothing, Ordering::Relaxed);
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Whether its pages must not be given back to the host, whatever a guest says of them. While
    /// memory is still arriving, a page that was given back would look like one that is missing.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Acquire)
    }

    /// Sets whether its pages must stay.
    pub fn keep(&self, kept: bool) {
        self.kept.store(kept, Ordering::Release);
    }

    /// Whether all of its pages are there. A page that is missing is fetched when it is accessed
    /// through this mapping. The file behind it has zeroes there.
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// Sets whether all of its pages are there.
    pub fn set_complete(&self, complete: bool) {
        self.complete.store(complete, Ordering::Release);
    }

    /// Unlocks it from memory.
    pub fn unlock(&self) -> io::Result<()> {
        // SAFETY: locking changes no content, and the range is ours.
        check(unsafe { libc::munlock(self.as_ptr().cast(), self.len) })
    }

    /// Locks it in memory. With `on_fault`, a page is locked only once it is touched.
    pub fn lock(&self, on_fault: bool) -> io::Result<()> {
        let flags = if on_fault { libc::MLOCK_ONFAULT } else { 0 };
        // SAFETY: locking changes no content, and the range is ours.
        check(unsafe { libc::mlock2(self.as_ptr().cast(), self.len, flags as libc::c_uint) })
    }
}

/// Checks that the kernel can move a mapping of `len` bytes of `file`, whose pages are those of the
/// pool. A smaller mapping of it is moved to where nothing is.
///
/// # Errors
/// It cannot, or the process has too many mappings.
fn can_move(file: &File, len: u64) -> io::Result<()> {
    // A multiple of the pool's pages. Without a reservation it takes none of them.
    let align = 1 << len.trailing_zeros();
    let tried = Mapping::new(align, align, Source::Private { file, pages: Pages::Small })?;
    let scratch = Mapping::new(align, align, Source::Anonymous)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: nothing uses either mapping.
    let moved = unsafe { libc::mremap(tried.as_ptr().cast(), tried.len, tried.len, flags, scratch.as_ptr()) };
    if moved != libc::MAP_FAILED {
        // It is where the scratch mapping was, which is dropped in its place.
        std::mem::forget(tried);
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // Its range may be another thread's by now.
    std::mem::forget(scratch);
    match error.raw_os_error() {
        Some(libc::EINVAL) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel cannot move huge pages of the pool, as Linux 5.16 and later can",
        )),
        _ => Err(error),
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours. All users of its content hold this value, by a borrow or by
        // an `Arc`, as memslots (`memory::Slot`) and vm-memory's regions (by
        // `memory::write_log::WriteLog`) do.
        unsafe { libc::munmap(self.as_ptr().cast(), self.len) };
    }
}

/// An anonymous file in memory, `len` bytes long. With `huge_log2`, its pages have `1 << huge_log2`
/// bytes.
pub fn memfd(name: &CStr, len: u64, huge_log2: Option<u32>) -> io::Result<File> {
    memfd_with(name, len, huge_log2, MemfdFlags::empty())
}

fn memfd_with(name: &CStr, len: u64, huge_log2: Option<u32>, more: MemfdFlags) -> io::Result<File> {
    // The upper bits of the flags hold the logarithm of the page size.
    let size = |log2| MemfdFlags::from_bits_retain(log2 << libc::MAP_HUGE_SHIFT);
    let huge = huge_log2.map_or(MemfdFlags::empty(), |log2| MemfdFlags::HUGETLB | size(log2));
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | huge | more)?);
    file.set_len(len)?;
    Ok(file)
}

/// Like `memfd`, but its length can no longer be changed, and no seal can be added.
///
/// # Errors
/// The kernel's error.
pub fn sealed_memfd(name: &CStr, len: u64, huge_log2: Option<u32>) -> io::Result<File> {
    let file = freezable_memfd(name, len, huge_log2)?;
    fcntl_add_seals(&file, SealFlags::SEAL)?;
    Ok(file)
}

/// Like `memfd`, but empty. It can be [frozen](freeze) later.
///
/// # Errors
/// Fails as the kernel does.
pub fn empty_memfd(name: &CStr) -> io::Result<File> {
    memfd_with(name, 0, None, MemfdFlags::ALLOW_SEALING)
}

/// Like `memfd`, but its length can no longer be changed. It can be [frozen](freeze) later.
///
/// # Errors
/// Fails as the kernel does.
pub fn freezable_memfd(name: &CStr, len: u64, huge_log2: Option<u32>) -> io::Result<File> {
    let file = memfd_with(name, len, huge_log2, MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// How often [`freeze`] tries. While pages are held, the kernel itself waits about 80 ms in each try.
/// It refuses at once if there is a mapping.
const FREEZE_TRIES: u32 = 25;

/// The seals of a file that never changes again.
const FROZEN: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Seals `file` against writes and against another length, forever. Does nothing if it is sealed so
/// already.
///
/// The kernel also refuses as long as anything holds a page of the file, because that could be a
/// write. On a busy host its own reclaim or migration of pages may do so for a moment.
///
/// # Errors
/// EBUSY: a shared mapping can write to it, or its pages are held for seconds. EPERM: it does not
/// allow more seals.
pub fn freeze(file: &File) -> io::Result<()> {
    freeze_by(file, || ())
}

/// [`freeze`], with what happens before each further try.
fn freeze_by(file: &File, mut again: impl FnMut()) -> io::Result<()> {
    if is_frozen(file)? {
        return Ok(());
    }
    for _ in 1..FREEZE_TRIES {
        match fcntl_add_seals(file, FROZEN) {
            Err(Errno::BUSY) => again(),
            other => return Ok(other?),
        }
    }
    Ok(fcntl_add_seals(file, FROZEN)?)
}

/// Whether `file` is sealed against writes.
///
/// # Errors
/// EINVAL: it is no memfd.
pub fn is_frozen(file: &File) -> io::Result<bool> {
    Ok(fcntl_get_seals(file)?.contains(SealFlags::WRITE))
}

/// Whether `file` is frozen or can be.
///
/// # Errors
/// EINVAL: it is no memfd.
pub fn can_be_frozen(file: &File) -> io::Result<bool> {
    let seals = fcntl_get_seals(file)?;
    Ok(seals.contains(SealFlags::WRITE) || !seals.contains(SealFlags::SEAL))
}

/// Whether `file` can no longer be made shorter. An access to its mapping then never faults.
///
/// # Errors
/// EINVAL if it is not a file in memory.
pub fn seals_hold(file: &File) -> io::Result<bool> {
    Ok(fcntl_get_seals(file)?.contains(SealFlags::SHRINK))
}

/// The page size of a file in memory, if its pages are huge pages of the host's pool.
///
/// # Errors
/// The kernel's error.
pub fn huge_pages_of(file: &File) -> io::Result<Option<u64>> {
    let of = fstatfs(file)?;
    Ok((of.f_type as i64 == HUGETLBFS).then_some(of.f_bsize as u64))
}

/// HUGETLBFS_MAGIC (include/uapi/linux/magic.h).
const HUGETLBFS: i64 = 0x9584_58f6;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_mapping_is_aligned_and_zero() {
        let align = 2 << 20;
        let map = Mapping::new(3 * PAGE_SIZE, align, Source::Anonymous).unwrap();
        assert_eq!(map.as_ptr() as u64 % align, 0);
        assert_eq!(map.words()[2 * 512].load(Ordering::Relaxed), 0);
        assert!(map.advise_range(PAGE_SIZE, 3 * PAGE_SIZE, libc::MADV_NORMAL).is_err());
        map.populate(0, map.len()).unwrap();
        assert!(map.populate(PAGE_SIZE, u64::MAX).is_err());
    }

    #[test]
    fn nothing_is_left_of_the_reservation() {
        let page = PAGE_SIZE as usize;
        let map = Mapping::new(PAGE_SIZE + 8, 16 * PAGE_SIZE, Source::Anonymous).unwrap();
        let after = map.as_ptr() as usize + 2 * page;
        let reserved = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| {
                let bound = |at: &str| usize::from_str_radix(at, 16).unwrap();
                let range = line.split(' ').next().and_then(|range| range.split_once('-')).unwrap();
                (bound(range.0)..bound(range.1)).contains(&after) && line.contains("---p")
            })
        };
        // Another test's reservation may be there for a moment. A leftover of this one would stay.
        assert!((0..100).any(|_| !reserved()), "{after:#x} is still reserved");
    }

    #[test]
    fn bytes_are_copied_wherever_their_other_end_lies() {
        let map = Mapping::new(2 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap();
        let bytes: Vec<u8> = (0..4096 + 64).map(|at| (at * 7 % 251) as u8).collect();
        for at in 0..64 {
            map.copy_from(64, &bytes[at..at + 4096]);
            let mut back = vec![0; 4096 + 64];
            map.copy_to(64, &mut back[at..at + 4096]);
            assert_eq!(back[at..at + 4096], bytes[at..at + 4096], "{at}");
        }
        for (offset, len) in [(PAGE_SIZE, 4104), (2 * PAGE_SIZE, 8), (u64::MAX - 7, 8), (4, 8), (8, 4)] {
            let refused = std::panic::catch_unwind(|| map.copy_to(offset, &mut vec![0; len]));
            assert!(refused.is_err(), "{len} bytes at {offset:#x}");
        }
    }

    #[test]
    fn what_parts_from_a_file_keeps_its_content_and_lets_the_file_be_frozen() {
        let len = 4 * PAGE_SIZE;
        let file = freezable_memfd(c"vellum-test", len, None).unwrap();
        let map = Mapping::new(len, PAGE_SIZE, Source::Shared(&file)).unwrap();
        let other =
            Mapping::new(len, PAGE_SIZE, Source::Private { file: &file, pages: Pages::Small }).unwrap();
        let word = |map: &Mapping, page: usize| map.words()[page * 512].load(Ordering::Relaxed);
        (0..4).for_each(|page| map.words()[page * 512].store(page as u64 + 1, Ordering::Relaxed));
        let part = |offset, len| map.part(offset, len, &file, Pages::Small);
        part(0, 2 * PAGE_SIZE).unwrap();
        let busy = freeze(&file).unwrap_err();
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
        // What is still shared is seen by all, and what has parted by nobody else.
        map.words()[512].store(7, Ordering::Relaxed);
        map.words()[3 * 512].store(8, Ordering::Relaxed);
        assert_eq!([0, 1, 2, 3].map(|page| word(&other, page)), [1, 2, 3, 8]);
        part(2 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        freeze(&file).unwrap();
        freeze(&file).unwrap();
        assert!(is_frozen(&file).unwrap() && can_be_frozen(&file).unwrap() && seals_hold(&file).unwrap());
        assert_eq!([0, 1, 2, 3].map(|page| word(&map, page)), [1, 7, 3, 8]);
        map.words()[2 * 512].store(9, Ordering::Relaxed);
        assert_eq!([0, 1, 2, 3].map(|page| word(&other, page)), [1, 2, 3, 8]);
        assert!(part(3 * PAGE_SIZE, 2 * PAGE_SIZE).is_err() && part(8, PAGE_SIZE).is_err());
        let sealed = sealed_memfd(c"vellum-test", len, None).unwrap();
        assert!(!can_be_frozen(&sealed).unwrap() && freeze(&sealed).is_err());
    }

    /// A pipe holds the page that was spliced into it, as reclaim does for a moment.
    #[test]
    fn a_file_with_a_page_that_is_held_for_a_moment_is_frozen() {
        let file = freezable_memfd(c"vellum-test", PAGE_SIZE, None).unwrap();
        file.write_all_at(&[7; 4096], 0).unwrap();
        let map =
            Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Private { file: &file, pages: Pages::Small }).unwrap();
        assert_eq!(map.words()[0].load(Ordering::Relaxed), 0x0707_0707_0707_0707);
        let (mut reader, writer) = io::pipe().unwrap();
        let page = libc::iovec { iov_base: map.words().as_ptr().cast_mut().cast(), iov_len: 4096 };
        // SAFETY: the page is mapped, and the kernel only reads it.
        assert_eq!(unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const page, 1, 0) }, 4096);
        let mut tries = 0;
        freeze_by(&file, || {
            tries += 1;
            if tries == 2 {
                reader.read_exact(&mut [0; 4096]).unwrap();
            }
        })
        .unwrap();
        assert!(tries >= 2 && is_frozen(&file).unwrap());
    }

    #[test]
    fn shared_files_show_through() {
        let file = memfd(c"vellum-test", PAGE_SIZE, None).unwrap();
        let one = Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Shared(&file)).unwrap();
        let two = Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Shared(&file)).unwrap();
        one.words()[3].store(7, Ordering::Relaxed);
        assert_eq!(two.words()[3].load(Ordering::Relaxed), 7);
    }
}
