//! The memory map that firmware would report: one list. Each boot protocol writes it in its own
//! format.

use std::ops::Range;

use vm_memory::GuestMemoryBackend;

use super::{EBDA, HIGH};
use crate::arch::load::ram;

/// The type of a range. The values are those of the e820 interface, which PVH and multiboot share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RangeKind {
    /// Usable memory.
    Ram = 1,
    /// Not to be touched.
    Reserved = 2,
}

/// One entry of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapEntry {
    /// The first address.
    pub start: u64,
    /// The size in bytes.
    pub size: u64,
    /// The type.
    pub kind: RangeKind,
}

/// The map of a machine with the RAM `memory`: that RAM without a PC's reserved range from the EBDA
/// to 1 MiB, and the `reserved` ranges.
pub(crate) fn memory_map<M: GuestMemoryBackend>(memory: &M, reserved: &[Range<u64>]) -> Vec<MapEntry> {
    let entry = |start, end: u64, kind| MapEntry { start, size: end - start, kind };
    let mut map = Vec::new();
    for Range { start, end } in ram(memory) {
        if start < EBDA {
            map.push(entry(start, end.min(EBDA), RangeKind::Ram));
            map.push(entry(EBDA, HIGH, RangeKind::Reserved));
        }
        if end > HIGH {
            map.push(entry(start.max(HIGH), end, RangeKind::Ram));
        }
    }
    map.extend(reserved.iter().map(|range| entry(range.start, range.end, RangeKind::Reserved)));
    map.sort_by_key(|entry| entry.start);
    map
}
