//! The capabilities that each kind of thread keeps, where root started the process. SECURITY.md has them as a table, and
//! `tests/privileges` compares it with real machines. Other users have none from the start.

use rustix::thread::CapabilitySet;

use super::ThreadKind;

/// What the whole process keeps until its threads have entered: all that any of them keeps.
pub const KEPT_BY_PROCESS: CapabilitySet = CapabilitySet::IPC_LOCK;

/// What the guard keeps: it removes sockets from directories of any user.
pub const KEPT_BY_GUARD: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// What a thread of this kind keeps of the capabilities that it has.
pub fn kept_by(kind: ThreadKind) -> CapabilitySet {
    match kind {
        // mlock2(2) of memory that comes while the machine is made.
        ThreadKind::Migration | ThreadKind::Fetching | ThreadKind::Receiver => CapabilitySet::IPC_LOCK,
        // What it has been left with by `Sandbox::process_beneath`.
        ThreadKind::FileServer => CapabilitySet::all(),
        // Without CAP_FSETID the kernel clears setuid and setgid bits of what a guest writes to.
        ThreadKind::Share => CapabilitySet::empty(),
        ThreadKind::Main | ThreadKind::Vcpu | ThreadKind::Disk | ThreadKind::Connection => {
            CapabilitySet::empty()
        }
    }
}
