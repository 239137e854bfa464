//! Unix sockets for a VMM: they are private from the first moment, never block, and pass open
//! descriptors.

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

/// Why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error("socket {0} is in use: another process listens there")]
    InUse(PathBuf),
    /// The path is in use and is not a socket.
    #[error("{0} is there and is no socket")]
    NotASocket(PathBuf),
    /// The path is longer than the kernel allows.
    #[error("socket path {path} has {len} bytes, {MAX_PATH} at most are possible")]
    TooLong {
        /// The path.
        path: PathBuf,
        /// The path's length in bytes.
        len: usize,
    },
    /// Any other error of the kernel.
    #[error("socket {path}: {source}; name a path in a directory where this user may write")]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The maximum length of a path. [`Name::remove_stale`] adds a suffix to it, and sun_path has 108
/// bytes with its terminating zero.
const MAX_PATH: usize = 107 - ASIDE;
/// The length of the suffix: a dot and a process ID in hexadecimal. Linux process IDs have 22 bits.
const ASIDE: usize = 7;

/// The error for a client that gets no descriptor.
pub const NO_DESCRIPTOR: &str = "the machine has no descriptor left (ulimit -n)";

/// A listening, nonblocking socket of mode 0600 that removes its name when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Closed for a moment when no other descriptors are left, so that a client can be turned away.
    /// A client that is left waiting would wake the event loop again and again.
    spare: Mutex<Option<OwnedFd>>,
    /// Another process listens there too. That process and its guard then remove the name.
    shared: AtomicBool,
}

impl Listener {
    /// A socket that another process already listens on.
    ///
    /// # Errors
    /// It is not a listening unix socket, or no descriptor is left.
    pub fn handed_over(socket: OwnedFd, path: &Path) -> io::Result<Self> {
        let socket = UnixListener::from(socket);
        socket.local_addr()?;
        let spare = Mutex::new(Some(socket.try_clone()?.into()));
        Ok(Self { socket, path: path.into(), spare, shared: AtomicBool::new(true) })
    }

    /// Another descriptor of the socket, for a process that takes over listening.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        self.shared.store(true, Ordering::Relaxed);
        Ok(self.socket.try_clone()?.into())
    }

    /// Binds `path`. A socket without a listener is replaced. One with a listener is an error.
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

    /// The path that it listens on.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, nonblocking; `WouldBlock` if there is none. If this process may not
    /// open more descriptors, the client is turned away.
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
                // If the client does not read, it misses this error.
                let line = format!("{{\"id\":0,\"error\":\"{NO_DESCRIPTOR}\"}}\n");
                let _ = (&*stream).write_all(line.as_bytes());
                tracing::warn!("{}: a client was turned away: {full}", self.path.display());
            }
            let waiting = waiting.map(drop);
            *kept = self.socket.as_fd().try_clone_to_owned().ok();
            // Without a free descriptor, the kernel does not say whether a client waits. This
            // second accept does.
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
        // A sandbox forbids this. The guard then removes the name.
        if !self.shared.load(Ordering::Relaxed) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Connects to `path`. The connection itself and later reads and writes take no longer than
/// `patience` each.
///
/// # Errors
/// `WouldBlock` if the connection is not accepted in time, and other errors of connect(2).
pub fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let name = Name::new(path).map_err(io::Error::other)?;
    let stream = UnixStream::from(new_socket(SocketFlags::empty())?);
    // The kernel applies the write timeout to connect(2) too.
    stream.set_write_timeout(Some(patience))?;
    stream.set_read_timeout(Some(patience))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(name.path.as_c_str())?)?;
    Ok(stream)
}

/// Prepares a connected stream socket for bulk data with large buffers. A TCP socket also sends
/// small messages without delay and fails when its peer has been silent for `liveness`.
///
/// # Errors
/// It is not a stream socket.
pub fn prepare_stream(socket: &OwnedFd, liveness: Duration) -> io::Result<()> {
    if sockopt::socket_type(socket)? != SocketType::STREAM {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no stream socket"));
    }
    // A refusal only costs speed. A unix socket refuses the TCP options.
    let _ = sockopt::set_socket_send_buffer_size(socket, STREAM_BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(socket, STREAM_BUFFER);
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_nodelay(socket, true);
    set_liveness(socket, liveness);
    Ok(())
}

/// Sets how long a TCP socket's peer may be silent. A peer is asked for a sign of life several times
/// meanwhile. Nothing happens to other sockets.
pub fn set_liveness(socket: &OwnedFd, liveness: Duration) {
    // In milliseconds. The kernel's maximum is that of an int.
    let timeout = liveness.as_millis().min(i32::MAX as u128) as u32;
    // In whole seconds, at least one and at most 32767.
    let part = Duration::from_secs((liveness.as_secs() / 4).clamp(1, 32_767));
    let _ = sockopt::set_tcp_user_timeout(socket, timeout);
    let _ = sockopt::set_tcp_keepidle(socket, part);
    let _ = sockopt::set_tcp_keepintvl(socket, part);
}

/// The buffer size in bytes of a bulk data socket in each direction: larger than a frame of a
/// migration.
const STREAM_BUFFER: usize = 1 << 20;

/// Sends as much of `bytes` as the socket takes at once. Returns the number of bytes sent.
///
/// # Errors
/// `WouldBlock` if it takes nothing now, and other errors of send(2).
pub fn send_some(socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Reads what has arrived into `buffer`. Returns the number of bytes; 0 if the peer has closed.
///
/// # Errors
/// `WouldBlock` if nothing has arrived, and other errors of recv(2).
pub fn receive_some(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT)?.0)
}

/// Reads what has arrived into `buffer` but leaves it in the socket. Returns the number of bytes; 0
/// if the peer has closed.
///
/// # Errors
/// `WouldBlock` if nothing has arrived, and other errors of recv(2).
pub fn peek(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT | RecvFlags::PEEK)?.0)
}

/// The user at the other end of a connection.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    peer(stream).map(|peer| peer.uid)
}

/// The process at the other end of a connection, or the process that listened there.
pub fn peer_pid(stream: &UnixStream) -> io::Result<i32> {
    peer(stream).map(|peer| peer.pid)
}

/// Uses libc: rustix's `UCred` cannot hold process ID 0, which the kernel reports for a process
/// outside this process's PID namespace.
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

/// The name of a socket in the file system. Only [`Name::new`] allocates, so the other functions
/// may be called after a fork.
pub struct Name {
    path: CString,
    /// The path that the socket is moved to for the last check.
    aside: CString,
}

impl Name {
    /// The name `path`, whether or not something exists there.
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

    /// Makes `socket` listen at the name if it is free. A socket that is bound but not yet
    /// listening would be taken for stale. So it is bound to another path first, and gets its name
    /// once it listens.
    fn listen(&self, socket: &OwnedFd) -> io::Result<()> {
        let aside = self.aside.as_c_str();
        // A killed process with the same ID may have left this behind.
        if matches!(is_stale(aside), Ok(true)) {
            let _ = rustix::fs::unlink(aside);
        }
        // The mode that fchmod sets on an unbound socket becomes the mode of the file that bind
        // creates. So other users can never connect.
        rustix::fs::fchmod(socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(socket, &SocketAddrUnix::new(aside)?)?;
        // A link does not replace an existing name.
        let named =
            rustix::net::listen(socket, 128).and_then(|()| rustix::fs::link(aside, self.path.as_c_str()));
        let _ = rustix::fs::unlink(aside);
        Ok(named?)
    }

    /// Removes the name if it is a socket without a listener. Returns false if it has a listener or
    /// is not a socket.
    ///
    /// Between a check and an unlink another process could bind its own socket there. So the name
    /// is first moved away, which only one process can do. It is then checked again, and put back
    /// if it is not stale after all.
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
            // This fails if another socket has taken the name by now.
            let _ = rustix::fs::link(aside, path);
        }
        let _ = rustix::fs::unlink(aside);
        stale
    }
}

/// Whether `path` is free: a socket without a listener, or nothing. The file type is checked,
/// because connecting to a file of another kind is refused like connecting to a stale socket.
fn is_stale(path: &CStr) -> io::Result<bool> {
    match rustix::fs::lstat(path) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode).is_socket() && !is_live(path)?),
        Err(Errno::NOENT) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Whether a process listens at `path`. False if nothing is there.
fn is_live(path: &CStr) -> io::Result<bool> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    match rustix::net::connect(socket, &SocketAddrUnix::new(path)?) {
        // A full backlog means that there is a listener.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The maximum number of descriptors in one message. It is even, because the kernel pads what it
/// writes to 8 bytes.
pub const MAX_DESCRIPTORS: usize = 18;

/// The kernel's control message for [`MAX_DESCRIPTORS`] descriptors: a header of 16 bytes, then
/// four bytes each. It has the header's alignment, so there is no room for more.
#[repr(align(8))]
struct Ancillary([MaybeUninit<u8>; 16 + 4 * MAX_DESCRIPTORS]);

/// Reads what has arrived, with its descriptors, all close-on-exec. Returns 0 at the end of the
/// stream.
///
/// # Errors
/// The kernel's, and `InvalidData` if a message has more than [`MAX_DESCRIPTORS`]; the excess
/// descriptors are closed.
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

/// Sends all of `bytes`, with descriptors that arrive with the first byte. Blocks if the stream
/// does.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if descriptors.is_empty() {
        return io::Write::write_all(&mut &*stream, bytes);
    }
    let sent = send_with(stream, bytes, descriptors)?;
    // The descriptors went with the first byte.
    io::Write::write_all(&mut &*stream, &bytes[sent..])
}

/// Sends as much of `bytes` as the socket takes at once, with descriptors that arrive with the
/// first byte. Only unix sockets pass descriptors; others drop them. Returns the number of bytes
/// sent.
///
/// # Errors
/// The errors of sendmsg(2).
pub fn send_with(stream: &impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room for all");
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Two connected unix sockets that preserve message boundaries (SOCK_SEQPACKET).
///
/// # Errors
/// The host has no descriptors left.
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
