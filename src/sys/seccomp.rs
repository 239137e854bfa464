//! seccomp(2): installs a filter and reports its violations. `sandbox/` decides what is allowed.

use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void, siginfo_t, sock_filter, sock_fprog, ucontext_t};

/// A system call that a filter has trapped.
#[derive(Clone, Copy, Debug)]
pub struct Trapped {
    /// The system call's number.
    pub number: i32,
    /// Its second argument. For ioctl this is the request.
    pub second: u64,
}

/// The handler given to [`on_trap`]. It is never freed.
static HANDLER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `si_code` of a SIGSYS that a filter sent (include/uapi/asm-generic/siginfo.h).
const SYS_SECCOMP: c_int = 1;

/// Calls `handler` on the thread whose filter trapped. It runs in a signal handler: it may do only
/// what signal-safety(7) and the thread's filter allow.
pub fn on_trap(handler: fn(Trapped) -> !) -> io::Result<()> {
    HANDLER.store(handler as *mut c_void, Ordering::SeqCst);
    // SAFETY: an all-zero sigaction with an empty mask is valid; `trapped` has the signature that
    // SA_SIGINFO promises. SA_ONSTACK is set because the thread may have trapped deep in its stack.
    // SA_NODEFER is set because the kernel would otherwise kill the process silently for a trap
    // inside the handler, and that should be reported too.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = trapped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn trapped(_: c_int, info: *const siginfo_t, context: *const c_void) {
    // SAFETY: the kernel passes a valid siginfo and context. For a seccomp trap the siginfo's union
    // starts at offset 16 on 64-bit machines. It holds the address of the call, followed by its
    // number.
    let (code, number, second) = unsafe {
        let number = info.cast::<u8>().add(24).cast::<i32>().read();
        ((*info).si_code, number, second_argument(&*context.cast()))
    };
    let handler = HANDLER.load(Ordering::SeqCst);
    if code != SYS_SECCOMP || handler.is_null() {
        exit_now(128 + libc::SIGSYS);
    }
    // SAFETY: it is not null, so it is the value that `on_trap` stored.
    let handler: fn(Trapped) -> ! = unsafe { std::mem::transmute(handler) };
    handler(Trapped { number, second })
}

#[cfg(target_arch = "x86_64")]
fn second_argument(context: &ucontext_t) -> u64 {
    context.uc_mcontext.gregs[libc::REG_RSI as usize] as u64
}

#[cfg(target_arch = "aarch64")]
fn second_argument(context: &ucontext_t) -> u64 {
    context.uc_mcontext.regs[1]
}

/// Prevents this thread and its children from gaining privileges by exec (`PR_SET_NO_NEW_PRIVS`).
pub fn no_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Installs `filter` on the calling thread, and on the threads that it starts from now on, for
/// good.
pub fn install(filter: &[sock_filter]) -> io::Result<()> {
    let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let program =
        sock_fprog { len: filter.len().try_into().map_err(too_long)?, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies `program` and its instructions, and checks them before use.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Checks that the kernel supports this filter action (a `SECCOMP_RET_*`).
pub fn is_available(action: u32) -> io::Result<()> {
    // SAFETY: the kernel reads one u32.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The version of the kernel's Landlock ABI.
pub fn landlock_abi() -> io::Result<u32> {
    /// include/uapi/linux/landlock.h
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the other arguments are null and zero, and the call only returns the
    // version.
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, 0usize, 0usize, LANDLOCK_CREATE_RULESET_VERSION)
    };
    u32::try_from(abi).map_err(|_| io::Error::last_os_error())
}

/// Unblocks SIGSYS in this thread. If it is blocked, the kernel kills the process silently on a
/// violation.
pub fn unblock_traps() {
    // SAFETY: an empty set is initialised before use, and only this thread's mask changes.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGSYS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
    }
}

/// Writes `bytes` to standard error as far as it takes them, without a lock. For signal handlers.
pub fn write_stderr(bytes: &[u8]) {
    let _ = rustix::io::write(rustix::stdio::stderr(), bytes);
}

/// Ends the process at once without running exit handlers. For signal handlers.
pub fn exit_now(status: c_int) -> ! {
    // SAFETY: _exit does not return and runs no handlers.
    unsafe { libc::_exit(status) }
}
