//! The signal that takes a vCPU thread out of `KVM_RUN`.
//!
//! The handler does nothing: the signal only interrupts. `immediate_exit` in `kvm_run`, set before the signal is sent,
//! closes the race with a thread that is just about to enter.

use std::io;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};

use kvm_bindings::kvm_run;

/// The signal: the first of the real-time signals that glibc and musl leave to programs.
pub fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn nothing(_: libc::c_int) {}

/// Installs the handler, before the first vCPU runs; again and again does no harm.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid: no flags (so that system calls are interrupted, not restarted), an
    // empty mask, and a handler that touches nothing.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(signal(), &action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Where KVM says of what size each access of a string instruction is (`rep insb`), whose data kvm-ioctls gives in one piece.
pub struct PortSize(*const u8);

impl PortSize {
    /// Of the vCPU whose `run` this is; its descriptor must outlive this.
    pub fn new(run: &mut kvm_run) -> Self {
        // SAFETY: no more than an address within the mapping is taken.
        Self(unsafe { &raw const run.__bindgen_anon_1.io.size })
    }

    /// Bytes of one access, after `KVM_EXIT_IO`; something else after another exit.
    pub fn get(&self) -> usize {
        // SAFETY: a byte of the mapping that the kernel shares with us, written only while `KVM_RUN` runs on this thread.
        unsafe { self.0.read_volatile() }.into()
    }
}

/// A vCPU thread as somebody else sees it: enough to interrupt it.
#[derive(Debug, Default)]
pub struct Kick {
    immediate_exit: AtomicPtr<AtomicU8>,
    thread: AtomicU64,
}

impl Kick {
    /// Called by the vCPU thread before its loop: from now on it can be interrupted.
    pub fn arm(&self, run: &mut kvm_run) {
        // SAFETY: immediate_exit is a byte of the mapping that the kernel shares with us; the mapping lives as long as
        // the vCPU's descriptor, and `disarm` comes before that is closed.
        let byte = unsafe { AtomicU8::from_ptr(&raw mut run.immediate_exit) };
        // SAFETY: pthread_self cannot fail.
        let me = unsafe { libc::pthread_self() };
        self.thread.store(me as u64, Ordering::SeqCst);
        self.immediate_exit.store(std::ptr::from_ref(byte).cast_mut(), Ordering::SeqCst);
    }

    /// Called by the vCPU thread when it woke up: the next `KVM_RUN` may enter the guest.
    pub fn clear(&self) {
        self.set(0);
    }

    /// Makes the current or the next `KVM_RUN` return with `EINTR`.
    ///
    /// The caller excludes [`Kick::disarm`] meanwhile (both happen under the vCPU's state lock).
    pub fn kick(&self) {
        if self.set(1) {
            let thread = self.thread.load(Ordering::SeqCst) as libc::pthread_t;
            // SAFETY: an armed thread is inside its loop, so its identifier is valid.
            unsafe { libc::pthread_kill(thread, signal()) };
        }
    }

    /// Called by the vCPU thread after its loop.
    pub fn disarm(&self) {
        self.immediate_exit.store(std::ptr::null_mut(), Ordering::SeqCst);
    }

    fn set(&self, value: u8) -> bool {
        let byte = self.immediate_exit.load(Ordering::SeqCst);
        // SAFETY: either null or the byte that `arm` stored, which is mapped until after `disarm`.
        let byte = unsafe { byte.as_ref() };
        if let Some(byte) = byte {
            byte.store(value, Ordering::SeqCst);
        }
        byte.is_some()
    }
}
