//! The attributes of KVM's devices, of 32 and 64 bits (api.rst, 4.80). kvm-ioctls only takes the
//! address of the value.

use kvm_bindings::{KVM_CREATE_DEVICE_TEST, kvm_create_device, kvm_device_attr, kvm_device_type};
use kvm_ioctls::{DeviceFd, Error, VmFd};

/// Whether KVM has devices of this type. None is created.
pub fn exists(vm: &VmFd, type_: kvm_device_type) -> bool {
    let mut request = kvm_create_device { type_, fd: 0, flags: KVM_CREATE_DEVICE_TEST };
    // KVM returns no descriptor for a test. Dropping the result would close descriptor 0, which
    // belongs to something else.
    vm.create_device(&mut request).map(std::mem::forget).is_ok()
}

/// The width of an attribute's value, 32 or 64 bits, as documented for its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    Word,
    /// 64 bits.
    Double,
}

/// Reads attribute `attr` of `group`.
///
/// # Errors
/// KVM refuses.
pub fn get(device: &DeviceFd, group: u32, attr: u64, width: Width) -> Result<u64, Error> {
    // Wide enough for both widths. Arm's KVM is little-endian, so a 32-bit value is the lower half.
    let mut value = 0u64;
    let mut request = kvm_device_attr { group, attr, addr: &raw mut value as u64, flags: 0 };
    // SAFETY: KVM writes at most 64 bits to the address, which is that of a 64-bit local.
    unsafe { device.get_device_attr(&mut request) }?;
    Ok(if width == Width::Word { value & u64::from(u32::MAX) } else { value })
}

/// Writes attribute `attr` of `group`.
///
/// # Errors
/// KVM refuses.
pub fn set(device: &DeviceFd, group: u32, attr: u64, value: u64) -> Result<(), Error> {
    device.set_device_attr(&kvm_device_attr { group, attr, addr: &raw const value as u64, flags: 0 })
}

/// Performs the operation `attr` of `group`, which has no value.
///
/// # Errors
/// KVM refuses.
pub fn tell(device: &DeviceFd, group: u32, attr: u64) -> Result<(), Error> {
    device.set_device_attr(&kvm_device_attr { group, attr, addr: 0, flags: 0 })
}
