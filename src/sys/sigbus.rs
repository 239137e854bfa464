//! Files that are mapped as memory and become shorter: an access to what they have lost is a SIGBUS, and EFAULT where KVM makes it. Both end
//! the process, with a line that names the file.

use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::seccomp::{exit_now, write_stderr};

/// A file that is mapped, from its start to its end.
struct Watched {
    file: File,
    len: u64,
    name: String,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// What the handler writes: of the last file that was watched, or of all, for it cannot ask.
static LINE: AtomicPtr<String> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn report(_: libc::c_int) {
    let line = LINE.load(Ordering::Acquire);
    if !line.is_null() {
        // SAFETY: what is stored there is never freed, and not written to.
        write_stderr(unsafe { (*line).as_bytes() });
    }
    exit_now(1)
}

/// Installs the handler: before a sandbox that has no rt_sigaction(2).
///
/// # Errors
/// What the kernel says.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid: no flags, an empty mask, and a handler that calls what a handler may.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = report as *const () as usize;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Names `file`, of `len` bytes, where it becomes shorter. It stays open, with its locks.
pub fn watch(file: File, len: u64, name: String) {
    let mut watched = WATCHED.lock().expect("nobody panics with it");
    watched.push(Watched { file, len, name });
    let names: Vec<&str> = watched.iter().map(|watched| watched.name.as_str()).collect();
    let line = format!(
        "vellum: {} became shorter while it was mapped: the guest's memory is gone\n",
        names.join(" or ")
    );
    LINE.store(Box::into_raw(Box::new(line)), Ordering::Release);
}

/// The name of a file that has become shorter.
pub fn shortened() -> Option<String> {
    let watched = WATCHED.lock().expect("nobody panics with it");
    let is_shorter = |watched: &&Watched| watched.file.metadata().is_ok_and(|data| data.len() < watched.len);
    watched.iter().find(is_shorter).map(|watched| watched.name.clone())
}
