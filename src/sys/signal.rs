//! Signals with which a user ends a program. An event loop reads them as events (signalfd(2),
//! blocked in all threads). Programs without a loop have them remembered and poll for them.

use std::fs::File;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use super::clock::monotonic;

/// The signals with which a user ends a program.
pub const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signals with which a shell's user stops a program and continues it. A program that reads
/// them is not stopped when it uses a terminal from the background: the access fails instead.
pub const STOPPING: [i32; 4] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, CONTINUE];

/// The signal that continues a stopped process.
pub(crate) const CONTINUE: i32 = libc::SIGCONT;

/// The other signals whose default action ends a process. Vellum sends none of them. They end a
/// machine in order too, so that its terminal and files are left as after [`ENDING`]. The first
/// real-time signals are missing: they belong to the C library. SIGSTKFLT is missing, which is
/// [`super::kick`]'s, and SIGXFSZ ([`fail_beyond_limits`]), as are the signals of a program's own
/// mistakes: SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP.
pub const UNUSED: [i32; 38] = {
    let mut all = [0; 38];
    let standard = [
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGXCPU,
        libc::SIGIO,
        libc::SIGPWR,
    ];
    let mut at = 0;
    while at < all.len() {
        all[at] = if at < standard.len() { standard[at] } else { 35 + (at - standard.len()) as i32 };
        at += 1;
    }
    all
};

/// Makes writes beyond the file size limit (`ulimit -f`) fail with EFBIG, instead of ending this
/// process with SIGXFSZ. This uses a handler instead of SIG_IGN, which the programs that this one
/// starts would inherit.
pub fn fail_beyond_limits() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing. The call fails only for wrong arguments.
    unsafe { libc::signal(libc::SIGXFSZ, nothing as *const () as libc::sighandler_t) };
}

/// The signal that a terminal's size has changed.
pub const SIZE: i32 = libc::SIGWINCH;

/// The signal that no process survives.
pub const KILL: i32 = libc::SIGKILL;

/// A descriptor that is readable when one of its signals has arrived.
#[derive(Debug)]
pub struct SignalFd(File);

impl SignalFd {
    /// Blocks `signals` in this thread and all that it will start, and returns a descriptor to read
    /// them from. A signal that was ignored (nohup) stays ignored.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises `set` before it is read; the other calls take valid
        // pointers.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed();
                libc::sigaction(*signal, std::ptr::null(), action.as_mut_ptr());
                if action.assume_init().sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(set.as_mut_ptr(), *signal);
                }
            }
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just opened it, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// The next signal that has arrived.
    pub fn read(&mut self) -> Option<i32> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        // ssi_signo comes first.
        self.0.read_exact(&mut info).ok()?;
        Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsRawFd for SignalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Stops this process as `signal` does. The signal is blocked in this thread. Returns when the
/// process continues. The kernel does not stop an orphaned process group.
pub(crate) fn stop_by(signal: i32) {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises `set` before it is read; the other calls take it, or numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// While this lives, all signals are blocked in its thread. Signals that arrive meanwhile are
/// delivered afterwards.
#[derive(Debug)]
pub struct Blocked {
    before: libc::sigset_t,
    // The mask belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks all signals from now on.
    pub fn all() -> Self {
        let (mut all, mut before) =
            (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::zeroed());
        // SAFETY: sigfillset initialises `all` before it is read. A zeroed mask is valid, and
        // pthread_sigmask overwrites it; it fails only for wrong arguments.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Self { before, _thread: PhantomData }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: reads the mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// One of `signals` that is blocked, has arrived, and has not been read yet.
pub fn waiting(signals: &[i32]) -> Option<i32> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sigpending initialises the set. A zeroed set is valid if the call should fail.
    let set = unsafe {
        libc::sigpending(set.as_mut_ptr());
        set.assume_init()
    };
    // SAFETY: reads the set, and takes any number.
    signals.iter().copied().find(|&signal| unsafe { libc::sigismember(&set, signal) } == 1)
}

/// Makes the child that `command` starts end when the thread that starts it ends, for whatever
/// reason.
pub fn end_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // If the parent has ended by now, it sends no signal.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: between fork and exec it makes two system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// Signals of one kind within this time count as one: timeout(1) signals its child and then the
/// whole process group.
pub const REPEATS: Duration = Duration::from_secs(1);

/// When the first signal of a kind arrived, in milliseconds of the monotonic clock; 0 for not yet.
/// A signal handler may use it.
struct First(AtomicU64);

/// How a signal relates to earlier ones of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    First,
    Repeat,
    Second,
}

impl First {
    /// Records a signal at `now`, which is not 0.
    fn comes(&self, now: u64) -> Arrival {
        match self.0.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Arrival::First,
            Err(first) if now.saturating_sub(first) < REPEATS.as_millis() as u64 => Arrival::Repeat,
            Err(_) => Arrival::Second,
        }
    }
}

/// One for each number of [`ENDING`], all of which are below 32.
static FIRST: [First; 32] = [const { First(AtomicU64::new(0)) }; 32];

/// The signal that was not taken yet, and the last signal; 0 for none.
static PENDING: AtomicI32 = AtomicI32::new(0);
static LAST: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    let now = monotonic().as_millis() as u64;
    match FIRST.get(signal as usize).map_or(Arrival::First, |first| first.comes(now.max(1))) {
        Arrival::First => {
            PENDING.store(signal, Ordering::SeqCst);
            LAST.store(signal, Ordering::SeqCst);
        }
        Arrival::Repeat => {}
        // SAFETY: signal handlers may make both calls. The signal is blocked here, so it ends this
        // process when the handler returns.
        Arrival::Second => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
    }
}

/// Makes `signals` be remembered instead of ending this process, once for each. A second signal of
/// a kind ends the process, so that a program that does not poll can still be ended. Repeats within
/// [`REPEATS`] do not count as a second one. A signal that was ignored (nohup) stays ignored.
pub fn remember(signals: &[i32]) -> io::Result<()> {
    for &signal in signals {
        // SAFETY: an all-zero sigaction is valid, both pointers are to locals, and the handler only
        // stores to atomics.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            action = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Takes the remembered signal. The caller acts upon it.
pub fn take() -> Option<i32> {
    Some(PENDING.swap(0, Ordering::SeqCst)).filter(|&signal| signal != 0)
}

/// Whether a remembered signal has not been taken yet.
pub fn is_pending() -> bool {
    PENDING.load(Ordering::SeqCst) != 0
}

/// The last remembered signal, whether taken or not.
pub fn last() -> Option<i32> {
    Some(LAST.load(Ordering::SeqCst)).filter(|&signal| signal != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remembered_signal_is_taken_once() {
        remember(&[libc::SIGUSR2]).unwrap();
        assert_eq!(take(), None);
        // SAFETY: raise takes any signal, and this one has a handler.
        unsafe { libc::raise(libc::SIGUSR2) };
        assert!(is_pending());
        assert_eq!((take(), take(), last()), (Some(libc::SIGUSR2), None, Some(libc::SIGUSR2)));
    }

    #[test]
    fn a_repeat_within_a_second_is_no_second_signal() {
        let first = First(AtomicU64::new(0));
        let kinds = [5, 5, 1004, 1005, 9000].map(|now| first.comes(now));
        let [once, repeat, second] = [Arrival::First, Arrival::Repeat, Arrival::Second];
        assert_eq!(kinds, [once, repeat, repeat, second, second]);
    }

    #[test]
    fn a_blocked_signal_is_read() {
        let mut signals = SignalFd::new(&[libc::SIGUSR1]).unwrap();
        assert_eq!((signals.read(), waiting(&[libc::SIGUSR1])), (None, None));
        // SAFETY: pthread_self cannot fail, and the signal is blocked in this thread.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
        assert_eq!(waiting(&[libc::SIGUSR2, libc::SIGUSR1]), Some(libc::SIGUSR1));
        assert_eq!(signals.read(), Some(libc::SIGUSR1));
        assert_eq!(waiting(&[libc::SIGUSR1]), None);
    }
}
