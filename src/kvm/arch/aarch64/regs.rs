//! The registers with which the first vCPU enters a kernel. The others wait for PSCI's CPU_ON, as
//! on hardware.

use kvm_bindings::{KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_SIZE_U64, kvm_regs, user_pt_regs};
use kvm_ioctls::VcpuFd;
use std::mem::offset_of;
use vm_memory::GuestMemoryBackend;

use super::boot::Entry;
use super::cpuid::{Setup, sysreg};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// PSTATE: EL1 with its own stack pointer; debug exceptions, SErrors, IRQs and FIQs masked.
pub const PSTATE_EL1H: u64 = 0x3c5;

/// Why the first vCPU's registers could not be set.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{0} of the first vCPU's boot state: {1}")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::HOST
    }
}

/// KVM's number of the core register at this offset in `struct kvm_regs` (api.rst, 4.68).
pub const fn core(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
}

/// General register `n`.
pub const fn x(n: usize) -> u64 {
    core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs) + 8 * n)
}

/// The program counter.
pub const PC: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc));
/// PSTATE.
pub const PSTATE: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pstate));
const SP: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, sp));
// System registers (Arm DDI 0487, D19.2).
/// Stage 1 control.
pub const SCTLR_EL1: u64 = sysreg(3, 0, 1, 0, 0);
/// The root of the lower half's page tables.
pub const TTBR0_EL1: u64 = sysreg(3, 0, 2, 0, 0);
/// The format of the page tables.
pub const TCR_EL1: u64 = sysreg(3, 0, 2, 0, 2);
/// The memory attributes of stage 1.
pub const MAIR_EL1: u64 = sysreg(3, 0, 10, 2, 0);
const ESR_EL1: u64 = sysreg(3, 0, 5, 2, 0);
const FAR_EL1: u64 = sysreg(3, 0, 6, 0, 0);
const VBAR_EL1: u64 = sysreg(3, 0, 12, 0, 0);
const ELR_EL1: u64 = core(offset_of!(kvm_regs, elr_el1));
const SP_EL1: u64 = core(offset_of!(kvm_regs, sp_el1));

/// Sets a 64-bit register.
///
/// # Errors
/// KVM refuses.
pub fn set(vcpu: &VcpuFd, register: u64, value: u64) -> Result<(), kvm_ioctls::Error> {
    vcpu.set_one_reg(register, &value.to_le_bytes()).map(drop)
}

/// Sets the initial state of a vCPU that boots a kernel, on its own thread. `entry` is for the vCPU
/// that enters the kernel (Documentation/arch/arm64/booting.rst): the device tree's address in x0,
/// the MMU off.
///
/// # Errors
/// KVM refuses.
pub fn begin<M: GuestMemoryBackend>(
    vcpu: &VcpuFd,
    setup: &Setup,
    entry: Option<(&Entry, &M)>,
) -> Result<(), Error> {
    vcpu.vcpu_init(setup).map_err(|error| Error::Ioctl("KVM_ARM_VCPU_INIT", error))?;
    let Some((entry, _)) = entry else { return Ok(()) };
    let values = [(PSTATE, PSTATE_EL1H), (PC, entry.pc), (x(0), entry.fdt), (x(1), 0), (x(2), 0), (x(3), 0)];
    values
        .into_iter()
        .try_for_each(|(register, value)| set(vcpu, register, value))
        .map_err(|error| Error::Ioctl("KVM_SET_ONE_REG", error))
}

/// The registers as text for a failure's report.
pub fn describe(vcpu: &VcpuFd) -> String {
    let get = |register| {
        let mut value = [0; 8];
        vcpu.get_one_reg(register, &mut value)
            .map_or("?".into(), |_| format!("{:016x}", u64::from_le_bytes(value)))
    };
    let mut text = format!("pc {} pstate {} sp {} sp_el1 {}\n", get(PC), get(PSTATE), get(SP), get(SP_EL1));
    for n in 0..31 {
        text.push_str(&format!("x{n:<2} {}{}", get(x(n)), if n % 4 == 3 { '\n' } else { ' ' }));
    }
    for (name, register) in [
        ("\nsctlr", SCTLR_EL1),
        ("ttbr0", TTBR0_EL1),
        ("tcr", TCR_EL1),
        ("vbar", VBAR_EL1),
        ("\nesr", ESR_EL1),
        ("far", FAR_EL1),
        ("elr", ELR_EL1),
    ] {
        text.push_str(&format!("{name} {} ", get(register)));
    }
    text
}
