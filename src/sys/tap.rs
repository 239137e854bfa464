//! Tap devices: Linux's Documentation/networking/tuntap.rst and linux/if_tun.h.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

// The requests are ints in musl's headers and longs in glibc's.
const TUNSETIFF: u64 = libc::TUNSETIFF as u32 as u64;
const TUNSETVNETHDRSZ: u64 = libc::TUNSETVNETHDRSZ as u32 as u64;
const TUNSETOFFLOAD: u64 = libc::TUNSETOFFLOAD as u32 as u64;

/// TUN_F_*: the reader of the tap computes missing checksums itself.
pub const CSUM: u32 = 0x01;
/// The reader segments TCP over IPv4 itself.
pub const TSO4: u32 = 0x02;
/// The reader segments TCP over IPv6 itself.
pub const TSO6: u32 = 0x04;
/// The reader segments TCP with ECN itself.
pub const TSO_ECN: u32 = 0x08;
/// The reader fragments UDP itself.
pub const UFO: u32 = 0x10;

/// Why a tap cannot be used. Each error says what would help.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// There is no such interface.
    #[error(
        "tap `{name}` is not there: `ip tuntap add {name} mode tap && ip link set {name} up`, or add `create`"
    )]
    Missing {
        /// The interface's name.
        name: String,
    },
    /// The name is not valid for an interface.
    #[error("`{name}` is no interface name: it has 1 to 15 bytes without `/` and blanks")]
    Name {
        /// The name as given.
        name: String,
    },
    /// /dev/net/tun cannot be opened.
    #[error(
        "/dev/net/tun: {0}; `modprobe tun`, and in a container pass the device in (--device /dev/net/tun)"
    )]
    Device(io::Error),
    /// The kernel refuses a request.
    #[error("tap `{name}`: {what}: {source}{}", hint(source))]
    Refused {
        /// The interface's name.
        name: String,
        /// The request.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            "; it belongs to another user (`ip tuntap add … user NAME`), and making one needs CAP_NET_ADMIN"
        }
        Some(libc::EBUSY) => "; another program has it open",
        Some(libc::EINVAL) => "; it is not a tap, or one with several queues",
        _ => "",
    }
}

/// An open tap device, nonblocking. Every packet has a virtio-net header.
pub struct Tap {
    name: String,
    file: File,
}

impl Tap {
    /// Attaches to an existing interface. With `create`, creates one that is missing.
    pub fn open(name: &str, create: bool) -> Result<Self, TapError> {
        let sound = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
        if name.is_empty()
            || name.len() >= libc::IFNAMSIZ
            || !name.bytes().all(sound)
            || name.starts_with('.')
        {
            return Err(TapError::Name { name: name.into() });
        }
        // TUNSETIFF would create a missing interface, so a typo would silently become a new
        // network.
        if !create && !Path::new("/sys/class/net").join(name).exists() {
            return Err(TapError::Missing { name: name.into() });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
        let tap = Tap { name: name.into(), file: options.open("/dev/net/tun").map_err(TapError::Device)? };
        let mut request = tap.request();
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        // SAFETY: TUNSETIFF reads and writes one struct ifreq.
        tap.check("TUNSETIFF", unsafe { ioctl_with_mut_ref(&tap.file, TUNSETIFF, &mut request) })?;
        Ok(tap)
    }

    /// A tap that another process has opened and configured.
    pub fn from_fd(name: &str, fd: OwnedFd) -> Self {
        Tap { name: name.into(), file: fd.into() }
    }

    /// Another descriptor of the tap.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// Sets the length in bytes of the header before each packet.
    pub fn set_header_size(&self, bytes: i32) -> Result<(), TapError> {
        // SAFETY: TUNSETVNETHDRSZ reads one int.
        self.check("TUNSETVNETHDRSZ", unsafe { ioctl_with_ref(&self.file, TUNSETVNETHDRSZ, &bytes) })
    }

    /// Sends one packet, with its header.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        (&self.file).write_all(packet)
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the offloads (TUN_F_*) that this side finishes itself.
    pub fn set_offloads(&self, offloads: u32) -> Result<(), TapError> {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        self.check("TUNSETOFFLOAD", unsafe { ioctl_with_val(&self.file, TUNSETOFFLOAD, offloads.into()) })
    }

    /// Sets the interface's address, if given, and brings the interface up.
    pub fn bring_up(&self, address: Option<(Ipv4Addr, u8)>) -> Result<(), TapError> {
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let refused = |source| TapError::Refused { name: self.name.clone(), what: "socket", source };
        let socket = socket.map_err(|error| refused(error.into()))?;
        let mut request = self.request();
        if let Some((address, prefix)) = address {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            for (what, number, value) in [
                ("SIOCSIFADDR", libc::SIOCSIFADDR, address),
                ("SIOCSIFNETMASK", libc::SIOCSIFNETMASK, Ipv4Addr::from_bits(mask)),
            ] {
                request.ifr_ifru.ifru_addr = socket_address(value);
                // SAFETY: both read one struct ifreq.
                self.check(what, unsafe { ioctl_with_ref(&socket, number, &request) })?;
            }
        }
        // The kernel takes the flags as a whole: those of the interface stay, such as
        // IFF_MULTICAST. SAFETY: SIOCGIFFLAGS fills one struct ifreq.
        self.check("SIOCGIFFLAGS", unsafe { ioctl_with_mut_ref(&socket, libc::SIOCGIFFLAGS, &mut request) })?;
        // SAFETY: the kernel has just written this field of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        // SAFETY: SIOCSIFFLAGS reads one struct ifreq.
        self.check("SIOCSIFFLAGS", unsafe { ioctl_with_ref(&socket, libc::SIOCSIFFLAGS, &request) })
    }

    fn request(&self) -> libc::ifreq {
        // SAFETY: all zeros is a valid struct ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        request
    }

    fn check(&self, what: &'static str, result: i32) -> Result<(), TapError> {
        match result {
            0.. => Ok(()),
            _ => Err(TapError::Refused { name: self.name.clone(), what, source: io::Error::last_os_error() }),
        }
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// A struct sockaddr_in, in the form that the interface ioctls take.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as u16, sa_data: data }
}
