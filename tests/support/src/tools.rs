//! The programs that tests call, with their Debian packages. A test that lacks one names its
//! package, and `cargo lab test --setup` installs it. Every program that a test may lack has a row
//! here.

use std::env;
use std::path::PathBuf;

use crate::Need;

/// Every reason that `--setup` can resolve, as root, names it.
pub const SETUP: &str = "cargo lab test --setup";

/// The programs of the tests on this machine, with their Debian packages.
pub const TOOLS: &[(&str, &str)] = &[
    ("chromium", "chromium"),
    ("cpio", "cpio"),
    ("debugfs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("fish", "fish"),
    // Its libraries are also for the GDB that emulated hosts get.
    ("gdb", "gdb"),
    ("git", "git"),
    ("gzip", "gzip"),
    ("ip", "iproute2"),
    // Its libraries are needed like those of GDB.
    ("makedumpfile", "makedumpfile"),
    ("mcopy", "mtools"),
    ("mke2fs", "e2fsprogs"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.fat", "dosfstools"),
    ("mkfs.xfs", "xfsprogs"),
    ("modprobe", "kmod"),
    ("mount", "mount"),
    ("passt", "passt"),
    ("patch", "patch"),
    ("python3", "python3"),
    ("qemu-img", "qemu-utils"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("readelf", "binutils"),
    ("rsync", "rsync"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("sfdisk", "fdisk"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("sshd", "openssh-server"),
    ("strace", "strace"),
    ("unshare", "util-linux"),
    ("zsh", "zsh"),
];

/// The names of the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// The path of `program`: on the PATH, or in a directory of Debian that is not on a user's PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> =
        env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from)).collect();
    let names = if program == BROWSERS[0] { &BROWSERS[..] } else { std::slice::from_ref(&program) };
    names.iter().flat_map(|name| places.iter().map(move |place| place.join(name))).find(|file| file.is_file())
}

/// Requires `program`.
pub fn program(program: &str) -> Need {
    find(program).map(drop).ok_or_else(|| lacks(program))
}

/// The reason of a test that lacks `program`, or has one that lacks a feature.
pub fn lacks(program: &str) -> String {
    let found = TOOLS.iter().find(|(name, _)| *name == program);
    // Most packages have the name of their program. --setup installs only what has a row, so CI
    // counts a test without one as failed.
    let package = found.map_or(program, |(_, package)| package);
    format!("needs {program}: {SETUP}, or as root: apt-get install {package}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_names_the_package_and_setup() {
        assert_eq!(lacks("sshd"), format!("needs sshd: {SETUP}, or as root: apt-get install openssh-server"));
    }

    #[test]
    fn rows_are_sorted_and_each_program_has_one() {
        assert!(TOOLS.is_sorted_by(|a, b| a.0 < b.0), "{TOOLS:?}");
    }
}
