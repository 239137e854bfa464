//! Tests whether a dirty log loses pages.
//!
//! [`judge`] checks a collection against the stamps of a built-in guest. [`soak`] does so for
//! seconds or hours, with every tracker and backing. [`edges`] checks directly for pages that a
//! kernel forgets at the ends of a clear. [`vellum_kvm::dirty`] collects dirty pages.

pub mod edges;
pub mod judge;
pub mod soak;

use vellum_kvm::memory::Backing;

/// The guest-physical start and the size of RAM for a machine that tests `size` bytes of memslots
/// from `base`. RAM starts at the edge of the huge page that contains `base`, so nothing unneeded
/// is mapped.
pub fn ram(base: u64, size: u64, backing: Backing) -> (u64, u64) {
    let huge = backing.best_mapping().max(2 << 20);
    let first = base / huge * huge;
    (first, (base + size - first).next_multiple_of(backing.best_mapping()))
}
