//! The facts about the host that every result carries. They are cheap enough to collect before
//! every run.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cpu::{self, Cpu};
use super::sysfs;
use vellum_sys as sys;

/// How KVM maps guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Paging {
    /// Intel's second-stage tables.
    Ept,
    /// AMD's second-stage tables.
    Npt,
    /// Arm's stage 2.
    Stage2,
    /// Shadow page tables: KVM builds them from the guest's own.
    Shadow,
    /// Unknown: the module does not report it.
    Unknown,
}

/// The host at the time when a result was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// The bed: `metal`, `local` (a virtual machine with nested KVM), `svm`, `vmx` or `arm64`.
    /// `VELLUM_BED` overrides the detection.
    pub bed: String,
    /// Whether the processor is emulated. Timings are then counts of instructions, not seconds.
    pub emulated: bool,
    /// `uname -r`.
    pub kernel: String,
    /// The KVM module: `kvm_intel`, `kvm_amd`, `kvm_pvm`, …; `None` without KVM.
    pub module: Option<String>,
    /// How that module maps guest memory.
    pub paging: Paging,
    /// `kvm.tdp_mmu`.
    pub tdp_mmu: Option<bool>,
    /// `kvm.eager_page_split`.
    pub eager_page_split: Option<bool>,
    /// `kvm.nx_huge_pages`, as the kernel prints it.
    pub nx_huge_pages: Option<String>,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`: the active mode.
    pub thp: Option<String>,
    /// The number of CPUs that this process may use.
    pub cpus: u32,
    /// The processor's brand string.
    pub cpu: String,
    /// The host's memory in bytes.
    pub memory: u64,
    /// The boot's ID: the kernel's /proc/sys/kernel/random/boot_id.
    pub boot: String,
    /// The active sandbox: `on`, `log` or `off`, with the parts that the host lacks.
    pub sandbox: String,
}

impl Facts {
    /// Collects the facts. Every guest waits for this, so it makes about ten small reads and
    /// nothing else: under 0.1 ms. `sandbox` is the sandbox's own description.
    pub fn collect(sandbox: String) -> Self {
        let module = module();
        let cpu = cpu::identify();
        let (bed, emulated) = test_host(std::env::var("VELLUM_BED").ok(), &cpu, module.as_deref());
        let mut buffer = [0; 64];
        Self {
            bed,
            emulated,
            kernel: sys::host::kernel_release(),
            paging: paging(module.as_deref()),
            module,
            tdp_mmu: kvm_parameter("tdp_mmu"),
            eager_page_split: kvm_parameter("eager_page_split"),
            nx_huge_pages: sysfs::read("/sys/module/kvm/parameters/nx_huge_pages", &mut buffer)
                .map(str::to_owned),
            thp: sysfs::read("/sys/kernel/mm/transparent_hugepage/enabled", &mut buffer)
                .and_then(sysfs::chosen)
                .map(str::to_owned),
            cpus: sys::host::allowed_cpus().map_or(1, |cpus| cpus.len() as u32),
            cpu: cpu.brand,
            memory: sys::host::total_memory(),
            boot: sysfs::read("/proc/sys/kernel/random/boot_id", &mut buffer).unwrap_or_default().to_owned(),
            sandbox,
        }
    }
}

/// The module behind /dev/kvm, found by its directory in sysfs. CPU flags are no evidence: kvm_pvm
/// needs neither vmx nor svm.
fn module() -> Option<String> {
    let loaded = |name: &&str| Path::new("/sys/module").join(name).exists();
    // A built-in module has a directory even without its hardware. But then there is no /dev/kvm
    // either.
    let known = ["kvm_intel", "kvm_amd", "kvm_pvm"];
    let mut found: Vec<&str> = known.into_iter().filter(loaded).collect();
    if found.len() > 1 {
        // Only one can be active. A module that was loaded did not fail. Among built-in modules it
        // is the one of the CPU's vendor.
        let loaded = |name: &str| Path::new("/sys/module").join(name).join("initstate").exists();
        let amd = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("AuthenticAMD"));
        found.sort_by_key(|name| (!loaded(name), (*name == "kvm_amd") != amd));
    }
    if let Some(name) = found.first() {
        return Some((*name).to_owned());
    }
    let other = std::fs::read_dir("/sys/module").ok().and_then(|mut modules| {
        modules.find_map(|entry| {
            entry.ok()?.file_name().into_string().ok().filter(|name| name.starts_with("kvm_"))
        })
    });
    other.or_else(|| Path::new("/dev/kvm").exists().then(|| "kvm".to_owned()))
}

fn kvm_parameter(name: &str) -> Option<bool> {
    let mut path = String::from("/sys/module/kvm/parameters/");
    path.push_str(name);
    sysfs::read(&path, &mut [0; 8]).and_then(sysfs::truth)
}

fn paging(module: Option<&str>) -> Paging {
    let second_stage = |path, with| match sysfs::read(path, &mut [0; 8]).and_then(sysfs::truth) {
        Some(true) => with,
        Some(false) => Paging::Shadow,
        None => Paging::Unknown,
    };
    match module {
        Some("kvm_intel") => second_stage("/sys/module/kvm_intel/parameters/ept", Paging::Ept),
        Some("kvm_amd") => second_stage("/sys/module/kvm_amd/parameters/npt", Paging::Npt),
        Some("kvm_pvm") => Paging::Shadow,
        Some(_) if cfg!(target_arch = "aarch64") => Paging::Stage2,
        _ => Paging::Unknown,
    }
}

/// The bed's name and whether its processor is emulated. If the user gives a name that is known, it
/// decides both.
fn test_host(name: Option<String>, cpu: &Cpu, module: Option<&str>) -> (String, bool) {
    let detected = match cpu.hypervisor.as_deref() {
        // QEMU emulates only AMD's virtualization.
        Some("TCGTCGTCGTCG") => "svm",
        // The board does not distinguish emulation from nested virtualization, which is the rarer
        // of the two.
        Some("QEMU virt") => "arm64",
        Some(_) => "local",
        // Bochs reports no hypervisor, and its brand string is that of the CPU model. Its BIOS
        // identifies it.
        None if bios_is_bochs() => {
            if module == Some("kvm_amd") {
                "svm"
            } else {
                "vmx"
            }
        }
        None => "metal",
    };
    match name {
        Some(name) if !name.is_empty() => {
            let emulated = is_emulated(&name).unwrap_or_else(|| is_emulated(detected) == Some(true));
            (name, emulated)
        }
        _ => (detected.to_owned(), is_emulated(detected) == Some(true)),
    }
}

fn is_emulated(bed: &str) -> Option<bool> {
    match bed {
        "svm" | "vmx" | "arm64" => Some(true),
        "local" | "metal" => Some(false),
        _ => None,
    }
}

fn bios_is_bochs() -> bool {
    ["bios_vendor", "sys_vendor"].iter().any(|field| {
        let path = format!("/sys/class/dmi/id/{field}");
        sysfs::read(&path, &mut [0; 64]).is_some_and(|vendor| vendor.contains("Bochs"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(hypervisor: Option<&str>) -> Cpu {
        Cpu { brand: "test".into(), hypervisor: hypervisor.map(str::to_owned) }
    }

    #[test]
    fn the_hypervisor_names_the_bed() {
        assert_eq!(test_host(None, &cpu(Some("KVMKVMKVM")), Some("kvm_pvm")), ("local".into(), false));
        assert_eq!(test_host(None, &cpu(Some("TCGTCGTCGTCG")), Some("kvm_amd")), ("svm".into(), true));
        assert_eq!(test_host(Some(String::new()), &cpu(Some("")), None), ("local".into(), false));
    }

    #[test]
    fn a_bed_named_by_the_user_wins() {
        assert_eq!(test_host(Some("vmx".into()), &cpu(Some("KVMKVMKVM")), None), ("vmx".into(), true));
        assert_eq!(
            test_host(Some("local".into()), &cpu(Some("TCGTCGTCGTCG")), None),
            ("local".into(), false)
        );
        assert_eq!(
            test_host(Some("rack-7".into()), &cpu(Some("TCGTCGTCGTCG")), None),
            ("rack-7".into(), true)
        );
    }

    #[test]
    fn facts_are_of_this_host() {
        let facts = Facts::collect("off".into());
        assert!(!facts.kernel.is_empty() && facts.cpus > 0 && facts.memory > 0);
        assert!(facts.module.is_some() || facts.paging == Paging::Unknown);
        assert_eq!(facts.sandbox, "off");
    }
}
