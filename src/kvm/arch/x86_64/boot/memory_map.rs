//! The memory map that firmware would report: one list. Each boot protocol writes it in its own
//! format.

use std::ops::Range;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::{EBDA, HIGH};

/// The type of a range. The values are those of the e820 interface, which PVH and multiboot share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RangeKind {
    /// Usable memory.
    Ram = 1,
    /// Not to be touched.
    Reserved = 2,
}

/// One entry of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The first address.
    pub start: u64,
    /// The size in bytes.
    pub size: u64,
    /// The type.
    pub kind: RangeKind,
}

/// The RAM of `memory`, in order, with adjacent regions joined.
pub(super) fn ram<M: GuestMemoryBackend>(memory: &M) -> Vec<Range<u64>> {
    let mut regions: Vec<_> =
        memory.iter().map(|r| r.start_addr().raw_value()..r.start_addr().raw_value() + r.len()).collect();
    regions.sort_by_key(|r| r.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for region in regions {
        match joined.last_mut() {
            Some(last) if last.end == region.start => last.end = region.end,
            _ => joined.push(region),
        }
    }
    joined
}

/// The map of a machine with the RAM `memory`: that RAM without a PC's reserved range from the EBDA
/// to 1 MiB, and the `reserved` ranges.
pub fn memory_map<M: GuestMemoryBackend>(memory: &M, reserved: &[Range<u64>]) -> Vec<MapEntry> {
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
