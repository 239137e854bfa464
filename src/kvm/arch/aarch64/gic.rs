//! KVM's interrupt controller: its versions, its errors, and its registers in the order in which
//! they are restored (Documentation/virt/kvm/devices/arm-vgic.rst and arm-vgic-v3.rst; Arm IHI 0048
//! and IHI 0069).
//!
//! The implementation revision comes first, because the meaning of others depends on it. Level or
//! edge configuration comes before pending state, and line levels before latched state. The CPU
//! interfaces come last.

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_GRP_CPU_REGS, KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, KVM_DEV_ARM_VGIC_GRP_DIST_REGS,
    KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, KVM_DEV_ARM_VGIC_GRP_REDIST_REGS,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::Kvm;
use serde::{Deserialize, Serialize};

use super::routing::{FIRST_SHARED, SHARED};
use vellum_host as host;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::kvm_device::{self, Width};

/// The controller's version, as `--irqchip` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// GICv3: redistributors, and the CPU interface in system registers.
    #[default]
    Gicv3,
    /// GICv2: the CPU interface in memory, at most 8 vCPUs. For hosts with a GICv2, or with a GICv3
    /// that can emulate one.
    Gicv2,
}

impl Mode {
    /// The default: the newer version that this host's KVM supports. If KVM cannot be asked,
    /// creating the machine fails later with the reason.
    pub fn of_host() -> Self {
        let vm = Kvm::new().ok().and_then(|kvm| host::kvm::create_vm(&kvm).ok());
        let has = |type_| vm.as_ref().is_some_and(|vm| kvm_device::exists(vm, type_));
        let older =
            !has(kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3) && has(kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2);
        if older { Self::Gicv2 } else { Self::Gicv3 }
    }

    /// Whether devices can interrupt by messages (MSI): only a GICv3 has an ITS.
    pub fn takes_messages(self) -> bool {
        self == Self::Gicv3
    }
}

/// Why KVM refuses an interrupt controller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{0}: {1}; try the other kind")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// KVM refuses to read or write a register.
    #[error(
        "register {attr:#x} of group {group} of the interrupt controller: {error}; is this KVM older than the source's?"
    )]
    Register {
        /// The attribute group.
        group: u32,
        /// The attribute.
        attr: u64,
        /// KVM's error.
        error: kvm_ioctls::Error,
    },
    /// The ITS tables cannot be written to or read from guest memory.
    #[error(
        "the tables of the interrupt translation service: {0}; has the guest placed them outside its memory?"
    )]
    Tables(#[source] kvm_ioctls::Error),
    /// The state is of the other version.
    #[error("the saved machine has the other interrupt controller; start with that one")]
    OtherMode,
    /// The state does not match the machine's registers.
    #[error("the saved interrupt controller has {0}; the file is damaged or from another version")]
    Implausible(&'static str),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Ioctl(..) => ErrorOrigin::host(Field::Irqchip),
            Self::Register { .. } | Self::Tables(_) => ErrorOrigin::HOST,
            Self::OtherMode | Self::Implausible(_) => ErrorOrigin::user(Field::Irqchip),
        }
    }
}

/// A register of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// The attribute group.
    pub group: u32,
    /// The attribute.
    pub attr: u64,
    /// The width.
    pub width: Width,
    /// The attribute that clears the bits that this one sets.
    pub clear: Option<u64>,
    /// Whether the register may be missing: the number of active priority registers depends on the
    /// host's processor.
    pub optional: bool,
}

/// Distributor registers of both versions.
const CTLR: u64 = 0x0;
const IIDR: u64 = 0x8;
const IGROUPR: u64 = 0x80;
const ISENABLER: u64 = 0x100;
const ICENABLER: u64 = 0x180;
const ISPENDR: u64 = 0x200;
const ICPENDR: u64 = 0x280;
const ISACTIVER: u64 = 0x300;
const ICACTIVER: u64 = 0x380;
const IPRIORITYR: u64 = 0x400;
const ICFGR: u64 = 0xc00;
/// GICv2: an interrupt's target CPUs; pending SGIs by source CPU.
const ITARGETSR: u64 = 0x800;
const CPENDSGIR: u64 = 0xf10;
const SPENDSGIR: u64 = 0xf20;
/// GICv3: an interrupt's target.
const IROUTER: u64 = 0x6000;
/// GICv3: a redistributor's own registers, and the offset of its frame for SGIs and PPIs.
const GICR_CTLR: u64 = 0x0;
const GICR_WAKER: u64 = 0x14;
const GICR_PROPBASER: u64 = 0x70;
const GICR_PENDBASER: u64 = 0x78;
const SGI: u64 = 0x1_0000;

/// The affinity that KVM gives vCPU `index` (`reset_mpidr`, arch/arm64/kvm/sys_regs.c), packed as
/// in a device attribute.
pub fn affinity(index: u64) -> u64 {
    (index & 0xf) | (index >> 4 & 0xff) << 8 | (index >> 12 & 0xff) << 16
}

/// All registers of the controller for this number of vCPUs, in the order of restoring.
pub fn registers(mode: Mode, cpus: u64) -> Vec<Register> {
    match mode {
        Mode::Gicv3 => version_3(cpus),
        Mode::Gicv2 => version_2(cpus),
    }
}

fn word(group: u32, attr: u64) -> Register {
    Register { group, attr, width: Width::Word, clear: None, optional: false }
}

/// The offsets of 32-bit registers with `bits` for each of interrupts `from..to`.
fn each(base: u64, bits: u64, from: u32, to: u32) -> impl Iterator<Item = u64> {
    let per_register = 32 / bits;
    (u64::from(from) / per_register..u64::from(to).div_ceil(per_register)).map(move |at| base + 4 * at)
}

/// The registers of interrupts `from..to`, with `at` added to each attribute: the part common to
/// both versions and all frames.
fn of_interrupts(group: u32, at: u64, from: u32, to: u32) -> Vec<Register> {
    let mut all: Vec<_> = each(IGROUPR, 1, from, to).map(|offset| word(group, at + offset)).collect();
    // SGIs are always edge-triggered.
    let configurable = from.max(16);
    all.extend(each(ICFGR, 2, configurable, to).map(|offset| word(group, at + offset)));
    all.extend(each(IPRIORITYR, 8, from, to).map(|offset| word(group, at + offset)));
    for (set, clear) in [(ISENABLER, ICENABLER), (ISPENDR, ICPENDR), (ISACTIVER, ICACTIVER)] {
        let paired = |offset| Register { clear: Some(at + offset + clear - set), ..word(group, at + offset) };
        all.extend(each(set, 1, from, to).map(paired));
    }
    all
}

/// Inserts the lines' levels before latched state.
fn with_levels(mut registers: Vec<Register>, levels: impl Iterator<Item = u64>) -> Vec<Register> {
    let pending = |register: &Register| {
        register.clear.is_some_and(|clear| clear & 0xfff >= ICPENDR && clear & 0xfff < ISACTIVER)
    };
    let at = registers.iter().position(pending).unwrap_or(registers.len());
    registers.splice(at..at, levels.map(|attr| word(KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, attr)));
    registers
}

fn version_3(cpus: u64) -> Vec<Register> {
    const DIST: u32 = KVM_DEV_ARM_VGIC_GRP_DIST_REGS;
    const REDIST: u32 = KVM_DEV_ARM_VGIC_GRP_REDIST_REGS;
    let end = FIRST_SHARED + SHARED;
    let mut all = vec![word(DIST, IIDR), word(DIST, CTLR)];
    for at in (0..cpus).map(|index| affinity(index) << 32) {
        for offset in
            [GICR_PROPBASER, GICR_PROPBASER + 4, GICR_PENDBASER, GICR_PENDBASER + 4, GICR_CTLR, GICR_WAKER]
        {
            all.push(word(REDIST, at + offset));
        }
        let own = of_interrupts(REDIST, at + SGI, 0, FIRST_SHARED);
        all.extend(with_levels(own, std::iter::once(at)));
    }
    let shared = of_interrupts(DIST, 0, FIRST_SHARED, end);
    all.extend(with_levels(shared, (FIRST_SHARED..end).step_by(32).map(u64::from)));
    let routers = (FIRST_SHARED..end).flat_map(|irq| [0, 4].map(|half| IROUTER + 8 * u64::from(irq) + half));
    all.extend(routers.map(|offset| word(DIST, offset)));
    for at in (0..cpus).map(|index| affinity(index) << 32) {
        all.extend(cpu_interface().into_iter().map(|(number, optional)| Register {
            group: KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS,
            attr: at | number,
            width: Width::Double,
            clear: None,
            optional,
        }));
    }
    all
}

/// The system registers of GICv3's CPU interface by their encoding, and whether a host may lack
/// them.
fn cpu_interface() -> Vec<(u64, bool)> {
    let number = |op1: u64, crm: u64, op2: u64| 3 << 14 | op1 << 11 | 12 << 7 | crm << 3 | op2;
    // ICC_SRE_EL1, ICC_CTLR_EL1, ICC_IGRPEN0_EL1, ICC_IGRPEN1_EL1, ICC_BPR0_EL1, ICC_BPR1_EL1: CRn
    // is 12. ICC_PMR_EL1 has CRn 4.
    let mut all: Vec<_> = [(12, 5), (12, 4), (12, 6), (12, 7), (8, 3), (12, 3)]
        .map(|(crm, op2)| (number(0, crm, op2), false))
        .into();
    all.push((3 << 14 | 4 << 7 | 6 << 3, false));
    // ICC_AP0R0_EL1 to 3, ICC_AP1R0_EL1 to 3. A host with 5 priority bits has only the first of
    // each.
    all.extend((4..8).map(|op2| (number(0, 8, op2), op2 > 4)));
    all.extend((0..4).map(|op2| (number(0, 9, op2), op2 > 0)));
    all
}

fn version_2(cpus: u64) -> Vec<Register> {
    const DIST: u32 = KVM_DEV_ARM_VGIC_GRP_DIST_REGS;
    let end = FIRST_SHARED + SHARED;
    let mut all = vec![word(DIST, IIDR), word(DIST, CTLR)];
    for at in (0..cpus).map(|index| index << 32) {
        all.extend(of_interrupts(DIST, at, 0, FIRST_SHARED));
        let paired = |at: u64| Register { clear: Some(at + CPENDSGIR), ..word(DIST, at + SPENDSGIR) };
        all.extend((0..4).map(|quarter| paired(at + 4 * quarter)));
    }
    all.extend(of_interrupts(DIST, 0, FIRST_SHARED, end));
    all.extend(each(ITARGETSR, 8, FIRST_SHARED, end).map(|offset| word(DIST, offset)));
    for at in (0..cpus).map(|index| index << 32) {
        // GICC_CTLR, GICC_PMR, GICC_BPR, GICC_ABPR, GICC_APR0.
        let offsets = [0x0, 0x4, 0x8, 0x1c, 0xd0];
        all.extend(offsets.map(|offset| word(KVM_DEV_ARM_VGIC_GRP_CPU_REGS, at + offset)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_register_is_there_once_and_what_is_pending_comes_after_its_lines() {
        for mode in [Mode::Gicv3, Mode::Gicv2] {
            let all = registers(mode, 3);
            let mut keys: Vec<_> = all.iter().map(|register| (register.group, register.attr)).collect();
            keys.sort_unstable();
            keys.dedup();
            assert_eq!(keys.len(), all.len(), "{mode:?}");
        }
        let all = registers(Mode::Gicv3, 2);
        let at = |group, attr| {
            all.iter().position(|register| (register.group, register.attr) == (group, attr)).unwrap()
        };
        let (dist, levels) = (KVM_DEV_ARM_VGIC_GRP_DIST_REGS, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO);
        assert!(at(dist, 0xc08) < at(levels, 32) && at(levels, 32) < at(dist, 0x204));
        assert!(at(levels, 1 << 32) < at(KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, 1 << 32 | 0x1_0200));
    }

    #[test]
    fn affinities_are_those_of_kvm() {
        assert_eq!([0, 15, 16, 255, 4096].map(affinity), [0, 15, 0x100, 0xf0f, 0x1_0000]);
    }
}
