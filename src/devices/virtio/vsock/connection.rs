//! One connection: a unix stream on the host's side, ports on the guest's, and the credit between them.
//!
//! Neither side can make the other's data pile up here. From the guest at most [`BUFFER`] bytes wait for a host
//! process that does not read; from the host nothing is read before the guest has announced room for it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::packet::{HEADER, Header, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};
use crate::virtio::queue::Chain;
use vellum_kvm::memory::slices::Slices;

/// Bytes that a guest may send before the host has taken them (buf_alloc).
pub const BUFFER: u32 = 128 << 10;
/// The longest data of one packet to the guest; Linux offers buffers of 4 KiB or 64 KiB.
const MAX_DATA: usize = 64 << 10;

/// What a connection is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ports {
    /// The host's.
    pub host: u32,
    /// The guest's.
    pub guest: u32,
}

/// What the guest is to be told, one bit each, in the order of their numbers.
mod news {
    pub const REQUEST: u8 = 1;
    pub const RESPONSE: u8 = 2;
    pub const CREDIT: u8 = 4;
    pub const SHUTDOWN: u8 = 8;
    pub const RST: u8 = 16;
}

/// Whether a connection lives on after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It does.
    Lives,
    /// Both sides know that it is over.
    Over,
}

/// A connection that both sides know of, or that the guest has been asked for.
pub struct Connection {
    /// The host's end; non-blocking.
    pub stream: UnixStream,
    ports: Ports,
    established: bool,
    news: u8,
    /// The host's end may have something to read.
    readable: bool,
    /// The host's end will send no more; SHUTDOWN flags told to the guest.
    ended: u32,
    /// SHUTDOWN flags that the guest has sent.
    guest_ended: u32,
    /// From the guest, not yet taken by the host's end.
    waiting: VecDeque<u8>,
    /// Bytes that the host's end has taken in all, and what the guest was told of it last (fwd_cnt).
    forwarded: u32,
    told: u32,
    /// Bytes sent to the guest in all, and the guest's last word on them.
    sent: u32,
    guest_buffer: u32,
    guest_forwarded: u32,
    /// It is in the list of those with something for the guest.
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

    /// A host process wants to speak to the guest.
    pub fn to_guest(stream: UnixStream, ports: Ports) -> Self {
        Self::new(stream, ports, false, news::REQUEST)
    }

    /// The guest has reached a host process.
    pub fn from_guest(stream: UnixStream, ports: Ports, request: &Header) -> Self {
        let mut connection = Self::new(stream, ports, true, news::RESPONSE);
        connection.credit(request);
        connection.greet(ports.guest);
        connection
    }

    /// Whether there may be something for the guest.
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

    /// Bytes that the guest has room for. A guest that has forwarded more than it was sent has none.
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
            // Nobody will take what the guest sends.
            self.end(SHUTDOWN_RECEIVE);
            self.waiting.clear();
        }
        self.flush()
    }

    /// A packet for this connection; `data` is what follows its header.
    pub fn packet(&mut self, header: &Header, data: &mut Slices<'_>) -> Fate {
        self.credit(header);
        match header.op {
            op::RST => Fate::Over,
            // It has been told, or will be.
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

    /// Tells the host's end that it is connected, and to which port of the other side's choice.
    fn greet(&mut self, port: u32) -> Fate {
        let greeting = format!("OK {port}\n");
        match self.stream.write(greeting.as_bytes()) {
            Ok(count) if count == greeting.len() => Fate::Lives,
            _ => self.abort(),
        }
    }

    /// Data from the guest: to the host's end as far as it takes it, the rest into the buffer.
    fn take(&mut self, header: &Header, data: &mut Slices<'_>) -> Fate {
        let len = header.len as usize;
        if len > data.left() || len + self.waiting.len() > BUFFER as usize {
            // The packet lies about its length, or the guest has overdrawn its credit.
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

    /// Writes what waits; when all is out, what the guest has asked for after it happens.
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
            // A host's end that is gone already has nothing to shut.
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

    /// The guest gets an RST, and the connection is over with it; the host's end is told now. What it has been sent
    /// it can still read.
    fn abort(&mut self) -> Fate {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.news = news::RST;
        Fate::Lives
    }

    /// Makes the next packet for the guest, if there is one: its header, and its data already in `chain`.
    pub fn next_packet(&mut self, chain: &mut Chain<'_>) -> Option<(Header, Fate)> {
        // Data goes before the word that it was the last.
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

    /// Reads from the host's end into the guest's buffer; None if there is nothing now.
    fn read(&mut self, chain: &mut Chain<'_>) -> Option<u32> {
        let room = (self.guest_room() as usize).min(MAX_DATA).min(chain.writable.left());
        if room == 0 {
            // A buffer for a header alone: what there is waits for the next.
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

/// How many bytes a packet takes up in the guest's buffer.
pub fn length(header: &Header) -> u32 {
    HEADER as u32 + header.len
}
