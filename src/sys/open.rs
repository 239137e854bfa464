//! Opens paths that a user, a snapshot or another program names, without blocking. A FIFO or a
//! device at such a path must not stop this process, whose signals may be blocked.
//!
//! Every open here has O_NONBLOCK and O_NOCTTY, and the file's type is checked on the open file.
//! Fixed paths, such as those in /proc, do not need this.

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;

use super::poll::Poll;

/// How long [`read`] waits for the next bytes of a FIFO.
const FIFO_TIMEOUT: Duration = Duration::from_secs(10);

/// The types of file that are accepted at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    Regular,
    /// A regular file whose path does not end in a symbolic link.
    Unlinked,
    /// A regular file or a block device.
    Disk,
    /// A block device that is not in use: no mounted file system and no other exclusive holder.
    Exclusive,
    /// A directory.
    Directory,
    /// A regular file, a FIFO with a reader, or a character device.
    Output,
    /// A regular file, a FIFO or /dev/null.
    Input,
}

impl Kind {
    fn takes(self, about: &Metadata) -> bool {
        let found = about.file_type();
        match self {
            Self::Regular | Self::Unlinked => found.is_file(),
            Self::Disk => found.is_file() || found.is_block_device(),
            Self::Exclusive => found.is_block_device(),
            Self::Directory => found.is_dir(),
            Self::Output => found.is_file() || found.is_fifo() || found.is_char_device(),
            Self::Input => found.is_file() || found.is_fifo() || is_null(about),
        }
    }

    fn wanted(self) -> &'static str {
        match self {
            Self::Regular | Self::Unlinked => "a regular file",
            Self::Disk => "a regular file or a block device",
            Self::Exclusive => "a block device",
            Self::Directory => "a directory",
            Self::Output => "a regular file, a FIFO with a reader, or a character device",
            Self::Input => "a regular file or a FIFO with a writer",
        }
    }
}

fn is_null(about: &Metadata) -> bool {
    about.file_type().is_char_device() && about.rdev() == libc::makedev(1, 3)
}

fn name(found: FileType) -> &'static str {
    match found {
        found if found.is_dir() => "a directory",
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        found if found.is_char_device() => "a character device",
        found if found.is_block_device() => "a block device",
        found if found.is_symlink() => "a symbolic link",
        _ => "a regular file",
    }
}

fn unfit(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Opens `path` with `options` and checks that it is a `kind`. Reads and writes of a FIFO or a
/// device do not block ([`wait`] changes that).
///
/// # Errors
/// The kernel's error; the type found and the type needed; or a FIFO without a reader.
pub fn open(path: &Path, options: &OpenOptions, kind: Kind) -> io::Result<File> {
    let more = match kind {
        Kind::Unlinked => libc::O_NOFOLLOW,
        // Without O_CREAT it requests exclusive use of a block device (open(2)).
        Kind::Exclusive => libc::O_EXCL,
        Kind::Directory => libc::O_DIRECTORY,
        _ => 0,
    };
    let mut options = options.clone();
    let opened = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | more).open(path);
    let file = opened.map_err(|error| {
        let found = || path.metadata().map(|about| about.file_type());
        match error.raw_os_error() {
            // The error for a FIFO without a reader that is opened for writing only, and for any
            // socket.
            Some(libc::ENXIO) if found().is_ok_and(|found| found.is_fifo()) => {
                io::Error::new(io::ErrorKind::NotConnected, "it is a FIFO without a reader: start that first")
            }
            Some(libc::ENXIO | libc::ENOTDIR | libc::EISDIR) => match found() {
                Ok(found) => unfit(format!("it is {}, and {} is needed", name(found), kind.wanted())),
                Err(_) => error,
            },
            Some(libc::ELOOP) if kind == Kind::Unlinked => {
                unfit(format!("it is a symbolic link, and {} is needed", kind.wanted()))
            }
            _ => error,
        }
    })?;
    let about = file.metadata()?;
    match kind.takes(&about) {
        true => Ok(file),
        false => Err(unfit(format!("it is {}, and {} is needed", name(about.file_type()), kind.wanted()))),
    }
}

/// Opens `path` for reading and checks that it is a `kind`.
///
/// # Errors
/// As [`open`].
pub fn for_reading(path: &Path, kind: Kind) -> io::Result<File> {
    open(path, File::options().read(true), kind)
}

/// Makes reads and writes of `file` blocking.
///
/// # Errors
/// The kernel's error.
pub fn wait(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}

/// The content of an [input](Kind::Input). Reads at most `most` + 1 bytes; a caller that gets more
/// than `most` refuses the input.
///
/// # Errors
/// As [`open`]; or nothing was written to a FIFO for a while.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = for_reading(path, Kind::Input)?;
    let is_fifo = file.metadata()?.file_type().is_fifo();
    let (mut bytes, mut limited) = (Vec::new(), (&file).take(most.saturating_add(1)));
    loop {
        if is_fifo {
            let mut poll = Poll::default();
            poll.readable(&file);
            if !poll.wait(Some(FIFO_TIMEOUT))? {
                let what =
                    format!("it is a FIFO to which nothing was written for {} s", FIFO_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
        }
        match limited.read_to_end(&mut bytes) {
            Ok(_) => return Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Like [`read`], for text.
///
/// # Errors
/// As [`read`]; or it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let text = String::from_utf8(read(path, most)?);
    text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use rustix::fs::{CWD, Mode};

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        /// A directory with `file`, `fifo`, `socket`, `dir`, `link` to the file, `fifo-link` to the
        /// FIFO, and `lost`, a link to nothing.
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("vellum-open-{name}-{}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("file"), "text").unwrap();
            fs::create_dir(dir.join("dir")).unwrap();
            drop(UnixListener::bind(dir.join("socket")).unwrap());
            symlink("file", dir.join("link")).unwrap();
            symlink("fifo", dir.join("fifo-link")).unwrap();
            symlink("nothing", dir.join("lost")).unwrap();
            rustix::fs::mkfifoat(CWD, dir.join("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
            Self(dir)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// None of these opens blocks. Each refusal says what is there.
    #[test]
    fn what_lies_at_a_path_is_opened_or_refused_at_once() {
        let dir = Scratch::new("kinds");
        let says = |name: &str, write: bool, kind| {
            let mut options = File::options();
            options.read(!write).write(write);
            open(&dir.0.join(name), &options, kind).map(drop).map_err(|error| error.to_string())
        };
        let is = |what: &str| Err(format!("it is {what}"));
        let begins = |got: Result<(), String>, expected: Result<(), String>| match (got, expected) {
            (Ok(()), Ok(())) => {}
            (Err(got), Err(expected)) => assert!(got.starts_with(&expected), "{got}"),
            (got, expected) => panic!("{got:?}, not {expected:?}"),
        };
        for (name, write, kind, expected) in [
            ("file", false, Kind::Regular, Ok(())),
            ("link", false, Kind::Regular, Ok(())),
            ("link", false, Kind::Unlinked, is("a symbolic link")),
            ("fifo", false, Kind::Regular, is("a FIFO, and a regular file is needed")),
            ("fifo", false, Kind::Unlinked, is("a FIFO")),
            ("fifo-link", false, Kind::Disk, is("a FIFO")),
            ("fifo", false, Kind::Directory, is("a FIFO, and a directory is needed")),
            ("dir", false, Kind::Directory, Ok(())),
            ("dir", false, Kind::Regular, is("a directory")),
            ("dir", true, Kind::Output, is("a directory")),
            ("socket", false, Kind::Disk, is("a socket")),
            ("socket", true, Kind::Output, is("a socket")),
            ("fifo", true, Kind::Output, is("a FIFO without a reader")),
            ("fifo-link", true, Kind::Output, is("a FIFO without a reader")),
            ("file", false, Kind::Exclusive, is("a regular file, and a block device is needed")),
            ("fifo", false, Kind::Input, Ok(())),
        ] {
            println!("{name} {write} {kind:?}");
            begins(says(name, write, kind), expected);
        }
        assert_eq!(
            for_reading(&dir.0.join("lost"), Kind::Regular).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let zero = for_reading(Path::new("/dev/zero"), Kind::Input).unwrap_err().to_string();
        assert!(zero.starts_with("it is a character device"), "{zero}");
    }

    #[test]
    fn a_fifo_with_a_reader_takes_output_and_one_with_a_writer_is_read() {
        let dir = Scratch::new("fifo");
        let path = dir.0.join("fifo");
        let reader = for_reading(&path, Kind::Input).unwrap();
        let mut writer = open(&path, File::options().write(true), Kind::Output).unwrap();
        writer.write_all(b"abc").unwrap();
        let mut got = [0; 3];
        (&reader).read_exact(&mut got).unwrap();
        assert_eq!(&got, b"abc");
        // It does not block before `wait` is called.
        let full = vec![0; 1 << 20];
        let error = writer.write_all(&full).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop((reader, writer));
        // A writer that comes later and writes more than a pipe holds.
        let (late, long) = (path.clone(), vec![7; 300_000]);
        let expected = long.clone();
        let thread = std::thread::spawn(move || {
            let mut file = File::options().write(true).open(late).unwrap();
            file.write_all(&long).unwrap();
        });
        assert!(read(&path, 1 << 20).unwrap() == expected);
        thread.join().unwrap();
        assert_eq!(read(&dir.0.join("link"), 2).unwrap(), b"tex", "one more than asked for, and no more");
        assert_eq!(read(Path::new("/dev/null"), 2).unwrap(), b"");
    }
}
