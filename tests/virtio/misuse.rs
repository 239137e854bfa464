//! A driver breaks every rule of the ring. The device must stop and report it, and must work again
//! after a reset. A disk stands for all devices, because all take their requests through the same
//! queue code.

use support::virtio::disk::{DATA, HEADER, Image, STATUS, header};
use support::virtio::driver::*;
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_ring::*;

use super::CODEC;

const NEXT: u32 = VRING_DESC_F_NEXT;
const WRITE: u32 = VRING_DESC_F_WRITE;
const INDIRECT: u32 = VRING_DESC_F_INDIRECT;

/// Starts a disk, runs `misuse` on it, and expects it to stop, to change nothing, and to work after
/// a reset.
fn breaks(name: &str, misuse: impl FnOnce(&mut Driver)) {
    let image = Image::new(name, &[9; 64 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    header(&driver, VIRTIO_BLK_T_IN, 0);
    misuse(&mut driver);
    driver.wait_broken();
    assert_eq!(driver.used_now(0), None, "a broken request is not answered");
    assert_eq!(driver.fetch(STATUS, 1), [0xff]);
    works(&mut driver);
}

fn works(driver: &mut Driver) {
    driver.start();
    assert!(!driver.needs_reset());
    header(driver, VIRTIO_BLK_T_IN, 0);
    driver.submit(0, &[readable(HEADER, 16), writable(DATA, 512), writable(STATUS, 1)]);
    assert_eq!(driver.wait_used(0).1, 513);
    assert_eq!(driver.fetch(DATA, 512), [9; 512]);
}

#[test]
fn an_available_index_too_far_ahead() {
    breaks("index", |driver| driver.set_available_index(0, QUEUE_SIZE + 1));
}

#[test]
fn an_available_index_that_goes_back() {
    let image = Image::new("back", &[9; 64 * 512]);
    let mut driver = image.open(CODEC);
    works(&mut driver);
    driver.set_available_index(0, 0);
    driver.wait_broken();
    works(&mut driver);
}

#[test]
fn a_head_outside_the_table() {
    breaks("head", |driver| driver.offer(0, QUEUE_SIZE));
    breaks("head-max", |driver| driver.offer(0, u16::MAX));
}

#[test]
fn a_next_outside_the_table() {
    breaks("next", |driver| {
        driver.describe(0, 0, HEADER, 16, NEXT, QUEUE_SIZE);
        driver.offer(0, 0);
    });
}

#[test]
fn a_chain_that_loops() {
    breaks("loop", |driver| {
        driver.describe(0, 0, HEADER, 16, NEXT, 1);
        driver.describe(0, 1, DATA, 512, NEXT | WRITE, 1);
        driver.offer(0, 0);
    });
    breaks("loop-two", |driver| {
        driver.describe(0, 0, HEADER, 8, NEXT, 1);
        driver.describe(0, 1, HEADER + 8, 8, NEXT, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn buffers_outside_memory() {
    for (name, addr, len) in [
        ("beyond", MEMORY_END, 512),
        ("across", MEMORY_END - 256, 512),
        ("top", u64::MAX - 256, 512),
        ("wraps", u64::MAX, u32::MAX),
    ] {
        breaks(name, |driver| {
            driver.submit(0, &[readable(HEADER, 16), writable(addr, len), writable(STATUS, 1)]);
        });
    }
}

#[test]
fn huge_lengths() {
    breaks("huge", |driver| {
        driver.submit(0, &[readable(HEADER, 16), writable(DATA, u32::MAX), writable(STATUS, 1)]);
    });
    // The sum is more than 2^32 bytes, and each buffer is in memory.
    breaks("sum", |driver| {
        let mut chain = vec![readable(HEADER, 16)];
        chain.extend([writable(0, u32::MAX / 2), writable(0, u32::MAX / 2), writable(0, 16)]);
        driver.submit(0, &chain);
    });
}

#[test]
fn a_readable_buffer_after_a_writable_one() {
    breaks("order", |driver| {
        driver.submit(0, &[writable(STATUS, 1), readable(HEADER, 16)]);
    });
}

#[test]
fn indirect_tables_that_are_none() {
    for (name, table, len) in [
        ("empty", DATA, 0),
        ("ragged", DATA, 17),
        ("outside", MEMORY_END, 16),
        ("all-loop", DATA, 16 * 65535),
    ] {
        breaks(name, |driver| {
            // In the indirect table, a descriptor that is its own successor.
            driver.describe_at(DATA, HEADER, 16, NEXT, 0);
            driver.describe(0, 0, table, len, INDIRECT, 0);
            driver.offer(0, 0);
        });
    }
    breaks("nested", |driver| {
        driver.describe_at(DATA, DATA, 16, INDIRECT, 0);
        driver.describe(0, 0, DATA, 16, INDIRECT, 0);
        driver.offer(0, 0);
    });
    breaks("longer-than-the-queue", |driver| {
        for at in 0..=QUEUE_SIZE {
            let next = if at < QUEUE_SIZE { NEXT } else { 0 };
            driver.describe_at(DATA + 16 * u64::from(at), HEADER, 1, next, at + 1);
        }
        driver.describe(0, 0, DATA, 16 * u32::from(QUEUE_SIZE + 1), INDIRECT, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn an_indirect_table_that_is_one_works() {
    let image = Image::new("indirect", &[9; 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    header(&driver, VIRTIO_BLK_T_IN, 0);
    let table = DATA + 0x2000;
    driver.describe_at(table, HEADER, 16, NEXT, 1);
    driver.describe_at(table + 16, DATA, 512, NEXT | WRITE, 2);
    driver.describe_at(table + 32, STATUS, 1, WRITE, 0);
    driver.describe(0, 0, table, 48, INDIRECT, 0);
    driver.offer(0, 0);
    assert_eq!(driver.wait_used(0), (0, 513));
}

#[test]
fn zero_lengths_and_missing_parts_are_answered_or_dropped() {
    let image = Image::new("zero", &[9; 64 * 512]);
    let mut driver = image.open(CODEC);
    driver.start();
    // Empty buffers may be anywhere, even outside memory: nothing is read or written there.
    header(&driver, VIRTIO_BLK_T_IN, 0);
    driver.submit(
        0,
        &[
            readable(MEMORY_END, 0),
            readable(HEADER, 16),
            writable(DATA, 512),
            writable(DATA, 0),
            writable(STATUS, 1),
            writable(u64::MAX, 0),
        ],
    );
    assert_eq!(driver.wait_used(0).1, 513);
    assert_eq!(driver.fetch(STATUS, 1), [0]);

    // Without a status byte there is no answer.
    for chain in [&[readable(HEADER, 16)][..], &[readable(HEADER, 0)], &[writable(STATUS, 0)]] {
        driver.submit(0, chain);
        assert_eq!(driver.wait_used(0).1, 0);
    }

    // A header that is too short.
    header(&driver, VIRTIO_BLK_T_IN, 0);
    driver.submit(0, &[readable(HEADER, 15), writable(DATA, 512), writable(STATUS, 1)]);
    assert_eq!(driver.wait_used(0).1, 1);
    assert_eq!(driver.fetch(STATUS, 1), [VIRTIO_BLK_S_IOERR as u8]);
    assert!(!driver.needs_reset());
}
