//! The socket on which a VMM answers. All of an answer has to come within the time of a step: a VMM
//! that sends a byte now and then hangs, too. A signal ends the wait.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vellum_sys::signal::last;
use vellum_sys::socket;

/// How often it is looked whether a signal came.
const POLL: Duration = Duration::from_millis(100);

/// A connection with a time limit.
pub(super) struct Stream {
    socket: UnixStream,
    begun: Instant,
    limit: Duration,
}

impl Stream {
    pub(super) fn connect(path: &Path, limit: Duration) -> io::Result<Self> {
        // A VMM that listens and accepts nothing hangs, too.
        let socket = socket::connect(path, limit)?;
        socket.set_read_timeout(Some(POLL))?;
        Ok(Self { socket, begun: Instant::now(), limit })
    }

    /// Sends a request. The time of its answer begins.
    pub(super) fn send(&mut self, request: &[u8]) -> io::Result<()> {
        self.begun = Instant::now();
        self.socket.write_all(request)
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(signal) = last() {
                return Err(io::Error::other(format!("signal {signal} came before the answer")));
            }
            if self.begun.elapsed() > self.limit {
                let seconds = self.limit.as_secs_f64();
                return Err(io::Error::other(format!("no answer within {seconds} s")));
            }
            match self.socket.read(bytes) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                read => return read,
            }
        }
    }
}
