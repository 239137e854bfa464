//! The disks of emulated hosts with their own root: Debian on ext4, as on real machines.
//! [`cloud`](super::cloud) has disks for their guests.
//!
//! Each disk is made once and cached. A host's writes go to its emulator's memory, so each host
//! finds the disk unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::debian;
use crate::test::setup;
use crate::{Error, Result, tool};

/// The Debian suite of hosts whose first process is the laboratory's, and of guests.
pub(super) const SUITE: &str = "bookworm";
/// The suites of hosts whose first process is systemd: its versions 257 and 252.
pub const SYSTEMD: [&str; 2] = ["trixie", "bookworm"];
/// Packages besides the essential ones: programs that guests' commands and the host itself run.
const PACKAGES: &str = "iproute2,kmod,attr,strace,passt,openssh-client,makedumpfile";
/// The same for hosts with systemd: logins, and what loads the next kernel.
const PACKAGES_OF_SYSTEMD: &str = "systemd-sysv,udev,dbus,libpam-systemd,kexec-tools";
/// The file system's size in MiB. The file is sparse.
const MIB: u32 = 1024;

/// The programs that make the disk.
pub const PROGRAMS: [&str; 2] = ["mmdebstrap", "mke2fs"];

/// The image of a disk without systemd, made if need be. Making it needs root.
pub fn debian(cache: &Cache) -> Result<PathBuf> {
    image(cache, SUITE, PACKAGES)
}

/// The image of a disk with a suite's systemd, made if need be. Making it needs root.
pub fn with_systemd(cache: &Cache, suite: &str) -> Result<PathBuf> {
    image(cache, suite, PACKAGES_OF_SYSTEMD)
}

fn image(cache: &Cache, suite: &str, packages: &str) -> Result<PathBuf> {
    let made = cache.entry(&format!("disk/{suite}-{}", digest([packages.as_bytes()])), |dir| {
        eprintln!("lab: a disk with a {suite} for emulated hosts");
        let root = bootstrap(dir, suite, packages)?;
        let image = dir.join("root.ext4");
        tool::output(ext4(&root).arg(&image).arg(format!("{MIB}M")))?;
        fs::remove_dir_all(&root).map_err(Error::file("remove", &root))
    });
    Ok(made?.join("root.ext4"))
}

/// Installs a Debian of `suite` with `packages` below `dir`.
pub(super) fn bootstrap(dir: &Path, suite: &str, packages: &str) -> Result<PathBuf> {
    if !setup::is_root() {
        return Err(Error::Usage("a disk with a Debian needs root to be made: run it as root".into()));
    }
    let root = dir.join("root");
    let mut command = Command::new(tool::need("mmdebstrap")?);
    command.args(["--variant=minbase", &format!("--include={packages}"), "--quiet", suite]);
    tool::output(command.arg(&root).arg(debian::mirror()?))?;
    Ok(root)
}

/// The command that makes a file system of `root`. The caller adds the file's name.
pub(super) fn ext4(root: &Path) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-d"]).arg(root);
    command
}
