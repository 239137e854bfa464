//! Checks of calls that change an existing file: its permissions, owner, length, times, names and
//! contents.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use crate::Failed;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT, chmod, fallocate, ftruncate, linkat, readlinkat, renameat_with, rmdir, seek, symlinkat,
    unlink, utimensat,
};
use rustix::io::{Errno, Result as Ended};

use super::checks::{Checks, KINDS, Kind, Who, acting};
use super::posix::{at_once, chown, link, opened, rename, stat, truncate};

fn mode(path: &Path) -> Ended<u32> {
    Ok(stat(path)?.st_mode & 0o7777)
}

pub fn chmods(checks: &mut Checks) -> Result<(), Failed> {
    for kind in KINDS {
        if kind == Kind::Link {
            continue;
        }
        let path = checks.new_of(kind)?;
        checks.times(&format!("chmod of a {kind:?} and times"), &path, (false, true), || {
            chmod(&path, Mode::from_raw_mode(0o111))
        })?;
        checks.is(&format!("chmod of a {kind:?}"), mode(&path)?, 0o111);
    }
    for wanted in [0, 0o777, 0o4755, 0o2755, 0o6711, 0o1644] {
        let path = checks.file(0o644, Who::Root)?;
        checks.works(&format!("chmod {wanted:o}"), chmod(&path, Mode::from_raw_mode(wanted)));
        checks.is(&format!("chmod {wanted:o}"), mode(&path)?, wanted);
    }
    for (who, may) in [(Who::Root, true), (Who::One, true), (Who::Two, false)] {
        let path = checks.file(0o777, Who::One)?;
        let ended = acting(who, || chmod(&path, Mode::from_raw_mode(0o600)));
        match may {
            true => drop(checks.works(&format!("chmod as {who:?}"), ended)),
            false => checks.fails(&format!("chmod as {who:?}"), ended, &[Errno::PERM]),
        }
        checks.is(&format!("after chmod as {who:?}"), mode(&path)?, if may { 0o600 } else { 0o777 });
    }
    // Set-group-ID requires membership in the group.
    for (who, right) in [(Who::One, 0o755), (Who::Both, 0o2755)] {
        let path = checks.file(0o755, Who::One)?;
        chown(&path, None, Some(Who::Two.ids().1))?;
        acting(who, || chmod(&path, Mode::from_raw_mode(0o2755)))?;
        checks.is(&format!("chmod 2755 as {who:?} of another group's file"), mode(&path)?, right);
    }
    // A write by another user clears setuid and setgid.
    let path = checks.file(0o6777, Who::Root)?;
    let open = opened(&path, OFlags::WRONLY)?;
    acting(Who::One, || open.write_all_at(b"x", 0))?;
    checks.is("the mode after somebody else's write", mode(&path)?, 0o777);
    let path = checks.file(0o6777, Who::Root)?;
    acting(Who::One, || truncate(&path, 5))?;
    checks.is("the mode after somebody else's truncate", mode(&path)?, 0o777);
    Ok(())
}

pub fn chowns(checks: &mut Checks) -> Result<(), Failed> {
    let (one, two) = (Who::One.ids(), Who::Two.ids());
    let owner = |path: &Path| stat(path).map(|it| (it.st_uid, it.st_gid));
    for kind in KINDS {
        if kind == Kind::Link {
            continue;
        }
        let path = checks.new_of(kind)?;
        checks.times(&format!("chown of a {kind:?} and times"), &path, (false, true), || {
            chown(&path, Some(one.0), Some(two.1))
        })?;
        checks.is(&format!("chown of a {kind:?}"), owner(&path)?, (one.0, two.1));
        chown(&path, None, Some(one.1))?;
        checks.is("chown of the group alone", owner(&path)?, one);
        chown(&path, Some(two.0), None)?;
        checks.is("chown of the user alone", owner(&path)?, (two.0, one.1));
    }
    let target = checks.new_of(Kind::File)?;
    let leads = checks.name();
    symlink(&target, &leads)?;
    std::os::unix::fs::lchown(&leads, Some(one.0), Some(one.1))?;
    checks.is("lchown", owner(&leads)?, one);
    checks.is("lchown leaves what it leads to", owner(&target)?, (0, 0));
    chown(&leads, Some(two.0), None)?;
    checks.is("chown follows a link", owner(&target)?, (two.0, 0));
    // A user may give a file to one of their groups, and to no other.
    let path = checks.file(0o644, Who::One)?;
    checks.works("chgrp to a group of one's own", acting(Who::Both, || chown(&path, None, Some(two.1))));
    checks.fails("chgrp to another", acting(Who::One, || chown(&path, None, Some(7))), &[Errno::PERM]);
    checks.fails("giving away", acting(Who::One, || chown(&path, Some(two.0), None)), &[Errno::PERM]);
    let ended = acting(Who::Two, || chown(&path, Some(two.0), None));
    checks.fails("taking", ended, &[Errno::PERM]);
    checks.is("whose it is", owner(&path)?, (one.0, two.1));
    let path = checks.file(0o6755, Who::One)?;
    acting(Who::Both, || chown(&path, None, Some(two.1)))?;
    checks.is("chown takes setuid and setgid away", mode(&path)?, 0o755);
    Ok(())
}

pub fn truncates(checks: &mut Checks) -> Result<(), Failed> {
    let path = checks.new_of(Kind::File)?;
    fs::write(&path, [7; 5000])?;
    for (len, all) in [(5000u64, 5000), (100, 100), (9000, 100), (0, 0), (1 << 32, 0), (3, 0)] {
        checks.works(&format!("truncate to {len}"), truncate(&path, len));
        checks.is("its length", stat(&path)?.st_size.cast_unsigned(), len);
        let mut begin = vec![1; len.min(10_000) as usize];
        File::open(&path)?.read_exact_at(&mut begin, 0)?;
        let right: Vec<u8> = (0..begin.len()).map(|at| if at < all { 7 } else { 0 }).collect();
        checks.is("what is left", begin == right, true);
    }
    checks.times("truncate changes times", &path, (true, true), || truncate(&path, 9))?;
    let open = opened(&path, OFlags::RDWR)?;
    checks.times("ftruncate changes times", &path, (true, true), || ftruncate(&open, 4))?;
    checks.fails(
        "ftruncate of what is open to be read",
        ftruncate(opened(&path, OFlags::RDONLY)?, 0),
        &[Errno::INVAL, Errno::BADF],
    );
    let directory = checks.new_of(Kind::Directory)?;
    checks.fails("truncate of a directory", truncate(&directory, 0), &[Errno::ISDIR]);
    checks.fails("truncate to less than nothing", truncate(&path, u64::MAX), &[Errno::INVAL, Errno::FBIG]);
    let part = fallocate(&open, FallocateFlags::empty(), 0, 10_000);
    checks.works("allocate", part);
    checks.is("its length then", stat(&path)?.st_size, 10_000);
    let read = opened(&path, OFlags::RDONLY)?;
    checks.fails("allocate by who reads", fallocate(&read, FallocateFlags::empty(), 0, 1), &[Errno::BADF]);
    let inval = fallocate(&open, FallocateFlags::empty(), 0, 0);
    checks.fails("allocate nothing", inval, &[Errno::INVAL]);
    Ok(())
}

pub fn times(checks: &mut Checks) -> Result<(), Failed> {
    let given = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let both = |atime, mtime| Timestamps { last_access: atime, last_modification: mtime };
    let set = |path: &Path, to: &Timestamps| utimensat(CWD, path, to, AtFlags::SYMLINK_NOFOLLOW);
    let omit = given(0, UTIME_OMIT);
    for kind in KINDS {
        let path = checks.new_of(kind)?;
        checks.works(
            &format!("utimensat of a {kind:?}"),
            set(&path, &both(given(1_000_000_000, 123_456_789), given(1_500_000_000, 987_654_321))),
        );
        let found = stat(&path)?;
        let times = (found.st_atime, found.st_atime_nsec as i64, found.st_mtime, found.st_mtime_nsec as i64);
        checks.is("both times", times, (1_000_000_000, 123_456_789, 1_500_000_000, 987_654_321));
        set(&path, &both(omit, given(5, 6)))?;
        let found = stat(&path)?;
        let times = (found.st_atime, found.st_mtime, found.st_mtime_nsec as i64);
        checks.is("one of them", times, (1_000_000_000, 5, 6));
        checks.times("UTIME_NOW is now", &path, (true, true), || {
            set(&path, &both(omit, given(0, UTIME_NOW)))
        })?;
    }
    for (who, now, one) in [(Who::One, true, true), (Who::Two, false, false), (Who::Root, true, true)] {
        let path = checks.file(0o644, Who::One)?;
        checks.may(&format!("now, as {who:?}"), acting(who, || set(&path, &at_once())), now);
        let ended = acting(who, || set(&path, &both(given(1, 0), given(1, 0))));
        match one {
            true => drop(checks.works(&format!("another time, as {who:?}"), ended)),
            false => checks.fails(&format!("another time, as {who:?}"), ended, &[Errno::PERM]),
        }
    }
    let path = checks.file(0o666, Who::One)?;
    checks.works("now, as one who may write", acting(Who::Two, || set(&path, &at_once())));
    let ended = acting(Who::Two, || set(&path, &both(given(1, 0), given(1, 0))));
    checks.fails("another time, as one who may write", ended, &[Errno::PERM]);
    Ok(())
}

pub fn renames(checks: &mut Checks) -> Result<(), Failed> {
    for from in KINDS {
        for to in KINDS {
            let (one, other) = (checks.new_of(from)?, checks.new_of(to)?);
            let number = stat(&one)?.st_ino;
            let what = format!("a {from:?} over a {to:?}");
            let ended = rename(&one, &other);
            match (from == Kind::Directory, to == Kind::Directory) {
                (false, true) => checks.fails(&what, ended, &[Errno::ISDIR]),
                (true, false) => checks.fails(&what, ended, &[Errno::NOTDIR]),
                _ => {
                    checks.works(&what, ended);
                    checks.is("which one it is", stat(&other)?.st_ino, number);
                    checks.fails("its old name", stat(&one), &[Errno::NOENT]);
                }
            }
        }
    }
    let (one, other) = (checks.new_of(Kind::Directory)?, checks.new_of(Kind::Directory)?);
    File::create(other.join("x"))?;
    let full = [Errno::NOTEMPTY, Errno::EXIST];
    checks.fails("over a directory that is not empty", rename(&one, &other), &full);
    checks.fails("into itself", rename(&one, &one.join("x")), &[Errno::INVAL]);
    let new = checks.name();
    checks.fails("of .", rename(&one.join("."), &new), &[Errno::INVAL, Errno::BUSY]);
    let before = (stat(&one)?.st_nlink, stat(&other)?.st_nlink);
    rename(&one, &other.join("inside"))?;
    checks.is("links of a directory that is moved", before, (2, 2));
    checks.is("links of where it is moved to", stat(&other)?.st_nlink, 3);
    let (a, b) = (checks.new_of(Kind::File)?, checks.name());
    link(&a, &b)?;
    checks.works("of a file over itself", rename(&a, &b));
    checks.is("which does nothing", (stat(&a)?.st_nlink, stat(&b)?.st_nlink), (2, 2));
    let (from, to) = (checks.new_of(Kind::Directory)?, checks.new_of(Kind::Directory)?);
    let moves = from.join("x");
    File::create(&moves)?;
    checks.times("rename changes the old directory's times", &from, (true, true), || {
        rename(&moves, &to.join("x"))
    })?;
    let place = to.join("x");
    checks.times("rename changes the new directory's times", &to, (true, true), || {
        rename(&place, &to.join("y"))
    })?;
    // A file whose name was replaced can still be used.
    let (kept, new) = (checks.new_of(Kind::File)?, checks.new_of(Kind::File)?);
    fs::write(&kept, "old")?;
    let open = opened(&kept, OFlags::RDWR)?;
    rename(&new, &kept)?;
    let mut text = [0; 3];
    open.read_exact_at(&mut text, 0)?;
    checks.is("what was replaced", (text, open.metadata()?.nlink()), (*b"old", 0));
    let (a, b) = (checks.new_of(Kind::File)?, checks.new_of(Kind::Directory)?);
    let numbers = (stat(&a)?.st_ino, stat(&b)?.st_ino);
    let by = |flags| renameat_with(CWD, &a, CWD, &b, flags);
    checks.fails("that replaces nothing", by(RenameFlags::NOREPLACE), &[Errno::EXIST]);
    checks.works("an exchange", by(RenameFlags::EXCHANGE));
    checks.is("which is which", (stat(&b)?.st_ino, stat(&a)?.st_ino), numbers);
    Ok(())
}

pub fn links(checks: &mut Checks) -> Result<(), Failed> {
    for kind in KINDS {
        let (path, other) = (checks.new_of(kind)?, checks.name());
        if kind == Kind::Directory {
            checks.fails("link of a directory", link(&path, &other), &[Errno::PERM]);
            continue;
        }
        checks.times(&format!("link changes a {kind:?}'s times"), &path, (false, true), || {
            linkat(CWD, &path, CWD, &other, AtFlags::empty())
        })?;
        checks.is(&format!("a {kind:?} with two names"), stat(&path)?.st_nlink, 2);
        checks.is("one file", stat(&path)?.st_ino, stat(&other)?.st_ino);
        checks.times("unlink changes the file's times", &other, (false, true), || unlink(&path))?;
        checks.is("one name is left", stat(&other)?.st_nlink, 1);
    }
    for target in ["a", "/", "../..", &"x/".repeat(2000)] {
        let path = checks.name();
        symlinkat(target, CWD, &path)?;
        let led = readlinkat(CWD, &path, Vec::new())?;
        checks.is("where a link leads", led.as_bytes() == target.as_bytes(), true);
        checks.is("its length", stat(&path)?.st_size as usize, target.len());
    }
    let (directory, way) = (checks.new_of(Kind::Directory)?, checks.name());
    File::create(directory.join("x"))?;
    symlink(&directory, &way)?;
    checks.works("through a link", stat(&way.join("x")));
    checks.fails("rmdir of a link to a directory", rmdir(&way), &[Errno::NOTDIR]);
    let empty = symlinkat("", CWD, checks.name());
    checks.fails("symlink to nothing", empty, &[Errno::NOENT]);
    let long = symlinkat("x".repeat(4096), CWD, checks.name());
    checks.fails("symlink to what is too long", long, &[Errno::NAMETOOLONG]);
    Ok(())
}

pub fn contents(checks: &mut Checks) -> Result<(), Failed> {
    let path = checks.new_of(Kind::File)?;
    let file = opened(&path, OFlags::RDWR)?;
    checks.times("a write changes times", &path, (true, true), || file.write_all_at(b"end", 100_000))?;
    checks.is("its length", stat(&path)?.st_size, 100_003);
    let mut hole = [1; 64];
    file.read_exact_at(&mut hole, 5000)?;
    checks.is("a hole", hole, [0; 64]);
    checks.is("beyond the end", file.read_at(&mut hole, 100_003)?, 0);
    checks.is("at the end", file.read_at(&mut hole, 100_001)?, 2);
    checks.is("what is not a hole", seek(&file, SeekFrom::Data(100_000)).is_ok(), true);
    checks.fails("none beyond the end", seek(&file, SeekFrom::Hole(100_004)), &[Errno::NXIO]);
    let add = opened(&path, OFlags::WRONLY | OFlags::APPEND)?;
    ftruncate(&file, 4)?;
    std::io::Write::write_all(&mut &add, b"more")?;
    checks.is("what is appended", fs::read(&path)?.len(), 8);
    checks.fails(
        "a write by who reads",
        rustix::io::pwrite(opened(&path, OFlags::RDONLY)?, b"x", 0),
        &[Errno::BADF],
    );
    let write_only = opened(&path, OFlags::WRONLY)?;
    checks.fails("a read by who writes", rustix::io::pread(&write_only, &mut [0; 1], 0), &[Errno::BADF]);
    // A file without a name can still be used.
    checks.works("unlink of what is open", unlink(&path));
    checks.is("its links", file.metadata()?.nlink(), 0);
    file.write_all_at(b"on", 0)?;
    let mut text = [0; 2];
    file.read_exact_at(&mut text, 0)?;
    checks.is("what it holds", text, *b"on");
    file.set_len(1)?;
    checks.is("its length", file.metadata()?.len(), 1);
    let stat = rustix::fs::statvfs(checks.root())?;
    checks.is("the longest name", stat.f_namemax, 255);
    Ok(())
}
