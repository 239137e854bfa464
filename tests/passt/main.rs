//! A network interface with a real passt. The tests' own driver is the guest's side, with smoltcp
//! as its TCP/IP, so no KVM and no guest is needed. tests/linux tests it with Linux.

mod guest;
mod own;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;

use smoltcp::socket::tcp::State;
use support::env::TestEnv;
use support::guests::Code;
use support::hosts::kvm;
use support::{Failed, LIMIT, Need, Random, Tests, ensure, eventually, test, tools};
use vellum_devices::virtio::net::user::RESOLVER;

use guest::Guest;
use own::{GATEWAY, HOST};

support::vellum!();

/// The bytes that are sent in one piece.
const MUCH: usize = 64 << 20;
/// The guest's port that is forwarded to.
const PORT: u16 = 5000;

fn main() -> ExitCode {
    own::enter();
    Tests::from_args().run()
}

fn passt() -> Need {
    tools::program("passt")?;
    own::network()
}

/// A free port of the host.
fn free() -> Result<u16, Failed> {
    Ok(UdpSocket::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[test(passt())]
fn dhcp_gives_the_host_s_address_and_dns_a_resolver_on_loopback() -> Result<(), Failed> {
    let mut guest = Guest::new("user")?;
    let lease = guest.dhcp()?;
    ensure(lease.address == HOST && lease.router == Some(GATEWAY), || {
        format!("{}, {:?}", lease.address, lease.router)
    })?;
    let server = UdpSocket::bind((own::RESOLVER, 53))?;
    server.set_read_timeout(Some(LIMIT))?;
    let answer = Ipv4Addr::new(198, 51, 100, 7);
    let answers = thread::spawn(move || -> std::io::Result<Vec<u8>> {
        let mut query = [0; 512];
        let (len, from) = server.recv_from(&mut query)?;
        // The query again, as a response (RFC 1035, 4.1), with an address for the name at byte 12.
        let mut response = query[..len].to_vec();
        (response[2], response[3], response[7]) = (0x81, 0x80, 1);
        response.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        response.extend(answer.octets());
        server.send_to(&response, from)?;
        Ok(query[12..len].to_vec())
    });
    let found = guest.resolve("vellum.example", RESOLVER)?;
    ensure(found == [answer.into()], || format!("{found:?}"))?;
    let asked = answers.join().expect("it does not panic")?;
    ensure(asked.starts_with(b"\x06vellum\x07example\0"), || format!("{asked:?}"))
}

/// What the host sends first.
const FIRST: &[u8] = b"to the guest";

/// The guest's and the host's ends of a forwarded connection. The host has sent [`FIRST`], because
/// Debian 12's passt does not answer the guest's SYN-ACK until there is data.
fn connected(guest: &mut Guest, port: u16) -> Result<(smoltcp::iface::SocketHandle, TcpStream), Failed> {
    let handle = guest.listen(PORT)?;
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    (&stream).write_all(FIRST)?;
    guest.until("a connection", |guest| guest.tcp(handle).may_send().then_some(()))?;
    Ok((handle, stream))
}

#[test(passt())]
fn a_forward_leads_in_by_tcp() -> Result<(), Failed> {
    let (port, other) = (free()?, free()?);
    let mut guest = Guest::new(&format!("user,forward=[{port}:{PORT},{HOST}:{other}:{PORT}]"))?;
    guest.dhcp()?;
    let (handle, mut stream) = connected(&mut guest, port)?;
    let heard = guest.receive(handle)?;
    ensure(heard == FIRST, || format!("{heard:?}"))?;
    guest.send(handle, b"from the guest")?;
    guest.tcp(handle).close();
    let host = thread::spawn(move || {
        let mut said = String::new();
        stream.read_to_string(&mut said).map(|_| said)
    });
    guest.until("the host has all of it", |_| host.is_finished().then_some(()))?;
    let said = host.join().expect("it does not panic")?;
    ensure(said == "from the guest", || said)?;
    // At the given address and at no other.
    ensure(TcpStream::connect((HOST, port)).is_err(), || "the first forward is everywhere".into())?;
    ensure(TcpStream::connect(("127.0.0.1", other)).is_err(), || "the second forward is everywhere".into())?;
    TcpStream::connect((HOST, other))?;
    Ok(())
}

#[test(passt())]
fn a_forward_leads_in_by_udp() -> Result<(), Failed> {
    let port = free()?;
    // Without the gateway as the host's loopback, Debian 12's passt loses the guest's UDP answers
    // to senders on the host itself.
    let mut guest = Guest::new(&format!("user,host-loopback,forward=[udp:{port}:{PORT}]"))?;
    guest.dhcp()?;
    let handle = guest.udp(PORT)?;
    let client = UdpSocket::bind("127.0.0.1:0")?;
    client.set_nonblocking(true)?;
    client.send_to(b"to the guest", ("127.0.0.1", port))?;
    let sender = guest.until("a datagram", |guest| {
        let (data, about) = guest.udp_socket(handle).recv().ok()?;
        (data == b"to the guest").then_some(about.endpoint)
    })?;
    guest.udp_socket(handle).send_slice(b"from the guest", sender).map_err(|error| format!("{error:?}"))?;
    let mut heard = [0; 64];
    let len = guest.until("an answer", |_| client.recv(&mut heard).ok())?;
    ensure(heard[..len] == *b"from the guest", || format!("{:?}", &heard[..len]))
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes)
}

#[test(passt())]
fn sixty_four_mebibytes_go_through_each_way_unharmed() -> Result<(), Failed> {
    let mut random = Random::new();
    let bytes: Vec<u8> = (0..MUCH / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect();
    let sum = checksum(&bytes);
    let port = free()?;
    let mut guest = Guest::new(&format!("user,forward={port}:{PORT}"))?;
    guest.dhcp()?;
    let (handle, mut stream) = connected(&mut guest, port)?;
    let host = thread::spawn(move || -> std::io::Result<Vec<u8>> {
        stream.write_all(&bytes)?;
        let mut back = Vec::new();
        stream.read_to_end(&mut back).map(|_| back)
    });
    let mut heard = Vec::with_capacity(FIRST.len() + MUCH);
    while heard.len() < FIRST.len() + MUCH {
        let more = guest.receive(handle)?;
        ensure(!more.is_empty(), || format!("an end after {} bytes", heard.len()))?;
        heard.extend(more);
    }
    let heard = heard.split_off(FIRST.len());
    ensure(checksum(&heard) == sum, || "something else has come".into())?;
    guest.send(handle, &heard)?;
    guest.tcp(handle).close();
    guest.until("the host has all of it", |_| host.is_finished().then_some(()))?;
    let back = host.join().expect("it does not panic")?;
    ensure((back.len(), checksum(&back)) == (MUCH, sum), || format!("{} bytes have come back", back.len()))
}

/// Sockets on the host's loopback, which may be reached or not.
struct Loopback(TcpListener, UdpSocket);

impl Loopback {
    fn new() -> Result<Self, Failed> {
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        let udp = UdpSocket::bind(tcp.local_addr()?)?;
        tcp.set_nonblocking(true)?;
        udp.set_nonblocking(true)?;
        Ok(Self(tcp, udp))
    }

    fn port(&self) -> u16 {
        self.0.local_addr().expect("it is bound").port()
    }

    fn is_reached(&self) -> (bool, bool) {
        let nothing = |error: std::io::Error| error.kind() != ErrorKind::WouldBlock;
        let tcp = self.0.accept().map_or_else(nothing, |_| true);
        (tcp, self.1.recv(&mut [0; 16]).map_or_else(nothing, |_| true))
    }
}

#[test(passt())]
fn the_host_s_loopback_is_reached_where_that_was_asked_for_and_else_not() -> Result<(), Failed> {
    for asked in [true, false] {
        let there = Loopback::new()?;
        let mut guest = Guest::new(if asked { "user,host-loopback" } else { "user" })?;
        guest.dhcp()?;
        let datagrams = guest.udp(PORT)?;
        let to = (GATEWAY, there.port());
        guest.udp_socket(datagrams).send_slice(b"x", to).map_err(|error| format!("{error:?}"))?;
        if asked {
            guest.connect(GATEWAY, there.port())?.ok_or("the gateway refuses")?;
            let mut reached = (false, false);
            guest.until("a connection and a datagram", |_| {
                let now = there.is_reached();
                reached = (reached.0 | now.0, reached.1 | now.1);
                (reached == (true, true)).then_some(())
            })?;
            continue;
        }
        // A passt may not answer if it cannot connect.
        let connection = guest.begin_connect(GATEWAY, there.port())?;
        // Nor by loopback addresses. They are the guest's own, and a network stack would not send
        // them.
        for address in [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 1, 2, 3), Ipv4Addr::UNSPECIFIED] {
            guest.strays(address, there.port());
        }
        // passt handles frames in order. Everything before the answer to a second DHCP request has
        // had its effect.
        guest.dhcp()?;
        let (reached, state) = (there.is_reached(), guest.tcp(connection).state());
        ensure(reached == (false, false) && state != State::Established, || {
            format!("TCP and UDP: {reached:?}, {state}")
        })?;
    }
    Ok(())
}

/// The process ID of the passt with this port on its command line.
fn passt_of(port: u16) -> Result<Option<u32>, Failed> {
    let told = format!("127.0.0.1/{port}:{PORT}");
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let is_it = line.split(|byte| *byte == 0).any(|word| word == told.as_bytes());
        if is_it && support::env::process(pid).is_some_and(|name| name.starts_with("passt")) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

fn kill(pid: u32) -> Result<(), Failed> {
    let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status()?;
    ensure(killed.success(), || format!("kill {pid}"))
}

#[test(passt())]
fn a_passt_that_is_killed_takes_the_link_down() -> Result<(), Failed> {
    let port = free()?;
    let mut guest = Guest::new(&format!("user,forward={port}:{PORT}"))?;
    guest.dhcp()?;
    ensure(guest.wire.driver.config(6, 2) == [1, 0], || "the link is not up".into())?;
    kill(passt_of(port)?.ok_or("there is no passt")?)?;
    guest.until("the link goes down", |guest| (guest.wire.driver.config(6, 2) == [0, 0]).then_some(()))
}

/// passt ends with the interface.
#[test(passt())]
fn no_passt_is_left_behind() -> Result<(), Failed> {
    let port = free()?;
    let guest = Guest::new(&format!("user,forward={port}:{PORT}"))?;
    ensure(passt_of(port)?.is_some(), || "there is none".into())?;
    drop(guest);
    eventually(LIMIT, "passt ends", || Ok(passt_of(port)?.is_none().then_some(())))
}

#[test(passt())]
fn a_guest_that_moves_keeps_its_address_and_loses_its_connections() -> Result<(), Failed> {
    let (before, after) = (free()?, free()?);
    let mut guest = Guest::new(&format!("user,forward={before}:{PORT}"))?;
    let address = guest.dhcp()?.address;
    let (_, mut old) = connected(&mut guest, before)?;
    let mut guest = guest.moved_to(&format!("user,forward={after}:{PORT}"))?;
    // The passt that held it has ended with the old interface.
    let end = old.read(&mut [0; 16]);
    ensure(matches!(end, Ok(0) | Err(_)), || format!("{end:?}"))?;
    // The guest's address works before DHCP, and is the one that DHCP would assign.
    let (handle, _stream) = connected(&mut guest, after)?;
    let heard = guest.receive(handle)?;
    ensure(heard == FIRST, || format!("{heard:?}"))?;
    let again = guest.dhcp()?.address;
    ensure(again == address, || format!("{address}, and then {again}"))
}

/// A kernel that runs for ever, in a file below `env`.
fn spinning(env: &TestEnv) -> Result<PathBuf, Failed> {
    let kernel = env.path("kernel");
    std::fs::write(&kernel, Code::default().spin().elf64())?;
    Ok(kernel)
}

fn is_running(env: &TestEnv, name: &str) -> Result<bool, Failed> {
    let status: serde_json::Value = serde_json::from_str(&env.ctl(&format!("{name} status"))?)?;
    Ok(status["state"] == "running")
}

#[test(kvm(), passt())]
fn a_machine_outlives_its_passt_and_takes_it_along() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = spinning(&env)?;
    for killed in [true, false] {
        let port = free()?;
        let run = format!("run --forward {port}:{PORT} -k {}", kernel.display());
        let mut machine = env.start("p", &mut env.command(&run))?;
        let pid = passt_of(port)?.ok_or("there is no passt")?;
        // Kept until the machine has ended, because it may print more.
        let mut stderr = machine.child.stderr.take().map(BufReader::new).ok_or("no standard error")?;
        let mut said = String::new();
        if killed {
            kill(pid)?;
            // The machine must have noticed before it is stopped.
            stderr.read_line(&mut said)?;
            ensure(is_running(&env, "p")?, || "it does not run on".into())?;
        }
        env.ctl("p stop")?;
        machine.end()?;
        stderr.read_to_string(&mut said)?;
        ensure(said.contains("passt has ended") == killed, || said.clone())?;
        eventually(LIMIT, "passt ends", || Ok(passt_of(port)?.is_none().then_some(())))?;
    }
    Ok(())
}

#[test(kvm(), passt())]
fn a_machine_moves_to_a_passt_of_its_own() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, port) = (spinning(&env)?, free()?);
    let run = format!("run --net user --forward {port}:{PORT} -k {}", kernel.display());
    let machine = env.start("p", &mut env.command(&run))?;
    let old = passt_of(port)?.ok_or("there is no passt")?;
    let (address, other) = (format!("unix:{}", env.path("in").display()), free()?);
    let receive = format!("receive --listen {address} --net user --forward {other}:{PORT}");
    let there = env.start("q", &mut env.command(&receive))?;
    let output = env.vellum(&format!("migrate p --to {address}"))?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    machine.end()?;
    eventually(LIMIT, "the first passt ends", || Ok((support::env::process(old).is_none()).then_some(())))?;
    ensure(is_running(&env, "q")? && passt_of(other)?.is_some(), || "it does not run there".into())?;
    env.ctl("q stop")?;
    there.end()?;
    eventually(LIMIT, "passt ends", || Ok(passt_of(other)?.is_none().then_some(())))
}

/// Checks that `command` is refused with status 2 and one line that names `flag` and contains
/// `says`.
fn refused(command: &mut Command, flag: &str, says: &str) -> Result<(), Failed> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().count() == 1 && said.contains(flag) && said.contains(says);
    ensure(line && output.status.code() == Some(2), || format!("{flag}, {says}: {output:?}"))
}

#[test(kvm(), passt())]
fn a_port_in_use_is_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = spinning(&env)?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port();
    let run = format!("run --net user --forward {port}:80 -k {}", kernel.display());
    refused(&mut env.command(&run), "--net", &format!("127.0.0.1/{port}:80"))
}

#[test]
fn what_is_missing_is_named_with_the_remedy() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let run = |arguments: &str| env.command(&format!("run -k {VELLUM} {arguments}"));
    refused(&mut run("--net tap=x --forward 80:80"), "--forward", "--net user")?;
    refused(&mut run("--network mode=none --forward 80:80"), "--forward", "--net user")?;
    refused(&mut run("--net user --forward eighty:80"), "--forward", "HOSTPORT:GUESTPORT")?;
    refused(&mut run("--net user,hostloopback"), "--net", "did you mean 'host-loopback'")?;
    refused(&mut run("--net user,socket=/nonexistent"), "--net", "/nonexistent")
}

/// A host without passt, and one without a default route.
#[test(kvm(), passt())]
fn a_host_without_a_route_or_without_passt_says_so() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let run = format!("run --net user -k {}", spinning(&env)?.display());
    let mut alone = Command::new("unshare");
    alone.args(["-n", VELLUM]).args(run.split_whitespace());
    refused(&mut alone, "--net", "no default route")?;
    refused(env.command(&run).env("PATH", env.dir()), "--net", "apt install passt")
}
