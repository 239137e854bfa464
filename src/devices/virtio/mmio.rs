//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2): one register file a device.
//!
//! A guest's accesses arrive on vCPU threads, the device runs on the event loop, and one mutex a device lies between
//! them. The registers of the hot path (notify, interrupt status and acknowledgement) are outside that mutex. Only a
//! driver's reset waits for the device: Linux's driver reuses the buffers of a request in flight as soon as the write
//! of 0 to the status register has returned, so that write returns when the request has.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::queue::{VirtQueue, is_memory};
use crate::devices::Ending;
use crate::devices::bus::BusDevice;

use super::{Active, DeviceState, Interrupt, Memory, QUEUE_EVENTS, RestoreError, VirtioDevice};

/// Bytes of address space that one device takes.
pub const REGION_SIZE: u64 = 0x1000;

/// "virt".
const MAGIC: u32 = 0x7472_6976;
/// "vllm": drivers print it and attach no meaning to it.
const VENDOR: u32 = 0x6d6c_6c76;
/// What the transport offers for every device.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// One device on the bus. Clones are handles to the same device.
#[derive(Clone)]
pub struct Mmio {
    irq: Arc<Interrupt>,
    doorbells: Arc<[Arc<EventFd>]>,
    inner: Arc<Mutex<Inner>>,
}

/// What the mutex guards.
struct Inner {
    device: Box<dyn VirtioDevice>,
    mem: Arc<Memory>,
    irq: Arc<Interrupt>,
    doorbells: Arc<[Arc<EventFd>]>,
    registers: Registers,
    /// The device has its queues (the driver is ready and the machine is not quiesced).
    running: bool,
}

/// What the driver has written, as it is saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registers {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueRegisters>,
}

/// One queue's registers and, while the device is quiesced, its place in the rings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRegisters {
    size: u16,
    ready: bool,
    descriptors: u64,
    available: u64,
    used: u64,
    next_available: u16,
    next_used: u16,
}

/// A device as it is saved: transport and device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    registers: Registers,
    interrupt_status: u32,
    config_generation: u32,
    broken: bool,
    device: DeviceState,
}

/// A queue whose registers make no queue.
#[derive(Debug, thiserror::Error)]
#[error("queue {0} is not a valid queue: size or alignment is wrong, or its rings are not all guest memory")]
struct InvalidQueue(u16);

impl Mmio {
    /// A device in its reset state.
    pub fn new(device: Box<dyn VirtioDevice>, mem: Arc<Memory>) -> std::io::Result<Self> {
        let irq = Arc::new(Interrupt::new()?);
        let doorbells =
            device.queue_sizes().iter().map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new));
        let doorbells: Arc<[_]> = doorbells.collect::<Result<Vec<_>, _>>()?.into();
        let mut inner = Inner {
            device,
            mem,
            irq: irq.clone(),
            doorbells: doorbells.clone(),
            registers: Registers::default(),
            running: false,
        };
        inner.clear();
        Ok(Mmio { irq, doorbells, inner: Arc::new(Mutex::new(inner)) })
    }

    /// The interrupt line, for KVM_IRQFD and for tests.
    pub fn interrupt(&self) -> &Arc<Interrupt> {
        &self.irq
    }

    /// The doorbell of each queue, for KVM_IOEVENTFD at QUEUE_NOTIFY with the queue's index as 32-bit data match.
    pub fn doorbells(&self) -> &[Arc<EventFd>] {
        &self.doorbells
    }

    /// Where in the region the doorbells are.
    pub const fn doorbell_offset() -> u64 {
        VIRTIO_MMIO_QUEUE_NOTIFY as u64
    }

    /// The device as a subscriber of the event loop.
    pub fn subscriber(&self) -> Arc<Mutex<dyn MutEventSubscriber + Send>> {
        self.inner.clone()
    }

    /// Stops the device: what was in flight is finished, and nothing touches guest memory until [`Mmio::resume`].
    pub fn quiesce(&self) {
        self.lock().quiesce();
    }

    /// Starts a quiesced device where it stopped.
    pub fn resume(&self) {
        self.lock().start();
    }

    /// What a new process needs to carry on with this device, which must be quiesced.
    pub fn save(&self) -> State {
        let inner = self.lock();
        State {
            registers: inner.registers.clone(),
            interrupt_status: self.irq.status.load(Ordering::Acquire),
            config_generation: self.irq.generation.load(Ordering::Acquire),
            broken: self.irq.is_broken(),
            device: inner.device.save(),
        }
    }

    /// Takes over what [`Mmio::save`] gave; the device stays quiesced until [`Mmio::resume`]. An interrupt that the
    /// driver had not acknowledged is raised again, for it may have been on its way.
    pub fn restore(&self, state: State) -> Result<(), RestoreError> {
        let mut inner = self.lock();
        inner.check(&state.registers)?;
        inner.device.restore(state.device)?;
        inner.registers = state.registers;
        self.irq.generation.store(state.config_generation, Ordering::Release);
        self.irq.broken.store(state.broken, Ordering::Release);
        if state.interrupt_status != 0 {
            self.irq.raise(state.interrupt_status);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no device panics")
    }
}

impl BusDevice for Mmio {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            return self.lock().device.read_config(offset as usize - VIRTIO_MMIO_CONFIG as usize, data);
        }
        data.fill(0);
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else { return };
        let value = match offset as u32 {
            VIRTIO_MMIO_INTERRUPT_STATUS => self.irq.status.load(Ordering::Acquire),
            VIRTIO_MMIO_CONFIG_GENERATION => self.irq.generation.load(Ordering::Acquire),
            other => self.lock().read(other),
        };
        *word = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            let mut inner = self.lock();
            if inner.registers.status & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
                inner.device.write_config(offset as usize - VIRTIO_MMIO_CONFIG as usize, data);
            }
            return None;
        }
        let Ok(word) = <[u8; 4]>::try_from(data) else { return None };
        let value = u32::from_le_bytes(word);
        match offset as u32 {
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.irq.status.fetch_and(!value, Ordering::AcqRel);
            }
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                // KVM takes these writes for itself; they come here only where it does not.
                if let Some(doorbell) = self.doorbells.get(value as usize) {
                    let _ = doorbell.write(1);
                }
            }
            other => self.lock().write(other, value),
        }
        None
    }
}

impl Inner {
    fn features(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn selected(&mut self) -> Option<&mut QueueRegisters> {
        self.registers.queues.get_mut(self.registers.queue_select as usize)
    }

    fn read(&mut self, offset: u32) -> u32 {
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => 2,
            VIRTIO_MMIO_DEVICE_ID => self.device.kind(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.features(), self.registers.device_features_select),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                let sizes = self.device.queue_sizes();
                sizes.get(self.registers.queue_select as usize).copied().unwrap_or(0).into()
            }
            VIRTIO_MMIO_QUEUE_READY => self.selected().is_some_and(|q| q.ready).into(),
            VIRTIO_MMIO_STATUS => {
                let broken = if self.irq.is_broken() { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 };
                self.registers.status | broken
            }
            // There are no shared memory regions: the length of each is -1 (section 4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            _ => 0,
        }
    }

    fn write(&mut self, offset: u32, value: u32) {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.registers.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.registers.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES if self.registers.status & VIRTIO_CONFIG_S_FEATURES_OK == 0 => {
                let select = self.registers.driver_features_select;
                set_half(&mut self.registers.driver_features, select, value);
            }
            VIRTIO_MMIO_QUEUE_SEL => self.registers.queue_select = value,
            VIRTIO_MMIO_STATUS if value == 0 => self.reset(),
            VIRTIO_MMIO_STATUS => self.set_status(value),
            _ => self.write_queue(offset, value),
        }
    }

    fn write_queue(&mut self, offset: u32, value: u32) {
        let running = self.running;
        let Some(queue) = self.selected() else { return };
        match offset {
            // A queue in use changes only by a reset: its device has it.
            VIRTIO_MMIO_QUEUE_READY if !running => queue.ready = value == 1,
            _ if queue.ready => {}
            VIRTIO_MMIO_QUEUE_NUM => queue.size = u16::try_from(value).unwrap_or(0),
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.descriptors, 0, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.descriptors, 1, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.available, 0, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.available, 1, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used, 0, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used, 1, value),
            _ => {}
        }
    }

    /// The status machine (section 3.1.1): bits are only ever added, and each needs the one before it.
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
        if (new & !old) & VIRTIO_CONFIG_S_DRIVER_OK != 0 && new & VIRTIO_CONFIG_S_FAILED == 0 {
            self.start();
        }
    }

    /// Gives the device its queues, if its driver is ready and it has not got them.
    fn start(&mut self) {
        if self.running || self.registers.status & VIRTIO_CONFIG_S_DRIVER_OK == 0 || self.irq.is_broken() {
            return;
        }
        let mut queues = Vec::new();
        for index in 0..self.registers.queues.len() as u16 {
            match self.make_queue(index) {
                Ok(None) => {}
                Ok(Some(queue)) => {
                    let event = self.doorbells[usize::from(index)].clone();
                    queues.push(VirtQueue::new(index, queue, event, self.irq.clone()));
                }
                Err(error) => return self.irq.needs_reset(&error),
            }
        }
        self.running = true;
        self.device.activate(Active {
            mem: self.mem.clone(),
            features: self.registers.driver_features,
            queues,
        });
        // What the driver made available before the device ran, or while it was quiesced.
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
        // An address of 0 is what virtio-queue takes for "not set"; it also checks the rings without the two event
        // fields at their ends.
        let size = usize::from(registers.size);
        let rings = [
            (registers.descriptors, 16 * size),
            (registers.available, 6 + 2 * size),
            (registers.used, 6 + 8 * size),
        ];
        let inside = rings.iter().all(|&(addr, len)| addr != 0 && is_memory(&self.mem, addr, len));
        if inside && queue.is_valid(&*self.mem) { Ok(Some(queue)) } else { Err(InvalidQueue(index)) }
    }

    fn quiesce(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        for queue in self.device.quiesce().map(|active| active.queues).unwrap_or_default() {
            let registers = &mut self.registers.queues[usize::from(queue.index())];
            (registers.next_available, registers.next_used) = queue.position();
        }
    }

    fn ring_all(&self) {
        self.doorbells.iter().for_each(|bell| drop(bell.write(1)));
    }

    fn reset(&mut self) {
        self.quiesce();
        self.device.reset();
        self.ring_all();
        self.clear();
        self.irq.status.store(0, Ordering::Release);
        self.irq.broken.store(false, Ordering::Release);
    }

    fn clear(&mut self) {
        let queues = self
            .device
            .queue_sizes()
            .iter()
            .map(|&size| QueueRegisters { size, ..Default::default() })
            .collect();
        self.registers = Registers { queues, ..Default::default() };
    }

    /// Refuses registers that no driver could have brought about.
    fn check(&self, registers: &Registers) -> Result<(), RestoreError> {
        let bad = |field, value: String, reason| Err(RestoreError::Field { field, value, reason });
        if registers.queues.len() != self.device.queue_sizes().len() {
            return bad("queue count", registers.queues.len().to_string(), "is not this device's");
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
                // Rung again while it is served, it comes back; a quiesced device rings all bells when it resumes.
                let _ = self.doorbells[index as usize].read();
                self.device.notified(index as u16, ops);
            }
            None => self.device.ready(events, ops),
        }
    }
}

/// The low or the high word of a feature set; all others are empty.
fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, word: u32) {
    match select {
        0 => *value = *value & !0xffff_ffff | u64::from(word),
        1 => *value = *value & 0xffff_ffff | u64::from(word) << 32,
        _ => {}
    }
}
