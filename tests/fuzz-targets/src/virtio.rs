//! Virtio queues and devices. A driver may write anything into registers, rings and buffers. The
//! device does not panic or spin, and works again after a reset.
//!
//! The first byte selects the device and, by its highest bit, the transport. Operations of 12 bytes
//! each follow.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};

use support::virtio::driver::*;
use vellum_devices::virtio::VirtioDevice;
use vellum_devices::virtio::balloon::Balloon;
use vellum_devices::virtio::blk::{Blk, BlkConfig};
use vellum_devices::virtio::console::Console;
use vellum_devices::virtio::net::Net;
use vellum_devices::virtio::rng::Rng;
use vellum_devices::virtio::transport::Codec;
use vellum_devices::virtio::vsock::{Vsock, VsockConfig};
use vellum_sys::tap::Tap;
use virtio_bindings::virtio_mmio::*;

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

/// A disk of 64 sectors without a name in the file system.
fn disk(codec: Codec) -> Driver {
    // SAFETY: the name is a string that ends in a zero, and the new descriptor has no other owner.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(64 * 512).unwrap();
    let mut disk = Blk::open(&BlkConfig::new(format!("/proc/self/fd/{}", file.as_raw_fd()))).unwrap();
    disk.start(Box::new(|_| Ok(()))).unwrap();
    Driver::on(codec, disk, memory())
}

fn network(codec: Codec) -> (Driver, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    // The first incoming frame.
    ours.send(&[0; 76]).unwrap();
    let net = Net::on(Tap::from_fd("pair", theirs.into()), [2, 0, 0, 0, 0, 7]);
    (Driver::on(codec, net, memory()), ours)
}

fn vsock(codec: Codec) -> Driver {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("vellum-fuzz-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let config = VsockConfig { path: std::env::temp_dir().join(name), cid: 7, is_named: false };
    Driver::on(codec, Vsock::open(&config).unwrap(), memory())
}

/// The devices' keys in a saved state. The last one is a console with a port.
pub const KEYS: [&str; 7] = ["rng", "console", "balloon", "net", "vsock", "disk", "console"];
/// The index of the console with a port.
pub const PORTS: usize = 6;

/// The device with this index, and the other end of its connection.
pub fn device(number: usize, codec: Codec) -> (Driver, Option<OwnedFd>) {
    let null = || File::options().write(true).open("/dev/null").unwrap();
    let zero = || File::open("/dev/zero").unwrap();
    let console = || Console::new(Some(zero()), null());
    let driver = match KEYS[number] {
        _ if number == PORTS => {
            let (theirs, ours) = UnixStream::pair().unwrap();
            let ports = Console::with_port(Some(console()), "fuzz", &theirs).unwrap();
            return (Driver::on(codec, ports, memory()), Some(ours.into()));
        }
        "rng" => Driver::on(codec, Rng::new().unwrap(), memory()),
        "console" => Driver::on(codec, console(), memory()),
        "balloon" => Driver::on(codec, Balloon::new().0, memory()),
        "net" => {
            let (driver, wire) = network(codec);
            return (driver, Some(wire.into()));
        }
        "vsock" => vsock(codec),
        _ => disk(codec),
    };
    (driver, None)
}

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn virtio(data: &[u8]) {
    let Some((&first, operations)) = data.split_first() else { return };
    let (device, codec) = (first & 0x7f, if first & 0x80 == 0 { Codec::Mmio } else { Codec::Pci });
    let device = usize::from(device) % KEYS.len();
    let (mut driver, _wire) = self::device(device, codec);
    let queues = [1, 2, 2, 2, 3, 1, 6][device];
    driver.start();
    for operation in operations.as_chunks::<12>().0.iter().take(64) {
        let queue = usize::from(operation[1]) % queues;
        let word = |at: usize| u32::from_le_bytes(operation[at..at + 4].try_into().unwrap());
        let index = u16::from(operation[2]);
        match operation[0] % 7 {
            // A descriptor: address, length, flags, next.
            0 => driver.describe(queue, index % 16, word(4).into(), word(8), operation[3].into(), index >> 4),
            // A descriptor with an address near the end of memory or of the address space.
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
    // A request that works without a peer: a read of sector 0, or a packet without meaning.
    driver.put(BUFFERS, &[0; 64]);
    let (queue, request) = match device {
        0 | 2 => (0, vec![writable(BUFFERS, 16)]),
        1 => (1, vec![readable(BUFFERS, 16)]),
        3 | 4 => (1, vec![readable(BUFFERS, 60)]),
        // A control message for port 0 has no effect. Output goes to the other port.
        PORTS => (5, vec![readable(BUFFERS, 16)]),
        _ => (0, vec![readable(BUFFERS, 16), writable(BUFFERS + 0x1000, 512), writable(BUFFERS + 0x800, 1)]),
    };
    driver.submit(queue, &request);
    driver.wait_used(queue);
}
