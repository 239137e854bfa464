//! The modern virtio-pci transport (virtio 1.2, section 4.1). A function's configuration space
//! tells where in its BAR the registers are. This module maps their offsets to registers.
//! [`Transport`] implements the registers, which virtio-mmio shares.
//!
//! ```text
//! BAR 0, 32 KiB    0x0000  common configuration       0x3000  notifications, 4 bytes a queue
//!                  0x1000  ISR                        0x4000  MSI-X table
//!                  0x2000  device configuration       0x5000  MSI-X pending bits
//! ```
//!
//! There is no INTx: a driver that does not enable MSI-X must poll.

use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::*;

use super::interrupt::Interrupt;
use super::registers::{Half, Register};
use super::transport::Transport;
use super::{RestoreError, VirtioDevice};
use crate::Ending;
use crate::line::Line;
use crate::pci::Function;
use crate::pci::config::{self, Config, Identity, touches};
use crate::pci::msix::{self, Message, Msix};
use vellum_kvm::memory::GuestMemory;

/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 0x8000;
/// Offsets of the parts within BAR 0, and the size of a part.
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
/// The offset of the doorbells in BAR 0. They are [`DOORBELL_STRIDE`] bytes apart.
pub const DOORBELLS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x5000;
const PART: u64 = 0x1000;
/// The notification multiplier.
pub const DOORBELL_STRIDE: u64 = 4;

/// The vendor ID of all virtio devices, and the base of their device IDs (section 4.1.2).
const VENDOR: u16 = 0x1af4;
const MODERN: u16 = 0x1040;
/// A subsystem ID of 0x40 or more keeps legacy drivers away.
const SUBSYSTEM: u16 = 0x1100;

/// The capability ID, and its types (section 4.1.4): VIRTIO_PCI_CAP_*_CFG.
const VENDOR_CAPABILITY: u8 = 9;
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const PCI_CFG: u8 = 5;
/// Offsets within the PCI configuration access capability: the BAR, offset and length of an access,
/// and its data.
const WINDOW_BAR: usize = 4;
const WINDOW_OFFSET: usize = 8;
const WINDOW_LENGTH: usize = 12;
const WINDOW_DATA: usize = 16;

/// Moves the KVM doorbells to a new BAR address; `None` while the BAR is unreachable.
pub type Move = Box<dyn Fn(&[Arc<vmm_sys_util::eventfd::EventFd>], Option<u64>) + Send + Sync>;

/// What a function needs from KVM.
pub struct Kvm {
    /// See [`msix::Route`].
    pub route: msix::Route,
    /// See [`Move`].
    pub move_doorbells: Move,
}

impl Kvm {
    /// No KVM: the caller handles doorbells and messages itself.
    pub fn none() -> Self {
        Self { route: Box::new(|_: usize, _: Message| ()), move_doorbells: Box::new(|_, _| ()) }
    }
}

/// A device on a PCI bus. Clones of the [`Transport`] that it dereferences to are handles to the
/// same device.
pub struct Pci {
    transport: Transport,
    queues: usize,
    msix: Msix,
    kvm_move: Move,
    window: Range<u64>,
    config: Mutex<Space>,
    /// The BAR's address. [`NOWHERE`] while it is outside the window or not decoded.
    at: AtomicU64,
}

/// Not a BAR's address, because it is not aligned.
const NOWHERE: u64 = u64::MAX;

/// The configuration space, and the offsets of the two capabilities whose writes have effects.
struct Space {
    config: Config,
    msix: usize,
    window: usize,
}

/// The state that a migration carries, without the transport's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    config: config::State,
    msix: msix::State,
    /// The vector of each queue, and last that of the configuration space.
    vectors: Vec<u16>,
}

/// The number of vectors of a device: one a queue, and one for configuration changes.
pub fn vectors(device: &dyn VirtioDevice) -> usize {
    device.queue_sizes().len() + 1
}

/// The lines of a device's vectors. KVM is connected to them.
///
/// # Errors
/// The host refuses descriptors.
pub fn lines(device: &dyn VirtioDevice) -> io::Result<Arc<[Line]>> {
    (0..vectors(device)).map(|_| Line::new(true)).collect()
}

impl Pci {
    /// A device in its reset state that interrupts through `lines`. Its BAR starts at `base` and
    /// can be moved within `window`. It is decoded once a driver enables memory space.
    ///
    /// # Errors
    /// The host refuses descriptors.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        lines: Arc<[Line]>,
        window: Range<u64>,
        base: u32,
        kvm: Kvm,
    ) -> io::Result<Self> {
        let (kind, queues) = (device.kind() as u16, device.queue_sizes().len());
        let config = Mutex::new(Space::new(kind, queues, lines.len(), base));
        let interrupt = Interrupt::on_vectors(queues, lines.clone());
        let transport = Transport::new(device, memory, interrupt)?;
        let msix = Msix::new(lines, kvm.route);
        let at = AtomicU64::new(NOWHERE);
        Ok(Self { transport, queues, msix, kvm_move: kvm.move_doorbells, window, config, at })
    }

    /// Saves the state for [`Pci::restore_function`]. The transport is saved separately.
    pub fn save_function(&self) -> State {
        State {
            config: self.lock().config.save(),
            msix: self.msix.save(),
            vectors: self.interrupt().vectors().collect(),
        }
    }

    /// Restores what [`Pci::save_function`] returned. Call this before the transport is restored,
    /// which signals vectors.
    ///
    /// # Errors
    /// The state is of another function.
    pub fn restore_function(&self, state: &State) -> Result<(), RestoreError> {
        let bad =
            |field, value: String| RestoreError::Field { field, value, reason: "does not fit this function" };
        let mut space = self.lock();
        if state.vectors.len() != self.queues + 1 {
            return Err(bad("vector count", state.vectors.len().to_string()));
        }
        if !space.config.restore(&state.config) {
            return Err(bad("configuration space", "of another function".into()));
        }
        if !self.msix.restore(&state.msix) {
            return Err(bad("MSI-X table", "of another size".into()));
        }
        self.msix.set_control(space.control());
        self.relocate(&space);
        for (source, vector) in state.vectors.iter().enumerate() {
            self.interrupt().set_vector(source, *vector);
        }
        Ok(())
    }

    /// Moves the BAR and its doorbells to the address in the configuration space.
    fn relocate(&self, space: &Space) {
        let inside = |base: &u64| self.window.contains(base) && self.window.end - base >= BAR_SIZE;
        let base = space.config.base().filter(inside);
        if base.unwrap_or(NOWHERE) != self.at.swap(base.unwrap_or(NOWHERE), Ordering::AcqRel) {
            (self.kvm_move)(self.doorbells(), base.map(|base| base + DOORBELLS));
        }
    }

    fn read_common(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let value = match (offset, data.len()) {
            (CONFIG_VECTOR, 2) => self.vector(self.queues),
            (NUM_QUEUES, 2) => self.queues as u32,
            (STATUS, 1) => self.get(Register::Status),
            (GENERATION, 1) => self.get(Register::ConfigGeneration),
            (QUEUE_VECTOR, 2) => match self.selected() {
                Some(queue) => self.vector(queue),
                None => super::interrupt::NO_VECTOR.into(),
            },
            (QUEUE_NOTIFY_OFF, 2) => self.selected().unwrap_or(0) as u32,
            (offset, len) => match register(offset, len) {
                Some(register) => self.get(register),
                None => return,
            },
        };
        let len = data.len();
        data.copy_from_slice(&value.to_le_bytes()[..len]);
    }

    fn write_common(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 4];
        let Some(word) = bytes.get_mut(..data.len()) else { return };
        word.copy_from_slice(data);
        let value = u32::from_le_bytes(bytes);
        match (offset, data.len()) {
            (CONFIG_VECTOR, 2) => self.interrupt().set_vector(self.queues, value as u16),
            (QUEUE_VECTOR, 2) => {
                if let Some(queue) = self.selected() {
                    self.interrupt().set_vector(queue, value as u16);
                }
            }
            (STATUS, 1) => self.set(Register::Status, value),
            // Only a reset disables a queue (section 4.1.4.3.2).
            (QUEUE_ENABLE, 2) if value != 1 => {}
            (offset, len) => {
                if let Some(register) = register(offset, len) {
                    self.set(register, value);
                }
            }
        }
    }

    /// The selected queue, if it exists.
    fn selected(&self) -> Option<usize> {
        let queue = self.get(Register::QueueSelect) as usize;
        (queue < self.queues).then_some(queue)
    }

    fn vector(&self, source: usize) -> u32 {
        self.interrupt().vectors().nth(source).unwrap_or(super::interrupt::NO_VECTOR).into()
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        self.config.lock().expect("the lock is not poisoned")
    }
}

impl Deref for Pci {
    type Target = Transport;

    fn deref(&self) -> &Transport {
        &self.transport
    }
}

impl Function for Pci {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let window = {
            let space = self.lock();
            touches(offset, data.len(), &space.data()).then(|| space.windowed()).flatten()
        };
        // Do not hold the mutex while registers are accessed: that may wait for the device.
        let read = window.map(|(at, len)| {
            let mut bytes = [0; 4];
            self.read_bar(at, &mut bytes[..len]);
            (bytes, len)
        });
        let mut space = self.lock();
        if let Some((bytes, len)) = read {
            let place = space.data().start;
            space.config.put(place, &bytes[..len]);
        }
        space.config.read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) -> Option<Ending> {
        let (window, bytes) = {
            let mut space = self.lock();
            space.config.write(offset, data);
            if touches(offset, data.len(), &(space.msix + 2..space.msix + 4)) {
                self.msix.set_control(space.control());
            }
            self.relocate(&space);
            let window = touches(offset, data.len(), &space.data()).then(|| space.windowed()).flatten();
            (window, space.config.double(space.data().start).to_le_bytes())
        };
        window.and_then(|(at, len)| self.write_bar(at, &bytes[..len]))
    }

    fn bar(&self) -> Option<(u64, u64)> {
        let at = self.at.load(Ordering::Acquire);
        (at != NOWHERE).then_some((at, BAR_SIZE))
    }

    fn read_bar(&self, offset: u64, data: &mut [u8]) {
        let at = offset % PART;
        match offset - at {
            COMMON => self.read_common(at, data),
            // One byte. Reading clears it.
            ISR if at == 0 => {
                data.fill(0);
                data[0] = self.interrupt().take_status() as u8;
            }
            DEVICE => self.read_config_space(at, data),
            TABLE => self.msix.read(at, data),
            PENDING => self.msix.read_pending(at, data),
            _ => data.fill(0),
        }
    }

    fn write_bar(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let at = offset % PART;
        match offset - at {
            COMMON => self.write_common(at, data),
            DEVICE => self.write_config_space(at, data),
            // KVM normally handles these writes through KVM_IOEVENTFD.
            DOORBELLS if at.is_multiple_of(DOORBELL_STRIDE) => self.ring((at / DOORBELL_STRIDE) as u32),
            TABLE => self.msix.write(at, data),
            _ => {}
        }
        None
    }
}

impl Pci {
    fn read_config_space(&self, at: u64, data: &mut [u8]) {
        self.transport.read_config(at as usize, data);
    }

    fn write_config_space(&self, at: u64, data: &[u8]) {
        self.transport.write_config(at as usize, data);
    }
}

impl Space {
    fn new(kind: u16, queues: usize, vectors: usize, base: u32) -> Self {
        let mut config = Config::new(Identity {
            vendor: VENDOR,
            device: MODERN + kind,
            class: class(kind.into()),
            revision: 1,
            subsystem: [VENDOR, SUBSYSTEM],
        });
        config.add_bar(BAR_SIZE as u32, base);
        let mut table = [0; 10];
        table[..2].copy_from_slice(&(vectors as u16 - 1).to_le_bytes());
        table[2..6].copy_from_slice(&(TABLE as u32).to_le_bytes());
        table[6..].copy_from_slice(&(PENDING as u32).to_le_bytes());
        let msix = config.add_capability(msix::CAPABILITY, &table);
        config.permit(msix + 2, &(msix::ENABLE | msix::FUNCTION_MASK).to_le_bytes());
        let doorbells = DOORBELL_STRIDE as u32 * queues as u32;
        part(&mut config, COMMON_CFG, COMMON, COMMON_LENGTH, &[]);
        part(&mut config, ISR_CFG, ISR, 1, &[]);
        part(&mut config, DEVICE_CFG, DEVICE, PART as u32, &[]);
        part(&mut config, NOTIFY_CFG, DOORBELLS, doorbells, &(DOORBELL_STRIDE as u32).to_le_bytes());
        let window = part(&mut config, PCI_CFG, 0, 0, &[0; 4]);
        config.permit(window + WINDOW_BAR, &[0xff]);
        config.permit(window + WINDOW_OFFSET, &[0xff; 12]);
        Self { config, msix, window }
    }

    /// MSI-X message control.
    fn control(&self) -> u16 {
        self.config.word(self.msix + 2)
    }

    /// The BAR access that the configuration access capability describes (section 4.1.4.9), if it
    /// is valid.
    fn windowed(&self) -> Option<(u64, usize)> {
        let bar = self.config.double(self.window + WINDOW_BAR) as u8;
        let [offset, len] = [WINDOW_OFFSET, WINDOW_LENGTH].map(|at| self.config.double(self.window + at));
        let fits = bar == 0
            && matches!(len, 1 | 2 | 4)
            && offset.is_multiple_of(len)
            && u64::from(offset) + u64::from(len) <= BAR_SIZE;
        fits.then_some((offset.into(), len as usize))
    }

    /// The offsets of that capability's data.
    fn data(&self) -> Range<usize> {
        self.window + WINDOW_DATA..self.window + WINDOW_DATA + 4
    }
}

/// Adds a capability that tells where a part is in BAR 0 (section 4.1.4, `struct virtio_pci_cap`).
/// Returns its offset.
fn part(config: &mut Config, kind: u8, offset: u64, length: u32, more: &[u8]) -> usize {
    let len = 16 + more.len() as u8;
    // The BAR's number, the ID and the padding are zero.
    let mut body = vec![len, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend(length.to_le_bytes());
    body.extend(more);
    config.add_capability(VENDOR_CAPABILITY, &body)
}

/// The class code of a device type, if PCI Code and ID Assignment 1.11 has one.
fn class(kind: u32) -> u32 {
    match kind {
        VIRTIO_ID_NET => 0x02_0000,
        VIRTIO_ID_BLOCK => 0x01_8000,
        VIRTIO_ID_CONSOLE => 0x07_8000,
        // No class fits.
        _ => 0xff_0000,
    }
}

/// Offsets of the common configuration (section 4.1.4.3): registers that exist only in PCI, and
/// those that are not 32 bits wide.
const CONFIG_VECTOR: u64 = 0x10;
const NUM_QUEUES: u64 = 0x12;
const STATUS: u64 = 0x14;
const GENERATION: u64 = 0x15;
const QUEUE_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
/// Its length, up to the last field that needs no feature.
const COMMON_LENGTH: u32 = 0x38;

/// The register of an access of `len` bytes at `offset`.
fn register(offset: u64, len: usize) -> Option<Register> {
    Some(match (offset, len) {
        (0x00, 4) => Register::DeviceFeaturesSelect,
        (0x04, 4) => Register::DeviceFeatures,
        (0x08, 4) => Register::DriverFeaturesSelect,
        (0x0c, 4) => Register::DriverFeatures,
        (0x16, 2) => Register::QueueSelect,
        (0x18, 2) => Register::QueueSize,
        (QUEUE_ENABLE, 2) => Register::QueueReady,
        (0x20, 4) => Register::QueueDescriptors(Half::Low),
        (0x24, 4) => Register::QueueDescriptors(Half::High),
        (0x28, 4) => Register::QueueAvailable(Half::Low),
        (0x2c, 4) => Register::QueueAvailable(Half::High),
        (0x30, 4) => Register::QueueUsed(Half::Low),
        (0x34, 4) => Register::QueueUsed(Half::High),
        _ => return None,
    })
}
