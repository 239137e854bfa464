//! The device tree that the judge's image for Arm reads. No tree makes it panic, and no memory that
//! the tree reserves is judged.

use vellum_judge::dtb::{Tree, read, without};

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn dtb(data: &[u8]) {
    let mut tree = Tree::EMPTY;
    if read(data, &mut tree).is_err() {
        return;
    }
    let mut ranges = [Default::default(); 8];
    let count = without(&tree.memory, || tree.reserved.iter().copied(), &mut ranges);
    let mut last = 0;
    for range in &ranges[..count] {
        assert!(last <= range.start && range.start < range.end, "the ranges overlap: {ranges:x?}");
        assert!(range.start % 4096 == 0 && range.end % 4096 == 0, "not pages: {ranges:x?}");
        let is_reserved = tree.reserved.iter().any(|hole| hole.start < range.end && range.start < hole.end);
        assert!(!is_reserved, "a reserved page is judged: {ranges:x?}, {tree:x?}");
        let is_memory = |at: u64| tree.memory.iter().any(|memory| memory.start <= at && at < memory.end);
        assert!(is_memory(range.start) && is_memory(range.end - 1), "no memory: {ranges:x?}, {tree:x?}");
        last = range.end;
    }
}
