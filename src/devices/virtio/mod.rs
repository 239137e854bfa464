//! Virtio 1.2 devices over MMIO.
//!
//! Start reading at [`VirtioDevice`], then [`mmio`], the register file that drives one. [`queue`] takes requests off a
//! ring and [`slices`] is a request's bytes. Then one file a device: [`rng`] is the shortest, [`blk`] the only one
//! with a thread of its own; the others run on the event loop. What announces the devices to a guest (ACPI, FDT) and
//! wires their eventfds to KVM lives with the machine, not here.
//!
//! The driver is hostile: it may change buffers while they are read, point rings anywhere, and reset in the middle of
//! a request. Whatever breaks the rules of a ring stops the device with DEVICE_NEEDS_RESET; whatever is merely a bad
//! request is answered with the device's own error.

pub mod balloon;
pub mod blk;
pub mod console;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod rng;
pub mod slices;
pub mod vsock;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use event_manager::{EventOps, Events};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::memory::write_log::WriteLog;
use queue::VirtQueue;

/// The guest memory that devices read and write.
pub type Memory = vm_memory::GuestMemoryMmap<WriteLog>;

/// What the transport asks of a device. The transport holds the device's mutex during every call.
pub trait VirtioDevice: Send {
    /// The device type (virtio 1.2, section 5).
    fn kind(&self) -> u32;

    /// Feature bits that the device itself offers; the transport adds its own.
    fn features(&self) -> u64 {
        0
    }

    /// The largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Fills `data` from the device's configuration space at `offset`; what lies beyond it reads as zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// The driver writes to the configuration space; most devices have nothing to write.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// The driver is ready, or the machine resumes: the device owns its queues until [`VirtioDevice::quiesce`].
    fn activate(&mut self, active: Active);

    /// Finishes what is in flight and gives the queues back. When it returns nothing touches guest memory any more.
    fn quiesce(&mut self) -> Option<Active>;

    /// The driver has reset the device: forget everything that the next driver must not see. This runs on a vCPU's
    /// thread, whose sandbox allows few system calls; the queues' doorbells ring afterwards, for what needs more.
    fn reset(&mut self) {}

    /// Whether queue notifications are for the event loop; false for a device with a worker of its own.
    fn on_event_loop(&self) -> bool {
        true
    }

    /// Adds the device's own file descriptors to the event loop, with data below [`QUEUE_EVENTS`].
    fn watch(&mut self, _ops: &mut EventOps) {}

    /// The driver has notified queue `index`.
    fn notified(&mut self, _index: u16, _ops: &mut EventOps) {}

    /// One of the device's own file descriptors is ready.
    fn ready(&mut self, _events: Events, _ops: &mut EventOps) {}

    /// What a new process needs to carry on, beyond the transport's registers. Called while quiesced.
    fn save(&self) -> DeviceState;

    /// Takes over what `save` gave; called before the first activation.
    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError>;
}

/// In the event loop the data of queue `n`'s doorbell is `QUEUE_EVENTS + n`; a device's own are below it.
pub const QUEUE_EVENTS: u32 = 1 << 31;

/// A device's own part of its saved state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum DeviceState {
    /// A disk.
    Blk(blk::State),
    /// A network interface.
    Net(net::State),
    /// An entropy source.
    Rng(rng::State),
    /// A console.
    Console(console::State),
    /// A balloon.
    Balloon(balloon::State),
    /// A socket device.
    Vsock(vsock::State),
}

/// A saved state that does not fit the device it is given to.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It is another device's.
    #[error(
        "the saved state is of a {found}, the device here is a {expected}: give the restored machine the same devices in the same order"
    )]
    Kind {
        /// The device here.
        expected: &'static str,
        /// The device that was saved.
        found: &'static str,
    },
    /// A field holds what no save writes.
    #[error("the saved state's {field} is {value}, which {reason}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl DeviceState {
    fn name(&self) -> &'static str {
        match self {
            DeviceState::Blk(_) => "disk",
            DeviceState::Net(_) => "network interface",
            DeviceState::Rng(_) => "entropy source",
            DeviceState::Console(_) => "console",
            DeviceState::Balloon(_) => "balloon",
            DeviceState::Vsock(_) => "vsock",
        }
    }
}

impl RestoreError {
    fn kind(expected: &'static str, found: &DeviceState) -> Self {
        RestoreError::Kind { expected, found: found.name() }
    }
}

/// What a device owns while its driver runs.
pub struct Active {
    /// Guest memory.
    pub mem: Arc<Memory>,
    /// Feature bits that both sides have agreed on.
    pub features: u64,
    /// The queues that the driver has made ready, in order of their index.
    pub queues: Vec<VirtQueue>,
}

impl Active {
    /// The queue with this index, if the driver made it ready.
    pub fn queue(&mut self, index: u16) -> Option<&mut VirtQueue> {
        self.queues.iter_mut().find(|q| q.index() == index)
    }

    /// Whether the driver has accepted this feature bit.
    pub fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// A device's interrupt line: the status register that the driver reads and the irqfd behind it. Shared without a
/// lock, because the driver's interrupt handler reads it on every interrupt. The line is edge-triggered: every call
/// that has news writes the eventfd.
pub struct Interrupt {
    status: AtomicU32,
    generation: AtomicU32,
    broken: AtomicBool,
    event: EventFd,
}

impl Interrupt {
    /// A line that nothing has raised yet.
    pub fn new() -> std::io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Interrupt {
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            event,
        })
    }

    /// For KVM_IRQFD, without a resample fd.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Used buffers are waiting.
    pub fn queue(&self) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    /// The configuration space has changed.
    pub fn config(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// The driver has broken the rules: the device stands still until it is reset.
    pub fn needs_reset(&self, why: &dyn std::error::Error) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::warn!("virtio: {why}; the device waits for a reset");
        }
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    /// Whether the device waits for a reset.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    fn raise(&self, bit: u32) {
        self.status.fetch_or(bit, Ordering::AcqRel);
        // A full counter means that the interrupt is already on its way.
        let _ = self.event.write(1);
    }
}

/// Copies the part of a configuration space that starts at `offset`; zeros follow its end.
pub(crate) fn read_space(space: &[u8], offset: usize, data: &mut [u8]) {
    let tail = space.get(offset..).unwrap_or(&[]);
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
    data[count..].fill(0);
}
