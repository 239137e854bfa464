//! The client's side: one connection, one request after the other.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Do;
use crate::fault::{Blame, Fault};
use crate::sys::socket;

/// Why a machine does not do what it is told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody is there.
    #[error("{path}: {source}; `vellum list` shows the machines that run")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// It went away in the middle.
    #[error("{path}: the machine has closed the connection")]
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// It says something that is no answer.
    #[error("{path}: not an answer of Vellum's: {line}")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What it said.
        line: String,
    },
    /// It refuses.
    #[error("{0}")]
    Refused(String),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Connect { .. } => Blame::USER,
            Self::Closed { .. } | Self::Answer { .. } | Self::Refused(_) => Blame::HOST,
        }
    }
}

/// A connection to a machine.
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    last_id: u64,
}

impl Client {
    /// Connects to the control socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let stream =
            UnixStream::connect(path).map_err(|source| Error::Connect { path: path.into(), source })?;
        Ok(Client { path: path.into(), stream: BufReader::new(stream), last_id: 0 })
    }

    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, what: &Do) -> Result<Value, Error> {
        self.ask_with(what, &[])
    }

    /// Sends a request with the descriptors that it takes, and waits for its answer.
    pub fn ask_with(&mut self, what: &Do, descriptors: &[BorrowedFd<'_>]) -> Result<Value, Error> {
        self.last_id += 1;
        let mut request = serde_json::to_value(what).expect("plain data");
        request["id"] = self.last_id.into();
        let line = format!("{request}\n");
        socket::send(self.stream.get_ref(), line.as_bytes(), descriptors)
            .map_err(|_| Error::Closed { path: self.path.clone() })?;
        loop {
            let mut answer = self.line()?;
            if answer["id"] != self.last_id {
                // An event, or the answer to a line that was no request.
                continue;
            }
            return match answer["error"].as_str() {
                Some(error) => Err(Error::Refused(error.to_owned())),
                None => Ok(answer["ok"].take()),
            };
        }
    }

    /// The next line, whatever it is.
    pub fn line(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        match (&mut self.stream).take(1 << 20).read_line(&mut line) {
            Ok(1..) => {
                serde_json::from_str(&line).map_err(|_| Error::Answer { path: self.path.clone(), line })
            }
            _ => Err(Error::Closed { path: self.path.clone() }),
        }
    }
}
