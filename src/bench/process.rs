//! Processes of this program, started as a user would. They end with the measurement.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;
use vellum_sys::signal;

/// The directory for the sockets, results and output of one round. Removed on drop.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new() -> Result<Self, Error> {
        Self::below(&std::env::temp_dir())
    }

    /// `temp` may be relative. The runtime directory must be absolute, or the processes would use
    /// the user's.
    fn below(temp: &Path) -> Result<Self, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let failed = |e| Error::Host("creating the measurement's directory", e);
        let path = temp.join(format!("vellum-bench-{}-{number}", std::process::id()));
        let path = std::path::absolute(path).map_err(failed)?;
        DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The control socket of the machine `name`.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("vellum/{name}.sock"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process of the measurement.
pub(crate) struct Process {
    what: &'static str,
    child: Child,
    said: PathBuf,
}

impl Process {
    /// Starts `vellum` with `arguments`, with its sockets in `directory`. Its output goes to
    /// `NAME.out` there.
    pub(crate) fn start(
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

    /// The exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.child.try_wait().map_err(|e| Error::Host(self.what, e))
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus, Error> {
        self.child.wait().map_err(|e| Error::Host(self.what, e))
    }

    /// The process's last message, as the error why it ended or did not do its work.
    pub(crate) fn failed(&self) -> Error {
        let mut said = String::new();
        // The output is short so far. Output that is not text is ignored.
        let _ = File::open(&self.said).and_then(|file| file.take(64 << 10).read_to_string(&mut said));
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("the process ended");
        Error::Host(self.what, io::Error::other(line.trim_start_matches("vellum: ").to_owned()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Has no effect if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the output of `name`.
pub(crate) fn printed(directory: &Directory, name: &str) -> Result<String, Error> {
    read(&directory.path(&format!("{name}.out")))
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|e| Error::Host("the output of a process of the measurement", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_temporary_directory_gives_an_absolute_one() {
        let directory = Directory::below(Path::new(".")).unwrap();
        let socket = directory.socket("a");
        assert!(socket.is_absolute() && directory.0.is_dir(), "{}", socket.display());
    }
}
