//! A command's standard streams at their user's end, or the user's terminal: a connection to a guest on one side, and what this process
//! was started with on the other.
//!
//! A terminal is raw for as long as the command has it: every key is the guest's, but for Ctrl-a x, by which the user leaves. It is given
//! back at every end that this process lives to see. Its size goes along, and again whenever it changes.

use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use guest_agent::{Terminal, frame};

use super::client::Ended;
use crate::sys::poll::Poll;
use crate::sys::signal::{self, SignalFd};
use crate::sys::terminal::{self, Keys, Output};

/// The status of a user who has left the terminal by Ctrl-a x, as of one that hung up: 128 and SIGHUP.
const LEFT: i32 = 129;

/// The guest, once it is connected.
type Guest = Arc<OnceLock<Arc<Mutex<UnixStream>>>>;

/// This process's standard streams, for one command.
#[derive(Debug)]
pub struct Streams {
    terminal: bool,
    guest: Guest,
}

/// The terminal that this process was started on; `None` where its standard input or output is none.
pub fn own_terminal() -> Option<Terminal> {
    let (input, output) = (io::stdin(), io::stdout());
    if !input.is_terminal() || !output.is_terminal() {
        return None;
    }
    let (rows, columns) = terminal::size(output.as_fd());
    let kind = std::env::var("TERM").unwrap_or_else(|_| "dumb".into());
    Some(Terminal { kind, rows, columns })
}

impl Streams {
    /// With `terminal` they are one, and this process is to have no other thread yet that would take its signals.
    ///
    /// # Errors
    /// Where the host refuses.
    pub fn new(terminal: bool) -> io::Result<Self> {
        let guest = Guest::default();
        if terminal {
            // Both before a thread: one that does not block a signal would take it.
            let (mut ends, mut sizes) = (SignalFd::new(&signal::ENDING)?, SignalFd::new(&[signal::SIZE])?);
            thread::spawn(move || {
                if let Some(signal) = next(&mut ends) {
                    leave(128 + signal);
                }
            });
            let resized = guest.clone();
            thread::spawn(move || while next(&mut sizes).is_some() && tell_size(&resized).is_ok() {});
        }
        Ok(Self { terminal, guest })
    }

    /// Sends `asked`, a line, and standard input, and writes what comes, until the command has ended; `None` where the guest is gone
    /// before.
    ///
    /// # Errors
    /// Where the guest does not speak as it should.
    pub fn converse(self, stream: UnixStream, asked: &str) -> io::Result<Option<Ended>> {
        (&stream).write_all(format!("{asked}\n").as_bytes())?;
        let to_guest = Arc::new(Mutex::new(stream.try_clone()?));
        let mut input = BufReader::new(&stream);
        if self.terminal && input.fill_buf()?.first() == Some(&b'{') {
            // An agent of before there were terminals answers in its words.
            let mut said = String::new();
            input.take(64 << 10).read_line(&mut said)?;
            return Ok(Some(Ended::NotStarted { reason: format!("the guest's agent: {}", said.trim()) }));
        }
        let _raw = if self.terminal { Some(Raw::new()?) } else { None };
        // Its size may have changed meanwhile.
        self.guest.get_or_init(|| to_guest.clone());
        if self.terminal {
            tell_size(&self.guest)?;
        }
        let (sends, escape) = (to_guest.clone(), self.terminal);
        // Ends with the process where nobody closes standard input.
        thread::spawn(move || {
            let mut keys = Keys { escape, pending: false };
            if send_input(&mut io::stdin().lock(), &sends, &mut keys) {
                leave(LEFT);
            }
        });
        let end = receive(&mut input, &mut io::stdout(), &mut io::stderr(), &to_guest)?;
        // By which the guest knows that its end was heard.
        let _ = stream.shutdown(Shutdown::Both);
        Ok(end)
    }
}

/// While it lives the terminal is raw, if this process may change it.
struct Raw;

impl Raw {
    fn new() -> io::Result<Self> {
        let input = io::stdin();
        if terminal::in_foreground(input.as_fd()) {
            terminal::set_raw(input.as_fd(), Output::AsIs)?;
        }
        Ok(Self)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        terminal::restore();
    }
}

/// Ends this process, and with it the guest's terminal, or the machine that was made for it.
fn leave(status: i32) -> ! {
    terminal::restore();
    process::exit(status)
}

/// Waits for the next of `signals`.
fn next(signals: &mut SignalFd) -> Option<i32> {
    loop {
        if let Some(signal) = signals.read() {
            return Some(signal);
        }
        let mut ready = Poll::default();
        ready.readable(signals.as_raw_fd());
        ready.wait(None).ok()?;
    }
}

/// Tells a guest that is there of the size of this process's terminal.
fn tell_size(guest: &Guest) -> io::Result<()> {
    let Some(guest) = guest.get() else { return Ok(()) };
    let (rows, columns) = terminal::size(io::stdout().as_fd());
    let size = [rows.to_le_bytes(), columns.to_le_bytes()].concat();
    frame::write(&mut *guest.lock().expect("nobody panics with it"), frame::RESIZED, &size)
}

/// Sends what is typed or read, to its end; whether the user has left.
fn send_input(input: &mut impl BufRead, to: &Mutex<impl Write>, keys: &mut Keys) -> bool {
    let send = |piece: &[u8]| {
        frame::write(&mut *to.lock().expect("nobody panics with it"), frame::INPUT, piece).is_ok()
    };
    loop {
        let mut piece = match input.fill_buf() {
            Ok(data) => data[..data.len().min(frame::MAX)].to_vec(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // As a command that reads a closed standard input sees it.
            Err(_) => Vec::new(),
        };
        let count = piece.len();
        let mut sent = true;
        if count == 0 {
            send(&[]);
            return false;
        }
        // A piece of which the guest gets nothing would be the end.
        if keys.press(&mut piece, count, |piece| sent = piece.is_empty() || send(piece)) {
            return true;
        }
        if !sent {
            return false;
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
        let mut keys = Keys { escape: false, pending: false };
        assert!(!send_input(&mut &b"a\n\0"[..], &sent, &mut keys));
        assert_eq!(sent.into_inner().unwrap(), pieces(&[(frame::INPUT, b"a\n\0"), (frame::INPUT, b"")]));
    }

    #[test]
    fn a_terminals_user_leaves_by_the_escape_key() {
        let sent = Mutex::new(Vec::new());
        let mut keys = Keys { escape: true, pending: false };
        // A lone escape key is no end of the input.
        assert!(!send_input(&mut (&b"\x01"[..]).chain(&b"\x01a"[..]), &sent, &mut keys));
        assert!(send_input(&mut &b"b\x01xc"[..], &sent, &mut keys));
        let pieces = pieces(&[(frame::INPUT, b"\x01a"), (frame::INPUT, b""), (frame::INPUT, b"b")]);
        assert_eq!(sent.into_inner().unwrap(), pieces);
    }
}
