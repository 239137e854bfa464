//! CPUID: what KVM can offer, minus what `--cpuid` removes, with the machine's topology.
//!
//! Start with [`Cpuid::of_vm`], once a machine, then [`Cpuid::for_vcpu`]. There is one package with
//! one thread a core, and the APIC ID is the vCPU's number. Registers and bits are described in the
//! Intel SDM vol. 2 (CPUID) and the AMD APM vol. 3, appendix E; KVM's own leaf in
//! Documentation/virt/kvm/x86/cpuid.rst. `features` has the named features, [`model`] the CPU
//! models for guests that move between CPUs.

mod features;
pub mod model;

use std::fmt;

use kvm_bindings::{
    CpuId, KVM_CAP_TSC_DEADLINE_TIMER, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES,
    kvm_cpuid_entry2,
};
use kvm_ioctls::{Kvm, VmFd};

pub use self::features::lacking;
use self::features::{FEATURES, Feature, Register, nearest};
use self::model::{Listed, Model};
use vellum_sys::cr3_cache;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The CPU shown to a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The CPU model.
    pub model: Model,
    /// `--cpuid`: features switched on and off, in the given order. With a model, on means as much
    /// as KVM has.
    switched: Vec<(bool, &'static Feature)>,
}

/// Why a choice of features is not possible.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Neither + nor -.
    #[error("'{0}': start each feature with + or -, as in +avx2,-pv-eoi")]
    Sign(String),
    /// The feature is not in the list.
    #[error("'{0}': there is no such feature; did you mean {1}?")]
    Unknown(String, &'static str),
    /// KVM does not offer the feature.
    #[error("+{0}: this host's KVM does not offer it; leave it out")]
    NotOffered(&'static str),
    /// The model has features that KVM lacks.
    #[error("{0}: this host's KVM does not offer {1}{2}")]
    Lacking(String, String, String),
    /// KVM does not report what it supports.
    #[error("KVM_GET_SUPPORTED_CPUID: {0}")]
    Supported(#[source] kvm_ioctls::Error),
    /// CPUID has no room for another leaf.
    #[error("KVM supports more CPUID leaves than it takes")]
    TooMany,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Sign(_) | Self::Unknown(..) | Self::NotOffered(_) => ErrorOrigin::user(Field::Cpuid),
            Self::Lacking(..) => ErrorOrigin::user(Field::CpuModel),
            Self::Supported(_) | Self::TooMany => ErrorOrigin::HOST,
        }
    }
}

impl std::str::FromStr for Choice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let parse = |item: &str| {
            let (on, name) = match item.split_at_checked(1) {
                Some(("+", name)) => (true, name),
                Some(("-", name)) => (false, name),
                _ => return Err(Error::Sign(item.into())),
            };
            match FEATURES.iter().find(|f| f.name == name) {
                Some(feature) => Ok((on, feature)),
                None => Err(Error::Unknown(item.into(), nearest(name))),
            }
        };
        let switched = s.split(',').map(parse).collect::<Result<_, _>>()?;
        Ok(Self { model: Model::Host, switched })
    }
}

/// Shows the switched features, not the model.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (on, feature)) in self.switched.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{}{}", if *on { '+' } else { '-' }, feature.name)?;
        }
        Ok(())
    }
}

impl Choice {
    /// This model, with no features switched.
    pub fn of(model: Model) -> Self {
        Self { model, switched: Vec::new() }
    }

    /// Adds a later `--cpuid` to an earlier one.
    pub fn append(&mut self, mut later: Self) {
        self.switched.append(&mut later.switched);
    }

    /// Whether any feature is switched.
    pub fn switches(&self) -> bool {
        !self.switched.is_empty()
    }
}

/// The result of `KVM_GET_SUPPORTED_CPUID`.
pub type Supported = Result<CpuId, kvm_ioctls::Error>;

/// Asks KVM what it supports. This takes about as long as creating a VM: KVM executes CPUID for
/// every leaf, and CPUID exits if the host is itself a guest.
pub fn supported(kvm: &Kvm) -> Supported {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
}

/// Asks KVM on a separate thread while `work` runs.
pub fn supported_beside<T>(kvm: &Kvm, work: impl FnOnce() -> T) -> (Supported, T) {
    let ask = || supported(kvm);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, ask);
        let done = work();
        // If the host refuses a thread, this thread does both.
        let supported = thread.map_or_else(
            |_| ask(),
            |thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        );
        (supported, done)
    })
}

/// A CPUID leaf in a machine's description.
pub type Leaf = kvm_cpuid_entry2;

/// A vCPU's CPUID.
pub type Setup = CpuId;

/// The features that guests of this host can have, in the form of a model file.
///
/// # Errors
/// KVM does not report them.
pub fn listed(kvm: &Kvm, vm: &VmFd) -> Result<Listed, Error> {
    let all = Choice {
        switched: FEATURES.iter().filter(|f| f.name == "invtsc").map(|f| (true, f)).collect(),
        ..Choice::default()
    };
    let cpuid = Cpuid::of_vm(supported(kvm), vm, &all, 1)
        .or_else(|_| Cpuid::of_vm(supported(kvm), vm, &Choice::default(), 1))?;
    Ok(Listed::of(&cpuid.entries))
}

/// The highest psABI level of guests of this host, if any.
///
/// # Errors
/// As [`listed`].
pub fn level(kvm: &Kvm, vm: &VmFd) -> Result<Option<&'static str>, Error> {
    let cpuid = Cpuid::of_vm(supported(kvm), vm, &Choice::default(), 1)?;
    Ok(model::Level::of(&cpuid.entries))
}

/// The CPUID of a machine.
#[derive(Clone, Debug)]
pub struct Cpuid {
    entries: Vec<kvm_cpuid_entry2>,
    vcpus: u32,
}

/// Leaf 1: ECX TSC deadline and hypervisor; EDX more than one thread in the package.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const HTT: u32 = 1 << 28;
/// Leaf 0x8000_0007, EDX.
const INVARIANT_TSC: u32 = 1 << 8;
/// Leaf 0x8000_0001, ECX: all threads of the package are cores; leaf 0x8000_001e exists.
const CMP_LEGACY: u32 = 1 << 1;
const TOPOEXT: u32 = 1 << 22;

impl Cpuid {
    /// The CPUID of guests of `vm` with `vcpus` vCPUs: what KVM supports ([`supported_beside`]),
    /// changed by `choice`.
    ///
    /// # Errors
    /// KVM did not report what it supports, or `choice` switches on what KVM does not offer.
    pub fn of_vm(supported: Supported, vm: &VmFd, choice: &Choice, vcpus: u32) -> Result<Self, Error> {
        let supported = supported.map_err(Error::Supported)?;
        let deadline_timer = vm.check_extension_raw(KVM_CAP_TSC_DEADLINE_TIMER.into()) > 0;
        Self::new(supported.as_slice(), choice, vcpus, deadline_timer)
    }

    /// The CPUID of a machine with `vcpus` vCPUs. `supported` is the result of
    /// `KVM_GET_SUPPORTED_CPUID`. `tsc_deadline` is that of `KVM_CAP_TSC_DEADLINE_TIMER`: KVM
    /// leaves this bit to the creator of the local APIC.
    ///
    /// # Errors
    /// `choice` switches on what KVM does not offer.
    pub fn new(
        supported: &[kvm_cpuid_entry2],
        choice: &Choice,
        vcpus: u32,
        tsc_deadline: bool,
    ) -> Result<Self, Error> {
        let mut cpuid = Self { entries: supported.to_vec(), vcpus };
        if let Some(leaf) = cpuid.leaf(1, 0) {
            leaf.ecx = (leaf.ecx & !TSC_DEADLINE) | HYPERVISOR | if tsc_deadline { TSC_DEADLINE } else { 0 };
        }
        let offered = cpuid.clone();
        choice.model.mask(&mut cpuid.entries)?;
        // A guest that trusts its TSC prefers it to kvm-clock. Neither survives a migration to a
        // host with another frequency. So the invariant TSC needs +invtsc.
        if let Some(leaf) = cpuid.leaf(0x8000_0007, 0) {
            leaf.edx &= !INVARIANT_TSC;
        }
        for (on, feature) in &choice.switched {
            let has = offered.register(feature).unwrap_or(0) & feature.bits;
            match cpuid.register_mut(feature) {
                Some(register) if !on => *register &= !feature.bits,
                // As many of the bits as KVM has.
                Some(register) if has != 0 => *register |= has,
                _ if !on => {}
                _ => return Err(Error::NotOffered(feature.name)),
            }
        }
        cpuid.write_topology();
        Ok(cpuid)
    }

    /// The CPUID of the first vCPU.
    ///
    /// # Errors
    /// There are more leaves than KVM takes.
    pub fn leaves(&self) -> Result<Vec<Leaf>, Error> {
        Ok(self.for_vcpu(0)?.as_slice().to_vec())
    }

    /// Announces that the guest can load CR3 without an exit. KVM does not report this bit itself:
    /// it depends on the VM.
    pub fn show_cr3_cache(&mut self) {
        if let Some(leaf) = self.leaf(features::KVM_FEATURES, 0) {
            leaf.eax |= cr3_cache::FEATURE;
        }
    }

    /// The CPUID of vCPU `index`, whose APIC ID is also `index`.
    ///
    /// # Errors
    /// There are more leaves than KVM takes.
    pub fn for_vcpu(&self, index: u32) -> Result<Setup, Error> {
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            match entry.function {
                1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | index << 24,
                0xb | 0x1f => entry.edx = index,
                0x8000_001e => (entry.eax, entry.ebx) = (index, (entry.ebx & !0xffff) | (index & 0xff)),
                _ => {}
            }
        }
        CpuId::from_entries(&entries).map_err(|_| Error::TooMany)
    }

    fn write_topology(&mut self) {
        let vcpus = self.vcpus;
        // How many bits of the APIC ID number the cores.
        let bits = vcpus.next_power_of_two().trailing_zeros();
        let largest_id = (1u32 << bits) - 1;
        let amd = self.leaf(0, 0).is_some_and(|leaf| {
            // "AuthenticAMD" or "HygonGenuine".
            [0x6874_7541, 0x6f67_7948].contains(&leaf.ebx)
        });
        let max_leaf = self.leaf(0, 0).map_or(0, |leaf| leaf.eax);
        let extended = self.leaf(0x8000_0001, 0).map_or(0, |leaf| leaf.ecx);

        for entry in &mut self.entries {
            match (entry.function, entry.index) {
                (1, _) => {
                    entry.ebx = (entry.ebx & !0x00ff_0000) | (largest_id + 1).min(255) << 16;
                    entry.edx = (entry.edx & !HTT) | if vcpus > 1 { HTT } else { 0 };
                }
                // Caches: the first two levels belong to a core, the third to the package.
                (4, _) if entry.eax & 0x1f != 0 => {
                    let sharing = if entry.eax >> 5 & 7 < 3 { 0 } else { largest_id };
                    entry.eax = (entry.eax & 0x3fff) | sharing.min(0xfff) << 14 | largest_id.min(0x3f) << 26;
                }
                (0x8000_001d, _) if entry.eax & 0x1f != 0 => {
                    let sharing = if entry.eax >> 5 & 7 < 3 { 0 } else { vcpus - 1 };
                    entry.eax = (entry.eax & 0x3fff) | sharing.min(0xfff) << 14;
                }
                (0x8000_0001, _) if amd => {
                    entry.ecx = (entry.ecx & !CMP_LEGACY) | if vcpus > 1 { CMP_LEGACY } else { 0 };
                }
                // The number of cores minus one, and how many bits of the APIC ID number them.
                (0x8000_0008, _) if amd => {
                    entry.ecx = (entry.ecx & !0xf0ff) | (vcpus - 1).min(0xff) | bits.min(0xf) << 12;
                }
                // One thread a core, one node.
                (0x8000_001e, _) => (entry.ebx, entry.ecx) = (0, 0),
                _ => {}
            }
        }
        if amd && extended & TOPOEXT == 0 {
            self.entries.retain(|e| !matches!(e.function, 0x8000_001d | 0x8000_001e));
        }
        // Extended topology: threads of a core, cores of the package, and an invalid level that
        // ends the list.
        for function in [0xb, 0x1f].into_iter().filter(|function| *function <= max_leaf) {
            self.entries.retain(|e| e.function != function);
            for (index, eax, ebx, kind) in [(0, 0, 1, 1), (1, bits, vcpus, 2), (2, 0, 0, 0)] {
                self.entries.push(kvm_cpuid_entry2 {
                    function,
                    index,
                    flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                    eax,
                    ebx,
                    ecx: kind << 8 | index,
                    ..Default::default()
                });
            }
        }
    }

    fn leaf(&mut self, function: u32, index: u32) -> Option<&mut kvm_cpuid_entry2> {
        self.entries.iter_mut().find(|e| e.function == function && e.index == index)
    }

    fn register_mut(&mut self, feature: &Feature) -> Option<&mut u32> {
        let leaf = self.leaf(feature.leaf, feature.subleaf)?;
        Some(match feature.register {
            Register::Eax => &mut leaf.eax,
            Register::Ebx => &mut leaf.ebx,
            Register::Ecx => &mut leaf.ecx,
            Register::Edx => &mut leaf.edx,
        })
    }

    fn register(&self, feature: &Feature) -> Option<u32> {
        self.clone().register_mut(feature).map(|r| *r)
    }
}

#[cfg(test)]
mod tests {
    use super::features::KVM_FEATURES;
    use super::*;

    fn entry(function: u32, index: u32, eax: u32, ebx: u32, ecx: u32, edx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn intel() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0, 0, 0x1f, 0x756e_6547, 0x6c65_746e, 0x4965_6e69),
            entry(1, 0, 0, 0, 1 << 21 | TSC_DEADLINE, 0),
            entry(4, 0, 0x1c00_4121, 0, 0, 0),
            entry(4, 3, 0x1c03_c163, 0, 0, 0),
            entry(7, 0, 0, 1 << 5, 0, 0),
            entry(KVM_FEATURES - 1, 0, KVM_FEATURES, 0x4b4d_564b, 0x564b_4d56, 0x4d),
            entry(KVM_FEATURES, 0, 0x0100_02fb, 0, 0, 0),
            entry(0x8000_0007, 0, 0, 0, 0, INVARIANT_TSC),
        ]
    }

    fn at(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn topology_counts_vcpus_and_names_each() {
        let cpuid = Cpuid::new(&intel(), &Choice::default(), 3, true).unwrap().for_vcpu(2).unwrap();
        let one = at(&cpuid, 1, 0);
        assert_eq!((one.ebx, one.edx & HTT), (2 << 24 | 4 << 16, HTT));
        let cores = at(&cpuid, 0xb, 1);
        assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (2, 3, 0x201, 2));
        assert_eq!(at(&cpuid, 0x1f, 0).ecx, 0x100);
        // The first-level cache belongs to a core, all cores share the third level; four core
        // numbers in the package.
        assert_eq!(
            (at(&cpuid, 4, 0).eax, at(&cpuid, 4, 3).eax),
            (3 << 26 | 0x121, 3 << 26 | 3 << 14 | 0x163)
        );
        let alone = Cpuid::new(&intel(), &Choice::default(), 1, true).unwrap().for_vcpu(0).unwrap();
        assert_eq!((at(&alone, 1, 0).edx & HTT, at(&alone, 0xb, 1).eax), (0, 0));
    }

    #[test]
    fn amd_topology_uses_its_own_leaves() {
        let amd = vec![
            entry(0, 0, 0xd, 0x6874_7541, 0, 0),
            entry(0x8000_0001, 0, 0, 0, TOPOEXT, 0),
            entry(0x8000_0008, 0, 0x3030, 0, 0xffff, 0),
            entry(0x8000_001e, 0, 9, 9, 9, 0),
        ];
        let cpuid = Cpuid::new(&amd, &Choice::default(), 8, true).unwrap().for_vcpu(5).unwrap();
        assert_eq!(at(&cpuid, 0x8000_0001, 0).ecx, TOPOEXT | CMP_LEGACY);
        assert_eq!(at(&cpuid, 0x8000_0008, 0).ecx, 0x0f00 | 3 << 12 | 7);
        let this = at(&cpuid, 0x8000_001e, 0);
        assert_eq!((this.eax, this.ebx, this.ecx), (5, 5, 0));
        assert!(!cpuid.as_slice().iter().any(|e| e.function == 0x1f));
    }

    #[test]
    fn the_deadline_timer_is_the_capability_not_what_kvm_lists() {
        let ecx = |has| {
            at(&Cpuid::new(&intel(), &Choice::default(), 1, has).unwrap().for_vcpu(0).unwrap(), 1, 0).ecx
        };
        assert_eq!((ecx(true) & TSC_DEADLINE, ecx(false) & TSC_DEADLINE), (TSC_DEADLINE, 0));
        assert_eq!(ecx(false) & HYPERVISOR, HYPERVISOR);
    }

    #[test]
    fn features_are_taken_away_and_given_back_but_not_invented() {
        let with = |choice: &str| Cpuid::new(&intel(), &choice.parse().unwrap(), 1, true);
        let kvm = |choice| at(&with(choice).unwrap().for_vcpu(0).unwrap(), KVM_FEATURES, 0).eax;
        assert_eq!(kvm("-pv-eoi,-pvclock"), 0x2b2);
        assert_eq!(kvm("-pv-eoi,+pv-eoi"), 0x0100_02fb);
        let tsc = |choice| at(&with(choice).unwrap().for_vcpu(0).unwrap(), 0x8000_0007, 0).edx;
        assert_eq!((tsc("-pv-eoi"), tsc("+invtsc")), (0, INVARIANT_TSC));
        // KVM has two of the three bits of async-pf here. Only those are restored.
        assert_eq!(kvm("-async-pf"), 0x0100_02eb);
        assert_eq!(kvm("-async-pf,+async-pf"), 0x0100_02fb);
        assert_eq!(with("+avx2").unwrap().for_vcpu(0).unwrap().as_slice().len(), 8 + 6);
        assert_eq!(with("+avx512f").unwrap_err(), Error::NotOffered("avx512f"));
        assert!(with("-svm").is_ok(), "a missing feature can be switched off");
    }

    #[test]
    fn mistyped_names_are_told_the_nearest() {
        let error = |s: &str| s.parse::<Choice>().unwrap_err().to_string();
        assert!(error("-pv-eio").contains("did you mean pv-eoi?"));
        assert!(error("-pvclok").contains("did you mean pvclock?"));
        assert!(error("+avx2,steal-time").contains("start each feature with + or -"));
        assert!(error("").contains("start each feature"));
    }
}
