//! The location of RAM in the guest physical address space. A board says where there is room
//! ([`Space`]). RAM fills it from the lowest address up.

use std::ops::Range;

/// The guest physical ranges that RAM may fill, in order and disjoint.
#[derive(Clone, Copy, Debug)]
pub struct Space(pub &'static [Range<u64>]);

impl Space {
    /// The parts `(guest physical address, bytes)` of `size` bytes of RAM, in order.
    pub fn parts(self, size: u64) -> impl Iterator<Item = (u64, u64)> + Clone {
        let mut left = size;
        self.0.iter().map_while(move |range| {
            let len = left.min(range.end - range.start);
            left -= len;
            (len > 0).then_some((range.start, len))
        })
    }

    /// The total size in bytes.
    pub fn most(self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_fills_the_ranges_from_below() {
        const SPACE: Space = Space(&[0..3 << 30, 4 << 30..1 << 40]);
        assert_eq!(SPACE.parts(3 << 30).collect::<Vec<_>>(), [(0, 3 << 30)]);
        assert_eq!(SPACE.parts(6 << 30).collect::<Vec<_>>(), [(0, 3 << 30), (4 << 30, 3 << 30)]);
        assert_eq!(SPACE.parts(SPACE.most()).map(|(_, len)| len).sum::<u64>(), (1 << 40) - (1 << 30));
    }
}
