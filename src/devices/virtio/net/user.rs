//! A network interface without a tap: passt, a process that turns the guest's connections into
//! sockets of this user. It needs no privileges and sandboxes itself (passt(1)).
//!
//! Frames go over a stream socket, each after its length in four big-endian bytes (passt(1),
//! `--fd`; QEMU's `-netdev stream`). They are complete: this side has no checksum or segmentation
//! offloads, and there is no virtio header.
//!
//! A partly received frame stays in the socket, so this side buffers none of it. A partly sent
//! frame is completed before the next one.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use rustix::thread::CapabilitySet;

use super::HEADER;
use vellum_kvm::memory::slices::Slices;
use vellum_sys::{identity, program, socket};

/// The size of the length before each frame.
const LENGTH: usize = 4;
/// The longest frame: a full IP packet, Ethernet and a VLAN tag.
pub(super) const MAX_FRAME: usize = 65535 + 18;
/// The shortest frame is an Ethernet header.
const MIN_FRAME: usize = 14;
/// The MTU announced by DHCP. Drivers without offloads have buffers for frames of this size.
const MTU: &str = "1500";
/// The guest's DNS resolver. passt forwards its queries to the host's own, wherever that listens.
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The configuration of a network without a tap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// Whether the guest reaches services on the host's loopback, through the gateway's address.
    pub host_loopback: bool,
    /// Ports of the host forwarded to the guest.
    pub forwards: Vec<Forward>,
    /// The socket of a running passt.
    pub socket: Option<PathBuf>,
}

/// A port of the host that is forwarded to the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// UDP instead of TCP.
    pub udp: bool,
    /// The host's address.
    pub address: IpAddr,
    /// The host's port.
    pub host: u16,
    /// The guest's port.
    pub guest: u16,
}

impl FromStr for Forward {
    type Err = &'static str;

    /// `[tcp:|udp:][ADDRESS:]HOSTPORT:GUESTPORT`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str =
            "[tcp:|udp:][ADDRESS:]HOSTPORT:GUESTPORT is expected, as in 8080:80 or udp:127.0.0.1:5353:53";
        let (udp, rest) = match text.split_once(':') {
            Some(("tcp", rest)) => (false, rest),
            Some(("udp", rest)) => (true, rest),
            _ => (false, text),
        };
        let (rest, guest) = rest.rsplit_once(':').ok_or(EXPECTED)?;
        let (address, host) =
            rest.rsplit_once(':').map_or((None, rest), |(address, host)| (Some(address), host));
        let address = match address {
            None => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(address) => {
                let bare =
                    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
                bare.parse().map_err(|_| EXPECTED)?
            }
        };
        let port = |text: &str| text.parse().ok().filter(|port| *port > 0).ok_or(EXPECTED);
        Ok(Self { udp, address, host: port(host)?, guest: port(guest)? })
    }
}

/// Why there is no such network.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// passt is not installed.
    #[error("passt is not installed: on Debian and Ubuntu it is in the package passt (apt install passt)")]
    Missing,
    /// passt has no source for the guest's addresses.
    #[error(
        "this host has no default route: `ip route` shows no line that begins with `default`; passt takes the guest's addresses from its interface"
    )]
    NoRoute,
    /// It does not start.
    #[error("passt does not start: {0}")]
    Refused(String),
    /// A forwarded port cannot be bound.
    #[error("{0}: a port in use? `ss -lntu` lists them; ports below 1024 are root's")]
    Port(String),
    /// The named socket cannot be used.
    #[error("{}: {source}; `passt --socket PATH` listens at one", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The host refuses a socket pair.
    #[error("a pair of sockets: {0}")]
    Host(#[from] io::Error),
}

/// The result of moving a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// It was moved. Holds the number of bytes written to the guest.
    Whole(usize),
    /// It cannot be moved now.
    Later,
    /// The peer is gone.
    Gone,
}

/// Checks that another user cannot see the guest's traffic: this user or root listens at `path`, or
/// has made the socket. A passt that root starts listens as nobody.
fn is_trusted(path: &Path, socket: &UnixStream) -> io::Result<()> {
    let trusted = [0, identity::effective().0];
    let uid = socket::peer_uid(socket)?;
    let maker = std::fs::symlink_metadata(path)?;
    match trusted.contains(&uid) || maker.file_type().is_socket() && trusted.contains(&maker.uid()) {
        true => Ok(()),
        false => {
            Err(io::Error::other(format!("user {uid} listens there, and would see the guest's traffic")))
        }
    }
}

/// The stream to passt.
pub struct Stream {
    socket: Option<OwnedFd>,
    /// Whether the guest may send to the host's loopback.
    host_loopback: bool,
    /// The last frame, and how many of its bytes the socket has taken.
    frame: Vec<u8>,
    taken: usize,
    /// Whether another process has the socket too, and whether it had it before this one.
    lent: bool,
    taken_over: bool,
}

impl Stream {
    /// Starts passt, or connects to a running one.
    ///
    /// # Errors
    /// What is missing, and what would help.
    pub fn open(user: &User) -> Result<Self, Error> {
        let socket = match &user.socket {
            Some(path) => socket::connect(path, std::time::Duration::from_secs(5))
                .and_then(|socket| is_trusted(path, &socket).map(|()| socket))
                .map_err(|source| Error::Socket { path: path.clone(), source })?,
            None => start(user)?,
        };
        socket.set_nonblocking(true)?;
        Ok(Self::on(socket.into(), user.host_loopback))
    }

    /// A stream on a connected, non-blocking socket.
    pub fn on(socket: OwnedFd, host_loopback: bool) -> Self {
        let (frame, taken, lent, taken_over) = (Vec::new(), 0, false, false);
        Self { socket: Some(socket), host_loopback, frame, taken, lent, taken_over }
    }

    /// The same on a socket that another process has used.
    pub(super) fn take_over(socket: OwnedFd, host_loopback: bool) -> Self {
        Self { taken_over: true, ..Self::on(socket, host_loopback) }
    }

    /// What the socket has not taken of the last frame, for the process that takes it over.
    pub(super) fn rest(&self) -> &[u8] {
        if self.lent { &self.frame[self.taken..] } else { &[] }
    }

    /// Continues the last frame of the process whose socket this is. Another socket knows nothing of
    /// that frame.
    pub(super) fn go_on(&mut self, rest: Vec<u8>) {
        if self.taken_over {
            (self.frame, self.taken) = (rest, 0);
        }
    }

    /// The socket, unless the peer is gone.
    pub fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Closes the socket. The event loop must no longer watch it.
    pub(super) fn close(&mut self) {
        self.socket = None;
    }

    /// Duplicates the socket for a process that takes it over. The state has the [rest] of a frame
    /// that is half sent by then.
    ///
    /// [rest]: Self::rest
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn lend(&mut self) -> io::Result<Option<OwnedFd>> {
        self.lent = true;
        self.socket.as_ref().map(OwnedFd::try_clone).transpose()
    }

    /// Sends the rest of the last frame.
    pub(super) fn flush(&mut self) -> Moved {
        let Some(socket) = &self.socket else { return Moved::Gone };
        while self.taken < self.frame.len() {
            match socket::send_some(socket, &self.frame[self.taken..]) {
                Ok(count) => self.taken += count,
                Err(error) => return not_now(&error),
            }
        }
        Moved::Whole(0)
    }

    /// Sends a guest's packet without its virtio header. A packet of an invalid length is dropped.
    /// So is one to the host's loopback, if the guest may not reach that.
    pub(super) fn send(&mut self, packet: &mut Slices<'_>) -> Moved {
        match self.flush() {
            Moved::Whole(_) => {}
            other => return other,
        }
        let len = packet.left().saturating_sub(HEADER);
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            return Moved::Whole(0);
        }
        packet.skip(HEADER);
        self.frame.resize(LENGTH + len, 0);
        self.frame[..LENGTH].copy_from_slice(&(len as u32).to_be_bytes());
        packet.read(&mut self.frame[LENGTH..]);
        if !self.host_loopback && is_to_loopback(&self.frame[LENGTH..]) {
            self.taken = self.frame.len();
            return Moved::Whole(0);
        }
        self.begin()
    }

    /// Sends a frame made by this side.
    pub(super) fn send_own(&mut self, frame: &[u8]) -> Moved {
        match self.flush() {
            Moved::Whole(_) => {
                self.frame.clear();
                self.frame.extend((frame.len() as u32).to_be_bytes());
                self.frame.extend(frame);
                self.begin()
            }
            other => other,
        }
    }

    /// Starts to send the composed frame. It is sent to its end as the socket takes it, or not at
    /// all.
    fn begin(&mut self) -> Moved {
        self.taken = self.frame.len();
        let Some(socket) = &self.socket else { return Moved::Gone };
        match socket::send_some(socket, &self.frame) {
            Ok(count) => {
                self.taken = count;
                Moved::Whole(0)
            }
            Err(error) => not_now(&error),
        }
    }

    /// Reads the next frame into a guest's buffers, after the header. A frame that does not fit is
    /// dropped, as on any network.
    pub(super) fn receive(&mut self, to: &mut Slices<'_>) -> Moved {
        loop {
            let Some(socket) = &self.socket else { return Moved::Gone };
            let mut length = [0; LENGTH];
            let len = match socket::peek(socket, &mut length) {
                Ok(0) => return Moved::Gone,
                Ok(LENGTH) => u32::from_be_bytes(length) as usize,
                Ok(_) => return Moved::Later,
                Err(error) => return not_now(&error),
            };
            if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
                // After an invalid length, frame boundaries are lost.
                tracing::warn!("passt: a frame of {len} bytes: the stream is broken");
                return Moved::Gone;
            }
            match rustix::io::ioctl_fionread(socket) {
                Ok(queued) if queued < (LENGTH + len) as u64 => return Moved::Later,
                Ok(_) => {}
                Err(error) => return not_now(&error.into()),
            }
            // The whole frame has arrived, so the reads below do not block.
            if !discard(socket, LENGTH) {
                return Moved::Gone;
            }
            if to.left() < len {
                tracing::debug!("passt: a frame of {len} bytes is longer than the guest's buffer");
                if !discard(socket, len) {
                    return Moved::Gone;
                }
                continue;
            }
            let mut left = len;
            while left > 0 {
                match to.readv(socket, left) {
                    Ok(count) if count > 0 => left -= count,
                    _ => return Moved::Gone,
                }
            }
            return Moved::Whole(len);
        }
    }
}

/// Whether a frame is addressed to the host's loopback. passt before 2023-11 connects to whatever
/// address a guest names.
fn is_to_loopback(frame: &[u8]) -> bool {
    let (Some(ethertype), Some(packet)) = (frame.get(12..14), frame.get(14..)) else { return false };
    match ethertype {
        // The destination is at byte 16 (RFC 791, 3.1). 0.0.0.0/8 is this host too.
        [0x08, 0x00] => packet.get(16).is_some_and(|first| matches!(first, 0 | 127)),
        // The destination is at byte 24 (RFC 8200, 3): `::`, `::1`, and embedded IPv4 addresses.
        [0x86, 0xdd] => packet.get(24..34).is_some_and(|start| start.iter().all(|byte| *byte == 0)),
        _ => false,
    }
}

fn not_now(error: &io::Error) -> Moved {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Moved::Later,
        _ => Moved::Gone,
    }
}

/// Discards `count` bytes that have arrived.
fn discard(socket: &OwnedFd, count: usize) -> bool {
    let mut buffer = [0; 4096];
    let mut left = count;
    while left > 0 {
        let part = left.min(buffer.len());
        match socket::receive_some(socket, &mut buffer[..part]) {
            Ok(count) if count > 0 => left -= count,
            _ => return false,
        }
    }
    true
}

/// The root capabilities that passt needs: to become nobody, to isolate itself from the host's
/// files and processes, and to forward low ports.
const NEEDED: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// Checks that this host can have such a network.
///
/// # Errors
/// passt is not installed, or there is no default route.
pub fn check() -> Result<(), Error> {
    match program::is_installed("passt") {
        false => Err(Error::Missing),
        true if !has_route() => Err(Error::NoRoute),
        true => Ok(()),
    }
}

fn has_route() -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    has_default(&read("/proc/net/route"), &read("/proc/net/ipv6_route"))
}

/// Starts passt at the other end of the returned socket. passt is ready when this returns, and ends
/// with the socket.
fn start(user: &User) -> Result<UnixStream, Error> {
    if !has_route() {
        return Err(Error::NoRoute);
    }
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new("passt");
    command.arg("--fd").arg(theirs.as_raw_fd().to_string()).args(arguments(user));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    program::detached_with(&mut command, vec![theirs.as_raw_fd()]);
    program::limited_to(&mut command, NEEDED);
    // passt goes to the background when it is ready. Then this command ends.
    let ended = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Missing,
        _ => Error::Refused(error.to_string()),
    })?;
    if ended.status.success() {
        return Ok(ours);
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    // passt's last line is the reason, unless it is about the host's syslog. Earlier lines report
    // its configuration.
    let mut lines = said.lines().rev().map(str::trim);
    let last = lines.find(|line| !line.is_empty() && !line.ends_with("to syslog"));
    let last =
        last.map_or_else(|| ended.status.to_string(), |line| line.trim_end_matches(", exiting").to_owned());
    Err(if last.contains("bind any port") { Error::Port(last) } else { Error::Refused(last) })
}

/// passt's arguments, apart from its socket.
///
/// `--dns` is not used: with it, passt before 2023-11 ignores the host's own resolver. passt does
/// not announce a resolver on loopback by DHCP.
fn arguments(user: &User) -> Vec<String> {
    let resolver = RESOLVER.to_string();
    let mut arguments: Vec<String> =
        ["--quiet", "--mtu", MTU, "--dns-forward", &resolver].map(str::to_owned).into();
    if !user.host_loopback {
        arguments.push("--no-map-gw".into());
    }
    for (flag, udp) in [("--tcp-ports", false), ("--udp-ports", true)] {
        let mut forwards = user.forwards.iter().filter(|forward| forward.udp == udp).peekable();
        if forwards.peek().is_none() {
            arguments.extend([flag.to_owned(), "none".to_owned()]);
        }
        for Forward { address, host, guest, .. } in forwards {
            arguments.extend([flag.to_owned(), format!("{address}/{host}:{guest}")]);
        }
    }
    arguments
}

/// Whether the host has a default route (Documentation/networking/proc_net: /proc/net/route has
/// destination and mask in hexadecimal, ipv6_route the destination and its length).
fn has_default(v4: &str, v6: &str) -> bool {
    let four = v4.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut four = four.filter(|fields| fields.len() > 7);
    let mut six = v6.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    four.any(|fields| zero(fields[1]) && zero(fields[7]))
        || six.any(|fields| fields.len() > 9 && zero(fields[0]) && fields[1] == "00" && fields[9] != "lo")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The uid of one thread alone changes, and its listener has it.
    #[test]
    fn nobody_else_gets_the_traffic() {
        if identity::effective().0 != 0 {
            return eprintln!("skipped: only root can listen as another user");
        }
        const OTHER: u32 = 12345;
        let path = std::env::temp_dir().join(format!("vellum-passt-{}", std::process::id()));
        let own = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_trusted(&path, &UnixStream::connect(&path).unwrap()).is_ok());
        drop(own);
        fs::remove_file(&path).unwrap();
        let at = path.clone();
        let listen = move || {
            // SAFETY: setresuid(2) as a system call changes this thread alone.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, OTHER, OTHER, OTHER) };
            assert_eq!(changed, 0);
            std::os::unix::net::UnixListener::bind(&at).unwrap()
        };
        let theirs = std::thread::spawn(listen).join().unwrap();
        let refused = is_trusted(&path, &UnixStream::connect(&path).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("user 12345 listens there"), "{refused}");
        drop(theirs);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn forwards_are_read_as_they_are_written() {
        let read = |text: &str| {
            text.parse::<Forward>().ok().map(|f| (f.udp, f.address.to_string(), f.host, f.guest))
        };
        let local = "127.0.0.1".to_owned();
        assert_eq!(read("8080:80"), Some((false, local.clone(), 8080, 80)));
        assert_eq!(read("tcp:8080:80"), read("8080:80"));
        assert_eq!(read("udp:53:5353"), Some((true, local, 53, 5353)));
        assert_eq!(read("0.0.0.0:22:22"), Some((false, "0.0.0.0".into(), 22, 22)));
        assert_eq!(read("udp:[::1]:1:2"), Some((true, "::1".into(), 1, 2)));
        for bad in
            ["", "80", "sctp:1:2", "a:b", "1:2:3:4", "0:80", "80:0", "70000:80", "tcp:80", "host:1:2", "1:"]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn passt_is_told_what_was_asked_for() {
        let user = User {
            forwards: vec!["8080:80".parse().unwrap(), "udp:0.0.0.0:5:6".parse().unwrap()],
            ..User::default()
        };
        let told = arguments(&user).join(" ");
        assert!(
            told.contains("--tcp-ports 127.0.0.1/8080:80") && told.contains("--udp-ports 0.0.0.0/5:6"),
            "{told}"
        );
        assert!(told.contains("--no-map-gw"), "{told}");
        let told = arguments(&User { host_loopback: true, ..User::default() }).join(" ");
        assert!(
            told.contains("--tcp-ports none --udp-ports none") && !told.contains("--no-map-gw"),
            "{told}"
        );
        assert!(told.contains("--dns-forward 169.254.1.1"), "{told}");
    }

    #[test]
    fn frames_to_a_loopback_are_known() {
        let v4 = |to: [u8; 4]| [&[0; 12][..], &[8, 0], &[0x45; 16], &to, b"data"].concat();
        let v6 = |to: &str| {
            let to: std::net::Ipv6Addr = to.parse().unwrap();
            [&[0; 12][..], &[0x86, 0xdd], &[0x60; 24], &to.octets()].concat()
        };
        for inside in [v4([127, 0, 0, 1]), v4([127, 9, 9, 9]), v4([0; 4])] {
            assert!(is_to_loopback(&inside));
        }
        for inside in ["::", "::1", "::ffff:127.0.0.1", "::127.0.0.1"] {
            assert!(is_to_loopback(&v6(inside)), "{inside}");
        }
        for outside in
            [v4([192, 0, 2, 1]), v4([255; 4]), v6("fe80::1"), v6("64:ff9b::7f00:1"), vec![], vec![8; 14]]
        {
            assert!(!is_to_loopback(&outside), "{outside:?}");
        }
        // An ARP request that happens to have zeros there.
        assert!(!is_to_loopback(&[&[0xff; 12][..], &[8, 6], &[0; 28]].concat()));
    }

    /// The socket is full in the middle of a frame when another process takes it over. The frame
    /// goes on there. On any other socket it would be no frame.
    #[test]
    fn a_frame_that_is_half_sent_goes_on_in_the_next_process() {
        let (mut wire, ours) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut stream = Stream::on(ours.into(), false);
        let socket = stream.lend().unwrap().unwrap();
        let frame: Vec<u8> = (0..60_000).map(|at| (at % 251) as u8).collect();
        let one = [&60_000u32.to_be_bytes()[..], &frame].concat();
        let (mut sent, mut heard) = (0, Vec::<u8>::new());
        let mut hear = |heard: &mut Vec<u8>| {
            let mut part = [0; 10_000];
            let len = io::Read::read(&mut wire, &mut part).unwrap();
            heard.extend_from_slice(&part[..len]);
        };
        // Until the socket has taken a part of a frame.
        while stream.rest().is_empty() {
            match stream.send_own(&frame) {
                Moved::Whole(_) => sent += 1,
                _ => hear(&mut heard),
            }
            assert!(sent < 1000);
        }
        let rest = stream.rest().to_vec();
        let mut other = Stream::on(socket.try_clone().unwrap(), false);
        other.go_on(rest.clone());
        assert!(other.frame.is_empty());
        let mut next = Stream::take_over(socket, false);
        next.go_on(rest);
        loop {
            hear(&mut heard);
            if next.send_own(&frame) == Moved::Whole(0) {
                break;
            }
        }
        while next.flush() == Moved::Later || heard.len() < (sent + 1) * one.len() {
            hear(&mut heard);
        }
        assert!(heard.chunks(one.len()).all(|frame: &[u8]| frame == one), "a frame is cut");
    }

    #[test]
    fn a_default_route_is_one_to_anywhere() {
        const HEAD: &str =
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let v4 = |line: &str| format!("{HEAD}{line}\n");
        assert!(has_default(&v4("eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"), ""));
        assert!(!has_default(&v4("eth0\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"), ""));
        let v6 = |device: &str| {
            format!("{z} 00 {z} 00 {z} 00000400 00000001 00000000 00000003 {device}\n", z = "0".repeat(32))
        };
        assert!(has_default(HEAD, &v6("eth0")) && !has_default(HEAD, &v6("lo")) && !has_default("", ""));
    }
}
