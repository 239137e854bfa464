//! The part common to all virtio transports: feature negotiation, the status machine, queues,
//! reset, quiescing, saved state (virtio 1.2, sections 2 and 3). [`super::mmio`] and [`super::pci`]
//! are the codecs in front of it.
//!
//! A guest's accesses arrive on vCPU threads, and the device runs on the event loop. One mutex a
//! device separates them. Doorbells, interrupt status and acknowledgement, which every request
//! needs, are outside that mutex. Only a driver's reset waits for the device: Linux reuses the
//! buffers of a request in flight as soon as its write of 0 to the status register returns. So that
//! write returns only when the request has finished. It holds the mutex for [`GLANCE`] at a time:
//! the event loop must not wait for a request that hangs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::interrupt::{self, Interrupt};
use super::queue::{VirtQueue, is_memory};
use super::registers::{Register, Registers};
use super::{Active, DeviceState, Hang, OpenError, PAUSE_TIMEOUT, QUEUE_EVENTS, RestoreError, VirtioDevice};
use vellum_kvm::memory::GuestMemory;
use vellum_sys::plant::{self, Mistake};

/// Features that the transport offers for every device.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// No device has a longer configuration space.
const CONFIG_SPACE: usize = 256;

/// The virtio transport, as `--transport` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codec {
    /// A page of registers for each device, announced by the tables.
    #[default]
    Mmio,
    /// Functions on a PCI bus, which the guest enumerates.
    Pci,
}

impl Codec {
    /// Whether this is MMIO, the default and the only transport of old saved states.
    pub fn is_mmio(&self) -> bool {
        *self == Self::Mmio
    }
}

/// How often a vCPU that waits for a reset checks whether the machine has ended, and whether another
/// thread waits for the mutex.
const GLANCE: Duration = Duration::from_millis(100);

/// A device behind its registers. Clones are handles to the same device.
#[derive(Clone)]
pub struct Transport {
    interrupt: Arc<Interrupt>,
    doorbells: Arc<[Arc<EventFd>]>,
    waiting: Arc<Waiting>,
    inner: Arc<Mutex<Inner>>,
}

/// A vCPU that resets the device waits for requests in flight. This state is accessible without the
/// mutex.
#[derive(Default)]
struct Waiting {
    /// The number of threads that wait for the mutex, except for a reset.
    visitors: AtomicUsize,
    /// The machine has ended: no vCPU needs to wait for the device.
    abandoned: AtomicBool,
    /// What the vCPU has waited for longer than [`PAUSE_TIMEOUT`].
    hang: Mutex<Option<Hang>>,
}

impl Waiting {
    fn hang(&self) -> MutexGuard<'_, Option<Hang>> {
        self.hang.lock().expect("the lock is not poisoned")
    }
}

/// The state that the mutex guards.
struct Inner {
    device: Box<dyn VirtioDevice>,
    memory: Arc<GuestMemory>,
    interrupt: Arc<Interrupt>,
    doorbells: Arc<[Arc<EventFd>]>,
    registers: Registers,
    /// The device has its queues: the driver is ready and the machine is not quiesced.
    running: bool,
}

/// A saved device: registers, interrupts, and the device's own state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    registers: Registers,
    interrupt: interrupt::State,
    device: DeviceState,
}

/// A device's identity, independent of its driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The device type (section 5).
    pub kind: u32,
    /// The offered features.
    pub features: u64,
    /// The maximum number of entries of each queue.
    pub queues: Vec<u16>,
    /// The configuration space, up to its last non-zero byte.
    pub config: Vec<u8>,
}

/// The registers do not describe a valid queue.
#[derive(Debug, thiserror::Error)]
#[error("queue {0} is invalid: its size or alignment is wrong, or its rings are not all guest memory")]
struct InvalidQueue(u16);

impl Transport {
    /// A device in its reset state.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        interrupt: Interrupt,
    ) -> io::Result<Self> {
        let interrupt = Arc::new(interrupt);
        let doorbells =
            device.queue_sizes().iter().map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new));
        let doorbells: Arc<[_]> = doorbells.collect::<Result<Vec<_>, _>>()?.into();
        let waiting = Arc::<Waiting>::default();
        let registers = Registers::new(device.queue_sizes());
        let inner = Inner {
            device,
            memory,
            interrupt: interrupt.clone(),
            doorbells: doorbells.clone(),
            registers,
            running: false,
        };
        Ok(Transport { interrupt, doorbells, waiting, inner: Arc::new(Mutex::new(inner)) })
    }

    /// The device's interrupts to its driver.
    pub fn interrupt(&self) -> &Arc<Interrupt> {
        &self.interrupt
    }

    /// The doorbell of each queue, for KVM_IOEVENTFD.
    pub fn doorbells(&self) -> &[Arc<EventFd>] {
        &self.doorbells
    }

    /// The device as a subscriber of the event loop.
    pub fn subscriber(&self) -> Arc<Mutex<dyn MutEventSubscriber + Send>> {
        self.inner.clone()
    }

    /// Stops the device: requests in flight are finished, and guest memory is not touched until
    /// [`Transport::resume`].
    ///
    /// # Errors
    /// Requests take longer than `patience`. The device then continues.
    pub fn quiesce(&self, patience: Duration) -> Result<(), Hang> {
        if plant::is(Mistake::NoQuiesce) {
            return Ok(());
        }
        self.lock().quiesce(patience)
    }

    /// Resumes a quiesced device.
    pub fn resume(&self) {
        self.lock().start();
    }

    /// The machine has ended: a vCPU that waits for a reset of the device may stop waiting.
    pub fn abandon(&self) {
        self.waiting.abandoned.store(true, Ordering::Release);
    }

    /// What a vCPU that resets the device has waited for longer than [`PAUSE_TIMEOUT`]. Such a vCPU
    /// cannot pause.
    pub fn hang(&self) -> Option<Hang> {
        self.waiting.hang().clone()
    }

    /// Releases the device's locks on the host's files. Called while quiesced.
    pub fn release(&self) {
        self.lock().device.release();
    }

    /// Takes the locks again.
    ///
    /// # Errors
    /// Another user holds a lock.
    pub fn retake(&self) -> Result<(), OpenError> {
        self.lock().device.retake()
    }

    /// Why the machine can be neither saved nor moved because of this device.
    pub fn stays(&self) -> Option<(&'static str, &'static str)> {
        self.lock().device.stays()
    }

    /// Why the device cannot be forked, if so.
    pub fn fork_stays(&self) -> Option<(&'static str, &'static str)> {
        let device = &self.lock().device;
        device.stays().filter(|_| !device.is_copied_by_forks())
    }

    /// Duplicates all descriptors that the device has open on the host.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn lend(&self) -> io::Result<Vec<OwnedFd>> {
        self.lock().device.lend()
    }

    /// The machine has arrived from another process, or was forked from one that runs on.
    pub fn arrived(&self, forked: bool) {
        self.lock().device.arrived(forked);
    }

    /// Describes the device, to compare it with another.
    pub fn describe(&self) -> Description {
        let inner = self.lock();
        let mut config = vec![0; CONFIG_SPACE];
        inner.device.read_config(0, &mut config);
        let end = config.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        config.truncate(end);
        Description {
            kind: inner.device.kind(),
            features: inner.features(),
            queues: inner.device.queue_sizes().to_vec(),
            config,
        }
    }

    /// Saves the device, which must be quiesced.
    pub fn save(&self) -> State {
        let inner = self.lock();
        let mut registers = inner.registers.clone();
        if plant::is(Mistake::DevicesAhead) {
            let queues = registers.queues.iter_mut();
            queues.for_each(|queue| queue.next_available = queue.next_available.wrapping_add(1));
        }
        State { registers, interrupt: self.interrupt.save(), device: inner.device.save() }
    }

    /// Restores what [`Transport::save`] returned. The device stays quiesced until
    /// [`Transport::resume`].
    ///
    /// # Errors
    /// The state is of another device, or invalid.
    pub fn restore(&self, state: State) -> Result<(), RestoreError> {
        let mut inner = self.lock();
        inner.check(&state.registers)?;
        inner.device.restore(state.device)?;
        inner.registers = state.registers;
        self.interrupt.restore(&state.interrupt);
        Ok(())
    }

    /// Handles a read of a register.
    pub fn get(&self, register: Register) -> u32 {
        match register {
            Register::ConfigGeneration => self.interrupt.config_generation(),
            other => self.lock().get(other),
        }
    }

    /// Handles a write to a register. Read-only registers do not change.
    pub fn set(&self, register: Register, value: u32) {
        match register {
            Register::Status if value == 0 => self.reset(),
            _ => self.lock().set(register, value),
        }
    }

    /// The driver resets the device. It may reuse its buffers as soon as this returns. So a hung
    /// request keeps the vCPU here: otherwise the host could still access memory that has other
    /// uses by then.
    fn reset(&self) {
        loop {
            let hang = {
                let mut inner = self.inner.lock().expect("no device panics");
                match inner.quiesce(GLANCE) {
                    Ok(()) => {
                        *self.waiting.hang() = None;
                        return inner.reset();
                    }
                    Err(hang) => hang,
                }
            };
            if self.waiting.abandoned.load(Ordering::Acquire) {
                return;
            }
            if hang.since >= PAUSE_TIMEOUT {
                let text = hang.to_string();
                if self.waiting.hang().replace(hang).is_none() {
                    tracing::warn!("virtio: a vCPU that resets a device waits: {text}");
                }
            }
            // A mutex is not fair. Without this the others would wait as long as the reset does.
            while self.waiting.visitors.load(Ordering::Acquire) > 0 {
                std::thread::yield_now();
            }
        }
    }

    /// The driver has made buffers available in queue `index`.
    pub fn ring(&self, index: u32) {
        if let Some(doorbell) = self.doorbells.get(index as usize) {
            ring(doorbell);
        }
    }

    /// Handles a read of the device's configuration space.
    pub fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.lock().device.read_config(offset, data);
    }

    /// Handles a write to it. The driver must be ready.
    pub fn write_config(&self, offset: usize, data: &[u8]) {
        let mut inner = self.lock();
        if inner.registers.status & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            inner.device.write_config(offset, data);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.waiting.visitors.fetch_add(1, Ordering::AcqRel);
        let inner = self.inner.lock().expect("no device panics");
        self.waiting.visitors.fetch_sub(1, Ordering::AcqRel);
        inner
    }
}

impl Inner {
    fn features(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn get(&mut self, register: Register) -> u32 {
        match register {
            Register::DeviceId => self.device.kind(),
            Register::DeviceFeatures => self.registers.offered(self.features()),
            Register::QueueSizeMax => {
                let sizes = self.device.queue_sizes();
                sizes.get(self.registers.queue_select as usize).copied().unwrap_or(0).into()
            }
            Register::Status => {
                let broken = if self.interrupt.is_broken() { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 };
                self.registers.status | broken
            }
            other => self.registers.get(other),
        }
    }

    fn set(&mut self, register: Register, value: u32) {
        match register {
            Register::Status => self.set_status(value),
            // The features are already negotiated.
            Register::DriverFeatures if self.registers.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 => {}
            other => self.registers.set(other, value, self.running),
        }
    }

    /// The status machine (section 3.1.1): bits are only added, and each needs the one before it.
    fn set_status(&mut self, value: u32) {
        let old = self.registers.status;
        let mut new = old | value & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if new & VIRTIO_CONFIG_S_FEATURES_OK != 0 && old & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            let wanted = self.registers.driver_features;
            if wanted & !self.features() != 0 || wanted & (1 << VIRTIO_F_VERSION_1) == 0 {
                new &= !VIRTIO_CONFIG_S_FEATURES_OK;
            }
        }
        if new & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            new &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        self.registers.status = new;
        if (new & !old) & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.start();
        }
    }

    /// Gives the device its queues, if the driver is ready, has not given up, and the device does not
    /// have them.
    fn start(&mut self) {
        let status = self.registers.status & (VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_FAILED);
        let ready = status == VIRTIO_CONFIG_S_DRIVER_OK;
        if self.running || !ready || self.interrupt.is_broken() {
            return;
        }
        let mut queues = Vec::new();
        for index in 0..self.registers.queues.len() as u16 {
            match self.make_queue(index) {
                Ok(None) => {}
                Ok(Some(queue)) => {
                    let doorbell = self.doorbells[usize::from(index)].clone();
                    queues.push(VirtQueue::new(index, queue, doorbell, self.interrupt.clone()));
                }
                Err(error) => return self.interrupt.needs_reset(&error),
            }
        }
        self.running = true;
        self.device.activate(Active {
            memory: self.memory.clone(),
            features: self.registers.driver_features,
            queues,
        });
        // Ring for buffers made available before the device ran, or while it was quiesced.
        self.ring_all();
    }

    /// The queue that its registers describe, if the driver has made it ready.
    fn make_queue(&self, index: u16) -> Result<Option<Queue>, InvalidQueue> {
        let (registers, max_size) =
            (&self.registers.queues[usize::from(index)], self.device.queue_sizes()[usize::from(index)]);
        if !registers.ready {
            return Ok(None);
        }
        let queue = Queue::try_from(QueueState {
            max_size,
            next_avail: registers.next_available,
            next_used: registers.next_used,
            event_idx_enabled: self.registers.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0,
            size: registers.size,
            ready: true,
            desc_table: registers.descriptors,
            avail_ring: registers.available,
            used_ring: registers.used,
        });
        let queue = queue.map_err(|_| InvalidQueue(index))?;
        // virtio-queue takes an address of 0 as "not set". It checks the rings without the event
        // fields at their ends.
        let size = usize::from(registers.size);
        let rings = [
            (registers.descriptors, 16 * size),
            (registers.available, 6 + 2 * size),
            (registers.used, 6 + 8 * size),
        ];
        let inside = rings.iter().all(|&(addr, len)| addr != 0 && is_memory(&self.memory, addr, len));
        if inside && queue.is_valid(&*self.memory) { Ok(Some(queue)) } else { Err(InvalidQueue(index)) }
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), Hang> {
        if !self.running {
            return Ok(());
        }
        let active = self.device.quiesce(patience)?;
        self.running = false;
        for queue in active.map(|active| active.queues).unwrap_or_default() {
            let registers = &mut self.registers.queues[usize::from(queue.index())];
            (registers.next_available, registers.next_used) = queue.position();
        }
        Ok(())
    }

    fn ring_all(&self) {
        self.doorbells.iter().for_each(|doorbell| ring(doorbell));
    }

    /// Resets the device, which is quiesced, and its registers.
    fn reset(&mut self) {
        self.device.reset();
        self.ring_all();
        self.registers = Registers::new(self.device.queue_sizes());
        self.interrupt.reset();
    }

    /// Refuses registers that no driver could have produced.
    fn check(&self, registers: &Registers) -> Result<(), RestoreError> {
        let bad = |field, value: String, reason| Err(RestoreError::Field { field, value, reason });
        if registers.queues.len() != self.device.queue_sizes().len() {
            return bad("queue count", registers.queues.len().to_string(), "does not fit this device");
        }
        if registers.status & VIRTIO_CONFIG_S_FEATURES_OK != 0
            && registers.driver_features & !self.features() != 0
        {
            return bad(
                "features",
                format!("{:#x}", registers.driver_features),
                "this device does not offer",
            );
        }
        Ok(())
    }
}

impl MutEventSubscriber for Inner {
    fn init(&mut self, ops: &mut EventOps) {
        if self.device.on_event_loop() {
            for (index, bell) in self.doorbells.iter().enumerate() {
                let events = Events::with_data(&**bell, QUEUE_EVENTS + index as u32, EventSet::IN);
                ops.add(events).expect("an eventfd can be polled");
            }
        }
        self.device.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data().checked_sub(QUEUE_EVENTS) {
            Some(index) => {
                // If it rings again while it is served, another event follows. A quiesced device
                // rings all doorbells when it resumes.
                let _ = self.doorbells[index as usize].read();
                self.device.notified(index as u16, ops);
            }
            None => self.device.ready(events, ops),
        }
    }
}

fn ring(doorbell: &EventFd) {
    // The write fails only if the counter is full, and then the doorbell is already ringing.
    let _ = doorbell.write(1);
}
