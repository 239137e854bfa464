//! A machine's virtio devices: what is asked for, where each lies, and how KVM and the event loop reach it.
//!
//! In two steps, because the sandbox lies between them: [`Opened::open`] opens files, taps and sockets, and
//! [`Opened::attach`], with nothing left to open, starts the disks' workers and wires the doorbells (ioeventfd) and
//! interrupts (irqfd). What a device does is its own file's, under `devices/virtio`.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::{IoEventAddress, VmFd};

use crate::arch::acpi::VirtioMmio;
use crate::arch::gsi::{self, Gsi, Gsis};
use crate::arch::layout;
use crate::devices::bus::{Bus, Overlap};
use crate::devices::console as host_console;
use crate::devices::virtio::balloon::{Balloon, BalloonHandle};
use crate::devices::virtio::blk::{Blk, BlkConfig, BlkError, Image};
use crate::devices::virtio::console::Console;
use crate::devices::virtio::mmio::{self, Mmio};
use crate::devices::virtio::net::{Net, NetConfig, NetError};
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::vsock::{Vsock, VsockConfig, VsockError};
use crate::devices::virtio::{Hang, PATIENCE, VirtioDevice};
use crate::fault::{Blame, Fault, Field};
use crate::memory::GuestMemory;
use crate::sandbox::{Sandbox, ThreadKind};

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<BlkConfig>,
    /// Network interfaces.
    pub nets: Vec<NetConfig>,
    /// The socket device.
    pub vsock: Option<VsockConfig>,
    /// A console beside the serial port.
    pub console: Option<host_console::Target>,
    /// An entropy source.
    pub rng: bool,
    /// A balloon.
    pub balloon: bool,
}

/// Why a device cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A disk.
    #[error("{0}")]
    Disk(#[source] BlkError),
    /// A network interface.
    #[error("{0}")]
    Net(#[source] NetError),
    /// The socket device.
    #[error("{0}")]
    Vsock(#[source] VsockError),
    /// The console.
    #[error("{0}")]
    Console(#[source] host_console::OpenError),
    /// The host's entropy.
    #[error("/dev/urandom: {0}")]
    Rng(#[source] io::Error),
    /// Too many.
    #[error("{0} virtio devices: a guest can have {most} at most", most = gsi::FREE.len())]
    TooMany(usize),
    /// KVM.
    #[error("{0}: {1}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Interrupts.
    #[error(transparent)]
    Gsi(#[from] gsi::Error),
    /// The address map.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// A request that does not come back keeps a device from standing still.
    #[error("{0}: {1}; is what it goes to still there?")]
    Hangs(String, #[source] Hang),
    /// The host refuses a descriptor or a thread.
    #[error("a virtio device: {0}")]
    Host(#[source] io::Error),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Disk(_) => Blame::user(Field::Disk),
            Self::Net(_) => Blame::user(Field::Net),
            Self::Vsock(_) => Blame::user(Field::Vsock),
            Self::Console(_) => Blame::user(Field::Console),
            Self::Rng(_) => Blame::host(Field::Rng),
            Self::TooMany(_) => Blame::USER,
            Self::Gsi(error) => error.blame(),
            Self::Kvm(..) | Self::Bus(_) | Self::Hangs(..) | Self::Host(_) => Blame::HOST,
        }
    }
}

/// Devices with all that they need of the host.
pub struct Opened {
    images: Vec<(String, Image)>,
    others: Vec<(String, Box<dyn VirtioDevice>)>,
    balloon: Option<BalloonHandle>,
    console: Option<host_console::Opened>,
}

/// Devices with their interrupts.
pub struct Placed {
    opened: Opened,
    gsis: Vec<Gsi>,
}

/// A machine's devices, wired.
pub struct Virtio {
    /// Each with its name: `disk0`, `net0`, `vsock`, …
    pub devices: Vec<(String, Mmio)>,
    /// The host's hand on the balloon, if there is one.
    pub balloon: Option<(BalloonHandle, Mmio)>,
    /// The socket to the guest's sockets, if there is one.
    pub vsock: Option<PathBuf>,
    /// Kept open with what it leads to.
    pub console: Option<host_console::Opened>,
}

impl Opened {
    /// Opens what `config` names. Nothing is left behind on failure.
    pub fn open(config: &Config) -> Result<Self, Error> {
        let mut images = Vec::new();
        for (at, disk) in config.disks.iter().enumerate() {
            images.push((format!("disk{at}"), Image::open(disk).map_err(Error::Disk)?));
        }
        let mut others: Vec<(String, Box<dyn VirtioDevice>)> = Vec::new();
        for (at, net) in config.nets.iter().enumerate() {
            others.push((format!("net{at}"), Box::new(Net::open(net).map_err(Error::Net)?)));
        }
        if let Some(vsock) = &config.vsock {
            others.push(("vsock".into(), Box::new(Vsock::open(vsock).map_err(Error::Vsock)?)));
        }
        let mut console =
            config.console.as_ref().map(|target| target.open()).transpose().map_err(Error::Console)?;
        if let Some(opened) = &mut console {
            let null = || File::options().write(true).open("/dev/null");
            let output = opened.output.take().map_or_else(null, Ok).map_err(Error::Host)?;
            others.push(("console".into(), Box::new(Console::new(opened.input.take(), output))));
        }
        if config.rng {
            others.push(("rng".into(), Box::new(Rng::new().map_err(Error::Rng)?)));
        }
        let balloon = config.balloon.then(Balloon::new).map(|(device, handle)| {
            others.push(("balloon".into(), Box::new(device)));
            handle
        });
        let count = images.len() + others.len();
        if count > gsi::FREE.len() {
            Err(Error::TooMany(count))
        } else {
            Ok(Opened { images, others, balloon, console })
        }
    }

    /// Gives each device its interrupt.
    pub fn place(self, gsis: &Gsis) -> Result<Placed, Error> {
        let count = self.images.len() + self.others.len();
        let gsis = (0..count).map(|_| gsis.pick()).collect::<Result<Vec<_>, _>>()?;
        Ok(Placed { opened: self, gsis })
    }
}

impl Placed {
    /// Where the devices will be, for the ACPI tables.
    pub fn places(&self) -> Vec<VirtioMmio> {
        let place = |(at, gsi): (usize, &Gsi)| VirtioMmio {
            base: base(at) as u32,
            size: mmio::REGION_SIZE as u32,
            gsi: gsi.number(),
        };
        self.gsis.iter().enumerate().map(place).collect()
    }

    /// Puts the devices on `bus` and wires them to KVM. The sandbox, already in force for the process, is entered by the
    /// disks' workers.
    pub fn attach(
        self,
        vm: &VmFd,
        gsis: &Gsis,
        bus: &mut Bus,
        memory: &Arc<GuestMemory>,
        sandbox: Sandbox,
        vsock: Option<PathBuf>,
    ) -> Result<Virtio, Error> {
        let Self { opened, gsis: mine } = self;
        let mut devices: Vec<(String, Box<dyn VirtioDevice>)> = Vec::new();
        for (name, image) in opened.images {
            let thread = name.clone();
            let enter = move || sandbox.enter(ThreadKind::Disk, &thread).map_err(io::Error::other);
            devices.push((name, Box::new(Blk::new(image, enter).map_err(Error::Host)?)));
        }
        devices.extend(opened.others);

        let mut wired = Vec::new();
        for (at, (name, device)) in devices.into_iter().enumerate() {
            let mmio = Mmio::new(device, memory.clone()).map_err(Error::Host)?;
            gsis.connect(&mine[at], mmio.interrupt().config_event())?;
            let address = IoEventAddress::Mmio(base(at) + mmio::DOORBELLS);
            for (queue, doorbell) in (0u32..).zip(mmio.doorbells()) {
                vm.register_ioevent(doorbell, &address, queue).map_err(|e| Error::Kvm("KVM_IOEVENTFD", e))?;
            }
            bus.add(base(at), mmio::REGION_SIZE, Arc::new(mmio.clone()))?;
            wired.push((name, mmio));
        }
        let mmio = wired.iter().find(|(name, _)| name == "balloon").map(|(_, mmio)| mmio.clone());
        Ok(Virtio { balloon: opened.balloon.zip(mmio), devices: wired, vsock, console: opened.console })
    }
}

impl Virtio {
    /// Stops all devices: afterwards none touches guest memory.
    ///
    /// # Errors
    /// Which device hangs. All go on then.
    pub fn quiesce(&self) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        let hangs = self.devices.iter().find_map(|(name, device)| {
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

    /// Starts all devices where they stopped.
    pub fn resume(&self) {
        self.devices.iter().for_each(|(_, device)| device.resume());
    }

    /// The machine is over: no vCPU waits for a device any more. Before the vCPUs' threads are joined.
    pub fn abandon(&self) {
        self.devices.iter().for_each(|(_, device)| device.abandon());
    }
}

fn base(at: usize) -> u64 {
    layout::VIRTIO_BASE + at as u64 * mmio::REGION_SIZE
}
