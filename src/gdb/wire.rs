//! The socket at which a debugger connects, on the event loop: one client at a time, whose bytes wait here for the next turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use gdbstub::conn::Connection;

use crate::sys::socket::{self, Listener};

/// What of a client's waits at most, in bytes: several of its packets.
const MOST: usize = 64 << 10;

const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// The socket, and what has come.
pub struct Wire {
    listener: Listener,
    client: Option<OwnedFd>,
    /// The client's way out, until the protocol begins.
    out: Option<Out>,
    inbox: VecDeque<u8>,
    /// The client has closed its end, or is to be forgotten.
    gone: bool,
}

/// The way to a client. It is never waited for: one that does not read what it has asked for is let go.
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
        Self { listener, client: None, out: None, inbox: VecDeque::new(), gone: false }
    }

    /// The way to a client that has just come.
    pub(super) fn take_out(&mut self) -> Option<Out> {
        self.out.take()
    }

    pub(super) fn give_out_back(&mut self, out: Out) {
        self.out = Some(out);
    }

    /// The next byte that has come.
    pub(super) fn next(&mut self) -> Option<u8> {
        self.inbox.pop_front()
    }

    /// Whether the client is gone and all that it sent has been read.
    pub(super) fn has_gone(&self) -> bool {
        self.gone && self.inbox.is_empty()
    }

    /// Nobody speaks with a client now: one that has gone is forgotten, and another may come.
    pub(super) fn settle(&mut self) {
        if std::mem::replace(&mut self.gone, false) {
            self.out = None;
            self.inbox.clear();
        }
    }

    /// Has nothing to do with the client any more.
    pub(super) fn hang_up(&mut self) {
        if let Some(client) = &self.client {
            // The event loop hears of it, and forgets the descriptor before it is closed.
            socket::shut(client, std::net::Shutdown::Both);
        }
        self.inbox.clear();
        self.out = None;
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        while let Ok(stream) = self.listener.accept() {
            // Until it has been heard that the one before has gone, its place is taken.
            if self.client.is_some() || self.gone {
                tracing::warn!("{}: a second debugger is turned away", self.listener.path().display());
                continue;
            }
            let client = OwnedFd::from(stream);
            let Ok(copy) = client.try_clone() else { continue };
            if ops.add(Events::with_data(&Raw(&client), CLIENT, EventSet::IN)).is_err() {
                continue;
            }
            (self.client, self.out, self.gone) = (Some(client), Some(Out::new(copy)), false);
            self.inbox.clear();
        }
    }

    fn read(&mut self, ops: &mut EventOps<'_>) {
        let Some(client) = &self.client else { return };
        let mut buffer = [0; 4096];
        while self.inbox.len() < MOST {
            match socket::receive_some(client, &mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    self.inbox.extend(&buffer[..count]);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            }
        }
        if self.inbox.len() < MOST {
            let _ = ops.remove(Events::empty(&Raw(client)));
            (self.client, self.gone) = (None, true);
        }
    }
}

/// What the event loop wants of a descriptor.
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
