//! Unix sockets as a VMM needs them: private from the first moment, never waited for, and a way for open descriptors.

use std::ffi::{CStr, CString, NulError};
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

/// Why a socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody listens there.
    #[error("socket {0} is in use: another process listens there")]
    InUse(PathBuf),
    /// Something else has that name.
    #[error("{0} is there and is no socket")]
    NotASocket(PathBuf),
    /// It is longer than the kernel allows.
    #[error("socket path {path} has {len} bytes, {MAX_PATH} at most are possible")]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// Whatever else the kernel says.
    #[error("socket {path}: {source}; name a path in a directory where this user may write")]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// What a path may have, so that [`Name::remove_stale`] can add to it: sun_path has 108 bytes with its terminating zero.
const MAX_PATH: usize = 107 - ASIDE;
/// A point and a process's number in hexadecimal, of which Linux has 22 bits.
const ASIDE: usize = 7;

/// What a client is told for whom there is no descriptor.
pub const NO_DESCRIPTOR: &str = "the machine has no descriptor left (ulimit -n)";

/// A listening, non-blocking socket of mode 0600 that takes its name with it when it goes.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Given up for a moment where there are no other descriptors left, so that a client can be turned away. One that were left
    /// waiting would wake the event loop again and again.
    spare: Mutex<Option<OwnedFd>>,
    /// Another process listens there, too: the name is the last one's, and its guard's.
    shared: AtomicBool,
}

impl Listener {
    /// One that another process listens at.
    ///
    /// # Errors
    /// Where it is no listening unix socket, or there is no descriptor left.
    pub fn handed_over(socket: OwnedFd, path: &Path) -> io::Result<Self> {
        let socket = UnixListener::from(socket);
        socket.local_addr()?;
        let spare = Mutex::new(Some(socket.try_clone()?.into()));
        Ok(Self { socket, path: path.into(), spare, shared: AtomicBool::new(true) })
    }

    /// Another descriptor of it, for a process that is to listen there.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        self.shared.store(true, Ordering::Relaxed);
        Ok(self.socket.try_clone()?.into())
    }

    /// Binds `path`. A socket that nobody listens on any more is replaced, a live one is refused.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let io_error = |source| SocketError::Io { path: path.into(), source };
        let name = Name::new(path)?;
        if let Ok(metadata) = std::fs::symlink_metadata(path) {
            use std::os::unix::fs::FileTypeExt;
            if !metadata.file_type().is_socket() {
                return Err(SocketError::NotASocket(path.into()));
            }
            if !name.remove_stale().map_err(io_error)? {
                return Err(SocketError::InUse(path.into()));
            }
        }
        let socket = new_socket(SocketFlags::NONBLOCK).map_err(io_error)?;
        name.listen(&socket).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::AlreadyExists => SocketError::InUse(path.into()),
            _ => io_error(error),
        })?;
        let spare = Mutex::new(Some(socket.try_clone().map_err(io_error)?));
        Ok(Listener { socket: socket.into(), path: path.into(), spare, shared: AtomicBool::new(false) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, non-blocking; `WouldBlock` if there is none. Where this process may open no more descriptors, a
    /// client is turned away.
    pub fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let full = match self.socket.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(stream);
                }
                Err(error) => error,
            };
            let mut kept = self.spare.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let no_more = matches!(full.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
            if !no_more || kept.take().is_none() {
                return Err(full);
            }
            let waiting = self.socket.accept();
            if let Ok((stream, _)) = &waiting {
                // A client that does not read it is told nothing.
                let line = format!("{{\"id\":0,\"error\":\"{NO_DESCRIPTOR}\"}}\n");
                let _ = (&*stream).write_all(line.as_bytes());
                tracing::warn!("{}: a client was turned away: {full}", self.path.display());
            }
            let waiting = waiting.map(drop);
            *kept = self.socket.as_fd().try_clone_to_owned().ok();
            // Without a descriptor to give, the kernel does not say whether somebody waits: now it has.
            waiting?;
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A sandbox forbids it and leaves it to the guard.
        if !self.shared.load(Ordering::Relaxed) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Connects to `path`; later reads and writes, and the connection itself, take no longer than `patience` each.
///
/// # Errors
/// `WouldBlock` where nobody takes the connection in time, and what else connect(2) says.
pub fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let name = Name::new(path).map_err(io::Error::other)?;
    let stream = UnixStream::from(new_socket(SocketFlags::empty())?);
    // The kernel counts the time to write for the time to connect, too.
    stream.set_write_timeout(Some(patience))?;
    stream.set_read_timeout(Some(patience))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(name.path.as_c_str())?)?;
    Ok(stream)
}

/// Makes a connected stream socket fit for bulk data: large buffers, and, where it is TCP, no delay of what is small and an end of
/// a peer that has been silent for `liveness`.
///
/// # Errors
/// Where it is no stream socket.
pub fn prepare_stream(socket: &OwnedFd, liveness: Duration) -> io::Result<()> {
    if sockopt::socket_type(socket)? != SocketType::STREAM {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no stream socket"));
    }
    // In milliseconds, of which the kernel takes no more than an int holds.
    let timeout = liveness.as_millis().min(i32::MAX as u128) as u32;
    // What is refused costs speed alone, and a unix socket refuses what is TCP's.
    let _ = sockopt::set_socket_send_buffer_size(socket, STREAM_BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(socket, STREAM_BUFFER);
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_nodelay(socket, true);
    let _ = sockopt::set_tcp_user_timeout(socket, timeout);
    Ok(())
}

/// What a socket for bulk data may hold in each direction, in bytes: more than one frame of a migration.
const STREAM_BUFFER: usize = 1 << 20;

/// Sends what the socket takes at once of `bytes`, and says how much that was.
///
/// # Errors
/// `WouldBlock` where it takes nothing now, and what else send(2) says.
pub fn send_some(socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Reads what has come into `buffer`, and says how much that was; 0 where the peer has closed.
///
/// # Errors
/// `WouldBlock` where nothing has come, and what else recv(2) says.
pub fn receive_some(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT)?.0)
}

/// Reads what has come into `buffer` without taking it, and says how much that was; 0 where the peer has closed.
///
/// # Errors
/// `WouldBlock` where nothing has come, and what else recv(2) says.
pub fn peek(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT | RecvFlags::PEEK)?.0)
}

/// The user at the other end of a connection.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    peer(stream).map(|peer| peer.uid)
}

/// The process at the other end of a connection, or the one that listened there.
pub fn peer_pid(stream: &UnixStream) -> io::Result<i32> {
    peer(stream).map(|peer| peer.pid)
}

/// By libc: rustix's `UCred` can hold no process of 0, which the kernel says of one in a namespace that this process does not see.
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: `peer` and `len` outlive the call, and `len` is the size of `peer`.
    let result = unsafe {
        let fd = stream.as_raw_fd();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut len)
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

/// The name of a socket in the file system. Nothing here allocates but [`Name::new`], so that all the rest may be done after
/// a fork.
pub struct Name {
    path: CString,
    /// Where the socket is moved to before it is looked at for the last time.
    aside: CString,
}

impl Name {
    /// The name `path`, of whatever is there or is to be.
    pub fn new(path: &Path) -> Result<Self, SocketError> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() > MAX_PATH {
            return Err(SocketError::TooLong { path: path.into(), len: bytes.len() });
        }
        let zero = |error: NulError| SocketError::Io { path: path.into(), source: error.into() };
        let aside = format!(".{:x}", std::process::id());
        Ok(Self {
            path: CString::new(bytes).map_err(zero)?,
            aside: CString::new([bytes, aside.as_bytes()].concat()).map_err(zero)?,
        })
    }

    /// Has `socket` listen there, if there is nothing. From the first moment at which something is: between bind(2) and listen(2) it
    /// would be taken for a socket that nobody listens at any more. So it is bound aside, and gets its name when it listens.
    fn listen(&self, socket: &OwnedFd) -> io::Result<()> {
        let aside = self.aside.as_c_str();
        // What a process of this number has left when it was killed.
        if matches!(is_stale(aside), Ok(true)) {
            let _ = rustix::fs::unlink(aside);
        }
        // The mode that fchmod sets on an unbound socket is the one that bind gives its file: there is no moment at
        // which somebody else could connect.
        rustix::fs::fchmod(socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(socket, &SocketAddrUnix::new(aside)?)?;
        // A link takes nobody's place.
        let named =
            rustix::net::listen(socket, 128).and_then(|()| rustix::fs::link(aside, self.path.as_c_str()));
        let _ = rustix::fs::unlink(aside);
        Ok(named?)
    }

    /// Removes it if it is a socket and nobody listens there; false if somebody does, or if it is no socket.
    ///
    /// Between a look and an unlink somebody else could have put a socket of his own there. So the name is moved away
    /// first, which only one can do, looked at again, and put back if it was not what it seemed.
    pub fn remove_stale(&self) -> io::Result<bool> {
        let (path, aside) = (self.path.as_c_str(), self.aside.as_c_str());
        if !is_stale(path)? {
            return Ok(false);
        }
        match rustix::fs::rename(path, aside) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        let stale = is_stale(aside);
        if !matches!(stale, Ok(true)) {
            // This fails if there is yet another socket by now.
            let _ = rustix::fs::link(aside, path);
        }
        let _ = rustix::fs::unlink(aside);
        stale
    }
}

/// Whether nobody needs what is at `path`: a socket on which nobody listens, or nothing. A connection to a file of another kind is
/// refused, as one to such a socket is.
fn is_stale(path: &CStr) -> io::Result<bool> {
    match rustix::fs::lstat(path) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode).is_socket() && !is_live(path)?),
        Err(Errno::NOENT) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Whether somebody listens at `path`; false too where nothing is.
fn is_live(path: &CStr) -> io::Result<bool> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    match rustix::net::connect(socket, &SocketAddrUnix::new(path)?) {
        // A full backlog is a sign of life.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The most descriptors that one message may bring; even, because the kernel pads what it writes to 8 bytes.
pub const MAX_DESCRIPTORS: usize = 18;

/// What the kernel writes where a message brings [`MAX_DESCRIPTORS`]: a header of 16 bytes, then four for each. It is aligned as that
/// header is, so that there is room for no more of them.
#[repr(align(8))]
struct Ancillary([MaybeUninit<u8>; 16 + 4 * MAX_DESCRIPTORS]);

/// Reads what has come, with the descriptors that came with it, all close-on-exec; 0 bytes at the end of the stream.
///
/// # Errors
/// Besides the kernel's, `InvalidData` where a message brings more than [`MAX_DESCRIPTORS`]; those beyond are closed.
pub fn receive(stream: &impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = Ancillary([MaybeUninit::uninit(); _]);
    let mut ancillary = RecvAncillaryBuffer::new(&mut space.0);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let came = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if came.flags.contains(ReturnFlags::CTRUNC) {
        let error = format!("a message brings more than {MAX_DESCRIPTORS} descriptors");
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(came.bytes)
}

/// Sends `bytes` whole, with descriptors that arrive with the first of them; blocks where the stream does.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if descriptors.is_empty() {
        return io::Write::write_all(&mut &*stream, bytes);
    }
    let sent = send_with(stream, bytes, descriptors)?;
    // They went with the first byte.
    io::Write::write_all(&mut &*stream, &bytes[sent..])
}

/// Sends what the socket takes at once of `bytes`, with descriptors that arrive with the first of them: at a unix socket; others lose
/// them. How much that was.
///
/// # Errors
/// What sendmsg(2) says.
pub fn send_with(stream: &impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room for all");
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Two connected unix sockets that keep packets apart (SOCK_SEQPACKET).
///
/// # Errors
/// Where the host has no descriptors left.
pub fn packets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

fn new_socket(more: SocketFlags) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC | more, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_without_a_listener_is_stale() {
        let dir = std::env::temp_dir().join(format!("vellum-stale-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (path, file) = (dir.join("socket"), dir.join("file"));
        std::fs::write(&file, "somebody's").unwrap();
        assert!(!Name::new(&file).unwrap().remove_stale().unwrap());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let name = Name::new(&path).unwrap();
        assert!(!name.remove_stale().unwrap() && path.exists());
        drop(listener);
        assert!(name.remove_stale().unwrap() && !path.exists());
        assert!(name.remove_stale().unwrap(), "there is nothing any more");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
