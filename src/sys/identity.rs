//! Who this process acts as.

use std::io;

/// Becomes `uid` and `gid` for good, in no other group. Before any thread is started: not every C library carries the
/// change to threads that exist.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: an empty list may be null.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: both take numbers only. The group first: afterwards this process may no longer change it.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// The user and group that this process acts as.
pub fn effective() -> (u32, u32) {
    // SAFETY: both take nothing and cannot fail.
    unsafe { (libc::geteuid(), libc::getegid()) }
}
