//! The language of the checks in [`posix`](super::posix): an act, and the error numbers that it may
//! fail with. The same acts run in a directory of the host, which shows that the expectations are
//! right, and in one behind the server.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use crate::Failed;
use rustix::fs::{CWD, FileType, Mode, mkdirat, mknodat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{
    UnshareFlags, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe,
};

/// What a name may stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Fifo,
    Socket,
    Link,
    Character,
}

pub const KINDS: [Kind; 6] =
    [Kind::File, Kind::Directory, Kind::Fifo, Kind::Socket, Kind::Link, Kind::Character];

/// Who acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Root,
    One,
    Two,
    /// The uid of `One`, with the group of `Two` as a supplementary group.
    Both,
}

impl Who {
    pub fn ids(self) -> (u32, u32) {
        match self {
            Self::Root => (0, 0),
            Self::One | Self::Both => (65534, 65533),
            Self::Two => (65532, 65531),
        }
    }
}

/// The checks in one directory.
pub struct Checks {
    root: PathBuf,
    /// All times in the directory come from one clock.
    one_clock: bool,
    /// The subject of the current checks.
    about: String,
    next: u32,
    pub done: u32,
    /// The checks that failed.
    pub wrong: Vec<String>,
}

impl Checks {
    /// Runs `work` in `root`, on a thread of its own, because umask and identity are per thread.
    pub fn during(
        root: &Path,
        one_clock: bool,
        work: fn(&mut Self) -> Result<(), Failed>,
    ) -> Result<Self, Failed> {
        let mut checks = Self {
            root: root.to_owned(),
            one_clock,
            about: String::new(),
            next: 0,
            done: 0,
            wrong: Vec::new(),
        };
        let thread = std::thread::spawn(move || -> Result<Self, Failed> {
            // SAFETY: the thread keeps its memory and its files.
            unsafe { unshare_unsafe(UnshareFlags::FS)? };
            rustix::process::umask(Mode::empty());
            work(&mut checks)?;
            Ok(checks)
        });
        thread.join().map_err(|_| "a check has panicked")?
    }

    /// Sets the subject of the checks that follow.
    pub fn about(&mut self, what: impl Into<String>) {
        self.about = what.into();
    }

    /// A name that was not used before.
    pub fn name(&mut self) -> PathBuf {
        self.next += 1;
        self.root.join(self.next.to_string())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn note(&mut self, right: bool, what: &str, found: impl FnOnce() -> String) {
        self.done += 1;
        if !right {
            self.wrong.push(format!("{}: {what}: {}", self.about, found()));
        }
    }

    /// Checks that the act succeeded.
    pub fn works<T>(&mut self, what: &str, ended: rustix::io::Result<T>) -> Option<T> {
        match ended {
            Ok(value) => {
                self.note(true, what, String::new);
                Some(value)
            }
            Err(error) => {
                self.note(false, what, || format!("{error:?}"));
                None
            }
        }
    }

    /// Checks that the act failed with one of these errors.
    pub fn fails<T>(&mut self, what: &str, ended: rustix::io::Result<T>, by: &[Errno]) {
        match ended {
            Ok(_) => self.note(false, what, || format!("it works, and not {by:?}")),
            Err(error) => self.note(by.contains(&error), what, || format!("{error:?}, and not {by:?}")),
        }
    }

    /// Checks that the act succeeded if `may`, and failed with EACCES otherwise.
    pub fn may<T>(&mut self, what: &str, ended: rustix::io::Result<T>, may: bool) {
        if may { drop(self.works(what, ended)) } else { self.fails(what, ended, &[Errno::ACCESS]) }
    }

    pub fn is<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, found: T, right: T) {
        self.note(found == right, what, || format!("{found:?}, and not {right:?}"));
    }

    /// Creates a file of this kind at `path`, as the user who acts.
    pub fn make(&mut self, kind: Kind, path: &Path) -> Result<(), Failed> {
        let all = Mode::from_raw_mode(0o644);
        match kind {
            Kind::File => drop(File::create_new(path)?),
            Kind::Directory => mkdirat(CWD, path, Mode::from_raw_mode(0o755))?,
            Kind::Fifo => mknodat(CWD, path, FileType::Fifo, all, 0)?,
            Kind::Socket => mknodat(CWD, path, FileType::Socket, all, 0)?,
            Kind::Link => symlink("nothing", path)?,
            Kind::Character => {
                mknodat(CWD, path, FileType::CharacterDevice, all, rustix::fs::makedev(1, 3))?;
            }
        }
        Ok(())
    }

    /// A new file of this kind.
    pub fn new_of(&mut self, kind: Kind) -> Result<PathBuf, Failed> {
        let path = self.name();
        self.make(kind, &path)?;
        Ok(path)
    }

    /// A new regular file with these permissions and this owner.
    pub fn file(&mut self, mode: u32, owner: Who) -> Result<PathBuf, Failed> {
        let path = self.new_of(Kind::File)?;
        own(&path, mode, owner)?;
        Ok(path)
    }

    /// A new directory with these permissions and this owner.
    pub fn directory(&mut self, mode: u32, owner: Who) -> Result<PathBuf, Failed> {
        let path = self.new_of(Kind::Directory)?;
        own(&path, mode, owner)?;
        Ok(path)
    }

    /// Checks what an act does to the times of `path`: whether the modification and the status
    /// change time become later. The clock for file times moves in steps. The act starts after a
    /// step.
    pub fn times<T>(&mut self, what: &str, path: &Path, right: (bool, bool), act: impl FnOnce() -> T) -> T {
        let times = || {
            let stat = fs::symlink_metadata(path);
            stat.map(|it| ((it.mtime(), it.mtime_nsec()), (it.ctime(), it.ctime_nsec()))).unwrap_or_default()
        };
        let before = times();
        step();
        let ended = act();
        let after = times();
        let found = (after.0 > before.0, after.1 > before.1);
        let right_or_unknown = found == right || !self.one_clock;
        self.note(right_or_unknown, what, || format!("{found:?}, and not {right:?}: {before:?}, {after:?}"));
        ended
    }
}

/// Sets the owner and then the permissions of `path`. A new owner would clear permission bits.
fn own(path: &Path, mode: u32, owner: Who) -> Result<(), Failed> {
    let (uid, gid) = owner.ids();
    std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
    Ok(())
}

fn step() {
    let now = || {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel fills it in.
        unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &mut now) };
        (now.tv_sec, now.tv_nsec)
    };
    // This program may see a step before the file systems do. They have made that step when it sees
    // the next.
    for _ in 0..2 {
        let before = now();
        while now() == before {
            std::thread::yield_now();
        }
    }
}

/// Does `act` as `who`.
pub fn acting<T>(who: Who, act: impl FnOnce() -> T) -> T {
    let (uid, gid) = who.ids();
    let groups: &[Gid] = if who == Who::Both { &[Gid::from_raw(Who::Two.ids().1)] } else { &[] };
    let become_one = |uid, gid, groups: &[Gid]| {
        set_thread_groups(groups).expect("root may");
        set_thread_res_gid(None, Gid::from_raw(gid), None).expect("root may");
        set_thread_res_uid(None, Uid::from_raw(uid), None).expect("root may");
    };
    become_one(uid, gid, groups);
    let ended = act();
    set_thread_res_uid(None, Uid::from_raw(0), None).expect("it is its real one");
    become_one(0, 0, &[]);
    ended
}
