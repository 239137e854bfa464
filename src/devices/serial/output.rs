//! A guest's serial output on its way to the host.
//!
//! Output goes into a backlog first. From there it is written in chunks, each as large as its
//! target takes without blocking. The port is unlocked while a chunk is written. One thread writes
//! at a time, a vCPU's or the event loop's. It also writes what others add meanwhile.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use vellum_sys::file::is_nonblocking;
use vellum_sys::terminal::{self, writable};

/// Bytes of output that wait for a reader. Output beyond them is lost.
const BACKLOG: usize = 1 << 20;
/// What a writable pipe takes without blocking (PIPE_BUF).
const PIPE: usize = 4096;
/// The maximum number of bytes written to a file at once.
const FILE: usize = 1 << 16;

/// Output and its target.
pub struct Output {
    sink: Sink,
    backlog: VecDeque<u8>,
    /// Bytes without a reader.
    lost: u64,
    /// Bytes that the file did not take, because its disk was full or it failed.
    unwritten: u64,
    /// The number of bytes dropped since writes began to fail. None while writes succeed.
    failing: Option<u64>,
    /// The loss has been logged.
    told_of_loss: bool,
    /// A thread is writing a chunk.
    writing: bool,
    /// The event loop knows that output waits for its reader.
    told: bool,
    /// The buffer of a chunk, reused for the next.
    spare: Vec<u8>,
    /// Wakes the event loop.
    waiting: Arc<EventFd>,
}

enum Sink {
    Nowhere,
    To {
        file: Arc<File>,
        /// How many bytes at once it takes without blocking when it is writable.
        most: usize,
        /// Whether the target may take later output even if it refuses this.
        recovers: Option<Recovers>,
        /// Whether the log goes to the same place. The log then ends an unfinished line of this
        /// output before its own line.
        beside_stderr: bool,
    },
    /// The reader has gone away.
    Gone,
}

/// A target that may take output again after it has refused some.
#[derive(Clone, Copy, PartialEq)]
enum Recovers {
    /// A regular file: its disk may have room again.
    File,
    /// A FIFO: another process may open it for reading.
    Fifo,
}

/// Bytes on their way to a file.
pub struct Chunk {
    file: Arc<File>,
    bytes: Vec<u8>,
}

impl Chunk {
    /// Writes the chunk. The port should not be locked.
    pub fn write(&self) -> io::Result<usize> {
        (&*self.file).write(&self.bytes)
    }
}

impl Output {
    /// Output to `file`, or nowhere. `waiting` is written when output begins to wait for its
    /// reader.
    pub fn new(file: Option<File>, waiting: Arc<EventFd>) -> Self {
        let sink = file.map_or(Sink::Nowhere, Sink::new);
        Self {
            sink,
            backlog: VecDeque::new(),
            lost: 0,
            unwritten: 0,
            failing: None,
            told_of_loss: false,
            writing: false,
            told: false,
            spare: Vec::new(),
            waiting,
        }
    }

    /// Redirects output to `file`, beginning with what waits.
    pub fn lead_to(&mut self, file: File) {
        self.sink = Sink::new(file);
    }

    /// Whether there is a target, even one whose reader has gone away.
    pub fn leads_somewhere(&self) -> bool {
        !matches!(self.sink, Sink::Nowhere)
    }

    /// Bytes without a reader: lost, or still waiting.
    pub fn unread(&self) -> u64 {
        self.lost + self.backlog.len() as u64
    }

    /// Bytes that the file did not take.
    pub fn unwritten(&self) -> u64 {
        self.unwritten
    }

    /// Whether no output waits for a reader. A chunk in another thread does not count: that thread
    /// reports it if it has to wait.
    pub fn is_carried(&mut self) -> bool {
        let carried = self.writing || self.backlog.is_empty();
        self.told = !carried;
        carried
    }

    /// The next chunk, if one can be written now. [`Output::wrote`] takes it back.
    pub fn take_chunk(&mut self) -> Option<Chunk> {
        let Sink::To { file, most, .. } = &self.sink else { return None };
        if self.writing || self.backlog.is_empty() || !writable(file.as_fd()) {
            return None;
        }
        let mut bytes = std::mem::take(&mut self.spare);
        bytes.clear();
        bytes.extend(self.backlog.iter().take(*most));
        self.writing = true;
        Some(Chunk { file: file.clone(), bytes })
    }

    /// Handles the result of writing `chunk`. Returns whether the next chunk can be tried at once.
    pub fn wrote(&mut self, chunk: Chunk, result: io::Result<usize>) -> bool {
        self.writing = false;
        self.spare = chunk.bytes;
        match result
            .and_then(|count| if count == 0 { Err(io::ErrorKind::WriteZero.into()) } else { Ok(count) })
        {
            Ok(count) => {
                self.backlog.drain(..count);
                if let Some(lost) = self.failing.take() {
                    tracing::warn!("serial output is written again; {lost} bytes were lost");
                }
                if matches!(self.sink, Sink::To { beside_stderr: true, .. }) {
                    terminal::wrote(self.spare[count - 1]);
                }
                true
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            // Output was redirected meanwhile.
            Err(_) if !matches!(&self.sink, Sink::To { file, .. } if Arc::ptr_eq(file, &chunk.file)) => true,
            Err(error) => {
                // Nothing signals that a full disk has room or that a FIFO has a reader again. So
                // each write is tried, and the bytes of a failed one are dropped.
                if let Sink::To { recovers: Some(recovers), .. } = self.sink {
                    self.drop_chunk(recovers, &error);
                    return true;
                }
                tracing::warn!("serial output is lost from here on: {error}");
                self.lost += self.backlog.len() as u64;
                self.told_of_loss = true;
                self.backlog.clear();
                self.sink = Sink::Gone;
                false
            }
        }
    }

    /// Drops the chunk that the target refused with `error`.
    fn drop_chunk(&mut self, recovers: Recovers, error: &io::Error) {
        let (again, count) = match recovers {
            Recovers::File => ("its file can be written", &mut self.unwritten),
            Recovers::Fifo => ("its pipe is read", &mut self.lost),
        };
        if self.failing.is_none() {
            tracing::warn!("serial output is lost until {again} again: {error}");
        }
        let bytes = self.spare.len();
        self.backlog.drain(..bytes);
        *count += bytes as u64;
        *self.failing.get_or_insert(0) += bytes as u64;
    }

    /// Wakes the event loop if output waits and the loop does not know yet.
    pub fn tell(&mut self) {
        if !self.writing && !self.backlog.is_empty() && !std::mem::replace(&mut self.told, true) {
            // The write fails only on overflow, and then the eventfd is signalled anyway.
            let _ = self.waiting.write(1);
        }
    }
}

impl Sink {
    fn new(file: File) -> Self {
        let kind = file.metadata().map(|metadata| metadata.file_type());
        let (most, recovers) = match kind {
            Ok(kind) if kind.is_file() => (FILE, Some(Recovers::File)),
            Ok(kind) if kind.is_fifo() => (PIPE, Some(Recovers::Fifo)),
            _ if is_nonblocking(&file) => (PIPE, None),
            // A write to a terminal blocks until all of its bytes fit.
            _ => (1, None),
        };
        let beside_stderr = terminal::beside_stderr(&file);
        Sink::To { file: Arc::new(file), most, recovers, beside_stderr }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = match self.sink {
            Sink::Nowhere => return Ok(bytes.len()),
            Sink::Gone => 0,
            Sink::To { .. } => BACKLOG - self.backlog.len(),
        };
        let kept = bytes.len().min(room);
        self.backlog.extend(&bytes[..kept]);
        if kept < bytes.len() {
            self.lost += (bytes.len() - kept) as u64;
            if !std::mem::replace(&mut self.told_of_loss, true) {
                tracing::warn!("serial output is lost: {BACKLOG} bytes wait for a reader");
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
