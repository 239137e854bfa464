//! What is mounted in a guest: the kernel's own file systems, and directories of the host's.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use crate::{Access, MODULES, Mount, sys};

/// Where the parts of overlays are, a directory each.
const PARTS: &str = "/run/vellum/overlay";
/// Where a directory is mounted that is to be the root, until it is.
const NEW_ROOT: &str = "/vellum/root";

/// The file systems that no command can do without.
pub fn base() -> io::Result<()> {
    for (kind, target) in
        [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp"), ("tmpfs", "/run")]
    {
        let mount = || {
            directory(target)?;
            sys::mount(kind, target)
        };
        match mount() {
            // The kernel may have mounted /dev already.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            other => other.map_err(named(target))?,
        }
    }
    Ok(())
}

/// What commands expect beside that. A kernel without one of these file systems runs commands all the same.
pub fn more() {
    for (kind, target) in [
        ("devpts", "/dev/pts"),
        ("tmpfs", "/dev/shm"),
        ("cgroup2", "/sys/fs/cgroup"),
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
    ] {
        // sysfs has the directories of what the kernel has.
        let _ = fs::create_dir_all(target);
        let _ = sys::mount(kind, target);
    }
    for (name, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        let _ = std::os::unix::fs::symlink(target, format!("/dev/{name}"));
    }
    let _ = sys::loopback_up();
}

/// Mounts directories of the host's; the modules that this needs are loaded. One whose place is `/` comes first: all else is in it from
/// then on, with file systems of the kernel's of its own.
pub fn shares(shares: &[Mount]) -> io::Result<()> {
    let (root, others): (Vec<_>, Vec<_>) =
        shares.iter().enumerate().partition(|(_, share)| share.place == "/");
    for (at, root) in root {
        share(&Mount { place: NEW_ROOT.into(), ..root.clone() }, at)?;
        switch_root().map_err(named("the root"))?;
        base()?;
    }
    others.into_iter().try_for_each(|(at, mount)| share(mount, at))
}

/// Has what is mounted at [`NEW_ROOT`] be the root. The initramfs stays below it, and cannot be left by pivot_root(2).
fn switch_root() -> io::Result<()> {
    std::env::set_current_dir(NEW_ROOT)?;
    sys::mount_from(".", "", "/", libc::MS_MOVE, "")?;
    std::os::unix::fs::chroot(".")?;
    std::env::set_current_dir("/")
}

/// Mounts one. The parts of an overlay are known by its number, for tags may have commas and colons, which part the options of its mount.
fn share(share: &Mount, number: usize) -> io::Result<()> {
    let place = share.place.as_str();
    let named = named(&format!("share {}", share.tag));
    directory(place).map_err(&named)?;
    let mount = |place: &str, flags| sys::mount_from(&share.tag, "virtiofs", place, flags, "");
    match share.access {
        Access::Rw => mount(place, 0).map_err(named),
        Access::Ro => mount(place, libc::MS_RDONLY).map_err(named),
        Access::Overlay => {
            // A tmpfs of their own, in which the layers may be: the root of an initramfs may not be one.
            let parts = format!("{PARTS}/{number}");
            let [below, above, work] = ["below", "above", "work"].map(|part| format!("{parts}/{part}"));
            directory(&parts).and_then(|()| sys::mount("tmpfs", &parts)).map_err(&named)?;
            [&below, &above, &work].into_iter().try_for_each(fs::create_dir_all).map_err(&named)?;
            mount(&below, libc::MS_RDONLY).map_err(&named)?;
            let layers = format!("lowerdir={below},upperdir={above},workdir={work}");
            sys::mount_from("overlay", "overlay", place, 0, &layers)
                .map_err(self::named(&format!("share {}: overlay", share.tag)))
        }
    }
}

/// What of the initramfs modprobe is to find, while it can be seen.
pub fn beside_modules() -> Vec<(OsString, Vec<u8>)> {
    let entries = fs::read_dir(MODULES).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name(), fs::read(entry.path()).ok()?))).collect()
}

/// Has the modules of this kernel where modprobe looks for them: the directory `tag`, `beside` these files.
pub fn modules(tag: &str, beside: &[(OsString, Vec<u8>)]) -> io::Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut place = format!("/lib/modules/{}", release.trim());
    directory(&place)?;
    if !beside.is_empty() {
        sys::mount("tmpfs", &place)?;
        beside.iter().try_for_each(|(name, content)| fs::write(Path::new(&place).join(name), content))?;
        place += "/kernel";
        directory(&place)?;
    }
    sys::mount_from(tag, "virtiofs", &place, libc::MS_RDONLY, "")
}

/// Makes a directory where there is none; one that is there need not be on a file system that can be written to.
fn directory(path: &str) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.is_dir()) { Ok(()) } else { fs::create_dir_all(path) }
}

fn named(what: &str) -> impl Fn(io::Error) -> io::Error + use<> {
    let what = what.to_owned();
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}
