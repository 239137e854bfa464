//! Where results are written: opened before the run, so that a path that cannot be written is found before an hour is spent and
//! the sandbox never has to open one.
//!
//! What was in the file stays until there is something to put in its place, and room for it: a confined process may rename
//! nothing, so the room is allocated before the first byte is overwritten. A file that holds something else than a
//! result, a disk image for instance, is not overwritten at all.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{html, json};
use vellum_sys::{self as sys, open};

/// Why a result could not be written. Each is one line, complete with what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be opened.
    #[error("{}: cannot be written: {source}; name a file in a directory that you may write to, or `-` for standard output", path.display())]
    Create {
        /// What was asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Something else than a result would be lost.
    #[error("{}: holds something else than {kind}, and is left as it is: name another file, or remove this one", path.display())]
    Foreign {
        /// What was asked for.
        path: PathBuf,
        /// What would have been written there.
        kind: Kind,
    },
    /// The file was opened, but the result does not fit into it.
    #[error("{}: the result could not be written: {source}; free space there, or write to another file system", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What is written, and so what may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Results as JSON.
    Results,
    /// A page.
    Page,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Results => "results of Vellum's",
            Self::Page => "a page of Vellum's",
        })
    }
}

impl Kind {
    /// Whether what begins with `start` and is at `path` is of this kind, of whatever version.
    fn is(self, path: &Path, start: &[u8]) -> bool {
        match self {
            Self::Page => start.starts_with(html::START.as_bytes()),
            Self::Results => matches!(json::read(path), Ok(_) | Err(json::Error::OtherSchema { .. })),
        }
    }
}

/// Where a result goes, open from before the run until its end.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    /// `None`: standard output.
    file: Option<File>,
    created: bool,
    /// How long the file was; a pipe or a device has no length and needs no room.
    length: Option<u64>,
}

impl Writer {
    /// Opens `path`, or standard output for `-`.
    pub fn open(path: &Path, kind: Kind) -> Result<Self, Error> {
        if path == Path::new("-") {
            return Ok(Self { path: "standard output".into(), file: None, created: false, length: None });
        }
        let failed = |source| Error::Create { path: path.into(), source };
        let open =
            |create| open::open(path, File::options().write(true).create_new(create), open::Kind::Output);
        let (file, created) = match open(true) {
            Ok(file) => (file, true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => (open(false).map_err(failed)?, false),
            Err(e) => return Err(failed(e)),
        };
        // Who reads a FIFO may be slower than this process writes, as with standard output.
        open::wait(&file).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if about.is_file() && about.len() > 0 {
            let mut start = Vec::new();
            let there = File::open(path).map_err(failed)?;
            there.take(html::START.len() as u64).read_to_end(&mut start).map_err(failed)?;
            if !kind.is(path, &start) {
                return Err(Error::Foreign { path: path.into(), kind });
            }
        }
        Ok(Self {
            path: path.into(),
            file: Some(file),
            created,
            length: about.is_file().then_some(about.len()),
        })
    }

    /// Whether the terminal's tables would end up in the same place.
    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    /// Puts `content` in the place of what was there. Makes no system call but `write`, `fallocate` and `ftruncate`.
    pub fn write(self, content: &[u8]) -> Result<(), Error> {
        let written = match (self.file, self.length) {
            (None, _) => {
                let mut out = io::stdout().lock();
                allow_broken_pipe(out.write_all(content).and_then(|()| out.flush()))
            }
            (Some(file), Some(length)) => replace(&file, length, content),
            (Some(mut file), None) => file.write_all(content),
        };
        written.map_err(|source| Error::Write { path: self.path, source })
    }

    /// Leaves nothing behind where the run never started: removes the file if [`open`](Self::open) made it. To be
    /// called before the sandbox closes the file system.
    pub fn discard(self) {
        if self.created {
            // The file is empty and nobody waits for it: a failure to remove it is not worth hiding the reason why
            // the run did not start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Overwrites a regular file of `length` bytes, or fails before its first byte has changed.
fn replace(file: &File, length: u64, content: &[u8]) -> io::Result<()> {
    if let Err(error) = sys::file::reserve(file, content.len() as u64) {
        file.set_len(length)?;
        return Err(error);
    }
    file.write_all_at(content, 0)?;
    file.set_len(content.len() as u64)
}

/// A reader that has seen enough (`| head`) is no error.
pub fn allow_broken_pipe(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(e) })
}
