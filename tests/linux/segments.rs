//! The largest segment that crosses an interface in each direction. A segment larger than a frame
//! shows that offloads are in use, however slow the host is.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A packet socket and its reader.
pub struct Segments {
    done: Arc<AtomicBool>,
    reader: JoinHandle<io::Result<[usize; 2]>>,
}

impl Segments {
    /// Starts with the next packet on `interface`.
    pub fn watch(interface: &str) -> io::Result<Self> {
        let index = std::fs::read_to_string(format!("/sys/class/net/{interface}/ifindex"))?;
        let index = index.trim().parse().map_err(io::Error::other)?;
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: socket takes no pointers, and the new descriptor has no other owner.
        let socket = unsafe {
            match libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol.into()) {
                -1 => return Err(io::Error::last_os_error()),
                fd => File::from_raw_fd(fd),
            }
        };
        // SAFETY: all zeroes are a valid socket address.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        (address.sll_family, address.sll_protocol) = (libc::AF_PACKET as u16, protocol);
        address.sll_ifindex = index;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the size is that of the address.
        if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let done = Arc::new(AtomicBool::new(false));
        let over = done.clone();
        let reader = std::thread::spawn(move || {
            let mut largest = [0; 2];
            while !over.load(Ordering::Relaxed) {
                let Some((len, outgoing)) = next(&socket)? else { continue };
                let largest = &mut largest[usize::from(outgoing)];
                *largest = len.max(*largest);
            }
            Ok(largest)
        });
        Ok(Self { done, reader })
    }

    /// The sizes in bytes with the Ethernet header: from the interface, and to it.
    pub fn largest(self) -> io::Result<[usize; 2]> {
        self.done.store(true, Ordering::Relaxed);
        self.reader.join().map_err(|_| io::Error::other("the reader panicked"))?
    }
}

/// The next packet's length, and whether this host has sent it. `None` if there is none for a
/// while.
fn next(socket: &File) -> io::Result<Option<(usize, bool)>> {
    let patience = Duration::from_millis(100).as_millis() as i32;
    let mut ready = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the count is that of the descriptors, one.
    if unsafe { libc::poll(&mut ready, 1, patience) } < 1 {
        return Ok(None);
    }
    // SAFETY: all zeroes are a valid socket address.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let (mut size, mut head) = (size_of::<libc::sockaddr_ll>() as libc::socklen_t, [0u8; 64]);
    // SAFETY: the sizes are those of the address and the buffer. With MSG_TRUNC the length is that
    // of the packet.
    let len = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            head.as_mut_ptr().cast(),
            head.len(),
            libc::MSG_TRUNC,
            (&raw mut from).cast(),
            &mut size,
        )
    };
    match usize::try_from(len) {
        Ok(len) => Ok(Some((len, from.sll_pkttype == libc::PACKET_OUTGOING))),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
