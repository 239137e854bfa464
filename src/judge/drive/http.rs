//! Requests of a REST API on a Unix socket: HTTP/1.1 with bodies in JSON, as Cloud Hypervisor and
//! Firecracker have it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::Trouble;
use super::process::{Process, printable};
use super::stream::Stream;
use vellum_sys::socket;

/// Bytes of a line of the answer's head, its lines, and bytes of its body.
const MAX_LINE: u64 = 8 << 10;
const MAX_LINES: usize = 100;
const MAX_BODY: u64 = 1 << 20;

/// An API.
pub(super) struct Api {
    socket: PathBuf,
    limit: Duration,
}

/// A request that has not been answered yet.
pub(super) struct Asked {
    stream: BufReader<Stream>,
    what: String,
}

impl Api {
    /// The API of a process, when it listens.
    pub(super) fn of(process: &mut Process, path: &Path, limit: Duration) -> Result<Self, Trouble> {
        process.until(limit, "its API socket", || Ok(socket::connect(path, limit).ok()))?;
        Ok(Self { socket: path.into(), limit })
    }

    /// Sends a request. Each has a connection of its own.
    pub(super) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Asked, Trouble> {
        let what = format!("{method} {path}");
        let mut stream = Stream::connect(&self.socket, self.limit).map_err(Trouble::io(&what))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n");
        if !body.is_empty() {
            request += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        }
        request += &format!("\r\n{body}");
        stream.send(request.as_bytes()).map_err(Trouble::io(&what))?;
        Ok(Asked { stream: BufReader::new(stream), what })
    }

    /// Sends a request and waits for the answer.
    pub(super) fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(), Trouble> {
        self.ask(method, path, body)?.answer()
    }
}

impl Asked {
    /// Waits for the answer, which must be a success.
    pub(super) fn answer(mut self) -> Result<(), Trouble> {
        let nonsense = |what: &str| Trouble::failed(format!("{what}: the answer is not HTTP"));
        let head = self.line()?;
        let status =
            head.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok());
        let status = status.ok_or_else(|| nonsense(&self.what))?;
        let mut length = 0;
        for _ in 0..MAX_LINES {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').ok_or_else(|| nonsense(&self.what))?;
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().map_err(|_| nonsense(&self.what))?;
            }
        }
        let mut body = Vec::new();
        let stream = (&mut self.stream).take(MAX_BODY.min(length));
        { stream }.read_to_end(&mut body).map_err(Trouble::io(&self.what))?;
        if (200..300).contains(&status) {
            return Ok(());
        }
        let why = String::from_utf8_lossy(&body).into_owned();
        let why = printable(why.lines().next().unwrap_or_default());
        Err(Trouble::failed(format!("{}: status {status}: {why}", self.what)))
    }

    fn line(&mut self) -> Result<String, Trouble> {
        let mut line = String::new();
        let read = (&mut self.stream).take(MAX_LINE).read_line(&mut line).map_err(Trouble::io(&self.what))?;
        match read {
            0 => Err(Trouble::failed(format!("{}: the VMM closed the connection", self.what))),
            _ => Ok(line.trim_end().into()),
        }
    }
}
