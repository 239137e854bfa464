//! Page tables in a guest's memory: not walked here yet. The interface is that of `arch/x86_64/paging.rs`.

/// A set of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The guest-physical address of the first.
    pub root: u64,
    /// How many levels.
    pub levels: u32,
}

impl Tables {
    /// Nothing is found.
    pub fn walk(&self, _: u64, _: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        None
    }

    /// Nothing is found.
    pub fn upper_half(&self, _: impl Fn(u64) -> Option<u64>) -> Vec<(u64, u64)> {
        Vec::new()
    }
}
