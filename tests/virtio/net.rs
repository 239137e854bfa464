//! The network interface, with a pair of datagram sockets in place of a tap. They keep packets
//! apart just as a tap does.

use std::os::unix::net::UnixDatagram;

use support::virtio::driver::*;
use vellum_devices::virtio::VirtioDevice;
use vellum_devices::virtio::net::{Net, NetConfig, NetError};
use vellum_sys::tap::{Tap, TapError};
use virtio_bindings::virtio_net::*;

use super::CODEC;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

fn network() -> (Driver, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).unwrap();
    }
    (Driver::new(CODEC, Net::on(Tap::from_fd("pair", theirs.into()), MAC)), ours)
}

fn packet(len: usize) -> Vec<u8> {
    let mut packet = vec![0; 12];
    packet.extend((0..len).map(|at| (at % 253) as u8 + 1));
    packet
}

#[test]
fn the_interface_has_its_address_and_the_offloads() {
    let (driver, _wire) = network();
    assert_eq!(driver.config(0, 6), MAC);
    for bit in [VIRTIO_NET_F_MAC, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO6] {
        assert_ne!(driver.offered() & 1 << bit, 0, "feature {bit}");
    }
}

#[test]
fn packets_go_out_whole_however_they_are_cut() {
    let (mut driver, wire) = network();
    driver.start();
    let sent = packet(1400);
    driver.put(BUFFERS, &sent);
    driver.put(MIDDLE - 500, &sent);
    driver.submit(TRANSMIT, &[readable(BUFFERS, sent.len() as u32)]);
    driver
        .submit(TRANSMIT, &[readable(BUFFERS, 5), readable(MIDDLE - 495, 1000), readable(MIDDLE + 505, 407)]);
    for _ in 0..2 {
        driver.wait_used(TRANSMIT);
        let mut heard = [0; 2000];
        let len = wire.recv(&mut heard).unwrap();
        assert_eq!(&heard[..len], sent);
    }
}

#[test]
fn packets_come_in_as_buffers_allow() {
    let (mut driver, wire) = network();
    driver.start();
    // While there is no buffer, packets wait in the tap, and the event loop is idle.
    wire.send(&packet(100)).unwrap();
    wire.send(&packet(200)).unwrap();
    driver.run();
    // A buffer without room for a header is given back and does not lose a packet.
    driver.submit(RECEIVE, &[writable(BUFFERS, 11)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 0);
    driver.submit(RECEIVE, &[writable(BUFFERS, 12), writable(BUFFERS + 0x1000, 1500)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 112);
    assert_eq!(driver.fetch(BUFFERS + 0x1000, 100), packet(100)[12..]);
    driver.submit(RECEIVE, &[writable(BUFFERS, 1512)]);
    driver.submit(RECEIVE, &[writable(BUFFERS + 0x1000, 1512)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 212);
    assert_eq!(driver.used_now(RECEIVE), None);
    // Now the buffer waits for a packet.
    wire.send(&packet(300)).unwrap();
    assert_eq!(driver.wait_used(RECEIVE).1, 312);
    assert_eq!(driver.fetch(BUFFERS + 0x1000 + 12, 300), packet(300)[12..]);
}

#[test]
fn packets_of_no_sensible_length_are_dropped() {
    let (mut driver, wire) = network();
    driver.start();
    driver.submit(TRANSMIT, &[readable(BUFFERS, 11)]);
    driver.submit(TRANSMIT, &[readable(BUFFERS, 0)]);
    driver.submit(TRANSMIT, &[readable(BUFFERS, 0x20000)]);
    driver.submit(TRANSMIT, &[writable(BUFFERS, 100)]);
    for _ in 0..4 {
        assert_eq!(driver.wait_used(TRANSMIT).1, 0);
    }
    assert!(wire.recv(&mut [0; 16]).is_err(), "nothing was sent");
    assert!(!driver.needs_reset());
}

#[test]
fn a_flood_does_not_keep_the_event_loop_in_one_queue() {
    let (mut driver, wire) = network();
    driver.start();
    for round in 0..200u32 {
        wire.send(&packet(60)).unwrap();
        driver.submit(RECEIVE, &[writable(BUFFERS, 1512)]);
        driver.wait_used(RECEIVE);
        driver.put(BUFFERS, &packet(60));
        driver.submit(TRANSMIT, &[readable(BUFFERS, 72)]);
        driver.wait_used(TRANSMIT);
        assert_eq!(wire.recv(&mut [0; 100]).unwrap(), 72, "round {round}");
    }
}

#[test]
fn an_interface_keeps_its_address_and_loses_no_packet_in_a_new_process() {
    let (mut driver, wire) = network();
    driver.start();
    driver.submit(RECEIVE, &[writable(BUFFERS, 1512)]);
    driver.run();
    let (theirs, other) = UnixDatagram::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    other.set_nonblocking(true).unwrap();
    let another = Net::on(Tap::from_fd("another", theirs.into()), [2, 0, 0, 0, 0, 8]);
    let mut driver = driver.move_to(another, |driver| {
        driver.put(BUFFERS + 0x1000, &packet(60));
        driver.submit(TRANSMIT, &[readable(BUFFERS + 0x1000, 72)]);
    });
    assert_eq!(driver.config(0, 6), MAC);
    driver.wait_used(TRANSMIT);
    assert_eq!(other.recv(&mut [0; 100]).unwrap(), 72, "what was to be sent goes out of the new tap");
    assert!(wire.recv(&mut [0; 100]).is_err(), "and not of the old one");
    other.send(&packet(300)).unwrap();
    assert_eq!(driver.wait_used(RECEIVE).1, 312, "the buffer from before");
}

#[test]
fn an_interface_gets_the_address_that_its_new_process_is_asked_for() {
    let new = [2, 0, 0, 0, 0, 9];
    let (driver, _wire) = network();
    let (_other, theirs) = UnixDatagram::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let another = Net::on(Tap::from_fd("another", theirs.into()), new).named(Some(new));
    assert_eq!(driver.move_to(another, |_| ()).config(0, 6), new);
}

/// The bridge would send the other machine's packets to the fork.
#[test]
fn a_fork_announces_no_address_that_another_machine_has() {
    for (forked, named, announced) in [(true, None, false), (true, Some(MAC), true), (false, None, true)] {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut net = Net::on(Tap::from_fd("pair", theirs.into()), MAC).named(named);
        net.arrived(forked);
        let heard = ours.recv(&mut [0; 100]).is_ok();
        assert_eq!(heard, announced, "forked {forked}, with the address {named:?}");
    }
}

#[test]
fn a_tap_that_is_not_there_is_named_with_the_remedy() {
    let open = |tap: &str| {
        let config = NetConfig { tap: tap.into(), create: false, host: None, mac: None, user: None };
        let Err(NetError::Tap(error)) = Net::open(&config) else { panic!("opened `{tap}`") };
        error
    };
    let error = open("vellum-none");
    assert!(matches!(error, TapError::Missing { .. }));
    assert!(error.to_string().contains("ip tuntap add vellum-none mode tap"), "{error}");
    for name in ["", "sixteen-bytes-xx", "a/b", "a b", ".", ".."] {
        assert!(matches!(open(name), TapError::Name { .. }), "{name}");
    }
}

#[test]
fn an_interface_that_has_arrived_tells_switches_where_it_is() {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let mut net = Net::on(Tap::from_fd("pair", theirs.into()), MAC);
    net.arrived(false);
    let mut packet = [0; 100];
    assert_eq!(ours.recv(&mut packet).unwrap(), 12 + 60);
    // The guest broadcasts a RARP request (RFC 903) that contains the guest's address twice.
    assert_eq!(packet[12..18], [0xff; 6]);
    assert_eq!(packet[18..24], MAC);
    assert_eq!(packet[24..34], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    assert_eq!((&packet[34..40], &packet[44..50]), (&MAC[..], &MAC[..]));
}
