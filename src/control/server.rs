//! The machine's side: clients on the event loop, requests into a channel.
//!
//! A client may be slow, stopped, silent or hostile. The length of lines and the number of clients
//! and descriptors are limited. Unread data waits in the client's socket, whose size the kernel
//! limits. When a quarter of the socket is full, events that may be missed are dropped and counted,
//! so that there is room for the end of an operation. The server never waits for a full socket. A
//! client that does not read the answers to its own requests is disconnected.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde_json::{Value, json};

use super::operation::{Asker, News};
use super::{Do, Event, MAX_LINE, Request, parse};
use vellum_sys::identity;
use vellum_sys::poll::Poll;
use vellum_sys::socket::{self, Listener, MAX_DESCRIPTORS, SocketError, peer_pid, peer_uid};

/// The most clients at a time.
const MAX_CLIENTS: usize = 32;
const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// What the machine receives from its clients.
pub enum Heard {
    /// A request.
    Asked(Asked),
    /// The client with this number disconnected. Nothing follows from it.
    Gone(u64),
}

/// A request for the machine.
pub struct Asked {
    /// The request.
    pub what: Do,
    /// As many descriptors as it needs. The receiver checks their types.
    pub descriptors: Vec<OwnedFd>,
    /// The client and its request number.
    pub by: Asker,
    reply: UnixStream,
}

impl Asked {
    /// Sends the answer: a value or an error message.
    pub fn answer(self, result: Result<Value, String>) {
        self.answer_with(result, &[]);
    }

    /// Tells the client to ask again: another process has the machine now, and listens on the same
    /// socket.
    pub fn elsewhere(self) {
        let error = "another process has this machine now: ask again";
        send(&self.reply, &json!({"id": self.by.id, "error": error, "again": true}));
    }

    /// Sends the answer with descriptors.
    pub fn answer_with(self, result: Result<Value, String>, descriptors: &[OwnedFd]) {
        let line = match result {
            Ok(ok) => json!({"id": self.by.id, "ok": ok}),
            Err(error) => json!({"id": self.by.id, "error": error}),
        };
        if descriptors.is_empty() {
            send(&self.reply, &line);
            return;
        }
        let line = format!("{line}\n");
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let sent = socket::send_with(&self.reply, line.as_bytes(), &descriptors);
        if !matches!(sent, Ok(count) if count == line.len()) {
            // A partial line would garble all that follow, as in `send`.
            let _ = self.reply.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// A connection that listens for events.
struct Listening {
    stream: UnixStream,
    /// The number of events dropped since the last one that was sent.
    missed: u64,
}

impl Listening {
    /// Sends the event if the client reads. Returns false if the client disconnected.
    fn tell(&mut self, news: &News) -> bool {
        if news.event.may_be_missed() && !has_room(&self.stream) {
            self.missed += 1;
            return true;
        }
        let missed = (self.missed > 0).then(|| News::from(Event::Missed { events: self.missed }));
        for line in missed.iter().chain([news]).map(line) {
            match (&self.stream).write(&line) {
                Ok(count) if count == line.len() => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.missed += 1;
                    return true;
                }
                _ => {
                    let _ = self.stream.shutdown(std::net::Shutdown::Both);
                    return false;
                }
            }
            self.missed = 0;
        }
        true
    }
}

fn line(what: &impl serde::Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(what).expect("plain data");
    line.push(b'\n');
    line
}

/// Whether at least three quarters of the client's socket are free. This is when a unix socket
/// polls as writable (unix(7)).
fn has_room(stream: &UnixStream) -> bool {
    let mut poll = Poll::default();
    poll.writable(stream);
    poll.wait(Some(std::time::Duration::ZERO)).unwrap_or(true)
}

/// The connections that listen for events, by descriptor. Clones share them.
#[derive(Clone, Default)]
pub struct Listeners(Arc<Mutex<HashMap<RawFd, Listening>>>);

impl Listeners {
    /// Sends the event to all.
    pub fn tell(&self, news: &News) {
        self.lock().retain(|_, listening| listening.tell(news));
    }

    /// Removes all.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Whether no one listens.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RawFd, Listening>> {
        self.0.lock().expect("no panic under this lock")
    }
}

/// The control socket.
pub struct Control {
    listener: Listener,
    clients: HashMap<RawFd, Client>,
    listeners: Listeners,
    heard: Sender<Heard>,
    /// The machine's user.
    owner: u32,
    /// The number of clients so far.
    came: u64,
}

struct Client {
    stream: UnixStream,
    /// The client's number.
    number: u64,
    pid: Option<i32>,
    input: Vec<u8>,
    /// Descriptors that no request has taken yet.
    descriptors: Vec<OwnedFd>,
}

impl Control {
    /// Binds the socket at `path`. Requests go to `heard`, which the event loop drains after every
    /// turn.
    pub fn bind(path: &Path, heard: Sender<Heard>) -> Result<Self, SocketError> {
        Ok(Self::at(Listener::bind(path)?, heard))
    }

    fn at(listener: Listener, heard: Sender<Heard>) -> Self {
        let (owner, _) = identity::effective();
        let (clients, listeners) = (HashMap::new(), Listeners::default());
        Control { listener, clients, listeners, heard, owner, came: 0 }
    }

    /// Takes over a socket on which another process still listens.
    ///
    /// # Errors
    /// Fails if it is not such a socket.
    pub fn handed_over(socket: OwnedFd, path: &Path, heard: Sender<Heard>) -> io::Result<Self> {
        Ok(Self::at(Listener::handed_over(socket, path)?, heard))
    }

    /// Another descriptor of the socket, for a process that takes over.
    ///
    /// # Errors
    /// Fails if the process is out of descriptors.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        self.listener.lend()
    }

    /// The connections that listen for events.
    pub fn listeners(&self) -> Listeners {
        self.listeners.clone()
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        while let Ok(stream) = self.listener.accept() {
            let allowed = peer_uid(&stream).is_ok_and(|uid| uid == self.owner || uid == 0);
            if !allowed || self.clients.len() >= MAX_CLIENTS {
                send(
                    &stream,
                    &json!({"id": 0, "error": if allowed { "too many clients" } else { "this machine belongs to another user" }}),
                );
                continue;
            }
            if ops.add(Events::with_data(&stream, CLIENT, EventSet::IN)).is_ok() {
                self.came += 1;
                let (number, pid) = (self.came, peer_pid(&stream).ok());
                self.clients.insert(
                    stream.as_raw_fd(),
                    Client { stream, number, pid, input: Vec::new(), descriptors: Vec::new() },
                );
            }
        }
    }

    fn read(&mut self, fd: RawFd, ops: &mut EventOps<'_>) {
        let Some(client) = self.clients.get_mut(&fd) else { return };
        let mut buffer = [0; 4096];
        let alive = match socket::receive(&client.stream, &mut buffer, &mut client.descriptors) {
            Ok(count @ 1..) => {
                client.input.extend_from_slice(&buffer[..count]);
                self.lines(fd)
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => true,
            _ => false,
        };
        if !alive && let Some(client) = self.clients.remove(&fd) {
            self.listeners.lock().remove(&fd);
            let _ = ops.remove(Events::empty(&client.stream));
            // The receiver lives as long as the event loop.
            let _ = self.heard.send(Heard::Gone(client.number));
        }
    }

    /// Handles all complete lines. Returns false if the client must be disconnected.
    fn lines(&mut self, fd: RawFd) -> bool {
        let Some(client) = self.clients.get_mut(&fd) else { return false };
        while let Some(end) = client.input.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = client.input.drain(..=end).collect();
            let Ok(reply) = client.stream.try_clone() else {
                send(&client.stream, &json!({"id": 0, "error": socket::NO_DESCRIPTOR}));
                return false;
            };
            let done = match parse(&line) {
                Err((id, error)) => send(&reply, &json!({"id": id, "error": error})),
                Ok(Request { id, what }) if what.descriptors() > client.descriptors.len() => {
                    let (takes, came) = (what.descriptors(), client.descriptors.len());
                    let error = format!("the request needs {takes} descriptors (SCM_RIGHTS), got {came}");
                    send(&reply, &json!({"id": id, "error": error}))
                }
                Ok(Request { id, what: Do::Events {} }) => {
                    let heard = send(&reply, &json!({"id": id, "ok": {}}));
                    self.listeners.lock().insert(fd, Listening { stream: reply, missed: 0 });
                    heard
                }
                Ok(Request { id, what }) => {
                    let descriptors = client.descriptors.drain(..what.descriptors()).collect();
                    let by = Asker { connection: client.number, id, pid: client.pid };
                    self.heard.send(Heard::Asked(Asked { what, descriptors, by, reply })).is_ok()
                }
            };
            if !done {
                return false;
            }
        }
        // Descriptors arrive before a message's last byte, so those of an incomplete line may stay.
        if client.input.is_empty() && !client.descriptors.is_empty() {
            let error = format!("{} descriptors belong to no request", client.descriptors.len());
            client.descriptors.clear();
            return send(&client.stream, &json!({"id": 0, "error": error}));
        }
        client.input.len() < MAX_LINE && client.descriptors.len() <= MAX_DESCRIPTORS
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        ops.add(Events::with_data(&self.listener, LISTENER, EventSet::IN)).expect("sockets support epoll");
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(ops),
            _ => self.read(events.fd(), ops),
        }
    }
}

/// Sends a whole line or hangs up. A partial line would garble all that follow.
fn send(mut stream: &UnixStream, line: &Value) -> bool {
    let line = format!("{line}\n");
    let sent = matches!(stream.write(line.as_bytes()), Ok(count) if count == line.len());
    if !sent {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    sent
}
