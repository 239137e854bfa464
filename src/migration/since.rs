//! What ties one snapshot to the next: the log of dirty pages between them.

use std::fmt;

use super::pending::PendingPages;
use vellum_kvm::dirty::Method;

/// Who has written to memory since a point. The log of dirty pages is on for as long as this lives.
pub struct Since {
    /// How dirty pages are collected.
    pub method: Method,
    /// The pages that the next point has to have.
    pub(crate) owed: PendingPages,
    /// Of which directory the point is.
    pub chain: String,
    /// Which it is.
    pub point: u32,
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
