//! Runs one command in a guest and reports how the command and the machine ended.
//! [`super::streams`] carries the streams.
//!
//! This is the process that the user started. The machine is its child, whose serial output comes
//! through a pipe.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use guest_agent::{Launch, STREAM_PORT};

use super::streams::{Ended, Has, Outcome, Streams};
use super::{Error, console};
use vellum_sys::fork::Child;
use vellum_sys::poll::Poll;
use vellum_sys::socket;

/// How much of the console's end is kept.
const KEPT: usize = 64 << 10;
/// The time limit for connecting to the machine's socket, which exists already.
const BOOT_TIMEOUT: Duration = Duration::from_secs(30);
/// Exit statuses of the machine's process after a reset and after a panic.
const RESET: u8 = 10;
const PANIC: u8 = 11;

/// The machine's process and its connections.
pub struct Guest<'a> {
    /// Its process.
    pub child: Child,
    /// The output of the serial port.
    pub console: File,
    /// Reaches its end when the machine is ready or gone.
    pub ready: File,
    /// The unix socket that leads to the guest's vsock, if it has one.
    pub vsock: Option<&'a Path>,
    /// The other end of the console's port, if it has one.
    pub port: Option<UnixStream>,
}

/// Runs `launch` in `guest` with this process's standard streams. Returns how it ended, and why
/// output was lost, if any was.
///
/// # Errors
/// Fails if the host fails.
pub fn run(guest: Guest<'_>, launch: &Launch) -> Result<(Ended, Option<String>), Error> {
    let host = |what| move |error| Error::Host(what, error);
    let Guest { child, console, mut ready, vsock, port } = guest;
    let streams = own_streams(launch)?;
    let heard = Heard::of(console);
    ready.read_to_end(&mut Vec::new()).map_err(host("a pipe"))?;
    // If the machine ended, its socket is gone too.
    let outcome = connection(vsock, port).ok().and_then(|stream| {
        let line = serde_json::to_string(launch).ok()?;
        streams.converse(stream, &line).ok()
    });
    let Outcome { ended, unwritten } = outcome.unwrap_or_default();
    let status = child.wait().map_err(host("waitpid"))?;
    Ok((ended.unwrap_or_else(|| heard.of_machine(status)), unwritten))
}

/// This process's standard streams, for `launch`. Must come before any thread that would receive
/// their signals.
///
/// # Errors
/// Fails if the host fails.
pub fn own_streams(launch: &Launch) -> Result<Streams, Error> {
    let has = if launch.terminal.is_some() { Has::Terminal } else { Has::Streams };
    Streams::new(has).map_err(|error| Error::Host("signals", error))
}

/// Waits until `guest`, which waits for commands, is up, and calls `up`. Then waits for its end.
///
/// # Errors
/// Fails if the host fails, or `up` does.
pub fn wait_for_children<E: From<Error>>(
    guest: Guest<'_>,
    up: impl FnOnce() -> Result<(), E>,
) -> Result<(bool, Ended), E> {
    let host = |what| move |error| Error::Host(what, error);
    let Guest { child, console, mut ready, vsock, port } = guest;
    let heard = Heard::of(console);
    ready.read_to_end(&mut Vec::new()).map_err(host("a pipe"))?;
    let is_up = connection(vsock, port).is_ok();
    if is_up {
        up()?;
    }
    let status = child.wait().map_err(host("waitpid"))?;
    Ok((is_up, heard.of_machine(status)))
}

/// The end of the output of a machine's console.
pub struct Heard {
    kept: Arc<Mutex<Vec<u8>>>,
    listener: JoinHandle<()>,
}

impl Heard {
    /// Listens to `console` from now on.
    pub fn of(mut console: File) -> Self {
        let kept = Arc::<Mutex<Vec<u8>>>::default();
        let said = kept.clone();
        Self { kept, listener: thread::spawn(move || keep(&mut console, &said)) }
    }

    /// How the machine ended, whose process ended with `status`.
    pub fn of_machine(self, status: u8) -> Ended {
        // The console closed when the machine ended.
        let _ = self.listener.join();
        let console =
            String::from_utf8_lossy(&self.kept.lock().expect("no panic under this lock")).into_owned();
        let status = if status == RESET && console::has_panicked(&console) { PANIC } else { status };
        Ended::Machine { status, reason: console::cause(&console), console: console::tail(&console) }
    }
}

/// Keeps the end of the output of `console`.
fn keep(console: &mut impl Read, kept: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = console.read(&mut buffer) {
        let mut kept = kept.lock().expect("no panic under this lock");
        kept.extend(&buffer[..count]);
        let much = kept.len().saturating_sub(KEPT);
        kept.drain(..much);
    }
}

/// Waits for the guest to connect by vsock or port, whichever is first.
fn connection(vsock: Option<&Path>, port: Option<UnixStream>) -> io::Result<UnixStream> {
    let mut ways: Vec<UnixStream> = vsock.map(listen).transpose()?.into_iter().chain(port).collect();
    loop {
        let mut ready = Poll::default();
        ways.iter().for_each(|way| ready.readable(way));
        ready.wait(None)?;
        if let Some(at) = ways.iter().position(|way| ready.is_ready(way)) {
            let way = ways.remove(at);
            match is_greeted(&way) {
                Ok(true) => return Ok(way),
                other if ways.is_empty() => {
                    return Err(other.err().unwrap_or(io::ErrorKind::InvalidData.into()));
                }
                // This way ends with its machine, or closed because the guest chose the other way.
                _ => {}
            }
        }
    }
}

/// Waits for a guest's connection by vsock.
fn listen(vsock: &Path) -> io::Result<UnixStream> {
    let mut stream = socket::connect(vsock, BOOT_TIMEOUT)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.write_all(format!("LISTEN {STREAM_PORT}\n").as_bytes())?;
    Ok(stream)
}

/// Whether the first line is a greeting. Reads byte by byte, because the guest's data follows the
/// line.
fn is_greeted(mut stream: &UnixStream) -> io::Result<bool> {
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < 64 {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        greeting.push(byte[0]);
    }
    Ok(greeting.starts_with(b"OK "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_that_the_guest_takes_is_the_connection() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (other, gone) = UnixStream::pair().unwrap();
        drop(gone);
        theirs.write_all(&[guest_agent::GREETING, b"more"].concat()).unwrap();
        let mut found = connection(None, Some(ours)).unwrap();
        let mut more = [0; 4];
        found.read_exact(&mut more).unwrap();
        assert_eq!(&more, b"more");
        assert!(connection(None, Some(other)).is_err(), "the machine is gone");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[b'O'; 100]).unwrap();
        assert!(connection(None, Some(ours)).is_err(), "not a greeting");
    }

    #[test]
    fn a_status_file_tells_a_command_from_a_machine() {
        let text = |ended: &Ended| serde_json::to_string(ended).unwrap();
        assert_eq!(text(&Ended::Command { status: 11 }), r#"{"ended":"command","status":11}"#);
        let machine = Ended::Machine { status: 11, reason: "r".into(), console: "c".into() };
        assert_eq!(text(&machine), r#"{"ended":"machine","status":11,"reason":"r","console":"c"}"#);
    }
}
