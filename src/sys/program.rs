//! The program's own code, as the kernel maps it.

use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::thread::CapabilitySet;

use super::identity;
use super::mmap::host_page;

/// Has the program of `command` inherit these descriptors by their numbers, and belong to no terminal: it may read and write one that it
/// is given, whoever is in its foreground.
pub fn detached_with(command: &mut Command, descriptors: Vec<RawFd>) {
    let prepare = move || {
        // One that leads a session already belongs to no other terminal.
        let _ = rustix::process::setsid();
        for &descriptor in &descriptors {
            // SAFETY: the caller has it open, and so has the process that is made of this one.
            rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(descriptor) }, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: it makes system calls, allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Has the program of `command`, where root starts it, get no capabilities but `kept`.
pub fn limited_to(command: &mut Command, kept: CapabilitySet) {
    let prepare = move || {
        identity::limit_bounding_set(kept);
        Ok(())
    };
    // SAFETY: it makes system calls with numbers, allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// How long nothing must have happened before start-up counts as over.
pub const SETTLING: Duration = Duration::from_millis(50);

/// Unmaps the program's code and constants; what is still needed comes back from the page cache by minor faults.
///
/// Starting up runs code that is scattered over the whole file, and the kernel maps the pages around each fault too: in the
/// end nearly all of the program counts as this process's, of which a running guest needs little. A debugger's
/// breakpoints, which are private copies of pages, go as well: set them after this.
pub fn release_start_up_code() {
    // SAFETY: the callback has the type that is asked for, and gets a pointer that it does not use.
    unsafe { libc::dl_iterate_phdr(Some(release), std::ptr::null_mut()) };
}

/// Unmaps what an object of this process was loaded with and cannot have written to. Not 0, so that the first, which is the
/// program, is the last.
///
/// Its program headers are asked, and not the linker's symbols, because linkers do not agree on whether constants come before or
/// after code.
extern "C" fn release(
    object: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    _data: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: the C library passes a description that is whole, with so many program headers, for the time of this call.
    let (base, headers) = unsafe {
        let object = &*object;
        (object.dlpi_addr, std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()))
    };
    // The headers themselves are in the first segment: what is read of them comes back.
    for header in headers.iter().rev() {
        if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = (base + header.p_vaddr) & !(host_page() - 1);
        let end = (base + header.p_vaddr + header.p_memsz).next_multiple_of(host_page());
        // SAFETY: the pages of a segment that may not be written to are the file's own, and so the same when they are read again.
        // Another segment, which may be written to, begins on a page of its own. Failure does no harm.
        unsafe { libc::madvise(start as *mut libc::c_void, (end - start) as usize, libc::MADV_DONTNEED) };
    }
    1
}
