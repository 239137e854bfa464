//! Debug exits of KVM (KVM_EXIT_DEBUG): what a vCPU whose guest is debugged has met.

/// An exception that KVM has given to user space and not to the guest.
#[derive(Clone, Copy, Debug)]
pub struct Met {
    /// Whether it is #BP; otherwise #DB.
    pub planted: bool,
    /// Where: of #BP the instruction itself.
    pub pc: u64,
    /// DR6, of #DB.
    pub dr6: u64,
}

/// What `exit` is, where it is a debug exit.
#[cfg(target_arch = "x86_64")]
pub fn met(exit: &kvm_ioctls::VcpuExit<'_>) -> Option<Met> {
    // The vector of #BP, in the Intel SDM vol. 3, table 6-1; #DB is the other one that there is.
    const BREAKPOINT: u32 = 3;
    let kvm_ioctls::VcpuExit::Debug(debug) = exit else { return None };
    Some(Met { planted: debug.exception == BREAKPOINT, pc: debug.pc, dr6: debug.dr6 })
}

/// The flag of KVM_SET_GUEST_DEBUG by which the guest has such an exception after all.
#[cfg(target_arch = "x86_64")]
pub fn gives_back(planted: bool) -> u32 {
    if planted { kvm_bindings::KVM_GUESTDBG_INJECT_BP } else { kvm_bindings::KVM_GUESTDBG_INJECT_DB }
}

/// None: on Arm nobody is debugged yet.
#[cfg(not(target_arch = "x86_64"))]
pub fn met(_: &kvm_ioctls::VcpuExit<'_>) -> Option<Met> {
    None
}

/// None.
#[cfg(not(target_arch = "x86_64"))]
pub fn gives_back(_: bool) -> u32 {
    0
}
