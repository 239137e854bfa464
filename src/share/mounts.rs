//! Decides which file systems mounted below a shared directory are shared: those that hold files.
//! proc, sysfs and the like show the host's kernel, not the guest's.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use vellum_sys::poll::Poll;

/// Types of file systems that are never shared, as in /proc/filesystems.
const HIDDEN: [&str; 25] = [
    "autofs",
    "binder",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "cpuset",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fuse",
    "fuseblk",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "resctrl",
    "rpc_pipefs",
    "securityfs",
    "selinuxfs",
    "sysfs",
];
/// Prefixes of further such types: `fuse.sshfs` and the like, and tracefs.
const OTHERS: [&str; 2] = ["fuse.", "tracefs"];

/// The mounts of this process, with a cache of those that are shared.
#[derive(Debug)]
pub struct Mounts {
    table: File,
    shared: HashMap<u64, bool>,
}

impl Mounts {
    /// Opens the mount table for repeated reading.
    ///
    /// # Errors
    /// Fails without /proc.
    pub fn open() -> io::Result<Self> {
        Ok(Self { table: File::open("/proc/self/mountinfo")?, shared: HashMap::new() })
    }

    /// Whether the file system of mount `id` is shared. Unknown mounts are not.
    pub(crate) fn is_shared(&mut self, id: u64) -> bool {
        // The kernel gives a number again as soon as its mount has gone.
        if self.has_changed() {
            self.shared.clear();
        }
        if let Some(shared) = self.shared.get(&id) {
            return *shared;
        }
        let shared = self.read().is_ok_and(|text| kind(&text, id).is_some_and(is_shared));
        // Only shared mounts are cached: asking again for hidden ones is cheap.
        if shared {
            self.shared.insert(id, true);
        }
        shared
    }

    /// Whether a mount came or went since the last call. If the kernel does not say, one may have.
    fn has_changed(&self) -> bool {
        let mut poll = Poll::default();
        poll.changed(&self.table);
        poll.wait(Some(Duration::ZERO)).unwrap_or(true)
    }

    fn read(&self) -> io::Result<String> {
        let (mut text, mut part) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            match self.table.read_at(&mut part, text.len() as u64)? {
                0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
                count => text.extend_from_slice(&part[..count]),
            }
        }
    }
}

fn is_shared(kind: &str) -> bool {
    !HIDDEN.contains(&kind) && !OTHERS.iter().any(|other| kind.starts_with(other))
}

/// The type of mount `id` in the text of mountinfo (proc_pid_mountinfo(5)): the word after the lone
/// hyphen.
fn kind(text: &str, id: u64) -> Option<&str> {
    let line =
        text.lines().find(|line| line.split(' ').next().and_then(|word| word.parse().ok()) == Some(id))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_found_and_pseudo_file_systems_hidden() {
        let text = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
                    23 22 0:21 / /proc rw,nosuid - proc proc rw\n\
                    24 22 0:5 / /a\\040-\\040b rw master:3 - fuse.sshfs x rw\n";
        assert_eq!(kind(text, 22), Some("ext4"));
        assert_eq!(kind(text, 24), Some("fuse.sshfs"));
        assert_eq!(kind(text, 2), None);
        for (name, shared) in
            [("ext4", true), ("tmpfs", true), ("proc", false), ("fuse.sshfs", false), ("overlay", true)]
        {
            assert_eq!(is_shared(name), shared, "{name}");
        }
    }

    #[test]
    fn proc_is_hidden_and_the_root_is_not() {
        let mut mounts = Mounts::open().unwrap();
        let mount = |path: &str| {
            let asked = rustix::fs::StatxFlags::MNT_ID;
            rustix::fs::statx(rustix::fs::CWD, path, rustix::fs::AtFlags::empty(), asked).unwrap().stx_mnt_id
        };
        assert!(!mounts.is_shared(mount("/proc")));
        assert!(mounts.is_shared(mount("/")));
        assert!(!mounts.is_shared(u64::MAX));
    }
}
