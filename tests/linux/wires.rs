//! A network that a guest keeps while it migrates: a bridge of this machine, with a tap for each
//! side.

use std::io::{BufRead, BufReader, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use support::{Failed, LIMIT, Scratch, ensure, eventually};

use crate::guest::{Guest, host, scratch, short_name};

/// The addresses of host and guest.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 78, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(192, 168, 78, 2);
const MAC: &str = "02:00:00:00:78:02";
/// A closed port. A guest whose network works refuses a connection to it at once.
const CLOSED: u16 = 9;
/// How long one look takes at most.
const LOOK: Duration = Duration::from_millis(50);

/// Requires bridges on this machine.
pub fn bridges() -> Result<(), String> {
    scratch().and_then(|scratch| Wires::new(&scratch)).map(drop).map_err(|failed| {
        let why = failed.message().unwrap_or_default().to_owned();
        format!("needs a bridge with taps: modprobe bridge tun ({why})")
    })
}

/// A bridge with two taps: the target of a migration cannot use the source's tap.
pub struct Wires {
    bridge: String,
    taps: [String; 2],
}

impl Wires {
    pub fn new(scratch: &Scratch) -> Result<Self, Failed> {
        let name = short_name(scratch);
        let this = Self { bridge: format!("{name}b"), taps: [format!("{name}x"), format!("{name}y")] };
        let bridge = &this.bridge;
        host(&["ip", "link", "add", bridge, "type", "bridge"])
            .or_else(|_| host(&["brctl", "addbr", bridge]))?;
        for tap in &this.taps {
            host(&["ip", "tuntap", "add", tap, "mode", "tap"]).or_else(|_| host(&["tunctl", "-t", tap]))?;
            host(&["ip", "link", "set", tap, "master", bridge])
                .or_else(|_| host(&["brctl", "addif", bridge, tap]))?;
            host(&["ip", "link", "set", tap, "up"])?;
        }
        host(&["ip", "addr", "add", &format!("{HOST}/24"), "dev", bridge])?;
        host(&["ip", "link", "set", bridge, "up"])?;
        Ok(this)
    }

    /// The flags of the machine that the guest is in after this many moves.
    pub fn flags(&self, moves: usize) -> [String; 2] {
        ["--net".into(), format!("tap={},mac={MAC}", self.taps[moves % 2])]
    }

    /// Configures the guest's address.
    pub fn up(&self, guest: &Guest) -> Result<(), Failed> {
        guest.shell(&format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up")).map(drop)
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for tap in &self.taps {
            let _ = host(&["ip", "link", "del", tap]).or_else(|_| host(&["tunctl", "-d", tap]));
        }
        let _ = host(&["ip", "link", "set", &self.bridge, "down"]);
        let _ =
            host(&["ip", "link", "del", &self.bridge]).or_else(|_| host(&["brctl", "delbr", &self.bridge]));
    }
}

/// Probes the guest's network again and again, and measures the longest time without an answer.
pub struct Outage {
    over: Arc<AtomicBool>,
    asker: JoinHandle<(u64, Duration)>,
}

impl Outage {
    /// Starts once the guest answers.
    pub fn watch() -> Result<Self, Failed> {
        answers_soon()?;
        let over = Arc::new(AtomicBool::new(false));
        let done = over.clone();
        let asker = std::thread::spawn(move || {
            let (mut answered, mut longest, mut last) = (0, Duration::ZERO, Instant::now());
            while !done.load(Ordering::Relaxed) {
                if answers() {
                    (answered, longest) = (answered + 1, longest.max(last.elapsed()));
                    last = Instant::now();
                    // The guest should work, and not only answer.
                    std::thread::sleep(LOOK);
                }
            }
            (answered, longest)
        });
        Ok(Self { over, asker })
    }

    /// The longest time between two answers. The last answer comes now.
    pub fn longest(self) -> Result<Duration, Failed> {
        answers_soon()?;
        self.over.store(true, Ordering::Relaxed);
        let (answered, longest) = self.asker.join().map_err(|_| "who asks has panicked")?;
        ensure(answered > 0, || "the guest's network never answered".into())?;
        Ok(longest)
    }
}

/// Waits until the guest's network answers.
pub fn answers_soon() -> Result<(), Failed> {
    eventually(LIMIT, "the guest's network answers", || Ok(answers().then_some(())))
}

fn answers() -> bool {
    let answer = TcpStream::connect_timeout(&SocketAddr::from((GUEST, CLOSED)), LOOK);
    answer.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// A TCP connection on which the guest reports its uptime.
pub struct Reported {
    lines: BufReader<TcpStream>,
    last: f64,
}

impl Reported {
    /// The guest connects, and reports ten times a second.
    pub fn begin(guest: &Guest) -> Result<Self, Failed> {
        let listener = TcpListener::bind((HOST, 0))?;
        let port = listener.local_addr()?.port();
        guest.shell(&format!(
            "(while cat /proc/uptime; do usleep 100000; done | nc {HOST} {port}) > /dev/null 2>&1 &"
        ))?;
        let (stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Self { lines: BufReader::new(stream), last: 0.0 })
    }

    /// Reads reports until the guest was up for longer than `uptime` seconds, and checks that its
    /// clock never went back.
    pub fn past(&mut self, uptime: f64) -> Result<(), Failed> {
        while self.last <= uptime {
            let mut line = String::new();
            ensure(self.lines.read_line(&mut line)? > 0, || "the connection was closed".into())?;
            let now: f64 = line.split_whitespace().next().unwrap_or_default().parse()?;
            ensure(now >= self.last, || format!("its uptime went from {} back to {now}", self.last))?;
            self.last = now;
        }
        Ok(())
    }
}
