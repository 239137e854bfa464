//! The user's end of a command in a guest: its standard streams, and how it and its machine ended.
//!
//! This is the process that the user started; the machine is a child of it, whose serial port's output comes through a pipe.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use guest_agent::{Launch, STREAM_PORT, frame};
use serde::Serialize;

use super::{Error, console};
use crate::sys::fork::Child;
use crate::sys::socket;

/// How much of the console is kept: the last of it.
const KEPT: usize = 64 << 10;
/// How long the machine's socket, on which it listens already, may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// What a machine's process ends with after a reset, and after a panic.
const RESET: u8 = 10;
const PANIC: u8 = 11;

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "ended", rename_all = "kebab-case")]
pub enum Ended {
    /// The command, with this status, or with 128 and its signal.
    Command {
        /// The status.
        status: u8,
    },
    /// The command could not be started.
    NotStarted {
        /// Why.
        reason: String,
    },
    /// The machine, before the command.
    Machine {
        /// The status of the machine's process.
        status: u8,
        /// What is likely to have brought it about.
        reason: String,
        /// The last lines of its console.
        console: String,
    },
}

/// The machine's side: its process, its console, the word that it is ready, and its vsock.
pub struct Guest<'a> {
    /// Its process.
    pub child: Child,
    /// Its serial port's output.
    pub console: File,
    /// At its end when the machine is ready, or gone.
    pub ready: File,
    /// The unix socket that leads to its vsock.
    pub vsock: &'a Path,
}

/// Has `guest` run what `launch` says, with this process's standard streams.
///
/// # Errors
/// Where the host fails.
pub fn run(guest: Guest<'_>, launch: &Launch) -> Result<Ended, Error> {
    let host = |what| move |error| Error::Host(what, error);
    let Guest { child, mut console, mut ready, vsock } = guest;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let said = heard.clone();
    let listener = thread::spawn(move || keep(&mut console, &said));
    ready.read_to_end(&mut Vec::new()).map_err(host("a pipe"))?;
    // A machine that is not there any more has no socket either.
    let end = listen(vsock).ok().and_then(|stream| converse(stream, launch).ok().flatten());
    let status = child.wait().map_err(host("waitpid"))?;
    // Its end has closed the pipe.
    let _ = listener.join();
    if let Some(end) = end {
        return Ok(end);
    }
    let console = String::from_utf8_lossy(&heard.lock().expect("nobody panics with it")).into_owned();
    let status = if status == RESET && console::has_panicked(&console) { PANIC } else { status };
    Ok(Ended::Machine { status, reason: console::cause(&console), console: console::tail(&console) })
}

/// Keeps the last of what comes from `console`.
fn keep(console: &mut impl Read, kept: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = console.read(&mut buffer) {
        let mut kept = kept.lock().expect("nobody panics with it");
        kept.extend(&buffer[..count]);
        let much = kept.len().saturating_sub(KEPT);
        kept.drain(..much);
    }
}

/// The connection that the guest makes when it is up.
fn listen(vsock: &Path) -> io::Result<UnixStream> {
    let mut stream = socket::connect(vsock, PATIENCE)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.write_all(format!("LISTEN {STREAM_PORT}\n").as_bytes())?;
    // Byte by byte: what follows the line is the guest's.
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < 64 {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        greeting.push(byte[0]);
    }
    match greeting.starts_with(b"OK ") {
        true => Ok(stream),
        false => Err(io::Error::other("no greeting")),
    }
}

/// Sends standard input, and writes what comes, until the command has ended; `None` where the guest is gone before.
fn converse(stream: UnixStream, launch: &Launch) -> io::Result<Option<Ended>> {
    let line = serde_json::to_string(launch)?;
    (&stream).write_all(format!("{line}\n").as_bytes())?;
    let to_guest = Arc::new(Mutex::new(stream.try_clone()?));
    let sends = to_guest.clone();
    // Ends with the process where nobody closes standard input.
    thread::spawn(move || send_input(&mut io::stdin().lock(), &sends));
    let mut input = BufReader::new(&stream);
    let end = receive(&mut input, &mut io::stdout(), &mut io::stderr(), &to_guest)?;
    // By which the guest knows that its end was heard.
    let _ = stream.shutdown(Shutdown::Both);
    Ok(end)
}

fn send_input(input: &mut impl BufRead, to: &Mutex<impl Write>) {
    loop {
        let count = match input.fill_buf() {
            Ok(data) => {
                let piece = &data[..data.len().min(frame::MAX)];
                let sent = frame::write(&mut *to.lock().expect("nobody panics with it"), frame::INPUT, piece);
                if sent.is_err() {
                    return;
                }
                piece.len()
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // As a command that reads a closed standard input sees it.
            Err(_) => {
                let _ = frame::write(&mut *to.lock().expect("nobody panics with it"), frame::INPUT, &[]);
                return;
            }
        };
        if count == 0 {
            return;
        }
        input.consume(count);
    }
}

/// Writes what comes from the guest; how the command ended.
fn receive(
    from: &mut impl Read,
    stdout: &mut impl Write,
    stderr: &mut impl Write,
    to_guest: &Mutex<impl Write + Send + 'static>,
) -> io::Result<Option<Ended>> {
    let mut data = Vec::new();
    let mut closed = Vec::new();
    while let Some(kind) = frame::read(from, &mut data)? {
        let to: &mut dyn Write = match (kind, &data[..]) {
            (frame::OUTPUT, _) => stdout,
            (frame::ERRORS, _) => stderr,
            (frame::EXIT, &[a, b, c, d]) => {
                let status = i32::from_le_bytes([a, b, c, d]).clamp(0, 255) as u8;
                return Ok(Some(Ended::Command { status }));
            }
            (frame::FAILED, why) => {
                let reason = String::from_utf8_lossy(why).into_owned();
                return Ok(Some(Ended::NotStarted { reason }));
            }
            _ => return Err(io::Error::other("a guest that speaks otherwise")),
        };
        if !closed.contains(&kind) && to.write_all(&data).and_then(|()| to.flush()).is_err() {
            // Nobody reads it any more, as behind `| head`: the command is to see the same.
            closed.push(kind);
            frame::write(&mut *to_guest.lock().expect("nobody panics with it"), frame::CLOSED, &[kind])?;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader of whom nothing is left.
    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn pieces(pieces: &[(u8, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        pieces.iter().for_each(|(kind, data)| frame::write(&mut bytes, *kind, data).unwrap());
        bytes
    }

    #[test]
    fn outputs_come_apart_and_the_status_last() {
        let said =
            pieces(&[(frame::OUTPUT, b"a\0"), (frame::ERRORS, b"\xff"), (frame::EXIT, &7i32.to_le_bytes())]);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let back = Mutex::new(Vec::new());
        let end = receive(&mut &said[..], &mut out, &mut err, &back).unwrap();
        assert_eq!(
            (end, &out[..], &err[..]),
            (Some(Ended::Command { status: 7 }), &b"a\0"[..], &b"\xff"[..])
        );
        assert!(back.lock().unwrap().is_empty());
        let cut = receive(&mut &said[..7], &mut out, &mut err, &back).unwrap();
        assert_eq!(cut, None);
        assert!(receive(&mut &pieces(&[(9, b"")])[..], &mut out, &mut err, &back).is_err());
    }

    #[test]
    fn an_output_that_nobody_reads_is_said_to_be_closed_once() {
        let said =
            pieces(&[(frame::OUTPUT, b"a"), (frame::OUTPUT, b"b"), (frame::EXIT, &141i32.to_le_bytes())]);
        let back = Mutex::new(Vec::new());
        let end = receive(&mut &said[..], &mut Gone, &mut Vec::new(), &back).unwrap();
        assert_eq!(end, Some(Ended::Command { status: 141 }));
        assert_eq!(back.into_inner().unwrap(), pieces(&[(frame::CLOSED, &[frame::OUTPUT])]));
    }

    #[test]
    fn input_is_sent_as_it_is_and_then_its_end() {
        let sent = Mutex::new(Vec::new());
        send_input(&mut &b"a\n\0"[..], &sent);
        assert_eq!(sent.into_inner().unwrap(), pieces(&[(frame::INPUT, b"a\n\0"), (frame::INPUT, b"")]));
    }

    #[test]
    fn a_status_file_tells_a_command_from_a_machine() {
        let text = |ended: &Ended| serde_json::to_string(ended).unwrap();
        assert_eq!(text(&Ended::Command { status: 11 }), r#"{"ended":"command","status":11}"#);
        let machine = Ended::Machine { status: 11, reason: "r".into(), console: "c".into() };
        assert_eq!(text(&machine), r#"{"ended":"machine","status":11,"reason":"r","console":"c"}"#);
    }
}
