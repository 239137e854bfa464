//! Whether a dirty log loses pages: what judges a tracker, and the tests that ask it.
//!
//! [`judge`] judges any collection by the stamps that a built-in guest leaves; [`soak`] is the test that asks it for seconds or
//! hours, over every tracker and backing; [`edges`] looks directly for the pages that a kernel forgets at the ends of a clear.
//! How dirty pages are collected is [`vellum_kvm::dirty`]'s.

pub mod edges;
pub mod judge;
pub mod soak;

use vellum_kvm::memory::Backing;

/// Where RAM begins, guest-physically, of a machine whose memslots to test are the `size` bytes from `base` on, and how many bytes
/// it has: from the edge of the huge page that the first of them is in, so that nothing is mapped that nobody needs.
pub fn ram(base: u64, size: u64, backing: Backing) -> (u64, u64) {
    let huge = backing.best_mapping().max(2 << 20);
    let first = base / huge * huge;
    (first, (base + size - first).next_multiple_of(backing.best_mapping()))
}
