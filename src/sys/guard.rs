//! A process that outlives this one by a moment, to remove the names of its sockets: a confined VMM may unlink nothing, and
//! one that is killed cannot.
//!
//! It is forked before there are threads, guest memory or a sandbox. It closes every descriptor, hears no signal but
//! SIGKILL, belongs to no terminal, and reads nothing that the VMM could write: it only waits for its end.

use std::io;

use super::socket::Name;

/// Starts the guard of `names`. It removes those that are sockets on which nobody listens any more.
pub fn start(names: Vec<Name>) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    // Unlike the end of a pipe, which may come before, a pidfd becomes readable when everything of the process is closed.
    // SAFETY: takes numbers only.
    let this = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) } as libc::c_int;
    if this < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the child calls nothing that allocates or locks, so it does not matter what other threads were doing.
    match unsafe { libc::fork() } {
        0 => watch(this, &names),
        child => {
            let result = if child < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
            // SAFETY: it was opened above and given to nobody.
            unsafe { libc::close(this) };
            result
        }
    }
}

fn watch(process: libc::c_int, names: &[Name]) -> ! {
    // SAFETY: calls with numbers and with pointers to what lives until the end; no other thread is in this process. Every
    // descriptor but the pidfd is closed for good, and nobody here owns one of them.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_NAME, c"vellum-guard".as_ptr());
        libc::setsid();
        libc::dup2(process, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        let mut end = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
        while libc::poll(&mut end, 1, -1) < 1 {}
    }
    for name in names {
        // What cannot be removed is found stale by the next to want it.
        let _ = name.remove_stale();
    }
    // SAFETY: ends the process without running anything.
    unsafe { libc::_exit(0) }
}
