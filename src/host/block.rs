//! What else on this host uses a disk: mounted file systems, loop devices, swap, and devices made
//! of others.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Describes what else uses the file or block device that `about` belongs to; `None` if nothing is
/// known. Places that this process may not read count as unused.
pub fn user(about: &Metadata) -> Option<String> {
    user_below(Path::new("/"), about)
}

fn user_below(root: &Path, about: &Metadata) -> Option<String> {
    if about.file_type().is_block_device() {
        let number = about.rdev();
        let (major, minor) = (libc::major(number), libc::minor(number));
        return device(root, &root.join(format!("sys/dev/block/{major}:{minor}")));
    }
    let loops = fs::read_dir(root.join("sys/block")).ok()?.flatten();
    let behind = |place: &PathBuf| {
        let backing = read(&place.join("loop/backing_file"))?;
        let other = fs::metadata(path(backing.trim_end_matches('\n'))).ok()?;
        ((other.dev(), other.ino()) == (about.dev(), about.ino())).then_some(())
    };
    let place = loops.map(|entry| entry.path()).find(|place| behind(place).is_some())?;
    let name = place.file_name().unwrap_or_default().display().to_string();
    Some(match device(root, &place) {
        Some(user) => format!("the image behind /dev/{name}, which is {user}"),
        None => format!("the image behind /dev/{name}, which losetup detaches"),
    })
}

/// What uses the device whose sysfs directory is `place`, or a partition of it.
fn device(root: &Path, place: &Path) -> Option<String> {
    let parts = fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path());
    let parts = parts.filter(|part| part.join("partition").exists());
    let places: Vec<PathBuf> = std::iter::once(place.to_owned()).chain(parts).collect();
    let numbers: Vec<String> =
        places.iter().filter_map(|place| Some(read(&place.join("dev"))?.trim_end().to_owned())).collect();
    let is_it = |number: &str| numbers.iter().any(|it| it == number);
    let mounts = read(&root.join("proc/self/mountinfo")).unwrap_or_default();
    if let Some(at) = mounts.lines().find_map(|line| mount(root, line).filter(|(number, _)| is_it(number))) {
        return Some(format!("mounted on {}", at.1.display()));
    }
    let swaps = read(&root.join("proc/swaps")).unwrap_or_default();
    let swaps = swaps.lines().filter_map(|line| number_of(root, line.split_whitespace().next()?));
    if swaps.into_iter().any(|number| is_it(&number)) {
        return Some("in use as swap".into());
    }
    let holders = places.iter().flat_map(|place| fs::read_dir(place.join("holders")).into_iter().flatten());
    let holder = holders.flatten().next()?;
    Some(format!("part of /dev/{}", holder.file_name().display()))
}

/// The device and the mount point of a line of mountinfo (proc_pid_mountinfo(5)).
fn mount(root: &Path, line: &str) -> Option<(String, PathBuf)> {
    let mut fields = line.split(' ');
    let number = fields.nth(2)?;
    let at = path(fields.nth(1)?);
    let source = fields.skip_while(|field| *field != "-").nth(2).unwrap_or_default();
    // Btrfs has a device number of its own for each subvolume.
    match number.starts_with("0:") {
        true => Some((number_of(root, source)?, at)),
        false => Some((number.to_owned(), at)),
    }
}

/// The number of the block device at a path from the kernel.
fn number_of(root: &Path, told: &str) -> Option<String> {
    let about = fs::metadata(root.join(path(told).strip_prefix("/").ok()?)).ok()?;
    let number = about.rdev();
    let is_device = about.file_type().is_block_device();
    is_device.then(|| format!("{}:{}", libc::major(number), libc::minor(number)))
}

/// Decodes a path from the kernel, which writes blanks and similar characters as three octal
/// digits.
fn path(told: &str) -> PathBuf {
    let (mut bytes, mut left) = (Vec::new(), told.as_bytes());
    while let Some((first, rest)) = left.split_first() {
        let digits = rest.get(..3).filter(|_| *first == b'\\');
        let code = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(*first));
        left = if code.is_some() { &rest[3..] } else { rest };
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake host root with `files`.
    fn host(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("vellum-block-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn mounts_of_a_device_and_of_its_partitions_are_named() {
        let root = host(
            "mounts",
            &[
                ("sys/dev/block/8:0/dev", "8:0\n"),
                ("sys/dev/block/8:0/sda1/dev", "8:1\n"),
                ("sys/dev/block/8:0/sda1/partition", "1\n"),
                ("sys/dev/block/8:16/dev", "8:16\n"),
                ("sys/dev/block/8:32/dev", "8:32\n"),
                ("sys/dev/block/8:32/holders/dm-3/x", ""),
                (
                    "proc/self/mountinfo",
                    "22 27 0:21 / /proc rw - proc proc rw\n\
                     30 27 8:1 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                     malformed\n\
                     31 27 0:40 /x /home rw - btrfs /dev/none rw\n",
                ),
            ],
        );
        let user = |number: &str| device(&root, &root.join("sys/dev/block").join(number));
        assert_eq!(user("8:0").as_deref(), Some("mounted on /mnt/a b"));
        assert_eq!(user("8:16"), None);
        assert_eq!(user("8:32").as_deref(), Some("part of /dev/dm-3"));
        assert_eq!(user("9:9"), None);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_image_behind_a_loop_device_is_known_by_any_name() {
        let root = host(
            "loops",
            &[
                ("image", "x"),
                ("other", "x"),
                ("sys/block/loop0/dev", "7:0\n"),
                ("sys/block/loop3/dev", "7:3\n"),
                ("sys/block/vda/dev", "8:0\n"),
                ("proc/self/mountinfo", ""),
            ],
        );
        fs::create_dir(root.join("sys/block/loop3/loop")).unwrap();
        fs::write(
            root.join("sys/block/loop3/loop/backing_file"),
            format!("{}\n", root.join("image").display()),
        )
        .unwrap();
        fs::hard_link(root.join("image"), root.join("same")).unwrap();
        let user = |name: &str| user_below(&root, &fs::metadata(root.join(name)).unwrap());
        let expected = "the image behind /dev/loop3, which losetup detaches";
        assert_eq!((user("image").as_deref(), user("same").as_deref()), (Some(expected), Some(expected)));
        assert_eq!(user("other"), None);
        let mounted = "30 27 7:3 / /mnt rw - ext4 /dev/loop3 rw\n";
        fs::write(root.join("proc/self/mountinfo"), mounted).unwrap();
        assert_eq!(user("same").as_deref(), Some("the image behind /dev/loop3, which is mounted on /mnt"));
        fs::remove_dir_all(&root).unwrap();
    }
}
