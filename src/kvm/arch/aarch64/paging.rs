//! Guest page tables: walking them is not supported on Arm. The interface is that of
//! `arch/x86_64/paging.rs`.

/// A set of page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The guest-physical address of the root table.
    pub root: u64,
    /// The number of levels.
    pub levels: u32,
}

impl Tables {
    /// Returns None.
    pub fn walk(&self, _: u64, _: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        None
    }

    /// Returns an empty list.
    pub fn upper_half(&self, _: impl Fn(u64) -> Option<u64>) -> Vec<(u64, u64)> {
        Vec::new()
    }
}
