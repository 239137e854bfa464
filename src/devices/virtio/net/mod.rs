//! Network interface (virtio 1.2, section 5.1) on a tap device of the host, or on [passt's
//! stream](user).
//!
//! Packets move between tap and guest memory without a copy. Both sides use the same header
//! (IFF_VNET_HDR), so checksum and segmentation offloads pass through. passt takes and sends
//! complete frames, so the guest is offered no offloads there. There is one receive and one
//! transmit queue.

pub mod user;

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::*;

use self::user::{Forward, Moved, Stream, User};
use super::handoff::{self, Unfit};
use super::queue::Served;
use super::{
    Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice, read_space,
};
use vellum_kvm::memory::slices::Slices;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::keyvalue::{self, KeyValues};
use vellum_sys::tap::{self, Tap};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const QUEUE_SIZE: u16 = 256;
/// The size of struct virtio_net_hdr_v1.
const HEADER: usize = 12;
/// The offset of its num_buffers, which the tap does not set.
const NUM_BUFFERS: usize = 10;
/// The longest packet with its headers: a full IP packet, Ethernet and a VLAN tag.
const MAX_PACKET: usize = HEADER + 65535 + 18;

/// Guest feature bits, and the tap offload that each allows.
const OFFLOADS: [(u32, u32); 5] = [
    (VIRTIO_NET_F_GUEST_CSUM, tap::CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, tap::TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, tap::TSO6),
    (VIRTIO_NET_F_GUEST_ECN, tap::TSO_ECN),
    (VIRTIO_NET_F_GUEST_UFO, tap::UFO),
];

/// The network interface as a kind of device.
pub static KIND: Kind = Kind {
    key: "net",
    about: "A network interface. On a tap: tap=NAME[,mac=ADDRESS]; create[,host=ADDRESS/LENGTH] makes the tap. Without \
        a tap, unprivileged, through passt: user[,host-loopback][,forward=LIST][,socket=PATH][,mac=ADDRESS]; host-loopback: \
        the guest reaches the host's loopback at the gateway's address; socket: that of a running passt",
    value: Some("tap=NAME|user"),
    repeats: true,
    parse: |text| match parse(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<NetConfig>(written)?)),
};

/// The configuration of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// The tap device's name; empty without one.
    pub tap: String,
    /// Create the tap and bring it up. It goes away with the machine. Otherwise the tap must exist.
    pub create: bool,
    /// The host's address and prefix length on a created tap.
    pub host: Option<(Ipv4Addr, u8)>,
    /// The guest's MAC address; random by default.
    pub mac: Option<[u8; 6]>,
    /// The passt network, in place of a tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The tap device cannot be used.
    #[error(transparent)]
    Tap(#[from] tap::TapError),
    /// passt cannot be used.
    #[error(transparent)]
    User(#[from] user::Error),
    /// No random MAC address.
    #[error("/dev/urandom: {0}")]
    Random(io::Error),
}

impl Diagnose for NetError {
    fn origin(&self) -> ErrorOrigin {
        match self {
            NetError::Tap(_) | NetError::User(_) => ErrorOrigin::user(Field::Device(KIND.key)),
            NetError::Random(_) => ErrorOrigin::host(Field::Device(KIND.key)),
        }
    }
}

impl DeviceConfig for NetConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        handoff::make_absolute(written.user.as_mut().and_then(|user| user.socket.as_mut()))?;
        handoff::write(&written)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let mac = self.mac.unwrap_or_default();
        let mut lent = lent.into_iter();
        // The guest's address comes with the saved state.
        let net = match (&self.user, lent.next()) {
            (None, None) => return Err(Unfit::boxed(&KIND, "no descriptor")),
            (None, Some(tap)) => Net::on(Tap::from_fd(&self.tap, tap), mac),
            (Some(user), Some(socket)) => Net::on_stream(Stream::take_over(socket, user.host_loopback), mac),
            // Its passt had already ended in the other process.
            (Some(user), None) => {
                Net::on_stream(Stream::open(user).map_err(NetError::from).map_err(boxed)?, mac)
            }
        };
        Ok(Box::new(net))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        match Net::open(self) {
            Ok(net) => Ok(Box::new(net)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

fn boxed(error: NetError) -> OpenError {
    Box::new(error)
}

/// `tap=NAME[,mac=ADDRESS][,create][,host=ADDRESS/LENGTH]`, or
/// `user[,host-loopback][,forward=LIST][,socket=PATH][,mac=ADDRESS]`.
pub fn parse(text: &str) -> Result<NetConfig, keyvalue::Error> {
    if text == "user" || text.starts_with("user,") {
        let kv = KeyValues::parse(text, None, &["user", "host-loopback", "forward", "socket", "mac"])?;
        let user = User {
            host_loopback: kv.switch("host-loopback")?.unwrap_or(false),
            forwards: kv.with("forward", forwards)?.unwrap_or_default(),
            socket: kv.with("socket", |path| Ok::<_, String>(path.into()))?,
        };
        let mac = kv.with("mac", mac)?;
        return Ok(NetConfig { tap: String::new(), create: false, host: None, mac, user: Some(user) });
    }
    let kv = KeyValues::parse(text, None, &["tap", "mac", "create", "host"])?;
    let host = kv.with("host", host)?;
    Ok(NetConfig {
        tap: kv.required("tap", |text| Ok::<_, String>(text.to_owned()))?,
        create: kv.switch("create")?.unwrap_or(host.is_some()),
        host,
        mac: kv.with("mac", mac)?,
        user: None,
    })
}

fn forwards(text: &str) -> Result<Vec<Forward>, &'static str> {
    text.split(',').map(str::parse).collect()
}

/// Parses a unicast MAC address.
pub fn mac(text: &str) -> Result<[u8; 6], &'static str> {
    const EXPECTED: &str = "an address as in 02:00:00:00:00:01, of one interface (the first byte even)";
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2).ok_or(EXPECTED)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| EXPECTED)?;
    }
    if parts.next().is_some() || bytes[0] & 1 != 0 || bytes == [0; 6] { Err(EXPECTED) } else { Ok(bytes) }
}

fn host(text: &str) -> Result<(Ipv4Addr, u8), &'static str> {
    const EXPECTED: &str = "an address and prefix length as in 192.168.33.1/24";
    let (address, length) = text.split_once('/').ok_or(EXPECTED)?;
    let length = length.parse().ok().filter(|length| *length <= 32).ok_or(EXPECTED)?;
    Ok((address.parse().map_err(|_| EXPECTED)?, length))
}

/// The host's end of the interface.
enum Side {
    Tap(Tap),
    User(Stream),
}

/// The device.
pub struct Net {
    side: Side,
    mac: [u8; 6],
    /// The address that a restored guest gets instead of its own. Its driver reads it when it is
    /// bound again.
    named: Option<[u8; 6]>,
    /// There may be packets. The host's end is edge-triggered, so it is read until it has none.
    readable: bool,
    /// The tap's offloads match the driver's features. They are set at the first event.
    configured: bool,
    /// The link is down, and the driver has not been told.
    untold: bool,
    active: Option<Active>,
}

/// The saved state of a network interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    mac: [u8; 6],
    /// The rest of a frame that passt has taken in part, if its socket is handed over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rest: Vec<u8>,
}

impl Net {
    /// Attaches to the tap device or creates it, or starts passt.
    pub fn open(config: &NetConfig) -> Result<Self, NetError> {
        let mac = config.mac.map_or_else(random_mac, Ok).map_err(NetError::Random)?;
        let net = match &config.user {
            Some(user) => Net::on_stream(Stream::open(user)?, mac),
            None => {
                let tap = Tap::open(&config.tap, config.create)?;
                tap.set_header_size(HEADER as i32)?;
                if config.create {
                    tap.bring_up(config.host)?;
                }
                Net::on(tap, mac)
            }
        };
        Ok(net.named(config.mac))
    }

    /// The same with this address, if it is given: a restored guest gets it instead of its own.
    pub fn named(self, mac: Option<[u8; 6]>) -> Self {
        Self { named: mac, ..self }
    }

    /// A device on an open tap. The tap must be non-blocking and use a 12-byte header.
    pub fn on(tap: Tap, mac: [u8; 6]) -> Self {
        Self::with(Side::Tap(tap), mac)
    }

    /// A device on passt's stream.
    pub fn on_stream(stream: Stream, mac: [u8; 6]) -> Self {
        Self::with(Side::User(stream), mac)
    }

    fn with(side: Side, mac: [u8; 6]) -> Self {
        Net { side, mac, named: None, readable: true, configured: false, untold: false, active: None }
    }

    /// Passes packets to the guest. Returns false if the peer is gone.
    fn receive(&mut self) -> bool {
        let Some(active) = &mut self.active else { return true };
        let (mut there, mut head) = (true, Slices::default());
        active.serve(RECEIVE, |chain| {
            if !self.readable {
                return Served::Later;
            }
            // A buffer too small for a header is returned empty. The packet waits for a larger one.
            if chain.writable.left() < HEADER {
                return Served::Done(0);
            }
            let tap = match &mut self.side {
                Side::Tap(tap) => tap,
                Side::User(stream) => {
                    chain.writable.split_front(HEADER, &mut head);
                    return match stream.receive(&mut chain.writable) {
                        Moved::Whole(count) => {
                            let mut header = [0; HEADER];
                            header[NUM_BUFFERS] = 1;
                            head.write(&header);
                            Served::Done((HEADER + count) as u32)
                        }
                        moved => {
                            self.readable = false;
                            there = moved != Moved::Gone;
                            Served::Later
                        }
                    };
                }
            };
            chain.writable.write_at(NUM_BUFFERS, &1u16.to_le_bytes());
            // The tap is edge-triggered: nobody would come back for a packet after a signal.
            let received = loop {
                match chain.writable.readv(tap, MAX_PACKET) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    received => break received,
                }
            };
            match received {
                Ok(count) => Served::Done(count as u32),
                Err(error) => {
                    // For any other reason the interface is down or gone: nothing to read until the
                    // next event.
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!("{}: {error}", tap.name());
                    }
                    self.readable = false;
                    Served::Later
                }
            }
        });
        there
    }

    /// Passes the guest's packets to the host. Returns false if the peer is gone.
    fn transmit(&mut self) -> bool {
        let Some(active) = &mut self.active else { return true };
        if let Side::User(stream) = &mut self.side {
            // A peer that is gone is noticed with the next packet.
            let _ = stream.flush();
        }
        let mut there = true;
        active.serve(TRANSMIT, |chain| {
            let tap = match &mut self.side {
                Side::Tap(tap) => tap,
                Side::User(stream) => {
                    return match stream.send(&mut chain.readable) {
                        Moved::Whole(_) => Served::Done(0),
                        Moved::Later => Served::Later,
                        Moved::Gone => {
                            there = false;
                            Served::Done(0)
                        }
                    };
                }
            };
            // A packet that the tap refuses is lost, as on any network.
            if (HEADER..=MAX_PACKET).contains(&chain.readable.left())
                && let Err(error) = chain.readable.writev(tap, MAX_PACKET)
            {
                tracing::debug!("{}: a guest packet was lost: {error}", tap.name());
            }
            Served::Done(0)
        });
        there
    }

    /// Runs on the event loop, whose sandbox allows the tap's ioctl.
    fn configure(&mut self) {
        let (Some(active), Side::Tap(tap)) = (&self.active, &self.side) else { return };
        if !std::mem::replace(&mut self.configured, true) {
            let offloads =
                OFFLOADS.iter().filter(|(feature, _)| active.has(*feature)).map(|(_, offload)| offload);
            if let Err(error) = tap.set_offloads(offloads.fold(0, |all, one| all | one)) {
                tracing::warn!("{error}");
            }
        }
    }

    /// passt has ended: the link goes down, and the guest continues without network.
    fn hang_up(&mut self, ops: &mut EventOps) {
        let Side::User(stream) = &mut self.side else { return };
        let Some(socket) = stream.socket() else { return };
        tracing::warn!("passt has ended: the guest's network link is down");
        let _ = ops.remove(Events::empty(&Raw(socket)));
        stream.close();
        self.untold = true;
        self.tell();
    }

    /// Tells the driver that the link state has changed.
    fn tell(&mut self) {
        if let Some(active) = self.active.as_ref().filter(|_| self.untold) {
            active.config_changed();
            self.untold = false;
        }
    }

    fn is_up(&self) -> bool {
        match &self.side {
            Side::Tap(_) => true,
            Side::User(stream) => stream.socket().is_some(),
        }
    }
}

/// Wraps a descriptor for the event loop.
struct Raw<'a>(&'a OwnedFd);

impl AsRawFd for Raw<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A broadcast RARP request for the address of `mac` (RFC 903). It needs no answer. Every switch on
/// its way learns where it came from.
fn announcement(mac: [u8; 6]) -> [u8; HEADER + 60] {
    let mut packet = [0; HEADER + 60];
    let mut put = |at: usize, bytes: &[u8]| packet[HEADER + at..][..bytes.len()].copy_from_slice(bytes);
    put(0, &[0xff; 6]);
    put(6, &mac);
    // EtherType; Ethernet, IPv4 and their address lengths; the request.
    put(12, &[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    put(22, &mac);
    put(32, &mac);
    packet
}

fn random_mac() -> io::Result<[u8; 6]> {
    use std::io::Read;
    let mut mac = [0; 6];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut mac)?;
    // Locally administered, unicast.
    mac[0] = mac[0] & 0xfc | 0x02;
    Ok(mac)
}

impl VirtioDevice for Net {
    fn kind(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        if matches!(self.side, Side::User(_)) {
            return 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_STATUS;
        }
        let host = [VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_ECN];
        let bits = host.iter().chain(OFFLOADS.iter().map(|(feature, _)| feature));
        bits.fold(1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_HOST_UFO, |all, bit| all | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut space = [0; 8];
        space[..6].copy_from_slice(&self.mac);
        // The status. A tap's driver does not negotiate it.
        if matches!(self.side, Side::User(_)) && self.is_up() {
            space[6] = VIRTIO_NET_S_LINK_UP as u8;
        }
        read_space(&space, offset, data);
    }

    fn activate(&mut self, active: Active) {
        self.configured = false;
        self.readable = true;
        self.active = Some(active);
        self.tell();
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn watch(&mut self, ops: &mut EventOps) {
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let events = match &self.side {
            Side::Tap(tap) => Events::with_data(tap, 0, edges),
            Side::User(stream) => match stream.socket() {
                // Waiting packets continue when there is room.
                Some(socket) => Events::with_data(&Raw(socket), 0, edges | EventSet::OUT),
                None => return,
            },
        };
        ops.add(events).expect("taps and sockets can be polled");
    }

    fn notified(&mut self, index: u16, ops: &mut EventOps) {
        self.configure();
        let there = match index {
            RECEIVE => self.receive(),
            _ => self.transmit(),
        };
        if !there {
            self.hang_up(ops);
        }
    }

    fn ready(&mut self, events: Events, ops: &mut EventOps) {
        self.readable = true;
        self.configure();
        let ends = EventSet::HANG_UP | EventSet::ERROR;
        let there = self.receive() && (!matches!(self.side, Side::User(_)) || self.transmit());
        // An inactive device reads nothing, and so would not notice the end.
        if !there || self.active.is_none() && events.event_set().intersects(ends) {
            self.hang_up(ops);
        }
    }

    /// Switches learn from any packet which port an address is behind. An address that the machine
    /// shares with one that runs on stays behind that one's port.
    fn arrived(&mut self, forked: bool) {
        let is_shared = forked && self.named.is_none();
        let packet = announcement(self.mac);
        match &mut self.side {
            Side::Tap(_) if is_shared => {}
            Side::Tap(tap) => {
                if let Err(error) = tap.send(&packet) {
                    tracing::warn!(
                        "{}: cannot announce the guest's arrival to the network: {error}",
                        tap.name()
                    );
                }
            }
            Side::User(stream) => {
                let _ = stream.send_own(&packet[HEADER..]);
                // The link may have been down at the source, or be down here.
                self.untold = true;
            }
        }
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        match &mut self.side {
            Side::Tap(tap) => Ok(vec![tap.try_clone()?]),
            Side::User(stream) => Ok(stream.lend()?.into_iter().collect()),
        }
    }

    fn save(&self) -> DeviceState {
        let rest = match &self.side {
            Side::Tap(_) => Vec::new(),
            Side::User(stream) => stream.rest().to_vec(),
        };
        DeviceState::Net(State { mac: self.mac, rest })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Net(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        self.mac = self.named.unwrap_or(state.mac);
        if let Side::User(stream) = &mut self.side {
            stream.go_on(state.rest);
        }
        Ok(())
    }
}
