//! The driver's access to a device's registers: by virtio-mmio, or by virtio-pci behind a host
//! bridge. Both use the names of virtio-mmio's registers.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use vellum_devices::bus::BusDevice;
use vellum_devices::pci::Function;
use vellum_devices::pci::host::{Ecam, Host, Window};
use vellum_devices::virtio::mmio::Mmio;
use vellum_devices::virtio::pci::{self, Kvm, Pci};
use vellum_devices::virtio::transport::{self, Codec};
use vellum_devices::virtio::{RestoreError, VirtioDevice};
use vellum_kvm::memory::GuestMemory;
use virtio_bindings::virtio_mmio::*;

use super::driver::Transport;

/// The addresses of BARs. The device's BAR is at the start.
pub const WINDOW: std::ops::Range<u64> = 0xe800_0000..0xe810_0000;
/// The device's address in ECAM, behind the bridge.
pub const FUNCTION: u64 = 1 << 15;
/// Offsets of the parts of the BAR. A test checks that the capabilities name the same.
const ISR: u64 = 0x1000;
const CONFIG: u64 = 0x2000;
const DOORBELLS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
/// Message control of MSI-X, which is the first capability.
const MSIX_CONTROL: u64 = 0x42;
/// Offsets in the common configuration.
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const CONFIG_VECTOR: u64 = 0x10;
const QUEUE_VECTOR: u64 = 0x1a;

/// A device and the access to its registers.
pub enum Reach {
    /// With virtio-mmio.
    Mmio(Mmio),
    /// With virtio-pci.
    Pci {
        /// The device.
        function: Arc<Pci>,
        /// Its configuration space.
        ecam: Ecam,
        /// Its BAR.
        window: Window,
        /// Bits that were read of the ISR register and not acknowledged yet. Reading clears that
        /// register.
        seen: Cell<u32>,
    },
}

/// The saved state of a device: the transport's, and that of the PCI function.
pub type Saved = (transport::State, Option<pci::State>);

impl Reach {
    /// A device on this transport.
    pub fn new(codec: Codec, device: Box<dyn VirtioDevice>, memory: Arc<GuestMemory>) -> io::Result<Self> {
        if codec == Codec::Mmio {
            return Ok(Self::Mmio(Mmio::new(device, memory)?));
        }
        let lines = pci::lines(&*device)?;
        let function = Pci::new(device, memory, lines, WINDOW, WINDOW.start as u32, Kvm::none())?;
        let function = Arc::new(function);
        let host = Arc::new(Host::new([function.clone() as Arc<dyn Function>], WINDOW));
        let (ecam, window) = (Ecam(host.clone()), Window(host));
        // As a driver does first: enable memory space and bus mastering, and unmask all vectors.
        ecam.write(FUNCTION + 4, &[6, 0]);
        for vector in 0..function.interrupt().lines().len() as u64 {
            window.write(TABLE + 16 * vector, &(0xfee0_0000u64).to_le_bytes());
            window.write(TABLE + 16 * vector + 8, &(0x30 + vector).to_le_bytes());
        }
        ecam.write(FUNCTION + MSIX_CONTROL, &0x8000u16.to_le_bytes());
        Ok(Self::Pci { function, ecam, window, seen: Cell::new(0) })
    }

    /// The transport.
    pub fn codec(&self) -> Codec {
        match self {
            Self::Mmio(_) => Codec::Mmio,
            Self::Pci { .. } => Codec::Pci,
        }
    }

    /// The device.
    pub fn transport(&self) -> &Transport {
        match self {
            Self::Mmio(mmio) => mmio,
            Self::Pci { function, .. } => function,
        }
    }

    /// Assigns a vector to each queue and one to the configuration space, as drivers do after each
    /// reset.
    pub fn choose_vectors(&self) {
        let Self::Pci { function, window, .. } = self else { return };
        let queues = function.interrupt().lines().len() as u16 - 1;
        window.write(CONFIG_VECTOR, &queues.to_le_bytes());
        for queue in 0..queues {
            window.write(QUEUE_SELECT, &queue.to_le_bytes());
            window.write(QUEUE_VECTOR, &queue.to_le_bytes());
        }
    }

    /// Saves the device.
    pub fn save(&self) -> Saved {
        match self {
            Self::Mmio(mmio) => (mmio.save(), None),
            Self::Pci { function, .. } => (function.save(), Some(function.save_function())),
        }
    }

    /// Restores the device.
    pub fn restore(&self, (transport, function): Saved) -> Result<(), RestoreError> {
        if let (Self::Pci { function, .. }, Some(state)) = (self, function) {
            function.restore_function(&state)?;
        }
        self.transport().restore(transport)
    }

    /// Reads the device's configuration space.
    pub fn config(&self, offset: u64, data: &mut [u8]) {
        match self {
            Self::Mmio(mmio) => mmio.read(u64::from(VIRTIO_MMIO_CONFIG) + offset, data),
            Self::Pci { window, .. } => window.read(CONFIG + offset, data),
        }
    }

    /// Reads a register.
    pub fn get(&self, register: u32) -> u32 {
        let mut word = [0; 4];
        let Self::Pci { ecam, window, seen, .. } = self else {
            let Self::Mmio(mmio) = self else { unreachable!("there are two") };
            mmio.read(register.into(), &mut word);
            return u32::from_le_bytes(word);
        };
        let mut read = |at, len: usize| window.read(at, &mut word[..len]);
        match register {
            VIRTIO_MMIO_DEVICE_ID => {
                ecam.read(FUNCTION + 2, &mut word[..2]);
                return u32::from_le_bytes(word) - 0x1040;
            }
            VIRTIO_MMIO_INTERRUPT_STATUS => {
                read(ISR, 1);
                seen.set(seen.get() | u32::from(word[0]));
                return seen.get();
            }
            // A driver has not written it yet, so it is the maximum.
            VIRTIO_MMIO_QUEUE_NUM_MAX => read(QUEUE_SIZE, 2),
            VIRTIO_MMIO_CONFIG.. => read(CONFIG + u64::from(register - VIRTIO_MMIO_CONFIG), 4),
            other => match common(other) {
                Some((at, len)) => read(at, len),
                None => return 0,
            },
        }
        u32::from_le_bytes(word)
    }

    /// Writes a register.
    pub fn set(&self, register: u32, value: u32) {
        let word = value.to_le_bytes();
        let Self::Pci { window, seen, .. } = self else {
            let Self::Mmio(mmio) = self else { unreachable!("there are two") };
            mmio.write(register.into(), &word);
            return;
        };
        match register {
            VIRTIO_MMIO_INTERRUPT_ACK => seen.set(seen.get() & !value),
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                let at = DOORBELLS + 4 * u64::from(value % 0x400);
                window.write(at, &word[..2]);
            }
            VIRTIO_MMIO_CONFIG.. => {
                window.write(CONFIG + u64::from(register - VIRTIO_MMIO_CONFIG), &word);
            }
            other => {
                if let Some((at, len)) = common(other) {
                    window.write(at, &word[..len]);
                }
            }
        }
    }
}

/// The offset and the size of a register in the common configuration.
fn common(register: u32) -> Option<(u64, usize)> {
    Some(match register {
        VIRTIO_MMIO_DEVICE_FEATURES_SEL => (0x00, 4),
        VIRTIO_MMIO_DEVICE_FEATURES => (0x04, 4),
        VIRTIO_MMIO_DRIVER_FEATURES_SEL => (0x08, 4),
        VIRTIO_MMIO_DRIVER_FEATURES => (0x0c, 4),
        VIRTIO_MMIO_STATUS => (0x14, 1),
        VIRTIO_MMIO_CONFIG_GENERATION => (0x15, 1),
        VIRTIO_MMIO_QUEUE_SEL => (QUEUE_SELECT, 2),
        VIRTIO_MMIO_QUEUE_NUM => (QUEUE_SIZE, 2),
        VIRTIO_MMIO_QUEUE_READY => (0x1c, 2),
        VIRTIO_MMIO_QUEUE_DESC_LOW => (0x20, 4),
        VIRTIO_MMIO_QUEUE_DESC_HIGH => (0x24, 4),
        VIRTIO_MMIO_QUEUE_AVAIL_LOW => (0x28, 4),
        VIRTIO_MMIO_QUEUE_AVAIL_HIGH => (0x2c, 4),
        VIRTIO_MMIO_QUEUE_USED_LOW => (0x30, 4),
        VIRTIO_MMIO_QUEUE_USED_HIGH => (0x34, 4),
        _ => return None,
    })
}
