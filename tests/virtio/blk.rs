//! Disks.

use std::fs::File;
use std::sync::atomic::Ordering;

use support::virtio::disk::*;
use support::virtio::driver::*;
use vellum_devices::virtio::blk::{Blk, BlkConfig, BlkError, ImageFormat};
use vellum_devices::virtio::{PAUSE_TIMEOUT, VirtioDevice};
use vellum_disk::DiskImage;
use vellum_disk::overlay::Place;
use vellum_sys::file::copy_into;
use virtio_bindings::virtio_blk::*;

use super::CODEC;

/// One request with `data` between header and status. Returns the status and the number of bytes
/// written.
fn request(driver: &mut Driver, kind: u32, sector: u64, data: &[Buf]) -> (u8, u32) {
    header(driver, kind, sector);
    let mut chain = vec![readable(HEADER, 16)];
    chain.extend(data);
    chain.push(writable(STATUS, 1));
    let head = driver.submit(0, &chain);
    let (used, written) = driver.wait_used(0);
    assert_eq!(used, head);
    (driver.fetch(STATUS, 1)[0], written)
}

fn sectors(count: usize) -> Vec<u8> {
    (0..count * 512).map(|at| (at / 512 * 7 + at) as u8).collect()
}

fn segment(driver: &Driver, sector: u64, count: u32, flags: u32) {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(count.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    driver.put(DATA, &bytes);
}

#[test]
fn what_is_written_is_read_back_and_is_in_the_image() {
    let image = Image::new("readwrite", &[0; 64 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    assert_eq!(driver.config(0, 8), 64u64.to_le_bytes());
    let data = sectors(3);
    driver.put(DATA, &data);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 5, &[readable(DATA, 3 * 512)]), (0, 1));
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    assert_eq!(std::fs::read(&image.0).unwrap()[5 * 512..8 * 512], data);

    // Buffers with odd boundaries.
    let cut = [writable(DATA + 0x10000, 100), writable(MIDDLE - 700, 1000), writable(DATA + 0x20000, 436)];
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 5, &cut), (0, 1537));
    let mut back = driver.fetch(DATA + 0x10000, 100);
    back.extend(driver.fetch(MIDDLE - 700, 1000));
    back.extend(driver.fetch(DATA + 0x20000, 436));
    assert_eq!(back, data);
}

#[test]
fn writes_by_the_device_are_in_the_memory_dirty_bitmap() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
    let image = Image::new("dirty", &[1; 16 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    let region = |driver: &Driver, at| {
        driver.mem.find_region(GuestAddress(at)).unwrap().bitmap().dirty_at(at as usize)
    };
    assert!(!region(&driver, DATA + 0x3000));
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[writable(DATA + 0x3000, 512)]).0, 0);
    assert!(region(&driver, DATA + 0x3000));
    assert!(!region(&driver, DATA + 0x4000));
}

/// The overlay of a paused disk is a whole file if it does not outlive the machine. A disk on a copy
/// has the same content, and each of the two has its own writes from then on.
#[test]
fn a_copy_of_a_paused_disk_s_overlay_is_the_same_disk() {
    let (base, copy) = (Image::new("forked", &sectors(64)), Image::new("forked-copy", &[]));
    let on = |place| BlkConfig { overlay: Some(place), ..BlkConfig::new(&base.0) };
    let here = blk(&on(Place::Discard));
    assert!(here.stays().is_some() && here.is_copied_by_forks());
    let image = here.handle().unwrap().downcast::<DiskImage>().unwrap();
    let mut here = Driver::new(CODEC, here);
    here.start();
    let write = |driver: &mut Driver, sector, byte| {
        driver.put(DATA, &[byte; 512]);
        assert_eq!(request(driver, VIRTIO_BLK_T_OUT, sector, &[readable(DATA, 512)]), (0, 1));
    };
    let read = |driver: &mut Driver, sector| {
        assert_eq!(request(driver, VIRTIO_BLK_T_IN, sector, &[writable(DATA, 512)]), (0, 513));
        driver.fetch(DATA, 512)
    };
    write(&mut here, 5, 1);
    here.device.quiesce(PAUSE_TIMEOUT).expect("nothing hangs");
    assert!(image.overlay.as_ref().unwrap().load(Ordering::Acquire));
    let to = File::options().read(true).write(true).open(&copy.0).unwrap();
    copy_into(&image.file, &to).unwrap();
    here.device.resume();
    let mut there = disk(CODEC, &on(Place::Open(copy.0.clone())));
    there.start();
    write(&mut here, 40, 2);
    write(&mut there, 50, 3);
    for (driver, of) in [(&mut here, [(5, 1), (40, 2)]), (&mut there, [(5, 1), (50, 3)])] {
        for sector in [4, 5, 40, 50] {
            let own = of.iter().find(|(at, _)| *at == sector).map(|(_, byte)| vec![*byte; 512]);
            let expected = own.unwrap_or_else(|| sectors(64)[sector as usize * 512..][..512].to_vec());
            assert_eq!(read(driver, sector), expected, "{sector}");
        }
    }
    assert_eq!(std::fs::read(&base.0).unwrap(), sectors(64));
    // An overlay with a name is to survive a loss of power. Its map waits for the next flush.
    let named = blk(&on(Place::File(copy.0.with_extension("named"))));
    assert!(named.stays().is_some() && !named.is_copied_by_forks());
    std::fs::remove_file(copy.0.with_extension("named")).unwrap();
}

#[test]
fn the_end_of_the_disk_and_half_sectors_are_io_errors() {
    let image = Image::new("bounds", &[7; 8 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    let ioerr = VIRTIO_BLK_S_IOERR as u8;
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 7, &[writable(DATA, 512)]), (0, 513));
    for (sector, len) in [(7, 1024), (8, 512), (u64::MAX, 512), (u64::MAX / 512, 512), (0, 511), (0, 9 * 512)]
    {
        assert_eq!(
            request(&mut driver, VIRTIO_BLK_T_IN, sector, &[writable(DATA, len)]),
            (ioerr, 1),
            "{sector} {len}"
        );
        assert_eq!(
            request(&mut driver, VIRTIO_BLK_T_OUT, sector, &[readable(DATA, len)]),
            (ioerr, 1),
            "{sector} {len}"
        );
    }
    assert_eq!(std::fs::read(&image.0).unwrap(), [7; 8 * 512]);
}

#[test]
fn an_image_truncated_underfoot_is_an_io_error_not_a_loop() {
    let image = Image::new("truncated", &[7; 8 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    std::fs::OpenOptions::new().write(true).open(&image.0).unwrap().set_len(512).unwrap();
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 4, &[writable(DATA, 512)]).0, VIRTIO_BLK_S_IOERR as u8);
}

#[test]
fn a_readonly_disk_says_so_and_stays_as_it_was() {
    let image = Image::new("readonly", &[7; 8 * 512]);
    let config = BlkConfig { readonly: true, ..BlkConfig::new(&image.0) };
    let mut driver = disk(CODEC, &config);
    assert_ne!(driver.offered() & 1 << VIRTIO_BLK_F_RO, 0);
    driver.start();
    driver.put(DATA, &[1; 512]);
    for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(request(&mut driver, kind, 0, &[readable(DATA, 512)]).0, VIRTIO_BLK_S_IOERR as u8);
    }
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_IN, 0, &[writable(DATA, 512)]).0, 0);
    assert_eq!(driver.fetch(DATA, 512), [7; 512]);
}

#[test]
fn zeroes_and_discards_reach_the_image_and_their_limits_hold() {
    let image = Image::new("zeroes", &[7; 64 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    for (kind, sector, flags) in
        [(VIRTIO_BLK_T_WRITE_ZEROES, 8, 0), (VIRTIO_BLK_T_WRITE_ZEROES, 16, 1), (VIRTIO_BLK_T_DISCARD, 24, 0)]
    {
        segment(&driver, sector, 4, flags);
        assert_eq!(request(&mut driver, kind, 0, &[readable(DATA, 16)]).0, 0);
    }
    let contents = std::fs::read(&image.0).unwrap();
    for (sector, chunk) in contents.chunks(512).enumerate() {
        let zero = [8..12, 16..20, 24..28].iter().any(|range| range.contains(&sector));
        assert_eq!(chunk, [if zero { 0 } else { 7 }; 512], "sector {sector}");
    }
    for (sector, count, flags) in [(62, 4, 0), (u64::MAX, 1, 0), (0, u32::MAX, 0), (0, 1, 2)] {
        segment(&driver, sector, count, flags);
        assert_ne!(request(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &[readable(DATA, 16)]).0, 0);
    }
    segment(&driver, 0, 1, 1);
    assert_eq!(
        request(&mut driver, VIRTIO_BLK_T_DISCARD, 0, &[readable(DATA, 16)]).0,
        VIRTIO_BLK_S_UNSUPP as u8,
        "discard has no unmap flag"
    );
    assert_ne!(
        request(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &[readable(DATA, 17 * 16)]).0,
        0,
        "17 segments"
    );
    assert_eq!(std::fs::read(&image.0).unwrap(), contents);
}

/// A guest must not choose the format of its disk at the next start, nor the tables that Vellum then
/// reads.
#[test]
fn a_raw_disk_does_not_become_an_image_of_another_format() {
    let heads: [&[u8]; 3] = [b"QFI\xfb\0\0\0\x03", b"KDMV", b"conectix"];
    let image = Image::new("raw", &sectors(4));
    let mut driver = image.open(CODEC);
    driver.start();
    for head in heads {
        driver.put(DATA, &sectors(4));
        driver.put(DATA, head);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[readable(DATA, 1024)]), (1, 1));
        assert_eq!(std::fs::read(&image.0).unwrap(), sectors(4));
        // It may be anywhere else.
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 1, &[readable(DATA, 512)]), (0, 1));
        driver.put(DATA, &sectors(4));
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[readable(DATA, 2048)]), (0, 1));
        assert_eq!(std::fs::read(&image.0).unwrap(), sectors(4));
    }
    drop(driver);
    let config = BlkConfig { format: Some(ImageFormat::Raw), ..BlkConfig::new(&image.0) };
    let mut driver = disk(CODEC, &config);
    driver.start();
    driver.put(DATA, heads[0]);
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[readable(DATA, 512)]), (0, 1));
}

#[test]
fn the_serial_number_and_unknown_requests_are_answered() {
    let image = Image::new("serial", &[0; 512]);
    let config = BlkConfig { serial: Some("vellum-0001".into()), ..BlkConfig::new(&image.0) };
    let mut driver = disk(CODEC, &config);
    driver.start();
    assert_eq!(request(&mut driver, VIRTIO_BLK_T_GET_ID, 0, &[writable(DATA, 20)]), (0, 21));
    assert_eq!(driver.fetch(DATA, 20), b"vellum-0001\0\0\0\0\0\0\0\0\0");
    assert_eq!(request(&mut driver, 77, 0, &[]).0, VIRTIO_BLK_S_UNSUPP as u8);
}

#[test]
fn every_queue_of_a_multiqueue_disk_works() {
    let image = Image::new("multiqueue", &sectors(16));
    let config = BlkConfig { queues: 4, ..BlkConfig::new(&image.0) };
    let mut driver = disk(CODEC, &config);
    driver.start();
    assert_eq!(driver.config(34, 2), [4, 0]);
    header(&driver, VIRTIO_BLK_T_IN, 0);
    for queue in 0..4 {
        let data = DATA + 0x1000 * queue as u64;
        let chain = [readable(HEADER, 16), writable(data, 1024), writable(STATUS + queue as u64, 1)];
        driver.submit(queue, &chain);
    }
    for queue in 0..4 {
        assert_eq!(driver.wait_used(queue).1, 1025);
        assert_eq!(driver.fetch(DATA + 0x1000 * queue as u64, 1024), sectors(2));
    }
}

#[test]
fn a_disk_that_cannot_be_is_refused_with_its_reason() {
    let image = Image::new("odd", &[0; 700]);
    assert!(matches!(Blk::open(&BlkConfig::new(&image.0)), Err(BlkError::Size { size: 700, .. })));
    let empty = Image::new("empty", &[]);
    assert!(matches!(Blk::open(&BlkConfig::new(&empty.0)), Err(BlkError::Size { size: 0, .. })));
    assert!(matches!(Blk::open(&BlkConfig::new("/")), Err(BlkError::Kind { .. })));
    assert!(matches!(Blk::open(&BlkConfig::new("/dev/null")), Err(BlkError::Kind { .. })));
    assert!(matches!(Blk::open(&BlkConfig::new("/no/such/disk")), Err(BlkError::Open { .. })));
    let good = Image::new("long", &[0; 512]);
    let config = BlkConfig { serial: Some("x".repeat(21)), ..BlkConfig::new(&good.0) };
    assert!(matches!(Blk::open(&config), Err(BlkError::Serial(_))));
    for queues in [0, 17] {
        let config = BlkConfig { queues, ..BlkConfig::new(&good.0) };
        assert!(matches!(Blk::open(&config), Err(BlkError::Queues(_))));
    }
}

#[test]
fn a_disk_has_one_writer_or_many_readers() {
    let image = Image::new("locked", &[0; 512]);
    let writer = BlkConfig::new(&image.0);
    let reader = BlkConfig { readonly: true, ..writer.clone() };
    let first = Blk::open(&writer).unwrap();
    for second in [&writer, &reader] {
        let Err(error @ BlkError::Locked { .. }) = Blk::open(second) else { panic!("opened twice") };
        assert!(error.to_string().contains("in use"), "{error}");
    }
    drop(first);
    let readers = [Blk::open(&reader).unwrap(), Blk::open(&reader).unwrap()];
    assert!(matches!(Blk::open(&writer), Err(BlkError::Locked { .. })));
    drop(readers);
    Blk::open(&writer).unwrap();
}

#[test]
fn a_disk_whose_machine_moves_changes_hands() {
    let image = Image::new("moves", &[0; 512]);
    let writer = BlkConfig::new(&image.0);
    let mut source = Blk::open(&writer).unwrap();
    let mut target = Blk::open_unlocked(&writer).unwrap();
    assert!(target.retake().unwrap_err().to_string().contains("in use"), "two writers");
    source.release();
    target.retake().unwrap();
    assert!(source.retake().is_err(), "two writers");
    target.release();
    source.retake().unwrap();
}
