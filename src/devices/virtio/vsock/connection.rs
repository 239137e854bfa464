//! A connection: a unix stream on the host's side, ports on the guest's side, and the credit
//! between them.
//!
//! Neither side can make the other's data pile up here. At most [`BUFFER`] bytes from the guest
//! wait for a host process that does not read. Data from the host is not read before the guest has
//! announced room for it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::packet::{HEADER, Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use crate::virtio::queue::Chain;
use vellum_kvm::memory::slices::Slices;

/// Bytes that a guest may send before the host has taken them (buf_alloc).
pub const BUFFER: u32 = 128 << 10;
/// The maximum data of one packet to the guest. Linux offers buffers of 4 KiB or 64 KiB.
const MAX_DATA: usize = 64 << 10;

/// The ports that identify a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ports {
    /// The host's port.
    pub host: u32,
    /// The guest's port.
    pub guest: u32,
}

/// Packets owed to the guest, one bit each, sent in the order of their bits.
mod news {
    pub const REQUEST: u8 = 1;
    pub const RESPONSE: u8 = 2;
    pub const CREDIT: u8 = 4;
    pub const SHUTDOWN: u8 = 8;
    pub const RST: u8 = 16;
}

/// Whether a connection continues after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It continues.
    Lives,
    /// Both sides know that it has ended.
    Over,
}

/// A connection that both sides know, or that was requested from the guest.
pub struct Connection {
    /// The host's end; non-blocking.
    pub stream: UnixStream,
    ports: Ports,
    established: bool,
    news: u8,
    /// The host's end may have something to read.
    readable: bool,
    /// SHUTDOWN flags for the guest, told or still owed.
    ended: u32,
    /// SHUTDOWN flags that the guest has sent.
    guest_ended: u32,
    /// Data from the guest that the host's end has not taken yet.
    waiting: VecDeque<u8>,
    /// Total bytes that the host's end has taken, and the count that the guest was last told
    /// (fwd_cnt).
    forwarded: u32,
    told: u32,
    /// Total bytes sent to the guest, and the guest's last credit values.
    sent: u32,
    guest_buffer: u32,
    guest_forwarded: u32,
    /// It is in the list of connections with packets for the guest.
    pub listed: bool,
}

impl Connection {
    fn new(stream: UnixStream, ports: Ports, established: bool, news: u8) -> Self {
        Connection {
            stream,
            ports,
            established,
            news,
            readable: true,
            ended: 0,
            guest_ended: 0,
            waiting: VecDeque::new(),
            forwarded: 0,
            told: 0,
            sent: 0,
            guest_buffer: 0,
            guest_forwarded: 0,
            listed: false,
        }
    }

    /// A connection from a host process to the guest.
    pub fn to_guest(stream: UnixStream, ports: Ports) -> Self {
        Self::new(stream, ports, false, news::REQUEST)
    }

    /// A connection from the guest to a host process.
    pub fn from_guest(stream: UnixStream, ports: Ports, request: &Header) -> Self {
        let mut connection = Self::new(stream, ports, true, news::RESPONSE);
        connection.credit(request);
        connection.greet(ports.guest);
        connection
    }

    /// Whether there may be a packet for the guest.
    pub fn has_news(&self) -> bool {
        self.news != 0 || self.can_read()
    }

    fn can_read(&self) -> bool {
        self.established
            && self.readable
            && self.ended & SHUTDOWN_SEND == 0
            && self.guest_ended & SHUTDOWN_RECEIVE == 0
            && self.guest_room() > 0
            && self.news & news::RST == 0
    }

    /// Bytes that the guest has room for. Inconsistent counts from the guest give no room.
    fn guest_room(&self) -> u32 {
        self.guest_buffer.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    fn credit(&mut self, header: &Header) {
        (self.guest_buffer, self.guest_forwarded) = (header.buf_alloc, header.fwd_cnt);
    }

    /// The host's end has something to read, room to write, or is gone.
    pub fn host_ready(&mut self, hung_up: bool) -> Fate {
        self.readable = true;
        if self.news & news::RST != 0 {
            return Fate::Lives;
        }
        if hung_up && !self.established {
            return self.abort();
        }
        if hung_up && self.guest_ended & SHUTDOWN_SEND == 0 {
            // The guest's data has no receiver any more.
            self.end(SHUTDOWN_RECEIVE);
            self.waiting.clear();
        }
        self.flush()
    }

    /// Handles a packet of this connection. `data` follows its header.
    pub fn packet(&mut self, header: &Header, data: &mut Slices<'_>) -> Fate {
        self.credit(header);
        match header.op {
            op::RST => Fate::Over,
            // An RST has been sent or is owed.
            _ if self.news & news::RST != 0 => Fate::Lives,
            op::RESPONSE if !self.established => {
                self.established = true;
                self.greet(self.ports.host)
            }
            op::RW if self.established && self.guest_ended & SHUTDOWN_SEND == 0 => self.take(header, data),
            op::SHUTDOWN => {
                self.guest_ended |= header.flags & SHUTDOWN_BOTH;
                self.flush()
            }
            op::CREDIT_REQUEST => {
                self.news |= news::CREDIT;
                Fate::Lives
            }
            op::CREDIT_UPDATE => Fate::Lives,
            _ => self.abort(),
        }
    }

    /// Tells the host's end that it is connected, and the port that the other side chose.
    fn greet(&mut self, port: u32) -> Fate {
        let greeting = format!("OK {port}\n");
        match self.stream.write(greeting.as_bytes()) {
            Ok(count) if count == greeting.len() => Fate::Lives,
            _ => self.abort(),
        }
    }

    /// Handles data from the guest: the host's end takes what it can, the buffer the rest.
    fn take(&mut self, header: &Header, data: &mut Slices<'_>) -> Fate {
        let len = header.len as usize;
        if len > data.left() || len + self.waiting.len() > BUFFER as usize {
            // The packet's length is wrong, or the guest has exceeded its credit.
            return self.abort();
        }
        if self.ended & SHUTDOWN_RECEIVE != 0 {
            return Fate::Lives;
        }
        let mut left = len;
        while left > 0 && self.waiting.is_empty() {
            match data.writev(&self.stream, left) {
                Ok(count @ 1..) => {
                    left -= count;
                    self.forward(count);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                _ => {
                    self.end(SHUTDOWN_RECEIVE);
                    return Fate::Lives;
                }
            }
        }
        let old = self.waiting.len();
        self.waiting.resize(old + left, 0);
        data.read(&mut self.waiting.make_contiguous()[old..]);
        Fate::Lives
    }

    /// Writes waiting data. When all is written, carries out the guest's shutdown.
    fn flush(&mut self) -> Fate {
        while !self.waiting.is_empty() {
            match self.stream.write(self.waiting.as_slices().0) {
                Ok(count @ 1..) => {
                    self.waiting.drain(..count);
                    self.forward(count);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Fate::Lives,
                _ => {
                    self.end(SHUTDOWN_RECEIVE);
                    self.waiting.clear();
                }
            }
        }
        if self.guest_ended == SHUTDOWN_BOTH {
            return self.abort();
        }
        if self.guest_ended & SHUTDOWN_SEND != 0 {
            // If the host's end is already gone, there is nothing to shut down.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        Fate::Lives
    }

    fn forward(&mut self, count: usize) {
        self.forwarded = self.forwarded.wrapping_add(count as u32);
        if self.forwarded.wrapping_sub(self.told) >= BUFFER / 2 {
            self.news |= news::CREDIT;
        }
    }

    fn end(&mut self, flags: u32) {
        if self.ended | flags != self.ended {
            self.ended |= flags;
            self.news |= news::SHUTDOWN;
        }
    }

    /// Ends the connection: the guest gets an RST, and the host's end is shut down now. The host's
    /// end can still read data sent before.
    fn abort(&mut self) -> Fate {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.news = news::RST;
        Fate::Lives
    }

    /// Makes the next packet for the guest, if any. Returns its header; its data is already in
    /// `chain`.
    pub fn next_packet(&mut self, chain: &mut Chain<'_>) -> Option<(Header, Fate)> {
        // Send data before the SHUTDOWN that ends it.
        if self.news & !news::SHUTDOWN == 0 && self.can_read() {
            if let Some(len) = self.read(chain) {
                return Some((self.header(op::RW, 0, len), Fate::Lives));
            }
            if self.can_read() {
                return None;
            }
        }
        let first = self.news & self.news.wrapping_neg();
        self.news &= !first;
        let lives = |header| Some((header, Fate::Lives));
        match first {
            news::REQUEST => lives(self.header(op::REQUEST, 0, 0)),
            news::RESPONSE => lives(self.header(op::RESPONSE, 0, 0)),
            news::CREDIT => lives(self.header(op::CREDIT_UPDATE, 0, 0)),
            news::SHUTDOWN => lives(self.header(op::SHUTDOWN, self.ended, 0)),
            news::RST => Some((self.header(op::RST, 0, 0), Fate::Over)),
            _ => None,
        }
    }

    /// Reads from the host's end into the guest's buffer. None if there is nothing now.
    fn read(&mut self, chain: &mut Chain<'_>) -> Option<u32> {
        let room = (self.guest_room() as usize).min(MAX_DATA).min(chain.writable.left());
        if room == 0 {
            // The buffer has room only for a header: the data waits for the next one.
            return None;
        }
        match chain.writable.readv(&self.stream, room) {
            Ok(count @ 1..) => {
                self.sent = self.sent.wrapping_add(count as u32);
                return Some(count as u32);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return self.read(chain),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Ok(_) => self.end(SHUTDOWN_SEND),
            Err(_) => self.end(SHUTDOWN_BOTH),
        }
        None
    }

    fn header(&mut self, op: u16, flags: u32, len: u32) -> Header {
        self.told = self.forwarded;
        let Ports { host, guest } = self.ports;
        let (buf_alloc, fwd_cnt) = (BUFFER, self.forwarded);
        Header { src_port: host, dst_port: guest, len, op, flags, buf_alloc, fwd_cnt, ..Header::default() }
    }
}

/// How many bytes of the guest's buffer a packet takes.
pub fn length(header: &Header) -> u32 {
    HEADER as u32 + header.len
}
