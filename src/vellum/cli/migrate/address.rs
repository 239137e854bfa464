//! The address of a target and the connection to it: a socket, or a process that leads there by its
//! standard input and output. [`relay`] is the other end of such a process.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;

use crate::cli::failure::Failure;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::link::LIVENESS;
use vellum_report::output::allow_broken_pipe;
use vellum_sys::socket;

/// The address of a target, as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `unix:PATH`
    Unix(PathBuf),
    /// `tcp:HOST:PORT`
    Tcp(String),
    /// `ssh:[USER@]HOST:NAME`: the host, and the machine's name there.
    Ssh(String, String),
    /// `exec:COMMAND`
    Exec(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", address)) if address.contains(':') => Ok(Self::Tcp(address.into())),
            Some(("ssh", rest)) => match rest.rsplit_once(':') {
                // ssh would read a host with a leading hyphen as an option.
                Some((host, name)) if !host.is_empty() && !host.starts_with('-') && !name.is_empty() => {
                    Ok(Self::Ssh(host.into(), name.into()))
                }
                _ => Err("use ssh:[USER@]HOST:NAME, the name being that of `vellum receive` there".into()),
            },
            Some(("exec", command)) if !command.is_empty() => Ok(Self::Exec(command.into())),
            _ => Err("use unix:PATH, tcp:HOST:PORT, ssh:[USER@]HOST:NAME or exec:COMMAND".into()),
        }
    }
}

/// The reason that guest memory must not go to `address` unencrypted, unless the address is on
/// loopback.
pub(crate) fn off_loopback(address: &SocketAddr) -> Option<String> {
    let ip = match address.ip() {
        IpAddr::V6(ip) => ip.to_canonical(),
        ip => ip,
    };
    (!ip.is_loopback()).then(|| {
        format!(
            "{ip} is not on loopback, and memory would go there in the clear; ssh:HOST:NAME is encrypted, \
             --insecure-network allows it nonetheless"
        )
    })
}

/// A connection to the target, and the process that leads there if there is one.
pub struct Connection {
    /// The socket, for the machine.
    pub socket: OwnedFd,
    child: Option<Child>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // The process ends with its connection. Killing it makes sure that it is not left
            // behind.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Connects to `target`. An unencrypted connection is refused unless it stays on loopback or
/// `insecure` is set.
///
/// # Errors
/// No target listens there, or the connection is refused.
pub fn connect(target: &Target, insecure: bool) -> Result<Connection, Failure> {
    let plain = |socket: OwnedFd| Connection { socket, child: None };
    match target {
        Target::Unix(path) => {
            let stream = socket::connect(path, LIVENESS);
            let stream = stream.map_err(|e| unreachable(&format!("unix:{}", path.display()), &e))?;
            stream.set_write_timeout(None).map_err(Failure::host)?;
            stream.set_read_timeout(None).map_err(Failure::host)?;
            Ok(plain(stream.into()))
        }
        Target::Tcp(address) => {
            let name = format!("tcp:{address}");
            let resolved =
                address.to_socket_addrs().map_err(|error| Failure::usage(format!("--to {name}: {error}")))?;
            let mut last = io::Error::other("no such host");
            for address in resolved {
                if !insecure && let Some(why) = off_loopback(&address) {
                    return Err(Failure::usage(format!("--to {name}: {why}")));
                }
                match TcpStream::connect_timeout(&address, LIVENESS) {
                    Ok(stream) => return Ok(plain(stream.into())),
                    Err(error) => last = error,
                }
            }
            Err(unreachable(&name, &last))
        }
        Target::Ssh(host, name) => {
            let mut command = Command::new("ssh");
            command.args(["-T", host, "vellum", "receive", "--relay", name]);
            spawn(command)
        }
        Target::Exec(line) => {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", line]);
            spawn(command)
        }
    }
}

fn unreachable(address: &str, error: &io::Error) -> Failure {
    let message = format!("--to {address}: {error}; is `vellum receive` waiting there?");
    Failure::ended(Exit::Error, message)
}

/// Starts a process that leads to the target by its standard input and output.
fn spawn(mut command: Command) -> Result<Connection, Failure> {
    let (mine, theirs) = UnixStream::pair().map_err(Failure::host)?;
    let input: OwnedFd = theirs.try_clone().map_err(Failure::host)?.into();
    command.stdin(Stdio::from(input)).stdout(Stdio::from(OwnedFd::from(theirs)));
    let named = command.get_program().to_string_lossy().into_owned();
    let child = command.spawn().map_err(|error| Failure::host(format!("{named}: {error}")))?;
    Ok(Connection { socket: mine.into(), child: Some(child) })
}

/// `vellum receive --relay`: copies bytes between standard input and output and the machine that
/// waits at `path`.
pub fn relay(path: &Path) -> Result<Exit, Failure> {
    let stream = socket::connect(path, LIVENESS);
    let stream = stream.map_err(|error| Failure::host(format!("--relay {}: {error}", path.display())))?;
    stream.set_write_timeout(None).map_err(Failure::host)?;
    stream.set_read_timeout(None).map_err(Failure::host)?;
    let back = stream.try_clone().map_err(Failure::host)?;
    let there = std::thread::spawn(move || {
        carry(io::stdin().lock(), &stream, || drop(stream.shutdown(Shutdown::Write)))
    });
    let carried = allow_broken_pipe(carry(&back, io::stdout().lock(), || ()));
    // The peer is gone, so further input has no reader.
    drop(there);
    carried.map_err(|error| Failure::host(format!("standard output: {error}")))?;
    Ok(Exit::PowerOff)
}

/// Copies bytes until one side ends, then calls `end`. Returns the error of a failed write.
fn carry(mut from: impl Read, mut to: impl Write, end: impl FnOnce()) -> io::Result<()> {
    let mut buffer = vec![0; 256 << 10];
    let mut carried = Ok(());
    while carried.is_ok()
        && let Ok(count @ 1..) = from.read(&mut buffer)
    {
        carried = to.write_all(&buffer[..count]).and_then(|()| to.flush());
    }
    end();
    carried
}
