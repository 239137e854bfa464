//! Connects a command's standard streams, or the user's terminal, with the guest.
//!
//! A terminal is in raw mode while the command has it. All keys go to the guest, except Ctrl-a x,
//! which leaves. This process restores the terminal whenever it ends in an orderly way. The guest
//! gets the terminal's size at the start and on each change.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Stdin, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use guest_agent::{Event, Terminal, frame};
use serde::Serialize;

use vellum_sys::poll::Poll;
use vellum_sys::signal::{self, SignalFd};
use vellum_sys::terminal::{self, Keys, Output};

/// The status after Ctrl-a x: 128 + SIGHUP, as for a hang-up.
const LEFT: i32 = 129;

/// The guest, once connected.
type Guest = Arc<OnceLock<Arc<Mutex<UnixStream>>>>;

/// What a command gets of this process's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Has {
    /// All three streams.
    Streams,
    /// The terminal.
    Terminal,
    /// Nothing. Only the start of the command is reported.
    Nothing,
}

/// This process's standard streams, for one command.
#[derive(Debug)]
pub struct Streams {
    has: Has,
    guest: Guest,
}

/// How the command or its machine ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "ended", rename_all = "kebab-case")]
pub enum Ended {
    /// The command ended, with its status or with 128 plus its signal.
    Command {
        /// The status.
        status: u8,
    },
    /// The command could not be started.
    NotStarted {
        /// The reason.
        reason: String,
    },
    /// The machine ended before the command.
    Machine {
        /// The status of the machine's process.
        status: u8,
        /// The likely reason.
        reason: String,
        /// The last lines of its console.
        console: String,
    },
}

/// The result of a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How it ended. `None` if the guest was gone before.
    pub ended: Option<Ended>,
    /// Why some of its output was lost, if any was.
    pub unwritten: Option<String>,
}

/// The terminal that this process was started on. `None` if standard input or output is not a
/// terminal.
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
    /// With a terminal, this process must have no other thread yet that could receive its signals.
    ///
    /// # Errors
    /// Fails if the host refuses.
    pub fn new(has: Has) -> io::Result<Self> {
        let guest = Guest::default();
        if has == Has::Terminal {
            // Both must come before any thread: a thread that does not block a signal would receive
            // it.
            let (ends, sizes) = (SignalFd::new(&signal::ENDING)?, SignalFd::new(&[signal::SIZE])?);
            let stops = SignalFd::new(&signal::STOPPING)?;
            let resized = guest.clone();
            thread::spawn(move || attend(ends, sizes, stops, &resized));
        }
        Ok(Self { has, guest })
    }

    /// Sends the line `asked` and standard input, and writes the output, until the command has
    /// ended.
    ///
    /// # Errors
    /// Fails if the guest violates the protocol.
    pub fn converse(self, stream: UnixStream, asked: &str) -> io::Result<Outcome> {
        (&stream).write_all(format!("{asked}\n").as_bytes())?;
        let to_guest = Arc::new(Mutex::new(stream.try_clone()?));
        let mut input = BufReader::new(&stream);
        let is_terminal = self.has == Has::Terminal;
        // The guest announces a terminal at once.
        if is_terminal && let Some(refused) = refused(&mut input)? {
            return Ok(refused);
        }
        let _raw = if is_terminal { Some(Raw::new()?) } else { None };
        // The size may have changed meanwhile.
        self.guest.get_or_init(|| to_guest.clone());
        if is_terminal {
            tell_size(&self.guest)?;
        }
        if self.has != Has::Nothing {
            let sends = to_guest.clone();
            // Ends with the process if standard input is never closed.
            thread::spawn(move || {
                let mut keys = Keys { escape: is_terminal, pending: false };
                let mut input = BufReader::with_capacity(frame::MAX, Foreground(io::stdin()));
                if send_input(&mut input, &sends, &mut keys) {
                    leave(LEFT);
                }
            });
        }
        if let Some(refused) = refused(&mut input)? {
            return Ok(refused);
        }
        let outputs = [own(io::stdout().as_fd())?, own(io::stderr().as_fd())?];
        let outcome = receive(&mut input, outputs, &to_guest)?;
        // Tells the guest that its end was received.
        let _ = stream.shutdown(Shutdown::Both);
        Ok(outcome)
    }
}

/// The result if the agent is too old for the request and answered with an error in its own format.
fn refused(input: &mut impl BufRead) -> io::Result<Option<Outcome>> {
    if input.fill_buf()?.first() != Some(&b'{') {
        return Ok(None);
    }
    let mut said = String::new();
    input.take(64 << 10).read_line(&mut said)?;
    let why = match serde_json::from_str(&said) {
        Ok(Event::Error { message }) => message,
        _ => said.trim().into(),
    };
    let reason = format!(
        "the guest's agent is older than this vellum and does not know the request: {why}; it may know the plain request {{\"do\":\"exec\",…}}"
    );
    Ok(Some(Outcome { ended: Some(Ended::NotStarted { reason }), unwritten: None }))
}

/// Handles signals while a command has the terminal.
fn attend(mut ends: SignalFd, mut sizes: SignalFd, mut stops: SignalFd, guest: &Guest) {
    loop {
        let mut ready = Poll::default();
        [&ends, &sizes, &stops].into_iter().for_each(|signals| ready.readable(signals));
        if ready.wait(terminal::regain().then_some(terminal::LOOK)).is_err() {
            return;
        }
        if let Some(signal) = ends.read() {
            leave(128 + signal);
        }
        if let Some(signal) = stops.read() {
            terminal::stop(signal);
        }
        if sizes.read().is_some() && tell_size(guest).is_err() {
            return;
        }
    }
}

/// An unbuffered copy of an output of this process.
fn own(fd: BorrowedFd<'_>) -> io::Result<Patient> {
    Ok(Patient(File::from(fd.try_clone_to_owned()?)))
}

/// A file that polls when it would block.
struct Patient(File);

impl Write for Patient {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(data) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut ready = Poll::default();
                    ready.writable(&self.0);
                    ready.wait(None)?;
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Standard input. Reads nothing while another process group is in the terminal's foreground.
struct Foreground(Stdin);

impl Read for Foreground {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        terminal::read_in_foreground(self.0.as_fd(), to)
    }
}

/// Keeps the terminal in raw mode while this process may change it.
struct Raw;

impl Raw {
    fn new() -> io::Result<Self> {
        let input = io::stdin();
        if terminal::in_foreground(input.as_fd()).is_some() {
            terminal::set_raw(input.as_fd(), Output::AsIs, None)?;
        }
        Ok(Self)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        terminal::restore();
    }
}

/// Ends this process, and with it the guest's terminal or the machine that was started for it.
fn leave(status: i32) -> ! {
    terminal::restore();
    process::exit(status)
}

/// Sends the size of this process's terminal to the guest.
fn tell_size(guest: &Guest) -> io::Result<()> {
    let Some(guest) = guest.get() else { return Ok(()) };
    let (rows, columns) = terminal::size(io::stdout().as_fd());
    let size = [rows.to_le_bytes(), columns.to_le_bytes()].concat();
    frame::write(&mut *guest.lock().expect("no panic under this lock"), frame::RESIZED, &size)
}

/// Sends all input. Returns whether the user has left.
fn send_input(input: &mut impl BufRead, to: &Mutex<impl Write>, keys: &mut Keys) -> bool {
    let send = |piece: &[u8]| {
        frame::write(&mut *to.lock().expect("no panic under this lock"), frame::INPUT, piece).is_ok()
    };
    loop {
        let mut piece = match input.fill_buf() {
            Ok(data) => data[..data.len().min(frame::MAX)].to_vec(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // A command sees a closed standard input as its end.
            Err(_) => Vec::new(),
        };
        let count = piece.len();
        let mut sent = true;
        if count == 0 {
            send(&[]);
            return false;
        }
        // An empty piece would mean the end of the input.
        if keys.press(&mut piece, count, |piece| sent = piece.is_empty() || send(piece)) {
            return true;
        }
        if !sent {
            return false;
        }
        input.consume(count);
    }
}

/// Writes the guest's output to `outputs`, standard output and standard error.
fn receive(
    from: &mut impl Read,
    outputs: [impl Write; 2],
    to_guest: &Mutex<impl Write + Send + 'static>,
) -> io::Result<Outcome> {
    let [mut stdout, mut stderr] = outputs;
    let mut data = Vec::new();
    let mut closed = Vec::new();
    let mut unwritten = None;
    while let Some(kind) = frame::read(from, &mut data)? {
        let (to, name): (&mut dyn Write, _) = match (kind, &data[..]) {
            (frame::OUTPUT, _) => (&mut stdout, "standard output"),
            (frame::ERRORS, _) => (&mut stderr, "standard error"),
            (frame::EXIT, &[a, b, c, d]) => {
                let status = i32::from_le_bytes([a, b, c, d]).clamp(0, 255) as u8;
                return Ok(Outcome { ended: Some(Ended::Command { status }), unwritten });
            }
            (frame::FAILED, why) => {
                let reason = String::from_utf8_lossy(why).into_owned();
                return Ok(Outcome { ended: Some(Ended::NotStarted { reason }), unwritten });
            }
            _ => return Err(io::Error::other("the guest violated the protocol")),
        };
        if closed.contains(&kind) {
            continue;
        }
        if let Err(error) = to.write_all(&data).and_then(|()| to.flush()) {
            // The command sees a closed output, as with `| head`. A broken pipe alone is not an
            // error.
            if error.kind() != io::ErrorKind::BrokenPipe {
                unwritten.get_or_insert(format!("{name}: {error}"));
            }
            closed.push(kind);
            frame::write(&mut *to_guest.lock().expect("no panic under this lock"), frame::CLOSED, &[kind])?;
        }
    }
    Ok(Outcome { ended: None, unwritten })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output on which every write fails.
    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
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
        let outcome = receive(&mut &said[..], [&mut out, &mut err], &back).unwrap();
        assert_eq!((outcome.ended, outcome.unwritten), (Some(Ended::Command { status: 7 }), None));
        assert_eq!((&out[..], &err[..]), (&b"a\0"[..], &b"\xff"[..]));
        assert!(back.lock().unwrap().is_empty());
        let cut = receive(&mut &said[..7], [&mut out, &mut err], &back).unwrap();
        assert_eq!(cut, Outcome { ended: None, unwritten: None });
        assert!(receive(&mut &pieces(&[(9, b"")])[..], [&mut out, &mut err], &back).is_err());
    }

    #[test]
    fn an_output_that_takes_no_more_is_said_to_be_closed_once_and_a_reader_that_left_is_no_failure() {
        let said =
            pieces(&[(frame::OUTPUT, b"a"), (frame::OUTPUT, b"b"), (frame::EXIT, &141i32.to_le_bytes())]);
        for (kind, fails) in [(io::ErrorKind::BrokenPipe, false), (io::ErrorKind::StorageFull, true)] {
            let back = Mutex::new(Vec::new());
            let outcome = receive(&mut &said[..], [Broken(kind), Broken(kind)], &back).unwrap();
            assert_eq!(outcome.ended, Some(Ended::Command { status: 141 }));
            assert_eq!(outcome.unwritten.is_some_and(|why| why.starts_with("standard output: ")), fails);
            assert_eq!(back.into_inner().unwrap(), pieces(&[(frame::CLOSED, &[frame::OUTPUT])]));
        }
    }

    #[test]
    fn an_agent_that_does_not_know_a_request_is_said_to_be_old() {
        let mut said = &b"{\"event\":\"error\",\"message\":\"unknown field `detached`\"}\n"[..];
        let Some(Outcome { ended: Some(Ended::NotStarted { reason }), .. }) = refused(&mut said).unwrap()
        else {
            panic!("not a refusal")
        };
        assert!(reason.contains("older") && reason.contains("unknown field `detached`"), "{reason}");
        assert_eq!(refused(&mut &pieces(&[(frame::OUTPUT, b"{")])[..]).unwrap(), None);
        assert_eq!(refused(&mut &b""[..]).unwrap(), None);
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
        // A lone escape key is not the end of the input.
        assert!(!send_input(&mut (&b"\x01"[..]).chain(&b"\x01a"[..]), &sent, &mut keys));
        assert!(send_input(&mut &b"b\x01xc"[..], &sent, &mut keys));
        let pieces = pieces(&[(frame::INPUT, b"\x01a"), (frame::INPUT, b""), (frame::INPUT, b"b")]);
        assert_eq!(sent.into_inner().unwrap(), pieces);
    }
}
