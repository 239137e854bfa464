//! Signals by which a user ends a program: as events (signalfd(2), blocked everywhere, read by an event loop), or
//! remembered for those who have no loop and ask now and then.

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

/// The signals by which a user ends a program.
pub const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Those by which a shell's user stops a program and lets it go on. A program that reads them is not stopped where it uses a terminal from the
/// background: it is refused.
pub const STOPPING: [i32; 4] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, CONTINUE];

/// The one that lets a stopped process go on.
pub(crate) const CONTINUE: i32 = libc::SIGCONT;

/// The other signals that end a process unless it says otherwise: nothing in Vellum sends them. A machine ends in order by them too, so
/// that its terminal and its files are left as by [`ENDING`]. The first real-time signals are the C library's and [`super::kick`]'s.
/// SIGXFSZ is no such signal ([`fail_beyond_limits`]), nor are those of a program's own mistakes: SIGABRT, SIGBUS, SIGFPE, SIGILL,
/// SIGSEGV, SIGSYS, SIGTRAP.
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
        libc::SIGSTKFLT,
    ];
    let mut at = 0;
    while at < all.len() {
        all[at] = if at < standard.len() { standard[at] } else { 36 + (at - standard.len()) as i32 };
        at += 1;
    }
    all
};

/// Has writes beyond the limit of a file's size (`ulimit -f`) fail with EFBIG, and not end this process (SIGXFSZ). A handler does so, and
/// not SIG_IGN, which the programs that this one starts would inherit.
pub fn fail_beyond_limits() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing. The call fails for wrong arguments alone.
    unsafe { libc::signal(libc::SIGXFSZ, nothing as *const () as libc::sighandler_t) };
}

/// The one by which a terminal says that its size has changed.
pub const SIZE: i32 = libc::SIGWINCH;

/// The one that no process survives.
pub const KILL: i32 = libc::SIGKILL;

/// A descriptor that is readable when one of its signals has arrived.
#[derive(Debug)]
pub struct SignalFd(File);

impl SignalFd {
    /// Blocks `signals` in this thread and all that it will start, and returns where to read them. A signal that was
    /// ignored (nohup) stays so.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises `set` before anything else looks at it; the other calls take valid pointers.
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
        // SAFETY: signalfd has just opened it, and nobody else owns it.
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

/// Stops this process as `signal` does, which is blocked in this thread; returns when it goes on. An orphaned process group is not
/// stopped.
pub(crate) fn stop_by(signal: i32) {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises `set` before anything else looks at it; the other calls take it, or numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::syscall(libc::SYS_gettid), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// While this lives, no signal reaches its thread; what comes meanwhile reaches it afterwards.
#[derive(Debug)]
pub struct Blocked {
    before: libc::sigset_t,
    // A mask is its thread's.
    _thread: PhantomData<*const ()>,
}

impl Blocked {
    /// From now on.
    pub fn all() -> Self {
        let (mut all, mut before) =
            (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::zeroed());
        // SAFETY: sigfillset initialises `all` before it is read; a zeroed mask is valid, and pthread_sigmask, which fails for wrong
        // arguments alone, overwrites it.
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

/// One of `signals` that has come where it is blocked, and that nobody has read yet.
pub fn waiting(signals: &[i32]) -> Option<i32> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sigpending initialises the set, and a zeroed one is valid where it should fail.
    let set = unsafe {
        libc::sigpending(set.as_mut_ptr());
        set.assume_init()
    };
    // SAFETY: reads the set, and takes any number.
    signals.iter().copied().find(|&signal| unsafe { libc::sigismember(&set, signal) } == 1)
}

/// Has what `command` starts end when the thread that starts it ends, however that comes about.
pub fn end_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // One that has ended by then sends nothing.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: between fork and exec it makes two system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// Signals of one kind that come within this time count as one: timeout(1) signals its child and then the whole process group.
pub const REPEATS: Duration = Duration::from_secs(1);

/// When the first of a kind came, in milliseconds of the monotonic clock; 0 for not yet. A signal handler may use it.
struct First(AtomicU64);

/// What a signal is to those of its kind that came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    First,
    Repeat,
    Second,
}

impl First {
    /// One comes at `now`, which is not 0.
    fn comes(&self, now: u64) -> Arrival {
        match self.0.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Arrival::First,
            Err(first) if now.saturating_sub(first) < REPEATS.as_millis() as u64 => Arrival::Repeat,
            Err(_) => Arrival::Second,
        }
    }
}

/// One for each number of [`ENDING`], all of which are below it.
static FIRST: [First; 32] = [const { First(AtomicU64::new(0)) }; 32];

/// What came and nobody has taken yet, and what came last; 0 for none.
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
        // SAFETY: signal handlers may make both calls. The signal is blocked here, so that it ends this process on the return.
        Arrival::Second => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
    }
}

/// From now on `signals` are remembered instead of ending this process, each once: the second of a kind ends it, lest a
/// program that does not ask could not be ended. Repeats within [`REPEATS`] are no second one. A signal that was ignored
/// (nohup) stays so.
pub fn remember(signals: &[i32]) -> io::Result<()> {
    for &signal in signals {
        // SAFETY: an all-zero sigaction is valid, both pointers are to locals, and the handler only stores to atomics.
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

/// Takes the remembered signal: whoever acts upon it.
pub fn take() -> Option<i32> {
    Some(PENDING.swap(0, Ordering::SeqCst)).filter(|&signal| signal != 0)
}

/// Whether a signal was remembered that nobody has taken.
pub fn is_pending() -> bool {
    PENDING.load(Ordering::SeqCst) != 0
}

/// The last signal that was remembered, whether taken or not.
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
