//! Who this process acts as, and with which capabilities.

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};

/// Becomes `uid` and `gid` for good, in no other group. Before any thread is started: the change is the calling thread's.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // While it still may. No program that it runs as root again gets any of them.
    empty_bounding_set();
    let (user, group) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    thread::set_thread_groups(&[])?;
    // The group first: afterwards this process may no longer change it.
    thread::set_thread_res_gid(group, group, group)?;
    Ok(thread::set_thread_res_uid(user, user, user)?)
}

/// Takes all capabilities from the calling thread, and from those that it starts, but for those of `kept` that it has; and all from its
/// bounding set.
///
/// # Errors
/// What the kernel says.
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    let has = thread::capabilities(None)?;
    if has.effective.contains(CapabilitySet::SETPCAP) {
        empty_bounding_set();
    }
    let kept = has.permitted & kept;
    let keeps = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    if keeps != has {
        // With it the ambient set goes, which is no larger than the inheritable one.
        thread::set_capabilities(None, keeps)?;
    }
    Ok(())
}

/// Where this thread may not, it has nothing to lose by it: `no_new_privs` says the same.
fn empty_bounding_set() {
    limit_bounding_set(CapabilitySet::empty());
}

/// Leaves `kept` in the bounding set, beyond which no program that is started from here gets any, as far as this thread may.
pub(crate) fn limit_bounding_set(kept: CapabilitySet) {
    // A kernel has them without a gap, and says so of the first that it has not.
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
