//! KVM's ioctls that kvm-ioctls lacks.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use kvm_ioctls::VmFd;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_val};

use numbers::*;

#[allow(
    missing_docs,
    reason = "the macros make functions that cannot be documented; include/uapi/linux/kvm.h does it"
)]
mod numbers {
    use kvm_bindings::KVMIO;
    use vmm_sys_util::ioctl_io_nr;

    ioctl_io_nr!(KVM_SET_NR_MMU_PAGES, KVMIO, 0x44);
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// A descriptor for the binary statistics of `of`, a VM or a vCPU (api.rst, 4.133). KVM has it
/// since Linux 5.14.
pub fn stats_fd(of: &impl AsRawFd) -> io::Result<File> {
    // SAFETY: the call has no argument and makes a new descriptor.
    let fd = unsafe { ioctl(of, KVM_GET_STATS_FD()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Sets how many shadow pages KVM may use for a VM before it recycles them (api.rst, 4.35).
pub fn set_mmu_pages(vm: &VmFd, pages: u64) -> io::Result<()> {
    // SAFETY: the argument is a number.
    match unsafe { ioctl_with_val(vm, KVM_SET_NR_MMU_PAGES(), pages) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
