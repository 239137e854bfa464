//! A process that this program starts for itself, and that outlives it: `vellum fork` and
//! `vellum live-update restore` start one for each machine. It inherits descriptors, and a file that
//! says what they are.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::client::failure;
use super::failure::Failure;
use vellum_control::names;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::file::{self, taken};
use vellum_sys::mmap::memfd;
use vellum_sys::poll::Poll;
use vellum_sys::{program, signal};

/// How often signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// Reads the file that the process inherited under the number `list`.
///
/// # Errors
/// The descriptor is not open, or another version wrote the file.
pub(super) fn inherited<L: DeserializeOwned>(list: RawFd) -> Result<L, Failure> {
    let wrong = |what: &dyn std::fmt::Display| Failure::usage(format!("--child {list}: {what}"));
    let list = File::from(taken(list).ok_or_else(|| wrong(&"no such descriptor is open"))?);
    let mut bytes = vec![0; list.metadata().map_err(|error| wrong(&error))?.len() as usize];
    list.read_exact_at(&mut bytes, 0).map_err(|error| wrong(&error))?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(&error))
}

/// This program with the words of a command line. Standard output and error go to `outputs`.
///
/// # Errors
/// /proc is not there.
pub(super) fn this_program(
    words: impl IntoIterator<Item = OsString>,
    [stdout, stderr]: [Stdio; 2],
) -> Result<Command, Failure> {
    let mut command = program::own().map_err(Failure::host)?;
    command.args(words).stdout(stdout).stderr(stderr);
    Ok(command)
}

/// The last line of messages, without the program's name.
fn last_line(text: &str) -> Option<String> {
    text.lines().last().map(|line| line.trim_start_matches("vellum: ").to_owned())
}

/// A machine that is being started, or another process that this program starts for itself.
pub(super) struct Starting {
    pub name: String,
    pub child: Child,
    /// Receives a byte when it is ready, and sends a byte when that was reported.
    pub waits: UnixStream,
    log: Option<Log>,
}

/// The file with a machine's messages. The machine gives it its name.
pub(super) struct Log {
    file: File,
    pub path: PathBuf,
}

impl Log {
    /// The file of the machine `name`, which has no name yet.
    ///
    /// # Errors
    /// The directory of names cannot be used.
    pub fn new(name: &str) -> Result<Self, Failure> {
        let (directory, path) =
            (names::make_directory().map_err(failure)?, names::own_log(name).map_err(failure)?);
        let file = file::unnamed(&directory);
        let file = file.map_err(|error| Failure::host(format!("{}: {error}", directory.display())))?;
        Ok(Self { file, path })
    }

    /// What its process writes to.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn output(&self) -> Result<Stdio, Failure> {
        Ok(self.file.try_clone().map_err(Failure::host)?.into())
    }

    /// Its last line.
    fn last(&self) -> Option<String> {
        let mut bytes = vec![0; self.file.metadata().ok()?.len() as usize];
        self.file.read_exact_at(&mut bytes, 0).ok()?;
        last_line(&String::from_utf8_lossy(&bytes))
    }

    /// Removes its name, if it has it. A machine with a name in use does not get it.
    fn remove(&self) {
        let number = |about: Metadata| (about.dev(), about.ino());
        let own = self.file.metadata().map(number).ok();
        if own.is_some() && fs::symlink_metadata(&self.path).map(number).ok() == own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Starting {
    /// Starts `command`, [`this_program`] with a command line, as a process that outlives this one.
    /// `inherit` makes the list of what it inherits, which [`inherited`] reads, and the descriptors. It
    /// gets the number of the socket on which the process is to send a byte when it is ready. `log`
    /// has its messages, if its standard error goes there.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn spawn<L: Serialize>(
        name: &str,
        mut command: Command,
        inherit: impl FnOnce(RawFd, Option<PathBuf>) -> (L, Vec<RawFd>),
        log: Option<Log>,
    ) -> Result<Self, Failure> {
        let [waits, theirs] = <[UnixStream; 2]>::from(UnixStream::pair().map_err(Failure::host)?);
        let (inherited, mut descriptors) =
            inherit(theirs.as_raw_fd(), log.as_ref().map(|log| log.path.clone()));
        let mut list = memfd(c"vellum-child", 0, None).map_err(Failure::host)?;
        let bytes = serde_json::to_vec(&inherited).map_err(Failure::host)?;
        list.write_all(&bytes).map_err(Failure::host)?;
        command.arg(format!("--child={}", list.as_raw_fd())).stdin(Stdio::null());
        descriptors.extend([theirs.as_raw_fd(), list.as_raw_fd()]);
        program::detached_with(&mut command, descriptors);
        let child = command.spawn().map_err(|error| Failure::host(format!("{name}: {error}")))?;
        Ok(Self { name: name.to_owned(), child, waits, log })
    }

    /// Waits until the machine runs.
    ///
    /// # Errors
    /// It does not, for the reason that its process has told.
    pub fn runs(&mut self) -> Result<(), Failure> {
        self.ready().map_err(|failed| failed.under(&format!("{}: ", self.name)))
    }

    /// Waits until the process is ready.
    ///
    /// # Errors
    /// It has ended, for the reason that it has told.
    pub fn ready(&mut self) -> Result<(), Failure> {
        loop {
            if signal::take().is_some() {
                return Err(Failure::host("it was cancelled"));
            }
            let mut poll = Poll::default();
            poll.readable(&self.waits);
            if !poll.wait(Some(LOOK)).map_err(Failure::host)? {
                continue;
            }
            return match (&self.waits).read(&mut [0]) {
                Ok(1) => Ok(()),
                _ => Err(self.why()),
            };
        }
    }

    /// The error of a process that has ended.
    fn why(&mut self) -> Failure {
        // It closes its standard error when it ends.
        let mut piped = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut piped);
        }
        let ended = self.child.wait();
        self.remove_log();
        let why = self.log.as_ref().and_then(Log::last).or_else(|| last_line(&piped));
        let why = why.unwrap_or_else(|| match &ended {
            Ok(status) => format!("it ended by {status}"),
            Err(error) => error.to_string(),
        });
        let code = ended.ok().and_then(|status| status.code());
        let mut known = [Exit::Usage, Exit::NotRun].into_iter();
        let exit = known.find(|exit| code == Some(exit.code().into())).unwrap_or(Exit::Error);
        Failure::ended(exit, why)
    }

    /// Ends the machine, because nobody waits for it.
    pub fn give_up(&mut self) {
        let _ = self.waits.shutdown(std::net::Shutdown::Both);
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.remove_log();
    }

    /// Removes the file with its messages: they were told, or the machine is gone.
    fn remove_log(&self) {
        if let Some(log) = &self.log {
            log.remove();
        }
    }
}
