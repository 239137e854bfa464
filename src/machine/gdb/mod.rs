//! A debugger for a machine: GDB's remote protocol on a unix socket.
//!
//! The gdbstub crate has the protocol. [`target`] implements its requests for a machine, and
//! [`wire`] is the socket. Nothing here runs by itself or pauses a machine. The event loop calls
//! [`Debugger::turn`], which returns what the machine is to do. The owner of the machine then
//! pauses or resumes it as for any other request:
//!
//! ```text
//!                     a client connects, or a vCPU meets a breakpoint, or GDB interrupts
//!   the machine runs  ------------------------- Wish::Stand ------------------------->  it is paused
//!                     <-------------------------- Wish::Go ---------------------------
//!                     GDB continues, steps, detaches or goes away
//! ```
//!
//! Registers and memory are accessed only while the machine is paused. A debugger's writes to
//! memory go through the VMM's own write log, as a device's writes do.

mod target;
mod wire;

use std::path::Path;
use std::sync::{Arc, Mutex};

use gdbstub::stub::state_machine::GdbStubStateMachine;
use gdbstub::stub::{BaseStopReason, GdbStub, MultiThreadStopReason};
use vmm_sys_util::eventfd::EventFd;

use self::target::Target;
use self::wire::{Out, Wire};
use vellum_kvm::arch::debug;
use vellum_kvm::memory::{GuestMemory, Slot};
use vellum_kvm::vm::vcpu::{Traps, VcpusDebugHandle};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::socket::{Listener, SocketError};

/// Why there is no debugger.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// This architecture does not support it.
    #[error("{0}")]
    Impossible(&'static str),
    /// This KVM does not support it.
    #[error("this KVM cannot debug guests (no KVM_CAP_SET_GUEST_DEBUG)")]
    Kvm,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Socket(_) | Self::Impossible(_) => ErrorOrigin::user(Field::Gdb),
            Self::Kvm => ErrorOrigin::host(Field::Gdb).lacking(),
        }
    }
}

/// The socket for a debugger, and this KVM's abilities.
#[derive(Debug)]
pub struct Door {
    listener: Listener,
    /// Whether the machine waits for a debugger before it first runs.
    waits: bool,
    /// Whether KVM can block interrupts for a vCPU that single-steps.
    blocks: bool,
}

impl Door {
    /// Checks that this KVM can debug a guest, with a debugger that connects to `listener`. With
    /// `waits`, the guest does not run before a debugger continues it.
    ///
    /// # Errors
    /// KVM cannot debug a guest.
    pub fn open(listener: Listener, waits: bool, kvm: &kvm_ioctls::Kvm) -> Result<Self, Error> {
        use kvm_bindings::{KVM_CAP_SET_GUEST_DEBUG, KVM_CAP_SET_GUEST_DEBUG2};
        if let Some(why) = debug::IMPOSSIBLE {
            return Err(Error::Impossible(why));
        }
        if kvm.check_extension_raw(KVM_CAP_SET_GUEST_DEBUG.into()) <= 0 {
            return Err(Error::Kvm);
        }
        // The flags that KVM_SET_GUEST_DEBUG takes (api.rst, 4.87); 0 if the kernel does not report
        // them.
        let flags = kvm.check_extension_raw(KVM_CAP_SET_GUEST_DEBUG2.into());
        Ok(Self { listener, waits, blocks: flags > 0 && debug::blocks_interrupts(flags as u32) })
    }

    /// A door without a check of the host's KVM, for machines without vCPUs.
    pub fn without_kvm(listener: Listener, waits: bool) -> Self {
        Self { listener, waits, blocks: false }
    }
}

/// What a machine is to do for its debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing now.
    Nothing,
    /// Pause. This is repeated as long as the machine runs.
    Stand,
    /// Resume, as far as the debugger is concerned.
    Go,
}

/// The protocol's state with a connected client.
type Stub = GdbStubStateMachine<'static, Target, Out>;

/// A machine's debugger.
pub struct Debugger {
    wire: Arc<Mutex<Wire>>,
    served: bool,
    traps: Arc<Traps>,
    target: Target,
    stub: Option<Stub>,
    /// Whether the machine waits for its first debugger.
    waits: bool,
    /// Whether a debugger has gone whose breakpoints are still there.
    clears: bool,
}

impl Debugger {
    /// The debugger of the machine with these vCPUs and this memory; `ram` is among `slots`. A vCPU
    /// that stops signals `wake`.
    pub fn new(
        door: Door,
        reins: VcpusDebugHandle,
        ram: GuestMemory,
        slots: Vec<Slot>,
        wake: Arc<EventFd>,
    ) -> Self {
        let Door { listener, waits, blocks } = door;
        let traps = Arc::new(Traps::new(wake));
        reins.attach(&traps);
        let target = Target::new(reins, traps.clone(), ram, slots, blocks);
        Self {
            wire: Arc::new(Mutex::new(Wire::new(listener))),
            served: false,
            traps,
            target,
            stub: None,
            waits,
            clears: false,
        }
    }

    /// The subscriber for the event loop, returned once.
    pub fn event_sources(&mut self) -> Option<Arc<Mutex<Wire>>> {
        (!std::mem::replace(&mut self.served, true)).then(|| self.wire.clone())
    }

    /// Proceeds as far as possible with a machine that is paused (`stands`) or runs. Returns what
    /// the machine is to do next.
    pub fn turn(&mut self, stands: bool) -> Wish {
        self.target.stands = stands;
        loop {
            match self.step(stands) {
                Step::On => {}
                Step::Wish(wish) => return wish,
            }
        }
    }

    fn step(&mut self, stands: bool) -> Step {
        let wish = |wish| Step::Wish(wish);
        let stand = Step::Wish(Wish::Stand);
        if self.clears {
            if !stands {
                return stand;
            }
            self.clear();
            return wish(Wish::Go);
        }
        let Some(stub) = self.stub.take() else {
            self.wire().settle();
            let Some(out) = self.wire().take_out() else {
                // No client is connected.
                return wish(if self.waits && !stands { Wish::Stand } else { Wish::Nothing });
            };
            if !stands {
                self.wire().give_out_back(out);
                return stand;
            }
            self.waits = false;
            // A new debugger does not know of earlier traps.
            while self.traps.next().is_some() {}
            let stub = GdbStub::builder(out)
                .packet_buffer_size(wire::MAX_PACKET)
                .build()
                .ok()
                .and_then(|stub| stub.run_state_machine(&mut self.target).ok());
            return self.keep(stub.ok_or_else(|| "the protocol does not begin".to_owned()));
        };
        if self.wire().has_gone() {
            self.leave();
            return Step::On;
        }
        match stub {
            GdbStubStateMachine::Idle(idle) => {
                if !stands {
                    self.stub = Some(idle.into());
                    return stand;
                }
                let next = self.wire().next();
                let byte = match next {
                    Ok(Some(byte)) => byte,
                    Ok(None) => {
                        self.stub = Some(idle.into());
                        return wish(Wish::Nothing);
                    }
                    Err(wire::TooLong) => return self.keep(Err(TOO_LONG.into())),
                };
                let next = idle.incoming_data(&mut self.target, byte).map_err(|error| error.to_string());
                let step = self.keep(next);
                if matches!(self.stub, Some(GdbStubStateMachine::Running(_))) {
                    self.traps.forget(|trap| self.target.comes_again(trap));
                    return wish(Wish::Go);
                }
                step
            }
            GdbStubStateMachine::Running(running) => {
                // Traps are taken only while the machine is paused, because all of them are known
                // then.
                if stands && let Some(trap) = self.traps.next() {
                    let reason = self.target.reason(&trap);
                    let next = running.report_stop(&mut self.target, reason);
                    return self.keep(next.map_err(|error| error.to_string()));
                }
                if !stands && self.traps.any() {
                    self.stub = Some(running.into());
                    return stand;
                }
                let byte = self.wire().next();
                match byte {
                    Err(wire::TooLong) => self.keep(Err(TOO_LONG.into())),
                    Ok(Some(byte)) => {
                        let next = running.incoming_data(&mut self.target, byte);
                        self.keep(next.map_err(|error| error.to_string()))
                    }
                    Ok(None) => {
                        self.stub = Some(running.into());
                        wish(if stands { Wish::Go } else { Wish::Nothing })
                    }
                }
            }
            GdbStubStateMachine::CtrlCInterrupt(interrupt) => {
                if !stands {
                    self.stub = Some(interrupt.into());
                    return stand;
                }
                let reason = self.target.interrupted();
                let next = interrupt.interrupt_handled(&mut self.target, Some(reason));
                self.keep(next.map_err(|error| error.to_string()))
            }
            GdbStubStateMachine::Disconnected(_) => {
                self.leave();
                Step::On
            }
        }
    }

    /// Continues with `stub`. A client that breaks the protocol is disconnected.
    fn keep(&mut self, stub: Result<Stub, String>) -> Step {
        match stub {
            Ok(stub) => self.stub = Some(stub),
            Err(error) => {
                tracing::warn!("the debugger is let go: {error}");
                self.leave();
            }
        }
        Step::On
    }

    /// The debugger has gone or is disconnected. Its breakpoints are removed once the machine is
    /// paused. The machine then resumes.
    fn leave(&mut self) {
        self.wire().hang_up();
        self.clears = true;
    }

    fn clear(&mut self) {
        self.clears = false;
        self.target.clear();
        while self.traps.next().is_some() {}
    }

    /// Disconnects any debugger because the machine is asked to end: it must continue by itself.
    /// The machine is paused.
    pub fn dismiss(&mut self) {
        self.waits = false;
        self.stub = None;
        self.wire().hang_up();
        self.clear();
    }

    /// Reports that the machine has ended with this status.
    pub fn ended(&mut self, status: u8) {
        if let Some(GdbStubStateMachine::Running(running)) = self.stub.take() {
            let reason: MultiThreadStopReason<u64> = BaseStopReason::Exited(status);
            // The client may have gone.
            let _ = running.report_stop(&mut self.target, reason);
        }
    }

    fn wire(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.wire.lock().expect("nobody panics with it")
    }
}

/// The error for a client whose packets are too long.
const TOO_LONG: &str = "its packet is longer than the 4096 bytes that it was told";

/// The result of a step.
enum Step {
    /// There may be more to do.
    On,
    /// What the machine is to do.
    Wish(Wish),
}

/// GDB's command line for a machine that listens at `path` and has its symbols in `vmlinux`.
pub fn command(path: &Path, vmlinux: Option<&Path>) -> String {
    let symbols = vmlinux.map(|path| format!(" {}", path.display())).unwrap_or_default();
    format!("gdb{symbols} -ex 'target remote {}'", path.display())
}
