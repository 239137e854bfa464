//! How programs are started, and the memory of this program's own code.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::thread::CapabilitySet;

use super::identity;
use super::mmap::host_page;

/// A command for this program, which may have been replaced on disk since it was started.
///
/// # Errors
/// /proc is not there.
pub fn own() -> io::Result<Command> {
    const RUNNING: &str = "/proc/self/exe";
    let (path, number) = (std::env::current_exe()?, |about: Metadata| (about.dev(), about.ino()));
    let is_same = fs::metadata(&path).map(number).ok() == fs::metadata(RUNNING).map(number).ok();
    let mut command = Command::new(if is_same { path.as_path() } else { Path::new(RUNNING) });
    command.arg0(std::env::args_os().next().unwrap_or_else(|| "vellum".into()));
    Ok(command)
}

/// Whether a directory of PATH has a file of this name.
pub fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
}

/// Lets the program of `command` inherit these descriptors under the same numbers, without a
/// controlling terminal. It may then read and write a terminal that it is given, whichever process
/// group is in the foreground. Other descriptors than the standard ones are closed (Linux 5.11):
/// the program outlives this process, and would keep them open.
pub fn detached_with(command: &mut Command, descriptors: Vec<RawFd>) {
    let prepare = move || {
        // This fails for a session leader, which has no other session's terminal.
        let _ = rustix::process::setsid();
        // SAFETY: takes numbers only. What is marked is closed when the program begins, and by
        // nobody before.
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        for &descriptor in &descriptors {
            // SAFETY: the caller keeps it open, and the forked process has it too.
            rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(descriptor) }, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: it makes system calls, allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Limits the program of `command` to the capabilities `kept`, if root starts it.
pub fn limited_to(command: &mut Command, kept: CapabilitySet) {
    let prepare = move || {
        identity::limit_bounding_set(kept);
        Ok(())
    };
    // SAFETY: it makes system calls with numbers, allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Start-up counts as over after this time without activity.
pub const SETTLING: Duration = Duration::from_millis(50);

/// Unmaps the program's code and constants. What is still needed comes back from the page cache
/// through minor faults.
///
/// Start-up runs code that is scattered over the whole file, and the kernel also maps the pages
/// around each fault. In the end nearly all of the program counts towards this process, although a
/// running guest needs little of it. A debugger's breakpoints are private copies of pages and are
/// lost too: set them after this call.
pub fn release_start_up_code() {
    // SAFETY: the callback has the required type, and gets a null pointer that it does not use.
    unsafe { libc::dl_iterate_phdr(Some(release), std::ptr::null_mut()) };
}

/// Unmaps the segments of the first object, the program, that the process cannot have written to.
/// Returns 1, which ends the iteration after that object.
///
/// This uses the program headers instead of the linker's symbols, because linkers differ in whether
/// constants come before or after code.
extern "C" fn release(
    object: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    _data: *mut libc::c_void,
) -> libc::c_int {
    // SAFETY: the C library passes a complete description with that many program headers. It is
    // valid for this call.
    let (base, headers) = unsafe {
        let object = &*object;
        (object.dlpi_addr, std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()))
    };
    // The headers themselves are in the first segment: pages of them that are read come back.
    for header in headers.iter().rev() {
        if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = (base + header.p_vaddr) & !(host_page() - 1);
        let end = (base + header.p_vaddr + header.p_memsz).next_multiple_of(host_page());
        // SAFETY: the pages of a segment that is not writable are the file's own, so they are the
        // same when they are read again. A writable segment begins on a page of its own. Failure
        // does no harm.
        unsafe { libc::madvise(start as *mut libc::c_void, (end - start) as usize, libc::MADV_DONTNEED) };
    }
    1
}
