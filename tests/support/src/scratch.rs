//! Directories for the files of a test.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io, process};

use crate::{Failed, ensure};

/// An empty directory. It is removed with its contents when this is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new directory below the system's temporary directory.
    pub fn new() -> io::Result<Self> {
        Self::within(&env::temp_dir())
    }

    /// A new directory below `parent`.
    pub fn within(parent: &Path) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("vellum-{}-{number}", process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// The path of the directory.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Writes a program. Another process does: a child that another thread starts meanwhile has this
/// process's descriptors until it is executed, and a program that is open for writing cannot be
/// started (ETXTBSY).
pub fn executable(path: &Path, content: &[u8]) -> Result<(), Failed> {
    let mut shell = Command::new("sh");
    shell.args(["-c", "cat >\"$1\" && chmod 755 \"$1\"", "sh"]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn()?;
    shell.stdin.take().ok_or("no pipe")?.write_all(content)?;
    ensure(shell.wait()?.success(), || format!("{} cannot be written", path.display()))
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_new_and_goes_with_its_files() {
        let (one, other) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        assert_ne!(one.dir(), other.dir());
        fs::write(one.path("file"), "").unwrap();
        let dir = one.dir().to_owned();
        drop(one);
        assert!(!dir.exists() && other.dir().exists());
    }
}
