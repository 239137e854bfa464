//! A debugger's hold on vCPUs: who has run into what it planted, which vCPUs are kept back while another takes a step, and the way to a
//! paused vCPU's registers.
//!
//! A vCPU that runs into a breakpoint pauses itself, as on any other exit that asks for that, and wakes the event loop. What KVM hands out
//! because a debugger is there, but is the guest's own (an `int3` of its own code, a single step of its own debugger), is given back
//! to it by the thread that got it: nobody else is stopped for that.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::eventfd::EventFd;

use super::{Error, Shared, Vcpu};
use vellum_sys::kvm_debug::{Met, gives_back, met};

/// The hardware breakpoints that there are, in DR0 to DR3; DR6 has a bit for each.
pub const SLOTS: usize = 4;

/// Where a vCPU has stopped for its debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// Which.
    pub vcpu: usize,
    /// Whether it was a breakpoint in its code.
    pub planted: bool,
    /// The linear address of its instruction.
    pub pc: u64,
    /// DR6: which hardware breakpoints it has met.
    pub dr6: u64,
}

/// What the vCPUs of a machine that is debugged share with its debugger.
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
    /// None, for vCPUs that signal `wake` when one of them has met one.
    pub fn new(wake: Arc<EventFd>) -> Self {
        Self { planted: Mutex::default(), watched: AtomicU8::new(0), met: Mutex::default(), wake }
    }

    /// Has the breakpoint instruction at the linear address `at` be the debugger's, or no longer.
    pub fn plant(&self, at: u64, planted: bool) {
        let mut all = lock(&self.planted);
        if planted {
            all.insert(at)
        } else {
            all.remove(&at)
        };
    }

    /// Has these hardware breakpoints, a bit each, be the debugger's.
    pub fn watch(&self, slots: u8) {
        self.watched.store(slots, Ordering::SeqCst);
    }

    /// The first that has been met and not been told yet.
    pub fn next(&self) -> Option<Trap> {
        lock(&self.met).pop_front()
    }

    /// Whether one has been met and not been told yet.
    pub fn any(&self) -> bool {
        !lock(&self.met).is_empty()
    }

    /// Forgets those that will be met again: a vCPU that stands before a breakpoint has done nothing that could be lost.
    pub fn forget(&self, again: impl Fn(&Trap) -> bool) {
        lock(&self.met).retain(|trap| !again(trap));
    }

    fn meet(&self, trap: Trap) {
        lock(&self.met).push_back(trap);
        // It can only fail by overflowing, and then it is signalled anyway.
        let _ = self.wake.write(1);
    }
}

/// A handle on the vCPUs of a machine, for its debugger. It keeps no vCPU alive.
#[derive(Clone)]
pub struct VcpusDebugHandle(Vec<Arc<Shared>>);

impl VcpusDebugHandle {
    /// One for `vcpus`.
    pub fn new(vcpus: &[Vcpu]) -> Self {
        Self(vcpus.iter().map(|vcpu| vcpu.shared.clone()).collect())
    }

    /// How many vCPUs there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Has what they meet be told to `traps` from now on. Once, before they run.
    pub fn attach(&self, traps: &Arc<Traps>) {
        self.0.iter().for_each(|shared| drop(shared.traps.set(traps.clone())));
    }

    /// Runs `call` on the thread of vCPU `index` while it is paused, and returns what it returns.
    ///
    /// # Errors
    /// Where it has exited or there is no such vCPU.
    pub fn with<R: Send + 'static>(
        &self,
        index: usize,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.0.get(index).ok_or(Error::Gone(index))?.begin(call)?.wait()
    }

    /// Keeps vCPU `index` from running when its machine is resumed, or no longer. While it is paused.
    pub fn park(&self, index: usize, parked: bool) {
        if let Some(shared) = self.0.get(index) {
            shared.parked.store(parked, Ordering::SeqCst);
        }
    }

    /// Has vCPU `index`, which is paused, be debugged in this way from now on. KVM is asked where that is another way than before: a
    /// debugger that only looks changes nothing.
    ///
    /// # Errors
    /// Where KVM refuses it, or the vCPU has exited.
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
        f.debug_struct("Reins").field("vcpus", &self.0.len()).finish()
    }
}

/// Whose a debug exit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// The debugger's: it has been told.
    Debugger,
    /// The guest's, which is to have it by this flag of KVM_SET_GUEST_DEBUG.
    Guest(u32),
}

/// Whose `exit` is, where it is a debug exit of a vCPU that has a debugger.
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

/// Gives an exception back to the guest that is its own.
pub(super) fn give_back(shared: &Shared, fd: &VcpuFd, flag: u32) {
    let mut debug = shared.lock().debug;
    debug.control |= flag;
    if let Err(error) = fd.set_guest_debug(&debug) {
        // It has another exception to deliver first, and will come to the instruction again.
        tracing::debug!("vCPU {}: an exception of the guest's own: {error}", shared.index);
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
