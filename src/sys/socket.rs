//! Unix sockets as a VMM needs them: private from the first moment, never waited for, and a way for open descriptors.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
        let socket = new_socket().map_err(io_error)?;
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
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: socket has just opened it, and nobody else owns it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    // The kernel counts the time to write for the time to connect, too.
    stream.set_write_timeout(Some(patience))?;
    stream.set_read_timeout(Some(patience))?;
    let address = name.address;
    // SAFETY: the address outlives the call.
    match unsafe { libc::connect(fd, (&raw const address).cast(), size_of_val(&address) as u32) } {
        0 => Ok(stream),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a connected stream socket fit for bulk data: large buffers, and, where it is TCP, no delay of what is small and an end of
/// a peer that has been silent for `liveness`.
///
/// # Errors
/// Where it is no stream socket.
pub fn prepare_stream(socket: &OwnedFd, liveness: Duration) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    let option = |level, name, value: libc::c_int| {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the value outlives the call, and `len` is its size.
        unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), len) }
    };
    let mut kind: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes.
    let known =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &mut len) };
    if known != 0 {
        return Err(io::Error::last_os_error());
    }
    if kind != libc::SOCK_STREAM {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no stream socket"));
    }
    // What is refused costs speed alone, and a unix socket refuses what is TCP's.
    option(libc::SOL_SOCKET, libc::SO_SNDBUF, STREAM_BUFFER);
    option(libc::SOL_SOCKET, libc::SO_RCVBUF, STREAM_BUFFER);
    option(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    option(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    let milliseconds = libc::c_int::try_from(liveness.as_millis()).unwrap_or(libc::c_int::MAX);
    option(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, milliseconds);
    Ok(())
}

/// What a socket for bulk data may hold in each direction, in bytes: more than one frame of a migration.
const STREAM_BUFFER: libc::c_int = 1 << 20;

/// Sends what the socket takes at once of `bytes`, and says how much that was.
///
/// # Errors
/// `WouldBlock` where it takes nothing now, and what else send(2) says.
pub fn send_some(socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads no more than `bytes` has.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Reads what has come into `buffer`, and says how much that was; 0 where the peer has closed.
///
/// # Errors
/// `WouldBlock` where nothing has come, and what else recv(2) says.
pub fn receive_some(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes no more than `buffer` has room for.
    let came = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    usize::try_from(came).map_err(|_| io::Error::last_os_error())
}

/// Reads what has come into `buffer` without taking it, and says how much that was; 0 where the peer has closed.
///
/// # Errors
/// `WouldBlock` where nothing has come, and what else recv(2) says.
pub fn peek(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the kernel writes no more than `buffer` has room for.
    let came = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    usize::try_from(came).map_err(|_| io::Error::last_os_error())
}

/// How many bytes have come (FIONREAD, unix(7)).
///
/// # Errors
/// Where it is no stream socket.
pub fn queued(socket: &OwnedFd) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD as _, &raw mut count) } {
        0 => Ok(count.max(0) as usize),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The next connection of a socket that listens, without waiting for one. It is non-blocking.
///
/// # Errors
/// What the kernel says: `WouldBlock` where there is none.
pub fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let none = std::ptr::null_mut();
    // SAFETY: the descriptor is open, no address is asked for, and the call makes a new descriptor.
    let fd = unsafe { libc::accept4(listener.as_raw_fd(), none, none.cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is new and ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ends a connection, whoever waits at it.
pub fn shut(socket: &OwnedFd, how: std::net::Shutdown) {
    let how = match how {
        std::net::Shutdown::Read => libc::SHUT_RD,
        std::net::Shutdown::Write => libc::SHUT_WR,
        std::net::Shutdown::Both => libc::SHUT_RDWR,
    };
    // SAFETY: takes numbers only. One that has ended already is left alone.
    unsafe { libc::shutdown(socket.as_raw_fd(), how) };
}

/// The user at the other end of a connection.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    peer(stream).map(|peer| peer.uid)
}

/// The process at the other end of a connection, or the one that listened there.
pub fn peer_pid(stream: &UnixStream) -> io::Result<i32> {
    peer(stream).map(|peer| peer.pid)
}

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
    address: libc::sockaddr_un,
    /// Where the socket is moved to before it is looked at for the last time.
    aside: libc::sockaddr_un,
}

impl Name {
    /// The name `path`, of whatever is there or is to be.
    pub fn new(path: &Path) -> Result<Self, SocketError> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() > MAX_PATH {
            return Err(SocketError::TooLong { path: path.into(), len: bytes.len() });
        }
        let aside = format!(".{:x}", std::process::id());
        Ok(Self { address: address(bytes), aside: address(&[bytes, aside.as_bytes()].concat()) })
    }

    /// Has `socket` listen there, if there is nothing. From the first moment at which something is: between bind(2) and listen(2) it
    /// would be taken for a socket that nobody listens at any more. So it is bound aside, and gets its name when it listens.
    fn listen(&self, socket: &OwnedFd) -> io::Result<()> {
        let (fd, aside) = (socket.as_raw_fd(), self.aside.sun_path.as_ptr());
        let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // What a process of this number has left when it was killed.
        if matches!(is_stale(&self.aside), Ok(true)) {
            // SAFETY: a string that ends within its array, as `address` made it, here and below.
            unsafe { libc::unlink(aside) };
        }
        // The mode that fchmod sets on an unbound socket is the one that bind gives its file: there is no moment at
        // which somebody else could connect.
        // SAFETY: plain system calls on a descriptor that is ours, and an address that outlives them.
        check(unsafe { libc::fchmod(fd, 0o600) })?;
        // SAFETY: as above.
        check(unsafe { libc::bind(fd, (&raw const self.aside).cast(), size_of_val(&self.aside) as u32) })?;
        // SAFETY: as above.
        let listens = check(unsafe { libc::listen(fd, 128) });
        // SAFETY: as above. A link takes nobody's place.
        let named =
            listens.and_then(|()| check(unsafe { libc::link(aside, self.address.sun_path.as_ptr()) }));
        // SAFETY: as above.
        unsafe { libc::unlink(aside) };
        named
    }

    /// Removes it if it is a socket and nobody listens there; false if somebody does, or if it is no socket.
    ///
    /// Between a look and an unlink somebody else could have put a socket of his own there. So the name is moved away
    /// first, which only one can do, looked at again, and put back if it was not what it seemed.
    pub fn remove_stale(&self) -> io::Result<bool> {
        if !is_stale(&self.address)? {
            return Ok(false);
        }
        let (path, aside) = (self.address.sun_path.as_ptr(), self.aside.sun_path.as_ptr());
        // SAFETY: both are strings that end within their arrays, as `address` made them, here and below.
        if unsafe { libc::rename(path, aside) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::NotFound { Ok(true) } else { Err(error) };
        }
        let stale = is_stale(&self.aside);
        // SAFETY: as above. The link fails if there is yet another socket by now.
        unsafe {
            if !matches!(stale, Ok(true)) {
                libc::link(aside, path);
            }
            libc::unlink(aside);
        }
        stale
    }
}

/// Whether nobody needs what is at `address`: a socket on which nobody listens, or nothing. A connection to a file of another kind is
/// refused, as one to such a socket is.
fn is_stale(address: &libc::sockaddr_un) -> io::Result<bool> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path is a string that ends within its array, as `address` made it; the call fills `stat`, which is read where it did.
    let mode = unsafe {
        match libc::lstat(address.sun_path.as_ptr(), stat.as_mut_ptr()) {
            0 => stat.assume_init().st_mode,
            _ => {
                let error = io::Error::last_os_error();
                return if error.kind() == io::ErrorKind::NotFound { Ok(true) } else { Err(error) };
            }
        }
    };
    Ok(mode & libc::S_IFMT == libc::S_IFSOCK && !is_live(address)?)
}

/// Whether somebody listens at `address`; false too where nothing is.
fn is_live(address: &libc::sockaddr_un) -> io::Result<bool> {
    match connect_to(address) {
        Ok(_) => Ok(true),
        // A full backlog is a sign of life.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => Ok(false),
        Err(e) => Err(e),
    }
}

fn connect_to(address: &libc::sockaddr_un) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    // SAFETY: the address outlives the call.
    match unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const *address).cast(), size_of_val(address) as u32)
    } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The most descriptors that one message may bring; even, because the kernel pads what it writes to 8 bytes.
pub const MAX_DESCRIPTORS: usize = 18;

/// Reads what has come, with the descriptors that came with it, all close-on-exec; 0 bytes at the end of the stream.
///
/// # Errors
/// Besides the kernel's, `InvalidData` where a message brings more than [`MAX_DESCRIPTORS`]; those beyond are closed.
pub fn receive(
    stream: &impl AsRawFd,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    // A header of 16 bytes, then four for each.
    let mut ancillary = [0u64; 2 + MAX_DESCRIPTORS / 2];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all zero is a valid msghdr without anything, whose pointers are set to what outlives the calls. The
    // kernel fills `ancillary` with whole messages and sets the length of what it wrote, within which the macros of
    // cmsg(3) stay; descriptors that arrive so are new, and nobody else's.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = ancillary.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&ancillary) as _;
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let count = libc::recvmsg(stream.as_raw_fd(), &mut message, flags);
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for index in 0..bytes / size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            let error = format!("a message brings more than {MAX_DESCRIPTORS} descriptors");
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(count as usize)
    }
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
pub fn send_with(stream: &impl AsRawFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    // A header of 16 bytes, then four for each, padded to 8.
    let mut ancillary = vec![0u64; 2 + descriptors.len().div_ceil(2)];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: as in `receive`; the message with that many descriptors fits into `ancillary`, and the kernel only reads.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = ancillary.as_mut_ptr().cast();
        let bytes = size_of_val(descriptors) as u32;
        message.msg_controllen = libc::CMSG_SPACE(bytes) as _;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes) as _;
        let data = libc::CMSG_DATA(header).cast::<RawFd>();
        for (index, descriptor) in descriptors.iter().enumerate() {
            data.add(index).write_unaligned(descriptor.as_raw_fd());
        }
        libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Two connected unix sockets that keep packets apart (SOCK_SEQPACKET).
///
/// # Errors
/// Where the host has no descriptors left.
pub fn packets() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    // SAFETY: the kernel fills both numbers.
    if unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr())
    } != 0
    {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptors are new, and nobody else's.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
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

/// `bytes`, which fit with a terminating zero, as an address.
fn address(bytes: &[u8]) -> libc::sockaddr_un {
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    for (to, from) in address.sun_path[..107].iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    address
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
