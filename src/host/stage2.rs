//! How Arm hosts differ: the exception level of the kernel, the width of a guest's addresses, and
//! the interrupt controllers that a guest can have.

use kvm_bindings::{
    KVM_CAP_ARM_VM_IPA_SIZE, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::Kvm;

use super::kvm;
use vellum_sys::kvm_device;

/// The host's properties.
pub struct Stage2 {
    /// Whether the kernel itself runs at EL2 (VHE) or only KVM's lower part does (nVHE); `None` if
    /// this is unknown.
    pub vhe: Option<bool>,
    /// The width of a guest-physical address in bits.
    pub bits: u32,
    /// The GIC versions that a guest can have.
    pub gics: Vec<&'static str>,
}

/// Reads the properties from KVM and from the host's timer interrupt.
///
/// # Errors
/// No VM can be created.
pub fn examine(of: &Kvm) -> Result<Stage2, kvm::Unusable> {
    let vm = kvm::create_vm(of)?;
    // A KVM without this capability has 40 bits.
    let bits = match of.check_extension_raw(KVM_CAP_ARM_VM_IPA_SIZE.into()) {
        ..=0 => 40,
        bits => bits as u32,
    };
    let versions = [
        ("GICv3", kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3),
        ("GICv2", kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2),
    ];
    let gics = versions
        .into_iter()
        .filter(|(_, type_)| kvm_device::exists(&vm, *type_))
        .map(|(name, _)| name)
        .collect();
    let interrupts = std::fs::read_to_string("/proc/interrupts").unwrap_or_default();
    Ok(Stage2 { vhe: vhe(&interrupts), bits, gics })
}

/// Derives the exception level from the kernel's list of interrupts. A kernel at EL2 uses the
/// hypervisor's timer, private interrupt 10, which is INTID 26. A kernel at EL1 uses another timer
/// (`arch_timer_select_ppi`, drivers/clocksource/arm_arch_timer.c).
fn vhe(interrupts: &str) -> Option<bool> {
    let line = interrupts.lines().find(|line| line.trim_end().ends_with("arch_timer"))?;
    let controller = line.split_whitespace().position(|word| word.starts_with("GIC"))?;
    let number: u32 = line.split_whitespace().nth(controller + 1)?.parse().ok()?;
    Some(number == 26)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_at_el2_is_told_by_its_timer() {
        let line =
            |number| format!("           CPU0\n 11:       1291     GICv3  {number} Level     arch_timer\n");
        assert_eq!((vhe(&line(26)), vhe(&line(27)), vhe("")), (Some(true), Some(false), None));
    }
}
