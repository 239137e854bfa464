//! Talks to the guest agent through the machine's vsock, one connection per request.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_agent::{Event, PORT, Request};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

use vellum_sys::socket;

/// The longest line from an agent. Command output comes in much smaller pieces.
const MAX_LINE: u64 = 1 << 20;

/// Why a request to the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine's vsock socket failed.
    #[error("{path}: {source}")]
    Socket {
        /// The unix socket that leads to the guest's vsock.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Nothing listens in the guest.
    #[error("no guest agent answers: the guest may still be booting, or lack virtio-vsock or the agent")]
    Silent,
    /// The guest disconnected too early.
    #[error("the guest closed the connection before it was done")]
    Closed,
    /// The line is not an event.
    #[error("not a guest agent's line: {0}")]
    Line(String),
    /// The agent refused the request.
    #[error("{0}")]
    Refused(String),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Socket { .. } => ErrorOrigin::HOST,
            Self::Silent | Self::Closed | Self::Line(_) | Self::Refused(_) => ErrorOrigin::GUEST,
        }
    }
}

/// The agent's answer to one request: an iterator over events.
pub struct Answer {
    path: PathBuf,
    stream: Option<BufReader<UnixStream>>,
}

/// How long a guest may take to accept a connection. A guest without the vsock driver never refuses
/// one.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends `request` to the agent behind `path`, the machine's vsock. The connection must be accepted
/// within `patience`. The request itself has no time limit.
///
/// # Errors
/// Fails if no one listens.
pub fn ask(path: &Path, request: &Request, patience: Duration) -> Result<Answer, Error> {
    let mut stream = connect(path, patience)?;
    let request = serde_json::to_string(request).expect("plain data");
    stream.write_all(format!("{request}\n").as_bytes()).map_err(failed(path))?;
    Ok(Answer { path: path.into(), stream: Some(BufReader::new(stream)) })
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |source| match source.kind() {
        io::ErrorKind::WouldBlock => Error::Silent,
        _ => Error::Socket { path: path.into(), source },
    }
}

/// Connects to the agent behind `path`. The agent then waits for a request.
///
/// # Errors
/// As [`ask`].
pub fn connect(path: &Path, patience: Duration) -> Result<UnixStream, Error> {
    let failed = failed(path);
    let mut stream = socket::connect(path, patience).map_err(failed)?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes()).map_err(failed)?;
    let mut greeting = String::new();
    // The agent sends nothing before a request, so this reads only the greeting.
    BufReader::new(&stream).take(64).read_line(&mut greeting).map_err(failed)?;
    if !greeting.starts_with("OK ") {
        return Err(Error::Silent);
    }
    stream.set_read_timeout(None).map_err(failed)?;
    stream.set_write_timeout(None).map_err(failed)?;
    Ok(stream)
}

impl Iterator for Answer {
    type Item = Result<Event, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut line = String::new();
        let event = match self.stream.as_mut()?.take(MAX_LINE).read_line(&mut line) {
            Ok(0) => Err(Error::Closed),
            Ok(_) => match serde_json::from_str(&line) {
                Ok(Event::Done) => {
                    self.stream = None;
                    return None;
                }
                Ok(Event::Error { message }) => Err(Error::Refused(message)),
                Ok(event) => Ok(event),
                Err(_) => Err(Error::Line(line.trim_end().into())),
            },
            Err(source) => Err(Error::Socket { path: self.path.clone(), source }),
        };
        if event.is_err() {
            self.stream = None;
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// The result with a guest that greets with `greeting` and answers with `lines`.
    fn answer(name: &str, greeting: &'static str, lines: &'static str) -> Result<Vec<Event>, Error> {
        let path = std::env::temp_dir().join(format!("vellum-agent-{}-{name}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let guest = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut said = BufReader::new(stream.try_clone().unwrap()).lines();
            assert_eq!(said.next().unwrap().unwrap(), format!("CONNECT {PORT}"));
            stream.write_all(greeting.as_bytes()).unwrap();
            if !greeting.is_empty() {
                assert_eq!(said.next().unwrap().unwrap(), r#"{"do":"facts"}"#);
                stream.write_all(lines.as_bytes()).unwrap();
            }
        });
        let answer = ask(&path, &Request::Facts, ANSWER_TIMEOUT).and_then(Iterator::collect);
        guest.join().unwrap();
        std::fs::remove_file(path).unwrap();
        answer
    }

    /// A guest whose kernel has no vsock driver.
    #[test]
    fn a_guest_that_never_answers_is_given_up() {
        let path = std::env::temp_dir().join(format!("vellum-agent-{}-never", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let asked = ask(&path, &Request::Facts, Duration::from_millis(20)).map(drop);
        drop(listener);
        std::fs::remove_file(path).unwrap();
        assert!(matches!(asked, Err(Error::Silent)), "{asked:?}");
    }

    #[test]
    fn an_answer_ends_with_done_and_with_nothing_else() {
        let exit = "{\"event\":\"exit\",\"code\":3}\n";
        let done = answer("done", "OK 1\n", "{\"event\":\"exit\",\"code\":3}\n{\"event\":\"done\"}\n");
        assert_eq!(done.unwrap(), [Event::Exit { code: 3 }]);
        assert!(matches!(answer("cut", "OK 1\n", exit), Err(Error::Closed)));
        let refused = "{\"event\":\"error\",\"message\":\"no\"}\n{\"event\":\"done\"}\n";
        assert!(matches!(answer("refused", "OK 1\n", refused), Err(Error::Refused(why)) if why == "no"));
        assert!(matches!(answer("noise", "OK 1\n", "login:\n"), Err(Error::Line(_))));
        assert!(matches!(answer("silent", "", ""), Err(Error::Silent)));
    }
}
