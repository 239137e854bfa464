//! Connects one snapshot to the next: the log of dirty pages between them.

use std::fmt;

use super::pending::PendingPages;
use vellum_kvm::dirty::Method;

/// Dirty tracking since a point. The dirty log stays on for as long as this value exists.
pub struct Since {
    /// How dirty pages are collected.
    pub method: Method,
    /// The pages that the next point must contain.
    pub(crate) owed: PendingPages,
    /// The directory of the point.
    pub chain: String,
    /// The number of the point.
    pub point: u32,
    /// When the machine was paused for it, in nanoseconds since 1970. In a copy of the directory,
    /// another machine may have taken a point of that number.
    pub taken: u64,
}

impl fmt::Debug for Since {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "since point {} of {}", self.point, self.chain)
    }
}

impl Drop for Since {
    fn drop(&mut self) {
        self.owed.unfollow();
    }
}
