//! Signals that the program's parent ignores.

/// The signals that shells ignore for background jobs, the one that nohup(1) ignores, and those of
/// the C library. Cargo starts test programs with glibc's posix_spawn, which ignores 32 and 33 in
/// each child.
const INHERITED: [libc::c_int; 6] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, 32, 33, 34];

/// Gives each signal of [`INHERITED`] its default action if this process was started with the
/// signal ignored. An ignored signal stays ignored across execve(2). Without this, a `vellum
/// migrate` that a test starts would not end by SIGINT, and the test would wait for ever.
pub(crate) fn restore() {
    for signal in INHERITED {
        // The kernel's own struct, because musl refuses its internal signals: handler, flags,
        // restorer and mask.
        let (mut action, default) = ([0_u64; 4], [0_u64; 4]);
        let none = std::ptr::null_mut::<u64>();
        // SAFETY: the arrays are as large as the struct, and outlive the calls. No signal handler
        // is replaced.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, none, action.as_mut_ptr(), 8);
            if action[0] == libc::SIG_IGN as u64 {
                libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), none, 8);
            }
        }
    }
}
