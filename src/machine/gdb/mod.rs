//! A debugger's way into a machine: GDB's remote protocol on a unix socket.
//!
//! The protocol is the gdbstub crate's; [`target`] is what it asks of a machine, [`wire`] the socket. Nothing here runs by itself and nothing
//! pauses a machine: [`Debugger::turn`], which the event loop's turns lead to, says what the machine is to do, and whoever has the machine
//! does it the way it pauses and resumes for anybody:
//!
//! ```text
//!                     somebody connects, or a vCPU meets a breakpoint, or GDB interrupts
//!   the machine runs  ------------------------- Wish::Stand ------------------------->  it stands still
//!                     <-------------------------- Wish::Go ---------------------------
//!                     GDB continues, steps, detaches or goes away
//! ```
//!
//! Registers and memory are looked at only while it stands still. What a debugger writes to memory goes through the VMM's own write
//! log, as a device's writes do.

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
    /// Where it is to connect.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// This architecture.
    #[error("{0}")]
    Impossible(&'static str),
    /// This KVM.
    #[error("this KVM lets nobody debug a guest (no KVM_CAP_SET_GUEST_DEBUG)")]
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

/// Where a debugger connects, and what is known of this KVM.
#[derive(Debug)]
pub struct Door {
    listener: Listener,
    /// Whether the machine does not run before a debugger lets it.
    waits: bool,
    /// Whether a vCPU that takes a single step can be kept from interrupts.
    blocks: bool,
}

impl Door {
    /// By `listener`, where this KVM can debug a guest; `waits`: the guest does not run before a debugger lets it.
    ///
    /// # Errors
    /// Where it cannot.
    pub fn open(listener: Listener, waits: bool, kvm: &kvm_ioctls::Kvm) -> Result<Self, Error> {
        use kvm_bindings::{KVM_CAP_SET_GUEST_DEBUG, KVM_CAP_SET_GUEST_DEBUG2};
        if let Some(why) = debug::IMPOSSIBLE {
            return Err(Error::Impossible(why));
        }
        if kvm.check_extension_raw(KVM_CAP_SET_GUEST_DEBUG.into()) <= 0 {
            return Err(Error::Kvm);
        }
        // The flags that KVM_SET_GUEST_DEBUG takes (api.rst, 4.87); 0 of a kernel that does not say.
        let flags = kvm.check_extension_raw(KVM_CAP_SET_GUEST_DEBUG2.into());
        Ok(Self { listener, waits, blocks: flags > 0 && debug::blocks_interrupts(flags as u32) })
    }

    /// One on a host whose KVM is not asked: for machines without vCPUs.
    pub fn without_kvm(listener: Listener, waits: bool) -> Self {
        Self { listener, waits, blocks: false }
    }
}

/// What a machine is to do for its debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing now.
    Nothing,
    /// To stand still; asked again as long as it does not.
    Stand,
    /// To go on, as far as its debugger is concerned.
    Go,
}

/// The protocol's state, with somebody at the other end.
type Stub = GdbStubStateMachine<'static, Target, Out>;

/// A machine's debugger.
pub struct Debugger {
    wire: Arc<Mutex<Wire>>,
    served: bool,
    traps: Arc<Traps>,
    target: Target,
    stub: Option<Stub>,
    /// Whether the machine waits for a debugger that has not come yet.
    waits: bool,
    /// Whether one has gone whose breakpoints are still there.
    clears: bool,
}

impl Debugger {
    /// That of the machine of these vCPUs and this memory, `ram` among `slots`. A vCPU that stops signals `wake`.
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

    /// What the event loop is to serve, once.
    pub fn event_sources(&mut self) -> Option<Arc<Mutex<Wire>>> {
        (!std::mem::replace(&mut self.served, true)).then(|| self.wire.clone())
    }

    /// Goes on as far as that is possible with a machine that `stands` still for it or does not, and says what the machine is to do next.
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
                // Nobody is there.
                return wish(if self.waits && !stands { Wish::Stand } else { Wish::Nothing });
            };
            if !stands {
                self.wire().give_out_back(out);
                return stand;
            }
            self.waits = false;
            // A debugger that has just come knows nothing of what was met before.
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
                // Looked for only while it stands still: what else has been met is known then.
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

    /// Goes on with `stub`. A client that breaks the protocol is let go.
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

    /// The debugger has gone, or is to: what it planted is taken out as soon as the machine stands still, which then goes on.
    fn leave(&mut self) {
        self.wire().hang_up();
        self.clears = true;
    }

    fn clear(&mut self) {
        self.clears = false;
        self.target.clear();
        while self.traps.next().is_some() {}
    }

    /// The machine is to go on by itself, whoever debugs it: its end is asked for. It stands still.
    pub fn dismiss(&mut self) {
        self.waits = false;
        self.stub = None;
        self.wire().hang_up();
        self.clear();
    }

    /// Its machine has ended with this status.
    pub fn ended(&mut self, status: u8) {
        if let Some(GdbStubStateMachine::Running(running)) = self.stub.take() {
            let reason: MultiThreadStopReason<u64> = BaseStopReason::Exited(status);
            // One that has gone is not told.
            let _ = running.report_stop(&mut self.target, reason);
        }
    }

    fn wire(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.wire.lock().expect("nobody panics with it")
    }
}

/// Why a client is let go whose packets have no end.
const TOO_LONG: &str = "its packet is longer than the 4096 bytes that it was told";

/// What a step comes to.
enum Step {
    /// There may be more to do.
    On,
    /// What the machine is to do.
    Wish(Wish),
}

/// GDB's command line for a machine that listens at `path`, whose symbols are in `vmlinux`.
pub fn command(path: &Path, vmlinux: Option<&Path>) -> String {
    let symbols = vmlinux.map(|path| format!(" {}", path.display())).unwrap_or_default();
    format!("gdb{symbols} -ex 'target remote {}'", path.display())
}
