//! Requests that change the directory: create, rename, remove, set attributes.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{
    self, AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid, XattrFlags,
};

use super::fuse::{Answer, Change, Header, Request, change};
use super::nodes::{self, Id};
use super::server::{Done, Handle, Server, errno, name_of, path_of};

/// Mode bits that run a file with the rights of its owner or group.
const SETID: u32 = libc::S_ISUID | libc::S_ISGID;

/// Prefixes of attributes that the host's kernel trusts.
const PRIVILEGED: [&[u8]; 2] = [b"security.", b"trusted."];

impl Server {
    pub(super) fn changes(&mut self, header: Header, request: Request<'_>, answer: &mut Answer) -> Done {
        if !self.config.writable {
            return Err(libc::EROFS);
        }
        let node = header.node;
        match request {
            Request::SetAttr(change) => self.set(node, &change, answer)?,
            Request::Symlink { name, target } => {
                let kind = FileType::Symlink;
                self.make(header, name, kind, answer, |directory| fs::symlinkat(target, directory, name))?
            }
            Request::MkDir { mode, name } => {
                let mode = self.mode(mode)?;
                let kind = FileType::Directory;
                self.make(header, name, kind, answer, |directory| fs::mkdirat(directory, name, mode))?;
            }
            Request::MkNod { mode, rdev, name } => {
                let kind = FileType::from_raw_mode(mode);
                let device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
                if kind == FileType::Directory || kind == FileType::Symlink || device && !self.config.devices
                {
                    return Err(libc::EPERM);
                }
                let mode = self.mode(mode)?;
                // Device numbers in the kernel's encoding (new_encode_dev).
                let (major, minor) = ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & !0xff));
                let device = fs::makedev(major, minor);
                self.make(header, name, kind, answer, |directory| {
                    fs::mknodat(directory, name, kind, mode, device)
                })?;
            }
            Request::Create { flags, mode, name } => return self.create(header, name, flags, mode, answer),
            Request::Link { node: file, name } => {
                let (file, directory) = (self.get(file)?, self.get(node)?);
                fs::linkat(&self.proc, name_of(&file), &*directory, name, AtFlags::SYMLINK_FOLLOW)
                    .map_err(errno)?;
                let kind = FileType::from_raw_mode(nodes::look(&file).map_err(errno)?.stx_mode.into());
                self.made(&directory, node, name, kind, answer)?;
            }
            Request::Unlink { name } => self.remove(node, name, AtFlags::empty())?,
            Request::RmDir { name } => self.remove(node, name, AtFlags::REMOVEDIR)?,
            Request::Rename { name, to, new, flags } => self.rename(node, name, to, new, flags)?,
            Request::SetXattr { name, value, flags } => {
                self.may_set(name)?;
                let flags = XattrFlags::from_bits(flags).ok_or(libc::EINVAL)?;
                fs::setxattr(path_of(&*self.get(node)?), name, value, flags).map_err(errno)?;
            }
            Request::RemoveXattr { name } => {
                self.may_set(name)?;
                fs::removexattr(path_of(&*self.get(node)?), name).map_err(errno)?;
            }
            _ => return Err(libc::ENOSYS),
        }
        Ok(None)
    }

    fn get(&mut self, node: u64) -> Result<Rc<OwnedFd>, i32> {
        self.nodes.get(node).map_err(errno)
    }

    fn may_set(&self, name: &CStr) -> Result<(), i32> {
        let privileged = PRIVILEGED.iter().any(|prefix| name.to_bytes().starts_with(prefix));
        if privileged && !self.config.privileged_xattrs { Err(libc::EPERM) } else { Ok(()) }
    }

    /// The permissions in `mode`, if the guest may set them.
    fn mode(&self, mode: u32) -> Result<Mode, i32> {
        if mode & SETID != 0 && !self.config.setid {
            return Err(libc::EPERM);
        }
        Ok(Mode::from_bits_truncate(mode & 0o7777))
    }

    /// Creates `name` in the header's directory, changes its owner to the guest's caller, and adds
    /// the entry to the answer.
    fn make(
        &mut self,
        header: Header,
        name: &CStr,
        kind: FileType,
        answer: &mut Answer,
        make: impl FnOnce(&OwnedFd) -> rustix::io::Result<()>,
    ) -> Result<(), i32> {
        let directory = self.get(header.node)?;
        make(&directory).map_err(errno)?;
        if self.gives_away {
            let made = nodes::open_beneath(&directory, name).map_err(errno)?;
            // The host may have put another file there meanwhile, which must not change hands.
            let stat = nodes::look(&made).map_err(errno)?;
            let is_file = kind != FileType::Directory;
            let links = if is_file { 1 } else { stat.stx_nlink };
            let new = (kind.as_raw_mode(), Uid::ROOT.as_raw(), links);
            if (Id::from(&stat).file_type, stat.stx_uid, stat.stx_nlink) != new {
                return Err(libc::ESTALE);
            }
            self.give(header, &directory, &made, name, kind)?;
        }
        self.made(&directory, header.node, name, kind, answer).map(drop)
    }

    /// Adds the entry of a new file of type `kind` to the answer. The host may have replaced the
    /// file meanwhile. The guest's kernel treats another type as a disk error (EIO). After ESTALE
    /// it looks up the name again.
    fn made(
        &mut self,
        directory: &OwnedFd,
        node: u64,
        name: &CStr,
        kind: FileType,
        answer: &mut Answer,
    ) -> Result<u64, i32> {
        let found = self.enter(directory, node, name, answer)?;
        self.is(found, kind).inspect_err(|_| self.nodes.forget(found, 1))?;
        Ok(found)
    }

    /// Checks that `node` has the type `kind`.
    fn is(&self, node: u64, kind: FileType) -> Result<(), i32> {
        let is = self.nodes.id(node).map_err(errno)?.file_type == kind.as_raw_mode();
        if is { Ok(()) } else { Err(libc::ESTALE) }
    }

    /// Makes the guest's caller the owner of the new file `made` of type `kind`, which is `name` in
    /// `directory`. A file that cannot be given away (vfat, NFS) is removed: the guest is told that
    /// there is none.
    fn give(
        &self,
        header: Header,
        directory: &OwnedFd,
        made: &OwnedFd,
        name: &CStr,
        kind: FileType,
    ) -> Result<(), i32> {
        // In a directory with the set-group-ID bit, the new file already has the directory's group.
        let hands_on = u32::from(nodes::look(directory).map_err(errno)?.stx_mode) & libc::S_ISGID != 0;
        let (uid, gid) = (Uid::from_raw(header.uid), (!hands_on).then(|| Gid::from_raw(header.gid)));
        fs::chownat(made, c"", Some(uid), gid, AtFlags::EMPTY_PATH).map_err(|error| {
            let how = if kind == FileType::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let _ = fs::unlinkat(directory, name, how);
            errno(error)
        })
    }

    fn create(&mut self, header: Header, name: &CStr, flags: u32, mode: u32, answer: &mut Answer) -> Done {
        let (node, taken, mode) = (header.node, self.allowed(flags)?, self.mode(mode)?);
        let directory = self.get(node)?;
        let new = taken | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let (file, found) = match fs::openat(&*directory, name, new, mode) {
            Ok(file) => {
                if self.gives_away {
                    self.give(header, &directory, &file, name, FileType::RegularFile)?;
                }
                let found = self.made(&directory, node, name, FileType::RegularFile, answer)?;
                (file, found)
            }
            // The host created the file meanwhile. Its type decides whether it may be opened.
            Err(rustix::io::Errno::EXIST) if flags.cast_signed() & libc::O_EXCL == 0 => {
                let found = self.enter(&directory, node, name, answer)?;
                let opened = self.open_node(found, flags);
                let opened = opened.and_then(|file| self.is(found, FileType::RegularFile).map(|()| file));
                (opened.inspect_err(|_| self.nodes.forget(found, 1))?, found)
            }
            Err(error) => return Err(errno(error)),
        };
        let file = Rc::new(file);
        let fh = self.keep(Handle::File(file.clone())).inspect_err(|_| self.nodes.forget(found, 1))?;
        answer.opened(fh, self.open_flags());
        Ok(Some(file))
    }

    /// Pins the node of `name` in `directory`, if the guest knows it: it keeps its descriptor when
    /// it loses its name.
    fn lose(&mut self, directory: &OwnedFd, name: &CStr) -> Result<(), i32> {
        let Ok(stat) = nodes::look_at(directory, name) else { return Ok(()) };
        match self.nodes.known(Id::from(&stat)) {
            Some(node) => self.nodes.pin(node).map_err(errno),
            None => Ok(()),
        }
    }

    fn remove(&mut self, node: u64, name: &CStr, how: AtFlags) -> Result<(), i32> {
        let directory = self.get(node)?;
        self.lose(&directory, name)?;
        fs::unlinkat(&*directory, name, how).map_err(errno)
    }

    fn rename(&mut self, node: u64, name: &CStr, to: u64, new: &CStr, flags: u32) -> Result<(), i32> {
        let flags = RenameFlags::from_bits(flags).ok_or(libc::EINVAL)?;
        if flags.contains(RenameFlags::WHITEOUT) && !self.config.devices {
            return Err(libc::EINVAL);
        }
        let (from, onto) = (self.get(node)?, self.get(to)?);
        let moved = nodes::look_at(&from, name).map_err(errno)?;
        let replaced = nodes::look_at(&onto, new).ok();
        if !flags.contains(RenameFlags::EXCHANGE) {
            self.lose(&onto, new)?;
        }
        fs::renameat_with(&*from, name, &*onto, new, flags).map_err(errno)?;
        if let Some(known) = self.nodes.known(Id::from(&moved)) {
            self.nodes.put(known, to, new);
        }
        if flags.contains(RenameFlags::EXCHANGE)
            && let Some(known) = replaced.and_then(|stat| self.nodes.known(Id::from(&stat)))
        {
            self.nodes.put(known, node, name);
        }
        Ok(())
    }

    fn set(&mut self, node: u64, to: &Change, answer: &mut Answer) -> Result<(), i32> {
        let has = |bit: u32| to.valid & bit != 0;
        let descriptor = self.get(node)?;
        let fh = has(change::FH).then_some(to.fh);
        if has(change::MODE) {
            let mode = self.mode(to.mode)?;
            fs::chmodat(&self.proc, name_of(&descriptor), mode, AtFlags::empty()).map_err(errno)?;
        }
        if has(change::UID) || has(change::GID) {
            let uid = has(change::UID).then(|| Uid::from_raw(to.uid));
            let gid = has(change::GID).then(|| Gid::from_raw(to.gid));
            fs::chownat(&*descriptor, c"", uid, gid, AtFlags::EMPTY_PATH).map_err(errno)?;
        }
        if has(change::SIZE) {
            let file = match fh.map(|fh| self.file(fh)) {
                Some(file) => file?,
                None => Rc::new(self.open_node(node, libc::O_WRONLY.cast_unsigned())?),
            };
            fs::ftruncate(&*file, to.size).map_err(errno)?;
        }
        if has(change::ATIME | change::MTIME) {
            let time = |(seconds, nanoseconds): (u64, u32), given, now| {
                let nanoseconds = match (has(given), has(now)) {
                    (_, true) => fs::UTIME_NOW,
                    (true, false) => nanoseconds.into(),
                    (false, false) => fs::UTIME_OMIT,
                };
                Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds }
            };
            let times = Timestamps {
                last_access: time(to.atime, change::ATIME, change::ATIME_NOW),
                last_modification: time(to.mtime, change::MTIME, change::MTIME_NOW),
            };
            fs::utimensat(&self.proc, name_of(&descriptor), &times, AtFlags::empty()).map_err(errno)?;
        }
        self.attr(node, fh, answer)
    }
}
