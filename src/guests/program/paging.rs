//! The page tables of workloads: four levels of 512 entries with 4 KiB pages. All architectures
//! have that structure. Each defines its own entries.

use super::{DOORBELL, GuestPage, LARGE, LEAF, RAM_VA, TABLE};
use vellum_kvm::arch::layout::DOORBELL as DOORBELL_PAGE;
use vellum_sys::mmap::PAGE_SIZE;

const _: () = assert!(DOORBELL_PAGE.is_multiple_of(LARGE_SIZE), "nothing else shares the doorbell's entry");

const ENTRIES: u64 = 512;
const LARGE_SIZE: u64 = 2 << 20;

/// How many pages [`build_tables`] needs for `ram` bytes.
pub(crate) fn table_pages(ram: u64, page: GuestPage) -> u64 {
    let directories = ram.div_ceil(1 << 30);
    let small = if page == GuestPage::Small { ram.div_ceil(LARGE_SIZE) } else { 0 };
    // The root; a PDPT and a directory for the slot and the doorbell; the rest for RAM.
    1 + 2 + ram.div_ceil(1 << 39) + directories + small
}

/// Builds four-level page tables in `words` (zeroed), which the guest sees at `base`.
///
/// `low` is mapped one to one in large pages, and must lie in one GiB. `ram` gives
/// `(guest-physical, bytes)` parts that are mapped one after the other from [`RAM_VA`]. Returns the
/// address of the root.
pub(crate) fn build_tables(
    words: &mut dyn FnMut(u64, u64),
    base: u64,
    low: std::ops::Range<u64>,
    ram: impl Iterator<Item = (u64, u64)> + Clone,
    page: GuestPage,
) -> u64 {
    // Tables are allocated one after the other, so `put(table, index, entry)` writes a word of a
    // table.
    let mut put = |table: u64, index: u64, entry: u64| words(table * ENTRIES + index, entry);
    let at = |table: u64| base + table * PAGE_SIZE;
    let (root, low_pdpt, low_directory) = (0, 1, 2);
    let mut free = 3;
    put(root, 0, at(low_pdpt) | TABLE);
    put(low_pdpt, low.start >> 30, at(low_directory) | TABLE);
    for gpa in low.step_by(LARGE_SIZE as usize) {
        let entry = if gpa == DOORBELL_PAGE { DOORBELL } else { LARGE };
        put(low_directory, (gpa >> 21) % ENTRIES, gpa | entry);
    }
    let (mut pdpt, mut directory, mut table) = (0, 0, 0);
    let mut va = RAM_VA;
    for (gpa, len) in ram {
        let mut done = 0;
        while done < len {
            if va.is_multiple_of(1 << 39) {
                pdpt = free;
                free += 1;
                put(root, va >> 39, at(pdpt) | TABLE);
            }
            if va.is_multiple_of(1 << 30) {
                directory = free;
                free += 1;
                put(pdpt, (va >> 30) % ENTRIES, at(directory) | TABLE);
            }
            let step = match page {
                GuestPage::Large => {
                    put(directory, (va >> 21) % ENTRIES, (gpa + done) | LARGE);
                    LARGE_SIZE
                }
                GuestPage::Small => {
                    if va.is_multiple_of(LARGE_SIZE) {
                        table = free;
                        free += 1;
                        put(directory, (va >> 21) % ENTRIES, at(table) | TABLE);
                    }
                    put(table, (va >> 12) % ENTRIES, (gpa + done) | LEAF);
                    PAGE_SIZE
                }
            };
            va += step;
            done += step;
        }
    }
    at(root)
}
