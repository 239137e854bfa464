//! A machine's virtio devices: where each lies, and how KVM and the event loop reach it.
//!
//! In steps, because interrupts and the sandbox lie between them: [`Opened::open`] opens files, taps and sockets,
//! [`Opened::place`] gives each device its address and interrupt, and [`Placed::attach`], with nothing left to open, starts
//! what threads they have and wires doorbells (ioeventfd) and interrupts (irqfd). Which kinds there are and what they do is
//! `devices/virtio`'s.

use std::any::Any;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::{IoEventAddress, VmFd};
use serde_json::Value;

use crate::arch::fixed::VirtioMmio;
use crate::arch::gsi::{self, Gsi, Gsis};
use crate::arch::layout;
use crate::control::Stays;
use crate::devices::bus::{Bus, Overlap};
use crate::devices::virtio::mmio::{self, Mmio};
use crate::devices::virtio::vsock::SocketPath;
use crate::devices::virtio::{DeviceConfig, Hang, KINDS, OpenError, PATIENCE, VirtioDevice};
use crate::fault::{Blame, Fault, Field};
use crate::memory::GuestMemory;
use crate::sandbox::Sandbox;

/// What is asked for, in the order in which devices of one kind are numbered.
#[derive(Clone, Debug, Default)]
pub struct Config(pub Vec<Arc<dyn DeviceConfig>>);

/// Why a device cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device of this kind.
    #[error("{1}")]
    Open(&'static str, OpenError),
    /// Two of a kind of which a machine has one.
    #[error("a machine can have one {0}")]
    Second(&'static str),
    /// Two devices that their guest could not tell apart.
    #[error("two of them are called '{1}', by which their guest could not tell them apart")]
    Twice(&'static str, String),
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
    /// Another process has what belongs to a device.
    #[error("{0}: {1}")]
    Locked(String, OpenError),
    /// The host refuses a descriptor or a thread.
    #[error("{0}: {1}")]
    Host(String, #[source] io::Error),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Open(key, error) => Blame { field: Some(Field::Device(key)), ..error.blame() },
            Self::Locked(_, error) => error.blame(),
            Self::Second(key) | Self::Twice(key, _) => Blame::user(Field::Device(key)),
            Self::TooMany(_) => Blame::USER,
            Self::Gsi(error) => error.blame(),
            Self::Kvm(..) | Self::Bus(_) | Self::Hangs(..) | Self::Host(..) => Blame::HOST,
        }
    }
}

type Handle = Arc<dyn Any + Send + Sync>;

/// A device that is open.
struct Device {
    /// `disk0`, `net0`, `vsock`, …
    name: String,
    device: Box<dyn VirtioDevice>,
    handle: Option<Handle>,
    asked: Asked,
}

/// What was asked for in a device, for a process that is to take it over.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The key of its kind.
    pub kind: &'static str,
    /// Of that kind's own form; `None` where it cannot be written.
    pub written: Option<Value>,
}

/// Devices with all that they need of the host.
pub struct Opened(Vec<Device>);

/// Devices with their interrupts.
pub struct Placed(Vec<(Device, Gsi)>);

/// A device that its guest can reach.
pub struct Wired {
    /// `disk0`, `net0`, `vsock`, …
    pub name: String,
    /// Its registers.
    pub device: Mmio,
    /// What was asked for.
    pub asked: Asked,
    handle: Option<Handle>,
}

/// A machine's devices, wired.
pub struct Virtio(pub Vec<Wired>);

impl Opened {
    /// Opens what `config` asks for. Nothing is left behind on failure. `unlocked`: for a machine that runs elsewhere yet.
    ///
    /// # Errors
    /// Which device cannot be had, and why.
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
                let name = if kind.repeats { format!("{}{at}", kind.key) } else { kind.key.to_owned() };
                let device = if unlocked { config.open_unlocked() } else { config.open() };
                let device = device.map_err(|error| Error::Open(kind.key, error))?;
                let asked = Asked { kind: kind.key, written: config.written().ok() };
                devices.push(Device { name, handle: device.handle(), device, asked });
            }
        }
        if devices.len() > gsi::FREE.len() { Err(Error::TooMany(devices.len())) } else { Ok(Opened(devices)) }
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

    /// Gives each device its interrupt.
    ///
    /// # Errors
    /// Where there are too few.
    pub fn place(self, gsis: &Gsis) -> Result<Placed, Error> {
        let placed = self.0.into_iter().map(|device| Ok((device, gsis.pick()?)));
        placed.collect::<Result<_, gsi::Error>>().map(Placed).map_err(Error::Gsi)
    }
}

impl Placed {
    /// Where the devices will be, for the board's tables.
    pub fn places(&self) -> Vec<VirtioMmio> {
        let size = mmio::REGION_SIZE;
        let place =
            |(at, (_, gsi)): (usize, &(Device, Gsi))| VirtioMmio { base: base(at), size, gsi: gsi.number() };
        self.0.iter().enumerate().map(place).collect()
    }

    /// Puts the devices on `bus` and wires them to KVM. The sandbox, already in force for the process, is entered by the
    /// threads that they start.
    ///
    /// # Errors
    /// Where KVM or the host refuses.
    pub fn attach(
        self,
        vm: &VmFd,
        gsis: &Gsis,
        bus: &mut Bus,
        memory: &Arc<GuestMemory>,
        sandbox: Sandbox,
    ) -> Result<Virtio, Error> {
        let mut wired = Vec::new();
        for (at, (Device { name, mut device, handle, asked }, gsi)) in self.0.into_iter().enumerate() {
            let host = |error| Error::Host(name.clone(), error);
            let thread = name.clone();
            let enter = move |kind| sandbox.enter(kind, &thread).map_err(io::Error::other);
            device.start(Box::new(enter)).map_err(host)?;
            let device = Mmio::new(device, memory.clone()).map_err(host)?;
            gsis.connect(&gsi, device.interrupt().config_event())?;
            let address = IoEventAddress::Mmio(base(at) + mmio::DOORBELLS);
            for (queue, doorbell) in (0u32..).zip(device.doorbells()) {
                vm.register_ioevent(doorbell, &address, queue).map_err(|e| Error::Kvm("KVM_IOEVENTFD", e))?;
            }
            bus.add(base(at), mmio::REGION_SIZE, Arc::new(device.clone()))?;
            wired.push(Wired { name, device, asked, handle });
        }
        Ok(Virtio(wired))
    }
}

impl Virtio {
    /// The handle of this type and the device that it is of, if there is one.
    pub fn find<T: Any + Send + Sync>(&self) -> Option<(&T, &Mmio)> {
        self.0.iter().find_map(|wired| Some((wired.handle.as_ref()?.downcast_ref()?, &wired.device)))
    }

    /// All handles of this type, with the names of their devices.
    pub fn all<T: Any + Send + Sync>(&self) -> impl Iterator<Item = (&str, Arc<T>)> {
        self.0.iter().filter_map(|wired| Some((wired.name.as_str(), wired.handle.clone()?.downcast().ok()?)))
    }

    /// Stops all devices: afterwards none touches guest memory.
    ///
    /// # Errors
    /// Which device hangs. All go on then.
    pub fn quiesce(&self) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        let hangs = self.0.iter().find_map(|Wired { name, device, .. }| {
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

    /// Whether no vCPU waits for a device that hangs, which it is resetting.
    ///
    /// # Errors
    /// Which device that is.
    pub fn check_resets(&self) -> Result<(), Error> {
        let hangs = |wired: &Wired| Some(Error::Hangs(wired.name.clone(), wired.device.hang()?));
        self.0.iter().find_map(hangs).map_or(Ok(()), Err)
    }

    /// The first device that keeps the machine where it is, if there is one.
    pub fn stays(&self) -> Option<Stays> {
        self.0.iter().find_map(|Wired { name, device, .. }| {
            let (key, why) = device.stays()?;
            Some(Stays { key: key.into(), name: name.clone(), why: why.into() })
        })
    }

    /// Starts all devices where they stopped.
    pub fn resume(&self) {
        self.0.iter().for_each(|wired| wired.device.resume());
    }

    /// Gives up all locks on the host's files.
    pub fn release(&self) {
        self.0.iter().for_each(|wired| wired.device.release());
    }

    /// Takes them.
    ///
    /// # Errors
    /// Which device cannot have its own. None has one then.
    pub fn retake(&self) -> Result<(), Error> {
        let taken = self.0.iter().try_for_each(|wired| {
            wired.device.retake().map_err(|error| Error::Locked(wired.name.clone(), error))
        });
        taken.inspect_err(|_| self.release())
    }

    /// The machine is over: no vCPU waits for a device any more. Before the vCPUs' threads are joined.
    pub fn abandon(&self) {
        self.0.iter().for_each(|wired| wired.device.abandon());
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
    use crate::devices::virtio::registers::Register;
    use crate::devices::virtio::{Active, DeviceState, RestoreError};
    use crate::memory::{Memory, MemoryConfig};

    /// A device without queues that says whether it runs, and hangs where it is told to.
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
            assert!(patience <= PATIENCE);
            match self.hangs {
                true => Err(Hang { what: "a request".into(), since: PATIENCE }),
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
                    device,
                    asked: Asked { kind: "fake", written: None },
                    handle: None,
                }
            });
            (Virtio(wired.collect()), runs)
        };
        let running = |runs: &[Arc<Mutex<Option<Active>>>]| -> Vec<bool> {
            runs.iter().map(|run| run.lock().unwrap().is_some()).collect()
        };
        let (devices, runs) = machine([false; 3]);
        devices.quiesce().unwrap();
        assert_eq!(running(&runs), [false; 3]);
        devices.resume();
        assert_eq!(running(&runs), [true; 3]);

        let (devices, runs) = machine([false, true, false]);
        let error = devices.quiesce().unwrap_err().to_string();
        assert!(error.starts_with("fake1: a request has not come back for 2.0 s"), "{error}");
        assert_eq!(running(&runs), [true; 3]);
    }
}
