//! abort(3) of static programs.
//!
//! musl's abort(3) raises SIGABRT with tkill(2), which can signal a thread of any process. A filter
//! can check the target process only for tgkill(2), so the sandbox forbids tkill. This version uses
//! tgkill and replaces musl's when the program is linked.

/// Ends the process with SIGABRT.
#[unsafe(no_mangle)]
extern "C" fn abort() -> ! {
    // SAFETY: the set is initialized before it is used. Each call takes numbers and pointers to
    // locals and is async-signal-safe. SIGABRT has no handler here, so the signal ends the process.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGABRT);
        libc::signal(libc::SIGABRT, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), libc::SIGABRT);
        libc::_exit(128 + libc::SIGABRT)
    }
}
