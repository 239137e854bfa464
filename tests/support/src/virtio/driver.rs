//! A virtio driver in this process. It programs the transport's registers, and writes rings and
//! buffers, valid or not, into memory that it shares with the device. Tests and fuzz targets use
//! it, over both transports.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::reach::Reach;
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use vellum_devices::bus::BusDevice;
use vellum_devices::line::Line;
use vellum_devices::virtio::transport::Codec;
pub use vellum_devices::virtio::transport::Transport;
use vellum_devices::virtio::{PAUSE_TIMEOUT, VirtioDevice};
use vellum_kvm::memory::{GuestMemory, MemoryConfig};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// The end of the mock machine's memory.
pub const MEMORY_END: u64 = 2 << 20;
/// The middle of the memory.
pub const MIDDLE: u64 = 1 << 20;
/// The address of the first buffer. The rings are below it, 64 KiB for each queue.
pub const BUFFERS: u64 = 0x80000;
/// Entries of every queue that [`Driver::start`] sets up, unless the device has fewer.
pub const QUEUE_SIZE: u16 = 16;

const READY: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_DRIVER_OK;

/// A buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct Buf {
    /// The address.
    pub addr: u64,
    /// The length.
    pub len: u32,
    /// The device writes it.
    pub writable: bool,
}

/// A path for a file of a test. Each test runs once for each transport, at the same time.
pub fn own_path(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vellum-virtio-{}-{number}-{name}", std::process::id()))
}

/// A buffer for the device to read.
pub fn readable(addr: u64, len: u32) -> Buf {
    Buf { addr, len, writable: false }
}

/// A buffer for the device to write.
pub fn writable(addr: u64, len: u32) -> Buf {
    Buf { addr, len, writable: true }
}

type EventLoop = EventManager<Arc<Mutex<dyn MutEventSubscriber + Send>>>;

/// A driver and its device.
pub struct Driver {
    /// The device.
    pub device: Transport,
    /// The access to its registers.
    pub reach: Reach,
    /// The memory that both share.
    pub mem: Arc<GuestMemory>,
    events: EventLoop,
    queues: Vec<Ring>,
}

/// A driver's view of its queues.
pub struct Rings(Vec<Ring>);

#[derive(Clone, Debug)]
struct Ring {
    size: u16,
    next_descriptor: u16,
    available: u16,
    seen_used: u16,
}

/// Memory for the mock machine.
pub fn memory() -> Arc<GuestMemory> {
    let memory =
        vellum_kvm::memory::Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(MEMORY_END))
            .expect("2 MiB of memory");
    memory.guest.iter().for_each(|region| assert!(region.bitmap().log().start()));
    Arc::new(memory.guest)
}

impl Driver {
    /// A driver of a device in its reset state.
    pub fn new(codec: Codec, device: impl VirtioDevice + 'static) -> Self {
        Self::on(codec, device, memory())
    }

    /// Like [`Driver::new`], with existing memory.
    pub fn on(codec: Codec, device: impl VirtioDevice + 'static, mem: Arc<GuestMemory>) -> Self {
        let reach = Reach::new(codec, Box::new(device), mem.clone()).expect("eventfds");
        let device = reach.transport().clone();
        let mut events = EventLoop::new().expect("epoll");
        events.add_subscriber(device.subscriber());
        Driver { device, reach, mem, events, queues: Vec::new() }
    }

    /// Ends the source of a migration. Its memory and its driver's rings go to the target.
    pub fn into_parts(self) -> (Arc<GuestMemory>, Rings) {
        (self.mem, Rings(self.queues))
    }

    /// Continues with the rings of the source, as a driver that does not notice the migration.
    pub fn take_rings(&mut self, rings: Rings) {
        self.queues = rings.0;
    }

    /// Migrates the device to `device`, as to another process: it is quiesced, saved as text, and
    /// restored on the same memory. The driver does `meanwhile` in between. The device answers that
    /// at the end.
    pub fn move_to(mut self, device: impl VirtioDevice + 'static, meanwhile: impl FnOnce(&mut Self)) -> Self {
        self.device.quiesce(PAUSE_TIMEOUT).expect("nothing hangs");
        meanwhile(&mut self);
        self.run();
        let state = serde_json::to_string(&self.reach.save()).expect("plain data");
        let codec = self.reach.codec();
        let (mem, rings) = self.into_parts();
        let mut new = Driver::on(codec, device, mem);
        new.take_rings(rings);
        new.reach.restore(serde_json::from_str(&state).expect("what was saved")).expect("the same device");
        new.device.resume();
        new.run();
        new
    }

    /// Reads a register.
    pub fn get(&self, register: u32) -> u32 {
        self.reach.get(register)
    }

    /// Writes a register.
    pub fn set(&self, register: u32, value: u32) {
        self.reach.set(register, value);
    }

    /// The status register.
    pub fn status(&self) -> u32 {
        self.get(VIRTIO_MMIO_STATUS)
    }

    /// Whether the device has set NEEDS_RESET.
    pub fn needs_reset(&self) -> bool {
        self.status() & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// The features that the device offers.
    pub fn offered(&self) -> u64 {
        self.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        let low = self.get(VIRTIO_MMIO_DEVICE_FEATURES);
        self.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
        u64::from(low) | u64::from(self.get(VIRTIO_MMIO_DEVICE_FEATURES)) << 32
    }

    /// Accepts all offered features, and sets DRIVER_OK.
    pub fn start(&mut self) {
        self.start_with(self.offered());
    }

    /// Accepts these features, and sets DRIVER_OK.
    pub fn start_with(&mut self, features: u64) {
        self.negotiate(features);
        self.make_queues();
        self.reach.choose_vectors();
        self.set(VIRTIO_MMIO_STATUS, READY);
        self.run();
    }

    /// Accepts these features. The device may refuse them.
    pub fn negotiate(&self, features: u64) {
        self.set(VIRTIO_MMIO_STATUS, 0);
        self.set(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE);
        self.set(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER);
        self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
        self.set(VIRTIO_MMIO_DRIVER_FEATURES, features as u32);
        self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
        self.set(VIRTIO_MMIO_DRIVER_FEATURES, (features >> 32) as u32);
        self.set(VIRTIO_MMIO_STATUS, READY & !VIRTIO_CONFIG_S_DRIVER_OK);
    }

    /// Sets up every queue of the device.
    pub fn make_queues(&mut self) {
        self.queues.clear();
        for index in 0.. {
            let Some(size) = self.prepare_queue(index) else { break };
            let zeros = [0; 0x1000];
            self.mem.write_slice(&zeros, GuestAddress(Self::descriptors(index as usize))).unwrap();
            self.mem.write_slice(&zeros, GuestAddress(Self::available(index as usize))).unwrap();
            self.mem.write_slice(&zeros, GuestAddress(Self::used(index as usize))).unwrap();
            self.set(VIRTIO_MMIO_QUEUE_READY, 1);
            self.queues.push(Ring { size, next_descriptor: 0, available: 0, seen_used: 0 });
        }
    }

    /// Sets up a queue without making it ready. Returns its size, if the queue exists.
    pub fn prepare_queue(&self, index: u32) -> Option<u16> {
        self.set(VIRTIO_MMIO_QUEUE_SEL, index);
        let max = self.get(VIRTIO_MMIO_QUEUE_NUM_MAX) as u16;
        if max == 0 {
            return None;
        }
        let size = max.min(QUEUE_SIZE);
        self.set(VIRTIO_MMIO_QUEUE_NUM, size.into());
        self.set(VIRTIO_MMIO_QUEUE_DESC_LOW, Self::descriptors(index as usize) as u32);
        self.set(VIRTIO_MMIO_QUEUE_AVAIL_LOW, Self::available(index as usize) as u32);
        self.set(VIRTIO_MMIO_QUEUE_USED_LOW, Self::used(index as usize) as u32);
        Some(size)
    }

    /// The address of a queue's descriptors.
    pub fn descriptors(queue: usize) -> u64 {
        0x1000 + 0x10000 * queue as u64
    }

    /// The address of a queue's available ring.
    pub fn available(queue: usize) -> u64 {
        Self::descriptors(queue) + 0x4000
    }

    /// The address of a queue's used ring.
    pub fn used(queue: usize) -> u64 {
        Self::descriptors(queue) + 0x8000
    }

    /// Writes one raw descriptor.
    pub fn describe(&self, queue: usize, index: u16, addr: u64, len: u32, flags: u32, next: u16) {
        self.describe_at(Self::descriptors(queue) + 16 * u64::from(index), addr, len, flags, next);
    }

    /// Writes one raw descriptor at any address, because indirect tables have no fixed place.
    pub fn describe_at(&self, at: u64, addr: u64, len: u32, flags: u32, next: u16) {
        let mut raw = [0; 16];
        raw[0..8].copy_from_slice(&addr.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&(flags as u16).to_le_bytes());
        raw[14..16].copy_from_slice(&next.to_le_bytes());
        self.mem.write_slice(&raw, GuestAddress(at)).unwrap();
    }

    /// Writes the buffers as one chain and makes it available. Returns its head.
    pub fn submit(&mut self, queue: usize, buffers: &[Buf]) -> u16 {
        let ring = self.queues[queue].clone();
        let head = ring.next_descriptor % ring.size;
        for (at, buf) in buffers.iter().enumerate() {
            let slot = (head + at as u16) % ring.size;
            let next = if at + 1 < buffers.len() { VRING_DESC_F_NEXT } else { 0 };
            let write = if buf.writable { VRING_DESC_F_WRITE } else { 0 };
            self.describe(queue, slot, buf.addr, buf.len, next | write, (slot + 1) % ring.size);
        }
        self.queues[queue].next_descriptor = ring.next_descriptor.wrapping_add(buffers.len() as u16);
        self.offer(queue, head);
        head
    }

    /// Makes a head available, valid or not, and notifies the device.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.queues[queue];
        let slot = Self::available(queue) + 4 + 2 * u64::from(ring.available % ring.size);
        self.mem.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
        ring.available = ring.available.wrapping_add(1);
        let index = ring.available;
        self.set_available_index(queue, index);
    }

    /// Writes the available index, valid or not, and notifies the device.
    pub fn set_available_index(&self, queue: usize, index: u16) {
        self.mem.store(index.to_le(), GuestAddress(Self::available(queue) + 2), Ordering::Release).unwrap();
        self.set(VIRTIO_MMIO_QUEUE_NOTIFY, queue as u32);
    }

    /// Runs the event loop until it is idle.
    pub fn run(&mut self) {
        // A device that keeps notifying itself fails the test here instead of hanging.
        for _ in 0..10_000 {
            if self.events.run_with_timeout(0).expect("epoll") == 0 {
                return;
            }
        }
        panic!("the event loop does not come to rest");
    }

    /// Waits for events of the event loop, at most this long.
    pub fn idle(&mut self, milliseconds: i32) {
        self.events.run_with_timeout(milliseconds).expect("epoll");
    }

    /// The next used element (head, written), if there is one.
    pub fn used_now(&mut self, queue: usize) -> Option<(u16, u32)> {
        let ring = &mut self.queues[queue];
        let index: u16 = self.mem.load(GuestAddress(Self::used(queue) + 2), Ordering::Acquire).unwrap();
        if index == ring.seen_used {
            return None;
        }
        assert!(index.wrapping_sub(ring.seen_used) <= ring.size, "the used index goes back");
        let slot = Self::used(queue) + 4 + 8 * u64::from(ring.seen_used % ring.size);
        ring.seen_used = ring.seen_used.wrapping_add(1);
        // Asks for an interrupt for the next element (used_event, if event indices are negotiated).
        let event = Self::available(queue) + 4 + 2 * u64::from(ring.size);
        let seen = ring.seen_used;
        self.mem.write_obj(seen.to_le(), GuestAddress(event)).unwrap();
        let head: u32 = self.mem.read_obj(GuestAddress(slot)).unwrap();
        let len: u32 = self.mem.read_obj(GuestAddress(slot + 4)).unwrap();
        Some((head as u16, len))
    }

    /// Waits for the device to return a request. Devices of the event loop run here, workers run by
    /// themselves.
    pub fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        self.wait(|driver| driver.used_now(queue))
    }

    /// Waits until the device has set NEEDS_RESET.
    pub fn wait_broken(&mut self) {
        self.wait(|driver| driver.needs_reset().then_some(()));
    }

    /// Waits for something that an interrupt announces. The limit only ends a test that has already
    /// failed.
    pub fn wait<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let limit = Instant::now() + Duration::from_secs(30);
        loop {
            self.run();
            if let Some(value) = done(self) {
                return value;
            }
            assert!(Instant::now() < limit, "the device does not answer");
            let lines = self.device.interrupt().lines();
            let poll =
                |line: &Line| libc::pollfd { fd: line.event().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let mut fds: Vec<_> = lines.iter().map(poll).collect();
            // SAFETY: the length is that of the pollfds, which are valid.
            unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, 1000) };
            lines.iter().for_each(|line| drop(line.event().read()));
        }
    }

    /// Writes memory.
    pub fn put(&self, addr: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    /// Reads memory.
    pub fn fetch(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }

    /// Reads the configuration space.
    pub fn config(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xaa; len];
        self.reach.config(offset, &mut bytes);
        bytes
    }

    /// Reads from BAR 0 of a PCI device.
    pub fn of_bar(&self, offset: u64, len: usize) -> Vec<u8> {
        let Reach::Pci { window, .. } = &self.reach else { panic!("it is not on PCI") };
        let mut bytes = vec![0xaa; len];
        window.read(offset, &mut bytes);
        bytes
    }

    /// Writes to BAR 0 of a PCI device.
    pub fn in_bar(&self, offset: u64, data: &[u8]) {
        let Reach::Pci { window, .. } = &self.reach else { panic!("it is not on PCI") };
        window.write(offset, data);
    }
}
