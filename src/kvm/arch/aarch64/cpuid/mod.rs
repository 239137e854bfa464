//! The guest's view of its processor: the ID registers (Arm DDI 0487, D19.2) of a KVM vCPU without
//! optional features.
//!
//! SVE, pointer authentication, the PMU and memory tagging are optional features. They are never
//! enabled, so a guest has no state that another host could lack.

pub mod model;

use std::fmt;

use kvm_bindings::{
    KVM_ARM_VCPU_POWER_OFF, KVM_ARM_VCPU_PSCI_0_2, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64,
    RegList, kvm_vcpu_init,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use self::model::{Listed, Model};
use super::state_error;
use vellum_host as host;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// More registers than any vCPU has. KVM's list takes no more.
pub(super) const MAX_REGISTERS: usize = 500;

/// `--cpu` and `--cpuid`: the CPU shown to guests. No features can be switched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The CPU model.
    pub model: Model,
}

/// Why a choice of features is not possible.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Arm features cannot be chosen.
    #[error("'{0}': CPU features cannot be chosen on Arm; leave it out")]
    Unknown(String),
    /// No VM can be created to ask KVM.
    #[error("cannot ask KVM for its vCPUs' features: {0}")]
    Host(#[source] host::kvm::Unusable),
    /// An ioctl failed.
    #[error("{0}: {1}")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// KVM does not return a register that it lists.
    #[error("the ID registers: {0}")]
    State(#[source] state_error::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Unknown(_) => ErrorOrigin::user(Field::Cpuid),
            Self::Host(_) | Self::Ioctl(..) | Self::State(_) => ErrorOrigin::HOST,
        }
    }
}

impl std::str::FromStr for Choice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Err(Error::Unknown(s.into()))
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

impl Choice {
    /// This model, with no features switched.
    pub fn of(model: Model) -> Self {
        Self { model }
    }

    /// Whether any feature is switched.
    pub fn switches(&self) -> bool {
        false
    }

    /// Adds a later `--cpuid` to an earlier one.
    pub fn append(&mut self, _later: Self) {}
}

/// An ID register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaf {
    /// KVM's number of the register (`KVM_REG_ARM64_SYSREG`).
    pub register: u64,
    /// The value that a guest reads.
    pub value: u64,
}

/// The parameters of KVM_ARM_VCPU_INIT.
pub type Setup = kvm_vcpu_init;

/// KVM's vCPU parameters and ID registers.
pub type Supported = Result<(Setup, Vec<Leaf>), Error>;

/// Calls `work`, and then asks KVM by creating a vCPU that never runs.
pub fn supported_beside<T>(kvm: &Kvm, work: impl FnOnce() -> T) -> (Supported, T) {
    let done = work();
    (supported(kvm), done)
}

/// Asks KVM by creating a vCPU that never runs.
pub fn supported(kvm: &Kvm) -> Supported {
    let vm = host::kvm::create_vm(kvm).map_err(Error::Host)?;
    let ioctl = |call| move |error| Error::Ioctl(call, error);
    let setup = setup(&vm).map_err(ioctl("KVM_ARM_PREFERRED_TARGET"))?;
    #[expect(clippy::disallowed_methods, reason = "it has no memory to run on")]
    let vcpu = vm.create_vcpu(0).map_err(ioctl("KVM_CREATE_VCPU"))?;
    vcpu.vcpu_init(&setup).map_err(ioctl("KVM_ARM_VCPU_INIT"))?;
    let mut leaves = Vec::new();
    for register in list(&vcpu)?.into_iter().filter(|&register| is_id(register)) {
        let mut value = [0; 8];
        vcpu.get_one_reg(register, &mut value).map_err(ioctl("KVM_GET_ONE_REG"))?;
        leaves.push(Leaf { register, value: u64::from_le_bytes(value) });
    }
    Ok((setup, leaves))
}

/// The vCPU parameters for `vm`: this host's processor, and PSCI 0.2 or later.
pub(super) fn setup(vm: &VmFd) -> Result<Setup, kvm_ioctls::Error> {
    let mut setup = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut setup)?;
    setup.features = [0; 7];
    setup.features[0] = 1 << KVM_ARM_VCPU_PSCI_0_2;
    Ok(setup)
}

fn list(vcpu: &VcpuFd) -> Result<Vec<u64>, Error> {
    let mut registers = RegList::new(MAX_REGISTERS).expect("the number is within the limit of the list");
    vcpu.get_reg_list(&mut registers).map_err(|error| Error::Ioctl("KVM_GET_REG_LIST", error))?;
    Ok(registers.as_slice().to_vec())
}

/// KVM's number of a system register, from its encoding (Arm DDI 0487, C5.1.2).
pub(super) const fn sysreg(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    KVM_REG_ARM64
        | KVM_REG_SIZE_U64
        | KVM_REG_ARM64_SYSREG as u64
        | op0 << 14
        | op1 << 11
        | crn << 7
        | crm << 3
        | op2
}

/// Whether it is an ID register: op0 3, op1 0, CRn 0, CRm 1 to 7.
pub(super) fn is_id(register: u64) -> bool {
    let crm = register >> 3 & 0xf;
    register & !0x7f == sysreg(3, 0, 0, 0, 0) && (1..=7).contains(&crm)
}

/// The registers that KVM offers.
///
/// # Errors
/// KVM does not list them.
pub fn listed(kvm: &Kvm, _vm: &VmFd) -> Result<Listed, Error> {
    supported(kvm).map(|(_, leaves)| Listed::of(&leaves))
}

/// The highest feature level of the host. Arm has no levels here.
///
/// # Errors
/// Never.
pub fn level(_kvm: &Kvm, _vm: &VmFd) -> Result<Option<&'static str>, Error> {
    Ok(None)
}

/// The processors of a machine.
#[derive(Clone, Debug)]
pub struct Cpuid {
    setup: Setup,
    leaves: Vec<Leaf>,
}

impl Cpuid {
    /// The processors of a VM's guest.
    ///
    /// # Errors
    /// KVM did not report its features.
    pub fn of_vm(supported: Supported, _vm: &VmFd, _choice: &Choice, _vcpus: u32) -> Result<Self, Error> {
        let (setup, leaves) = supported?;
        Ok(Self { setup, leaves })
    }

    /// The ID registers of its vCPUs.
    ///
    /// # Errors
    /// Never.
    pub fn leaves(&self) -> Result<Vec<Leaf>, Error> {
        Ok(self.leaves.clone())
    }

    /// Does nothing: Arm has no CR3 cache.
    pub fn show_cr3_cache(&mut self) {}

    /// The parameters of vCPU `index`. All but the first wait for PSCI's CPU_ON.
    ///
    /// # Errors
    /// Never.
    pub fn for_vcpu(&self, index: u32) -> Result<Setup, Error> {
        let mut setup = self.setup;
        if index > 0 {
            setup.features[0] |= 1 << KVM_ARM_VCPU_POWER_OFF;
        }
        Ok(setup)
    }
}

/// Fields of ID registers by feature name: CRm, op2, the shift of the four-bit field, and whether
/// it is signed. A larger value means more features. In a signed field 15 means none.
const FEATURES: [(&str, u64, u64, u32, bool); 14] = [
    ("fp", 4, 0, 16, true),
    ("asimd", 4, 0, 20, true),
    ("gic", 4, 0, 24, false),
    ("aes", 6, 0, 4, false),
    ("sha1", 6, 0, 8, false),
    ("sha2", 6, 0, 12, false),
    ("crc32", 6, 0, 16, false),
    ("atomics", 6, 0, 20, false),
    ("rdm", 6, 0, 28, false),
    ("sha3", 6, 0, 32, false),
    ("dp", 6, 0, 44, false),
    ("rndr", 6, 0, 60, false),
    ("jscvt", 6, 1, 12, false),
    ("lrcpc", 6, 1, 20, false),
];

/// The features that `source` has and `here` lacks. Only named features are compared. KVM refuses
/// other differences when the guest is restored.
pub fn lacking(source: &[Leaf], here: &[Leaf]) -> Vec<&'static str> {
    let field = |leaves: &[Leaf], (_, crm, op2, shift, signed): &(&str, u64, u64, u32, bool)| {
        let register = sysreg(3, 0, 0, *crm, *op2);
        let value = leaves.iter().find(|leaf| leaf.register == register).map_or(0, |leaf| leaf.value);
        let field = value >> shift & 0xf;
        if *signed && field == 0xf { 0 } else { field + u64::from(*signed) }
    };
    let lacks =
        |feature: &&(&'static str, u64, u64, u32, bool)| field(source, feature) > field(here, feature);
    FEATURES.iter().filter(lacks).map(|(name, ..)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_field_is_a_feature_more() {
        let isar0 = |value| [Leaf { register: sysreg(3, 0, 0, 6, 0), value }];
        assert_eq!(lacking(&isar0(0x1_0020_0010), &isar0(0)), ["aes", "atomics", "sha3"]);
        assert_eq!(lacking(&isar0(0x10), &isar0(0x20)), Vec::<&str>::new());
        let pfr0 = |value| [Leaf { register: sysreg(3, 0, 0, 4, 0), value }];
        assert_eq!(lacking(&pfr0(0), &pfr0(0xff_0000)), ["fp", "asimd"]);
    }

    #[test]
    fn id_registers_are_told_from_others() {
        assert!(is_id(sysreg(3, 0, 0, 4, 0)) && is_id(sysreg(3, 0, 0, 7, 3)));
        // MIDR_EL1, SCTLR_EL1, CTR_EL0.
        assert!(
            !is_id(sysreg(3, 0, 0, 0, 0)) && !is_id(sysreg(3, 0, 1, 0, 0)) && !is_id(sysreg(3, 3, 0, 0, 1))
        );
    }
}
