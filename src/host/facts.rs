//! The facts about the host that every result carries, cheap enough to collect before every run.

use serde::{Deserialize, Serialize};

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
    /// KVM shadows the guest's own page tables.
    Shadow,
    /// The module does not say.
    Unknown,
}

/// What the host was when a result was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// `metal`, `local` (a virtual machine with KVM of its own), `svm`, `vmx`, `arm64`; `VELLUM_BED` overrides what is detected.
    pub bed: String,
    /// True where the processor is emulated: timings are then counts of instructions, not seconds.
    pub emulated: bool,
    /// `uname -r`.
    pub kernel: String,
    /// The KVM module: `kvm_intel`, `kvm_amd`, `kvm_pvm`, …; `None` where there is no KVM.
    pub module: Option<String>,
    /// How that module maps guest memory.
    pub paging: Paging,
    /// `kvm.tdp_mmu`.
    pub tdp_mmu: Option<bool>,
    /// `kvm.eager_page_split`.
    pub eager_page_split: Option<bool>,
    /// `kvm.nx_huge_pages` as the kernel prints it.
    pub nx_huge_pages: Option<String>,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`: the mode in force.
    pub thp: Option<String>,
    /// CPUs that this process may use.
    pub cpus: u32,
    /// The processor's brand string.
    pub cpu: String,
    /// The host's memory in bytes.
    pub memory: u64,
    /// The sandbox in force: `on`, `log`, `off`, with what the host lacks of it.
    pub sandbox: String,
}
