//! What a device tells its driver: that there are used buffers, that the configuration space has changed, that it waits
//! for a reset.
//!
//! The registers behind it are read and written without the device's mutex, because the driver's interrupt handler reads
//! them on every interrupt. Interrupts are edges: every call that has news writes an eventfd.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A device's interrupts.
pub struct Interrupt {
    /// The interrupt status register: VIRTIO_MMIO_INT_*, which are PCI's ISR bits too (virtio 1.2, section 4.1.4.5).
    status: AtomicU32,
    generation: AtomicU32,
    broken: AtomicBool,
    /// For KVM_IRQFD, without a resample fd: one for each queue, then one for the configuration space. On a transport
    /// with a single line they are the same.
    events: Box<[Arc<EventFd>]>,
}

/// What of it outlives a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    status: u32,
    config_generation: u32,
    broken: bool,
}

impl Interrupt {
    /// Nothing raised yet, and one line for everything that a device with so many queues says.
    pub fn on_one_line(queues: usize) -> io::Result<Self> {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        Ok(Interrupt {
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            events: vec![event; queues + 1].into(),
        })
    }

    /// What queue `index` writes when it interrupts.
    pub fn queue_event(&self, index: u16) -> &EventFd {
        &self.events[usize::from(index).min(self.events.len() - 1)]
    }

    /// What a change of the configuration space writes.
    pub fn config_event(&self) -> &EventFd {
        self.events.last().expect("there is always one for the configuration space")
    }

    /// Used buffers are waiting in queue `index`.
    pub fn queue(&self, index: u16) {
        self.raise(VIRTIO_MMIO_INT_VRING, self.queue_event(index));
    }

    /// The configuration space has changed.
    pub fn config(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.raise(VIRTIO_MMIO_INT_CONFIG, self.config_event());
    }

    /// The driver has broken the rules: the device stands still until it is reset.
    pub fn needs_reset(&self, why: &dyn Error) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::warn!("virtio: {why}; the device waits for a reset");
        }
        self.raise(VIRTIO_MMIO_INT_CONFIG, self.config_event());
    }

    /// Whether the device waits for a reset.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The interrupt status register.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// The driver has seen these bits of the status register.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    /// How often the configuration space has changed, for drivers that read more of it than one access holds.
    pub fn config_generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// The driver has reset the device.
    pub(super) fn reset(&self) {
        self.status.store(0, Ordering::Release);
        self.broken.store(false, Ordering::Release);
    }

    pub(super) fn save(&self) -> State {
        State { status: self.status(), config_generation: self.config_generation(), broken: self.is_broken() }
    }

    /// Takes over what `save` gave. What the driver has not acknowledged is raised again, for it may have been on its way.
    pub(super) fn restore(&self, state: &State) {
        self.generation.store(state.config_generation, Ordering::Release);
        self.broken.store(state.broken, Ordering::Release);
        self.status.store(state.status, Ordering::Release);
        if state.status != 0 {
            self.events.iter().for_each(|event| signal(event));
        }
    }

    fn raise(&self, bit: u32, event: &EventFd) {
        self.status.fetch_or(bit, Ordering::AcqRel);
        signal(event);
    }
}

fn signal(event: &EventFd) {
    // It fails only where the counter is full, and then the interrupt is on its way already.
    let _ = event.write(1);
}
