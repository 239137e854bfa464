//! Checks of file calls against POSIX (IEEE Std 1003.1-2017), on the host's file system and behind
//! the server, with each caching mode. Where Linux differs from POSIX, both are accepted. Where the
//! server differs from Linux, a [list](DIFFERENCES) has the difference.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::{Failed, ensure};
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, accessat, chmod, chownat,
    linkat, mkdirat, mknodat, open, openat, readlinkat, renameat, rmdir, symlinkat, unlink, utimensat,
};
use rustix::io::{Errno, Result as Ended};
use rustix::process::{Gid, Uid};
use vellum_share::Cache;

use super::checks::{Checks, KINDS, Kind, Who, acting};
use super::posix_changes::{chmods, chowns, contents, links, renames, times, truncates};

/// Known differences between the server and a file system of the host: the caching mode, the
/// beginning of the failed check, and the reason.
const DIFFERENCES: [(Cache, &str, &str); 1] = [(
    Cache::None,
    "chmod: the mode after somebody else's write",
    "of what goes past its cache the guest's kernel leaves taking setuid and setgid away to who writes it, and that is the VMM, as its \
     own user; no file of a share has these bits that was not asked for",
)];

/// Whether all times come from one clock. A guest with `cache=always` takes the times of its own
/// writes from its clock, and the server takes the others from the host's. If one change directly
/// follows another, its time may then be earlier, so that the order of times is not checked.
fn has_one_clock(cache: Option<Cache>, in_guest: bool) -> bool {
    !in_guest || cache != Some(Cache::Always)
}

/// The minimum number of checks, so that a lost check is noticed.
const MIN_CHECKS: u32 = 398;

/// Runs the checks in `root` with this caching mode. Returns their number, and the failures that
/// are not known differences.
pub fn checked(root: &Path, cache: Option<Cache>, in_guest: bool) -> Result<(u32, Vec<String>), Failed> {
    let Checks { done, mut wrong, .. } = Checks::during(root, has_one_clock(cache, in_guest), all)?;
    ensure(done >= MIN_CHECKS, || format!("{done} checks"))?;
    let known = |said: &String| {
        DIFFERENCES.iter().any(|(way, begins, _)| Some(*way) == cache && said.starts_with(begins))
    };
    wrong.retain(|said| !known(said));
    Ok((done, wrong))
}

/// Checks of one kind.
type Set = fn(&mut Checks) -> Result<(), Failed>;

const CHECKS: [(&str, Set); 12] = [
    ("paths", paths),
    ("exists", exists),
    ("permissions", permissions),
    ("directories", directories),
    ("open", opens),
    ("chmod", chmods),
    ("chown", chowns),
    ("truncate", truncates),
    ("times", times),
    ("rename", renames),
    ("links", links),
    ("contents", contents),
];

fn all(checks: &mut Checks) -> Result<(), Failed> {
    chmod(checks.root(), Mode::from_raw_mode(0o777))?;
    CHECKS.into_iter().try_for_each(|(about, check)| {
        checks.about(about);
        check(checks).map_err(|error| format!("{about}: {}", error.message().unwrap_or("?")).into())
    })
}

const RW: Mode = Mode::from_raw_mode(0o644);
const ALL: Mode = Mode::from_raw_mode(0o755);

fn create(path: &Path, flags: OFlags) -> Ended<File> {
    open(path, flags | OFlags::CREATE, RW).map(File::from)
}

pub(super) fn opened(path: &Path, flags: OFlags) -> Ended<File> {
    open(path, flags | OFlags::NONBLOCK, Mode::empty()).map(File::from)
}

pub(super) fn stat(path: &Path) -> Ended<rustix::fs::Stat> {
    rustix::fs::lstat(path)
}

fn fifo(path: &Path) -> Ended<()> {
    mknodat(CWD, path, FileType::Fifo, RW, 0)
}

pub(super) fn link(from: &Path, to: &Path) -> Ended<()> {
    linkat(CWD, from, CWD, to, AtFlags::empty())
}

pub(super) fn truncate(path: &Path, len: u64) -> Ended<()> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: a string that ends in a zero.
    match unsafe { libc::truncate(path.as_ptr(), len.cast_signed()) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).expect("the kernel's")),
    }
}

pub(super) fn rename(from: &Path, to: &Path) -> Ended<()> {
    renameat(CWD, from, CWD, to)
}

pub(super) fn chown(path: &Path, uid: Option<u32>, gid: Option<u32>) -> Ended<()> {
    let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
    chownat(CWD, path, uid, gid, AtFlags::empty())
}

/// A call that takes one path, with its name.
type Call = (&'static str, fn(&Path) -> Ended<()>);

/// Calls that require the path to exist.
const OF_ONE: [Call; 9] = [
    ("open", |path| opened(path, OFlags::RDONLY).map(drop)),
    ("stat", |path| stat(path).map(drop)),
    ("chmod", |path| chmod(path, RW)),
    ("chown", |path| chown(path, Some(0), None)),
    ("truncate", |path| truncate(path, 0)),
    ("unlink", |path| unlink(path)),
    ("rmdir", |path| rmdir(path)),
    ("readlink", |path| readlinkat(CWD, path, Vec::new()).map(drop)),
    ("utimensat", |path| utimensat(CWD, path, &at_once(), AtFlags::empty())),
];

/// Calls that create something.
const THAT_MAKE: [Call; 5] = [
    ("create", |path| create(path, OFlags::WRONLY | OFlags::EXCL).map(drop)),
    ("mkdir", |path| mkdirat(CWD, path, ALL)),
    ("mkfifo", fifo),
    ("mknod", |path| mknodat(CWD, path, FileType::Socket, RW, 0)),
    ("symlink", |path| symlinkat("x", CWD, path)),
];

pub(super) fn at_once() -> Timestamps {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    Timestamps { last_access: now, last_modification: now }
}

/// Paths with invalid prefixes, and names that are too long.
fn paths(checks: &mut Checks) -> Result<(), Failed> {
    let existing = checks.new_of(Kind::File)?;
    let loops = (checks.name(), checks.name());
    symlink(&loops.0, &loops.1)?;
    symlink(&loops.1, &loops.0)?;
    let (missing, long) = (checks.name(), checks.root().join("x".repeat(256)));
    let too_long = checks.root().join("y/".repeat(2100)).join("x");
    type Any = Box<dyn Fn(&Path) -> Ended<()>>;
    let mut calls: Vec<(&str, Any)> = Vec::new();
    for (name, call) in OF_ONE.into_iter().chain(THAT_MAKE) {
        calls.push((name, Box::new(call)));
    }
    let other = existing.clone();
    calls.push(("link to", Box::new(move |path| link(&other, path))));
    let other = existing.clone();
    calls.push(("rename to", Box::new(move |path| rename(&other, path))));
    let other = missing.clone();
    calls.push(("link from", Box::new(move |path| link(path, &other))));
    let other = missing.clone();
    calls.push(("rename from", Box::new(move |path| rename(path, &other))));
    for (name, call) in &calls {
        for kind in [Kind::File, Kind::Fifo, Kind::Socket] {
            let prefix = checks.new_of(kind)?;
            let what = format!("{name} below a {kind:?}");
            checks.fails(&what, call(&prefix.join("x")), &[Errno::NOTDIR]);
        }
        checks.fails(&format!("{name} below nothing"), call(&missing.join("x")), &[Errno::NOENT]);
        checks.fails(&format!("{name} of a long name"), call(&long), &[Errno::NAMETOOLONG]);
        checks.fails(&format!("{name} of a long path"), call(&too_long), &[Errno::NAMETOOLONG]);
        checks.fails(&format!("{name} below a loop"), call(&loops.0.join("x")), &[Errno::LOOP]);
    }
    for (name, call) in OF_ONE {
        checks.fails(&format!("{name} of nothing"), call(&missing), &[Errno::NOENT]);
    }
    for (name, call) in THAT_MAKE {
        let longest = checks.root().join(format!("{:>255}", name.replace(' ', "")));
        checks.works(&format!("{name} of the longest name"), call(&longest));
        let gone = if name == "mkdir" { rmdir(&longest) } else { unlink(&longest) };
        checks.works(&format!("{name}, and away with it"), gone);
    }
    checks.fails("open of a loop", opened(&loops.0, OFlags::RDONLY), &[Errno::LOOP]);
    Ok(())
}

/// Existing files are not created again.
fn exists(checks: &mut Checks) -> Result<(), Failed> {
    for kind in KINDS {
        let path = checks.new_of(kind)?;
        for (name, call) in THAT_MAKE {
            checks.fails(&format!("{name} over a {kind:?}"), call(&path), &[Errno::EXIST]);
        }
        let file = checks.new_of(Kind::File)?;
        checks.fails(&format!("link over a {kind:?}"), link(&file, &path), &[Errno::EXIST]);
        let right = match kind {
            Kind::File => FileType::RegularFile,
            Kind::Directory => FileType::Directory,
            Kind::Fifo => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::Link => FileType::Symlink,
            Kind::Character => FileType::CharacterDevice,
        };
        let found = stat(&path)?;
        checks.is(&format!("a {kind:?}'s type"), FileType::from_raw_mode(found.st_mode), right);
        checks.is(
            &format!("a {kind:?}'s links"),
            found.st_nlink,
            if kind == Kind::Directory { 2 } else { 1 },
        );
        if kind == Kind::Character {
            checks.is("a device's number", found.st_rdev, rustix::fs::makedev(1, 3));
        }
        if kind != Kind::Directory {
            checks.fails(&format!("rmdir of a {kind:?}"), rmdir(&path), &[Errno::NOTDIR]);
            checks.works(&format!("unlink of a {kind:?}"), unlink(&path));
        } else {
            checks.fails("unlink of a directory", unlink(&path), &[Errno::PERM, Errno::ISDIR]);
            checks.works("rmdir", rmdir(&path));
        }
        checks.fails(&format!("stat of what was a {kind:?}"), stat(&path), &[Errno::NOENT]);
        let path = checks.new_of(kind)?;
        if kind != Kind::Link {
            let read = readlinkat(CWD, &path, Vec::new());
            checks.fails(&format!("readlink of a {kind:?}"), read, &[Errno::INVAL]);
        }
    }
    Ok(())
}

/// Permissions on files and in directories.
fn permissions(checks: &mut Checks) -> Result<(), Failed> {
    // For the bits of the owner, the group and others: who acts, who owns the file, and the shift
    // of the bits.
    let classes = [(Who::One, Who::One, 6), (Who::Both, Who::Two, 3), (Who::Two, Who::One, 0)];
    for (who, owner, shift) in classes {
        for bits in 0..8u32 {
            // The other classes have no permissions.
            let mode = bits << shift;
            let path = checks.file(mode, owner)?;
            let (reads, writes) = (bits & 4 != 0, bits & 2 != 0);
            for (flags, may) in
                [(OFlags::RDONLY, reads), (OFlags::WRONLY, writes), (OFlags::RDWR, reads && writes)]
            {
                let what = format!("open of {mode:o} for {flags:?} as {who:?}");
                checks.may(&what, acting(who, || opened(&path, flags)), may);
            }
            checks.may(
                &format!("truncate of {mode:o} as {who:?}"),
                acting(who, || truncate(&path, 0)),
                writes,
            );
            for (access, may) in
                [(Access::READ_OK, reads), (Access::WRITE_OK, writes), (Access::EXEC_OK, bits & 1 != 0)]
            {
                let asked = acting(who, || accessat(CWD, &path, access, AtFlags::EACCESS));
                checks.may(&format!("access of {mode:o} for {access:?} as {who:?}"), asked, may);
            }
            let directory = checks.directory(mode, owner)?;
            let (reads, writes, passes) = (bits & 4 != 0, bits & 2 != 0, bits & 1 != 0);
            let inside = directory.join("inside");
            File::create(&inside)?;
            checks.may(&format!("stat in {mode:o} as {who:?}"), acting(who, || stat(&inside)), passes);
            let list = acting(who, || opened(&directory, OFlags::RDONLY | OFlags::DIRECTORY));
            checks.may(&format!("list of {mode:o} as {who:?}"), list, reads);
            for (name, call) in THAT_MAKE {
                let made = acting(who, || call(&directory.join(name)));
                checks.may(&format!("{name} in {mode:o} as {who:?}"), made, writes && passes);
            }
            let gone = acting(who, || unlink(&inside));
            checks.may(&format!("unlink in {mode:o} as {who:?}"), gone, writes && passes);
        }
    }
    // In a sticky directory only the file's owner, the directory's owner and root can rename or
    // remove a name.
    for (who, may) in [(Who::Root, true), (Who::One, true), (Who::Two, false)] {
        let (directory, target) = (checks.directory(0o1777, Who::Root)?, checks.directory(0o777, Who::Root)?);
        let (from, moved) = (directory.join("a"), target.join("a"));
        let own = |path: &Path| -> Result<(), Failed> {
            File::create(path)?;
            Ok(chown(path, Some(Who::One.ids().0), None)?)
        };
        own(&from)?;
        let ended = acting(who, || rename(&from, &moved));
        let gone = |checks: &mut Checks, what: String, ended: Ended<()>| match may {
            true => drop(checks.works(&what, ended)),
            false => checks.fails(&what, ended, &[Errno::PERM, Errno::ACCESS]),
        };
        gone(checks, format!("rename out of a sticky directory as {who:?}"), ended);
        let from = directory.join("b");
        own(&from)?;
        let ended = acting(who, || unlink(&from));
        gone(checks, format!("unlink in a sticky directory as {who:?}"), ended);
    }
    Ok(())
}

fn directories(checks: &mut Checks) -> Result<(), Failed> {
    let top = checks.directory(0o755, Who::Root)?;
    checks
        .times("mkdir changes its parent's times", &top, (true, true), || mkdirat(CWD, top.join("a"), ALL))?;
    checks.is("a directory has a link from its child", stat(&top)?.st_nlink, 3);
    for (name, call) in THAT_MAKE {
        checks.times(&format!("{name} changes its directory's times"), &top, (true, true), || {
            call(&top.join(name))
        })?;
    }
    let files = [Errno::NOTEMPTY, Errno::EXIST];
    checks.fails("rmdir of what is not empty", rmdir(&top), &files);
    checks.fails("rmdir of .", rmdir(top.join(".")), &[Errno::INVAL]);
    checks.fails("rmdir of ..", rmdir(top.join("a/..")), &files);
    checks.times("rmdir changes its parent's times", &top, (true, true), || rmdir(top.join("a")))?;
    checks
        .times("unlink changes its directory's times", &top, (true, true), || unlink(top.join("create")))?;
    rmdir(top.join("mkdir"))?;
    checks.is("and no link without one", stat(&top)?.st_nlink, 2);
    // A removed directory that is open can still be used.
    let inner = checks.directory(0o755, Who::Root)?;
    let open = opened(&inner, OFlags::RDONLY | OFlags::DIRECTORY)?;
    rmdir(&inner)?;
    checks.fails(
        "a file in a directory that is gone",
        openat(&open, "x", OFlags::CREATE, RW),
        &[Errno::NOENT],
    );
    // A new file's mode is the requested one without the bits of the umask. Its owner is who
    // created it, and a setgid directory passes on its group.
    for (mode, mask, right) in
        [(0o777, 0, 0o777), (0o777, 0o22, 0o755), (0o666, 0o77, 0o600), (0o151, 0, 0o151)]
    {
        for (name, call) in [("mkdir", true), ("create", false)] {
            let path = checks.name();
            rustix::process::umask(Mode::from_raw_mode(mask));
            let asked = Mode::from_raw_mode(mode);
            let made = match call {
                true => acting(Who::One, || mkdirat(CWD, &path, asked)),
                false => acting(Who::One, || open_new(&path, asked)),
            };
            rustix::process::umask(Mode::empty());
            checks.works(&format!("{name} with {mode:o}"), made);
            let found = stat(&path)?;
            checks.is(&format!("{name} with {mode:o} and umask {mask:o}"), found.st_mode & 0o7777, right);
            checks.is(&format!("{name}: whose it is"), (found.st_uid, found.st_gid), Who::One.ids());
        }
    }
    let handing = checks.directory(0o2777, Who::Two)?;
    for (name, call) in THAT_MAKE {
        let path = handing.join(name);
        acting(Who::One, || call(&path))?;
        let found = stat(&path)?;
        let right = (Who::One.ids().0, Who::Two.ids().1);
        checks.is(&format!("{name} where the group is handed on"), (found.st_uid, found.st_gid), right);
    }
    let handed = stat(&handing.join("mkdir"))?.st_mode & 0o7777;
    checks.is("a directory hands on that it hands on", handed, 0o2755);
    Ok(())
}

fn open_new(path: &Path, mode: Mode) -> Ended<()> {
    open(path, OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY, mode).map(drop)
}

fn opens(checks: &mut Checks) -> Result<(), Failed> {
    let directory = checks.new_of(Kind::Directory)?;
    for flags in
        [OFlags::WRONLY, OFlags::RDWR, OFlags::RDONLY | OFlags::TRUNC, OFlags::RDONLY | OFlags::CREATE]
    {
        let ended = open(&directory, flags, RW);
        checks.fails(&format!("open of a directory for {flags:?}"), ended, &[Errno::ISDIR]);
    }
    let target = checks.new_of(Kind::File)?;
    let leads = checks.name();
    symlink(&target, &leads)?;
    checks.fails("open of a link that is not followed", opened(&leads, OFlags::NOFOLLOW), &[Errno::LOOP]);
    checks.works("open of a link", opened(&leads, OFlags::RDONLY));
    let dangles = checks.name();
    symlink(checks.name(), &dangles)?;
    let exclusive = create(&dangles, OFlags::EXCL | OFlags::WRONLY);
    checks.fails("exclusive creation by a link to nothing", exclusive, &[Errno::EXIST]);
    checks.works("creation by a link to nothing", create(&dangles, OFlags::WRONLY));
    checks.fails("a file as a directory", opened(&target, OFlags::DIRECTORY), &[Errno::NOTDIR]);
    checks.fails("a file with a slash behind it", stat(&slash(&target)), &[Errno::NOTDIR]);
    checks.works("a directory with a slash behind it", stat(&slash(&directory)));
    let pipe = checks.new_of(Kind::Fifo)?;
    checks.fails("a FIFO that nobody reads", opened(&pipe, OFlags::WRONLY), &[Errno::NXIO]);
    checks.works("a FIFO, to be read", opened(&pipe, OFlags::RDONLY));
    let socket = checks.new_of(Kind::Socket)?;
    checks.fails("open of a socket", opened(&socket, OFlags::RDONLY), &[Errno::NXIO, Errno::OPNOTSUPP]);
    let file = checks.new_of(Kind::File)?;
    fs::write(&file, "text")?;
    checks.times("O_TRUNC changes times", &file, (true, true), || {
        opened(&file, OFlags::WRONLY | OFlags::TRUNC)
    })?;
    checks.is("O_TRUNC leaves nothing", stat(&file)?.st_size, 0);
    checks.times("an open changes none", &file, (false, false), || opened(&file, OFlags::RDWR))?;
    // The creator has the file open as requested, even if its mode forbids it.
    let path = checks.name();
    let closed =
        acting(Who::One, || open(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR, Mode::empty()));
    let closed = File::from(closed?);
    checks.works("a write to a new file that nobody may write", rustix::io::pwrite(&closed, b"x", 0));
    checks.is("and what it has", fs::read(&path)?, b"x".to_vec());
    Ok(())
}

fn slash(path: &Path) -> PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(OsStr::new("/"));
    text.into()
}
