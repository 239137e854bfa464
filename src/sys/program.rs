//! The program's own code, as the kernel maps it.

use std::time::Duration;

/// How long nothing must have happened before start-up counts as over.
pub const SETTLING: Duration = Duration::from_millis(50);

unsafe extern "C" {
    // The linker's: where the program's headers start and where its code ends.
    static __executable_start: u8;
    static etext: u8;
}

/// Unmaps the program's code and constants; what is still needed comes back from the page cache by minor faults.
///
/// Starting up runs code that is scattered over the whole file, and the kernel maps the pages around each fault too: in the
/// end nearly all of the program counts as this process's, of which a running guest needs little. A debugger's
/// breakpoints, which are private copies of pages, go as well: set them after this.
pub fn release_start_up_code() {
    let (start, end) = (&raw const __executable_start as usize, &raw const etext as usize);
    // Whole pages: on the last one something may begin that is written to.
    let end = end & !(super::mmap::PAGE_SIZE as usize - 1);
    // SAFETY: everything between the two symbols is mapped from the program's file, never written, and so the same when it
    // is read again. Failure (gaps between the segments) does no harm.
    unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
}
