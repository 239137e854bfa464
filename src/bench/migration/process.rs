//! Processes of this program's, which a measurement starts as a user does, and which do not outlive it.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;
use vellum_sys::signal;

/// Where the processes of one round have their sockets, results and last words; gone with it.
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn new() -> Result<Self, Error> {
        Self::below(&std::env::temp_dir())
    }

    /// `temp` may be relative. A runtime directory is absolute, or the processes take that of the user.
    fn below(temp: &Path) -> Result<Self, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let failed = |e| Error::Host("a directory for the sockets of the measurement", e);
        let path = temp.join(format!("vellum-bench-{}-{number}", std::process::id()));
        let path = std::path::absolute(path).map_err(failed)?;
        DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        Ok(Self(path))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The control socket of the machine of this name.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("vellum/{name}.sock"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One of them.
pub(super) struct Process {
    what: &'static str,
    child: Child,
    said: PathBuf,
}

impl Process {
    /// Starts `vellum` with `arguments`, and its sockets in `directory`. What it prints goes to `NAME.out` there.
    pub(super) fn start(
        directory: &Directory,
        what: &'static str,
        name: &str,
        arguments: &[String],
    ) -> Result<Self, Error> {
        let failed = |error| Error::Host(what, error);
        let said = directory.path(&format!("{name}.err"));
        let program = std::env::current_exe().map_err(failed)?;
        let output = File::create(directory.path(&format!("{name}.out"))).map_err(failed)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", &directory.0)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(File::create(&said).map_err(failed)?);
        signal::end_with_parent(&mut command);
        Ok(Self { what, child: command.spawn().map_err(failed)?, said })
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.child.try_wait().map_err(|e| Error::Host(self.what, e))
    }

    /// What it has said, as why it has ended, or has not done what it should.
    pub(super) fn failed(&self) -> Error {
        let mut said = String::new();
        // What it has said by now is little, and what is no text says nothing.
        let _ = File::open(&self.said).and_then(|file| file.take(64 << 10).read_to_string(&mut said));
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it has ended");
        Error::Host(self.what, io::Error::other(line.trim_start_matches("vellum: ").to_owned()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads what `name` has printed.
pub(super) fn printed(directory: &Directory, name: &str) -> Result<String, Error> {
    read(&directory.path(&format!("{name}.out")))
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|e| Error::Host("what a process of the measurement has printed", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_temporary_directory_gives_an_absolute_one() {
        let directory = Directory::below(Path::new("target")).unwrap();
        let socket = directory.socket("a");
        assert!(socket.is_absolute() && directory.0.is_dir(), "{}", socket.display());
    }
}
