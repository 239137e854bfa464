//! The signal that makes a vCPU thread leave `KVM_RUN`.
//!
//! The handler does nothing: the signal only interrupts. `immediate_exit` in `kvm_run` is set
//! before the signal is sent. It closes the race with a thread that is just about to enter the
//! guest.

use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use kvm_bindings::{kvm_run, kvm_run__bindgen_ty_1, kvm_run__bindgen_ty_1__bindgen_ty_4 as Io};
use kvm_ioctls::VcpuFd;
use rustix::thread::{Pid, gettid};

use super::mmap::PAGE_SIZE;

/// The signal: a standard one that nothing else sends. A real-time signal is queued, and is lost when
/// the user's processes have as many queued as they may (`ulimit -i`).
pub fn signal() -> libc::c_int {
    libc::SIGSTKFLT
}

extern "C" fn nothing(_: libc::c_int) {}

/// Installs the handler, once for the process. Call it before the first vCPU runs and before a
/// sandbox without rt_sigaction(2).
pub fn install() -> io::Result<()> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: an all-zero sigaction is valid: no flags (so that system calls are interrupted, not
    // restarted), an empty mask, and a handler that touches nothing.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(signal(), &action, std::ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// A timer that sends the signal to the thread that created it, for tests of calls that a signal
/// interrupts.
#[derive(Debug)]
pub(crate) struct Alarm {
    timer: libc::timer_t,
    // The signal goes to one thread.
    _thread: PhantomData<*const ()>,
}

impl Alarm {
    /// A timer that is not set yet. [`install`] comes first.
    pub fn new() -> io::Result<Self> {
        // SAFETY: an all-zero sigevent is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal();
        event.sigev_notify_thread_id = gettid().as_raw_pid();
        let mut timer = MaybeUninit::uninit();
        // SAFETY: both pointers are to values that outlive the call.
        let result = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, timer.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: timer_create has succeeded and initialised it.
        Ok(Self { timer: unsafe { timer.assume_init() }, _thread: PhantomData })
    }

    /// Sends the signal once, after this time.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would disarm the timer.
        let after = after.max(Duration::from_nanos(1));
        let at =
            libc::timespec { tv_sec: after.as_secs() as _, tv_nsec: after.subsec_nanos() as libc::c_long };
        let once = libc::itimerspec { it_interval: none, it_value: at };
        // SAFETY: the timer exists as long as this value, and the call reads `once`.
        match unsafe { libc::timer_settime(self.timer, 0, &once, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer belongs to this value alone.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// A second mapping of a vCPU's `kvm_run`.
///
/// kvm-ioctls hands out its own mapping as `&mut`, and no other thread may write beside that. This
/// mapping is accessed one byte at a time, as atomics. To the compiler it is different memory, and
/// the kernel shares its side of the page anyway.
#[derive(Debug)]
pub struct RunPage(NonNull<u8>);

// SAFETY: the mapping belongs to the process, and it is only accessed as atomics.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

/// `kvm_run.io.size`.
const PORT_SIZE: usize =
    offset_of!(kvm_run, __bindgen_anon_1) + offset_of!(kvm_run__bindgen_ty_1, io) + offset_of!(Io, size);

const _: () =
    assert!(PORT_SIZE < PAGE_SIZE as usize && offset_of!(kvm_run, immediate_exit) < PAGE_SIZE as usize);

impl RunPage {
    /// Maps the page of `vcpu`.
    pub fn map(vcpu: &VcpuFd) -> io::Result<Self> {
        Self::of(vcpu.as_raw_fd(), libc::MAP_SHARED)
    }

    /// A page without a vCPU, for tests without KVM.
    pub fn without_vcpu() -> io::Result<Self> {
        Self::of(-1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    fn of(fd: libc::c_int, flags: libc::c_int) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses disturbs nothing.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_SIZE as usize, prot, flags, fd, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast()).map(Self).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < PAGE_SIZE as usize);
        // SAFETY: a byte inside the mapping, which lives as long as the borrow. This process
        // accesses this mapping only through this function.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(offset)) }
    }

    /// Whether `KVM_RUN` completes pending operations and returns without entering the guest.
    pub fn immediate_exit(&self) -> bool {
        self.byte(offset_of!(kvm_run, immediate_exit)).load(Ordering::SeqCst) != 0
    }

    /// Sets `immediate_exit`.
    pub fn set_immediate_exit(&self, on: bool) {
        self.byte(offset_of!(kvm_run, immediate_exit)).store(on.into(), Ordering::SeqCst);
    }

    /// The size in bytes of each access of a string instruction (`rep insb`), whose data kvm-ioctls
    /// gives in one piece. Valid after `KVM_EXIT_IO` only.
    pub fn port_size(&self) -> usize {
        self.byte(PORT_SIZE).load(Ordering::Relaxed).into()
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every reference into it borrowed this value.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE_SIZE as usize) };
    }
}

/// A handle on a vCPU thread that can interrupt it.
#[derive(Debug)]
pub struct Kick {
    page: Arc<RunPage>,
    thread: Pid,
}

impl Kick {
    /// A handle on the calling thread, which runs the vCPU of `page`.
    pub fn of_this_thread(page: Arc<RunPage>) -> Self {
        Self { page, thread: gettid() }
    }

    /// The thread's ID.
    pub fn thread(&self) -> u32 {
        self.thread.as_raw_pid() as u32
    }

    /// Makes the current or the next `KVM_RUN` of the vCPU return with `EINTR`.
    pub fn kick(&self) {
        self.page.set_immediate_exit(true);
        // SAFETY: the call takes numbers. If the thread has ended, the call fails or signals
        // another thread of this process, which the handler does not harm. (pthread_kill may only
        // be called for a living thread.)
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.thread.as_raw_pid(), signal()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::event::Timespec;

    use super::*;

    #[test]
    fn the_bytes_are_those_of_kvm_run() {
        let page = RunPage::without_vcpu().unwrap();
        let mut run = kvm_run { immediate_exit: 1, ..Default::default() };
        run.__bindgen_anon_1.io.size = 4;
        // SAFETY: kvm_run is plain data of at most a page, and the page is ours.
        unsafe { page.0.cast::<kvm_run>().write(run) };
        assert_eq!((page.immediate_exit(), page.port_size()), (true, 4));
        page.set_immediate_exit(false);
        // SAFETY: as above.
        assert_eq!(unsafe { page.0.cast::<kvm_run>().read() }.immediate_exit, 0);
    }

    #[test]
    fn a_kick_interrupts_a_system_call() {
        install().unwrap();
        let page = Arc::new(RunPage::without_vcpu().unwrap());
        let (tell, kick) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(Kick::of_this_thread(page.clone())).unwrap();
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            (rustix::event::poll(&mut [], Some(&minute)), page.immediate_exit())
        });
        let kick = kick.recv_timeout(Duration::from_secs(60)).unwrap();
        // Repeat until a signal arrives during the call: an earlier one interrupts nothing there.
        // A thread that receives one after the other would never reach its call.
        while !thread.is_finished() {
            kick.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(thread.join().unwrap(), (Err(rustix::io::Errno::INTR), true));
        // The thread has ended.
        kick.kick();
    }
}
