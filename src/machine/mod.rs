//! A machine with devices: a kernel, and a PC around it.
//!
//! [`Machine::build`] makes it, its vCPUs at the kernel's entry (paused, or their threads still getting ready: one that never
//! does is [`Machine::run`]'s to tell); that (`run.rs`) lets it go and returns how it ended; `control.rs` does what the control
//! socket asks for meanwhile. Which device lies where is decided here and nowhere else; what a device does is its own
//! file's.

mod control;
mod run;
pub mod virtio;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use kvm_bindings::{KVM_CAP_TSC_DEADLINE_TIMER, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuExit};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use self::run::Outcome;
use self::run::{Happening, Watch, on_exit};
use self::virtio::Virtio;
use crate::arch::boot::{self, Entry, Protocol, Request};
use crate::arch::cpuid::{Choice, Cpuid};
use crate::arch::irqchip::{self, Irqchip, Mode};
use crate::arch::{acpi, ioapic, layout, ports, regs};
use crate::control::server::{Asked, Control, Listeners};
use crate::devices::bus::Bus;
use crate::devices::console::{Console, Target};
use crate::devices::rtc::Rtc;
use crate::devices::serial::Serial;
use crate::devices::{acpi_pm, debug_exit, i8042, pvpanic, test_device};
use crate::memory::{Memory, MemoryConfig};
use crate::sandbox::user::{self, User};
use crate::sandbox::{self, Sandbox, ThreadKind};
use crate::sys::signal::{ENDING, SignalFd};
use crate::sys::socket::{Name, SocketError};
use crate::sys::{guard, kick};
use crate::vm::vcpu::{self, Thread, Vcpu};
use crate::vm::{self, Vm, ioctl};

/// What is asked for.
#[derive(Clone)]
pub struct Config {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initial RAM disk, or a multiboot guest's module.
    pub initrd: Option<PathBuf>,
    /// The command line.
    pub cmdline: String,
    /// How the kernel is entered; `None` for the first way that it offers.
    pub protocol: Option<Protocol>,
    /// How many vCPUs.
    pub cpus: usize,
    /// The CPU of each, where they are pinned.
    pub pins: Option<Vec<usize>>,
    /// RAM.
    pub memory: MemoryConfig,
    /// The interrupt controller.
    pub irqchip: Mode,
    /// CPU features.
    pub cpuid: Choice,
    /// Where the serial port leads.
    pub serial: Target,
    /// Virtio devices.
    pub virtio: virtio::Config,
    /// Where the control socket is to be.
    pub control: Option<PathBuf>,
    /// Whether the outcome is to hold KVM's counters.
    pub counters: bool,
    /// What this process gives up before the guest runs.
    pub sandbox: Sandbox,
    /// For whom it gives up root.
    pub user: Option<User>,
}

impl Config {
    /// `kernel` on 1 vCPU and 512 MiB, its serial port on this process's terminal, without a sandbox.
    pub fn new(kernel: PathBuf) -> Self {
        Self {
            kernel,
            initrd: None,
            cmdline: String::new(),
            protocol: None,
            cpus: 1,
            pins: None,
            memory: MemoryConfig::new(512 << 20),
            irqchip: Mode::default(),
            cpuid: Choice::default(),
            serial: Target::default(),
            virtio: virtio::Config::default(),
            control: None,
            counters: false,
            sandbox: Sandbox::new(sandbox::Mode::Off),
            user: None,
        }
    }
}

/// Why a machine cannot be built or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be opened.
    #[error("{flag} {}: {error}; use a file that exists and that this user can read", path.display())]
    Open {
        /// The flag that named it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What the host said.
        error: io::Error,
    },
    /// The kernel, the initrd or the command line is wrong.
    #[error("{flag} {value}: {error}")]
    Boot {
        /// The flag to blame.
        flag: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would work.
        error: boot::Error,
    },
    /// More vCPUs than APIC ids that a kernel without interrupt remapping reaches.
    #[error("--cpus {0}: a Linux guest can have from 1 to {MOST_CPUS}")]
    Cpus(usize),
    /// KVM or memory.
    #[error(transparent)]
    Vm(#[from] vm::Error),
    /// Memory.
    #[error(transparent)]
    Memory(#[from] crate::memory::Error),
    /// vCPU threads.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
    /// CPU features.
    #[error(transparent)]
    Cpuid(#[from] crate::arch::cpuid::Error),
    /// The interrupt controller.
    #[error(transparent)]
    Irqchip(#[from] irqchip::Error),
    /// The control socket.
    #[error("--name: {0}")]
    Control(#[source] SocketError),
    /// A virtio device.
    #[error(transparent)]
    Virtio(#[from] virtio::Error),
    /// The serial port's target.
    #[error("--serial {0}")]
    Serial(#[from] crate::devices::console::OpenError),
    /// The tables.
    #[error(transparent)]
    Acpi(#[from] acpi::Error),
    /// The first registers.
    #[error(transparent)]
    Regs(#[from] regs::Error),
    /// Two devices at one address.
    #[error(transparent)]
    Bus(#[from] crate::devices::bus::Overlap),
    /// The host refuses a descriptor, or the terminal its mode.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// Privileges.
    #[error(transparent)]
    User(#[from] user::Error),
    /// The event loop.
    #[error("the event loop: {0}")]
    EventLoop(#[from] event_manager::Error),
}

impl Error {
    /// Whether the user can mend it by another command line.
    pub fn is_usage(&self) -> bool {
        use crate::vm::Error as VmError;
        if let Self::Virtio(error) = self {
            return error.is_usage();
        }
        matches!(
            self,
            Self::Open { .. }
                | Self::Boot { .. }
                | Self::Cpus(_)
                | Self::Memory(_)
                | Self::Cpuid(_)
                | Self::Serial(_)
                | Self::Control(_)
                | Self::Vm(VmError::Memory(_) | VmError::Cpus { .. })
        )
    }
}

/// APIC ids below the broadcast id, all that an MSI without remapping can name.
const MOST_CPUS: usize = 255;

/// A built machine.
pub struct Machine {
    // Dropped first: vCPU threads use everything below.
    /// Its vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// KVM's VM and RAM.
    pub vm: Vm,
    /// Its interrupt controller.
    pub irqchip: Arc<Irqchip>,
    /// Its serial port.
    pub serial: Arc<Serial>,
    /// Its clock.
    pub rtc: Arc<Rtc>,
    /// Its virtio devices.
    pub virtio: Virtio,
    /// The path of the pseudo-terminal that the serial port leads to.
    pub pty: Option<String>,
    /// Everything that the event loop serves. Subscribe more before [`Machine::run`].
    pub events: EventManager<Arc<Mutex<dyn MutEventSubscriber + Send>>>,
    happenings: Receiver<Happening>,
    asked: Receiver<Asked>,
    listeners: Listeners,
    console: Arc<Mutex<Console>>,
    paused: bool,
    counters: bool,
    sandbox: Sandbox,
}

impl Machine {
    /// Builds it. Files are opened and checked first, so that bad input costs nothing and leaves nothing behind.
    ///
    /// # Errors
    /// [`Error`], of which [`Error::is_usage`] tells whose fault it is.
    pub fn build(kvm: &Kvm, mut config: Config) -> Result<Self, Error> {
        if config.cpus == 0 || config.cpus > MOST_CPUS {
            return Err(Error::Cpus(config.cpus));
        }
        let mut kernel = open("--kernel", &config.kernel)?;
        let mut initrd = config.initrd.as_ref().map(|path| open("--initrd", path)).transpose()?;
        let virtio = virtio::Opened::open(&config.virtio)?;
        let (ask, asked) = channel();
        let control = config.control.as_deref().map(|path| Control::bind(path, ask)).transpose();
        let control = control.map_err(Error::Control)?;
        let vsock = config.virtio.vsock.as_ref().map(|vsock| &vsock.path);
        let names = config.control.iter().chain(vsock).filter_map(|path| Name::new(path).ok());
        guard::start(names.collect()).map_err(|error| Error::Host("the guard of its sockets", error))?;
        let memory = Memory::map(crate::arch::layout::RAM, config.memory)?;
        if config.memory.prealloc {
            memory.populate(|_| ())?;
        }
        let vm = Vm::new(kvm, memory)?;
        // Intel hosts need it for guests in real mode, and refuse to run without.
        ioctl("KVM_SET_TSS_ADDR", vm.fd.set_tss_address(layout::KVM_TSS as usize))?;
        let irqchip = Arc::new(Irqchip::new(&vm.fd, config.irqchip)?);
        let memory = &vm.memory.guest;

        let eventfd =
            || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new).map_err(|e| Error::Host("eventfd", e));
        let host = |call| move |error| Error::Host(call, error);
        let rsdp = acpi::write(memory, 0..config.cpus as u32, &virtio.places())?;
        let name = config.kernel.file_name().unwrap_or_default().to_string_lossy();
        let request =
            Request { name: &name, cmdline: &config.cmdline, protocol: config.protocol, rsdp: Some(rsdp) };
        let entry = boot::load(memory, &mut kernel, initrd.as_mut(), &request).map_err(|error| {
            let flag = error.flag();
            let value = match flag {
                "--initrd" => config.initrd.as_deref().unwrap_or(Path::new("")).display().to_string(),
                "--cmdline" => {
                    format!("'{}…'", config.cmdline.chars().take(32).collect::<String>().escape_debug())
                }
                "--memory" => crate::memory::short_size(config.memory.size),
                _ => config.kernel.display().to_string(),
            };
            Error::Boot { flag, value, error }
        })?;
        // Not before the kernel has been found good: a file is truncated when it is opened.
        let opened = config.serial.open()?;
        let output = opened.output.as_ref().map(File::try_clone).transpose().map_err(host("dup"))?;
        let serial = Arc::new(Serial::new(output).map_err(host("eventfd"))?);
        irqchip.connect(&vm.fd, serial.irq(), ports::COM1_GSI)?;
        let rtc = Arc::new(Rtc::default());

        let mut pio = Bus::default();
        pio.add(ports::COM1.into(), ports::COM_PORTS, serial.clone())?;
        pio.add(ports::RTC_INDEX.into(), ports::RTC_PORTS, rtc.clone())?;
        pio.add(ports::I8042_COMMAND.into(), 1, Arc::new(i8042::I8042))?;
        pio.add(ports::PVPANIC.into(), 1, Arc::new(pvpanic::PvPanic))?;
        pio.add(ports::SLEEP_CONTROL.into(), ports::SLEEP_PORTS, Arc::new(acpi_pm::AcpiPm))?;
        let mut mmio = Bus::default();
        if is_multiboot(&entry) {
            pio.add(debug_exit::PORT.into(), debug_exit::PORTS, Arc::new(debug_exit::DebugExit))?;
            let scratch = |bytes| Arc::new(test_device::Scratch::new(bytes));
            let (count, bytes) = (test_device::SCRATCH_PORTS, test_device::SCRATCH_BYTES);
            pio.add(test_device::SCRATCH.into(), count, scratch(count))?;
            mmio.add(test_device::SCRATCH_MEMORY, bytes, scratch(bytes))?;
            let (irqchip, vm) = (irqchip.clone(), vm.fd.clone());
            let lines =
                test_device::Lines(Box::new(move |gsi, asserted| irqchip.set_line(&vm, gsi, asserted)));
            pio.add(test_device::LINES.into(), test_device::LINE_PORTS, Arc::new(lines))?;
        }
        if let Irqchip::Split(ioapic) = &*irqchip {
            mmio.add(ioapic::BASE, ioapic::SIZE, ioapic.clone())?;
        }

        let (ended, quit) = (eventfd()?, eventfd()?);
        let signals = SignalFd::new(&ENDING).map_err(host("signalfd"))?;
        kick::install().map_err(host("sigaction"))?;
        // Everything has been opened, and there is no other thread yet.
        if let Some(user) = config.user {
            user::drop_privileges(user)?;
        }
        config.sandbox.process()?;
        let vcpus = spawn_vcpus(&config, &ended)?;
        let memory = Arc::new(vm.memory.guest.clone());
        let socket = config.virtio.vsock.as_ref().map(|vsock| vsock.path.clone());
        let virtio = virtio.attach(&vm.fd, &irqchip, &mut mmio, &memory, config.sandbox, socket)?;
        let (ports, mmio) = (Arc::new(pio), Arc::new(mmio));
        give_vcpus(kvm, &vm, &vcpus, &config.cpuid, &entry, &irqchip, (&ports, &mmio))?;
        let (tell, happenings) = channel();
        let pty = opened.pty.clone();
        let console = Console::new(serial.clone(), opened, quit.clone()).map_err(host("the terminal"))?;
        let console = Arc::new(Mutex::new(console));
        let mut events = EventManager::<Arc<Mutex<dyn MutEventSubscriber + Send>>>::new()?;
        events.add_subscriber(Arc::new(Mutex::new(Watch { ended, quit, signals, tell })));
        events.add_subscriber(console.clone());
        let listeners = control.as_ref().map(Control::listeners).unwrap_or_default();
        if let Some(control) = control {
            events.add_subscriber(Arc::new(Mutex::new(control)));
        }
        for (_, device) in &virtio.devices {
            events.add_subscriber(device.subscriber());
        }
        Ok(Self {
            vcpus,
            vm,
            irqchip,
            serial,
            rtc,
            virtio,
            pty,
            events,
            happenings,
            asked,
            listeners,
            console,
            paused: false,
            counters: config.counters,
            sandbox: config.sandbox,
        })
    }
}

/// kvm-unit-tests need devices that no other guest may stumble on.
fn is_multiboot(entry: &Entry) -> bool {
    matches!(entry, Entry::Protected { eax: boot::MULTIBOOT_MAGIC, .. })
}

fn open(flag: &'static str, path: &Path) -> Result<File, Error> {
    let refuse = |error| Error::Open { flag, path: path.to_owned(), error };
    // A pipe is opened only when somebody writes to it, and has no size.
    match std::fs::metadata(path).map_err(refuse)?.is_file() {
        true => File::open(path).map_err(refuse),
        false => Err(refuse(io::Error::other("not a regular file"))),
    }
}

/// The threads of the vCPUs, which get ready by themselves.
fn spawn_vcpus(config: &Config, ended: &Arc<EventFd>) -> Result<Vec<Vcpu>, vcpu::Error> {
    let spawn = |index: usize| {
        let (sandbox, ended) = (config.sandbox, ended.clone());
        Vcpu::spawn(Thread {
            index,
            pin: config.pins.as_ref().map(|pins| pins[index]),
            describe: regs::describe,
            enter: Box::new(move || {
                sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
            }),
            // It can only fail by overflowing, and then it is signalled anyway.
            on_end: Box::new(move || drop(ended.write(1))),
        })
    };
    (0..config.cpus).map(spawn).collect()
}

/// Makes the vCPUs, and gives each to its thread.
fn give_vcpus(
    kvm: &Kvm,
    vm: &Vm,
    threads: &[Vcpu],
    features: &Choice,
    entry: &Entry,
    irqchip: &Arc<Irqchip>,
    (ports, mmio): (&Arc<Bus>, &Arc<Bus>),
) -> Result<(), Error> {
    let supported = ioctl("KVM_GET_SUPPORTED_CPUID", kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    let deadline_timer = vm.fd.check_extension_raw(KVM_CAP_TSC_DEADLINE_TIMER.into()) > 0;
    let cpuid = Cpuid::new(supported.as_slice(), features, threads.len() as u32, deadline_timer)?;
    for (index, thread) in threads.iter().enumerate() {
        let fd = vm.create_vcpu(index)?;
        ioctl("KVM_SET_CPUID2", fd.set_cpuid2(&cpuid.for_vcpu(index as u32)?))?;
        regs::set_msrs(&fd)?;
        if index == 0 {
            regs::set(&fd, entry, &vm.memory.guest)?;
        }
        let (irqchip, ports, mmio) = (irqchip.clone(), ports.clone(), mmio.clone());
        thread.give(fd, move |exit: VcpuExit<'_>| on_exit(exit, &ports, &mmio, &irqchip));
    }
    Ok(())
}
