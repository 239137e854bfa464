//! The client's side: one connection, one request at a time. Events that arrive before an answer
//! are kept.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::Do;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};
use vellum_sys::identity::effective;
use vellum_sys::poll::Poll;
use vellum_sys::{random, socket};

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No one listens.
    #[error("{}; `vellum list` shows the running machines", unreached(path, source))]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another user's process listens.
    #[error(
        "{path}: a process of user {uid} listens there and could impersonate your machine; run vellum as that user"
    )]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// The process's user.
        uid: u32,
    },
    /// The machine disconnected.
    #[error(
        "{path}: the machine closed the connection: it has ended, or another process has it now; `vellum list` shows the running machines"
    )]
    Closed {
        /// The socket.
        path: PathBuf,
        /// It has not read the request: it ended, or another process has the machine now.
        unread: bool,
    },
    /// The machine does not answer.
    #[error("{path}: no answer within {patience:?}{}; a stopped process (kill -STOP) answers after kill -CONT", process(*pid))]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long the client waited.
        patience: Duration,
        /// The machine's process, if known.
        pid: Option<i32>,
    },
    /// The line is not an answer.
    #[error("{path}: not a Vellum answer: {line}")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// The line.
        line: String,
    },
    /// The machine refused the request.
    #[error("{0}")]
    Refused(String),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Connect { .. } | Self::Foreign { .. } => ErrorOrigin::USER,
            Self::Closed { .. } | Self::Silent { .. } | Self::Answer { .. } | Self::Refused(_) => {
                ErrorOrigin::HOST
            }
        }
    }
}

/// The error if no one listens, with the machine's name if the path came from a name.
fn unreached(path: &Path, source: &io::Error) -> String {
    if !matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) {
        return format!("{}: {source}", path.display());
    }
    let directory = path.parent().and_then(Path::file_name).and_then(OsStr::to_str).unwrap_or_default();
    let name = path.file_stem().and_then(OsStr::to_str).filter(|_| directory.starts_with("vellum"));
    let named = name.map_or(String::new(), |name| format!("named `{name}` "));
    format!("no machine {named}listens at {}", path.display())
}

fn process(pid: Option<i32>) -> String {
    pid.map_or(String::new(), |pid| format!(" from process {pid}"))
}

/// The time limit for an answer. A pause waits for requests in flight and has its own limit.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest line from a machine, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// The bits of a client's first number. JSON readers that use doubles can still represent the
/// following numbers.
const NUMBERS: u64 = (1 << 48) - 1;

/// A connection to a machine.
pub struct Client {
    path: PathBuf,
    /// The time limit for answers.
    patience: Duration,
    /// The time limit for lines that are not answers. `None` waits forever.
    look: Option<Duration>,
    stream: BufReader<UnixStream>,
    /// An incomplete line.
    part: Vec<u8>,
    /// Events that came before an answer.
    events: VecDeque<Value>,
    /// Whether it has asked for events.
    listens: bool,
    last_id: u64,
}

impl Client {
    /// Connects to the control socket at `path`, with [`ANSWER_TIMEOUT`] for each answer.
    ///
    /// # Errors
    /// Fails if no one listens, or if the connection is not accepted.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        Self::connect_within(path, ANSWER_TIMEOUT)
    }

    /// Connects with another time limit.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_within(path: &Path, patience: Duration) -> Result<Self, Error> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::WouldBlock => Error::Silent { path: path.into(), patience, pid: None },
            _ => Error::Connect { path: path.into(), source },
        };
        let stream = socket::connect(path, patience).map_err(failed)?;
        may_be_trusted(path, &stream)?;
        Ok(Client {
            path: path.into(),
            patience,
            look: Some(patience),
            stream: BufReader::new(stream),
            part: Vec::new(),
            events: VecDeque::new(),
            listens: false,
            last_id: first_id(),
        })
    }

    /// Sets the time limit for lines that are not answers.
    pub fn wait_within(&mut self, patience: Duration) {
        self.look = Some(patience);
    }

    /// Waits forever for lines that are not answers, such as events.
    pub fn wait_for_ever(&mut self) {
        self.look = None;
    }

    /// The connection, to wait for it.
    pub fn connection(&self) -> &UnixStream {
        self.stream.get_ref()
    }

    /// The number of the last request. Its answer and events carry it.
    pub fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, what: &Do) -> Result<Value, Error> {
        self.ask_with(what, &[])
    }

    /// Sends a request with its descriptors and waits for the answer.
    ///
    /// An upgrade leaves the machine in another process, which listens on the same socket. A
    /// request that the first process has not read is sent to that one.
    pub fn ask_with(&mut self, what: &Do, descriptors: &[BorrowedFd<'_>]) -> Result<Value, Error> {
        let answer = match self.ask_once(what, descriptors) {
            Err(Error::Closed { unread: true, .. }) => {
                self.connect_again().map_err(|_| Error::Closed { path: self.path.clone(), unread: false })?;
                self.ask_once(what, descriptors)
            }
            answer => answer,
        };
        self.listens |= answer.is_ok() && *what == Do::Events {};
        answer
    }

    /// Connects to the process that listens now, and asks for events if this client has.
    fn connect_again(&mut self) -> Result<(), Error> {
        let next = Self::connect_within(&self.path, self.patience)?;
        (self.stream, self.part) = (next.stream, next.part);
        match self.listens {
            true => self.ask_once(&Do::Events {}, &[]).map(drop),
            false => Ok(()),
        }
    }

    fn ask_once(&mut self, what: &Do, descriptors: &[BorrowedFd<'_>]) -> Result<Value, Error> {
        self.last_id += 1;
        let mut request = serde_json::to_value(what).expect("plain data");
        request["id"] = self.last_id.into();
        let line = format!("{request}\n");
        socket::send(self.stream.get_ref(), line.as_bytes(), descriptors).map_err(|_| self.unheard())?;
        // An error with id 0 says why the machine hangs up, if it does.
        let mut said = None;
        loop {
            let mut answer = match self.next(Some(self.patience)) {
                Err(Error::Closed { .. }) if let Some(why) = said => return Err(Error::Refused(why)),
                line => line?,
            };
            if answer["event"].is_string() {
                self.events.push_back(answer);
                continue;
            }
            if answer["id"] != self.last_id {
                if answer["id"] == 0 {
                    said = answer["error"].as_str().map(str::to_owned).or(said);
                }
                continue;
            }
            return match answer["error"].as_str() {
                Some(_) if answer["again"] == true => {
                    Err(Error::Closed { path: self.path.clone(), unread: true })
                }
                Some(error) => Err(Error::Refused(error.to_owned())),
                None => Ok(answer["ok"].take()),
            };
        }
    }

    /// Sends one request on its own connection and returns the answer with its descriptors.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub fn borrow(path: &Path, what: &Do) -> Result<(Value, Vec<OwnedFd>), Error> {
        Self::connect(path)?.ask_for(what)
    }

    /// Sends a request and returns the answer with its descriptors. Only the process at the other
    /// end of this connection answers.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub fn ask_for(&mut self, what: &Do) -> Result<(Value, Vec<OwnedFd>), Error> {
        self.last_id += 1;
        let mut request = serde_json::to_value(what).expect("plain data");
        request["id"] = self.last_id.into();
        let closed = || Error::Closed { path: self.path.clone(), unread: false };
        let stream = self.stream.get_ref();
        socket::send(stream, format!("{request}\n").as_bytes(), &[]).map_err(|_| closed())?;
        // These bytes came before the answer, without descriptors.
        self.part.extend_from_slice(self.stream.buffer());
        let read = self.stream.buffer().len();
        self.stream.consume(read);
        let mut descriptors = Vec::new();
        loop {
            let mut said = None;
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.part.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line).map_err(|_| Error::Answer {
                    path: self.path.clone(),
                    line: String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned(),
                })?;
                if line["event"].is_string() {
                    self.events.push_back(line);
                } else if line["id"] == self.last_id {
                    said = Some(line);
                }
            }
            if let Some(mut answer) = said {
                return match answer["error"].as_str() {
                    Some(error) => Err(Error::Refused(error.to_owned())),
                    None => Ok((answer["ok"].take(), descriptors)),
                };
            }
            let closed = || Error::Closed { path: self.path.clone(), unread: false };
            let stream = self.stream.get_ref();
            let mut poll = Poll::default();
            poll.readable(stream);
            if !poll.wait(Some(self.patience)).map_err(|_| closed())? {
                let pid = socket::peer_pid(stream).ok();
                return Err(Error::Silent { path: self.path.clone(), patience: self.patience, pid });
            }
            let mut part = vec![0; 64 << 10];
            match socket::receive(stream, &mut part, &mut descriptors) {
                Ok(count @ 1..) if self.part.len() + count <= MAX_ANSWER => {
                    self.part.extend_from_slice(&part[..count]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return Err(closed()),
            }
        }
    }

    /// The next line that is not an answer.
    pub fn line(&mut self) -> Result<Value, Error> {
        match self.events.pop_front() {
            Some(event) => Ok(event),
            None => self.next(self.look),
        }
    }

    /// The next event of the request `id`, or of any if `None`. Events from older builds have no
    /// number and match any request.
    ///
    /// # Errors
    /// As [`Client::line`].
    pub fn event_of(&mut self, id: Option<u64>) -> Result<Value, Error> {
        loop {
            let line = self.line()?;
            if id.is_none() || line["id"].is_null() || line["id"].as_u64() == id {
                return Ok(line);
            }
        }
    }

    /// The next line of any kind.
    fn next(&mut self, patience: Option<Duration>) -> Result<Value, Error> {
        // Fails only for a timeout of 0.
        let _ = self.stream.get_ref().set_read_timeout(patience);
        let left = MAX_ANSWER.saturating_sub(self.part.len()) as u64;
        let read = (&mut self.stream).take(left).read_until(b'\n', &mut self.part);
        match read {
            // The part of a line that has arrived is kept for the next call.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock) => {
                let pid = socket::peer_pid(self.stream.get_ref()).ok();
                let patience = patience.unwrap_or_default();
                Err(Error::Silent { path: self.path.clone(), patience, pid })
            }
            Ok(_) if self.part.last() == Some(&b'\n') || self.part.len() >= MAX_ANSWER => {
                let line = std::mem::take(&mut self.part);
                serde_json::from_slice(&line).map_err(|_| Error::Answer {
                    path: self.path.clone(),
                    line: String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned(),
                })
            }
            // A unix socket that is closed with unread data says so to the other end.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                Err(Error::Closed { path: self.path.clone(), unread: true })
            }
            _ => Err(Error::Closed { path: self.path.clone(), unread: false }),
        }
    }

    /// Why a request could not be sent: the machine's last error (id 0), or that it hung up.
    fn unheard(&mut self) -> Error {
        match self.next(Some(self.patience)) {
            Ok(mut line) if line["id"] == 0 => match line["error"].take() {
                Value::String(why) => Error::Refused(why),
                _ => Error::Closed { path: self.path.clone(), unread: false },
            },
            _ => Error::Closed { path: self.path.clone(), unread: true },
        }
    }
}

/// Checks that the listener at `path` can be trusted with descriptors. It must be this user or
/// root. Root also trusts another user's machine in that user's own directory.
fn may_be_trusted(path: &Path, stream: &UnixStream) -> Result<(), Error> {
    let (own, _) = effective();
    // The credentials are those at listen(2). A machine that has dropped root since still counts as
    // root's.
    let uid = socket::peer_uid(stream).map_err(|source| Error::Connect { path: path.into(), source })?;
    let theirs = || {
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::metadata(directory).is_ok_and(|metadata| metadata.uid() == uid)
    };
    match uid == own || uid == 0 || own == 0 && theirs() {
        true => Ok(()),
        false => Err(Error::Foreign { path: path.into(), uid }),
    }
}

/// A first number that other clients are unlikely to choose.
fn first_id() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness (early in boot) other clients are unlikely.
    let _ = random::fill(&mut bytes);
    u64::from_le_bytes(bytes) & NUMBERS
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What one process does with the request that it gets, and what the client is told then.
    type Process = fn(UnixStream);

    /// The first process leaves the machine to a second one, which answers.
    fn asked(name: &str, first: Process) -> Result<Value, Error> {
        let path = std::env::temp_dir().join(format!("vellum-client-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let answer = std::thread::scope(|scope| {
            scope.spawn(move || {
                first(listener.accept().unwrap().0);
                let (stream, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(&stream);
                // The client listened for events, so it does again.
                for expected in ["events", "pause"] {
                    let mut line = String::new();
                    lines.read_line(&mut line).unwrap();
                    let request: Value = serde_json::from_str(&line).unwrap();
                    assert_eq!(request["do"], expected);
                    writeln!(&stream, "{{\"id\":{},\"ok\":\"{expected}\"}}", request["id"]).unwrap();
                }
            });
            let mut client = Client::connect(&path)?;
            client.ask(&Do::Events {})?;
            client.ask(&Do::Pause {})
        });
        std::fs::remove_file(&path).unwrap();
        answer
    }

    fn answer(stream: &UnixStream, rest: &str) {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let request: Value = serde_json::from_str(&line).unwrap();
        writeln!(&*stream, "{{\"id\":{},{rest}}}", request["id"]).unwrap();
    }

    #[test]
    fn a_request_that_is_not_read_goes_to_the_next_process() {
        let unread = asked("unread", |stream| {
            answer(&stream, r#""ok":{}"#);
            let mut poll = Poll::default();
            poll.readable(&stream);
            assert!(poll.wait(None).unwrap());
        });
        assert_eq!(unread.unwrap(), "pause");
    }

    #[test]
    fn a_request_that_is_answered_by_again_goes_to_the_next_process() {
        let again = asked("again", |stream| {
            answer(&stream, r#""ok":{}"#);
            answer(&stream, r#""error":"elsewhere","again":true"#);
        });
        assert_eq!(again.unwrap(), "pause");
    }

    #[test]
    fn a_connection_that_is_closed_before_the_request_is_made_anew() {
        // Whether the client notices as it sends or as it reads depends on which is first.
        let closed = asked("closed", |stream| answer(&stream, r#""ok":{}"#));
        assert_eq!(closed.unwrap(), "pause");
    }
}
