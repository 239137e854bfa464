//! The code of guests without an operating system, and how a vCPU enters it, behind one interface.
//! The rest of Vellum uses `program::…` and never names an architecture.

#[macro_use]
mod sections;

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod paging;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
pub(crate) use paging::{build_tables, table_pages};
pub use sections::{tables_code, touch_code, write_code};
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// Position-independent guest code.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// The bytes: a function that takes the control block and returns with
    /// [`RETURN`](super::control::flags::RETURN).
    pub bytes: &'static [u8],
    /// The guest's entry, as an offset into `bytes`.
    pub entry: u64,
}

/// The privilege of a workload's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// CPL 3. On Arm EL1, where the privilege does not matter.
    User,
    /// CPL 0, EL1.
    Kernel,
}

/// The start of guest RAM in a workload's address space. RAM is contiguous there, even if its
/// guest-physical addresses have gaps.
pub const RAM_VA: u64 = 1 << 39;

/// The page size of the guest's own tables over RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestPage {
    /// 4 KiB. A host that shadows guest tables then shadows 4 KiB pages whatever the backing.
    Small,
    /// 2 MiB.
    Large,
}

/// How a vCPU starts.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The guest-virtual address of the first instruction.
    pub code: u64,
    /// The control block, passed as a function's first argument.
    pub control: u64,
    /// The root of the page tables.
    pub root: u64,
    /// The initial privilege.
    pub privilege: Privilege,
}
