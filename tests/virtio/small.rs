//! The entropy device, the console and the balloon.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use support::virtio::driver::*;
use vellum_devices::virtio::balloon::{Balloon, Stat};
use vellum_devices::virtio::console::Console;
use vellum_devices::virtio::rng::Rng;
use virtio_bindings::virtio_mmio::*;

use super::CODEC;

#[test]
fn entropy_fills_what_the_guest_offers_up_to_a_limit() {
    let mut driver = Driver::new(CODEC, Rng::new().unwrap());
    driver.start();
    driver.submit(0, &[writable(BUFFERS, 32), writable(BUFFERS + 0x100, 32)]);
    assert_eq!(driver.wait_used(0).1, 64);
    let (first, second) = (driver.fetch(BUFFERS, 32), driver.fetch(BUFFERS + 0x100, 32));
    assert!(first != [0; 32] && second != [0; 32] && first != second);
    driver.submit(0, &[writable(MIDDLE - 0x40000, 0x80000)]);
    assert_eq!(driver.wait_used(0).1, 1 << 16, "the rest of a long request stays empty");
    driver.submit(0, &[readable(BUFFERS, 32)]);
    assert_eq!(driver.wait_used(0).1, 0, "nowhere to write");
}

#[test]
fn entropy_goes_on_in_a_new_process() {
    let mut driver = Driver::new(CODEC, Rng::new().unwrap());
    driver.start();
    driver.submit(0, &[writable(BUFFERS, 32)]);
    driver.wait_used(0);
    let mut driver = driver.move_to(Rng::new().unwrap(), |driver| {
        driver.submit(0, &[writable(BUFFERS + 0x100, 32)]);
    });
    assert_eq!(driver.used_now(0).map(|used| used.1), Some(32));
    assert_ne!(driver.fetch(BUFFERS + 0x100, 32), [0; 32]);
    assert_eq!(driver.used_now(0), None, "what was answered before is not answered again");
}

#[test]
fn a_device_that_has_stopped_itself_stays_so_in_a_new_process() {
    let mut driver = Driver::new(CODEC, Rng::new().unwrap());
    driver.start();
    driver.set_available_index(0, QUEUE_SIZE + 1);
    driver.run();
    // A driver that repairs its ring must still reset the device.
    let mut driver = driver.move_to(Rng::new().unwrap(), |driver| driver.set_available_index(0, 0));
    assert!(driver.needs_reset());
    driver.start();
    assert!(!driver.needs_reset());
}

#[test]
fn a_balloon_keeps_its_size_and_its_target_in_a_new_process() {
    let (balloon, handle) = Balloon::new();
    let mut driver = Driver::new(CODEC, balloon);
    driver.start();
    handle.set_target(5 * PAGE, &driver.device);
    driver.set(VIRTIO_MMIO_CONFIG + 4, 2);
    // The device keeps the buffer for statistics, also in a new process.
    driver.submit(2, &[readable(BUFFERS, 0)]);
    driver.run();
    driver.put(0x182 * PAGE, &[9; PAGE as usize]);
    let (balloon, handle) = Balloon::new();
    let mut driver = driver.move_to(balloon, |driver| {
        driver.put(BUFFERS, &0x182u32.to_le_bytes());
        driver.submit(0, &[readable(BUFFERS, 4)]);
    });
    assert_eq!((handle.actual(), driver.config(0, 4)), (2 * PAGE, 5u32.to_le_bytes().to_vec()));
    assert!(driver.used_now(0).is_some() && is_zero(&driver, 0x182));
    handle.refresh_stats(&driver.device);
    driver.wait_used(2);
}

/// A socket pair. The device's end comes first.
fn ends() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    (theirs, ours)
}

fn device(theirs: &UnixStream) -> Console {
    let file = || std::fs::File::from(OwnedFd::from(theirs.try_clone().unwrap()));
    Console::new(Some(file()), file())
}

/// A console on one end of a socket pair, and the other end.
fn console() -> (Driver, UnixStream) {
    let (theirs, ours) = ends();
    (Driver::new(CODEC, device(&theirs)), ours)
}

#[test]
fn a_console_carries_bytes_both_ways() {
    let (mut driver, mut host) = console();
    driver.start();
    driver.put(BUFFERS, b"hello, host");
    driver.submit(1, &[readable(BUFFERS, 5), readable(BUFFERS + 5, 6)]);
    assert_eq!(driver.wait_used(1).1, 0);
    let mut heard = [0; 11];
    host.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello, host");

    // Input that arrives before the guest has a buffer waits for one. Meanwhile the event loop is
    // idle.
    host.write_all(b"hello, guest").unwrap();
    driver.run();
    driver.submit(0, &[writable(BUFFERS, 7)]);
    driver.submit(0, &[writable(BUFFERS + 0x100, 100)]);
    assert_eq!(driver.wait_used(0).1, 7);
    assert_eq!(driver.wait_used(0).1, 5);
    assert_eq!(driver.fetch(BUFFERS, 7), b"hello, ");
    assert_eq!(driver.fetch(BUFFERS + 0x100, 5), b"guest");
}

#[test]
fn a_host_that_does_not_listen_stalls_the_guest_not_the_event_loop() {
    let (theirs, mut host) = ends();
    let mut driver = Driver::new(CODEC, device(&theirs));
    driver.start();
    let line: Vec<u8> = (0..0x10000).map(|at| (at % 251) as u8).collect();
    driver.put(BUFFERS, &line);
    let mut offered = 0;
    while offered < 16 {
        driver.submit(1, &[readable(BUFFERS, line.len() as u32)]);
        driver.run();
        offered += 1;
    }
    let mut finished = 0;
    while driver.used_now(1).is_some() {
        finished += 1;
    }
    assert!(finished < offered, "a socket does not hold {offered} times 64 KiB");

    // The machine moves in the middle of a request. No byte is lost or sent twice.
    let mut driver = driver.move_to(device(&theirs), |_| ());
    let mut heard = vec![0; line.len()];
    for _ in 0..offered {
        let mut got = 0;
        while got < heard.len() {
            got += host.read(&mut heard[got..]).unwrap();
            driver.run();
        }
        assert!(heard == line);
    }
}

#[test]
fn a_console_without_a_host_neither_spins_nor_stops_the_guest() {
    let (mut driver, host) = console();
    driver.start();
    drop(host);
    driver.submit(0, &[writable(BUFFERS, 7)]);
    driver.run();
    assert_eq!(driver.used_now(0), None);
    driver.submit(1, &[readable(BUFFERS, 5)]);
    assert_eq!(driver.wait_used(1).1, 0);
}

/// A file in memory with a sealed size acts like a file on a full disk.
#[test]
fn a_console_goes_on_when_its_disk_has_room_again() {
    use std::io::{Seek, SeekFrom};

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let file = std::fs::File::from(memfd_create("full", MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(4).unwrap();
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    let mut position = file.try_clone().unwrap();
    position.seek(SeekFrom::End(0)).unwrap();
    let mut driver = Driver::new(CODEC, Console::new(None, file));
    driver.start();
    driver.put(BUFFERS, b"lostkept");
    driver.submit(1, &[readable(BUFFERS, 4)]);
    assert_eq!(driver.wait_used(1).1, 0, "what is lost does not wait");
    position.rewind().unwrap();
    driver.submit(1, &[readable(BUFFERS + 4, 4)]);
    assert_eq!(driver.wait_used(1).1, 0);
    position.rewind().unwrap();
    let mut content = [0; 4];
    position.read_exact(&mut content).unwrap();
    assert_eq!(&content, b"kept");
}

#[test]
fn a_regular_file_is_read_to_its_end() {
    let path = own_path("console");
    std::fs::write(&path, b"from a file").unwrap();
    let input = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut driver =
        Driver::new(CODEC, Console::new(Some(input), std::fs::File::create("/dev/null").unwrap()));
    driver.start();
    for _ in 0..3 {
        driver.submit(0, &[writable(BUFFERS, 8)]);
    }
    assert_eq!(driver.wait_used(0).1, 8);
    assert_eq!(driver.wait_used(0).1, 3);
    assert_eq!(driver.used_now(0), None);
}

const PAGE: u64 = 4096;

fn is_zero(driver: &Driver, page: u64) -> bool {
    driver.fetch(page * PAGE, PAGE as usize).iter().all(|&byte| byte == 0)
}

#[test]
fn a_balloon_drops_the_pages_it_is_given() {
    let (balloon, handle) = Balloon::new();
    let mut driver = Driver::new(CODEC, balloon);
    driver.start();
    handle.set_target(3 * PAGE, &driver.device);
    assert_ne!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS) & VIRTIO_MMIO_INT_CONFIG, 0);
    assert_eq!(driver.config(0, 4), 3u32.to_le_bytes());

    let pages = [0x180u64, 0x182, 0x183, 0x184, 0x1ff];
    for page in 0x180..0x200 {
        driver.put(page * PAGE, &[9; PAGE as usize]);
    }
    // Adjacent pages in random order, one page twice, and two numbers outside memory: a driver may
    // send wrong ones.
    let lie = [0x180u32, 0x184, 0x182, 0x1ff, 0x183, 0x180, 0x200, u32::MAX];
    driver.put(BUFFERS, &lie.iter().flat_map(|pfn| pfn.to_le_bytes()).collect::<Vec<_>>());
    driver.submit(0, &[readable(BUFFERS, 4 * lie.len() as u32)]);
    driver.wait_used(0);
    for page in 0x180..0x200 {
        assert_eq!(is_zero(&driver, page), pages.contains(&page), "page {page:#x}");
    }

    driver.set(VIRTIO_MMIO_CONFIG + 4, 3);
    assert_eq!(handle.actual(), 3 * PAGE);
    driver.put(BUFFERS, &0x182u32.to_le_bytes());
    driver.submit(1, &[readable(BUFFERS, 4)]);
    driver.wait_used(1);
}

#[test]
fn pages_that_a_balloon_drops_are_in_the_memory_dirty_bitmap() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
    let mut driver = Driver::new(CODEC, Balloon::new().0);
    driver.start();
    driver.put(BUFFERS, &0x182u32.to_le_bytes());
    driver.submit(0, &[readable(BUFFERS, 4)]);
    driver.wait_used(0);
    let region = driver.mem.find_region(GuestAddress(0)).unwrap();
    let dirty: Vec<u64> = (MIDDLE / PAGE..MEMORY_END / PAGE)
        .filter(|page| region.bitmap().dirty_at((page * PAGE) as usize))
        .collect();
    assert_eq!(dirty, [0x182]);
}

#[test]
fn free_pages_that_are_reported_are_dropped() {
    let mut driver = Driver::new(CODEC, Balloon::new().0);
    driver.start();
    driver.put(0x180 * PAGE, &[9; 4 * PAGE as usize]);
    driver.submit(3, &[writable(0x180 * PAGE, PAGE as u32), writable(0x182 * PAGE, PAGE as u32)]);
    driver.wait_used(3);
    for (page, dropped) in [(0x180, true), (0x181, false), (0x182, true), (0x183, false)] {
        assert_eq!(is_zero(&driver, page), dropped, "page {page:#x}");
    }
}

#[test]
fn balloon_statistics_come_when_asked_for() {
    let (balloon, handle) = Balloon::new();
    let mut driver = Driver::new(CODEC, balloon);
    driver.start();
    let report = |driver: &mut Driver, free: u64| {
        let mut raw = 4u16.to_le_bytes().to_vec();
        raw.extend(free.to_le_bytes());
        driver.put(BUFFERS, &raw);
        driver.submit(2, &[readable(BUFFERS, 10)]);
        driver.run();
    };
    report(&mut driver, 1000);
    assert_eq!(handle.stats(), [Stat { tag: 4, value: 1000 }]);
    assert_eq!(driver.used_now(2), None, "the device keeps the request until it wants news");
    handle.refresh_stats(&driver.device);
    driver.wait_used(2);
    report(&mut driver, 2000);
    assert_eq!(handle.stats(), [Stat { tag: 4, value: 2000 }]);
}
