//! The capabilities that each kind of thread keeps if root started the process. SECURITY.md has the
//! same table, and `tests/privileges` compares it with real machines. Other users start without
//! capabilities.

use rustix::thread::CapabilitySet;

use super::ThreadKind;

/// The capabilities that the process keeps until its threads have entered the sandbox: all that any
/// thread keeps.
pub const KEPT_BY_PROCESS: CapabilitySet = CapabilitySet::IPC_LOCK;

/// The capabilities of the guard, which removes sockets from any user's directories.
pub const KEPT_BY_GUARD: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// The capabilities that a thread of this kind keeps, out of those that it has.
pub fn kept_by(kind: ThreadKind) -> CapabilitySet {
    match kind {
        // For mlock2(2) of memory that arrives while the machine is created.
        ThreadKind::Migration | ThreadKind::Fetching | ThreadKind::Receiver => CapabilitySet::IPC_LOCK,
        // All that `Sandbox::process_beneath` has left it.
        ThreadKind::FileServer => CapabilitySet::all(),
        // Without CAP_FSETID the kernel clears the setuid and setgid bits of files that a guest
        // writes to.
        ThreadKind::Share => CapabilitySet::empty(),
        ThreadKind::Main | ThreadKind::Vcpu | ThreadKind::Disk | ThreadKind::Connection => {
            CapabilitySet::empty()
        }
    }
}
