//! Executes requests.
//!
//! No request is deferred: [`Server::answer`] returns the complete answer, with the descriptor of a
//! file that the request opened.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{self, FileType, Mode, OFlags, Statx};

use super::fuse::{self, Answer, Attributes, Bad, Header, IN_HEADER, Request, Valid, init};
use super::nodes::{self, Id, Kind, Nodes};
use super::{Cache, Config};

/// The largest write: 256 pages.
pub const MAX_WRITE: u32 = 1 << 20;
/// The largest request without a write's data. An extended attribute has at most 64 KiB.
pub const MAX_REQUEST: usize = 80 << 10;
/// The largest answer without a read's data.
pub const MAX_ANSWER: usize = 80 << 10;
/// The largest directory listing.
pub(super) const MAX_LIST: usize = 64 << 10;

/// What an open handle refers to.
pub(super) enum Handle {
    /// A regular file.
    File(Rc<OwnedFd>),
    /// A directory.
    Directory(OwnedFd),
    /// A hidden directory, which is empty.
    Nothing,
}

/// The server of one directory.
pub struct Server {
    pub(super) config: Config,
    pub(super) nodes: Nodes,
    pub(super) handles: HashMap<u64, Handle>,
    next_handle: u64,
    most_handles: usize,
    /// /proc/self/fd, to reopen the content of O_PATH descriptors.
    pub(super) proc: OwnedFd,
    /// Whether new files get the guest's user as owner.
    pub(super) gives_away: bool,
    /// Whether the guest's cache writes back later.
    pub(super) writeback: bool,
    submounts: bool,
    /// The devices that the guest sees as one file system, the directory's own first.
    devices: Vec<(u32, u32)>,
}

/// The result of a request: a descriptor or an error number.
pub(super) type Done = Result<Option<Rc<OwnedFd>>, i32>;

/// The error number of an I/O error.
pub(super) fn errno(error: impl Into<io::Error>) -> i32 {
    error.into().raw_os_error().unwrap_or(libc::EIO)
}

impl Server {
    /// Creates the server of the directory `root`, in a process that may have `descriptors` open
    /// files.
    ///
    /// # Errors
    /// Fails without /proc, or if the kernel rejects an operation on `root`.
    pub fn new(root: OwnedFd, config: Config, descriptors: usize) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = fs::open(c"/proc/self/fd", flags, Mode::empty())?;
        // The guest has already applied its umask to modes.
        rustix::process::umask(Mode::empty());
        // Half of the descriptors for nodes and some for open files. The rest is for requests.
        let nodes = Nodes::new(root, descriptors / 2)?;
        Ok(Self {
            config,
            devices: vec![nodes.id(fuse::ROOT)?.device],
            nodes,
            handles: HashMap::new(),
            next_handle: 1,
            most_handles: descriptors / 3,
            proc,
            gives_away: rustix::process::geteuid().is_root(),
            writeback: false,
            submounts: false,
        })
    }

    /// Writes the answer to `request`, if it has one. Returns the descriptor of a file that it
    /// opened.
    pub fn answer(&mut self, request: &[u8], answer: &mut Answer) -> Option<Rc<OwnedFd>> {
        answer.begin();
        let header = request.first_chunk::<IN_HEADER>().and_then(|bytes| Header::parse(bytes, request.len()));
        // A guest that sends no header gets no answer.
        let header = header?;
        let (done, answered) = match Request::parse(header.opcode, &request[IN_HEADER..]) {
            Ok(request) => (self.perform(header, request, answer), request.is_answered()),
            Err(Bad(error)) => (Err(error), true),
        };
        if answered {
            answer.finish(header.unique, done.as_ref().err().copied().unwrap_or(0));
        }
        done.ok().flatten()
    }

    fn perform(&mut self, header: Header, request: Request<'_>, answer: &mut Answer) -> Done {
        let node = header.node;
        match request {
            Request::Init { minor, readahead, flags } => {
                // A guest that boots another kernel does not say that it forgets (kexec).
                self.handles.clear();
                self.nodes.forget_all();
                self.init(minor, readahead, flags, answer);
                return Ok(None);
            }
            Request::Destroy => {
                self.handles.clear();
                self.nodes.forget_all();
                return Ok(None);
            }
            Request::Forget { lookups } => {
                self.nodes.forget(node, lookups);
                return Ok(None);
            }
            Request::BatchForget { nodes } => {
                fuse::forgotten(nodes).for_each(|(node, lookups)| self.nodes.forget(node, lookups));
                return Ok(None);
            }
            Request::Release { fh } => {
                self.handles.remove(&fh);
                return Ok(None);
            }
            _ => {}
        }
        if self.nodes.kind(node).map_err(errno)? == Kind::Hidden {
            return self.hidden(node, request, answer);
        }
        match request {
            Request::Lookup { name } => {
                let directory = self.nodes.get(node).map_err(errno)?;
                self.enter(&directory, node, name, answer)?;
            }
            Request::GetAttr { fh } => {
                let attributes = self.attributes(node, fh)?;
                answer.attr(&attributes, self.valid());
            }
            Request::ReadLink => {
                let descriptor = self.nodes.get(node).map_err(errno)?;
                let target = fs::readlinkat(&*descriptor, c"", Vec::new()).map_err(errno)?;
                answer.raw(target.to_bytes());
            }
            Request::StatFs => {
                let descriptor = self.nodes.get(node).map_err(errno)?;
                let stat = fs::fstatfs(&*descriptor).map_err(errno)?;
                answer.u64s([stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree]);
                answer.u32s([stat.f_bsize as u32, fuse::NAME_MAX as u32, stat.f_frsize as u32, 0]);
                answer.u32s([0; 6]);
            }
            Request::GetXattr { name, size } => self.get_xattr(node, Some(name), size, answer)?,
            Request::ListXattr { size } => self.get_xattr(node, None, size, answer)?,
            // The VMM has the descriptor and reads and writes itself.
            Request::Transfer => return Err(libc::EBADF),
            Request::Open { .. }
            | Request::Flush { .. }
            | Request::FSync { .. }
            | Request::OpenDir
            | Request::ReadDir { .. }
            | Request::FSyncDir { .. }
            | Request::Allocate { .. }
            | Request::Seek { .. }
            | Request::Copy { .. } => return self.files(node, request, answer),
            _ => return self.changes(header, request, answer),
        }
        Ok(None)
    }

    fn init(&mut self, minor: u32, readahead: u32, offered: u32, answer: &mut Answer) {
        let mut wanted = init::ASYNC_READ
            | init::ATOMIC_O_TRUNC
            | init::BIG_WRITES
            | init::DO_READDIRPLUS
            | init::READDIRPLUS_AUTO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES;
        if !self.config.joined {
            wanted |= init::SUBMOUNTS;
        }
        wanted |= match self.config.cache {
            Cache::Auto => init::AUTO_INVAL_DATA,
            Cache::Always if self.config.writable => init::CACHE_SYMLINKS | init::WRITEBACK_CACHE,
            Cache::Always => init::CACHE_SYMLINKS,
            Cache::None => 0,
        };
        let flags = wanted & offered;
        self.writeback = flags & init::WRITEBACK_CACHE != 0;
        self.submounts = flags & init::SUBMOUNTS != 0;
        answer.init(minor, readahead, flags, MAX_WRITE);
    }

    /// Handles requests on a hidden directory: it exists and is empty.
    fn hidden(&mut self, node: u64, request: Request<'_>, answer: &mut Answer) -> Done {
        match request {
            Request::GetAttr { .. } => {
                let attributes = self.attributes(node, None)?;
                answer.attr(&attributes, self.valid());
            }
            Request::OpenDir => {
                let fh = self.keep(Handle::Nothing)?;
                answer.opened(fh, 0);
            }
            Request::ReadDir { .. } | Request::FSyncDir { .. } | Request::Flush { .. } => {}
            Request::Lookup { .. } => return Err(libc::ENOENT),
            _ => return Err(libc::EROFS),
        }
        Ok(None)
    }

    /// Looks up `name` in `directory` (node `parent`) and appends the entry.
    pub(super) fn enter(
        &mut self,
        directory: &OwnedFd,
        parent: u64,
        name: &CStr,
        answer: &mut Answer,
    ) -> Result<u64, i32> {
        let stat = nodes::look_at(directory, name).map_err(errno)?;
        let (kind, submount) = self.reached(&stat, parent)?;
        let node = self.nodes.found(Id::from(&stat), kind, parent, name).map_err(errno)?;
        let id = Id::from(&stat);
        let ino = self.ino(id.device, id.ino);
        answer.entry(node, &attributes(&stat, ino, kind, submount), self.valid());
        Ok(node)
    }

    /// The inode number that the guest sees for the file `ino` on `device`. If the guest sees
    /// several file systems as one, those other than the directory's own get their device's number
    /// in the upper 16 bits, so that no two files share a number. Collisions remain possible only
    /// for numbers of more than 48 bits, as overlayfs and some others have.
    pub(super) fn ino(&mut self, device: (u32, u32), ino: u64) -> u64 {
        if self.submounts {
            return ino;
        }
        let known = self.devices.iter().position(|known| *known == device);
        let nth = known.unwrap_or_else(|| {
            self.devices.push(device);
            self.devices.len() - 1
        });
        ino ^ ((nth as u64) << 48)
    }

    /// The kind of a file found in `parent`, and whether it is a mount point.
    fn reached(&mut self, stat: &Statx, parent: u64) -> Result<(Kind, bool), i32> {
        let crosses = Id::from(stat).device != self.nodes.id(parent).map_err(errno)?.device;
        if !crosses {
            return Ok((Kind::File, false));
        }
        let directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
        match self.nodes.mounts.is_shared(stat.stx_mnt_id) {
            true => Ok((Kind::File, directory && self.submounts)),
            false if directory => Ok((Kind::Hidden, false)),
            // A file mounted on another file, from a file system that is hidden.
            false => Err(libc::EACCES),
        }
    }

    fn attributes(&mut self, node: u64, fh: Option<u64>) -> Result<Attributes, i32> {
        let stat = match fh.and_then(|fh| self.handles.get(&fh)) {
            Some(Handle::File(file)) => nodes::look(file),
            _ => self.nodes.get(node).and_then(|descriptor| nodes::look(&descriptor)),
        };
        let kind = self.nodes.kind(node).map_err(errno)?;
        let stat = stat.map_err(errno)?;
        let id = Id::from(&stat);
        let ino = self.ino(id.device, id.ino);
        Ok(attributes(&stat, ino, kind, false))
    }

    /// Appends the current attributes of `node`.
    pub(super) fn attr(&mut self, node: u64, fh: Option<u64>, answer: &mut Answer) -> Result<(), i32> {
        let attributes = self.attributes(node, fh)?;
        answer.attr(&attributes, self.valid());
        Ok(())
    }

    /// How long the guest may cache answers.
    pub(super) fn valid(&self) -> Valid {
        match self.config.cache {
            // An open begins with a lookup, which brings fresh attributes.
            Cache::Auto => Valid { entry: 0, attributes: 1 },
            Cache::Always => Valid { entry: 3600, attributes: 3600 },
            Cache::None => Valid { entry: 0, attributes: 0 },
        }
    }

    /// Stores an open handle and returns its number.
    pub(super) fn keep(&mut self, handle: Handle) -> Result<u64, i32> {
        if self.handles.len() >= self.most_handles {
            return Err(libc::ENFILE);
        }
        let number = self.next_handle;
        self.next_handle += 1;
        self.handles.insert(number, handle);
        Ok(number)
    }

    /// The open file `fh`.
    pub(super) fn file(&self, fh: u64) -> Result<Rc<OwnedFd>, i32> {
        match self.handles.get(&fh) {
            Some(Handle::File(file)) => Ok(file.clone()),
            _ => Err(libc::EBADF),
        }
    }

    fn get_xattr(
        &mut self,
        node: u64,
        name: Option<&CStr>,
        size: u32,
        answer: &mut Answer,
    ) -> Result<(), i32> {
        let descriptor = self.nodes.get(node).map_err(errno)?;
        let path = path_of(&descriptor);
        if size == 0 {
            // The guest only asks for the length. rustix answers an empty buffer itself
            // and has separate calls for the length.
            let len = match name {
                Some(name) => fs::getxattr_query(&path, name),
                None => fs::listxattr_query(&path),
            };
            answer.u32s([len.map_err(errno)? as u32, 0]);
            return Ok(());
        }
        let mut value = vec![0; (size as usize).min(64 << 10)];
        let len = match name {
            Some(name) => fs::getxattr(&path, name, &mut value[..]),
            None => fs::listxattr(&path, &mut value[..]),
        };
        answer.raw(value.get(..len.map_err(errno)?).ok_or(libc::ERANGE)?);
        Ok(())
    }
}

/// A path to the file behind `descriptor`, for calls that do not take O_PATH descriptors. It does
/// not follow a symbolic link.
pub(super) fn path_of(descriptor: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).expect("no zero byte in it")
}

/// As [`path_of`], but relative to [`Server::proc`].
pub(super) fn name_of(descriptor: &OwnedFd) -> CString {
    CString::new(descriptor.as_raw_fd().to_string()).expect("no zero byte in it")
}

fn attributes(stat: &Statx, ino: u64, kind: Kind, submount: bool) -> Attributes {
    let time = |time: &fs::StatxTimestamp| (time.tv_sec.cast_unsigned(), time.tv_nsec);
    let shown = Attributes {
        ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: time(&stat.stx_atime),
        mtime: time(&stat.stx_mtime),
        ctime: time(&stat.stx_ctime),
        mode: stat.stx_mode.into(),
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        // Device numbers in the kernel's encoding (new_decode_dev).
        rdev: (stat.stx_rdev_minor & 0xff)
            | (stat.stx_rdev_major << 8)
            | ((stat.stx_rdev_minor & !0xff) << 12),
        blksize: stat.stx_blksize,
        submount,
    };
    match kind {
        Kind::File => shown,
        Kind::Hidden => {
            Attributes { mode: libc::S_IFDIR | 0o555, size: 0, blocks: 0, nlink: 2, uid: 0, gid: 0, ..shown }
        }
    }
}
