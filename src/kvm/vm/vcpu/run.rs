//! A vCPU's thread while it has a vCPU: the loop around `KVM_RUN`, which follows the [`Cycle`].

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use kvm_ioctls::{VcpuExit, VcpuFd};

use super::cycle::{After, Command, Cycle, Returned, Step};
use super::debug::{self, Whose};
use super::{Ended, Flow, RunState, Shared};
use crate::vm::Processor;
use crate::vm::exits::{Exits, Reason, Recent};
use crate::vm::lifecycle::Exit;
use vellum_sys::kick::RunPage;
#[cfg(target_arch = "x86_64")]
use vellum_sys::plant::{self, Mistake};

/// Runs a guest: KVM's vCPU, or a test's script.
pub(super) trait Run {
    /// One `KVM_RUN`.
    fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error>;

    /// The page shared with KVM.
    fn page(&self) -> &RunPage;

    /// KVM's descriptor, if there is one.
    fn fd(&self) -> Option<&VcpuFd>;

    /// Tells the guest's clock that the vCPU was stopped.
    fn stood_still(&self) {}

    /// Empties the dirty rings after one has become full. Returns false on failure.
    fn drain_rings(&self) -> bool {
        false
    }
}

impl Run for Processor {
    fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        self.fd.run()
    }

    fn page(&self) -> &RunPage {
        &self.page
    }

    fn fd(&self) -> Option<&VcpuFd> {
        Some(&self.fd)
    }

    /// KVM sets PVCLOCK_GUEST_STOPPED in the guest's clock page at the next entry, so the guest's
    /// watchdogs do not report a hang. Guests without kvmclock have no such page; then KVM returns
    /// an error.
    #[cfg(target_arch = "x86_64")]
    fn stood_still(&self) {
        if !plant::is(Mistake::KvmclockCtrlLeftOut) {
            let _ = self.fd.kvmclock_ctrl();
        }
    }

    fn drain_rings(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        let relieved = ring.drain_rings();
        if let Err(failed) = &relieved {
            tracing::error!("the dirty rings cannot be emptied: {failed:?}");
        }
        relieved.is_ok()
    }
}

/// Runs until the guest ends, `KVM_RUN` fails or the vCPU is stopped.
pub(super) fn run(
    shared: &Shared,
    vcpu: &mut impl Run,
    on_exit: &mut impl FnMut(VcpuExit<'_>) -> Flow,
) -> Ended {
    let mut cycle = Cycle::default();
    let mut exits = Exits::default();
    let mut recent = Recent::default();
    let mut flushed = 0;
    let (exit, error) = loop {
        match cycle.next(shared.command(), shared.throttled.load(Ordering::SeqCst)) {
            Step::Enter => {
                // Here and not after KVM_RUN: a request is seen even if its kick was cleared
                // together with an earlier one.
                let flushes = shared.flushes.load(Ordering::SeqCst);
                if flushes != flushed {
                    flushed = flushes;
                    shared.lock().flushed = flushes;
                    shared.changed.notify_all();
                }
            }
            Step::Throttle => {
                shared.sleep();
                continue;
            }
            Step::Complete => vcpu.page().set_immediate_exit(true),
            Step::Wait => {
                if wait(shared, vcpu, &exits) == Command::Run {
                    vcpu.stood_still();
                }
                continue;
            }
            Step::End => break (Exit::PowerOff, None),
        }
        let mut own = None;
        let result = match vcpu.run() {
            Ok(exit) => {
                let reason = recent.note(&exit);
                exits.count(reason);
                // A full ring and a debugger's breakpoint are handled here, not by the caller's
                // handler: neither concerns the guest or a device.
                Ok(match debug::whose(shared, &exit) {
                    Some(Whose::Debugger) => Some(Flow::Pause),
                    Some(Whose::Guest(flag)) => {
                        own = Some(flag);
                        Some(Flow::Continue)
                    }
                    None => (reason != Reason::DirtyRingFull).then(|| on_exit(exit)),
                })
            }
            Err(error) => Err(error),
        };
        if let (Some(flag), Some(fd)) = (own, vcpu.fd()) {
            debug::give_back(shared, fd, flag);
        }
        let returned = match result {
            Ok(Some(flow)) => Returned::Exit(flow),
            Ok(None) if vcpu.drain_rings() => Returned::Exit(Flow::Continue),
            Ok(None) => Returned::Exit(Flow::Stop(Exit::Kvm)),
            Err(error) => Returned::Error(error.errno()),
        };
        match cycle.returned(returned) {
            After::Next => {}
            After::Interrupted => {
                exits.count(Reason::Interrupted);
                vcpu.page().set_immediate_exit(false);
            }
            // A command that came meanwhile wins.
            After::PauseItself => shared.pause_itself(),
            After::Ended(exit) => break (exit, None),
            After::Failed => break (Exit::Kvm, result.err()),
        }
    };
    shared.lock().exits = exits;
    let failed = matches!(exit, Exit::Panic | Exit::TripleFault | Exit::Kvm);
    let trace = failed.then(|| {
        let registers = vcpu.fd().map(shared.describe).unwrap_or_default();
        format!("{registers}\n{}", recent.describe())
    });
    let kept = vcpu.fd().filter(|_| exit != Exit::PowerOff).and_then(shared.keep);
    Ended { exit, error, trace, kept }
}

/// Reports the pause, and serves calls until another command comes. Returns that.
fn wait(shared: &Shared, vcpu: &impl Run, exits: &Exits) -> Command {
    let mut inner = shared.lock();
    inner.state = RunState::Paused;
    inner.exits = *exits;
    shared.changed.notify_all();
    loop {
        if let Some(call) = inner.call.take() {
            drop(inner);
            // Without a vCPU the call is dropped, and its caller gets an error.
            vcpu.fd().map(call);
            inner = shared.lock();
            shared.changed.notify_all();
            continue;
        }
        let command = shared.command();
        if command != Command::Pause {
            inner.state = RunState::Running;
            // Earlier kicks were for the pause. Kicks are sent under the lock, which is held here.
            vcpu.page().set_immediate_exit(false);
            return command;
        }
        inner = shared.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Splits the port accesses of a string instruction into accesses of `size` bytes. KVM goes on
/// behind the whole instruction, so a part that asks for a pause does not end it. What the first
/// such part asks for is returned.
pub(super) fn one_by_one(
    exit: VcpuExit<'_>,
    size: usize,
    on_exit: &mut impl FnMut(VcpuExit<'_>) -> Flow,
) -> Flow {
    let mut flow = Flow::Continue;
    match exit {
        VcpuExit::IoIn(port, data) if data.len() > size && size > 0 => {
            for part in data.chunks_exact_mut(size) {
                let next = on_exit(VcpuExit::IoIn(port, part));
                flow = if flow == Flow::Continue { next } else { flow };
            }
        }
        VcpuExit::IoOut(port, data) if data.len() > size && size > 0 => {
            for part in data.chunks_exact(size) {
                let next = on_exit(VcpuExit::IoOut(port, part));
                flow = if flow == Flow::Continue { next } else { flow };
                if matches!(next, Flow::Stop(_)) {
                    return next;
                }
            }
        }
        exit => return on_exit(exit),
    }
    flow
}
