//! A fresh Debian without Vellum, unpacked into a directory, and commands in it.
//!
//! Its archive is made once and cached. [`command`] runs a command with its own mounts and
//! processes. They are in namespaces, which the kernel removes when the last process in them ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::{Error, Result, debian, tool};

/// The Debian suite.
pub const SUITE: &str = "bookworm";

/// The archive of a minimal Debian with additional `packages`, made if need be. Making it needs
/// root.
pub fn archive(cache: &Cache, packages: &[&str]) -> Result<PathBuf> {
    let packages = packages.join(",");
    let made = cache.entry(&format!("root/{SUITE}-{}", digest([packages.as_bytes()])), |dir| {
        eprintln!("lab: a fresh {SUITE} with {packages}");
        let mut command = Command::new(tool::need("mmdebstrap")?);
        command.args(["--variant=minbase", &format!("--include={packages}"), "--quiet", SUITE]);
        tool::output(command.arg(dir.join("root.tar")).arg(debian::mirror()?)).map(drop)
    })?;
    Ok(made.join("root.tar"))
}

/// Unpacks `archive` into `root`, which it creates. /dev/null is the only device node.
pub fn unpack(archive: &Path, root: &Path) -> Result<()> {
    fs::create_dir_all(root).map_err(Error::file("create", root))?;
    tool::output(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(root).arg("--exclude=./dev/*"))?;
    // dpkg's processes need /dev/null.
    let null = root.join("dev/null");
    tool::output(Command::new("mknod").args(["-m", "666"]).arg(&null).args(["c", "1", "3"])).map(drop)
}

/// The first process: it makes the mounts, makes the directory the root, and waits for the command.
/// It uses pivot_root(2), because tests cannot create user namespaces under chroot(2). It has all
/// of the host's devices and its own /dev/shm.
const ENTER: &str = r#"set -e
root=$0
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
cd "$root"
pivot_root . mnt
umount --lazy /mnt
cd "$1"
shift
status=0
"$@" || status=$?
exit $status"#;

/// `words` in `root`, in its directory `dir`, in namespaces of its own and without this process's
/// environment. Its processes and mounts end with the command that is started.
pub fn command(root: &Path, dir: &str, words: &[&str]) -> Result<Command> {
    let mut command = Command::new(tool::need("unshare")?);
    command.args(["--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", ENTER]);
    command.arg(root).arg(dir).args(words).env_clear();
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    Ok(command)
}
