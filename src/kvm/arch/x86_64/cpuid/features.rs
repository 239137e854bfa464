//! The named features: `--cpuid` switches them, CPU models list them, and migration names those
//! that do not fit.

use kvm_bindings::kvm_cpuid_entry2;

/// A named feature.
#[derive(Debug, PartialEq, Eq)]
pub struct Feature {
    /// The name.
    pub name: &'static str,
    /// The leaf.
    pub leaf: u32,
    /// The sub-leaf, 0 if it has none.
    pub subleaf: u32,
    /// The register.
    pub register: Register,
    /// The bits, which belong together.
    pub bits: u32,
}

/// An output register of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// KVM's feature leaf. Its signature is in the leaf before.
pub const KVM_FEATURES: u32 = 0x4000_0001;

/// The most similar name.
pub fn nearest(name: &str) -> &'static str {
    let close = |f: &&Feature| strsim::jaro_winkler(f.name, name);
    FEATURES.iter().max_by(|a, b| close(a).total_cmp(&close(b))).expect("the list is not empty").name
}

/// The bits of `feature` that a CPU with these entries has.
pub fn bits(entries: &[kvm_cpuid_entry2], feature: &Feature) -> u32 {
    let leaf = |entry: &&kvm_cpuid_entry2| (entry.function, entry.index) == (feature.leaf, feature.subleaf);
    let register = |entry: &kvm_cpuid_entry2| match feature.register {
        Eax => entry.eax,
        Ebx => entry.ebx,
        Ecx => entry.ecx,
        Edx => entry.edx,
    };
    entries.iter().find(leaf).map_or(0, register) & feature.bits
}

/// The named features that `source` has and `here` lacks. Unnamed features are not compared. KVM
/// refuses other differences when the guest is restored.
pub fn lacking(source: &[kvm_cpuid_entry2], here: &[kvm_cpuid_entry2]) -> Vec<&'static str> {
    let lacks = |feature: &&Feature| bits(source, feature) & !bits(here, feature) != 0;
    FEATURES.iter().filter(lacks).map(|feature| feature.name).collect()
}

const fn bit(name: &'static str, leaf: u32, subleaf: u32, register: Register, bit: u32) -> Feature {
    Feature { name, leaf, subleaf, register, bits: 1 << bit }
}
const fn kvm(name: &'static str, bits: u32) -> Feature {
    Feature { name, leaf: KVM_FEATURES, subleaf: 0, register: Eax, bits }
}

/// The features that `--cpuid` can name: KVM's paravirtual features first, then the CPU's,
/// including those of the psABI levels. The names are Linux's (/proc/cpuinfo) with - instead of _.
/// If two vendors have a feature at different places, the second has its own name.
pub static FEATURES: &[Feature] = &[
    kvm("pvclock", 1 | 1 << 3 | 1 << 24),
    kvm("nop-io-delay", 1 << 1),
    kvm("async-pf", 1 << 4 | 1 << 10 | 1 << 14),
    kvm("steal-time", 1 << 5),
    kvm("pv-eoi", 1 << 6),
    kvm("pv-unhalt", 1 << 7),
    kvm("pv-tlb-flush", 1 << 9),
    kvm("pv-send-ipi", 1 << 11),
    kvm("poll-control", 1 << 12),
    kvm("pv-sched-yield", 1 << 13),
    bit("pni", 1, 0, Ecx, 0),
    bit("pclmulqdq", 1, 0, Ecx, 1),
    bit("monitor", 1, 0, Ecx, 3),
    bit("vmx", 1, 0, Ecx, 5),
    bit("ssse3", 1, 0, Ecx, 9),
    bit("fma", 1, 0, Ecx, 12),
    bit("cx16", 1, 0, Ecx, 13),
    bit("pcid", 1, 0, Ecx, 17),
    bit("sse4-1", 1, 0, Ecx, 19),
    bit("sse4-2", 1, 0, Ecx, 20),
    bit("x2apic", 1, 0, Ecx, 21),
    bit("movbe", 1, 0, Ecx, 22),
    bit("popcnt", 1, 0, Ecx, 23),
    bit("tsc-deadline-timer", 1, 0, Ecx, 24),
    bit("aes", 1, 0, Ecx, 25),
    bit("xsave", 1, 0, Ecx, 26),
    bit("avx", 1, 0, Ecx, 28),
    bit("f16c", 1, 0, Ecx, 29),
    bit("rdrand", 1, 0, Ecx, 30),
    bit("hypervisor", 1, 0, Ecx, 31),
    bit("fpu", 1, 0, Edx, 0),
    bit("pse", 1, 0, Edx, 3),
    bit("mce", 1, 0, Edx, 7),
    bit("cx8", 1, 0, Edx, 8),
    bit("mtrr", 1, 0, Edx, 12),
    bit("pge", 1, 0, Edx, 13),
    bit("mca", 1, 0, Edx, 14),
    bit("cmov", 1, 0, Edx, 15),
    bit("pat", 1, 0, Edx, 16),
    bit("clflush", 1, 0, Edx, 19),
    bit("mmx", 1, 0, Edx, 23),
    bit("fxsr", 1, 0, Edx, 24),
    bit("sse", 1, 0, Edx, 25),
    bit("sse2", 1, 0, Edx, 26),
    bit("fsgsbase", 7, 0, Ebx, 0),
    bit("tsc-adjust", 7, 0, Ebx, 1),
    bit("bmi1", 7, 0, Ebx, 3),
    bit("hle", 7, 0, Ebx, 4),
    bit("avx2", 7, 0, Ebx, 5),
    bit("smep", 7, 0, Ebx, 7),
    bit("bmi2", 7, 0, Ebx, 8),
    bit("erms", 7, 0, Ebx, 9),
    bit("invpcid", 7, 0, Ebx, 10),
    bit("rtm", 7, 0, Ebx, 11),
    bit("avx512f", 7, 0, Ebx, 16),
    bit("avx512dq", 7, 0, Ebx, 17),
    bit("rdseed", 7, 0, Ebx, 18),
    bit("adx", 7, 0, Ebx, 19),
    bit("smap", 7, 0, Ebx, 20),
    bit("avx512ifma", 7, 0, Ebx, 21),
    bit("clflushopt", 7, 0, Ebx, 23),
    bit("clwb", 7, 0, Ebx, 24),
    bit("avx512cd", 7, 0, Ebx, 28),
    bit("sha-ni", 7, 0, Ebx, 29),
    bit("avx512bw", 7, 0, Ebx, 30),
    bit("avx512vl", 7, 0, Ebx, 31),
    bit("avx512vbmi", 7, 0, Ecx, 1),
    bit("umip", 7, 0, Ecx, 2),
    bit("pku", 7, 0, Ecx, 3),
    bit("waitpkg", 7, 0, Ecx, 5),
    bit("avx512-vbmi2", 7, 0, Ecx, 6),
    bit("gfni", 7, 0, Ecx, 8),
    bit("vaes", 7, 0, Ecx, 9),
    bit("vpclmulqdq", 7, 0, Ecx, 10),
    bit("avx512-vnni", 7, 0, Ecx, 11),
    bit("avx512-bitalg", 7, 0, Ecx, 12),
    bit("avx512-vpopcntdq", 7, 0, Ecx, 14),
    bit("la57", 7, 0, Ecx, 16),
    bit("rdpid", 7, 0, Ecx, 22),
    bit("cldemote", 7, 0, Ecx, 25),
    bit("movdiri", 7, 0, Ecx, 27),
    bit("movdir64b", 7, 0, Ecx, 28),
    bit("fsrm", 7, 0, Edx, 4),
    bit("md-clear", 7, 0, Edx, 10),
    bit("serialize", 7, 0, Edx, 14),
    bit("spec-ctrl", 7, 0, Edx, 26),
    bit("intel-stibp", 7, 0, Edx, 27),
    bit("flush-l1d", 7, 0, Edx, 28),
    bit("arch-capabilities", 7, 0, Edx, 29),
    bit("spec-ctrl-ssbd", 7, 0, Edx, 31),
    bit("arat", 6, 0, Eax, 2),
    bit("xsaveopt", 0xd, 1, Eax, 0),
    bit("xsavec", 0xd, 1, Eax, 1),
    bit("xgetbv1", 0xd, 1, Eax, 2),
    bit("xsaves", 0xd, 1, Eax, 3),
    bit("lahf-lm", 0x8000_0001, 0, Ecx, 0),
    bit("svm", 0x8000_0001, 0, Ecx, 2),
    bit("cr8-legacy", 0x8000_0001, 0, Ecx, 4),
    bit("abm", 0x8000_0001, 0, Ecx, 5),
    bit("sse4a", 0x8000_0001, 0, Ecx, 6),
    bit("misalignsse", 0x8000_0001, 0, Ecx, 7),
    bit("3dnowprefetch", 0x8000_0001, 0, Ecx, 8),
    bit("xop", 0x8000_0001, 0, Ecx, 11),
    bit("fma4", 0x8000_0001, 0, Ecx, 16),
    bit("tbm", 0x8000_0001, 0, Ecx, 21),
    bit("topoext", 0x8000_0001, 0, Ecx, 22),
    bit("perfctr-core", 0x8000_0001, 0, Ecx, 23),
    bit("syscall", 0x8000_0001, 0, Edx, 11),
    bit("nx", 0x8000_0001, 0, Edx, 20),
    bit("mmxext", 0x8000_0001, 0, Edx, 22),
    bit("fxsr-opt", 0x8000_0001, 0, Edx, 25),
    bit("pdpe1gb", 0x8000_0001, 0, Edx, 26),
    bit("rdtscp", 0x8000_0001, 0, Edx, 27),
    bit("lm", 0x8000_0001, 0, Edx, 29),
    bit("invtsc", 0x8000_0007, 0, Edx, 8),
    bit("clzero", 0x8000_0008, 0, Ebx, 0),
    bit("xsaveerptr", 0x8000_0008, 0, Ebx, 2),
    bit("wbnoinvd", 0x8000_0008, 0, Ebx, 9),
    bit("ibpb", 0x8000_0008, 0, Ebx, 12),
    bit("ibrs", 0x8000_0008, 0, Ebx, 14),
    bit("stibp", 0x8000_0008, 0, Ebx, 15),
    bit("ssbd", 0x8000_0008, 0, Ebx, 24),
    bit("virt-ssbd", 0x8000_0008, 0, Ebx, 25),
    bit("ssb-no", 0x8000_0008, 0, Ebx, 26),
];
