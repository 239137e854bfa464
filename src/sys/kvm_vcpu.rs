//! KVM's vCPU ioctls that kvm-ioctls lacks or leaves unsafe: SREGS2 (Linux 5.14), the TSC offset
//! (5.16) and XSAVE areas of any size (5.17).

use std::io;

use kvm_bindings::{
    KVM_CAP_XSAVE2, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_sregs2,
};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

/// `struct kvm_xsave` without its flexible array member.
type Xsave = [u32; XSAVE_MIN / 4];
/// The XSAVE size in bytes that every KVM supports.
pub const XSAVE_MIN: usize = 4096;
/// The maximum size in bytes. AMX's tiles make an XSAVE area about 11 KiB.
pub const XSAVE_MAX: usize = 1 << 16;

#[allow(missing_docs, reason = "the macros write public functions, which nobody outside sees")]
mod request {
    use super::*;
    ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, Xsave);
    ioctl_iow_nr!(KVM_SET_XSAVE, KVMIO, 0xa5, Xsave);
    ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
    ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
    ioctl_ior_nr!(KVM_GET_XSAVE2, KVMIO, 0xcf, Xsave);
    ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
    ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
}
use request::*;

fn done(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `KVM_GET_SREGS2`.
pub fn get_sregs2(vcpu: &VcpuFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel fills one kvm_sregs2.
    done(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// `KVM_SET_SREGS2`.
pub fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: the kernel reads one kvm_sregs2.
    done(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// The size of the XSAVE areas of a VM's vCPUs. The ioctls take no length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XsaveSize(usize);

impl XsaveSize {
    /// The size that KVM reports; [`XSAVE_MIN`] without `KVM_CAP_XSAVE2`.
    ///
    /// # Errors
    /// It is larger than [`XSAVE_MAX`].
    pub fn of(vm: &VmFd) -> io::Result<Self> {
        let size = usize::try_from(vm.check_extension_raw(KVM_CAP_XSAVE2.into())).unwrap_or(0).max(XSAVE_MIN);
        if size > XSAVE_MAX {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("XSAVE areas of {size} bytes")));
        }
        Ok(Self(size))
    }

    fn words(self) -> usize {
        self.0.div_ceil(4)
    }
}

/// Reads the XSAVE area, as 32-bit words.
pub fn get_xsave(vcpu: &VcpuFd, size: XsaveSize) -> io::Result<Vec<u32>> {
    let request = if size.0 > XSAVE_MIN { KVM_GET_XSAVE2() } else { KVM_GET_XSAVE() };
    let mut area = vec![0u32; XSAVE_MAX / 4];
    // SAFETY: KVM_GET_XSAVE writes 4096 bytes. KVM_GET_XSAVE2 writes as many as KVM_CAP_XSAVE2
    // reports for any VM of this process: the features that guests may use are fixed when the first
    // vCPU is created. XSAVE_MAX is larger (`XsaveSize::of`).
    done(unsafe { ioctl_with_mut_ptr(vcpu, request, area.as_mut_ptr()) })?;
    area.truncate(size.words());
    Ok(area)
}

/// `KVM_SET_XSAVE`, which reads as many bytes as this KVM's XSAVE area has. A shorter `area` is
/// padded with zeros. A longer one is refused if the excess is not zero.
pub fn set_xsave(vcpu: &VcpuFd, size: XsaveSize, area: &[u32]) -> io::Result<()> {
    if area.iter().skip(size.words()).any(|word| *word != 0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more extended state than this host has"));
    }
    let mut padded = area.to_vec();
    padded.resize(XSAVE_MAX / 4, 0);
    // SAFETY: the kernel reads as much as it writes in `get_xsave`, and the buffer has the same
    // size.
    done(unsafe { ioctl_with_ptr(vcpu, KVM_SET_XSAVE(), padded.as_ptr()) })
}

/// The offset that KVM adds to the host's TSC for the guest: `KVM_VCPU_TSC_OFFSET`.
pub fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0u64;
    let attr = offset_attr(&raw mut offset);
    // SAFETY: the kernel reads the structure and writes 8 bytes to the address in it.
    done(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attr) })?;
    Ok(offset)
}

/// Sets the TSC offset.
pub fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> io::Result<()> {
    let attr = offset_attr(&raw mut offset);
    // SAFETY: the kernel reads the structure and 8 bytes at the address in it.
    done(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attr) })
}

fn offset_attr(offset: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: offset as u64,
        ..Default::default()
    }
}
