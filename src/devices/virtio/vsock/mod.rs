//! Sockets between host and guest (virtio 1.2, section 5.10), on unix sockets of the host.
//!
//! A host process connects to the device's socket and sends `CONNECT PORT\n`. It receives `OK
//! HOST_PORT\n` if a guest process listens there; otherwise the socket closes. A host process that
//! sends `LISTEN PORT\n` receives `OK GUEST_PORT\n` when a guest process has connected to the
//! host's PORT. Each LISTEN takes one connection, because the running VMM opens no sockets itself.
//! Connections do not move with a machine: after a restore the guest is told that all are gone.
//!
//! This module has the device and its packets. A connection's own state is in [`connection`].

mod connection;
mod packet;

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::handoff::{self, Unfit};
use super::queue::{Chain, Served};
use super::{
    Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice, read_space,
};
use connection::{Connection, Fate, Ports};
use packet::{HEADER, HOST_CID, Header, STREAM, op};
use vellum_kvm::memory::slices::Slices;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::keyvalue::{self, KeyValues, number, path};
use vellum_sys::random;
use vellum_sys::socket::{Listener, SocketError};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const EVENT: u16 = 2;
/// Event data of the listening socket, and of all streams. Streams are told apart by their
/// descriptors.
const LISTENER: u32 = 0;
const STREAMS: u32 = 1;

/// The maximum number of connections, including those that have not sent CONNECT yet.
const MAX_CONNECTIONS: usize = 256;
/// The maximum number of RSTs that wait for a buffer. A guest that sends nonsense and takes no
/// answers loses the rest.
const MAX_RESETS: usize = 256;
/// The longest greeting: `CONNECT 4294967295\n`.
const MAX_GREETING: usize = 19;
/// The first host port that is assigned, above ports with a known meaning.
const FIRST_HOST_PORT: u32 = 1 << 30;
/// VMADDR_PORT_ANY (include/uapi/linux/vm_sockets.h), which is not a port.
const ANY_PORT: u32 = u32::MAX;

/// The socket device as a kind of device.
pub static KIND: Kind = Kind {
    key: "vsock",
    about: "Sockets between host and guest, through a unix socket: PATH[,cid=N]",
    value: Some("PATH"),
    repeats: false,
    parse: |text| match parse(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<VsockConfig>(written)?)),
};

/// The configuration of a socket device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// The unix socket.
    pub path: PathBuf,
    /// The guest's address, 3 or more.
    pub cid: u32,
    /// Whether the user named the address. Then a restored guest gets it, too.
    #[serde(skip)]
    pub is_named: bool,
}

/// Why there is no vsock.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The unix socket cannot be used.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The address is reserved.
    #[error("a guest's vsock address (cid) is 3 to 4294967294, not {0}")]
    Cid(u32),
}

impl Diagnose for VsockError {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::Device(KIND.key))
    }
}

impl DeviceConfig for VsockConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        handoff::make_absolute([&mut written.path])?;
        handoff::write(&written)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let socket = lent.into_iter().next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        let listener =
            Listener::handed_over(socket, &self.path).map_err(|error| Unfit::boxed(&KIND, error))?;
        Ok(Box::new(Vsock { waits: true, ..Vsock::on(self, listener) }))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        match Vsock::open(self) {
            Ok(vsock) => Ok(Box::new(vsock)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

/// A random first host port for this process. After a move, the guest keeps the sockets of its lost
/// connections until their owners close them. Linux answers a request with the ports of such a
/// socket with a reset. So two processes that host the same guest must not count from the same
/// number.
fn first_port() -> u32 {
    let mut drawn = [0; 4];
    // Without randomness the ports still work. They only are more likely to be those of a lost
    // connection.
    let _ = random::fill(&mut drawn);
    FIRST_HOST_PORT + u32::from_le_bytes(drawn) % (ANY_PORT - FIRST_HOST_PORT)
}

/// `PATH[,cid=N]`.
fn parse(text: &str) -> Result<VsockConfig, keyvalue::Error> {
    let kv = KeyValues::parse(text, Some("path"), &["path", "cid"])?;
    let cid = kv.with("cid", |text| number(text, 3..=u32::MAX - 1))?;
    let path = |text: &str| match text.parse::<u32>() {
        Ok(cid) => Err(format!(
            "the path of a unix socket is expected; the guest's number is cid, as in PATH,cid={cid}"
        )),
        Err(_) => path(text).map_err(|error| error.to_string()),
    };
    let path = kv.required("path", path)?;
    Ok(VsockConfig { path, cid: cid.unwrap_or(3), is_named: cid.is_some() })
}

/// The unix socket that leads to the guest. It is the device's handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPath(pub PathBuf);

/// The device.
pub struct Vsock {
    path: Arc<SocketPath>,
    hub: Hub,
    /// The address that a restored guest gets instead of its own.
    named: Option<u64>,
    moved: Moved,
    active: Option<Active>,
    /// The machine still runs in another process, which accepts connections.
    waits: bool,
}

/// What the guest knows of its move to another process, which dropped all its connections. When the
/// driver handles the event, it drops all connections, even those made since. So no new connection
/// starts before the driver has handled the event and returned its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    /// It has not moved, or knows that it has.
    No,
    /// It must be told.
    Untold,
    /// The event is in its ring. The number is that of the buffers it had made available by then.
    Notice(u16),
}

/// All connections.
struct Hub {
    listener: Listener,
    cid: u64,
    connections: HashMap<Ports, Connection>,
    by_fd: HashMap<RawFd, Ports>,
    /// Clients that have connected and not sent a greeting yet.
    newcomers: HashMap<RawFd, Newcomer>,
    /// Clients that wait for the guest to connect to a port, in order of arrival.
    listeners: Vec<(u32, UnixStream)>,
    /// Connections that may have packets for the guest, each at most once.
    ready: VecDeque<Ports>,
    resets: VecDeque<Header>,
    /// Streams to remove from the event loop and close.
    dead: Vec<UnixStream>,
    next_port: u32,
}

struct Newcomer {
    stream: UnixStream,
    greeting: Vec<u8>,
}

/// The saved state of a vsock device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    cid: u64,
}

impl Vsock {
    /// Binds the socket. It is unlinked when the device is dropped.
    pub fn open(config: &VsockConfig) -> Result<Self, VsockError> {
        if config.cid <= HOST_CID as u32 || config.cid == u32::MAX {
            return Err(VsockError::Cid(config.cid));
        }
        let named = config.is_named.then_some(config.cid.into());
        Ok(Self { named, ..Self::on(config, Listener::bind(&config.path)?) })
    }

    fn on(config: &VsockConfig, listener: Listener) -> Self {
        let hub = Hub {
            listener,
            cid: config.cid.into(),
            connections: HashMap::new(),
            by_fd: HashMap::new(),
            newcomers: HashMap::new(),
            listeners: Vec::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            dead: Vec::new(),
            next_port: first_port(),
        };
        let path = Arc::new(SocketPath(config.path.clone()));
        Vsock { path, hub, named: None, moved: Moved::No, active: None, waits: false }
    }

    fn take_packets(&mut self) {
        let Some(active) = &mut self.active else { return };
        active.serve(TRANSMIT, |chain| {
            self.hub.packet(&mut chain.readable);
            Served::Done(0)
        });
    }

    fn give_packets(&mut self) {
        if !self.knows_of_move() {
            return;
        }
        let Some(active) = &mut self.active else { return };
        let mut head = Slices::default();
        active.serve(RECEIVE, |chain| {
            if chain.writable.left() < HEADER {
                return Served::Done(0);
            }
            chain.writable.split_front(HEADER, &mut head);
            let Some(header) = self.hub.next_packet(chain) else { return Served::Later };
            head.write(&header.bytes());
            Served::Done(connection::length(&header))
        });
    }
}

impl Vsock {
    /// Tells the guest of a move, if there was one. Returns whether the guest has handled that.
    fn knows_of_move(&mut self) -> bool {
        let Some(Active { memory, queues, .. }) = &mut self.active else { return false };
        if self.moved == Moved::No {
            return true;
        }
        // A driver without the event queue cannot be told.
        let Some(queue) = queues.iter_mut().find(|queue| queue.index() == EVENT) else { return true };
        if self.moved == Moved::Untold {
            let (mut chain, offered) = (Chain::default(), queue.offered(memory));
            // VIRTIO_VSOCK_EVENT_TRANSPORT_RESET
            let event = |chain: &mut Chain<'_>| Some(chain.writable.write(&0u32.to_le_bytes()) as u32);
            if queue.serve_one(memory, &mut chain, event) {
                self.moved = offered.map_or(Moved::No, Moved::Notice);
            }
        }
        // Request notifications before looking, so that later buffers are not missed.
        match self.moved {
            Moved::Notice(then) if queue.listen_beyond(memory, then) => self.moved = Moved::No,
            Moved::Untold => drop(queue.listen(memory)),
            _ => {}
        }
        self.moved == Moved::No
    }
}

impl Hub {
    /// Handles a packet from the guest.
    fn packet(&mut self, data: &mut Slices<'_>) {
        let Some(raw) = data.read_array() else { return };
        let header = Header::parse(&raw);
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        if header.src_cid != self.cid || header.dst_cid != HOST_CID || header.kind != STREAM {
            return self.refuse(&header);
        }
        if let Some(connection) = self.connections.get_mut(&ports) {
            let fate = connection.packet(&header, data);
            self.settle(ports, fate);
        } else if header.op == op::REQUEST {
            self.reach_host(ports, &header);
        } else {
            self.refuse(&header);
        }
    }

    /// Answers with an RST, except to an RST.
    fn refuse(&mut self, to: &Header) {
        if to.op != op::RST && self.resets.len() < MAX_RESETS {
            self.resets.push_back(Header {
                src_cid: to.dst_cid,
                dst_cid: to.src_cid,
                src_port: to.dst_port,
                dst_port: to.src_port,
                kind: to.kind,
                op: op::RST,
                ..Header::default()
            });
        }
    }

    /// The guest connects to a host port: the first client that waits for it gets the connection.
    fn reach_host(&mut self, ports: Ports, request: &Header) {
        match self.listeners.iter().position(|&(port, _)| port == ports.host) {
            Some(at) => {
                let (_, stream) = self.listeners.remove(at);
                self.insert(ports, Connection::from_guest(stream, ports, request));
            }
            None => self.refuse(request),
        }
    }

    fn has_room(&self) -> bool {
        self.connections.len() + self.newcomers.len() + self.listeners.len() < MAX_CONNECTIONS
    }

    fn accept(&mut self, ops: &mut EventOps) {
        // Accept a bounded number. The socket stays readable for the rest.
        for _ in 0..MAX_CONNECTIONS {
            let Ok(stream) = self.listener.accept() else { return };
            // A connection too many is closed at once.
            if self.has_room() && watch(&stream, ops) {
                let newcomer = Newcomer { stream, greeting: Vec::with_capacity(MAX_GREETING) };
                self.newcomers.insert(newcomer.stream.as_raw_fd(), newcomer);
            }
        }
    }

    /// Reads a client's greeting byte by byte, because data after it belongs to the guest.
    fn greet(&mut self, fd: RawFd) {
        let Some(mut newcomer) = self.newcomers.remove(&fd) else { return };
        while newcomer.greeting.last() != Some(&b'\n') {
            let mut byte = [0];
            match newcomer.stream.read(&mut byte) {
                Ok(1) if newcomer.greeting.len() < MAX_GREETING => newcomer.greeting.push(byte[0]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    self.newcomers.insert(fd, newcomer);
                    return;
                }
                _ => return self.dead.push(newcomer.stream),
            }
        }
        match greeting(&newcomer.greeting) {
            Some(Greeting::Connect(guest)) => {
                let ports = Ports { host: self.free_port(guest), guest };
                self.insert(ports, Connection::to_guest(newcomer.stream, ports));
            }
            Some(Greeting::Listen(port)) => self.listeners.push((port, newcomer.stream)),
            None => self.dead.push(newcomer.stream),
        }
    }

    fn free_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_port;
            self.next_port = if host + 1 == ANY_PORT { FIRST_HOST_PORT } else { host + 1 };
            if !self.connections.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    fn insert(&mut self, ports: Ports, connection: Connection) {
        self.by_fd.insert(connection.stream.as_raw_fd(), ports);
        self.connections.insert(ports, connection);
        self.settle(ports, Fate::Lives);
    }

    /// Updates a connection after an event: lists it if it has packets for the guest, or removes
    /// it.
    fn settle(&mut self, ports: Ports, fate: Fate) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if fate == Fate::Over {
            let connection = self.connections.remove(&ports).expect("it was there");
            self.by_fd.remove(&connection.stream.as_raw_fd());
            self.dead.push(connection.stream);
        } else if connection.has_news() && !std::mem::replace(&mut connection.listed, true) {
            self.ready.push_back(ports);
        }
    }

    fn next_packet(&mut self, chain: &mut Chain<'_>) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        // Each in turn and once. A connection whose data does not fit this buffer stays in the
        // list.
        for _ in 0..self.ready.len() {
            let ports = self.ready.pop_front()?;
            let Some(connection) = self.connections.get_mut(&ports) else { continue };
            connection.listed = false;
            let packet = connection.next_packet(chain);
            self.settle(ports, packet.map_or(Fate::Lives, |(_, fate)| fate));
            if let Some((header, _)) = packet {
                return Some(Header { src_cid: HOST_CID, dst_cid: self.cid, kind: STREAM, ..header });
            }
        }
        None
    }

    fn stream_ready(&mut self, events: &Events) {
        if self.newcomers.contains_key(&events.fd()) {
            return self.greet(events.fd());
        }
        if let Some(at) = self.listeners.iter().position(|(_, stream)| stream.as_raw_fd() == events.fd()) {
            // A waiting client has nothing to send; it can only hang up.
            if events.event_set().contains(EventSet::HANG_UP) {
                let (_, stream) = self.listeners.remove(at);
                self.dead.push(stream);
            }
            return;
        }
        let Some(&ports) = self.by_fd.get(&events.fd()) else { return };
        if let Some(connection) = self.connections.get_mut(&ports) {
            let fate = connection.host_ready(events.event_set().contains(EventSet::HANG_UP));
            self.settle(ports, fate);
        }
    }

    /// Drops all connections. [`Hub::bury`] closes them, on the event loop.
    fn forget(&mut self) {
        self.dead.extend(self.connections.drain().map(|(_, connection)| connection.stream));
        self.by_fd.clear();
        self.ready.clear();
        self.resets.clear();
    }

    fn bury(&mut self, ops: &mut EventOps) {
        for stream in self.dead.drain(..) {
            let _ = ops.remove(Events::empty(&stream));
        }
    }
}

fn watch(stream: &UnixStream, ops: &mut EventOps) -> bool {
    let set = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
    ops.add(Events::with_data(stream, STREAMS, set)).is_ok()
}

/// A host process's request.
enum Greeting {
    Connect(u32),
    Listen(u32),
}

fn greeting(line: &[u8]) -> Option<Greeting> {
    let (word, digits) = std::str::from_utf8(line).ok()?.strip_suffix('\n')?.split_once(' ')?;
    let port = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    match word {
        "CONNECT" => Some(Greeting::Connect(port)),
        "LISTEN" => Some(Greeting::Listen(port)),
        _ => None,
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128, 128, 16]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_space(&self.hub.cid.to_le_bytes(), offset, data);
    }

    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self.path.clone())
    }

    fn activate(&mut self, active: Active) {
        self.active = Some(active);
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn reset(&mut self) {
        self.hub.forget();
        self.moved = Moved::No;
    }

    fn watch(&mut self, ops: &mut EventOps) {
        ops.add(Events::with_data(&self.hub.listener, LISTENER, EventSet::IN))
            .expect("a socket can be polled");
    }

    fn notified(&mut self, index: u16, ops: &mut EventOps) {
        if index == TRANSMIT {
            self.take_packets();
        }
        self.give_packets();
        self.hub.bury(ops);
    }

    fn ready(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            LISTENER if self.waits => {}
            LISTENER => self.hub.accept(ops),
            _ => self.hub.stream_ready(&events),
        }
        self.give_packets();
        self.hub.bury(ops);
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.hub.listener.lend()?])
    }

    fn arrived(&mut self, _forked: bool) {
        self.waits = false;
    }

    fn save(&self) -> DeviceState {
        DeviceState::Vsock(State { cid: self.hub.cid })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Vsock(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        if state.cid <= HOST_CID || state.cid >= u64::from(u32::MAX) {
            return Err(RestoreError::Field {
                field: "cid",
                value: state.cid.to_string(),
                reason: "is not a guest's address",
            });
        }
        // The guest reads it when it is told that its connections are gone.
        self.hub.cid = self.named.unwrap_or(state.cid);
        self.moved = Moved::Untold;
        Ok(())
    }
}
