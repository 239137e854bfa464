//! A machine's virtio devices: their addresses, and how KVM and the event loop reach them.
//!
//! They are created in steps, because interrupts and the sandbox come between. [`Opened::open`]
//! opens files, taps and sockets. [`Opened::place`] gives each device its address and interrupts.
//! [`Placed::attach`] opens nothing: it starts the devices' threads and wires doorbells (ioeventfd)
//! and interrupts (irqfd). `devices/virtio` has the kinds of devices and what they do.
//!
//! With virtio-mmio a device has a page and a pin of the I/O APIC. On the PCI bus it has a BAR,
//! which its guest may move, and an interrupt number for each of its messages.

use std::any::Any;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use serde_json::Value;
use vmm_sys_util::eventfd::EventFd;

use vellum_control::MigrationBlocker;
use vellum_devices::bus::{Bus, Overlap};
use vellum_devices::pci::host::{ECAM_SIZE, Ecam, Host, PORTS, Ports, Window};
use vellum_devices::pci::msix::Message;
use vellum_devices::pci::{self as bus, Function};
use vellum_devices::virtio::mmio::{self, Mmio};
use vellum_devices::virtio::pci::{self, Pci};
use vellum_devices::virtio::transport::{Codec, Transport};
use vellum_devices::virtio::vsock::SocketPath;
use vellum_devices::virtio::{
    DeviceConfig, Hang, KINDS, Kind, OpenError, PAUSE_TIMEOUT, StartError, VirtioDevice,
};
use vellum_kvm::arch::fixed::{self, PciHost, VirtioMmio};
use vellum_kvm::arch::gsi::{self, Gsi, Gsis};
use vellum_kvm::arch::layout;
use vellum_kvm::memory::GuestMemory;
use vellum_sandbox::Sandbox;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The requested devices. Devices of one kind are numbered in this order.
#[derive(Clone, Debug, Default)]
pub struct Config(pub Vec<Arc<dyn DeviceConfig>>);

impl Config {
    /// The names of the devices.
    pub fn names(&self) -> Vec<String> {
        let of = |kind: &'static Kind| {
            let asked = self.0.iter().filter(move |config| config.kind().key == kind.key);
            asked.enumerate().map(move |(at, _)| name_of(kind, at))
        };
        KINDS.iter().flat_map(|kind| of(kind)).collect()
    }
}

/// The name of device `at` of a kind.
fn name_of(kind: &Kind, at: usize) -> String {
    if kind.repeats { format!("{}{at}", kind.key) } else { kind.key.to_owned() }
}

/// Why a device is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device of this kind cannot be opened.
    #[error("{1}")]
    Open(&'static str, OpenError),
    /// Two devices of a kind that a machine can have only once.
    #[error("a machine can have one {0}")]
    Second(&'static str),
    /// Two devices that the guest could not distinguish.
    #[error("two of them are called '{1}', by which their guest could not tell them apart")]
    Twice(&'static str, String),
    /// Too many devices.
    #[error("{0} virtio devices: a guest can have {1} at most")]
    TooMany(usize, usize),
    /// KVM refuses.
    #[error("{0}: {1}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// An interrupt is not available.
    #[error(transparent)]
    Gsi(#[from] gsi::Error),
    /// Two devices have the same address.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// A device cannot be paused, because a request does not complete.
    #[error("{0}: {1}; is what it goes to still there?")]
    Hangs(String, #[source] Hang),
    /// Another process has locked a device's file.
    #[error("{0}: {1}")]
    Locked(String, OpenError),
    /// A device cannot be saved.
    #[error("{0}: {1}")]
    Stays(String, String),
    /// The host refuses a descriptor or a thread.
    #[error("{0}: {1}")]
    Host(String, #[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Open(key, error) => ErrorOrigin { field: Some(Field::Device(key)), ..error.origin() },
            Self::Locked(_, error) => error.origin(),
            Self::Second(key) | Self::Twice(key, _) => ErrorOrigin::user(Field::Device(key)),
            Self::TooMany(..) | Self::Stays(..) => ErrorOrigin::USER,
            Self::Gsi(error) => error.origin(),
            Self::Kvm(..) | Self::Bus(_) | Self::Hangs(..) | Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}

type Handle = Arc<dyn Any + Send + Sync>;

/// An open device.
pub struct Device {
    /// Its name: `disk0`, `net0`, `vsock`, …
    name: String,
    device: Box<dyn VirtioDevice>,
    handle: Option<Handle>,
    asked: Asked,
}

/// The configuration of a device, for a process that takes it over.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The key of its kind.
    pub kind: &'static str,
    /// In that kind's own form; `None` if it cannot be written.
    pub written: Option<Value>,
}

/// Devices with everything that they need of the host.
pub struct Opened(Vec<Device>);

/// Devices with their interrupts.
pub enum Placed {
    /// With virtio-mmio: a pin each.
    Mmio(Vec<(Device, Gsi)>),
    /// On the PCI bus: an interrupt number for each vector.
    Pci {
        /// The devices with their interrupt numbers.
        devices: Vec<(Device, Vec<Gsi>)>,
        /// The location of the bus.
        place: PciHost,
    },
}

/// A device that its guest can reach.
pub struct Wired {
    /// Its name: `disk0`, `net0`, `vsock`, …
    pub name: String,
    /// Its registers.
    pub device: Transport,
    /// Its configuration.
    pub asked: Asked,
    handle: Option<Handle>,
}

impl Wired {
    /// It prevents what this key and reason say, if they do.
    fn blocker(&self, stays: Option<(&str, &str)>) -> Option<MigrationBlocker> {
        let (key, why) = stays?;
        Some(MigrationBlocker { key: key.into(), name: self.name.clone(), why: why.into() })
    }
}

/// A machine's PCI bus.
pub struct PciBus {
    /// The host bridge.
    pub host: Arc<Host>,
    /// The devices' functions on the bus, in order.
    pub functions: Vec<Arc<Pci>>,
}

/// A machine's devices, wired.
#[derive(Default)]
pub struct Virtio {
    /// In the order of their addresses.
    pub devices: Vec<Wired>,
    /// The PCI bus, if the devices are on one.
    pub pci: Option<PciBus>,
}

/// What devices are wired to.
pub struct Board<'a> {
    /// KVM's VM.
    pub vm: &'a Arc<VmFd>,
    /// Its interrupts.
    pub gsis: &'a Arc<Gsis>,
    /// Guest memory.
    pub memory: &'a Arc<GuestMemory>,
    /// The sandbox, which is already active for the process. Threads of devices enter it.
    pub sandbox: Sandbox,
}

impl Opened {
    /// Opens the devices of `config`. Nothing is left behind on failure. `unlocked` leaves files
    /// unlocked, for a machine that still runs elsewhere.
    ///
    /// # Errors
    /// Which device is not available, and why.
    pub fn open(config: &Config, unlocked: bool) -> Result<Self, Error> {
        let mut devices = Vec::new();
        for kind in KINDS {
            let asked = config.0.iter().filter(|config| config.kind().key == kind.key);
            for (at, config) in asked.clone().enumerate() {
                if at > 0 && !kind.repeats {
                    return Err(Error::Second(kind.key));
                }
                let like = |other: &&Arc<dyn DeviceConfig>| other.own_name() == config.own_name();
                if let Some(own) = config.own_name()
                    && asked.clone().take(at).any(|other| like(&other))
                {
                    return Err(Error::Twice(kind.key, own.to_owned()));
                }
                let name = name_of(kind, at);
                let device = if unlocked { config.open_unlocked() } else { config.open() };
                let device = device.map_err(|error| Error::Open(kind.key, error))?;
                let asked = Asked { kind: kind.key, written: config.written().ok() };
                devices.push(Device { name, handle: device.handle(), device, asked });
            }
        }
        Ok(Opened(devices))
    }

    /// The names of the devices.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|device| device.name.as_str())
    }

    /// The unix sockets that have been bound.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        let handles = self.0.iter().filter_map(|device| device.handle.as_ref());
        handles.filter_map(|handle| handle.downcast_ref::<SocketPath>()).map(|path| path.0.as_path())
    }

    /// Gives each device its interrupts.
    ///
    /// # Errors
    /// There are too few.
    pub fn place(self, codec: Codec, gsis: &Gsis) -> Result<Placed, Error> {
        let (most, place) = match codec {
            Codec::Mmio => (gsi::FREE.len(), None),
            // The first place is the host bridge's.
            Codec::Pci => (bus::DEVICES - 1, Some(layout::PCI)),
        };
        if self.0.len() > most {
            return Err(Error::TooMany(self.0.len(), most));
        }
        if codec == Codec::Pci && self.0.is_empty() {
            // The board's tables name the controller that receives the bus's messages, even without
            // devices on the bus.
            gsis.message().map_err(Error::Gsi)?;
        }
        let devices = self.0.into_iter();
        let messages = |device: &Device| {
            (0..pci::vectors(&*device.device)).map(|_| gsis.message()).collect::<Result<_, _>>()
        };
        let placed = match place {
            None => {
                devices.map(|device| Ok((device, gsis.pick()?))).collect::<Result<_, _>>().map(Placed::Mmio)
            }
            Some(place) => {
                let placed = devices.map(|device| messages(&device).map(|gsis| (device, gsis)));
                let devices = placed.collect::<Result<_, _>>();
                devices.map(|devices| Placed::Pci { devices, place })
            }
        };
        placed.map_err(Error::Gsi)
    }
}

impl Placed {
    /// The devices' locations, for the board's tables.
    pub fn places(&self) -> fixed::Virtio {
        let size = mmio::REGION_SIZE;
        let place =
            |(at, (_, gsi)): (usize, &(Device, Gsi))| VirtioMmio { base: base(at), size, gsi: gsi.number() };
        match self {
            Self::Mmio(devices) => fixed::Virtio::Mmio(devices.iter().enumerate().map(place).collect()),
            Self::Pci { place, .. } => fixed::Virtio::Pci(place.clone()),
        }
    }

    /// Adds the devices to the buses of ports and of memory, and wires them to KVM.
    ///
    /// # Errors
    /// KVM or the host refuses.
    pub fn attach(self, board: &Board<'_>, ports: &mut Bus, memory: &mut Bus) -> Result<Virtio, Error> {
        match self {
            Self::Mmio(devices) => attach_mmio(devices, board, memory),
            Self::Pci { devices, place } => attach_pci(devices, &place, board, ports, memory),
        }
    }
}

/// Starts the thread of a device, if it has one.
fn start(Device { name, device, asked, .. }: &mut Device, sandbox: Sandbox) -> Result<(), Error> {
    let thread = name.clone();
    let enter = move |kind| sandbox.enter(kind, &thread).map_err(io::Error::other);
    device.start(Box::new(enter)).map_err(|error| match error {
        StartError::Host(error) => Error::Host(name.clone(), error),
        StartError::Open(error) => Error::Open(asked.kind, error),
    })
}

fn attach_mmio(devices: Vec<(Device, Gsi)>, board: &Board<'_>, bus: &mut Bus) -> Result<Virtio, Error> {
    let mut wired = Virtio::default();
    for (at, (mut device, gsi)) in devices.into_iter().enumerate() {
        start(&mut device, board.sandbox)?;
        let Device { name, device, handle, asked } = device;
        let device =
            Mmio::new(device, board.memory.clone()).map_err(|error| Error::Host(name.clone(), error))?;
        for line in device.interrupt().lines().iter() {
            board.gsis.connect(&gsi, line.event())?;
        }
        let address = IoEventAddress::Mmio(base(at) + mmio::DOORBELLS);
        for (queue, doorbell) in (0u32..).zip(device.doorbells()) {
            board
                .vm
                .register_ioevent(doorbell, &address, queue)
                .map_err(|e| Error::Kvm("KVM_IOEVENTFD", e))?;
        }
        wired.devices.push(Wired { name, device: Transport::clone(&device), asked, handle });
        bus.add(base(at), mmio::REGION_SIZE, Arc::new(device))?;
    }
    Ok(wired)
}

fn attach_pci(
    devices: Vec<(Device, Vec<Gsi>)>,
    place: &PciHost,
    board: &Board<'_>,
    ports: &mut Bus,
    memory: &mut Bus,
) -> Result<Virtio, Error> {
    let (mut wired, mut functions) = (Vec::new(), Vec::new());
    for (at, (mut device, gsis)) in devices.into_iter().enumerate() {
        start(&mut device, board.sandbox)?;
        let Device { name, device, handle, asked } = device;
        let host = |error| Error::Host(name.clone(), error);
        let lines = pci::lines(&*device).map_err(host)?;
        for (gsi, line) in gsis.iter().zip(lines.iter()) {
            board.gsis.connect(gsi, line.event())?;
        }
        let kvm = pci::Kvm {
            route: router(board.gsis.clone(), gsis, bus::requester(at + 1)),
            move_doorbells: mover(board.vm.clone()),
        };
        let base = place.window.start + at as u64 * pci::BAR_SIZE;
        let memory = board.memory.clone();
        let window = place.window.clone();
        let function = Pci::new(device, memory, lines, window, base as u32, kvm).map_err(host)?;
        wired.push(Wired { name, device: Transport::clone(&function), asked, handle });
        functions.push(Arc::new(function));
    }
    let behind = functions.iter().map(|function| function.clone() as Arc<dyn Function>);
    let host = Arc::new(Host::new(behind, place.window.clone()));
    let window = place.window.end - place.window.start;
    if let Some(address) = place.ports {
        ports.add(address.into(), PORTS, Arc::new(Ports(host.clone())))?;
    }
    memory.add(place.ecam.start, ECAM_SIZE, Arc::new(Ecam(host.clone())))?;
    memory.add(place.window.start, window, Arc::new(Window(host.clone())))?;
    Ok(Virtio { devices: wired, pci: Some(PciBus { host, functions }) })
}

/// Tells KVM which message each vector of a device sends.
fn router(all: Arc<Gsis>, gsis: Vec<Gsi>, requester: u16) -> bus::msix::Route {
    Box::new(move |vector, message: Message| {
        all.route(&gsis[vector], requester, message.address, message.data);
    })
}

/// Registers a device's doorbells in KVM at the current address of its BAR.
fn mover(vm: Arc<VmFd>) -> pci::Move {
    let taken = Mutex::new(Vec::<(usize, u64)>::new());
    Box::new(move |doorbells: &[Arc<EventFd>], base| {
        let mut taken = taken.lock().expect("nobody panics with it");
        for (queue, at) in taken.drain(..) {
            let gone = vm.unregister_ioevent(&doorbells[queue], &IoEventAddress::Mmio(at), NoDatamatch);
            gone.unwrap_or_else(|error| tracing::error!(%error, "KVM_IOEVENTFD"));
        }
        let places = base.into_iter().flat_map(|base| (base..).step_by(pci::DOORBELL_STRIDE as usize));
        for ((queue, doorbell), at) in doorbells.iter().enumerate().zip(places) {
            // KVM refuses if the guest has placed another BAR over this one. Writes then arrive
            // through the bus.
            if vm.register_ioevent(doorbell, &IoEventAddress::Mmio(at), NoDatamatch).is_ok() {
                taken.push((queue, at));
            }
        }
    })
}

impl Virtio {
    /// The handle of this type and its device, if there is one.
    pub fn find<T: Any + Send + Sync>(&self) -> Option<(&T, &Transport)> {
        self.devices.iter().find_map(|wired| Some((wired.handle.as_ref()?.downcast_ref()?, &wired.device)))
    }

    /// All handles of this type, with the names of their devices.
    pub fn all<T: Any + Send + Sync>(&self) -> impl Iterator<Item = (&str, Arc<T>)> {
        self.devices
            .iter()
            .filter_map(|wired| Some((wired.name.as_str(), wired.handle.clone()?.downcast().ok()?)))
    }

    /// Pauses all devices. Afterwards none of them touches guest memory.
    ///
    /// # Errors
    /// Which device hangs. All devices then continue.
    pub fn quiesce(&self) -> Result<(), Error> {
        let deadline = Instant::now() + PAUSE_TIMEOUT;
        let hangs = self.devices.iter().find_map(|Wired { name, device, .. }| {
            let left = deadline.saturating_duration_since(Instant::now());
            device.quiesce(left).err().map(|hang| Error::Hangs(name.clone(), hang))
        });
        match hangs {
            None => Ok(()),
            Some(error) => {
                self.resume();
                Err(error)
            }
        }
    }

    /// Checks that no vCPU waits for the reset of a device that hangs.
    ///
    /// # Errors
    /// Which device hangs.
    pub(crate) fn check_resets(&self) -> Result<(), Error> {
        let hangs = |wired: &Wired| Some(Error::Hangs(wired.name.clone(), wired.device.hang()?));
        self.devices.iter().find_map(hangs).map_or(Ok(()), Err)
    }

    /// The first device that prevents migration, if there is one.
    pub fn stays(&self) -> Option<MigrationBlocker> {
        self.devices.iter().find_map(|wired| wired.blocker(wired.device.stays()))
    }

    /// The first device that prevents a fork, if there is one.
    pub fn fork_stays(&self) -> Option<MigrationBlocker> {
        self.devices.iter().find_map(|wired| wired.blocker(wired.device.fork_stays()))
    }

    /// Resumes all devices.
    pub fn resume(&self) {
        self.devices.iter().for_each(|wired| wired.device.resume());
    }

    /// Releases all locks on the host's files.
    pub fn release(&self) {
        self.devices.iter().for_each(|wired| wired.device.release());
    }

    /// Takes the locks on the host's files.
    ///
    /// # Errors
    /// Which device's file is locked elsewhere. No lock is held then.
    pub fn retake(&self) -> Result<(), Error> {
        let taken = self.devices.iter().try_for_each(|wired| {
            wired.device.retake().map_err(|error| Error::Locked(wired.name.clone(), error))
        });
        taken.inspect_err(|_| self.release())
    }

    /// The machine has ended: releases vCPUs that wait for a device. Called before the vCPUs'
    /// threads are joined.
    pub fn abandon(&self) {
        self.devices.iter().for_each(|wired| wired.device.abandon());
    }
}

fn base(at: usize) -> u64 {
    layout::VIRTIO_BASE + at as u64 * mmio::REGION_SIZE
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use virtio_bindings::virtio_config::*;

    use super::*;
    use vellum_devices::virtio::registers::Register;
    use vellum_devices::virtio::{Active, DeviceState, RestoreError};
    use vellum_kvm::memory::{Memory, MemoryConfig};

    /// A device without queues that records whether it runs, and hangs on request.
    struct Fake {
        hangs: bool,
        runs: Arc<Mutex<Option<Active>>>,
    }

    impl VirtioDevice for Fake {
        fn kind(&self) -> u32 {
            u32::MAX
        }

        fn queue_sizes(&self) -> &[u16] {
            &[]
        }

        fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

        fn activate(&mut self, active: Active) {
            *self.runs.lock().unwrap() = Some(active);
        }

        fn quiesce(&mut self, patience: Duration) -> Result<Option<Active>, Hang> {
            assert!(patience <= PAUSE_TIMEOUT);
            match self.hangs {
                true => Err(Hang { what: "a request".into(), since: PAUSE_TIMEOUT }),
                false => Ok(self.runs.lock().unwrap().take()),
            }
        }

        fn save(&self) -> DeviceState {
            unreachable!("nobody saves it")
        }

        fn restore(&mut self, _state: DeviceState) -> Result<(), RestoreError> {
            unreachable!("nobody saved it")
        }
    }

    #[test]
    fn where_one_device_hangs_all_go_on() {
        let memory = Memory::map(layout::RAM, MemoryConfig::new(2 << 20)).unwrap();
        let memory = Arc::new(memory.guest);
        let machine = |hangs: [bool; 3]| {
            let mut runs = Vec::new();
            let wired = hangs.into_iter().enumerate().map(|(at, hangs)| {
                runs.push(Arc::default());
                let fake = Fake { hangs, runs: Arc::clone(&runs[at]) };
                let device = Mmio::new(Box::new(fake), memory.clone()).unwrap();
                device.set(Register::DriverFeaturesSelect, 1);
                device.set(Register::DriverFeatures, 1 << (VIRTIO_F_VERSION_1 - 32));
                device.set(Register::Status, VIRTIO_CONFIG_S_FEATURES_OK);
                device.set(Register::Status, VIRTIO_CONFIG_S_DRIVER_OK);
                Wired {
                    name: format!("fake{at}"),
                    device: Transport::clone(&device),
                    asked: Asked { kind: "fake", written: None },
                    handle: None,
                }
            });
            (Virtio { devices: wired.collect(), pci: None }, runs)
        };
        let running = |runs: &[Arc<Mutex<Option<Active>>>]| -> Vec<bool> {
            runs.iter().map(|run| run.lock().unwrap().is_some()).collect()
        };
        let (devices, runs) = machine([false; 3]);
        devices.quiesce().unwrap();
        assert_eq!(running(&runs), [false; 3]);
        devices.resume();
        assert_eq!(running(&runs), [true; 3]);
        // A driver that has given up does not get the device back.
        devices.quiesce().unwrap();
        devices.devices[1].device.set(Register::Status, VIRTIO_CONFIG_S_FAILED);
        devices.resume();
        assert_eq!(running(&runs), [true, false, true]);

        let (devices, runs) = machine([false, true, false]);
        let error = devices.quiesce().unwrap_err().to_string();
        assert!(error.starts_with("fake1: a request has not come back for 2.0 s"), "{error}");
        assert_eq!(running(&runs), [true; 3]);
    }
}
