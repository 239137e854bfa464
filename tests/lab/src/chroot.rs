//! A Debian that has never seen Vellum, unpacked into a directory, and commands in it.
//!
//! The archive of it is made once and kept in the cache. Where a command needs more than files,
//! [`command`] gives it mounts and processes of its own: they are namespaces', which the kernel
//! takes down with the last process in them, however this one ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::{Error, Result, debian, tool};

/// Debian's suite.
pub const SUITE: &str = "bookworm";

/// The archive of a minimal Debian with `packages` besides, made if need be, which takes root.
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

/// Unpacks `archive` into `root`, which is made. There are no device nodes but /dev/null.
pub fn unpack(archive: &Path, root: &Path) -> Result<()> {
    fs::create_dir_all(root).map_err(Error::file("create", root))?;
    tool::output(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(root).arg("--exclude=./dev/*"))?;
    // dpkg's own processes want one.
    let null = root.join("dev/null");
    tool::output(Command::new("mknod").args(["-m", "666"]).arg(&null).args(["c", "1", "3"])).map(drop)
}

/// What the first process does: it makes the mounts, has the directory be the root, and waits for
/// the command. A root that is none of chroot(2)'s lets tests make user namespaces. Of the host's
/// devices all are there, with a /dev/shm of its own.
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

/// `words` in `root`, from the directory `dir` there, in namespaces of their own and without this
/// process' environment. The processes end with the command that is started, and the mounts with
/// them.
pub fn command(root: &Path, dir: &str, words: &[&str]) -> Result<Command> {
    let mut command = Command::new(tool::need("unshare")?);
    command.args(["--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", ENTER]);
    command.arg(root).arg(dir).args(words).env_clear();
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    Ok(command)
}
