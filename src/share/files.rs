//! Requests that do not change the directory: open, list, sync, seek, copy.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{self, FallocateFlags, FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use super::Cache;
use super::fuse::{Answer, Request, open};
use super::nodes;
use super::server::{Done, Handle, MAX_LIST, Server, errno, name_of};

impl Server {
    pub(super) fn files(&mut self, node: u64, request: Request<'_>, answer: &mut Answer) -> Done {
        match request {
            Request::Open { flags } => {
                let file = Rc::new(self.open_node(node, flags)?);
                let fh = self.keep(Handle::File(file.clone()))?;
                answer.opened(fh, self.open_flags());
                return Ok(Some(file));
            }
            Request::OpenDir => {
                let descriptor = self.nodes.get(node).map_err(errno)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let directory = fs::openat(&self.proc, name_of(&descriptor), flags, Mode::empty());
                let fh = self.keep(Handle::Directory(directory.map_err(errno)?))?;
                let cached = self.config.cache == Cache::Always;
                answer.opened(fh, if cached { open::KEEP_CACHE | open::CACHE_DIR } else { 0 });
            }
            Request::ReadDir { fh, offset, size, plus } => self.list(node, fh, offset, size, plus, answer)?,
            // The server buffers nothing.
            Request::Flush { .. } => {}
            Request::FSync { fh, data } => sync(&*self.file(fh)?, data)?,
            Request::FSyncDir { fh, data } => match self.handles.get(&fh) {
                Some(Handle::Directory(directory)) => sync(directory, data)?,
                _ => return Err(libc::EBADF),
            },
            Request::Allocate { fh, offset, len, mode } => {
                let mode = FallocateFlags::from_bits(mode).ok_or(libc::EOPNOTSUPP)?;
                fs::fallocate(&*self.file(fh)?, mode, offset, len).map_err(errno)?;
            }
            // With write-back the guest may hold data that is not written yet. The host would
            // report a hole there, and a copy would lose the data. Without this call the guest
            // treats the whole file as data.
            Request::Seek { .. } if self.writeback => return Err(libc::ENOSYS),
            Request::Seek { fh, offset, whence } => {
                let to = match whence as i32 {
                    libc::SEEK_DATA => SeekFrom::Data(offset),
                    libc::SEEK_HOLE => SeekFrom::Hole(offset),
                    _ => return Err(libc::EINVAL),
                };
                answer.u64s([fs::seek(&*self.file(fh)?, to).map_err(errno)?]);
            }
            Request::Copy { from, from_at, to, to_at, len } => {
                let (from, to) = (self.file(from)?, self.file(to)?);
                let (mut from_at, mut to_at) = (from_at, to_at);
                // A large copy would delay other requests. The guest continues where this one ends.
                let len = len.min(64 << 20) as usize;
                let copied = fs::copy_file_range(&*from, Some(&mut from_at), &*to, Some(&mut to_at), len);
                answer.u32s([copied.map_err(errno)? as u32, 0]);
            }
            _ => return Err(libc::ENOSYS),
        }
        Ok(None)
    }

    /// What the guest may cache of a file that it opens.
    pub(super) fn open_flags(&self) -> u32 {
        match self.config.cache {
            Cache::Auto => 0,
            Cache::Always => open::KEEP_CACHE,
            Cache::None => open::DIRECT_IO,
        }
    }

    /// Opens the content of `node`, which must be a regular file.
    pub(super) fn open_node(&mut self, node: u64, flags: u32) -> Result<OwnedFd, i32> {
        let flags = self.allowed(flags)?;
        let descriptor = self.nodes.get(node).map_err(errno)?;
        let stat = nodes::look(&descriptor).map_err(errno)?;
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(libc::EISDIR),
            FileType::Symlink => return Err(libc::ELOOP),
            // Opening a special file would act on the host. The guest's kernel handles its own.
            _ => return Err(libc::EACCES),
        }
        fs::openat(&self.proc, name_of(&descriptor), flags, Mode::empty()).map_err(errno)
    }

    /// The flags for opening a file on the host.
    pub(super) fn allowed(&self, flags: u32) -> Result<OFlags, i32> {
        let asked = flags.cast_signed();
        let mut taken = asked & (libc::O_ACCMODE | libc::O_TRUNC | libc::O_DSYNC | libc::O_SYNC);
        if self.writeback {
            // The guest's cache reads the rest of a partly written page, and tracks the end of the
            // file.
            if taken & libc::O_ACCMODE == libc::O_WRONLY {
                taken = taken & !libc::O_ACCMODE | libc::O_RDWR;
            }
        } else {
            taken |= asked & libc::O_APPEND;
        }
        if taken & libc::O_ACCMODE == libc::O_ACCMODE {
            return Err(libc::EINVAL);
        }
        if !self.config.writable && (taken & libc::O_ACCMODE != libc::O_RDONLY || taken & libc::O_TRUNC != 0)
        {
            return Err(libc::EROFS);
        }
        Ok(OFlags::from_bits_retain(taken.cast_unsigned())
            | OFlags::CLOEXEC
            | OFlags::NONBLOCK
            | OFlags::NOCTTY)
    }

    fn list(
        &mut self,
        node: u64,
        fh: u64,
        offset: u64,
        size: u32,
        plus: bool,
        answer: &mut Answer,
    ) -> Result<(), i32> {
        let directory = match self.handles.remove(&fh) {
            Some(Handle::Directory(directory)) => directory,
            Some(other) => {
                let empty = matches!(other, Handle::Nothing);
                self.handles.insert(fh, other);
                return if empty { Ok(()) } else { Err(libc::ENOTDIR) };
            }
            None => return Err(libc::EBADF),
        };
        let listed = self.list_from(&directory, node, offset, (size as usize).min(MAX_LIST), plus, answer);
        self.handles.insert(fh, Handle::Directory(directory));
        listed
    }

    fn list_from(
        &mut self,
        directory: &OwnedFd,
        node: u64,
        offset: u64,
        most: usize,
        plus: bool,
        answer: &mut Answer,
    ) -> Result<(), i32> {
        // Offsets are those of the host's file system and as stable as it makes them.
        fs::seek(directory, SeekFrom::Start(offset)).map_err(errno)?;
        let device = self.nodes.id(node).map_err(errno)?.device;
        let mut buffer = Vec::with_capacity(most.clamp(4 << 10, 32 << 10));
        let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::INTR) => continue,
                Err(error) => return if answer.size() > 0 { Ok(()) } else { Err(errno(error)) },
            };
            let before = answer.size();
            let (name, next) = (entry.file_name(), entry.next_entry_cookie());
            let mut found = None;
            if plus {
                let itself = matches!(name.to_bytes(), b"." | b"..");
                // An entry that is gone by now or cannot be examined has no node.
                match itself.then_some(0).map_or_else(|| self.enter(directory, node, name, answer), Err) {
                    Ok(node) => found = Some(node),
                    Err(_) => answer.entry(0, &Default::default(), self.valid()),
                }
            }
            // The type in a directory entry is the type in the mode, shifted (IFTODT).
            let kind = entry.file_type().as_raw_mode() >> 12;
            let ino = self.ino(device, entry.ino());
            answer.dirent(ino, next, kind, name.to_bytes());
            if answer.size() > most {
                answer.truncate(before);
                if let Some(node) = found {
                    self.nodes.forget(node, 1);
                }
                break;
            }
        }
        Ok(())
    }
}

fn sync(file: &OwnedFd, data: bool) -> Result<(), i32> {
    if data { fs::fdatasync(file) } else { fs::fsync(file) }.map_err(errno)
}
