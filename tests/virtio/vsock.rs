//! The socket device. Real Unix sockets act as host processes, and a driver that writes packets
//! acts as the guest.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use support::virtio::driver::*;
use vellum_devices::virtio::vsock::{Vsock, VsockConfig, VsockError};

use super::CODEC;

const CID: u64 = 7;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
const HEADER: usize = 44;
/// The size of the receive buffer that the driver announces.
const GUEST_BUFFER: u32 = 10_000;

const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RST: u16 = 3;
const SHUTDOWN: u16 = 4;
const RW: u16 = 5;
const CREDIT_UPDATE: u16 = 6;
const CREDIT_REQUEST: u16 = 7;

#[derive(Debug, PartialEq)]
struct Packet {
    src_port: u32,
    dst_port: u32,
    op: u16,
    flags: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
    data: Vec<u8>,
}

struct Guest {
    driver: Driver,
    path: PathBuf,
    forwarded: u32,
}

impl Guest {
    fn new(name: &str) -> Self {
        let path = own_path(&format!("vsock-{name}"));
        let device =
            Vsock::open(&VsockConfig { path: path.clone(), cid: CID as u32, is_named: false }).unwrap();
        let mut driver = Driver::new(CODEC, device);
        driver.start();
        Guest { driver, path, forwarded: 0 }
    }

    fn raw(&self, op: u16, guest: u32, host: u32, flags: u32, len: u32) -> Vec<u8> {
        let mut raw = CID.to_le_bytes().to_vec();
        raw.extend(2u64.to_le_bytes());
        raw.extend(guest.to_le_bytes());
        raw.extend(host.to_le_bytes());
        raw.extend(len.to_le_bytes());
        raw.extend(1u16.to_le_bytes());
        raw.extend(op.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(GUEST_BUFFER.to_le_bytes());
        raw.extend(self.forwarded.to_le_bytes());
        raw
    }

    fn send_raw(&mut self, raw: &[u8]) {
        self.driver.put(BUFFERS, raw);
        self.driver.submit(TRANSMIT, &[readable(BUFFERS, raw.len() as u32)]);
        assert_eq!(self.driver.wait_used(TRANSMIT).1, 0);
    }

    fn send(&mut self, op: u16, guest: u32, host: u32, flags: u32, data: &[u8]) {
        let mut raw = self.raw(op, guest, host, flags, data.len() as u32);
        raw.extend(data);
        self.send_raw(&raw);
    }

    /// The next packet from the device, into a buffer with room for `room` bytes of data.
    fn receive_into(&mut self, room: u32) -> Packet {
        let buffer = BUFFERS + 0x40000;
        // The header is split into several pieces. A driver may do that.
        self.driver.submit(
            RECEIVE,
            &[writable(buffer, 20), writable(buffer + 20, 24), writable(buffer + 0x1000, room)],
        );
        let (_, len) = self.driver.wait_used(RECEIVE);
        assert!(len as usize >= HEADER);
        let raw = self.driver.fetch(buffer, HEADER);
        let u32_at = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().unwrap());
        assert_eq!(raw[0..8], 2u64.to_le_bytes());
        assert_eq!(raw[8..16], CID.to_le_bytes());
        assert_eq!(u32_at(24), len - HEADER as u32);
        Packet {
            src_port: u32_at(16),
            dst_port: u32_at(20),
            op: u16::from_le_bytes([raw[30], raw[31]]),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
            data: self.driver.fetch(buffer + 0x1000, len as usize - HEADER),
        }
    }

    fn receive(&mut self) -> Packet {
        self.receive_into(4096)
    }

    /// Connects a host process to the guest's port. Returns the host's end and its port.
    fn connection(&mut self, guest: u32) -> (UnixStream, u32) {
        let mut host = UnixStream::connect(&self.path).unwrap();
        host.write_all(format!("CONNECT {guest}\n").as_bytes()).unwrap();
        let request = self.receive();
        assert_eq!((request.op, request.dst_port), (REQUEST, guest));
        self.send(RESPONSE, guest, request.src_port, 0, &[]);
        let greeting = format!("OK {}\n", request.src_port);
        assert_eq!(read(&mut host, greeting.len()), greeting.as_bytes());
        (host, request.src_port)
    }
}

fn read(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn a_host_process_speaks_to_a_guest_port() {
    let mut guest = Guest::new("host");
    let (mut host, port) = guest.connection(5000);
    host.write_all(b"question").unwrap();
    let packet = guest.receive();
    assert_eq!((packet.op, packet.src_port, packet.dst_port), (RW, port, 5000));
    assert_eq!(packet.data, b"question");
    guest.send(RW, 5000, port, 0, b"answer");
    assert_eq!(read(&mut host, 6), b"answer");
}

#[test]
fn what_follows_the_greeting_at_once_is_for_the_guest() {
    let mut guest = Guest::new("eager");
    let mut host = UnixStream::connect(&guest.path).unwrap();
    host.write_all(b"CONNECT 9\nhello").unwrap();
    let request = guest.receive();
    guest.send(RESPONSE, 9, request.src_port, 0, &[]);
    assert_eq!(guest.receive().data, b"hello");
}

#[test]
fn a_port_where_nobody_listens_closes_the_host_process() {
    let mut guest = Guest::new("nobody");
    let mut host = UnixStream::connect(&guest.path).unwrap();
    host.write_all(b"CONNECT 9\n").unwrap();
    let request = guest.receive();
    guest.send(RST, 9, request.src_port, 0, &[]);
    assert!(is_closed(&mut host));
}

#[test]
fn a_guest_process_reaches_who_listens_or_hears_that_there_is_nobody() {
    let mut guest = Guest::new("guest");
    guest.send(REQUEST, 40000, 77, 0, &[]);
    assert_eq!(guest.receive().op, RST);

    let mut host = UnixStream::connect(&guest.path).unwrap();
    host.write_all(b"LISTEN 77\n").unwrap();
    guest.driver.run();
    guest.send(REQUEST, 40000, 77, 0, &[]);
    let response = guest.receive();
    assert_eq!((response.op, response.src_port, response.dst_port), (RESPONSE, 77, 40000));
    assert_eq!(read(&mut host, 9), b"OK 40000\n");
    guest.send(RW, 40000, 77, 0, b"to the host");
    assert_eq!(read(&mut host, 11), b"to the host");
    host.write_all(b"to the guest").unwrap();
    assert_eq!(guest.receive().data, b"to the guest");
    guest.send(REQUEST, 40001, 77, 0, &[]);
    assert_eq!(guest.receive().op, RST, "one connection for each that listens");
}

#[test]
fn packet_data_may_lie_in_many_buffers() {
    let mut guest = Guest::new("scattered");
    let (mut host, port) = guest.connection(1);
    let mut raw = guest.raw(RW, 1, port, 0, 9);
    raw.extend(b"in pieces");
    guest.driver.put(BUFFERS, &raw);
    let at = |from: u64, to: u64| readable(BUFFERS + from, (to - from) as u32);
    guest.driver.submit(TRANSMIT, &[at(0, 10), at(10, 46), at(46, 50), at(50, 53)]);
    guest.driver.wait_used(TRANSMIT);
    assert_eq!(read(&mut host, 9), b"in pieces");
}

#[test]
fn the_guest_gets_no_more_than_it_has_room_for() {
    let mut guest = Guest::new("credit-guest");
    let (mut host, port) = guest.connection(1);
    let sent: Vec<u8> = (0..30_000u32).map(|at| (at % 251) as u8).collect();
    host.write_all(&sent).unwrap();
    let mut got = Vec::new();
    while got.len() < GUEST_BUFFER as usize {
        got.extend(guest.receive().data);
    }
    assert_eq!(got.len(), GUEST_BUFFER as usize);
    // There is a buffer, but no credit. Nothing comes until the guest has read.
    guest.driver.submit(RECEIVE, &[writable(BUFFERS + 0x40000, 4096)]);
    guest.driver.run();
    assert_eq!(guest.driver.used_now(RECEIVE), None);
    guest.forwarded = GUEST_BUFFER;
    guest.send(CREDIT_UPDATE, 1, port, 0, &[]);
    let (_, len) = guest.driver.wait_used(RECEIVE);
    got.extend(guest.driver.fetch(BUFFERS + 0x40000 + HEADER as u64, len as usize - HEADER));
    while got.len() < 2 * GUEST_BUFFER as usize {
        got.extend(guest.receive().data);
    }
    assert!(got == sent[..got.len()]);
}

#[test]
fn a_slow_host_process_holds_the_guest_to_its_credit() {
    let mut guest = Guest::new("credit-host");
    let (mut host, port) = guest.connection(1);
    guest.send(CREDIT_REQUEST, 1, port, 0, &[]);
    let told = guest.receive();
    assert_eq!((told.op, told.fwd_cnt), (CREDIT_UPDATE, 0));
    let room = told.buf_alloc;

    // Sends as long as there is credit. The host process reads nothing.
    let chunk: Vec<u8> = (0..0x8000u32).map(|at| (at % 241) as u8).collect();
    let (mut sent, mut forwarded) = (0u32, 0u32);
    loop {
        while sent - forwarded + chunk.len() as u32 <= room {
            guest.send(RW, 1, port, 0, &chunk);
            sent += chunk.len() as u32;
        }
        guest.send(CREDIT_REQUEST, 1, port, 0, &[]);
        let update = guest.receive();
        assert_eq!(update.op, CREDIT_UPDATE);
        if update.fwd_cnt == forwarded {
            break;
        }
        forwarded = update.fwd_cnt;
    }
    assert!(sent >= room, "credit for {room} bytes, {sent} sent");
    // The host reads. All data comes in order, and the guest gets its new credit without a request.
    for _ in 0..sent / chunk.len() as u32 {
        let mut got = vec![0; chunk.len()];
        let mut have = 0;
        while have < got.len() {
            have += host.read(&mut got[have..]).unwrap();
            guest.driver.run();
        }
        assert!(got == chunk);
    }
    let update = guest.receive();
    assert_eq!((update.op, update.fwd_cnt), (CREDIT_UPDATE, sent));
}

#[test]
fn a_guest_that_overdraws_its_credit_loses_the_connection() {
    let mut guest = Guest::new("overdraw");
    let (mut host, port) = guest.connection(1);
    let chunk = vec![1; 0x10000];
    // Much more than a socket and the device's buffer hold.
    for _ in 0..64 {
        guest.send(RW, 1, port, 0, &chunk);
    }
    assert_eq!(guest.receive().op, RST);
    let mut taken = Vec::new();
    host.read_to_end(&mut taken).unwrap();
    assert!(taken.len() < 64 * chunk.len());
    guest.send(RW, 1, port, 0, b"again");
    assert_eq!(guest.receive().op, RST, "there is no such connection any more");
}

#[test]
fn each_side_can_end_its_half() {
    let mut guest = Guest::new("half");
    let (mut host, port) = guest.connection(1);
    host.write_all(b"last words").unwrap();
    host.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.receive().data, b"last words");
    let end = guest.receive();
    assert_eq!((end.op, end.flags), (SHUTDOWN, 2));
    guest.send(RW, 1, port, 0, b"not mine");
    assert_eq!(read(&mut host, 8), b"not mine");
    guest.send(SHUTDOWN, 1, port, 3, &[]);
    assert_eq!(guest.receive().op, RST);
    assert!(is_closed(&mut host));
}

#[test]
fn a_host_process_that_goes_away_is_gone_for_the_guest() {
    let mut guest = Guest::new("gone");
    let (host, port) = guest.connection(1);
    drop(host);
    let mut flags = 0;
    while flags != 3 {
        let packet = guest.receive();
        assert_eq!(packet.op, SHUTDOWN);
        flags |= packet.flags;
    }
    guest.send(RST, 1, port, 0, &[]);
    guest.send(RW, 1, port, 0, b"?");
    assert_eq!(guest.receive().op, RST);
}

#[test]
fn nonsense_is_answered_with_a_reset_and_no_more() {
    let mut guest = Guest::new("nonsense");
    let (mut host, port) = guest.connection(1);
    let edit = |mut raw: Vec<u8>, at: usize, byte: u8| {
        raw[at] = byte;
        raw
    };
    let good = guest.raw(RW, 1, port, 0, 0);
    // Packets from another guest, to another host, and of another type.
    for raw in [edit(good.clone(), 0, 9), edit(good.clone(), 8, 9), edit(good.clone(), 28, 2)] {
        guest.send_raw(&raw);
        guest.driver.submit(RECEIVE, &[writable(BUFFERS + 0x40000, 100)]);
        guest.driver.wait_used(RECEIVE);
        assert_eq!(guest.driver.fetch(BUFFERS + 0x40000 + 30, 2), RST.to_le_bytes());
    }
    // Half a header, and an RST for a connection that does not exist.
    guest.send_raw(&good[..43]);
    guest.send(RST, 55, 66, 0, &[]);
    guest.send(RW, 1, port, 0, b"still here");
    assert_eq!(read(&mut host, 10), b"still here");
    // A length beyond the buffers but within the credit, and a length beyond both.
    for len in [100, 0xffff_ffff] {
        let (mut host, port) = guest.connection(2);
        let raw = guest.raw(RW, 2, port, 0, len);
        guest.send_raw(&raw);
        assert_eq!(guest.receive().op, RST);
        assert!(is_closed(&mut host));
    }
    assert!(!guest.driver.needs_reset());
}

#[test]
fn greetings_that_are_none_close_the_connection() {
    let mut guest = Guest::new("greeting");
    for greeting in
        ["HELLO\n", "CONNECT \n", "CONNECT -1\n", "CONNECT 4294967296\n", "CONNECT 1 \n", &"x".repeat(100)]
    {
        let mut host = UnixStream::connect(&guest.path).unwrap();
        host.write_all(greeting.as_bytes()).unwrap();
        guest.driver.run();
        assert!(is_closed(&mut host), "{greeting:?}");
    }
}

#[test]
fn connections_are_limited_and_come_free_again() {
    let mut guest = Guest::new("limit");
    let mut hosts = Vec::new();
    for _ in 0..300 {
        hosts.push(UnixStream::connect(&guest.path).unwrap());
        guest.driver.run();
    }
    let open = hosts.iter_mut().filter_map(|host| (!is_closed(host)).then_some(())).count();
    assert_eq!(open, 256);
    drop(hosts);
    guest.driver.run();
    guest.connection(1);
}

#[test]
fn a_reset_ends_all_connections() {
    let mut guest = Guest::new("reset");
    let (mut host, port) = guest.connection(1);
    guest.driver.start();
    assert!(is_closed(&mut host));
    guest.send(RW, 1, port, 0, b"old");
    assert_eq!(guest.receive().op, RST);
    guest.connection(2);
}

#[test]
fn a_restored_guest_hears_that_its_connections_are_gone() {
    let mut guest = Guest::new("restored");
    let (_lost, port) = guest.connection(1);
    guest.driver.submit(EVENT, &[writable(BUFFERS + 0x30000, 4)]);
    guest.driver.put(BUFFERS + 0x30000, &[0xff; 4]);
    guest.driver.run();
    assert_eq!(guest.driver.used_now(EVENT), None);
    let Guest { driver, path, .. } = guest;
    let config = VsockConfig { path: path.with_extension("new"), cid: CID as u32 + 1, is_named: false };
    let mut driver = driver.move_to(Vsock::open(&config).unwrap(), |_| ());
    assert_eq!(driver.config(0, 8), CID.to_le_bytes(), "it keeps its address");
    assert_eq!(driver.wait_used(EVENT).1, 4);
    assert_eq!(driver.fetch(BUFFERS + 0x30000, 4), [0; 4], "VIRTIO_VSOCK_EVENT_TRANSPORT_RESET");
    // The guest would drop a new connection with the old ones until the driver has handled the
    // event. So a request waits for that.
    let mut host = UnixStream::connect(&config.path).unwrap();
    host.write_all(b"CONNECT 7\n").unwrap();
    driver.submit(RECEIVE, &[writable(BUFFERS + 0x40000, 100)]);
    driver.run();
    assert_eq!(driver.used_now(RECEIVE), None);
    driver.submit(EVENT, &[writable(BUFFERS + 0x30000, 4)]);
    assert_eq!(driver.wait_used(RECEIVE).1, 44);
    assert_eq!(driver.fetch(BUFFERS + 0x40000 + 30, 2), REQUEST.to_le_bytes());
    // The guest still has the socket of the lost connection. It would answer a request with the
    // same ports with a reset.
    assert_ne!(driver.fetch(BUFFERS + 0x40000 + 16, 4), port.to_le_bytes());
}

#[test]
fn a_restored_guest_gets_the_address_that_is_asked_for() {
    let Guest { driver, path, .. } = Guest::new("renamed");
    let config = VsockConfig { path: path.with_extension("new"), cid: CID as u32 + 1, is_named: true };
    let driver = driver.move_to(Vsock::open(&config).unwrap(), |_| ());
    assert_eq!(driver.config(0, 8), (CID + 1).to_le_bytes());
}

#[test]
fn the_socket_is_private_replaces_a_stale_one_and_refuses_a_live_one() {
    let guest = Guest::new("socket");
    let path = guest.path.clone();
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let open = || Vsock::open(&VsockConfig { path: path.clone(), cid: 3, is_named: false }).map(|_| ());
    let Err(VsockError::Socket(error)) = open() else { panic!("in use") };
    assert!(error.to_string().contains("in use"), "{error}");
    drop(guest);
    assert!(!path.exists(), "nothing is left behind");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    open().unwrap();
    std::fs::write(&path, "precious").unwrap();
    assert!(open().is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    for cid in [0, 1, 2, u32::MAX] {
        assert!(matches!(
            Vsock::open(&VsockConfig { path: path.clone(), cid, is_named: false }),
            Err(VsockError::Cid(_))
        ));
    }
}
