//! Network interface (virtio 1.2, section 5.1) on a tap device of the host.
//!
//! Packets move between tap and guest memory without a copy in between, each with the header that both sides share
//! (IFF_VNET_HDR), so checksums and segmentation go through undone. One receive and one transmit queue.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::*;

use super::lent::{self, Unfit};
use super::queue::Served;
use super::{
    Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice, read_space,
};
use crate::fault::{Blame, Fault, Field};
use crate::keyvalue::{self, KeyValues};
use crate::sys::tap::{self, Tap};

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
    about: "A network interface on a tap: tap=NAME[,mac=ADDRESS]; with create[,host=ADDRESS/LENGTH] the tap is made",
    value: Some("tap=NAME"),
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
    /// The tap device's name.
    pub tap: String,
    /// Make the tap, and bring it up; it goes away with the machine. Otherwise it must be there.
    pub create: bool,
    /// The host's address and prefix length on a tap that is made.
    pub host: Option<(Ipv4Addr, u8)>,
    /// The guest's hardware address; a random one by default.
    pub mac: Option<[u8; 6]>,
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The tap device.
    #[error(transparent)]
    Tap(#[from] tap::TapError),
    /// No random hardware address.
    #[error("/dev/urandom: {0}")]
    Random(io::Error),
}

impl Fault for NetError {
    fn blame(&self) -> Blame {
        match self {
            NetError::Tap(_) => Blame::user(Field::Device(KIND.key)),
            NetError::Random(_) => Blame::host(Field::Device(KIND.key)),
        }
    }
}

impl DeviceConfig for NetConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        lent::write(self)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let tap = lent.into_iter().next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        // The guest's address comes with its state.
        Ok(Box::new(Net::on(Tap::from_fd(&self.tap, tap), self.mac.unwrap_or_default())))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        match Net::open(self) {
            Ok(net) => Ok(Box::new(net)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

/// `tap=NAME[,mac=ADDRESS][,create][,host=ADDRESS/LENGTH]`.
fn parse(text: &str) -> Result<NetConfig, keyvalue::Error> {
    let kv = KeyValues::parse(text, None, &["tap", "mac", "create", "host"])?;
    let host = kv.with("host", host)?;
    Ok(NetConfig {
        tap: kv.required("tap", |text| Ok::<_, String>(text.to_owned()))?,
        create: kv.switch("create")?.unwrap_or(host.is_some()),
        host,
        mac: kv.with("mac", mac)?,
    })
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

/// The device.
pub struct Net {
    tap: Tap,
    mac: [u8; 6],
    /// The tap may have packets: it is edge-triggered, and is read until it says that it has none.
    readable: bool,
    /// The tap's offloads follow the driver's features from the first event on.
    configured: bool,
    active: Option<Active>,
}

/// What is saved of a network interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    mac: [u8; 6],
}

impl Net {
    /// Attaches to the tap device, or makes it.
    pub fn open(config: &NetConfig) -> Result<Self, NetError> {
        let tap = Tap::open(&config.tap, config.create)?;
        tap.set_header_size(HEADER as i32)?;
        if config.create {
            tap.bring_up(config.host)?;
        }
        let mac = config.mac.map_or_else(random_mac, Ok).map_err(NetError::Random)?;
        Ok(Net::on(tap, mac))
    }

    /// A device on a tap that is open: non-blocking, and every packet with a header of 12 bytes.
    pub fn on(tap: Tap, mac: [u8; 6]) -> Self {
        Net { tap, mac, readable: true, configured: false, active: None }
    }

    fn receive(&mut self) {
        let Some(active) = &mut self.active else { return };
        active.serve(RECEIVE, |chain| {
            if !self.readable {
                return Served::Later;
            }
            // A buffer that cannot hold a header comes back empty: the packet waits for a better one.
            if chain.writable.left() < HEADER {
                return Served::Done(0);
            }
            chain.writable.write_at(NUM_BUFFERS, &1u16.to_le_bytes());
            match chain.writable.readv(&self.tap, MAX_PACKET) {
                Ok(count) => Served::Done(count as u32),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Served::Later,
                Err(error) => {
                    // Where there is another reason the interface is down or gone: nothing to read until it tells of
                    // something new.
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!("{}: {error}", self.tap.name());
                    }
                    self.readable = false;
                    Served::Later
                }
            }
        });
    }

    fn transmit(&mut self) {
        let Some(active) = &mut self.active else { return };
        active.serve(TRANSMIT, |chain| {
            // A packet that the tap does not take is lost, as on any wire.
            if (HEADER..=MAX_PACKET).contains(&chain.readable.left())
                && let Err(error) = chain.readable.writev(&self.tap, MAX_PACKET)
            {
                tracing::debug!("{}: a packet of the guest is lost: {error}", self.tap.name());
            }
            Served::Done(0)
        });
    }

    /// Runs on the event loop, where the tap's ioctl is allowed.
    fn configure(&mut self) {
        let Some(active) = &self.active else { return };
        if !std::mem::replace(&mut self.configured, true) {
            let offloads =
                OFFLOADS.iter().filter(|(feature, _)| active.has(*feature)).map(|(_, offload)| offload);
            if let Err(error) = self.tap.set_offloads(offloads.fold(0, |all, one| all | one)) {
                tracing::warn!("{error}");
            }
        }
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
        let host = [VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_ECN];
        let bits = host.iter().chain(OFFLOADS.iter().map(|(feature, _)| feature));
        bits.fold(1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_HOST_UFO, |all, bit| all | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_space(&self.mac, offset, data);
    }

    fn activate(&mut self, active: Active) {
        self.configured = false;
        self.readable = true;
        self.active = Some(active);
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn watch(&mut self, ops: &mut EventOps) {
        let events = Events::with_data(&self.tap, 0, EventSet::IN | EventSet::EDGE_TRIGGERED);
        ops.add(events).expect("a tap can be polled");
    }

    fn notified(&mut self, index: u16, _ops: &mut EventOps) {
        self.configure();
        match index {
            RECEIVE => self.receive(),
            _ => self.transmit(),
        }
    }

    fn ready(&mut self, _events: Events, _ops: &mut EventOps) {
        self.readable = true;
        self.configure();
        self.receive();
    }

    /// Switches learn from any packet behind which port an address is.
    fn arrived(&mut self) {
        if let Err(error) = self.tap.send(&announcement(self.mac)) {
            tracing::warn!("{}: the network is not told that the guest is here: {error}", self.tap.name());
        }
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.tap.try_clone()?])
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
