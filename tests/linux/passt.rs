//! A Linux guest on a passt network: an address by DHCP, and TCP through a forwarded port of the
//! host.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use support::{Failed, LIMIT, Need, ensure, eventually};

use crate::guest::{Guest, Image, host, noise, scratch};
use crate::{all_on_a_root, whole};

/// The port on which the guest listens, and its entry in /proc/net/tcp and tcp6: the port, then no
/// peer, and the state.
const PORT: u16 = 5000;
const LISTENING: [&str; 2] = [":1388 ", ":0000 0A "];
/// The bytes in each direction.
const BYTES: usize = 64 << 10;

/// Requires passt, and a root that passt can leave for an empty one, which an initramfs is not.
pub fn passt() -> Need {
    all_on_a_root()?;
    support::tools::program("passt")
}

/// The script that udhcpc runs for a lease. It configures the interface.
const LEASE: &str = "#!/bin/sh
[ $1 != bound ] || { ip addr add $ip/${mask:-24} dev $interface && ip route add default via $router; }
";

/// The guest gets the host's address by DHCP, as passt assigns it. A connection to the host's port
/// reaches the guest.
pub fn is_its_network(image: &Image) -> Result<(), Failed> {
    let scratch = scratch()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let forward = format!("{port}:{PORT}");
    let mut guest = Guest::start(image, "", &["--net", "user", "--forward", &forward])?;
    guest.ready()?;
    guest.shell(&format!(
        "printf %s '{LEASE}' > /tmp/lease && chmod +x /tmp/lease && ip link set eth0 up && udhcpc -i eth0 -f -n -q -s /tmp/lease 2>&1"
    ))?;
    let address = |text: &str| {
        text.split_once("inet ").map(|(_, rest)| rest.split(['/', ' ']).next().map(str::to_owned))
    };
    let ours = address(&host(&["ip", "-4", "addr", "show", "dev", "nowhere"])?);
    let theirs = address(&guest.shell("ip -4 addr show dev eth0")?);
    ensure(ours.is_some() && ours == theirs, || format!("{ours:?}, and the guest has {theirs:?}"))?;

    guest.shell(&format!(
        "head -c {BYTES} /dev/urandom > /tmp/sent; (nc -l -p {PORT} < /tmp/sent > /tmp/got; echo $? > /tmp/ended) > /dev/null 2>&1 &"
    ))?;
    eventually(LIMIT, "the guest listens", || {
        let sockets = guest.shell("cat /proc/net/tcp /proc/net/tcp6")?;
        Ok(sockets.lines().any(|line| LISTENING.iter().all(|part| line.contains(part))).then_some(()))
    })?;
    let sent = noise(23, BYTES);
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    // Sent first, because Debian 12's passt delays the guest's answer to the connection until there
    // is data.
    stream.write_all(&sent)?;
    let mut got = Vec::new();
    // The guest has sent everything and closed its side first.
    stream.read_to_end(&mut got)?;
    stream.shutdown(Shutdown::Both)?;
    let ended = eventually(LIMIT, "the guest's end is over", || {
        let ended = guest.shell("cat /tmp/ended 2>/dev/null; true")?;
        Ok((!ended.is_empty()).then_some(ended))
    })?;
    ensure(ended.trim() == "0", || format!("nc in the guest: {ended}"))?;
    ensure(got.len() == BYTES, || format!("the guest sent {} bytes of {BYTES}", got.len()))?;
    for (name, here) in [("got", sent), ("sent", got)] {
        let file = scratch.path(name);
        fs::write(&file, here)?;
        whole::is_read(&guest, &format!("/tmp/{name}"), &file)?;
    }
    guest.power_off()?.with(0).map(drop)
}
