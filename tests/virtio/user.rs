//! The network interface without a tap. The test is at the other end of passt's stream.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use support::virtio::driver::*;
use vellum_devices::virtio::net::Net;
use vellum_devices::virtio::net::user::Stream;
use virtio_bindings::virtio_net::*;

use super::CODEC;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

fn device() -> (Net, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (Net::on_stream(Stream::on(theirs.into(), false), MAC), ours)
}

fn network() -> (Driver, UnixStream) {
    let (net, ours) = device();
    (Driver::new(CODEC, net), ours)
}

fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 253) as u8 + 1).collect()
}

/// `frame` in the format of the stream.
fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

#[test]
fn a_guest_is_offered_no_offloads_and_told_of_its_link() {
    let (driver, _wire) = network();
    let offered = driver.offered();
    for bit in [
        VIRTIO_NET_F_CSUM,
        VIRTIO_NET_F_GUEST_CSUM,
        VIRTIO_NET_F_GUEST_TSO4,
        VIRTIO_NET_F_HOST_TSO4,
        VIRTIO_NET_F_MRG_RXBUF,
    ] {
        assert_eq!(offered & 1 << bit, 0, "feature {bit}");
    }
    assert_ne!(offered & 1 << VIRTIO_NET_F_STATUS, 0);
    assert_eq!(
        (driver.config(0, 6), driver.config(6, 2)),
        (MAC.to_vec(), vec![VIRTIO_NET_S_LINK_UP as u8, 0])
    );
}

#[test]
fn frames_go_out_behind_their_length_however_buffers_are_cut() {
    let (mut driver, mut wire) = network();
    driver.start();
    let packet = [vec![0; 12], frame(900)].concat();
    driver.put(BUFFERS, &packet);
    driver.submit(TRANSMIT, &[readable(BUFFERS, packet.len() as u32)]);
    driver
        .submit(TRANSMIT, &[readable(BUFFERS, 5), readable(BUFFERS + 5, 400), readable(BUFFERS + 405, 507)]);
    for _ in 0..2 {
        driver.wait_used(TRANSMIT);
        let mut heard = vec![0; 904];
        wire.read_exact(&mut heard).unwrap();
        assert_eq!(heard, framed(&frame(900)));
    }
    // A buffer that is not a frame is given back, and nothing is sent.
    for len in [0, 11, 12, 20, 0x20000] {
        driver.submit(TRANSMIT, &[readable(BUFFERS, len)]);
        driver.wait_used(TRANSMIT);
    }
    assert!(wire.read(&mut [0; 16]).is_err() && !driver.needs_reset());
}

#[test]
fn frames_come_in_whole_however_they_come() {
    let (mut driver, mut wire) = network();
    driver.start();
    driver.submit(RECEIVE, &[writable(BUFFERS, 1526)]);
    let bytes = framed(&frame(300));
    for part in [&bytes[..2], &bytes[2..4], &bytes[4..100], &bytes[100..303]] {
        wire.write_all(part).unwrap();
        driver.run();
        assert_eq!(driver.used_now(RECEIVE), None, "a part of a frame");
    }
    wire.write_all(&bytes[303..]).unwrap();
    assert_eq!(driver.wait_used(RECEIVE).1, 312);
    let header = driver.fetch(BUFFERS, 12);
    assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(driver.fetch(BUFFERS + 12, 300), frame(300));
    // A frame that is longer than the guest's buffer is lost. The next one is not.
    wire.write_all(&[framed(&frame(2000)), framed(&frame(60))].concat()).unwrap();
    driver.submit(RECEIVE, &[writable(BUFFERS, 12), writable(BUFFERS + 0x1000, 1514)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 72);
    assert_eq!(driver.fetch(BUFFERS + 0x1000, 60), frame(60));
}

#[test]
fn a_reader_that_is_slow_loses_nothing_and_holds_up_nobody() {
    let (mut driver, mut wire) = network();
    driver.start();
    let packet = [vec![0; 12], frame(1514)].concat();
    driver.put(BUFFERS, &packet);
    // More than fits into the socket.
    let mut sent = 0;
    while sent < 1000 {
        driver.submit(TRANSMIT, &[readable(BUFFERS, packet.len() as u32)]);
        driver.run();
        if driver.used_now(TRANSMIT).is_none() {
            break;
        }
        sent += 1;
    }
    assert!((1..1000).contains(&sent), "{sent} frames were taken");
    let mut heard: Vec<u8> = Vec::new();
    let mut part = vec![0; 1 << 16];
    while heard.len() < (sent + 1) * 1518 {
        match wire.read(&mut part) {
            Ok(count) => heard.extend(&part[..count]),
            Err(_) => driver.run(),
        }
    }
    assert!(heard.chunks(1518).all(|one| one == framed(&frame(1514))));
    driver.wait_used(TRANSMIT);
}

/// Tests both an end of the stream and errors that break it.
#[test]
fn an_end_of_the_stream_takes_the_link_down_and_nothing_else() {
    for broken in [None, Some([0, 0, 0, 0]), Some([0, 0, 0, 13]), Some([0xff; 4]), Some([0, 1, 0, 18])] {
        let (mut driver, mut wire) = network();
        driver.start();
        driver.submit(RECEIVE, &[writable(BUFFERS, 1526)]);
        driver.run();
        let generation = driver.device.interrupt().config_generation();
        match broken {
            None => drop(wire),
            Some(length) => wire.write_all(&[&length[..], &[0; 64]].concat()).unwrap(),
        }
        driver.wait(|driver| (driver.config(6, 2) == [0, 0]).then_some(()));
        assert_eq!(
            driver.device.interrupt().config_generation(),
            generation + 1,
            "{broken:?}: the driver is not told"
        );
        assert!(!driver.needs_reset() && driver.used_now(RECEIVE).is_none());
        // The guest continues to send. The frames are dropped.
        driver.submit(TRANSMIT, &[readable(BUFFERS, 100)]);
        driver.wait_used(TRANSMIT);
        driver.start();
        assert_eq!(driver.config(6, 2), [0, 0], "a new driver sees it too");
    }
}

#[test]
fn an_interface_that_moves_keeps_its_address_and_announces_it() {
    let (mut driver, wire) = network();
    driver.start();
    driver.submit(RECEIVE, &[writable(BUFFERS, 1526)]);
    driver.run();
    let (mut other, mut far) = device();
    vellum_devices::virtio::VirtioDevice::restore(&mut other, {
        let (net, _) = device();
        vellum_devices::virtio::VirtioDevice::save(&net)
    })
    .unwrap();
    let mut driver = driver.move_to(other, |_| ());
    drop(wire);
    assert_eq!((driver.config(0, 6), driver.config(6, 2)), (MAC.to_vec(), vec![1, 0]));
    driver.device.arrived(false);
    let mut announced = [0; 64];
    far.read_exact(&mut announced).unwrap();
    assert_eq!(
        (&announced[..4], &announced[4..10], &announced[10..16]),
        (&[0, 0, 0, 60][..], &[0xff; 6][..], &MAC[..])
    );
    far.write_all(&framed(&frame(100))).unwrap();
    assert_eq!(driver.wait_used(RECEIVE).1, 112, "the buffer from before");
}
