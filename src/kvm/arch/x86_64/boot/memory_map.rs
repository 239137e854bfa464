//! The memory map that firmware would report: one list, which each protocol writes in its own form.

use std::ops::Range;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::{EBDA, HIGH};

/// What a range of the map is. The values are those of the e820 interface, which PVH and multiboot share.
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
    /// Bytes.
    pub size: u64,
    /// What it is.
    pub kind: RangeKind,
}

/// The RAM of `memory`, in order, regions that touch each other joined.
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

/// The map of a machine whose RAM is `memory`: that RAM, with a PC's reserved range between the EBDA and 1 MiB cut out, and what is
/// `reserved` beside it.
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
