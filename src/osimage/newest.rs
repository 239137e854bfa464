//! For images without a known boot loader: the newest kernel of /boot, with the root file system of
//! /etc/fstab.

use super::filesystem::FileSystem;
use super::{Disk, Entry, MAX_CONFIG, Refused, Volume, root_parameter, version};

/// The names of kernels, without the version.
const KERNELS: [&str; 3] = ["vmlinuz", "vmlinux", "Image"];

/// The kernels in the boot directories of the disk, newest first.
pub fn entries(disk: &Disk, refused: &mut Refused) -> Vec<(String, Entry)> {
    let mut found = Vec::new();
    for (at, volume, files) in disk.readable() {
        for directory in ["/boot", ""] {
            let names = files.names(if directory.is_empty() { "/" } else { directory });
            for name in &names {
                let Some(kind) = KERNELS.iter().find(|kind| name.starts_with(**kind)) else { continue };
                let suffix = name[kind.len()..].trim_start_matches('-').to_owned();
                let path = format!("{directory}/{name}");
                if files.is_directory(&path) || suffix.starts_with("rescue") {
                    continue;
                }
                let initrd = initrd_of(&names, &suffix).map(|name| (at, format!("{directory}/{name}")));
                found.push((suffix, name.clone(), volume, (at, path), initrd));
            }
        }
    }
    // A name without a version sorts last. It is usually a link to another kernel in the list.
    found.sort_by(|(one, ..), (two, ..)| version::compare(two, one));
    if found.is_empty() {
        refused.push("there is no vmlinuz in / or /boot of a file system that is read".into());
        return Vec::new();
    }
    let Some(root) = root(disk) else {
        refused.push(format!("{} was found, and no root file system for it", found[0].3.1));
        return Vec::new();
    };
    let entry = |(_, title, volume, kernel, initrd): (_, _, &Volume, _, Option<_>)| {
        let place = format!("the newest kernel of {}", volume.name());
        let initrds = initrd.into_iter().collect();
        (place, Entry { title, kernel, initrds, cmdline: format!("{root} ro") })
    };
    found.into_iter().map(entry).collect()
}

/// The initrd for a kernel's version, by the names of Debian, Fedora, SUSE, Arch and Alpine.
fn initrd_of<'n>(names: &'n [String], version: &str) -> Option<&'n String> {
    let dash = if version.is_empty() { "" } else { "-" };
    let possible = [
        format!("initrd.img{dash}{version}"),
        format!("initramfs{dash}{version}.img"),
        format!("initrd{dash}{version}"),
        format!("initramfs{dash}{version}"),
        format!("initrd{dash}{version}.img"),
    ];
    possible.iter().find_map(|name| names.iter().find(|found| *found == name))
}

/// The parameter `root=`: from /etc/fstab, or the partition that has the root file system.
fn root(disk: &Disk) -> Option<String> {
    let (volume, files) = disk.root()?;
    Some(fstab_root(files).unwrap_or_else(|| root_parameter(&volume.partition)))
}

fn fstab_root(files: &FileSystem) -> Option<String> {
    let text = String::from_utf8(files.read("/etc/fstab", MAX_CONFIG).ok()?).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (device, place) = (words.next()?, words.next()?);
        let known = ["UUID=", "PARTUUID=", "LABEL="].iter().any(|tag| device.starts_with(tag));
        (known && place == "/").then(|| format!("root={device}"))
    })
}
