//! Unix sockets as a VMM needs them: private from the first moment, and never waited for.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

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
    #[error("socket {path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// sun_path with its terminating zero.
const MAX_PATH: usize = 107;

/// A listening, non-blocking socket of mode 0600 that takes its name with it when it goes.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Binds `path`. A socket that nobody listens on any more is replaced, a live one is refused.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let io_error = |source| SocketError::Io { path: path.into(), source };
        let address = address(path)?;
        if let Ok(metadata) = std::fs::symlink_metadata(path) {
            use std::os::unix::fs::FileTypeExt;
            if !metadata.file_type().is_socket() {
                return Err(SocketError::NotASocket(path.into()));
            }
            match connect(path) {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(io_error)?
                }
                // A full backlog is a sign of life too.
                Ok(_) => return Err(SocketError::InUse(path.into())),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(SocketError::InUse(path.into()));
                }
                Err(e) => return Err(io_error(e)),
            }
        }
        let socket = new_socket().map_err(io_error)?;
        let fd = socket.as_raw_fd();
        // The mode that fchmod sets on an unbound socket is the one that bind gives its file: there is no moment at
        // which somebody else could connect.
        // SAFETY: plain system calls on a descriptor that is ours and an address that outlives them.
        let bound = unsafe {
            libc::fchmod(fd, 0o600) == 0
                && libc::bind(fd, (&raw const address).cast(), size_of_val(&address) as u32) == 0
                && libc::listen(fd, 128) == 0
        };
        if !bound {
            return Err(io_error(io::Error::last_os_error()));
        }
        Ok(Listener { socket: socket.into(), path: path.into() })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, non-blocking; `WouldBlock` if there is none.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.socket.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // If it cannot be removed the next to bind it finds it stale.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The user at the other end of a connection.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: `peer` and `len` outlive the call, and `len` is the size of `peer`.
    let result = unsafe {
        let fd = stream.as_raw_fd();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut len)
    };
    if result == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// A non-blocking connection to whoever listens at `path`; `WouldBlock` if its backlog is full.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = address(path).map_err(io::Error::other)?;
    let socket = new_socket()?;
    // SAFETY: the address outlives the call.
    match unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32)
    } {
        0 => Ok(socket.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe {
        libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(path: &Path) -> Result<libc::sockaddr_un, SocketError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH {
        return Err(SocketError::TooLong { path: path.into(), len: bytes.len() });
    }
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; MAX_PATH + 1] };
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}
