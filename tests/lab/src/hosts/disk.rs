//! The disk of an emulated host with its own root: Debian on ext4, as on real machines.
//! [`cloud`](super::cloud) has disks for its guests.
//!
//! The disk is made once and cached. A host's writes go to its emulator's memory, so each host
//! finds the disk unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::debian;
use crate::test::setup;
use crate::{Error, Result, tool};

/// The Debian suite.
pub(super) const SUITE: &str = "bookworm";
/// Packages besides the essential ones: programs that guests' commands and the host itself run.
const PACKAGES: &str = "iproute2,kmod,attr,strace,passt,openssh-client,makedumpfile";
/// The file system's size in MiB. The file is sparse.
const MIB: u32 = 1024;

/// The programs that make the disk.
pub const PROGRAMS: [&str; 2] = ["mmdebstrap", "mke2fs"];

/// The disk's image, made if need be. Making it needs root.
pub fn debian(cache: &Cache) -> Result<PathBuf> {
    let made = cache.entry(&format!("disk/{SUITE}-{}", digest([PACKAGES.as_bytes()])), |dir| {
        eprintln!("lab: a disk with a {SUITE} for emulated hosts");
        let root = bootstrap(dir, PACKAGES)?;
        let image = dir.join("root.ext4");
        tool::output(ext4(&root).arg(&image).arg(format!("{MIB}M")))?;
        fs::remove_dir_all(&root).map_err(Error::file("remove", &root))
    });
    Ok(made?.join("root.ext4"))
}

/// Installs a Debian with `packages` below `dir`.
pub(super) fn bootstrap(dir: &Path, packages: &str) -> Result<PathBuf> {
    if !setup::is_root() {
        return Err(Error::Usage("a disk with a Debian needs root to be made: run it as root".into()));
    }
    let root = dir.join("root");
    let mut command = Command::new(tool::need("mmdebstrap")?);
    command.args(["--variant=minbase", &format!("--include={packages}"), "--quiet", SUITE]);
    tool::output(command.arg(&root).arg(debian::mirror()?))?;
    Ok(root)
}

/// The command that makes a file system of `root`. The caller adds the file's name.
pub(super) fn ext4(root: &Path) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-d"]).arg(root);
    command
}
