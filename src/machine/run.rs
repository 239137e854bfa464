//! The life of a machine, from its first instruction to its end: the event loop, what ends it, and what each exit of a
//! vCPU means.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuExit;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::{Error, Machine};
use crate::arch::irqchip::Irqchip;
use crate::control::Event;
use crate::devices::Ending;
use crate::devices::bus::Bus;
use crate::sandbox::ThreadKind;
use crate::sys::program::{SETTLING, release_start_up_code};
use crate::sys::signal::SignalFd;
use crate::sys::terminal;
use crate::vm::counters::{Counters, Snapshot};
use crate::vm::lifecycle::Exit;
use crate::vm::vcpu::{self, Ended, Flow, Vcpu};

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// Why, and with which status the process should exit.
    pub exit: Exit,
    /// What the failing vCPU said, where one failed.
    pub ended: Option<(usize, Ended)>,
    /// Bytes of serial output that nobody read.
    pub lost_output: u64,
    /// KVM's counters at the end, where they were asked for and this KVM has them.
    pub counters: Option<Snapshot>,
}

/// What ends a run from outside the vCPUs' own code.
pub(super) enum Happening {
    VcpuEnded,
    Quit,
    Signal(i32),
}

/// The event loop's part in ending: vCPUs that are gone, Ctrl-a x, signals.
pub(super) struct Watch {
    pub ended: Arc<EventFd>,
    pub quit: Arc<EventFd>,
    pub signals: SignalFd,
    pub tell: Sender<Happening>,
}

const ENDED: u32 = 0;
const QUIT: u32 = 1;
const SIGNALS: u32 = 2;

impl MutEventSubscriber for Watch {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // All three can be watched: they are eventfds and a signalfd.
        let _ = ops.add(Events::with_data(&*self.ended, ENDED, EventSet::IN));
        let _ = ops.add(Events::with_data(&*self.quit, QUIT, EventSet::IN));
        let _ = ops.add(Events::with_data(&self.signals, SIGNALS, EventSet::IN));
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        let happening = match events.data() {
            ENDED => self.ended.read().ok().map(|_| Happening::VcpuEnded),
            QUIT => self.quit.read().ok().map(|_| Happening::Quit),
            _ => self.signals.read().map(Happening::Signal),
        };
        // The receiver lives as long as the machine, which owns this loop.
        happening.and_then(|happening| self.tell.send(happening).ok());
    }
}

impl Machine {
    /// Runs it until it ends, by itself or by the user, or until `timeout` has passed.
    ///
    /// # Errors
    /// Where the event loop fails.
    pub fn run(&mut self, timeout: Option<Duration>) -> Result<Outcome, Error> {
        let counters = self.counters.then(|| Counters::open(&self.vm.fd, &self.vcpus).ok()).flatten();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        vcpu::resume_all(&self.vcpus);
        self.sandbox.enter(ThreadKind::Main, "main")?;
        let mut settled = false;
        let (exit, ended) = loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break (Exit::Timeout, None);
            }
            if settled {
                self.events.run_with_timeout(milliseconds(left))?;
            } else {
                // Out of the guest's way while it starts, for unmapping makes its vCPUs fault too.
                let first = left.map_or(SETTLING, |left| left.min(SETTLING));
                settled = self.events.run_with_timeout(milliseconds(Some(first)))? == 0;
                if settled {
                    release_start_up_code();
                }
            }
            if self.obey() {
                break (Exit::PowerOff, None);
            }
            match self.happenings.try_recv() {
                Ok(Happening::VcpuEnded) => {
                    if let Some(failed) = self.vcpus.iter().find_map(Vcpu::take_failed) {
                        return Err(failed.into());
                    }
                    let ended = self.vcpus.iter().find_map(|v| Some((v.index(), v.take_ended()?)));
                    if let Some((index, ended)) = ended {
                        break (ended.exit, Some((index, ended)));
                    }
                }
                Ok(Happening::Quit) => break (Exit::PowerOff, None),
                Ok(Happening::Signal(signal)) => break (Exit::Signal(signal), None),
                Err(_) => {}
            }
        };
        self.listeners.tell(&Event::Ended { status: exit.code() });
        let counters = counters.and_then(|counters| counters.read().ok());
        // Nothing of the guest runs any more. What it has said may still wait for a slow reader, which gets the time that
        // the run has left, unless the user has had enough.
        self.vcpus.clear();
        while ended.is_some() && !self.serial.flush() {
            let wait = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => break,
                left => milliseconds(left),
            };
            self.events.run_with_timeout(wait)?;
            if matches!(self.happenings.try_recv(), Ok(Happening::Signal(_) | Happening::Quit)) {
                break;
            }
        }
        terminal::restore();
        Ok(Outcome { exit, ended, lost_output: self.serial.unread(), counters })
    }
}

/// For epoll: rounded up, so that the last millisecond is not spent spinning; -1 waits for ever.
fn milliseconds(left: Option<Duration>) -> i32 {
    left.map_or(-1, |left| i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX))
}

/// What an exit means.
pub(super) fn on_exit(exit: VcpuExit<'_>, ports: &Bus, mmio: &Bus, irqchip: &Irqchip) -> Flow {
    let ending = match exit {
        VcpuExit::IoIn(port, data) => {
            ports.read(port.into(), data);
            None
        }
        VcpuExit::IoOut(port, data) => ports.write(port.into(), data),
        VcpuExit::MmioRead(address, data) => {
            mmio.read(address, data);
            None
        }
        VcpuExit::MmioWrite(address, data) => mmio.write(address, data),
        VcpuExit::IoapicEoi(vector) => {
            irqchip.eoi(vector);
            None
        }
        VcpuExit::Shutdown => return Flow::Stop(Exit::TripleFault),
        VcpuExit::SystemEvent(kind, _) => match kind {
            KVM_SYSTEM_EVENT_SHUTDOWN => Some(Ending::PowerOff),
            KVM_SYSTEM_EVENT_RESET => Some(Ending::Reset),
            KVM_SYSTEM_EVENT_CRASH => Some(Ending::Panic),
            _ => return Flow::Stop(Exit::Kvm),
        },
        // With a local APIC in KVM, a halted vCPU waits there; so this is a spurious wake-up.
        VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen | VcpuExit::Debug(_) => None,
        _ => return Flow::Stop(Exit::Kvm),
    };
    match ending {
        None => Flow::Continue,
        Some(Ending::PowerOff) => Flow::Stop(Exit::PowerOff),
        Some(Ending::Reset) => Flow::Stop(Exit::Reset),
        Some(Ending::Panic) => Flow::Stop(Exit::Panic),
        Some(Ending::Code(status)) => Flow::Stop(Exit::Guest(status)),
    }
}
