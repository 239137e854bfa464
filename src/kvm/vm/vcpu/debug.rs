//! A debugger's control of vCPUs: which breakpoints they hit, which vCPUs are held back while
//! another steps, and access to a paused vCPU's registers.
//!
//! A vCPU that hits a breakpoint pauses itself, as on any other exit with that result, and wakes
//! the event loop. KVM also reports debug exits that belong to the guest (an `int3` of its own
//! code, a single step of its own debugger). The vCPU's thread injects those into the guest. No
//! other vCPU is stopped for them.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::eventfd::EventFd;

use super::{Error, Shared, Vcpu};
use vellum_sys::kvm_debug::{Met, gives_back, met};

/// The number of hardware breakpoints, in DR0 to DR3. DR6 has a bit for each.
pub const SLOTS: usize = 4;

/// A stop of a vCPU for its debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// The vCPU.
    pub vcpu: usize,
    /// Whether it was a software breakpoint.
    pub planted: bool,
    /// The linear address of its instruction.
    pub pc: u64,
    /// DR6: the hardware breakpoints that were hit.
    pub dr6: u64,
}

/// State shared by a debugged machine's vCPUs and its debugger.
#[derive(Debug)]
pub struct Traps {
    planted: Mutex<BTreeSet<u64>>,
    /// A bit for each hardware breakpoint that is set.
    watched: AtomicU8,
    met: Mutex<VecDeque<Trap>>,
    wake: Arc<EventFd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Traps {
    /// No breakpoints yet, for vCPUs that signal `wake` when one is hit.
    pub fn new(wake: Arc<EventFd>) -> Self {
        Self { planted: Mutex::default(), watched: AtomicU8::new(0), met: Mutex::default(), wake }
    }

    /// Adds or removes the debugger's breakpoint instruction at the linear address `at`.
    pub fn plant(&self, at: u64, planted: bool) {
        let mut all = lock(&self.planted);
        if planted {
            all.insert(at)
        } else {
            all.remove(&at)
        };
    }

    /// Sets the debugger's hardware breakpoints, a bit each.
    pub fn watch(&self, slots: u8) {
        self.watched.store(slots, Ordering::SeqCst);
    }

    /// Takes the first unreported stop.
    pub fn next(&self) -> Option<Trap> {
        lock(&self.met).pop_front()
    }

    /// Whether there is an unreported stop.
    pub fn any(&self) -> bool {
        !lock(&self.met).is_empty()
    }

    /// Drops stops that will occur again. That loses nothing: a vCPU before a breakpoint has not
    /// executed it.
    pub fn forget(&self, again: impl Fn(&Trap) -> bool) {
        lock(&self.met).retain(|trap| !again(trap));
    }

    fn meet(&self, trap: Trap) {
        lock(&self.met).push_back(trap);
        // The write can only fail on overflow, and then the eventfd is signalled anyway.
        let _ = self.wake.write(1);
    }
}

/// A debugger's handle to the vCPUs of a machine. It keeps no vCPU alive.
#[derive(Clone)]
pub struct VcpusDebugHandle(Vec<Arc<Shared>>);

impl VcpusDebugHandle {
    /// A handle to `vcpus`.
    pub fn new(vcpus: &[Vcpu]) -> Self {
        Self(vcpus.iter().map(|vcpu| vcpu.shared.clone()).collect())
    }

    /// The number of vCPUs.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Reports stops to `traps` from now on. Called once, before the vCPUs run.
    pub fn attach(&self, traps: &Arc<Traps>) {
        self.0.iter().for_each(|shared| drop(shared.traps.set(traps.clone())));
    }

    /// Runs `call` on the thread of vCPU `index` while it is paused, and returns its result.
    ///
    /// # Errors
    /// The vCPU has exited or does not exist.
    pub fn with<R: Send + 'static>(
        &self,
        index: usize,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.0.get(index).ok_or(Error::Gone(index))?.begin(call)?.wait()
    }

    /// Holds vCPU `index` back when its machine is resumed, or no longer. Called while it is
    /// paused.
    pub fn park(&self, index: usize, parked: bool) {
        if let Some(shared) = self.0.get(index) {
            shared.parked.store(parked, Ordering::SeqCst);
        }
    }

    /// Sets the debug mode of vCPU `index`, which is paused. KVM is called only if the mode
    /// changes, so a debugger that only reads state changes nothing.
    ///
    /// # Errors
    /// KVM refuses, or the vCPU has exited.
    pub fn set(&self, index: usize, debug: kvm_guest_debug) -> Result<Result<(), kvm_ioctls::Error>, Error> {
        let shared = self.0.get(index).ok_or(Error::Gone(index))?;
        let before = std::mem::replace(&mut shared.lock().debug, debug);
        if before == debug {
            return Ok(Ok(()));
        }
        let set = self.with(index, move |fd| fd.set_guest_debug(&debug));
        if !matches!(set, Ok(Ok(()))) {
            shared.lock().debug = before;
        }
        set
    }
}

impl fmt::Debug for VcpusDebugHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpusDebugHandle").field("vcpus", &self.0.len()).finish()
    }
}

/// The owner of a debug exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// The debugger. It has been told.
    Debugger,
    /// The guest. This flag of KVM_SET_GUEST_DEBUG injects the exception.
    Guest(u32),
}

/// The owner of `exit`, if it is a debug exit of a vCPU with a debugger.
pub(super) fn whose(shared: &Shared, exit: &VcpuExit<'_>) -> Option<Whose> {
    let Met { planted, pc, dr6 } = met(exit)?;
    let traps = shared.traps.get()?;
    let ours = match planted {
        true => lock(&traps.planted).contains(&pc),
        false => {
            let watched = u64::from(traps.watched.load(Ordering::SeqCst));
            dr6 & watched != 0 || shared.lock().debug.control & KVM_GUESTDBG_SINGLESTEP != 0
        }
    };
    if !ours {
        return Some(Whose::Guest(gives_back(planted)));
    }
    traps.meet(Trap { vcpu: shared.index, planted, pc, dr6 });
    Some(Whose::Debugger)
}

/// Injects the guest's own exception.
pub(super) fn give_back(shared: &Shared, fd: &VcpuFd, flag: u32) {
    let mut debug = shared.lock().debug;
    debug.control |= flag;
    if let Err(error) = fd.set_guest_debug(&debug) {
        // The guest has another exception to take first, and will reach the instruction again.
        tracing::debug!("vCPU {}: cannot inject the guest's own exception: {error}", shared.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traps_are_told_in_order_and_those_that_come_again_are_forgotten() {
        let wake = Arc::new(EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap());
        let traps = Traps::new(wake.clone());
        let trap = |vcpu, planted| Trap { vcpu, planted, pc: 0x1000, dr6: 1 };
        [trap(0, true), trap(1, false), trap(2, true)].into_iter().for_each(|trap| traps.meet(trap));
        assert_eq!(wake.read().unwrap(), 3);
        assert_eq!(traps.next(), Some(trap(0, true)));
        traps.forget(|trap| trap.planted);
        assert_eq!((traps.next(), traps.next()), (Some(trap(1, false)), None));
    }
}
