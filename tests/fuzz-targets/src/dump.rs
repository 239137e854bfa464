//! The search of a guest's memory for its kernel's note, and the walk of its page tables, as for a
//! dump. The input is memory: first the page of the note, then tables. The walks begin at each
//! table.

use vellum_kvm::arch::paging::Tables;
use vellum_machine::dump::vmcoreinfo::{self, Vmcoreinfo};

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn dump(data: &[u8]) {
    let read = |at: u64| {
        let at = usize::try_from(at).ok()?;
        Some(u64::from_le_bytes(data.get(at..at.checked_add(8)?)?.try_into().ok()?))
    };
    if let Some(len) = vmcoreinfo::length(data) {
        assert!(len <= 24 + 4096);
    }
    for levels in [4, 5] {
        for root in [0, 0x1000, u64::MAX] {
            let tables = Tables { root, levels };
            for (at, physical) in tables.upper_half(read) {
                // A walk finds every mapping at its place.
                assert_eq!(tables.walk(at, read), Some(physical), "{at:#x}");
            }
        }
    }
    if let Some(info) = Vmcoreinfo::parse(data) {
        assert!(info.note.len() <= 24 + 4096);
        let current = [info.tables, Tables { root: 0x1000, levels: 4 }];
        if info.holds(&current, read) {
            let _ = info.direct_mapping(&[info.tables.root], read);
        }
    }
}
