//! Identifies the processor and the hypervisor that provides it. This is for results only: nothing
//! here decides whether KVM works.

/// The processor's identification.
pub struct Cpu {
    /// Its brand string.
    pub brand: String,
    /// The hypervisor's signature, such as `KVMKVMKVM` or `TCGTCGTCGTCG`; empty if it hides, `None`
    /// on bare metal.
    pub hypervisor: Option<String>,
}

/// Reads CPUID (Intel SDM volume 2, CPUID; `Documentation/virt/kvm/x86/cpuid.rst` for leaf
/// 0x40000000). A leaf costs microseconds in a virtual machine, where CPUID always exits.
#[cfg(target_arch = "x86_64")]
pub fn identify() -> Cpu {
    use std::arch::x86_64::__cpuid;
    let text = |words: &[u32]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ']).to_owned()
    };
    let brand = if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        let leaves = [0x8000_0002, 0x8000_0003, 0x8000_0004].map(__cpuid);
        text(&leaves.map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]).concat())
    } else {
        String::new()
    };
    let hypervisor = (__cpuid(1).ecx >> 31 == 1).then(|| {
        let leaf = __cpuid(0x4000_0000);
        text(&[leaf.ebx, leaf.ecx, leaf.edx])
    });
    Cpu { brand, hypervisor }
}

/// Reads the main ID register (Arm ARM, MIDR_EL1) if the kernel shows it. Arm processors have no
/// brand string and no hypervisor bit. QEMU's `virt` board is identified by its device tree.
#[cfg(target_arch = "aarch64")]
pub fn identify() -> Cpu {
    use super::sysfs;
    let midr = sysfs::read("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1", &mut [0; 32])
        .and_then(|text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    let brand = midr.map_or_else(String::new, |midr| {
        let (implementer, part) = (midr >> 24 & 0xff, midr >> 4 & 0xfff);
        format!("implementer {implementer:#04x} part {part:#05x} r{}p{}", midr >> 20 & 0xf, midr & 0xf)
    });
    let mut buffer = [0; 64];
    let board = sysfs::read("/sys/firmware/devicetree/base/compatible", &mut buffer);
    let hypervisor =
        board.is_some_and(|names| names.contains("linux,dummy-virt")).then(|| "QEMU virt".to_owned());
    Cpu { brand, hypervisor }
}
