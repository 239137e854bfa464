//! A machine as the session runs it: its life from the first instruction to its end, the requests
//! that it answers, and the meaning of each exit of a vCPU.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuExit;
use serde_json::{Value, json};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::virtio::Wired;
use super::{Error, LinuxMachine};
use vellum_control::operation::Asker;
use vellum_control::{Cr3Cache, Do};
use vellum_devices::Ending;
use vellum_devices::bus::Bus;
use vellum_devices::console::{self, Console};
use vellum_devices::virtio::balloon::BalloonHandle;
use vellum_devices::virtio::vsock::SocketPath;
use vellum_devices::vmgenid::VmGenId;
use vellum_disk::DiskImage;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::core::Core;
use vellum_kvm::arch::fixed::Uart;
use vellum_kvm::arch::irqchip::Irqchip;
use vellum_kvm::dirty::{self, DirtyTracker};
use vellum_kvm::memory::{Memory, Slot, short_size};
use vellum_kvm::vm::counters;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::ring::DirtyRing;
use vellum_kvm::vm::vcpu::{self, Flow, Throttle, Vcpu, VcpusDebugHandle};
use vellum_machine::handoff::{self, HandoffFds};
use vellum_machine::{
    Disk, EventSources, HandOver, Inspect, Machine, MachineInfo, Progress, RestoreState, SaveState, Section,
    Subscriber,
};

/// Eventfds that tell the session to poll the machine.
pub(super) struct Wakes {
    /// A vCPU has ended, or will never run.
    pub ended: Arc<EventFd>,
    /// The user has typed Ctrl-A x.
    pub quit: Arc<EventFd>,
}

impl Wakes {
    pub fn new() -> io::Result<Self> {
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new);
        Ok(Self { ended: eventfd()?, quit: eventfd()? })
    }
}

impl Machine for LinuxMachine {
    type Error = Error;

    fn event_sources(&mut self) -> EventSources {
        if std::mem::replace(&mut self.served, true) {
            return EventSources::default();
        }
        let devices = self.virtio.devices.iter().map(|wired| wired.device.subscriber());
        let subscribers = std::iter::once(self.console.clone() as Subscriber).chain(devices).collect();
        EventSources { subscribers, wakes: vec![self.wakes.ended.clone(), self.wakes.quit.clone()] }
    }

    fn start(&mut self) -> Result<(), Error> {
        self.console().begin();
        if let Some((opened, _)) = self.virtio.find::<console::Opened>() {
            opened.begin();
        }
        self.resume();
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<Exit>, Error> {
        if self.wakes.ended.read().is_ok() {
            if let Some(failed) = self.vcpus.iter().find_map(Vcpu::take_failed) {
                return Err(failed.into());
            }
            let ended = self.vcpus.iter().find_map(|vcpu| Some((vcpu.index(), vcpu.take_ended()?)));
            if let Some((index, ended)) = ended {
                let exit = ended.exit;
                self.ended = Some((index, ended));
                return Ok(Some(exit));
            }
        }
        Ok(self.wakes.quit.read().is_ok().then_some(Exit::PowerOff))
    }

    fn pause(&mut self) -> Result<(), Error> {
        let vcpus = vcpu::pause_all_unless(&self.vcpus, || self.virtio.check_resets().map_err(Error::from));
        let stopped = vcpus.and_then(|_| Ok(self.virtio.quiesce()?));
        if stopped.is_err() {
            vcpu::resume_all(&self.vcpus);
        }
        stopped
    }

    fn resume(&mut self) {
        self.virtio.resume();
        vcpu::resume_all(&self.vcpus);
        self.console().go_on();
    }

    fn request_end(&mut self) -> bool {
        false
    }

    fn info(&self) -> MachineInfo {
        MachineInfo {
            vcpus: self.vcpus.len(),
            memory: self.vm.memory.config.size,
            backing: Some(self.vm.memory.config.backing),
            forked: self.vm.memory.is_forked(),
            balloon: self.virtio.find::<BalloonHandle>().map(|(balloon, _)| balloon.actual()),
            dirty_ring: self.vm.dirty_ring.as_deref().map(vellum_machine::dirty_rings),
            cr3_cache: self
                .vm
                .cr3_cache
                .map(|entries| Cr3Cache { entries, debugfs: counters::name(&self.vm.fd) }),
            vsock: self.virtio.find::<SocketPath>().map(|(path, _)| path.0.clone()),
            devices: self.virtio.devices.iter().map(|wired| wired.name.clone()).collect(),
            disks: self.virtio.all::<DiskImage>().map(|(name, _)| name.to_owned()).collect(),
            overlays: self
                .virtio
                .all::<DiskImage>()
                .filter(|(_, image)| image.overlay.is_some())
                .map(|(name, _)| name.to_owned())
                .collect(),
            stays: self.virtio.stays(),
            fork_stays: self.virtio.fork_stays(),
        }
    }

    fn progress(&self) -> Option<Progress> {
        None
    }

    fn silence(&self) -> Option<&'static str> {
        let is_heard = !self.serial.is_silent() || self.virtio.find::<console::Opened>().is_some();
        (!is_heard).then(|| match self.serial.kind() {
            Uart::Ns16550 => "CONFIG_SERIAL_8250_CONSOLE, or console=ttyS0 on its command line",
            Uart::Pl011 => "CONFIG_SERIAL_AMBA_PL011_CONSOLE, or console=ttyAMA0 on its command line",
        })
    }

    fn ask(&mut self, _: Asker, what: &Do, mut descriptors: Vec<OwnedFd>) -> Result<Value, String> {
        match what {
            Do::Balloon { bytes } => {
                let balloon = self.virtio.find::<BalloonHandle>();
                let (balloon, device) = balloon.ok_or("this machine was started without a balloon")?;
                let memory = self.vm.memory.config.size;
                if *bytes > memory {
                    let [asked, memory] = [*bytes, memory].map(short_size);
                    return Err(format!("{asked} is more than its memory of {memory}"));
                }
                balloon.set_target(*bytes, device);
            }
            Do::Serial { truncate } => {
                let file = File::from(descriptors.pop().ok_or("it takes a descriptor")?);
                console::check_output(&file).map_err(|error| error.to_string())?;
                if *truncate && file.metadata().is_ok_and(|metadata| metadata.is_file()) {
                    file.set_len(0).map_err(|error| format!("the file cannot be truncated: {error}"))?;
                }
                self.console().lead_to(file).map_err(|error| error.to_string())?;
            }
            Do::Nmi {} => nmi(&self.vcpus)?,
            Do::Sysrq { key } => {
                let key = u8::try_from(*key).ok().filter(u8::is_ascii_graphic);
                let key = key.ok_or("a key is a letter or a digit, as in b")?;
                if !self.serial.send_break(key) {
                    return Err("its serial port has received more than its guest has read".into());
                }
            }
            _ => return Err("a machine with a kernel cannot do that".into()),
        }
        Ok(json!({}))
    }

    fn stop(&mut self) {
        self.last_counters = self.counters.take().and_then(|counters| counters.read().ok());
        self.virtio.abandon();
        self.vcpus.clear();
    }

    fn flushed(&mut self) -> bool {
        self.serial.flush()
    }
}

impl Inspect for LinuxMachine {
    fn memory(&self) -> Vec<Slot> {
        self.vm.memory.slots().to_vec()
    }

    fn ram(&self) -> Memory {
        self.vm.memory.clone()
    }

    fn debug_handle(&self) -> VcpusDebugHandle {
        VcpusDebugHandle::new(&self.vcpus)
    }

    fn last_core(&self) -> Option<(usize, Core)> {
        self.ended.as_ref().and_then(|(index, ended)| Some((*index, *ended.kept.as_ref()?.downcast_ref()?)))
    }

    /// pvpanic is a module. Without it, a kernel's panic ends in a reset after a message on its
    /// console.
    fn has_panicked(&self, exit: Exit) -> bool {
        exit == Exit::Panic || matches!(exit, Exit::Reset | Exit::TripleFault) && self.serial.has_panicked()
    }
}

impl RestoreState for LinuxMachine {
    fn disks(&self) -> Vec<Disk> {
        let disks = self.virtio.all::<DiskImage>();
        disks.map(|(name, image)| Disk { name: name.to_owned(), image }).collect()
    }

    fn throttle(&self) -> Throttle {
        Throttle::new(&self.vcpus)
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Self::Error> {
        self.restore_state(sections, meanwhile)
    }

    fn commit(&mut self, forked: bool) -> Result<(), Self::Error> {
        self.commit_state(forked)
    }

    fn renew(&mut self) -> Result<(), Self::Error> {
        Ok(self.vmgenid.as_ref().map_or(Ok(()), VmGenId::renew)?)
    }

    fn retake(&mut self) -> Result<(), Self::Error> {
        Ok(self.virtio.retake()?)
    }

    fn give_typed(&mut self, typed: &[u8]) {
        self.console().give(typed);
    }
}

impl SaveState for LinuxMachine {
    fn describe(&self) -> Value {
        serde_json::to_value(self.description()).expect("descriptions are plain data")
    }

    fn track(&mut self, method: dirty::Method) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        let slots = self.memory();
        let (vm, quiesced) = self.quiesced().map_err(|error| dirty::Error::NotStill(Box::new(error)))?;
        let mut tracker = dirty::tracker(method, vm, &quiesced, Some(dirty::CHUNK))?;
        slots.iter().try_for_each(|slot| tracker.track(slot.id()))?;
        Ok(tracker)
    }

    fn save(&mut self) -> Result<Vec<Section>, Self::Error> {
        self.console().hold();
        self.save_state()
    }

    fn release(&mut self) {
        self.virtio.release();
    }

    fn take_typed(&mut self) -> Vec<u8> {
        self.console().take_held()
    }
}

impl HandOver for LinuxMachine {
    fn lend(&mut self, lent: &mut HandoffFds) -> Result<(), String> {
        let refused = |error: io::Error| format!("the host refuses a descriptor: {error}");
        lent.list.lock = self.vm.memory.config.lock;
        lent.list.dirty_ring = self.vm.dirty_ring.as_deref().map(DirtyRing::entries);
        let console::HandedConsole { output, input, slave, raw } = self.console().lend().map_err(refused)?;
        let [output, input, slave] = [output, input, slave].map(|file| file.map(|file| lent.add(file)));
        lent.list.serial = Some(handoff::Serial { output, input, slave, raw });
        for Wired { name, device, asked, .. } in &self.virtio.devices {
            let written = asked.written.clone().ok_or_else(|| format!("{name}: its path is no text"))?;
            let descriptors = device.lend().map_err(refused)?;
            let descriptors = descriptors.into_iter().map(|descriptor| lent.add(descriptor)).collect();
            lent.list.devices.push(handoff::Device { kind: asked.kind.to_owned(), written, descriptors });
        }
        Ok(())
    }
}

impl LinuxMachine {
    fn console(&self) -> MutexGuard<'_, Console> {
        self.console.lock().expect("nobody panics with it")
    }
}

/// Injects a non-maskable interrupt into the first vCPU, which is paused, as a chipset does.
#[cfg(target_arch = "x86_64")]
fn nmi(vcpus: &[Vcpu]) -> Result<(), String> {
    let given =
        vcpus.first().ok_or("it has no vCPU")?.with(|fd| fd.nmi()).map_err(|error| error.to_string())?;
    given.map_err(|error| format!("KVM_NMI: {error}"))
}

/// Arm guests have no non-maskable interrupt here.
#[cfg(not(target_arch = "x86_64"))]
fn nmi(_: &[Vcpu]) -> Result<(), String> {
    Err("Arm guests have no such interrupt here".into())
}

/// Handles an exit, and returns what the vCPU does next.
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
        // With a local APIC in KVM, a halted vCPU waits in the kernel, so this exit is spurious.
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
