//! The debugger's socket, on the event loop. It serves one client at a time, whose bytes wait here
//! for the next turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use gdbstub::conn::Connection;

use vellum_sys::socket::{self, Listener};

/// The maximum number of a client's bytes that wait: several of its packets.
const MAX_INBOX: usize = 64 << 10;

/// The maximum packet size in bytes, which GDB is told.
pub(super) const MAX_PACKET: usize = 4096;

/// The maximum number of bytes that one packet reads: at two digits per byte, the largest answer.
/// GDB then asks for the rest.
const MAX_READ: usize = MAX_PACKET / 2;

/// The maximum number of bytes of an answer that wait. The longest answer is one to a read. A request
/// that this file does not shorten and that asks for more ends the connection.
const MAX_ANSWER: usize = 4 * MAX_PACKET;

const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// The socket and what has arrived on it.
pub struct Wire {
    listener: Listener,
    client: Option<OwnedFd>,
    /// The output to the client, until the protocol begins.
    out: Option<Out>,
    inbox: Inbox,
    /// Nobody serves the client any longer. What it still sends is dropped, up to its end.
    hung_up: bool,
    /// The client has closed its end, or is to be dropped.
    gone: bool,
}

/// Bytes that have arrived but were not read, delivered in whole packets.
#[derive(Default)]
struct Inbox {
    bytes: VecDeque<u8>,
    /// The packet that has begun but not ended.
    packet: Vec<u8>,
    whole: VecDeque<u8>,
}

/// A packet is longer than [`MAX_PACKET`].
#[derive(Debug, PartialEq)]
pub(super) struct TooLong;

impl Inbox {
    /// The next byte that is between packets or in a complete packet.
    fn next(&mut self) -> Result<Option<u8>, TooLong> {
        while self.whole.is_empty() {
            let Some(byte) = self.bytes.pop_front() else { return Ok(None) };
            if self.packet.is_empty() && byte != b'$' {
                return Ok(Some(byte));
            }
            self.packet.push(byte);
            match self.packet[..] {
                // A checksum has two digits.
                [.., b'#', _, _] => self.whole.extend(shortened(&std::mem::take(&mut self.packet))),
                // The sign and the checksum are not part of the size that GDB counts.
                _ if self.packet.len() > MAX_PACKET + 4 => return Err(TooLong),
                _ => {}
            }
        }
        Ok(self.whole.pop_front())
    }

    /// Whether nothing is left to read.
    fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.whole.is_empty()
    }
}

/// The packet, with a read limited to [`MAX_READ`] bytes. An answer may have fewer bytes than were
/// asked for.
fn shortened(packet: &[u8]) -> Vec<u8> {
    let read = || {
        let body = std::str::from_utf8(packet.strip_prefix(b"$m")?).ok()?;
        let (body, sum) = body.split_once('#')?;
        let (at, length) = body.split_once(',')?;
        let is_long = usize::from_str_radix(length, 16).map_or(true, |length| length > MAX_READ);
        let is_right = u8::from_str_radix(sum, 16) == Ok(checksum(&packet[1..packet.len() - 3]));
        let is_number = length.bytes().all(|digit| digit.is_ascii_hexdigit());
        (is_long && is_right && is_number).then(|| format!("m{at},{MAX_READ:x}"))
    };
    match read() {
        Some(body) => format!("${body}#{:02x}", checksum(body.as_bytes())).into_bytes(),
        None => packet.to_vec(),
    }
}

fn checksum(body: &[u8]) -> u8 {
    body.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// The output to a client. It never blocks: a client that does not read its answers is
/// disconnected.
pub struct Out {
    socket: OwnedFd,
    unsent: Vec<u8>,
}

impl Out {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, unsent: Vec::new() }
    }
}

impl Connection for Out {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        if self.unsent.len() == MAX_ANSWER {
            return Err(io::Error::other(format!("an answer has more than {MAX_ANSWER} bytes")));
        }
        self.unsent.push(byte);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.unsent.len() {
            sent += socket::send_some(&self.socket, &self.unsent[sent..])?;
        }
        self.unsent.clear();
        Ok(())
    }
}

impl Wire {
    pub(super) fn new(listener: Listener) -> Self {
        Self { listener, client: None, out: None, inbox: Inbox::default(), hung_up: false, gone: false }
    }

    /// The output to a client that has just connected.
    pub(super) fn take_out(&mut self) -> Option<Out> {
        self.out.take()
    }

    pub(super) fn give_out_back(&mut self, out: Out) {
        self.out = Some(out);
    }

    /// The next byte that has arrived.
    pub(super) fn next(&mut self) -> Result<Option<u8>, TooLong> {
        self.inbox.next()
    }

    /// Whether the client is gone and everything that it sent has been read.
    pub(super) fn has_gone(&self) -> bool {
        self.gone && self.inbox.is_empty()
    }

    /// Called while no client is served: drops one that has gone, so that another may connect.
    pub(super) fn settle(&mut self) {
        if std::mem::replace(&mut self.gone, false) {
            self.out = None;
            self.inbox = Inbox::default();
        }
    }

    /// Ends the connection to the client.
    pub(super) fn hang_up(&mut self) {
        if let Some(client) = &self.client {
            // The shutdown wakes the event loop, which removes the descriptor before it is closed.
            let _ = rustix::net::shutdown(client, rustix::net::Shutdown::Both);
            self.hung_up = true;
        }
        self.inbox = Inbox::default();
        self.out = None;
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        while let Ok(stream) = self.listener.accept() {
            // The previous client's place is taken until its end has been handled.
            if self.client.is_some() || self.gone {
                tracing::warn!("{}: a second debugger is turned away", self.listener.path().display());
                continue;
            }
            let client = OwnedFd::from(stream);
            let Ok(copy) = client.try_clone() else { continue };
            if ops.add(Events::with_data(&Raw(&client), CLIENT, EventSet::IN)).is_err() {
                continue;
            }
            (self.client, self.out) = (Some(client), Some(Out::new(copy)));
            (self.hung_up, self.gone) = (false, false);
            self.inbox = Inbox::default();
        }
    }

    fn read(&mut self, ops: &mut EventOps<'_>) {
        let Some(client) = &self.client else { return };
        let mut buffer = [0; 4096];
        while self.inbox.bytes.len() < MAX_INBOX {
            match socket::receive_some(client, &mut buffer) {
                Ok(0) => break,
                Ok(_) if self.hung_up => continue,
                Ok(count) => {
                    self.inbox.bytes.extend(&buffer[..count]);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            }
        }
        if self.inbox.bytes.len() < MAX_INBOX {
            let _ = ops.remove(Events::empty(&Raw(client)));
            (self.client, self.gone) = (None, true);
        }
    }
}

/// A descriptor for the event loop.
struct Raw<'a>(&'a OwnedFd);

impl AsRawFd for Raw<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl MutEventSubscriber for Wire {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // A socket can always be watched.
        let _ = ops.add(Events::with_data(&self.listener, LISTENER, EventSet::IN));
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(ops),
            _ => self.read(ops),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads back the input `sent`, which arrives in pieces of `size` bytes.
    fn read(sent: &[u8], size: usize) -> Result<Vec<u8>, TooLong> {
        let (mut inbox, mut read) = (Inbox::default(), Vec::new());
        for piece in sent.chunks(size) {
            inbox.bytes.extend(piece);
            while let Some(byte) = inbox.next()? {
                read.push(byte);
            }
        }
        Ok(read)
    }

    #[test]
    fn a_read_is_shortened_and_everything_else_is_handed_on() {
        for size in [1, 3, 100] {
            assert_eq!(read(b"+$m0,20000000#4b\x03", size).unwrap(), b"+$m0,800#61\x03", "{size}");
            for same in
                [&b"$m0,800#25"[..], b"$m0,801#00", b"$m0,zz801#00", b"$X0,900:#00", b"$g#67$?#3f", b"-+"]
            {
                assert_eq!(read(same, size).unwrap(), same);
            }
        }
        let endless = format!("m0,{}", "f".repeat(40));
        let endless = format!("${endless}#{:02x}", checksum(endless.as_bytes()));
        assert_eq!(read(endless.as_bytes(), 7).unwrap(), b"$m0,800#61");
    }

    #[test]
    fn a_packet_without_an_end_is_too_long_and_a_long_one_is_none() {
        let mut packet = vec![b'$'];
        packet.resize(1 + MAX_PACKET, b'a');
        packet.extend(b"#00");
        assert_eq!(read(&packet, 1000).unwrap(), packet);
        packet.insert(1, b'a');
        packet.insert(1, b'a');
        assert_eq!(read(&packet, 1000), Err(TooLong));
        assert_eq!(read(&[b'$'; 10_000], 1000), Err(TooLong));
        assert_eq!(read(&[b'a'; 10_000], 1000).unwrap().len(), 10_000, "noise between packets");
    }
}
