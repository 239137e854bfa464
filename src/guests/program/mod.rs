//! The code that a guest without an operating system runs, and how a vCPU is made to enter it, behind one interface: the
//! rest of Vellum names `program::…` and never an architecture.

#[macro_use]
mod sections;

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod paging;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
pub use paging::{build_tables, table_pages};
pub use sections::{tables_code, touch_code, write_code};
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// Position-independent guest code.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// Its bytes, as a function that takes the control block and returns with [`RETURN`](super::control::flags::RETURN).
    pub bytes: &'static [u8],
    /// Where a guest enters, from the start of `bytes`.
    pub entry: u64,
}

/// The privilege that a workload's code runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// CPL 3; EL1 on Arm, where nothing depends on it.
    User,
    /// CPL 0, EL1.
    Kernel,
}

/// Where guest RAM starts in a workload's address space; RAM is contiguous there, whatever gaps its guest-physical
/// addresses have.
pub const RAM_VA: u64 = 1 << 39;

/// The page size of the guest's own tables over RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestPage {
    /// 4 KiB: a host that shadows guest tables then shadows 4 KiB pages whatever the backing.
    Small,
    /// 2 MiB.
    Large,
}

/// Where a vCPU starts.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Guest-virtual address of the first instruction.
    pub code: u64,
    /// The control block, handed over as the first argument of a function is.
    pub control: u64,
    /// The root of the page tables.
    pub root: u64,
    /// The privilege that it starts with.
    pub privilege: Privilege,
}
