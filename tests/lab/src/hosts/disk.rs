//! The disk of an emulated host that has a root of its own: Debian on ext4, as machines have it and
//! an initramfs has not. Disks for its guests as clouds have them are in [`cloud`](super::cloud).
//!
//! It is made once and kept in the cache. A host writes into memory of its emulator's, so that each
//! finds it as it was made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::debian;
use crate::test::setup;
use crate::{Error, Result, tool};

/// The Debian.
pub(super) const SUITE: &str = "bookworm";
/// What it has beside the essential: what commands in a guest may want to call, and what the host
/// itself does.
const PACKAGES: &str = "iproute2,kmod,attr,strace,passt,openssh-client,makedumpfile";
/// How large the file system is, in MiB; the file is sparse.
const MIB: u32 = 1024;

/// The programs of this machine that make it.
pub const PROGRAMS: [&str; 2] = ["mmdebstrap", "mke2fs"];

/// The root, made if need be, which takes root.
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

/// A Debian with `packages`, below `dir`.
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

/// What makes a file system of `root`, in what is named next.
pub(super) fn ext4(root: &Path) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-d"]).arg(root);
    command
}
