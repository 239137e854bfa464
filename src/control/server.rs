//! The machine's side: clients on the event loop, requests into a channel.
//!
//! A client may be slow, stopped, silent or hostile: lines have an end, clients and their descriptors a number. What a client has not
//! read waits in its socket, whose size the kernel bounds. Where a quarter of that is taken, events that may be missed are left out and
//! counted, so that there is room for how its operation ends; what does not fit is never waited for. A client that does not read the
//! answers to its own requests loses its connection.

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

/// Clients at a time.
const MAX_CLIENTS: usize = 32;
const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// What the machine hears of its clients.
pub enum Heard {
    /// One asks for something.
    Asked(Asked),
    /// The one with this number has gone: nothing comes from it after this.
    Gone(u64),
}

/// A request on its way to the machine.
pub struct Asked {
    /// What to do.
    pub what: Do,
    /// As many as it takes; of what kind is still to be checked.
    pub descriptors: Vec<OwnedFd>,
    /// Who asks.
    pub by: Asker,
    reply: UnixStream,
}

impl Asked {
    /// Answers: with what `ok` holds, or with an error in words.
    pub fn answer(self, result: Result<Value, String>) {
        self.answer_with(result, &[]);
    }

    /// The same, with descriptors.
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
            // As in `send`.
            let _ = self.reply.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// One who listens for events.
struct Listening {
    stream: UnixStream,
    /// How many it was not told of since it was last told something.
    missed: u64,
}

impl Listening {
    /// Tells it, if it reads; false if it is gone.
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

/// Whether its client has read so much that three quarters of the socket are free: what makes a unix socket writable (unix(7)).
fn has_room(stream: &UnixStream) -> bool {
    let mut poll = Poll::default();
    poll.writable(stream.as_raw_fd());
    poll.wait(Some(std::time::Duration::ZERO)).unwrap_or(true)
}

/// Those who listen for events, by their clients' descriptors. Clones share them.
#[derive(Clone, Default)]
pub struct Listeners(Arc<Mutex<HashMap<RawFd, Listening>>>);

impl Listeners {
    /// Tells them all.
    pub fn tell(&self, news: &News) {
        self.lock().retain(|_, listening| listening.tell(news));
    }

    /// Nobody listens any more.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Whether nobody listens.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RawFd, Listening>> {
        self.0.lock().expect("nobody panics with it")
    }
}

/// The control socket.
pub struct Control {
    listener: Listener,
    clients: HashMap<RawFd, Client>,
    listeners: Listeners,
    heard: Sender<Heard>,
    /// Whose machine it is.
    owner: u32,
    /// How many clients there have been.
    came: u64,
}

struct Client {
    stream: UnixStream,
    /// Which it is.
    number: u64,
    pid: Option<i32>,
    input: Vec<u8>,
    /// Those that have come and that no request has taken yet.
    descriptors: Vec<OwnedFd>,
}

impl Control {
    /// Binds the socket at `path`; requests go into `heard`, which is looked at after every turn of the event loop.
    pub fn bind(path: &Path, heard: Sender<Heard>) -> Result<Self, SocketError> {
        Ok(Self::at(Listener::bind(path)?, heard))
    }

    fn at(listener: Listener, heard: Sender<Heard>) -> Self {
        let (owner, _) = identity::effective();
        let (clients, listeners) = (HashMap::new(), Listeners::default());
        Control { listener, clients, listeners, heard, owner, came: 0 }
    }

    /// The same on a socket that another process listens at yet.
    ///
    /// # Errors
    /// Where it is none.
    pub fn handed_over(socket: OwnedFd, path: &Path, heard: Sender<Heard>) -> io::Result<Self> {
        Ok(Self::at(Listener::handed_over(socket, path)?, heard))
    }

    /// Another descriptor of its socket, for a process that is to have it.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        self.listener.lend()
    }

    /// Those who listen for events.
    pub fn listeners(&self) -> Listeners {
        self.listeners.clone()
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        while let Ok(stream) = self.listener.accept() {
            let allowed = peer_uid(&stream).is_ok_and(|uid| uid == self.owner || uid == 0);
            if !allowed || self.clients.len() >= MAX_CLIENTS {
                send(
                    &stream,
                    &json!({"id": 0, "error": if allowed { "too many clients" } else { "not your machine" }}),
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
            // The receiver lives as long as the loop.
            let _ = self.heard.send(Heard::Gone(client.number));
        }
    }

    /// Takes what lines there are; false if the client is not worth keeping.
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
                    let error = format!("it takes {takes} descriptors (SCM_RIGHTS), and {came} came with it");
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
        // A message's descriptors are there before its last byte, so those of a line that is not whole yet may stay.
        if client.input.is_empty() && !client.descriptors.is_empty() {
            let error = format!("{} descriptors came that no request takes", client.descriptors.len());
            client.descriptors.clear();
            return send(&client.stream, &json!({"id": 0, "error": error}));
        }
        client.input.len() < MAX_LINE && client.descriptors.len() <= MAX_DESCRIPTORS
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        ops.add(Events::with_data(&self.listener, LISTENER, EventSet::IN)).expect("a socket can be polled");
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(ops),
            _ => self.read(events.fd(), ops),
        }
    }
}

/// Sends a line whole or hangs up: half a line would garble all that follow.
fn send(mut stream: &UnixStream, line: &Value) -> bool {
    let line = format!("{line}\n");
    let sent = matches!(stream.write(line.as_bytes()), Ok(count) if count == line.len());
    if !sent {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    sent
}
