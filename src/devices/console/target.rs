//! The targets of a serial port: how they are named and opened.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use vellum_sys::file::{LogLock, is_writable, lock_log, set_nonblocking};
use vellum_sys::open::{self, Kind};
use vellum_sys::terminal;

/// The target of a serial port, as `--serial` names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// Standard input and output. A terminal is put into raw mode.
    #[default]
    Terminal,
    /// A file, FIFO or character device. A file is truncated when the machine starts and then
    /// appended to. A FIFO needs a reader.
    File(PathBuf),
    /// A new pseudo-terminal. Its path is printed.
    Pty,
    /// No input; output is discarded.
    Null,
}

impl std::str::FromStr for Target {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once('=') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            None if s == "terminal" => Ok(Self::Terminal),
            None if s == "pty" => Ok(Self::Pty),
            None if s == "null" => Ok(Self::Null),
            _ => Err("use terminal, file=PATH, pty or null".into()),
        }
    }
}

/// A target that has been opened.
#[derive(Debug)]
pub struct Opened {
    /// Takes what the guest writes.
    pub output: Option<File>,
    /// Supplies what the guest reads.
    pub input: Option<File>,
    /// The path of a new pseudo-terminal.
    pub pty: Option<String>,
    /// Kept open so that the pseudo-terminal does not hang up.
    pub(super) slave: Option<File>,
    pub(super) file: Option<Untouched>,
    /// Whether the input is a terminal that is already raw. The process that set raw mode also
    /// restores it.
    pub(super) raw: bool,
}

impl Opened {
    /// A target that another process has opened.
    pub fn handed_over(output: Option<File>, input: Option<File>, slave: Option<File>) -> Self {
        Self { output, input, pty: None, slave, file: None, raw: false }
    }

    /// Sets whether the input is a terminal that is already raw. The other process restores it.
    pub fn raw(self, raw: bool) -> Self {
        Self { raw, ..self }
    }

    /// The pseudo-terminal's slave, which keeps it from hanging up.
    pub fn slave(&self) -> Option<&File> {
        self.slave.as_ref()
    }

    /// Called when the machine starts: truncates a file.
    pub fn begin(&self) {
        self.file.iter().for_each(Untouched::begin);
    }

    /// Called when another process has the output. That process now decides whether the file is
    /// truncated or kept.
    pub fn hand_over(&self) {
        self.file.iter().for_each(|file| file.begun.store(true, Ordering::Relaxed));
    }
}

/// An output file that stays unchanged until the machine starts. If the machine never starts, a
/// file created here is removed.
#[derive(Debug)]
pub(super) struct Untouched {
    file: File,
    path: PathBuf,
    created: bool,
    begun: AtomicBool,
    /// Another machine was writing to the file when it was opened: the one that is about to move
    /// here. Its output is kept.
    shared: bool,
}

impl Untouched {
    /// Opens `path`, and locks it if it is a regular file. The lock belongs to the open file
    /// description, so it moves with the descriptor.
    fn open(path: &Path, beside: bool) -> Result<Self, OpenError> {
        let fail = |error| OpenError::Open { value: path.into(), error };
        // Append mode: if another process truncates the file, output continues at the new end.
        let open = |create| open::open(path, File::options().append(true).create_new(create), Kind::Output);
        let (file, created) = match open(false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (open(true), true),
            found => (found, false),
        };
        let file = file.map_err(fail)?;
        // Several machines may write to one device.
        let regular = file.metadata().map_err(fail)?.is_file();
        // A file system without locks cannot have locked disks either.
        let locked = if regular { lock_log(&file).unwrap_or(LogLock::Mine) } else { LogLock::Mine };
        let shared = locked == LogLock::Writers;
        let untouched = Self { file, path: path.into(), created, begun: AtomicBool::new(false), shared };
        match locked {
            LogLock::Others => Err(OpenError::Taken(path.into())),
            LogLock::Writers if !beside => Err(OpenError::Written(path.into())),
            _ => Ok(untouched),
        }
    }

    pub(super) fn begin(&self) {
        let regular = self.file.metadata().is_ok_and(|metadata| metadata.is_file());
        if self.begun.swap(true, Ordering::Relaxed) || !regular {
            return;
        }
        if self.shared {
            // The other machine may have ended by now. If not, the file has the lines of both.
            let _ = lock_log(&self.file);
        } else if let Err(error) = self.file.set_len(0) {
            tracing::warn!("{}: cannot be truncated: {error}", self.path.display());
        }
    }
}

impl Drop for Untouched {
    fn drop(&mut self) {
        if self.created && !self.begun.load(Ordering::Relaxed) {
            // The sandbox may forbid this by now.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Target {
    /// Opens the target. A file keeps its content until [`Opened::begin`].
    ///
    /// # Errors
    /// The target cannot be opened. The error says what would work.
    pub fn open(&self) -> Result<Opened, OpenError> {
        self.open_for(false)
    }

    /// Like [`Target::open`], for a machine that arrives from another process. If that process
    /// writes to the same file, both append to it and nothing is lost.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn open_beside(&self) -> Result<Opened, OpenError> {
        self.open_for(true)
    }

    fn open_for(&self, beside: bool) -> Result<Opened, OpenError> {
        let fail = |value: &Path, error| OpenError::Open { value: value.to_owned(), error };
        let mut opened = Opened { output: None, input: None, pty: None, slave: None, file: None, raw: false };
        match self {
            Self::Null => {}
            Self::Terminal => {
                let duplicate = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
                let fail = |source| fail(Path::new("terminal"), source);
                opened.output = Some(duplicate(io::stdout().as_fd()).map_err(fail)?);
                opened.input = Some(duplicate(io::stdin().as_fd()).map_err(fail)?);
            }
            Self::File(path) => {
                let file = Untouched::open(path, beside)?;
                opened.output = Some(file.file.try_clone().map_err(|source| fail(path, source))?);
                opened.file = Some(file);
            }
            Self::Pty => {
                let fail = |source| fail(Path::new("pty"), source);
                let (master, slave, path) = terminal::open_pty().map_err(fail)?;
                set_nonblocking(&master).map_err(fail)?;
                opened.input = Some(master.try_clone().map_err(fail)?);
                (opened.output, opened.slave, opened.pty) = (Some(master), Some(slave), Some(path));
            }
        }
        Ok(opened)
    }
}

/// Why a descriptor cannot be a target.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// It is not open for writing.
    #[error("the descriptor was not opened for writing")]
    ReadOnly,
    /// It has an unsuitable file type.
    #[error("the descriptor is not a file, pipe, socket or terminal")]
    Kind,
    /// The host refused to describe it.
    #[error("the descriptor: {0}")]
    Host(#[from] io::Error),
}

/// Checks that output can go to `file`, which another process has opened.
pub fn check_output(file: &File) -> Result<(), Unfit> {
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_fifo() && !kind.is_socket() && !kind.is_char_device() {
        Err(Unfit::Kind)
    } else if !is_writable(file)? {
        Err(Unfit::ReadOnly)
    } else {
        Ok(())
    }
}

/// A target cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The host refuses to open it.
    #[error("{}: cannot be opened: {error}; use pty, null, or file=PATH with a path that can be written", value.display())]
    Open {
        /// The path or kind of the target.
        value: PathBuf,
        /// The host's error.
        error: io::Error,
    },
    /// The file is locked as an input of a machine.
    #[error("{}: is a disk, kernel or initial RAM disk of this or another running machine; use another file", .0.display())]
    Taken(PathBuf),
    /// The file is locked as another output.
    #[error("{}: is the output of another running machine, or another output of this one; use another file", .0.display())]
    Written(PathBuf),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_named_as_documented() {
        assert_eq!("file=/tmp/a=b".parse(), Ok(Target::File("/tmp/a=b".into())));
        assert_eq!(("pty".parse(), "null".parse()), (Ok(Target::Pty), Ok(Target::Null)));
        for wrong in ["file", "file=", "tty", ""] {
            assert!(wrong.parse::<Target>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_is_as_it_was_until_the_machine_starts() {
        let path = std::env::temp_dir().join(format!("vellum-target-{}", std::process::id()));
        let target = Target::File(path.clone());
        drop(target.open().unwrap());
        assert!(!path.exists(), "left behind");
        std::fs::write(&path, "from before").unwrap();
        let opened = target.open().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"from before");
        opened.begin();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        drop(opened);
        assert!(path.exists());
        let opened = target.open().unwrap();
        assert!(matches!(target.open(), Err(OpenError::Written(_))), "two machines write to it");
        opened.begin();
        io::Write::write_all(&mut opened.output.as_ref().unwrap(), b"one\n").unwrap();
        // A machine that is about to move here may open the same file. It truncates nothing.
        let beside = target.open_beside().unwrap();
        beside.begin();
        io::Write::write_all(&mut beside.output.as_ref().unwrap(), b"two\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
        // The file was truncated meanwhile. Appending leaves no hole.
        std::fs::write(&path, "").unwrap();
        io::Write::write_all(&mut opened.output.as_ref().unwrap(), b"three\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"three\n");
        drop((opened, beside));
        let disk = File::open(&path).unwrap();
        assert!(vellum_sys::file::lock(&disk, vellum_sys::file::Lock::Shared).unwrap());
        assert!(matches!(target.open(), Err(OpenError::Taken(_))));
        std::fs::remove_file(&path).unwrap();
    }
}
