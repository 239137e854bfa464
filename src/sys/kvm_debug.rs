//! Debug exits of KVM (KVM_EXIT_DEBUG): the exception that a debugged guest's vCPU has raised.

/// An exception that KVM has delivered to user space instead of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Met {
    /// Whether it is #BP. Otherwise it is #DB.
    pub planted: bool,
    /// The guest's instruction pointer. For #BP it is the breakpoint instruction itself.
    pub pc: u64,
    /// DR6, for #DB.
    pub dr6: u64,
}

/// The exception, if `exit` is a debug exit.
#[cfg(target_arch = "x86_64")]
pub fn met(exit: &kvm_ioctls::VcpuExit<'_>) -> Option<Met> {
    // The vector of #BP, in the Intel SDM vol. 3, table 6-1. #DB is the only other one.
    const BREAKPOINT: u32 = 3;
    let kvm_ioctls::VcpuExit::Debug(debug) = exit else { return None };
    Some(Met { planted: debug.exception == BREAKPOINT, pc: debug.pc, dr6: debug.dr6 })
}

/// The flag of KVM_SET_GUEST_DEBUG that injects such an exception into the guest after all.
#[cfg(target_arch = "x86_64")]
pub fn gives_back(planted: bool) -> u32 {
    if planted { kvm_bindings::KVM_GUESTDBG_INJECT_BP } else { kvm_bindings::KVM_GUESTDBG_INJECT_DB }
}

/// Always `None`: Arm guests cannot be debugged yet.
#[cfg(not(target_arch = "x86_64"))]
pub fn met(_: &kvm_ioctls::VcpuExit<'_>) -> Option<Met> {
    None
}

/// Always 0: Arm guests cannot be debugged yet.
#[cfg(not(target_arch = "x86_64"))]
pub fn gives_back(_: bool) -> u32 {
    0
}
