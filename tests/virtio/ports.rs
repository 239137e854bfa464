//! A console with a named port: the messages between driver and device about it, its data, and its
//! end.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use support::virtio::driver::*;
use vellum_devices::virtio::console::Console;

use super::CODEC;

/// The queues of a console with several ports. `TOLD` and `TELL` are the control queues.
const TOLD: usize = 2;
const TELL: usize = 3;
const RECEIVE: usize = 4;
const TRANSMIT: usize = 5;
/// The events of control messages.
const READY: u16 = 0;
const ADD: u16 = 1;
const PORT_READY: u16 = 3;
const CONSOLE: u16 = 4;
const OPEN: u16 = 6;
const NAME: u16 = 7;
/// The bit of VIRTIO_CONSOLE_F_MULTIPORT, and the address of message buffers.
const MULTIPORT: u64 = 1 << 1;
const MESSAGES: u64 = BUFFERS + 0x10000;

/// A console without input and with output to /dev/null, which has a port. Also returns the other
/// end of the port.
fn device() -> (Console, UnixStream) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
    (Console::with_port(Some(Console::new(None, null)), "a.port", &theirs).unwrap(), ours)
}

/// A device that has only the port.
fn alone() -> (Driver, UnixStream) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    (Driver::new(CODEC, Console::with_port(None, "a.port", &theirs).unwrap()), ours)
}

fn message(id: u32, event: u16, value: u16) -> Vec<u8> {
    [&id.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat()
}

fn tell(driver: &mut Driver, bytes: &[u8]) {
    driver.put(MESSAGES, bytes);
    driver.submit(TELL, &[readable(MESSAGES, bytes.len() as u32)]);
    driver.wait_used(TELL);
}

/// The next message from the device.
fn next_message(driver: &mut Driver) -> Option<Vec<u8>> {
    driver.submit(TOLD, &[writable(MESSAGES + 0x1000, 64)]);
    driver.run();
    let (_, len) = driver.used_now(TOLD)?;
    Some(driver.fetch(MESSAGES + 0x1000, len as usize))
}

/// Sets up the port until it is open.
fn open(driver: &mut Driver) {
    driver.start();
    tell(driver, &message(0, READY, 1));
    assert_eq!(next_message(driver), Some(message(1, ADD, 1)));
    tell(driver, &message(1, PORT_READY, 1));
    assert_eq!(next_message(driver), Some([message(1, NAME, 1), b"a.port".to_vec()].concat()));
    assert_eq!(next_message(driver), Some(message(1, OPEN, 1)));
    tell(driver, &message(1, OPEN, 1));
}

#[test]
fn a_console_and_a_named_port_are_told_apart() {
    let (device, _host) = device();
    let mut driver = Driver::new(CODEC, device);
    assert_eq!(driver.offered() & MULTIPORT, MULTIPORT);
    driver.start();
    assert_eq!(driver.config(4, 4), 2u32.to_le_bytes());
    tell(&mut driver, &message(0, READY, 1));
    // Messages come in the order of the ports, each once. While there is no buffer, they wait.
    assert_eq!(
        [next_message(&mut driver), next_message(&mut driver)],
        [0, 1].map(|id| Some(message(id, ADD, 1)))
    );
    tell(&mut driver, &message(1, PORT_READY, 1));
    tell(&mut driver, &message(0, PORT_READY, 1));
    let all: Vec<_> = (0..4).filter_map(|_| next_message(&mut driver)).collect();
    let named = [message(1, NAME, 1), b"a.port".to_vec()].concat();
    assert_eq!(all, [message(0, CONSOLE, 1), message(0, OPEN, 1), named, message(1, OPEN, 1)]);
    assert_eq!(next_message(&mut driver), None);
}

#[test]
fn a_driver_of_one_port_has_the_console_alone() {
    let (device, mut host) = device();
    let mut driver = Driver::new(CODEC, device);
    driver.start_with(driver.offered() & !MULTIPORT);
    host.write_all(b"for nobody").unwrap();
    for queue in [TOLD, RECEIVE] {
        driver.submit(queue, &[writable(BUFFERS, 64)]);
    }
    driver.put(MESSAGES, &message(0, READY, 1));
    driver.submit(TELL, &[readable(MESSAGES, 8)]);
    driver.submit(1, &[readable(BUFFERS, 4)]);
    driver.wait_used(1);
    assert!([TOLD, TELL, RECEIVE].into_iter().all(|queue| driver.used_now(queue).is_none()));
}

#[test]
fn bytes_go_both_ways_once_the_guest_has_the_port_open() {
    let (mut driver, mut host) = alone();
    driver.start();
    host.write_all(b"early").unwrap();
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    driver.run();
    assert_eq!(driver.used_now(RECEIVE), None, "the guest would have thrown it away");
    open(&mut driver);
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    assert_eq!((driver.wait_used(RECEIVE).1, driver.fetch(BUFFERS, 5)), (5, b"early".to_vec()));
    driver.put(BUFFERS, b"a\0\xff");
    driver.submit(TRANSMIT, &[readable(BUFFERS, 3)]);
    driver.wait_used(TRANSMIT);
    let mut heard = [0; 3];
    host.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"a\0\xff");
    // After the guest has closed the port, data stays on the host.
    tell(&mut driver, &message(1, OPEN, 0));
    host.write_all(b"late").unwrap();
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    driver.run();
    assert_eq!(driver.used_now(RECEIVE), None);
}

#[test]
fn the_end_comes_behind_all_that_was_sent() {
    let (mut driver, mut host) = alone();
    open(&mut driver);
    host.write_all(b"the last").unwrap();
    drop(host);
    assert_eq!(next_message(&mut driver), None, "not before it has been read");
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 8);
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    driver.run();
    assert!(driver.used_now(TOLD).is_some());
    assert_eq!(driver.fetch(MESSAGES + 0x1000, 8), message(1, OPEN, 0));
    // Later output is dropped and blocks nothing.
    driver.submit(TRANSMIT, &[readable(BUFFERS, 8)]);
    driver.wait_used(TRANSMIT);
}

#[test]
fn a_reader_that_has_gone_is_the_end_too() {
    let (mut driver, host) = alone();
    open(&mut driver);
    drop(host);
    driver.submit(TRANSMIT, &[readable(BUFFERS, 8)]);
    driver.wait_used(TRANSMIT);
    assert_eq!(next_message(&mut driver), Some(message(1, OPEN, 0)));
    assert_eq!(next_message(&mut driver), None, "once");
}

#[test]
fn a_reader_that_takes_its_time_holds_the_guest_up_and_loses_nothing() {
    let (mut driver, mut host) = alone();
    open(&mut driver);
    let piece: Vec<u8> = (0..0x8000u32).map(|at| (at % 251) as u8).collect();
    driver.put(BUFFERS, &piece);
    let pieces = 16;
    for _ in 0..pieces {
        driver.submit(TRANSMIT, &[readable(BUFFERS, piece.len() as u32)]);
    }
    driver.run();
    let early = std::iter::from_fn(|| driver.used_now(TRANSMIT)).count();
    assert!(early < pieces, "a socket does not hold {pieces} times 32 KiB");
    let mut heard = vec![0; piece.len()];
    host.set_nonblocking(true).unwrap();
    for _ in 0..pieces {
        let mut got = 0;
        while got < heard.len() {
            driver.run();
            match host.read(&mut heard[got..]) {
                Ok(count) => got += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(heard == piece);
    }
}

#[test]
fn messages_that_mean_nothing_change_nothing() {
    let (mut driver, _host) = alone();
    driver.start();
    for wrong in [
        message(0, READY, 0),
        message(0, PORT_READY, 1),
        message(2, PORT_READY, 1),
        message(u32::MAX, OPEN, 1),
        message(1, PORT_READY, 0),
        message(1, ADD, 1),
        message(1, NAME, u16::MAX),
        message(1, u16::MAX, 1),
        message(0, READY, 1)[..7].to_vec(),
    ] {
        tell(&mut driver, &wrong);
        assert_eq!(next_message(&mut driver), None, "{wrong:?}");
        // The buffer stays available for the next message.
        driver.start();
    }
    // Repeated messages are answered once each.
    driver.start();
    for _ in 0..1000 {
        tell(&mut driver, &message(0, READY, 1));
        tell(&mut driver, &message(1, PORT_READY, 1));
    }
    assert_eq!((0..5).filter_map(|_| next_message(&mut driver)).count(), 3);
    assert!(!driver.needs_reset());
}

#[test]
fn a_message_is_cut_to_the_buffer_that_there_is() {
    let (mut driver, _host) = alone();
    driver.start();
    tell(&mut driver, &message(1, PORT_READY, 1));
    driver.put(MESSAGES + 0x1000, &[0xee; 16]);
    driver.submit(TOLD, &[writable(MESSAGES + 0x1000, 10)]);
    assert_eq!(driver.wait_used(TOLD).1, 10);
    let expected = [&message(1, NAME, 1)[..], b"a.", &[0xee; 6]].concat();
    assert_eq!(driver.fetch(MESSAGES + 0x1000, 16), expected);
}

#[test]
fn a_port_goes_on_where_it_was_in_a_new_device() {
    let (mut driver, _host) = alone();
    driver.start();
    tell(&mut driver, &message(0, READY, 1));
    assert_eq!(next_message(&mut driver), Some(message(1, ADD, 1)));
    tell(&mut driver, &message(1, PORT_READY, 1));
    tell(&mut driver, &message(1, OPEN, 1));
    let (theirs, mut host) = UnixStream::pair().unwrap();
    let mut driver = driver.move_to(Console::with_port(None, "a.port", &theirs).unwrap(), |_| ());
    let owed: Vec<_> = (0..3).filter_map(|_| next_message(&mut driver)).collect();
    assert_eq!(owed, [[message(1, NAME, 1), b"a.port".to_vec()].concat(), message(1, OPEN, 1)]);
    host.write_all(b"on").unwrap();
    driver.submit(RECEIVE, &[writable(BUFFERS, 64)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 2);
}

#[test]
fn a_port_is_neither_missing_nor_there_by_a_saved_state() {
    let null = || std::fs::File::options().write(true).open("/dev/null").unwrap();
    let plain = || Driver::new(CODEC, Console::new(None, null()));
    let (device, _host) = device();
    let saved = |driver: &Driver| serde_json::to_value(driver.reach.save()).unwrap();
    let with_port = Driver::new(CODEC, device);
    let mut state = saved(&with_port);
    let read = |state: &serde_json::Value| serde_json::from_value(state.clone()).unwrap();
    assert!(plain().reach.restore(read(&state)).is_err());
    assert!(with_port.reach.restore(read(&state)).is_ok());
    let console = state[0]["device"]["console"].as_object_mut();
    let ports = console.and_then(|console| console.remove("ports")).expect("they are saved");
    assert!(with_port.reach.restore(read(&state)).is_err(), "without its port");
    let mut state = saved(&plain());
    state[0]["device"]["console"]["ports"] = ports;
    assert!(plain().reach.restore(read(&state)).is_err(), "with a port");
}
