//! Signals that the program's parent ignores.

/// The signals that shells ignore for jobs in the background, and the one that nohup(1) ignores.
const INHERITED: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Gives each of [`INHERITED`] its default action where this process was started with the signal ignored. An ignored
/// signal stays ignored across execve(2): a `vellum migrate` that a test starts would not end by SIGINT, and the test
/// would wait for ever.
pub(crate) fn restore() {
    for signal in INHERITED {
        // SAFETY: an all-zero sigaction is valid, and both pointers are to locals or null. No signal handler is replaced.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction == libc::SIG_IGN {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}
