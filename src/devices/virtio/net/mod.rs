//! Network interface (virtio 1.2, section 5.1) on a tap device of the host, or on [passt's stream](user).
//!
//! Packets move between tap and guest memory without a copy in between, each with the header that both sides share
//! (IFF_VNET_HDR), so checksums and segmentation go through undone; passt takes and gives whole frames, so that there a guest is offered
//! neither. One receive and one transmit queue.

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
/// struct virtio_net_hdr_v1.
const HEADER: usize = 12;
/// num_buffers in it, which the tap leaves alone.
const NUM_BUFFERS: usize = 10;
/// The longest packet with its headers: a full IP packet, Ethernet and a VLAN tag.
const MAX_PACKET: usize = HEADER + 65535 + 18;

/// The guest's feature bits, and what each lets the tap hand over unfinished.
const OFFLOADS: [(u32, u32); 5] = [
    (VIRTIO_NET_F_GUEST_CSUM, tap::CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, tap::TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, tap::TSO6),
    (VIRTIO_NET_F_GUEST_ECN, tap::TSO_ECN),
    (VIRTIO_NET_F_GUEST_UFO, tap::UFO),
];

/// What a network interface is.
pub static KIND: Kind = Kind {
    key: "net",
    about: "A network interface. On a tap: tap=NAME[,mac=ADDRESS]; with create[,host=ADDRESS/LENGTH] the tap is made. Without \
        one, by passt, which needs no privileges: user[,host-loopback][,forward=LIST][,socket=PATH][,mac=ADDRESS]; host-loopback: \
        the guest reaches what listens on the host's loopback, by the gateway's address; socket: of a passt that runs already",
    value: Some("tap=NAME|user"),
    repeats: true,
    parse: |text| match parse(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<NetConfig>(written)?)),
};

/// A network interface as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// The tap device's name; empty without one.
    pub tap: String,
    /// Make the tap, and bring it up; it goes away with the machine. Otherwise it must be there.
    pub create: bool,
    /// The host's address and prefix length on a tap that is made.
    pub host: Option<(Ipv4Addr, u8)>,
    /// The guest's hardware address; a random one by default.
    pub mac: Option<[u8; 6]>,
    /// What there is in the place of a tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The tap device.
    #[error(transparent)]
    Tap(#[from] tap::TapError),
    /// passt.
    #[error(transparent)]
    User(#[from] user::Error),
    /// No random hardware address.
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
        handoff::write(self)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let mac = self.mac.unwrap_or_default();
        let mut lent = lent.into_iter();
        // The guest's address comes with its state.
        let net = match (&self.user, lent.next()) {
            (None, None) => return Err(Unfit::boxed(&KIND, "no descriptor")),
            (None, Some(tap)) => Net::on(Tap::from_fd(&self.tap, tap), mac),
            (Some(user), Some(socket)) => Net::on_stream(Stream::on(socket, user.host_loopback), mac),
            // Its passt had ended there already.
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

/// `tap=NAME[,mac=ADDRESS][,create][,host=ADDRESS/LENGTH]`, or `user[,host-loopback][,forward=LIST][,socket=PATH][,mac=ADDRESS]`.
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

/// A hardware address of one interface.
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

/// What is at the other end of the wire.
enum Side {
    Tap(Tap),
    User(Stream),
}

/// The device.
pub struct Net {
    side: Side,
    mac: [u8; 6],
    /// There may be packets: the other end is edge-triggered, and is read until it says that it has none.
    readable: bool,
    /// The tap's offloads follow the driver's features from the first event on.
    configured: bool,
    /// The link is down, and the driver has not been told.
    untold: bool,
    active: Option<Active>,
}

/// What is saved of a network interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    mac: [u8; 6],
}

impl Net {
    /// Attaches to the tap device, or makes it; or starts passt.
    pub fn open(config: &NetConfig) -> Result<Self, NetError> {
        let mac = config.mac.map_or_else(random_mac, Ok).map_err(NetError::Random)?;
        if let Some(user) = &config.user {
            return Ok(Net::on_stream(Stream::open(user)?, mac));
        }
        let tap = Tap::open(&config.tap, config.create)?;
        tap.set_header_size(HEADER as i32)?;
        if config.create {
            tap.bring_up(config.host)?;
        }
        Ok(Net::on(tap, mac))
    }

    /// A device on a tap that is open: non-blocking, and every packet with a header of 12 bytes.
    pub fn on(tap: Tap, mac: [u8; 6]) -> Self {
        Self::with(Side::Tap(tap), mac)
    }

    /// A device on passt's stream.
    pub fn on_stream(stream: Stream, mac: [u8; 6]) -> Self {
        Self::with(Side::User(stream), mac)
    }

    fn with(side: Side, mac: [u8; 6]) -> Self {
        Net { side, mac, readable: true, configured: false, untold: false, active: None }
    }

    /// False where there is nobody at the other end any more.
    fn receive(&mut self) -> bool {
        let Some(active) = &mut self.active else { return true };
        let (mut there, mut head) = (true, Slices::default());
        active.serve(RECEIVE, |chain| {
            if !self.readable {
                return Served::Later;
            }
            // A buffer that cannot hold a header comes back empty: the packet waits for a better one.
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
            match chain.writable.readv(tap, MAX_PACKET) {
                Ok(count) => Served::Done(count as u32),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Served::Later,
                Err(error) => {
                    // Where there is another reason the interface is down or gone: nothing to read until it tells of
                    // something new.
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

    /// False where there is nobody at the other end any more.
    fn transmit(&mut self) -> bool {
        let Some(active) = &mut self.active else { return true };
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
            // A packet that the tap does not take is lost, as on any wire.
            if (HEADER..=MAX_PACKET).contains(&chain.readable.left())
                && let Err(error) = chain.readable.writev(tap, MAX_PACKET)
            {
                tracing::debug!("{}: a packet of the guest is lost: {error}", tap.name());
            }
            Served::Done(0)
        });
        there
    }

    /// Runs on the event loop, where the tap's ioctl is allowed.
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

    /// passt has ended: the link is down, and the guest goes on without.
    fn hang_up(&mut self, ops: &mut EventOps) {
        let Side::User(stream) = &mut self.side else { return };
        let Some(socket) = stream.socket() else { return };
        tracing::warn!("passt has ended: the guest's network link is down");
        let _ = ops.remove(Events::empty(&Raw(socket)));
        stream.close();
        self.untold = true;
        self.tell();
    }

    /// Tells the driver that the link is not what it was.
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

/// What the event loop wants of a descriptor.
struct Raw<'a>(&'a OwnedFd);

impl AsRawFd for Raw<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A packet that asks which protocol address `mac` has (RARP, RFC 903), to all: nobody answers, and every switch on its way sees
/// where it came from.
fn announcement(mac: [u8; 6]) -> [u8; HEADER + 60] {
    let mut packet = [0; HEADER + 60];
    let mut put = |at: usize, bytes: &[u8]| packet[HEADER + at..][..bytes.len()].copy_from_slice(bytes);
    put(0, &[0xff; 6]);
    put(6, &mac);
    // The protocol; Ethernet, IPv4, their lengths; the request.
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
        // The status, which a driver on a tap does not look at.
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
                // What waits to be sent goes on when there is room.
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
        // Whoever is not active yet reads nothing, and would not see the end.
        if !there || self.active.is_none() && events.event_set().intersects(ends) {
            self.hang_up(ops);
        }
    }

    /// Switches learn from any packet behind which port an address is.
    fn arrived(&mut self) {
        let packet = announcement(self.mac);
        match &mut self.side {
            Side::Tap(tap) => {
                if let Err(error) = tap.send(&packet) {
                    tracing::warn!("{}: the network is not told that the guest is here: {error}", tap.name());
                }
            }
            Side::User(stream) => {
                let _ = stream.send_own(&packet[HEADER..]);
                // The link may have been down where it came from, or be down here.
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
        DeviceState::Net(State { mac: self.mac })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Net(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        self.mac = state.mac;
        Ok(())
    }
}
