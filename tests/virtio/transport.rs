//! The registers that both codecs have, the reset, and the saved state.

use support::virtio::disk::{DATA, HEADER, Image, STATUS, blk, header};
use support::virtio::driver::*;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_devices::virtio::transport::Codec;
use vellum_devices::virtio::{PAUSE_TIMEOUT, RestoreError};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;

use super::CODEC;

#[test]
fn features_that_were_not_offered_are_refused() {
    let image = Image::new("features", &[0; 512]);
    let driver = image.open(CODEC);
    let features_ok = |features| {
        driver.negotiate(features);
        driver.status() & VIRTIO_CONFIG_S_FEATURES_OK != 0
    };
    assert!(features_ok(driver.offered()));
    assert!(!features_ok(driver.offered() | 1 << 50));
    assert!(!features_ok(driver.offered() & !(1 << VIRTIO_F_VERSION_1)), "a legacy driver");
    driver.set(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_DRIVER_OK);
    assert_eq!(driver.status() & VIRTIO_CONFIG_S_DRIVER_OK, 0, "ready without agreement");
}

#[test]
fn a_queue_that_is_none_stops_the_device_until_reset() {
    let image = Image::new("badqueue", &[0; 512]);
    let mut driver = image.open(CODEC);
    let breakers: [(u32, u32); 8] = [
        (VIRTIO_MMIO_QUEUE_NUM, 3),
        (VIRTIO_MMIO_QUEUE_NUM, 0),
        // With PCI, sizes have 16 bits.
        (VIRTIO_MMIO_QUEUE_NUM, if CODEC == Codec::Mmio { 0x1_0010 } else { 0xffff }),
        (VIRTIO_MMIO_QUEUE_NUM, 512),
        (VIRTIO_MMIO_QUEUE_DESC_LOW, 0x1008),
        (VIRTIO_MMIO_QUEUE_AVAIL_LOW, MEMORY_END as u32 - 16),
        (VIRTIO_MMIO_QUEUE_USED_HIGH, 0xffff_ffff),
        (VIRTIO_MMIO_QUEUE_DESC_LOW, 0),
    ];
    for (register, value) in breakers {
        driver.negotiate(driver.offered());
        driver.prepare_queue(0);
        driver.set(register, value);
        driver.set(VIRTIO_MMIO_QUEUE_READY, 1);
        driver.set(VIRTIO_MMIO_STATUS, VIRTIO_CONFIG_S_DRIVER_OK);
        assert!(driver.needs_reset(), "{register:#x} = {value:#x}");
        driver.start();
        assert!(!driver.needs_reset());
    }
}

#[test]
fn a_ready_queue_does_not_move() {
    let image = Image::new("moved", &[9; 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    driver.set(VIRTIO_MMIO_QUEUE_SEL, 0);
    driver.set(VIRTIO_MMIO_QUEUE_READY, 0);
    driver.set(VIRTIO_MMIO_QUEUE_DESC_LOW, 0xdead_0000);
    assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_READY), 1);
    // The registers are read again when the machine resumes.
    driver.device.quiesce(PAUSE_TIMEOUT).unwrap();
    driver.device.resume();
    header(&driver, VIRTIO_BLK_T_IN, 0);
    driver.submit(0, &[readable(HEADER, 16), writable(DATA, 512), writable(STATUS, 1)]);
    assert_eq!(driver.wait_used(0).1, 513);
}

#[test]
fn an_interrupt_stays_until_it_is_acknowledged() {
    let image = Image::new("interrupt", &[9; 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    header(&driver, VIRTIO_BLK_T_IN, 0);
    driver.submit(0, &[readable(HEADER, 16), writable(DATA, 512), writable(STATUS, 1)]);
    driver.wait_used(0);
    driver.wait(|d| (d.get(VIRTIO_MMIO_INTERRUPT_STATUS) == VIRTIO_MMIO_INT_VRING).then_some(()));
    driver.set(VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_VRING);
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn after_a_reset_in_flight_nothing_touches_the_old_buffers() {
    let image = Image::new("reset", &[9; 1 << 20]);
    let mut driver = image.open(CODEC);
    // This tests a race: whatever the worker does when the reset comes must be finished when the
    // reset returns.
    for _ in 0..200 {
        driver.start();
        header(&driver, VIRTIO_BLK_T_IN, 0);
        for _ in 0..4 {
            driver.submit(0, &[readable(HEADER, 16), writable(DATA, 0x40000), writable(STATUS, 1)]);
        }
        driver.set(VIRTIO_MMIO_STATUS, 0);
        driver.put(DATA, &[0; 0x40000]);
        assert_eq!(driver.status(), 0);
        assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
        assert!(driver.fetch(DATA, 0x40000).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_disk_moves_to_a_new_process_in_the_middle_of_its_rings() {
    let image = Image::new("restore", &[9; 64 * 512]);
    let mut old = image.open(CODEC);
    old.start();
    let chain = [readable(HEADER, 16), readable(DATA, 512), writable(STATUS, 1)];
    for sector in 0..5 {
        header(&old, VIRTIO_BLK_T_OUT, sector);
        old.submit(0, &chain);
        old.wait_used(0);
    }
    old.device.quiesce(PAUSE_TIMEOUT).unwrap();
    header(&old, VIRTIO_BLK_T_OUT, 6);
    old.put(DATA, &[0x55; 512]);
    old.submit(0, &chain);
    assert_eq!(old.used_now(0), None, "quiesced");
    let state = serde_json::to_string(&old.reach.save()).unwrap();
    let (mem, rings) = old.into_parts();

    let mut new = Driver::on(CODEC, blk(&BlkConfig::new(&image.0)), mem);
    new.take_rings(rings);
    new.reach.restore(serde_json::from_str(&state).unwrap()).unwrap();
    assert_ne!(new.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0, "unacknowledged interrupts come again");
    new.device.resume();
    assert_eq!(new.wait_used(0).1, 1);
    assert_eq!(new.fetch(STATUS, 1), [0]);
    drop(new);
    assert_eq!(std::fs::read(&image.0).unwrap()[6 * 512..7 * 512], [0x55; 512]);
}

#[test]
fn a_state_of_another_disk_is_refused() {
    let small = Image::new("small", &[0; 512]);
    let large = Image::new("large", &[0; 1024]);
    let state = small.open(CODEC).reach.save();
    let error = large.open(CODEC).reach.restore(state).unwrap_err();
    assert!(matches!(error, RestoreError::Field { field: "disk", .. }), "{error}");
}
