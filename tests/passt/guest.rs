//! A guest's side of the network: the tests' own driver, and smoltcp's TCP/IP on it, in this
//! process.

use std::time::Instant;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium};
use smoltcp::socket::{dhcpv4, dns, tcp, udp};
use smoltcp::time::Instant as Now;
use smoltcp::wire::{
    DnsQueryType, EthernetAddress, EthernetFrame, EthernetProtocol, IpAddress, IpCidr, IpProtocol,
    Ipv4Address, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, UdpPacket, UdpRepr,
};
use support::virtio::driver::*;
use support::{Failed, LIMIT};
use vellum_devices::virtio::net::{self, Net};
use vellum_devices::virtio::transport::Codec;

pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// How long one wait for the event loop takes, in milliseconds.
const TURN: i32 = 5;
/// Bytes of a frame and of the header before it.
const FRAME: usize = 1514;
const HEADER: usize = 12;

/// The address of the buffer of a descriptor. Each descriptor of each queue has its own.
fn buffer(queue: usize, head: u16) -> u64 {
    BUFFERS + 0x10000 * queue as u64 + 0x1000 * u64::from(head)
}

/// The interface of a `--net` value.
pub fn interface(net: &str) -> Result<Net, Failed> {
    let config = net::parse(&format!("{net},mac=02:00:00:00:00:09")).map_err(|error| error.to_string())?;
    Ok(Net::open(&config)?)
}

/// The network device for smoltcp.
pub struct Wire {
    pub driver: Driver,
    /// The number of frames sent, and of those that the device has returned.
    sent: u64,
    given_back: u64,
    /// The sender of the last received frame.
    other: EthernetAddress,
}

impl Wire {
    fn settle(&mut self) {
        self.driver.run();
        while self.driver.used_now(TRANSMIT).is_some() {
            self.given_back += 1;
        }
    }

    /// Sends a frame. There must be room.
    pub fn send(&mut self, frame: &[u8]) {
        let at = buffer(TRANSMIT, (self.sent % u64::from(QUEUE_SIZE)) as u16);
        self.driver.put(at, &[&[0; HEADER], frame].concat());
        self.driver.submit(TRANSMIT, &[readable(at, (HEADER + frame.len()) as u32)]);
        self.sent += 1;
    }
}

pub struct Frame(Vec<u8>);

impl phy::RxToken for Frame {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

pub struct Way<'a>(&'a mut Wire);

impl phy::TxToken for Way<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.send(&frame);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Frame;
    type TxToken<'a> = Way<'a>;

    fn receive(&mut self, _: Now) -> Option<(Frame, Way<'_>)> {
        self.settle();
        // smoltcp may answer a received frame, which needs room.
        if self.sent - self.given_back == u64::from(QUEUE_SIZE) {
            return None;
        }
        let (head, len) = self.driver.used_now(RECEIVE)?;
        let at = buffer(RECEIVE, head);
        let frame = self.driver.fetch(at + HEADER as u64, len as usize - HEADER);
        self.driver.submit(RECEIVE, &[writable(at, (HEADER + FRAME) as u32)]);
        self.other = EthernetAddress::from_bytes(&frame[6..12]);
        Some((Frame(frame), Way(self)))
    }

    fn transmit(&mut self, _: Now) -> Option<Way<'_>> {
        self.settle();
        (self.sent - self.given_back < u64::from(QUEUE_SIZE)).then_some(Way(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        (capabilities.medium, capabilities.max_transmission_unit) = (Medium::Ethernet, FRAME);
        capabilities
    }
}

/// The result of DHCP.
pub struct Lease {
    pub address: Ipv4Address,
    pub router: Option<Ipv4Address>,
}

/// The guest.
pub struct Guest {
    pub wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    started: Instant,
    next_port: u16,
}

impl Guest {
    pub fn new(net: &str) -> Result<Self, Failed> {
        let mut driver = Driver::new(Codec::Mmio, interface(net)?);
        driver.start();
        for head in 0..QUEUE_SIZE {
            driver.submit(RECEIVE, &[writable(buffer(RECEIVE, head), (HEADER + FRAME) as u32)]);
        }
        let mut wire = Wire { driver, sent: 0, given_back: 0, other: EthernetAddress::BROADCAST };
        let config = Config::new(EthernetAddress(MAC).into());
        let interface = Interface::new(config, &mut wire, Now::ZERO);
        let (sockets, started) = (SocketSet::new(Vec::new()), Instant::now());
        Ok(Self { wire, interface, sockets, started, next_port: 49152 })
    }

    /// The same guest behind another interface. Its process has none of the guest's connections.
    pub fn moved_to(self, net: &str) -> Result<Self, Failed> {
        let Self {
            wire: Wire { driver, sent, given_back, other },
            interface: own,
            sockets,
            started,
            next_port,
        } = self;
        let wire = Wire { driver: driver.move_to(interface(net)?, |_| ()), sent, given_back, other };
        // The machine does this when it runs. A passt that has received nothing from its guest does
        // not know its MAC address, and starts a connection with a single SYN.
        wire.driver.device.arrived(false);
        Ok(Self { wire, interface: own, sockets, started, next_port })
    }

    fn turn(&mut self) {
        let now = Now::from_millis(self.started.elapsed().as_millis() as i64);
        self.interface.poll(now, &mut self.wire, &mut self.sockets);
    }

    /// Runs the guest and its device until `done` returns a value.
    pub fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Failed> {
        let start = Instant::now();
        loop {
            let late = start.elapsed() >= LIMIT;
            self.turn();
            if let Some(found) = done(self) {
                return Ok(found);
            }
            if late {
                return Err(format!("not within {LIMIT:?}: {what}").into());
            }
            self.wire.driver.idle(TURN);
        }
    }

    /// Gets an address by DHCP.
    pub fn dhcp(&mut self) -> Result<Lease, Failed> {
        let handle = self.sockets.add(dhcpv4::Socket::new());
        let lease = self.until("an address by DHCP", |guest| {
            match guest.sockets.get_mut::<dhcpv4::Socket<'_>>(handle).poll()? {
                dhcpv4::Event::Configured(lease) => {
                    Some((lease.address, Lease { address: lease.address.address(), router: lease.router }))
                }
                dhcpv4::Event::Deconfigured => None,
            }
        });
        self.sockets.remove(handle);
        let (cidr, lease) = lease?;
        self.interface.update_ip_addrs(|addresses| {
            addresses.clear();
            addresses.push(IpCidr::Ipv4(cidr)).expect("room for one");
        });
        if let Some(router) = lease.router {
            self.interface.routes_mut().add_default_ipv4_route(router).map_err(|_| "no room for a route")?;
        }
        Ok(lease)
    }

    /// Resolves `name` with the resolver `server`.
    pub fn resolve(&mut self, name: &str, server: Ipv4Address) -> Result<Vec<IpAddress>, Failed> {
        let handle = self.sockets.add(dns::Socket::new(&[server.into()], Vec::new()));
        let socket = self.sockets.get_mut::<dns::Socket<'_>>(handle);
        let query = socket
            .start_query(self.interface.context(), name, DnsQueryType::A)
            .map_err(|error| format!("{error:?}"))?;
        let found = self.until("a name's address", |guest| {
            match guest.sockets.get_mut::<dns::Socket<'_>>(handle).get_query_result(query) {
                Err(dns::GetQueryResultError::Pending) => None,
                found => Some(found),
            }
        });
        self.sockets.remove(handle);
        Ok(found?.map_err(|error| format!("{error:?}"))?.to_vec())
    }

    fn tcp_socket(&mut self) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 256 << 10]);
        self.sockets.add(tcp::Socket::new(buffer(), buffer()))
    }

    pub fn tcp(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// A socket that listens on `port`.
    pub fn listen(&mut self, port: u16) -> Result<SocketHandle, Failed> {
        let handle = self.tcp_socket();
        self.tcp(handle).listen(port).map_err(|error| format!("{error:?}"))?;
        Ok(handle)
    }

    /// A socket that starts to connect.
    pub fn begin_connect(&mut self, to: Ipv4Address, port: u16) -> Result<SocketHandle, Failed> {
        let handle = self.tcp_socket();
        self.next_port += 1;
        let (context, own) = (self.interface.context(), self.next_port);
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket.connect(context, (to, port), own).map_err(|error| format!("{error:?}"))?;
        Ok(handle)
    }

    /// A connected socket, or `None` if the connection was refused.
    pub fn connect(&mut self, to: Ipv4Address, port: u16) -> Result<Option<SocketHandle>, Failed> {
        let handle = self.begin_connect(to, port)?;
        self.until("a connection, or none", |guest| match guest.tcp(handle).state() {
            tcp::State::Established => Some(Some(handle)),
            tcp::State::Closed => Some(None),
            _ => None,
        })
    }

    /// Sends all of `bytes`.
    pub fn send(&mut self, handle: SocketHandle, bytes: &[u8]) -> Result<(), Failed> {
        let mut sent = 0;
        while sent < bytes.len() {
            sent += self.until("room to send", |guest| {
                let count = guest.tcp(handle).send_slice(&bytes[sent..]).unwrap_or(0);
                (count > 0).then_some(count)
            })?;
        }
        // Queued data is sent at the next turn.
        self.turn();
        Ok(())
    }

    /// The next bytes, at least one. Empty at the end.
    pub fn receive(&mut self, handle: SocketHandle) -> Result<Vec<u8>, Failed> {
        self.until("more bytes", |guest| {
            let socket = guest.tcp(handle);
            if !socket.may_recv() && !socket.can_recv() {
                return Some(Vec::new());
            }
            let bytes = socket.recv(|bytes| (bytes.len(), bytes.to_vec())).ok()?;
            (!bytes.is_empty()).then_some(bytes)
        })
    }

    /// A UDP socket on `port`.
    pub fn udp(&mut self, port: u16) -> Result<SocketHandle, Failed> {
        let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8 << 10]);
        let handle = self.sockets.add(udp::Socket::new(buffer(), buffer()));
        let socket = self.sockets.get_mut::<udp::Socket<'_>>(handle);
        socket.bind(port).map_err(|error| format!("{error:?}"))?;
        Ok(handle)
    }

    pub fn udp_socket(&mut self, handle: SocketHandle) -> &mut udp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Sends a SYN and a datagram to an address that no network stack would send to.
    pub fn strays(&mut self, to: Ipv4Address, port: u16) {
        let from = self.interface.ipv4_addr().unwrap_or(Ipv4Address::UNSPECIFIED);
        let begin = TcpRepr {
            src_port: 40000,
            dst_port: port,
            control: TcpControl::Syn,
            seq_number: TcpSeqNumber(1),
            ack_number: None,
            window_len: 65535,
            window_scale: None,
            max_seg_size: Some(1460),
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &[],
        };
        let datagram = UdpRepr { src_port: 40000, dst_port: port };
        let (checks, own) = (Default::default(), (IpAddress::from(from), IpAddress::from(to)));
        let mut segment = vec![0; begin.buffer_len()];
        begin.emit(&mut TcpPacket::new_unchecked(&mut segment), &own.0, &own.1, &checks);
        let mut packet = vec![0; datagram.header_len() + 1];
        let fill = |payload: &mut [u8]| payload.fill(b'x');
        datagram.emit(&mut UdpPacket::new_unchecked(&mut packet), &own.0, &own.1, 1, fill, &checks);
        for (next_header, payload) in [(IpProtocol::Tcp, segment), (IpProtocol::Udp, packet)] {
            let ip = Ipv4Repr {
                src_addr: from,
                dst_addr: to,
                next_header,
                payload_len: payload.len(),
                hop_limit: 64,
            };
            let mut frame = vec![0; 14 + ip.buffer_len()];
            let mut ethernet = EthernetFrame::new_unchecked(&mut frame);
            ethernet.set_dst_addr(self.wire.other);
            ethernet.set_src_addr(EthernetAddress(MAC));
            ethernet.set_ethertype(EthernetProtocol::Ipv4);
            ip.emit(&mut Ipv4Packet::new_unchecked(ethernet.payload_mut()), &checks);
            frame.extend(payload);
            self.wire.settle();
            self.wire.send(&frame);
        }
    }
}
