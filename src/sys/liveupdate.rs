//! The Live Update Orchestrator (include/uapi/linux/liveupdate.h): open files that a kernel hands to
//! the one that it starts by kexec.
//!
//! Only one process can have `/dev/liveupdate` open, and may close it. A session lives as long as
//! its descriptor: closing it before the kexec gives up what is preserved, and closing a retrieved
//! one frees what was not retrieved.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use vmm_sys_util::ioctl::ioctl_with_mut_ref;

/// The orchestrator's device.
pub const DEVICE: &str = "/dev/liveupdate";

/// The longest name of a session in bytes.
pub const MAX_NAME: usize = NAME_BYTES - 1;

/// LIVEUPDATE_SESSION_NAME_LENGTH, with the terminating zero.
const NAME_BYTES: usize = 64;

/// `_IO(0xBA, number)`. The requests do not contain the size of their argument: that is its first
/// field.
const fn request(number: u64) -> u64 {
    0xba << 8 | number
}

const CREATE_SESSION: u64 = request(0x00);
const RETRIEVE_SESSION: u64 = request(0x01);
const PRESERVE_FD: u64 = request(0x40);
const RETRIEVE_FD: u64 = request(0x41);
const FINISH: u64 = request(0x42);

/// The argument of CREATE_SESSION and RETRIEVE_SESSION.
#[repr(C)]
struct Named {
    size: u32,
    fd: i32,
    name: [u8; NAME_BYTES],
}

/// The argument of PRESERVE_FD and RETRIEVE_FD.
#[repr(C)]
struct Token {
    size: u32,
    fd: i32,
    token: u64,
}

/// The argument of FINISH.
#[repr(C)]
struct Finish {
    size: u32,
    reserved: u32,
}

/// The open device.
#[derive(Debug)]
pub struct Orchestrator(File);

/// A session.
#[derive(Debug)]
pub struct Session(OwnedFd);

impl Orchestrator {
    /// Opens the device.
    ///
    /// # Errors
    /// As open(2): ENOENT without CONFIG_LIVEUPDATE or `liveupdate=on`, and EBUSY while another process
    /// has it open.
    pub fn open() -> io::Result<Self> {
        Ok(Self(OpenOptions::new().read(true).write(true).open(DEVICE)?))
    }

    /// A new session.
    ///
    /// # Errors
    /// EEXIST if there is a session of this name, EINVAL if the name is empty or too long.
    pub fn create(&self, name: &str) -> io::Result<Session> {
        self.session(CREATE_SESSION, name)
    }

    /// The session of this name that the kernel before this one has handed over.
    ///
    /// # Errors
    /// ENOENT if there is none, EINVAL if it was retrieved already.
    pub fn retrieve(&self, name: &str) -> io::Result<Session> {
        self.session(RETRIEVE_SESSION, name)
    }

    fn session(&self, request: u64, name: &str) -> io::Result<Session> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut argument = Named { size: size_of::<Named>() as u32, fd: -1, name: [0; NAME_BYTES] };
        argument.name[..name.len()].copy_from_slice(name.as_bytes());
        call(&self.0, request, &mut argument)?;
        Ok(Session(new(argument.fd)?))
    }
}

impl Session {
    /// Preserves the file of a descriptor under a token, which no other file of the session has. A
    /// memfd gets pages for its holes, and its size can no longer change.
    ///
    /// # Errors
    /// ENOENT for a kind of file that cannot be preserved, EEXIST for a token that the session has, EBUSY
    /// for a file that a session has, ENOMEM.
    pub fn preserve(&self, of: &impl AsFd, token: u64) -> io::Result<()> {
        let fd = of.as_fd().as_raw_fd();
        call(&self.0, PRESERVE_FD, &mut Token { size: size_of::<Token>() as u32, fd, token })
    }

    /// The file with this token. A failed attempt is not repeated by the kernel: it fails again.
    ///
    /// # Errors
    /// ENOENT if there is none.
    pub fn retrieved(&self, token: u64) -> io::Result<File> {
        let mut argument = Token { size: size_of::<Token>() as u32, fd: -1, token };
        call(&self.0, RETRIEVE_FD, &mut argument)?;
        Ok(new(argument.fd)?.into())
    }

    /// Ends a retrieved session: what was not retrieved is freed.
    ///
    /// # Errors
    /// The session was not retrieved.
    pub fn finish(&self) -> io::Result<()> {
        call(&self.0, FINISH, &mut Finish { size: size_of::<Finish>() as u32, reserved: 0 })
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn call<T>(on: &impl AsRawFd, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: the argument has the layout that the header gives for this request, and its first field
    // tells the kernel its size. The kernel writes to nothing else.
    match unsafe { ioctl_with_mut_ref(on, request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor that the kernel has just made. It closes on exec.
fn new(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::other("the kernel returned no descriptor"));
    }
    // SAFETY: the kernel has just made the descriptor for this process, and nobody else has it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that the header's structures have. The kernel compares the first field with its own.
    #[test]
    fn arguments_have_the_sizes_of_the_header() {
        assert_eq!([size_of::<Named>(), size_of::<Token>(), size_of::<Finish>()], [72, 16, 8]);
        assert_eq!([CREATE_SESSION, PRESERVE_FD, FINISH], [0xba00, 0xba40, 0xba42]);
    }
}
