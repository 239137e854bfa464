//! A device's interrupts to its driver: used buffers, a changed configuration space, or the need
//! for a reset.
//!
//! The registers behind them are accessed without the device's mutex, because the driver's
//! interrupt handler reads them on every interrupt. Interrupts are edges: each call with news
//! signals a line.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

use crate::line::Line;

/// No vector: the driver's value for a source that shall not interrupt (VIRTIO_MSI_NO_VECTOR,
/// virtio 1.2, section 4.1.5.1.2).
pub(crate) const NO_VECTOR: u16 = 0xffff;

/// A device's interrupts.
pub struct Interrupt {
    /// The interrupt status register: VIRTIO_MMIO_INT_*. PCI's ISR has the same bits (virtio 1.2,
    /// section 4.1.4.5).
    status: AtomicU32,
    generation: AtomicU32,
    broken: AtomicBool,
    lines: Arc<[Line]>,
    /// The vector of each queue, and last that of the configuration space, if the driver chooses
    /// them. Without vectors there is one line.
    vectors: Option<Box<[AtomicU16]>>,
}

/// The state that a migration carries, without the vectors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    status: u32,
    config_generation: u32,
    broken: bool,
}

impl Interrupt {
    /// No interrupt pending, and one line for all sources.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub(crate) fn on_one_line() -> io::Result<Self> {
        Ok(Self::on(Arc::new([Line::new(false)?]), None))
    }

    /// No interrupt pending, for a device with this number of queues. The driver has not chosen
    /// among `lines` yet.
    pub(crate) fn on_vectors(queues: usize, lines: Arc<[Line]>) -> Self {
        let vectors = (0..=queues).map(|_| AtomicU16::new(NO_VECTOR)).collect();
        Self::on(lines, Some(vectors))
    }

    fn on(lines: Arc<[Line]>, vectors: Option<Box<[AtomicU16]>>) -> Self {
        let status = AtomicU32::new(0);
        Self { status, generation: AtomicU32::new(0), broken: AtomicBool::new(false), lines, vectors }
    }

    /// All lines.
    pub fn lines(&self) -> &Arc<[Line]> {
        &self.lines
    }

    /// The vectors that the driver has chosen: of each queue, and last of the configuration space.
    pub fn vectors(&self) -> impl Iterator<Item = u16> + '_ {
        self.vectors.iter().flatten().map(|vector| vector.load(Ordering::SeqCst))
    }

    /// Sets the driver's vector for queue `source`, or for the configuration space after the last
    /// queue. An invalid vector becomes [`NO_VECTOR`]; the driver reads that back as a refusal.
    pub fn set_vector(&self, source: usize, vector: u16) {
        if let Some(chosen) = self.vectors.as_ref().and_then(|vectors| vectors.get(source)) {
            let there = usize::from(vector) < self.lines.len();
            chosen.store(if there { vector } else { NO_VECTOR }, Ordering::SeqCst);
        }
    }

    /// Signals used buffers in queue `index`.
    pub fn queue(&self, index: u16) {
        self.raise(VIRTIO_MMIO_INT_VRING, self.line(index.into()));
    }

    /// Signals a changed configuration space.
    pub fn config(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.raise(VIRTIO_MMIO_INT_CONFIG, self.config_line());
    }

    /// The driver broke the rules: the device stops until it is reset.
    pub fn needs_reset(&self, why: &dyn Error) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            tracing::warn!("virtio: {why}; the device stops until its driver resets it");
        }
        self.raise(VIRTIO_MMIO_INT_CONFIG, self.config_line());
    }

    /// Whether the device waits for a reset.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The interrupt status register.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    /// The driver acknowledges these bits of the status register.
    pub(crate) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    /// Reads and clears the status register.
    pub(crate) fn take_status(&self) -> u32 {
        self.status.swap(0, Ordering::AcqRel)
    }

    /// Counts changes of the configuration space, for drivers that need more than one access to
    /// read it.
    pub fn config_generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// The driver has reset the device.
    pub(super) fn reset(&self) {
        self.status.store(0, Ordering::Release);
        self.broken.store(false, Ordering::Release);
        self.vectors.iter().flatten().for_each(|vector| vector.store(NO_VECTOR, Ordering::SeqCst));
    }

    pub(super) fn save(&self) -> State {
        State { status: self.status(), config_generation: self.config_generation(), broken: self.is_broken() }
    }

    /// Restores what `save` returned. Unacknowledged interrupts are raised again, because they may
    /// have been in flight. With MSI-X the driver acknowledges nothing, so all chosen vectors are
    /// raised.
    pub(super) fn restore(&self, state: &State) {
        self.generation.store(state.config_generation, Ordering::Release);
        self.broken.store(state.broken, Ordering::Release);
        self.status.store(state.status, Ordering::Release);
        self.raise_again();
    }

    /// Raises what the driver has not acknowledged.
    pub fn raise_again(&self) {
        if self.status() != 0 {
            let chosen = |at: &usize| self.vectors.is_none() || self.vectors().any(|v| usize::from(v) == *at);
            (0..self.lines.len()).filter(chosen).for_each(|at| self.lines[at].signal());
        }
    }

    fn config_line(&self) -> Option<&Line> {
        self.line(self.vectors.as_ref().map_or(0, |vectors| vectors.len() - 1))
    }

    fn line(&self, source: usize) -> Option<&Line> {
        let vector = |vectors: &[AtomicU16]| vectors.get(source).map(|vector| vector.load(Ordering::SeqCst));
        let at = self.vectors.as_deref().map_or(Some(0), vector)?;
        self.lines.get(usize::from(at))
    }

    fn raise(&self, bit: u32, line: Option<&Line>) {
        self.status.fetch_or(bit, Ordering::AcqRel);
        if let Some(line) = line {
            line.signal();
        }
    }
}
