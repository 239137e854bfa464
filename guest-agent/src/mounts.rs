//! Mounts in a guest: the kernel's own file systems, and directories of the host.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use crate::{Access, MODULES, Mount, Mounts, sys};

/// The directory with the parts of overlays, a subdirectory each.
const PARTS: &str = "/run/vellum/overlay";
/// The temporary mount point of a new root.
const NEW_ROOT: &str = "/vellum/root";

/// Mounts the file systems that every command needs.
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

/// Mounts file systems that commands usually expect. A kernel that lacks some still runs commands.
pub fn more() {
    for (kind, target) in [
        ("devpts", "/dev/pts"),
        ("tmpfs", "/dev/shm"),
        ("cgroup2", "/sys/fs/cgroup"),
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
    ] {
        // sysfs already has the directories that the kernel supports.
        let _ = fs::create_dir_all(target);
        let _ = sys::mount(kind, target);
    }
    for (name, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        let _ = std::os::unix::fs::symlink(target, format!("/dev/{name}"));
    }
    let _ = sys::loopback_up();
}

/// Mounts what a command has of its host. Returns what failed and most commands work without.
pub fn of_command(asked: &Mounts) -> io::Result<Option<String>> {
    let beside = beside_modules();
    shares(&asked.shares)?;
    let mounted = asked.modules.as_deref().map_or(Ok(()), |tag| modules(tag, &beside));
    Ok(mounted.err().map(|error| format!("for modprobe: {error}")))
}

/// Mounts directories of the host. The modules for that are loaded. A directory for `/` comes
/// first: it becomes the root of everything else, and gets its own kernel file systems.
fn shares(shares: &[Mount]) -> io::Result<()> {
    let (root, others): (Vec<_>, Vec<_>) =
        shares.iter().enumerate().partition(|(_, share)| share.place == "/");
    for (at, root) in root {
        share(&Mount { place: NEW_ROOT.into(), ..root.clone() }, at)?;
        switch_root().map_err(named("the root"))?;
        base()?;
    }
    others.into_iter().try_for_each(|(at, mount)| share(mount, at))
}

/// Makes the mount at [`NEW_ROOT`] the root. The initramfs stays below it: pivot_root(2) cannot
/// remove it.
fn switch_root() -> io::Result<()> {
    std::env::set_current_dir(NEW_ROOT)?;
    sys::mount_from(".", "", "/", libc::MS_MOVE, "")?;
    std::os::unix::fs::chroot(".")?;
    std::env::set_current_dir("/")
}

/// Mounts a directory. An overlay's parts are named by `number`, because tags may contain commas
/// and colons, which separate mount options.
fn share(share: &Mount, number: usize) -> io::Result<()> {
    let place = share.place.as_str();
    let named = named(&format!("share {}", share.tag));
    directory(place).map_err(&named)?;
    let mount = |place: &str, flags| sys::mount_from(&share.tag, "virtiofs", place, flags, "");
    match share.access {
        Access::Rw => mount(place, 0).map_err(named),
        Access::Ro => mount(place, libc::MS_RDONLY).map_err(named),
        Access::Overlay => {
            // The layers are on a tmpfs of their own, because the initramfs's root cannot hold
            // them.
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

/// Reads the initramfs's files for modprobe, while they are visible.
fn beside_modules() -> Vec<(OsString, Vec<u8>)> {
    let entries = fs::read_dir(MODULES).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name(), fs::read(entry.path()).ok()?))).collect()
}

/// Mounts this kernel's modules where modprobe looks for them: the directory `tag`, `beside` these
/// files.
fn modules(tag: &str, beside: &[(OsString, Vec<u8>)]) -> io::Result<()> {
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

/// Creates a directory if it does not exist. An existing one may be on a read-only file system.
fn directory(path: &str) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.is_dir()) { Ok(()) } else { fs::create_dir_all(path) }
}

fn named(what: &str) -> impl Fn(io::Error) -> io::Error + use<> {
    let what = what.to_owned();
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}
