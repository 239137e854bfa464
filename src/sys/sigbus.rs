//! Files that are mapped as memory and become shorter. An access to the lost part raises SIGBUS, or
//! returns EFAULT if KVM makes it. Both end the process with a line that names the file.

use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::seccomp::{exit_now, write_stderr};
use super::terminal;

/// A file that is mapped from its start to its end.
struct Watched {
    file: File,
    len: u64,
    name: String,
}

static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

/// The line that the handler writes. It names all watched files, because the handler cannot find
/// out which one it was.
static LINE: AtomicPtr<String> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn report(_: libc::c_int) {
    terminal::restore();
    let line = LINE.load(Ordering::Acquire);
    if !line.is_null() {
        // SAFETY: a stored line is never freed or modified.
        write_stderr(unsafe { (*line).as_bytes() });
    }
    exit_now(1)
}

/// Installs the handler. Call it before a sandbox without rt_sigaction(2).
///
/// # Errors
/// The kernel's error.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid: no flags, an empty mask, and a handler that only
    // makes async-signal-safe calls.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = report as *const () as usize;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reports `file`, of `len` bytes, as `name` if it becomes shorter. The file stays open, with its
/// locks.
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

/// The name of a watched file that has become shorter.
pub fn shortened() -> Option<String> {
    let watched = WATCHED.lock().expect("nobody panics with it");
    let is_shorter = |watched: &&Watched| watched.file.metadata().is_ok_and(|data| data.len() < watched.len);
    watched.iter().find(is_shorter).map(|watched| watched.name.clone())
}
