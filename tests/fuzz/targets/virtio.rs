//! Virtio queues and devices: whatever a driver writes into registers, rings and buffers, the device neither panics nor
//! spins, and works again after a reset.
//!
//! The first byte chooses the device; then come operations of 12 bytes each.

use vellum::devices::virtio::balloon::Balloon;
use vellum::devices::virtio::console::Console;
use vellum::devices::virtio::rng::Rng;
use virtio_bindings::virtio_mmio::*;

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../../virtio/driver.rs"]
mod driver;

use driver::*;

const REGISTERS: [u32; 12] = [
    VIRTIO_MMIO_STATUS,
    VIRTIO_MMIO_QUEUE_SEL,
    VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_READY,
    VIRTIO_MMIO_QUEUE_NOTIFY,
    VIRTIO_MMIO_QUEUE_DESC_LOW,
    VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    VIRTIO_MMIO_QUEUE_USED_LOW,
    VIRTIO_MMIO_QUEUE_USED_HIGH,
    VIRTIO_MMIO_DRIVER_FEATURES,
    VIRTIO_MMIO_INTERRUPT_ACK,
    VIRTIO_MMIO_CONFIG,
];

/// The target: `cargo fuzz` feeds it, and so does `cargo test` from the corpus.
pub fn virtio(data: &[u8]) {
    let Some((&device, operations)) = data.split_first() else { return };
    let null = || std::fs::File::options().write(true).open("/dev/null").unwrap();
    let zero = || std::fs::File::open("/dev/zero").unwrap();
    let mut driver = match device % 3 {
        0 => Driver::new(Rng::new().unwrap()),
        1 => Driver::new(Console::new(Some(zero()), null())),
        _ => Driver::new(Balloon::new().0),
    };
    let queues = if device % 3 == 0 { 1 } else { 2 };
    driver.start();
    for operation in operations.chunks_exact(12).take(64) {
        let queue = usize::from(operation[1]) % queues;
        let word = |at: usize| u32::from_le_bytes(operation[at..at + 4].try_into().unwrap());
        let index = u16::from(operation[2]);
        match operation[0] % 7 {
            // A descriptor: address, length, flags, next.
            0 => driver.describe(queue, index % 16, word(4).into(), word(8), operation[3].into(), index >> 4),
            // The same, its address near the end of memory or of all addresses.
            1 => {
                let addr = if operation[3] & 1 == 0 { MEMORY_END } else { u64::MAX };
                driver.describe(queue, index % 16, addr.wrapping_sub(word(4).into()), word(8), 3, index >> 4);
            }
            2 => driver.offer(queue, index),
            3 => driver.set_available_index(queue, word(4) as u16),
            4 => driver.put(BUFFERS + u64::from(word(4) % 0x1000), &operation[8..]),
            5 => driver.set(REGISTERS[usize::from(operation[1]) % REGISTERS.len()], word(4)),
            _ => {
                driver.get(word(4) % 0x200);
                driver.start();
            }
        }
        driver.run();
    }
    driver.start();
    assert!(!driver.needs_reset());
    let work = if device % 3 == 1 { (1, readable(BUFFERS, 16)) } else { (0, writable(BUFFERS, 16)) };
    driver.submit(work.0, &[work.1]);
    driver.run();
    assert!(driver.used_now(work.0).is_some(), "the device does not work after a reset");
}
