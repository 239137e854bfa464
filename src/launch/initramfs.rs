//! Packs an initramfs without cpio, root or device nodes on this host.
//!
//! The format is cpio's `newc` (the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst), uncompressed. An emulated CPU takes
//! longer to decompress it than the loader to read it.

use std::collections::BTreeSet;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Initramfs {
    bytes: Vec<u8>,
    inode: u32,
    directories: BTreeSet<String>,
}

impl Initramfs {
    /// A root file system with only a console.
    pub fn new() -> Self {
        let mut this = Self::default();
        this.directory("/dev");
        // The kernel opens /dev/console for init before anything is mounted.
        this.node("/dev/console", (5, 1));
        this
    }

    /// Adds a directory and its parents.
    pub fn directory(&mut self, path: &str) {
        let path = relative(path);
        for (end, _) in path.match_indices('/').chain(std::iter::once((path.len(), ""))) {
            let part = &path[..end];
            if !part.is_empty() && self.directories.insert(part.to_owned()) {
                self.record(part, 0o040_755, (0, 0), &[]);
            }
        }
    }

    /// Adds a file with its permissions. It must be smaller than 4 GiB.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.parent(path);
        self.record(relative(path), 0o100_000 | mode, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parent(path);
        self.record(relative(path), 0o120_777, (0, 0), target.as_bytes());
    }

    /// The finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.record("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn node(&mut self, path: &str, device: (u32, u32)) {
        self.record(relative(path), 0o020_600, device, &[]);
    }

    fn parent(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn record(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        let size = u32::try_from(content.len()).expect("an initramfs file of more than 4 GiB");
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        self.bytes.extend(b"070701");
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name.len() as u32 + 1, 0];
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
        self.inode += 1;
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

fn relative(path: &str) -> &str {
    path.trim_matches('/')
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_what_is_packed() {
        let mut image = Initramfs::new();
        image.file("/a/b/c", 0o755, b"hello");
        image.file("/a/b/d", 0o644, b"");
        image.link("/bin/sh", "busybox");
        let mut cpio =
            match Command::new("cpio").arg("-itv").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
                Ok(cpio) => cpio,
                Err(error) => {
                    eprintln!("skipped: cpio: {error}; booting any bed tests the same");
                    return;
                }
            };
        cpio.stdin.take().unwrap().write_all(&image.finish()).unwrap();
        let listing = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        let ends = [
            "dev",
            "5,   1 Jan  1  1970 dev/console",
            "a",
            "a/b",
            "a/b/c",
            "a/b/d",
            "bin",
            "bin/sh -> busybox",
        ];
        for (line, end) in listing.lines().zip(ends) {
            assert!(line.ends_with(end), "{line:?} does not end in {end:?}");
        }
        assert_eq!(listing.lines().filter(|line| line.contains("1970")).count(), ends.len(), "{listing}");
    }
}
