//! The PC: a board with devices, and the kernel that it boots.
//!
//! It is created in steps. Each step can fail before anything is left behind, and a machine can
//! start from a kernel or from another machine's state:
//!
//! 1. [`Opened::open`] opens the files of its devices. Nothing runs, nothing is mapped.
//! 2. [`Opened::assemble`] creates KVM's VM, its interrupt controller and its memory: a [`Board`].
//! 3. [`Board::boot`] loads a kernel ([`image`]) and returns how it is entered. A board that
//!    receives another machine skips this.
//! 4. [`Board::start`] starts the threads and wires devices and vCPUs: a [`LinuxMachine`]. Each
//!    thread enters the sandbox. The vCPUs wait at the kernel's entry, or for another machine's
//!    state ([`state`]). ([`Machine::poll`] reports a thread that never becomes ready.)
//!
//! The session runs it (`run.rs` implements what the session calls). Only this module decides the
//! addresses of devices. What a device does is in its own file.

mod error;
mod image;
mod run;
pub mod state;
pub mod virtio;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

pub use self::error::Error;
pub use self::image::{BootConfig, Image};
use self::run::on_exit;
use self::virtio::Virtio;
use vellum_devices::bus::{Bus, BusDevice};
use vellum_devices::console::{self, Console, Target};
use vellum_devices::rtc::Rtc;
use vellum_devices::serial::Serial;
use vellum_devices::virtio::transport::Codec;
use vellum_devices::vmgenid::VmGenId;
use vellum_devices::{acpi_pm, debug_exit, i8042, pl031, pvpanic, system_control, test_device};
use vellum_host::kvm::{Unusable, create_vm};
use vellum_kvm::arch::boot::Entry;
use vellum_kvm::arch::core::Core;
use vellum_kvm::arch::cpuid::{self, Choice, Cpuid, Leaf};
use vellum_kvm::arch::fixed::{Addresses, Device, Parts, Uart};
use vellum_kvm::arch::irqchip::{Irqchip, Mode};
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::arch::state::Context;
use vellum_kvm::arch::{clocks, layout, regs, tables};
use vellum_kvm::memory::{self, GuestMemory, Memory};
use vellum_kvm::vm::counters::{Counters, Snapshot};
use vellum_kvm::vm::cr3_cache;
use vellum_kvm::vm::vcpu::{self, Ended, Thread, Vcpu};
use vellum_kvm::vm::{self, Processor, Vm};
#[cfg(doc)]
use vellum_machine::Machine;
use vellum_machine::state::{Error as StateError, Processors};
use vellum_sandbox::{Sandbox, ThreadKind};

/// The configuration of a machine. The caller maps its memory.
#[derive(Clone, Debug)]
pub struct Config {
    /// The number of vCPUs.
    pub cpus: usize,
    /// The CPU of each vCPU, if they are pinned. The vCPUs take turns if there are fewer.
    pub pins: Option<Vec<usize>>,
    /// The interrupt controller.
    pub irqchip: Mode,
    /// CPU features.
    pub cpuid: Choice,
    /// The kind of serial port.
    pub uart: Uart,
    /// The target of the serial port.
    pub serial: Target,
    /// Virtio devices.
    pub virtio: virtio::Config,
    /// How the guest reaches the virtio devices.
    pub transport: Codec,
    /// The guest-physical address of its VM generation ID, if it is to have one.
    pub vmgenid: Option<u64>,
    /// Whether KVM's counters are read at the end.
    pub counters: bool,
    /// The number of entries of each vCPU's dirty ring, if there is to be one.
    pub dirty_ring: Option<u32>,
    /// Whether a guest on shadow paging may load CR3 without an exit.
    pub cr3_cache: cr3_cache::Choice,
    /// Whether it still runs in another process, which holds the locks of its disks.
    pub incoming: bool,
}

impl Default for Config {
    /// 1 vCPU, with its serial port on this process's terminal.
    fn default() -> Self {
        Self {
            cpus: 1,
            pins: None,
            irqchip: Mode::default(),
            cpuid: Choice::default(),
            uart: Uart::default(),
            serial: Target::default(),
            virtio: virtio::Config::default(),
            transport: Codec::default(),
            vmgenid: Some(layout::VMGENID),
            counters: false,
            dirty_ring: None,
            cr3_cache: cr3_cache::Choice::Off,
            incoming: false,
        }
    }
}

/// The number of APIC IDs below the broadcast ID. An MSI without remapping can address no others.
const MAX_CPUS: usize = 255;

/// A machine whose devices' files are open.
pub struct Opened {
    config: Config,
    virtio: virtio::Opened,
}

/// KVM's VM, its interrupt controller and its memory, without threads. A kernel is loaded into
/// this.
pub struct Board {
    config: Config,
    vm: Vm,
    irqchip: Arc<Irqchip>,
    virtio: virtio::Placed,
    cpuid: Cpuid,
    context: Context,
}

/// Where the vCPUs of a machine start.
#[derive(Clone, Copy, Debug)]
pub enum Origin<'a> {
    /// At a kernel's entry.
    Boot(&'a Entry),
    /// In the state of another machine, which
    /// [`RestoreState::restore`](vellum_machine::RestoreState::restore) restores.
    State {
        /// Whether it has the devices of kvm-unit-tests.
        test_devices: bool,
    },
}

/// Features of a machine that its other fields do not show.
struct Features {
    irqchip: Mode,
    cpuid: Vec<Leaf>,
    tsc_khz: Option<u32>,
    test_devices: bool,
}

/// A machine with all of its threads.
pub struct LinuxMachine {
    // This is dropped first: vCPU threads use everything below.
    /// Its vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// KVM's VM and RAM.
    pub vm: Vm,
    /// Its interrupt controller.
    pub irqchip: Arc<Irqchip>,
    /// Its serial port.
    pub serial: Arc<Serial>,
    /// Its real-time clock.
    pub rtc: Arc<Rtc>,
    /// Its virtio devices.
    pub virtio: Virtio,
    /// Its VM generation ID, if it has one.
    pub vmgenid: Option<VmGenId>,
    /// The vCPU that has ended, and how.
    pub ended: Option<(usize, Ended)>,
    /// KVM's counters at the end, if they were requested and this KVM has them.
    pub last_counters: Option<Snapshot>,
    counters: Option<Counters>,
    features: Features,
    context: Context,
    /// State that has been restored but not committed.
    arrived: Option<Processors>,
    console: Arc<Mutex<Console>>,
    wakes: run::Wakes,
    /// Whether the event loop has been given its sources.
    served: bool,
}

impl Opened {
    /// Opens the files, taps and sockets of the devices.
    ///
    /// # Errors
    /// One cannot be opened. Nothing is left behind.
    pub fn open(config: Config) -> Result<Self, Error> {
        if config.cpus == 0 || config.cpus > MAX_CPUS {
            return Err(Error::Cpus(config.cpus));
        }
        if !layout::UARTS.contains(&config.uart) {
            return Err(Error::Uart);
        }
        let virtio = virtio::Opened::open(&config.virtio, config.incoming)?;
        Ok(Self { config, virtio })
    }

    /// The names of its devices.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.virtio.names()
    }

    /// The CPUs that vCPUs are pinned to.
    pub fn pins(&self) -> Option<&[usize]> {
        self.config.pins.as_deref()
    }

    /// The number of entries of each vCPU's dirty ring, if there is to be one.
    pub fn dirty_ring(&self) -> Option<u32> {
        self.config.dirty_ring
    }

    /// Takes over the number of vCPUs, the interrupt controller, the serial port, the transport and
    /// the VM generation ID of `description`.
    ///
    /// # Errors
    /// No machine here can have that number of vCPUs or that serial port.
    pub fn become_like(mut self, description: &state::Description) -> Result<Self, Error> {
        if description.cpus == 0 || description.cpus > MAX_CPUS {
            return Err(Error::Cpus(description.cpus));
        }
        if !layout::UARTS.contains(&description.uart) {
            return Err(Error::Uart);
        }
        (self.config.cpus, self.config.irqchip) = (description.cpus, description.irqchip);
        self.config.uart = description.uart;
        (self.config.vmgenid, self.config.transport) = (description.vmgenid, description.transport);
        Ok(self)
    }

    /// The unix sockets that have been bound. The caller must have them removed in the end.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.virtio.sockets()
    }

    /// Creates the VM with the memory that `map` maps. Uses `begun` if a VM was created in advance
    /// ([`PreparedVm`]).
    ///
    /// # Errors
    /// The memory cannot be mapped, or KVM refuses.
    pub fn assemble(
        self,
        kvm: &Kvm,
        begun: Option<PreparedVm>,
        map: impl FnOnce() -> Result<Memory, memory::Error>,
    ) -> Result<Board, Error> {
        let Self { config, virtio } = self;
        let make = |vm: Result<VmFd, Unusable>| -> Result<_, Error> {
            let vm = vm.map_err(vm::Error::from)?;
            let vm = Vm::over(vm, map()?, config.dirty_ring)?.with_cr3_cache(config.cr3_cache)?;
            let irqchip = Arc::new(Irqchip::new(&vm.fd, config.irqchip)?);
            Ok((vm, irqchip))
        };
        let (supported, made) = match begun {
            Some(PreparedVm { vm, supported }) => (supported, make(Ok(vm))),
            None => cpuid::supported_beside(kvm, || make(create_vm(kvm))),
        };
        let (vm, irqchip) = made?;
        let mut cpuid = Cpuid::of_vm(supported, &vm.fd, &config.cpuid, config.cpus as u32)?;
        if vm.cr3_cache.is_some() {
            cpuid.show_cr3_cache();
        }
        let virtio = virtio.place(config.transport, irqchip.gsis())?;
        let mut context = Context::new(kvm, &vm.fd, true).map_err(|error| StateError::State(0, error))?;
        context.has_cr3_cache = vm.cr3_cache.is_some();
        Ok(Board { config, vm, irqchip, virtio, cpuid, context })
    }
}

impl Board {
    /// Loads the kernel of `image`, and the tables that describe this board.
    ///
    /// # Errors
    /// It is not a kernel, or does not fit into this memory.
    pub fn boot(&self, image: &mut Image) -> Result<Entry, Error> {
        let memory = &self.vm.memory.guest;
        let parts = Parts {
            cpus: self.config.cpus as u32,
            irqchip: self.config.irqchip,
            uart: self.config.uart,
            virtio: self.virtio.places(),
            vmgenid: self.config.vmgenid,
        };
        let tables = tables::prepare(memory, parts)?;
        image.load(memory, self.vm.memory.config.size, &tables)
    }

    /// Starts the threads and wires everything to KVM. `sandbox` is already active for the process.
    /// Each thread enters it.
    ///
    /// # Errors
    /// KVM or the host refuses.
    pub fn start(
        self,
        origin: Origin<'_>,
        opened: console::Opened,
        sandbox: Sandbox,
    ) -> Result<LinuxMachine, Error> {
        let Self { config, vm, irqchip, virtio, cpuid, context } = self;
        let test_devices = origin.has_test_devices();
        let host = |call| move |error| Error::Host(call, error);
        let wakes = run::Wakes::new().map_err(host("eventfd"))?;
        let vcpus = spawn_vcpus(&config, sandbox, &wakes.ended)?;
        let create = |index| vm.create_vcpu(index);
        let processors = (0..config.cpus).map(create).collect::<Result<Vec<_>, _>>()?;
        irqchip.complete(config.cpus)?;
        let output = opened.output.as_ref().map(File::try_clone).transpose().map_err(host("dup"))?;
        let serial = Arc::new(Serial::new(config.uart, output).map_err(host("eventfd"))?);
        irqchip.gsis().connect(&irqchip.gsis().claim(layout::SERIAL_GSI)?, serial.irq())?;
        let rtc = Arc::new(Rtc::default());
        let (mut pio, mut mmio) = buses(&irqchip, &serial, &rtc, test_devices)?;
        let memory = Arc::new(vm.memory.guest.clone());
        let vmgenid =
            config.vmgenid.map(|at| generation(memory.clone(), at, origin, &irqchip)).transpose()?;
        let board = virtio::Board { vm: &vm.fd, gsis: irqchip.gsis(), memory: &memory, sandbox };
        let virtio = virtio.attach(&board, &mut pio, &mut mmio)?;
        let (pio, mmio) = (Arc::new(pio), Arc::new(mmio));
        let tsc_khz = processors.first().and_then(|processor| clocks::khz(processor));
        let memory = &vm.memory.guest;
        give_vcpus(processors, memory, &vcpus, &cpuid, origin, &irqchip, (&pio, &mmio))?;
        let cpuid = cpuid.leaves()?;
        let features = Features { irqchip: config.irqchip, cpuid, tsc_khz, test_devices };
        let counters = config.counters.then(|| Counters::open(&vm.fd, &vcpus).ok()).flatten();
        // A machine that is restored has a new one, which nobody could find otherwise.
        if let Some(pty) = &opened.pty {
            tracing::info!("the serial port is {pty}");
        }
        let beside = virtio.find::<console::Opened>().and_then(|(console, _)| console.pty.as_ref());
        if let Some(pty) = beside {
            tracing::info!("the virtio console is {pty}");
        }
        let console =
            Console::new(serial.clone(), opened, wakes.quit.clone()).map_err(host("the terminal"))?;
        let console = Arc::new(Mutex::new(console));
        Ok(LinuxMachine {
            vcpus,
            vm,
            irqchip,
            serial,
            rtc,
            virtio,
            vmgenid,
            ended: None,
            last_counters: None,
            counters,
            features,
            context,
            arrived: None,
            console,
            wakes,
            served: false,
        })
    }

    /// Opens the target of the serial port. A file keeps its content until the machine starts.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open_serial(&self) -> Result<console::Opened, Error> {
        Ok(self.config.serial.open()?)
    }
}

impl Drop for LinuxMachine {
    fn drop(&mut self) {
        // The vCPUs' threads are joined next, and one may be waiting for a device.
        self.virtio.abandon();
    }
}

/// The board's devices on the buses of ports and of memory. `tests` adds the devices of a multiboot
/// guest, which is a test.
fn buses(
    irqchip: &Arc<Irqchip>,
    serial: &Arc<Serial>,
    rtc: &Arc<Rtc>,
    tests: bool,
) -> Result<(Bus, Bus), Error> {
    let (mut pio, mut mmio) = (Bus::default(), Bus::default());
    for fixed in layout::FIXED {
        let device: Arc<dyn BusDevice> = match fixed.device {
            Device::Serial => serial.clone(),
            Device::Cmos => rtc.clone(),
            Device::Pl031 => Arc::new(pl031::Pl031(rtc.clone())),
            Device::SystemControl => Arc::new(system_control::SystemControl),
            Device::I8042 => Arc::new(i8042::I8042),
            Device::PvPanic => Arc::new(pvpanic::PvPanic),
            Device::Sleep => Arc::new(acpi_pm::AcpiPm),
        };
        let bus = if fixed.on == Addresses::Ports { &mut pio } else { &mut mmio };
        bus.add(fixed.base, fixed.len, device)?;
    }
    if tests {
        pio.add(debug_exit::PORT.into(), debug_exit::PORTS, Arc::new(debug_exit::DebugExit))?;
        let scratch = |bytes| Arc::new(test_device::Scratch::new(bytes));
        let (count, bytes) = (test_device::SCRATCH_PORTS, test_device::SCRATCH_BYTES);
        pio.add(test_device::SCRATCH.into(), count, scratch(count))?;
        mmio.add(test_device::SCRATCH_MEMORY, bytes, scratch(bytes))?;
        let irqchip = irqchip.clone();
        let lines = test_device::Lines(Box::new(move |gsi, asserted| irqchip.set_line(gsi, asserted)));
        pio.add(test_device::LINES.into(), test_device::LINE_PORTS, Arc::new(lines))?;
    }
    if let Some((base, len)) = irqchip.registers() {
        mmio.add(base, len, irqchip.clone())?;
    }
    Ok((pio, mmio))
}

/// The VM generation ID at `at`. A guest that boots gets a new one.
fn generation(
    memory: Arc<GuestMemory>,
    at: u64,
    origin: Origin<'_>,
    irqchip: &Irqchip,
) -> Result<VmGenId, Error> {
    let vmgenid = VmGenId::new(memory, at)?;
    irqchip.gsis().connect(&irqchip.gsis().claim(layout::GENERATION_GSI)?, vmgenid.renewed())?;
    if matches!(origin, Origin::Boot(_)) {
        vmgenid.draw()?;
    }
    Ok(vmgenid)
}

impl Origin<'_> {
    /// Whether it has the devices for tests. Other guests must not find them by accident.
    fn has_test_devices(self) -> bool {
        match self {
            Self::Boot(entry) => entry.is_of_test(),
            Self::State { test_devices } => test_devices,
        }
    }
}

/// Starts the threads of the vCPUs. They become ready in the background.
fn spawn_vcpus(config: &Config, sandbox: Sandbox, ended: &Arc<EventFd>) -> Result<Vec<Vcpu>, vcpu::Error> {
    let spawn = |index: usize| {
        let ended = ended.clone();
        Vcpu::spawn(Thread {
            index,
            pin: config.pins.as_ref().and_then(|pins| pins.iter().cycle().nth(index).copied()),
            describe: regs::describe,
            keep: |fd| Some(Box::new(Core::read(fd).ok()?)),
            enter: Box::new(move || {
                sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
            }),
            // The write fails only on overflow, and then the eventfd is signalled anyway.
            on_end: Box::new(move || drop(ended.write(1))),
        })
    };
    (0..config.cpus).map(spawn).collect()
}

/// Passes each vCPU to its thread.
fn give_vcpus(
    processors: Vec<Processor>,
    memory: &GuestMemory,
    threads: &[Vcpu],
    cpuid: &Cpuid,
    origin: Origin<'_>,
    irqchip: &Arc<Irqchip>,
    (ports, mmio): (&Arc<Bus>, &Arc<Bus>),
) -> Result<(), Error> {
    for (index, (fd, thread)) in processors.into_iter().zip(threads).enumerate() {
        // Another machine's state includes its own registers and CPUID.
        let first = match origin {
            Origin::Boot(entry) => {
                let entered = (index == 0).then(|| (*entry, memory.clone()));
                Some((cpuid.for_vcpu(index as u32)?, entered))
            }
            Origin::State { .. } => None,
        };
        let prepare = move |fd: &VcpuFd| {
            let begin = |(setup, entered): (_, Option<(Entry, GuestMemory)>)| {
                regs::begin(fd, &setup, entered.as_ref().map(|(entry, memory)| (entry, memory)))
            };
            Ok(first.map_or(Ok(()), begin)?)
        };
        let (irqchip, ports, mmio) = (irqchip.clone(), ports.clone(), mmio.clone());
        thread.give(fd, prepare, move |exit: VcpuExit<'_>| on_exit(exit, &ports, &mmio, &irqchip));
    }
    Ok(())
}
