//! A device continues in a new process while requests are available but not served, in every queue
//! of every kind of device. Each request must be served there, once.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};

use support::virtio::disk::Image;
use support::virtio::driver::*;
use vellum_devices::virtio::VirtioDevice;
use vellum_devices::virtio::balloon::Balloon;
use vellum_devices::virtio::blk::{Blk, BlkConfig};
use vellum_devices::virtio::console::Console;
use vellum_devices::virtio::net::Net;
use vellum_devices::virtio::rng::Rng;
use vellum_devices::virtio::vsock::{Vsock, VsockConfig};
use vellum_sys::tap::Tap;
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT;

use super::CODEC;

/// A queue, a chain of buffers, and how many bytes of it the device writes.
type Chain = (usize, Vec<Buf>, u32);

/// The address of the buffers of chain `n`.
fn at(n: usize) -> u64 {
    BUFFERS + 0x1000 * n as u64
}

/// Offers `chains`, whose buffers `fill` fills, to a paused device. A second device must serve each
/// of them once after `wake`, which does what the host's side has to do. A third device must serve
/// none.
fn move_with<D: VirtioDevice + 'static>(
    make: impl Fn() -> D,
    chains: &[Chain],
    fill: impl Fn(&Driver),
    wake: impl FnOnce(&mut Driver),
) -> Driver {
    let device = make();
    let queues = 0..device.queue_sizes().len();
    assert!(queues.clone().all(|queue| chains.iter().any(|(of, ..)| *of == queue)), "a queue is left out");
    let mut driver = Driver::new(CODEC, device);
    driver.start();
    let mut open = Vec::new();
    let mut driver = driver.move_to(make(), |driver| {
        fill(driver);
        for (queue, buffers, written) in chains {
            open.push((*queue, driver.submit(*queue, buffers), *written));
        }
        driver.run();
        assert!(queues.clone().all(|queue| driver.used_now(queue).is_none()), "it does not stand still");
    });
    let served: Vec<_> = open.iter().map(|(queue, head, _)| (*queue, *head)).collect();
    wake(&mut driver);
    for (queue, ..) in chains {
        let (head, written) = driver.wait_used(*queue);
        let found = open.iter().position(|one| *one == (*queue, head, written));
        open.remove(
            found.unwrap_or_else(|| panic!("queue {queue}: {head}, {written} bytes; open are {open:?}")),
        );
    }
    let mut driver = driver.move_to(make(), |_| ());
    for (queue, head) in queues.filter_map(|queue| Some((queue, driver.used_now(queue)?.0))) {
        assert!(!served.contains(&(queue, head)), "{head} of queue {queue} is served twice");
    }
    driver
}

#[test]
fn of_an_entropy_source() {
    let chains = [8, 16, 32].map(|length| (0, vec![writable(at(length as usize), length)], length));
    let driver = move_with(|| Rng::new().unwrap(), &chains, |_| (), |_| ());
    assert!([8, 16, 32].iter().all(|n| driver.fetch(at(*n), 8) != [0; 8]));
}

#[test]
fn of_a_disk_with_several_queues() {
    const QUEUES: usize = 4;
    let image = Image::new("waiting", &[0; 2 * QUEUES * 512]);
    let config = BlkConfig { queues: QUEUES as u16, ..BlkConfig::new(&image.0) };
    let disk = || {
        let mut disk = Blk::open_unlocked(&config).unwrap();
        disk.start(Box::new(|_| Ok(()))).unwrap();
        disk
    };
    let chain =
        |n: usize| vec![readable(at(n), 16), readable(at(n) + 0x200, 512), writable(at(n) + 0x800, 1)];
    let chains: Vec<Chain> = (0..2 * QUEUES).map(|n| (n % QUEUES, chain(n), 1)).collect();
    let fill = |driver: &Driver| {
        for n in 0..2 * QUEUES {
            driver.put(at(n), &VIRTIO_BLK_T_OUT.to_le_bytes());
            driver.put(at(n) + 8, &(n as u64).to_le_bytes());
            driver.put(at(n) + 0x200, &[n as u8 + 1; 512]);
            driver.put(at(n) + 0x800, &[0xff]);
        }
    };
    let driver = move_with(disk, &chains, fill, |_| ());
    let contents = std::fs::read(&image.0).unwrap();
    for (n, sector) in contents.chunks(512).enumerate() {
        assert!(sector.iter().all(|byte| *byte == n as u8 + 1), "sector {n}");
        assert_eq!(driver.fetch(at(n) + 0x800, 1), [0], "sector {n}");
    }
}

#[test]
fn of_a_network_interface() {
    const HEADER: u32 = 12;
    let (wire, theirs) = UnixDatagram::pair().unwrap();
    wire.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let net = || Net::on(Tap::from_fd("pair", theirs.try_clone().unwrap().into()), [2, 0, 0, 0, 0, 7]);
    let send = |n: usize| (1, vec![readable(at(n), HEADER + 60)], 0);
    // One packet is sent to the guest before the device exists, and one later.
    wire.send(&[&[0; HEADER as usize][..], &[5; 80]].concat()).unwrap();
    let chains = [
        (0, vec![writable(at(0), 1600)], HEADER + 80),
        (0, vec![writable(at(1), 1600)], HEADER + 90),
        send(2),
        send(3),
    ];
    let fill = |driver: &Driver| [2, 3].iter().for_each(|n| driver.put(at(*n) + 12, &[*n as u8; 60]));
    let wake = |_: &mut Driver| {
        wire.send(&[&[0; HEADER as usize][..], &[6; 90]].concat()).unwrap();
    };
    move_with(net, &chains, fill, wake);
    let mut heard = [0; 100];
    for n in [2, 3] {
        assert_eq!((wire.recv(&mut heard).unwrap(), heard[12]), (72, n));
    }
    assert_eq!(wire.recv(&mut heard).unwrap_err().kind(), ErrorKind::WouldBlock, "a packet went out twice");
}

#[test]
fn of_a_console() {
    let (theirs, mut host) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let file = || std::fs::File::from(OwnedFd::from(theirs.try_clone().unwrap()));
    let say = |n: usize| (1, vec![readable(at(n), 5)], 0);
    let chains = [(0, vec![writable(at(0), 3)], 3), (0, vec![writable(at(1), 64)], 4), say(2), say(3)];
    let fill = |driver: &Driver| {
        driver.put(at(2), b"first");
        driver.put(at(3), b"other");
    };
    let mut to_guest = host.try_clone().unwrap();
    let wake = |_: &mut Driver| to_guest.write_all(b"7 bytes").unwrap();
    let driver = move_with(|| Console::new(Some(file()), file()), &chains, fill, wake);
    assert_eq!((driver.fetch(at(0), 3), driver.fetch(at(1), 4)), (b"7 b".to_vec(), b"ytes".to_vec()));
    host.set_nonblocking(true).unwrap();
    let mut heard = [0; 64];
    assert_eq!(host.read(&mut heard[..5]).and_then(|_| host.read(&mut heard[5..])).unwrap(), 5);
    assert_eq!(&heard[..10], b"firstother");
}

#[test]
fn of_a_balloon() {
    let handles = RefCell::new(Vec::new());
    let balloon = || {
        let (balloon, handle) = Balloon::new();
        handles.borrow_mut().push(handle);
        balloon
    };
    // The queues are inflate, deflate, statistics (the device keeps the buffer until it needs new
    // ones), and free pages.
    let chains = [
        (0, vec![readable(at(0), 4)], 0),
        (1, vec![readable(at(0), 4)], 0),
        (2, vec![readable(at(1), 10)], 0),
        (3, vec![writable(0x184 << 12, 4096)], 0),
    ];
    let fill = |driver: &Driver| {
        driver.put(at(0), &0x182u32.to_le_bytes());
        driver.put(at(1), &[4, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        [0x182 << 12, 0x184 << 12].iter().for_each(|page| driver.put(*page, &[9; 4096]));
    };
    let wake = |driver: &mut Driver| handles.borrow()[1].refresh_stats(&driver.device);
    let driver = move_with(balloon, &chains, fill, wake);
    assert_eq!(handles.borrow()[1].stats().iter().map(|stat| stat.value).collect::<Vec<_>>(), [9]);
    assert!([0x182 << 12, 0x184 << 12].iter().all(|page| driver.fetch(*page, 4096) == [0; 4096]));
}

const CID: u32 = 7;

/// A socket device with its own socket.
fn vsock() -> Vsock {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    Vsock::open(&VsockConfig { path: own_path(&format!("waiting-{count}")), cid: CID, is_named: false })
        .unwrap()
}

/// A driver has more than one event buffer, and notifies the device only at the index that it was
/// asked for (VIRTIO_F_EVENT_IDX). This must be the index of the buffer that the driver puts back
/// after it has handled the event. Otherwise nothing may ever wake the device.
#[test]
fn a_socket_device_hears_of_the_buffer_that_is_put_back() {
    let mut driver = Driver::new(CODEC, vsock());
    driver.start();
    for number in 0..3 {
        driver.submit(2, &[writable(at(number), 4)]);
    }
    driver.run();
    let mut driver = driver.move_to(vsock(), |_| ());
    assert_eq!(driver.used_now(2), Some((0, 4)));
    let avail_event = Driver::used(2) + 4 + 8 * u64::from(QUEUE_SIZE);
    assert_eq!(driver.fetch(avail_event, 2), 3u16.to_le_bytes());
}

#[test]
fn of_a_socket_device() {
    const HEADER: u32 = 44;
    // A request to a port that nothing listens on, which is answered, and the event that all
    // connections are gone.
    let chains = [
        (0, vec![writable(at(0), 256)], HEADER),
        (1, vec![readable(at(1), HEADER)], 0),
        (2, vec![writable(at(2), 4)], 4),
    ];
    let fill = |driver: &Driver| {
        let mut request = [u64::from(CID).to_le_bytes(), 2u64.to_le_bytes()].concat();
        [1000u32, 77, 0].iter().for_each(|word| request.extend(word.to_le_bytes()));
        // Type stream, operation request, no flags, the size of the guest's buffer, and nothing of
        // it used.
        [1u16, 1].iter().for_each(|half| request.extend(half.to_le_bytes()));
        [0u32, 4096, 0].iter().for_each(|word| request.extend(word.to_le_bytes()));
        driver.put(at(1), &request);
    };
    // It is answered after the driver has handled the event.
    let wake = |driver: &mut Driver| {
        driver.submit(2, &[writable(at(3), 4)]);
    };
    let driver = move_with(vsock, &chains, fill, wake);
    assert_eq!(driver.fetch(at(0) + 30, 2), 3u16.to_le_bytes(), "the answer is no RST");
}
