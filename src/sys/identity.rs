//! The user, group and capabilities of this process.

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};

/// Switches to `uid` and `gid` for good, without supplementary groups. Call it before any thread is
/// started: the change affects only the calling thread.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // This must come first, while the process still has the privilege. No program that it later
    // runs as root then gets any capabilities.
    empty_bounding_set();
    let (user, group) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    thread::set_thread_groups(&[])?;
    // The group first: after the user has changed, this process may no longer change it.
    thread::set_thread_res_gid(group, group, group)?;
    Ok(thread::set_thread_res_uid(user, user, user)?)
}

/// Has root do something as `uid` and `gid`, without supplementary groups. Programs that it starts
/// stay this user. Call it before any thread is started: the change affects only the calling thread.
/// A process that is not root does it as it is.
///
/// # Errors
/// The kernel refuses. The process may have another user than before then, and is to end.
pub fn as_user<T>(uid: u32, gid: u32, act: impl FnOnce() -> T) -> io::Result<T> {
    if effective().0 != 0 {
        return Ok(act());
    }
    let (groups, own) = (rustix::process::getgroups()?, rustix::process::getgid());
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
    thread::set_thread_groups(&[])?;
    // The saved IDs stay root's, so that this can be undone here, and not by a program that is started:
    // execve(2) replaces them.
    thread::set_thread_res_gid(group, group, None)?;
    thread::set_thread_res_uid(user, user, None)?;
    let done = act();
    thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, None)?;
    thread::set_thread_res_gid(own, own, None)?;
    thread::set_thread_groups(&groups)?;
    Ok(done)
}

/// Removes all capabilities but `kept` from the calling thread and from the threads that it starts,
/// and empties its bounding set.
///
/// # Errors
/// The kernel's error.
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    let has = thread::capabilities(None)?;
    if has.effective.contains(CapabilitySet::SETPCAP) {
        empty_bounding_set();
    }
    let kept = has.permitted & kept;
    let keeps = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    if keeps != has {
        // This also clears the ambient set, which is never larger than the inheritable one.
        thread::set_capabilities(None, keeps)?;
    }
    Ok(())
}

/// If this thread may not change the bounding set, nothing is lost: `no_new_privs` has the same
/// effect.
fn empty_bounding_set() {
    limit_bounding_set(CapabilitySet::empty());
}

/// Reduces the bounding set to `kept`, as far as this thread may. Programs that are started from
/// here get no capabilities beyond it.
pub(crate) fn limit_bounding_set(kept: CapabilitySet) {
    // A kernel's capability numbers have no gaps. The call fails for the first number that the
    // kernel does not have.
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if !kept.contains(one) && thread::remove_capability_from_bounding_set(one).is_err() {
            break;
        }
    }
}

/// The user and group that this process acts as.
pub fn effective() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}
