//! The registers of a virtio device: virtio-mmio in both versions, or those of a PCI function's
//! capabilities (virtio 1.2, sections 4.1 and 4.2).

use crate::arch::{load, store};

/// The size of the queue.
pub(crate) const SIZE: u16 = 32;
/// VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM.
const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;
const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;

/// The location of the registers.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// The address of virtio-mmio registers.
    Mmio(u64),
    /// The addresses of the common, notification and device registers, and the notification stride.
    Pci { common: u64, notify: u64, stride: u64, device: u64 },
}

/// A started device.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    place: Place,
    queue: u16,
    notify: u64,
}

/// The addresses of a queue's parts.
pub(crate) struct Rings {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    /// On the next page.
    pub(crate) used: u64,
}

impl Place {
    /// The address for the log.
    pub(crate) fn address(self) -> u64 {
        match self {
            Self::Mmio(base) => base,
            Self::Pci { common, .. } => common,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mmio(_) => "mmio",
            Self::Pci { .. } => "pci",
        }
    }

    /// The device ID of the virtio-mmio registers at `base`. 0 if there is no device.
    pub(crate) fn mmio_kind(base: u64) -> u32 {
        match load::<u32>(base) {
            0x7472_6976 => load(base + 8),
            _ => 0,
        }
    }

    fn status(self) -> u32 {
        match self {
            Self::Mmio(base) => load(base + 0x70),
            Self::Pci { common, .. } => load::<u8>(common + 20).into(),
        }
    }

    fn set_status(self, status: u32) {
        match self {
            Self::Mmio(base) => store(base + 0x70, status),
            Self::Pci { common, .. } => store(common + 20, status as u8),
        }
    }

    /// Reads 32 bits of the device configuration.
    fn config(self, offset: u64) -> u32 {
        match self {
            Self::Mmio(base) => load(base + 0x100 + offset),
            Self::Pci { device, .. } => load(device + offset),
        }
    }

    fn feature_half(self, half: u32) -> u32 {
        match self {
            Self::Mmio(base) => {
                store(base + 0x14, half);
                load(base + 0x10)
            }
            Self::Pci { common, .. } => {
                store(common, half);
                load(common + 4)
            }
        }
    }

    fn accept(self, features: u64) {
        for half in 0..2 {
            let value = (features >> (32 * half)) as u32;
            match self {
                Self::Mmio(base) => {
                    store(base + 0x24, half);
                    store(base + 0x20, value);
                }
                Self::Pci { common, .. } => {
                    store(common + 8, half);
                    store(common + 12, value);
                }
            }
        }
    }

    /// Starts the device with queue `index`. Returns it and the first two words of its configuration.
    pub(crate) fn start(self, index: u16, rings: &Rings) -> Result<(Device, [u32; 2]), &'static str> {
        let legacy = matches!(self, Self::Mmio(base) if load::<u32>(base + 4) == 1);
        self.set_status(0);
        let mut polls = 0;
        while self.status() != 0 {
            polls += 1;
            if polls > 1_000_000 {
                return Err("it does not reset");
            }
        }
        // One bit after the other: Firecracker refuses both at once.
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        if legacy {
            self.accept(0);
        } else {
            let offered = u64::from(self.feature_half(0)) | u64::from(self.feature_half(1)) << 32;
            if offered & VERSION_1 == 0 {
                return Err("it does not offer VIRTIO_F_VERSION_1");
            }
            self.accept(offered & (VERSION_1 | ACCESS_PLATFORM));
            self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
            if self.status() & FEATURES_OK == 0 {
                return Err("it refuses the features");
            }
        }
        let notify = self.queue(index, rings, legacy)?;
        let features = if legacy { 0 } else { FEATURES_OK };
        self.set_status(ACKNOWLEDGE | DRIVER | DRIVER_OK | features);
        Ok((Device { place: self, queue: index, notify }, [self.config(0), self.config(4)]))
    }

    /// Sets up a queue. Returns the address of its notification register.
    fn queue(self, index: u16, rings: &Rings, legacy: bool) -> Result<u64, &'static str> {
        const SMALL: &str = "its queue is too short";
        let addresses = [rings.descriptors, rings.available, rings.used];
        match self {
            Self::Mmio(base) => {
                store(base + 0x30, u32::from(index));
                if load::<u32>(base + 0x34) < SIZE.into() {
                    return Err(SMALL);
                }
                store(base + 0x38, u32::from(SIZE));
                if legacy {
                    store(base + 0x28, 4096u32);
                    store(base + 0x3c, 4096u32);
                    store(base + 0x40, (rings.descriptors >> 12) as u32);
                } else {
                    for (register, address) in [0x80, 0x90, 0xa0].into_iter().zip(addresses) {
                        store(base + register, address as u32);
                        store(base + register + 4, (address >> 32) as u32);
                    }
                    store(base + 0x44, 1u32);
                }
                Ok(base + 0x50)
            }
            Self::Pci { common, notify, stride, .. } => {
                store(common + 22, index);
                if load::<u16>(common + 24) < SIZE {
                    return Err(SMALL);
                }
                store(common + 24, SIZE);
                // kvmtool takes entries of a longer queue then.
                if load::<u16>(common + 24) != SIZE {
                    return Err("its queue does not take a size");
                }
                for (register, address) in [32, 40, 48].into_iter().zip(addresses) {
                    store(common + register, address as u32);
                    store(common + register + 4, (address >> 32) as u32);
                }
                let offset = u64::from(load::<u16>(common + 30));
                store(common + 28, 1u16);
                Ok(notify + offset * stride)
            }
        }
    }
}

impl Device {
    /// Notifies the device of a new request.
    pub(crate) fn notify(self) {
        match self.place {
            Place::Mmio(_) => store(self.notify, u32::from(self.queue)),
            Place::Pci { .. } => store(self.notify, self.queue),
        }
    }

    /// Resets the device.
    pub(crate) fn reset(self) {
        self.place.set_status(0);
    }
}
