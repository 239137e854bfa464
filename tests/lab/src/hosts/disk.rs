//! The disk of an emulated host that has a root of its own: Debian on ext4, as machines have it and an initramfs has not. And a disk for
//! its guests as clouds have it.
//!
//! Each is made once and kept in the cache. A host writes into memory of its emulator's, so that each finds it as it was made.

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, digest};
use crate::debian;
use crate::test::setup;
use crate::{Error, Result, tool};

/// The Debian.
const SUITE: &str = "bookworm";
/// What it has beside the essential: what commands in a guest may want to call, and what the host itself does.
const PACKAGES: &str = "iproute2,kmod,attr,strace,passt,makedumpfile";
/// How large the file system is, in MiB; the file is sparse.
const MIB: u32 = 1024;

/// The programs of this machine that make it.
pub const PROGRAMS: [&str; 3] = ["mmdebstrap", "mke2fs", "sfdisk"];

/// What the cloud's image has beside the essential.
const CLOUD: &str = "systemd-sysv,udev,dbus,cloud-init,ifupdown,linux-image-cloud-amd64";
/// How large its one partition is and where it begins, in MiB.
const PARTITION: (u32, u32) = (1, 2048);

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

/// A Debian as clouds have it: a raw disk, and its own kernel and initrd.
pub struct Cloud {
    /// A GPT with one partition, of ext4.
    pub disk: PathBuf,
    /// What boots.
    pub kernel: PathBuf,
    /// The initrd that goes with it.
    pub initrd: PathBuf,
}

/// The cloud's image, made if need be, which takes root.
pub fn cloud(cache: &Cache) -> Result<Cloud> {
    let made = cache.entry(&format!("disk/{SUITE}-cloud-{}", digest([CLOUD.as_bytes()])), |dir| {
        cache.need_mib(4096)?;
        eprintln!("lab: a cloud image of {SUITE} for guests");
        let root = bootstrap(dir, CLOUD)?;
        for name in ["vmlinuz", "initrd.img"] {
            let from = root.join(name);
            fs::copy(&from, dir.join(name)).map_err(Error::file("copy", &from))?;
        }
        let fstab = root.join("etc/fstab");
        fs::write(&fstab, "/dev/vda1 / ext4 defaults 0 1\n").map_err(Error::file("write", &fstab))?;
        let image = dir.join("disk.raw");
        let (start, mib) = PARTITION;
        // The table's copy is behind the partition.
        let bytes = u64::from(start + mib + 1) << 20;
        File::create(&image).and_then(|file| file.set_len(bytes)).map_err(Error::file("create", &image))?;
        let offset = format!("offset={}", u64::from(start) << 20);
        tool::output(ext4(&root).args(["-E", &offset]).arg(&image).arg(format!("{mib}M")))?;
        partition(&image, dir)?;
        fs::remove_dir_all(&root).map_err(Error::file("remove", &root))
    })?;
    Ok(Cloud { disk: made.join("disk.raw"), kernel: made.join("vmlinuz"), initrd: made.join("initrd.img") })
}

/// A Debian with `packages`, below `dir`.
fn bootstrap(dir: &Path, packages: &str) -> Result<PathBuf> {
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
fn ext4(root: &Path) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-d"]).arg(root);
    command
}

/// Writes the table of [`PARTITION`].
fn partition(image: &Path, dir: &Path) -> Result<()> {
    let (start, mib) = PARTITION;
    let path = dir.join("table");
    let table = || -> std::io::Result<File> {
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        writeln!(file, "label: gpt\nstart={start}MiB, size={mib}MiB, type=linux")?;
        file.rewind()?;
        Ok(file)
    };
    let table = table().map_err(Error::file("write", &path))?;
    let mut command = Command::new(tool::need("sfdisk")?);
    tool::fed(
        command.args(["--quiet", "--no-reread", "--wipe-partitions", "never"]).arg(image),
        table.into(),
    )?;
    fs::remove_file(&path).map_err(Error::file("remove", &path))
}
