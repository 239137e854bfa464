//! Output files for results.
//!
//! A file is opened before the run: a bad path fails at once, and the sandbox never opens a file.
//! Its old content stays until there is new content and room for it. The sandbox forbids renames,
//! so `write` allocates the space before it overwrites the first byte. A file that holds something
//! else, such as a disk image, is never overwritten.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{html, json};
use vellum_sys::{self as sys, open};

/// Why a result cannot be written. Each message is one line and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened.
    #[error("{}: cannot write: {source}; name a file in a directory that you can write to, or `-` for standard output", path.display())]
    Create {
        /// The path as given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file holds something else than a result.
    #[error("{}: does not hold {kind}, so it was not overwritten: name another file or remove this one", path.display())]
    Foreign {
        /// The path as given.
        path: PathBuf,
        /// What would have been written there.
        kind: Kind,
    },
    /// The file is open, but writing failed.
    #[error("{}: cannot write the result: {source}; free space there or use another file system", path.display())]
    Write {
        /// The path as given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// What is written. Only content of the same kind is overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Results as JSON.
    Results,
    /// An HTML page.
    Page,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Results => "Vellum results",
            Self::Page => "a Vellum page",
        })
    }
}

impl Kind {
    /// Whether the file at `path`, which begins with `start`, is of this kind, in any version.
    fn is(self, path: &Path, start: &[u8]) -> bool {
        match self {
            Self::Page => start.starts_with(html::START.as_bytes()),
            Self::Results => matches!(json::read(path), Ok(_) | Err(json::Error::OtherSchema { .. })),
        }
    }
}

/// An output that stays open from before the run until its end.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    /// `None` for standard output.
    file: Option<File>,
    created: bool,
    /// The length of the old content. `None` for a pipe or a device, which need no allocation.
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
        // A FIFO's reader may be slower than this process, so writes must block as on standard
        // output.
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

    /// Whether the result goes to standard output, where the tables would go too.
    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    /// Replaces the old content. Makes no system calls but `write`, `fallocate` and `ftruncate`.
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

    /// Removes the file if [`open`](Self::open) created it, for a run that never started. Call it
    /// before the sandbox closes the file system.
    pub fn discard(self) {
        if self.created {
            // The file is empty. An error here must not hide the reason why the run did not start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Overwrites a regular file of `length` bytes, or fails before its first byte changes.
fn replace(file: &File, length: u64, content: &[u8]) -> io::Result<()> {
    if let Err(error) = sys::file::reserve(file, content.len() as u64) {
        file.set_len(length)?;
        return Err(error);
    }
    file.write_all_at(content, 0)?;
    file.set_len(content.len() as u64)
}

/// Ignores a closed pipe: the reader (`| head`) has seen enough.
pub fn allow_broken_pipe(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(e) })
}
