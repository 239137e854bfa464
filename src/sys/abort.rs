//! abort(3) of static programs.
//!
//! musl's raises SIGABRT by tkill(2), which takes a thread of any process. A filter can check the process of tgkill(2) alone, so
//! the sandbox forbids tkill, and this raises by tgkill. It stands in for musl's when the program is linked.

/// Ends the process by SIGABRT.
#[unsafe(no_mangle)]
extern "C" fn abort() -> ! {
    // SAFETY: the set is initialized before it is used; each call takes numbers and pointers to locals, and a signal handler may make it.
    // Nobody handles SIGABRT here, so that the signal ends the process.
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
