//! Guest page tables, walked without a vCPU (Intel SDM vol. 3, 4.5): four or five levels of 512
//! entries.
//!
//! The guest may write anything to them. So every walk takes as many steps as there are levels, and
//! reads only through the caller.

/// Entry bits: present; page instead of table; the address.
const PRESENT: u64 = 1;
const IS_PAGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const PAGE: u64 = 1 << 12;
/// The address bits of CR3. Its low bits are flags.
pub const ROOT: u64 = ADDRESS;

/// A set of page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The guest-physical address of the root table.
    pub root: u64,
    /// The number of levels: 4 or 5.
    pub levels: u32,
}

impl Tables {
    /// Bytes of address space that an entry of `level` (1 for the last) covers.
    fn covers(level: u32) -> u64 {
        PAGE << (9 * (level - 1))
    }

    /// The physical address of `at`; `None` if it is not mapped. `read` returns the word at a
    /// physical address.
    pub fn walk(&self, at: u64, read: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        // Both halves are sign-extended. Addresses between them are not canonical.
        let unused = 64 - (12 + 9 * self.levels);
        if (at as i64) << unused >> unused != at as i64 {
            return None;
        }
        let mut table = self.root & ADDRESS;
        for level in (1..=self.levels).rev() {
            let covers = Self::covers(level);
            let entry = read(table + at / covers % 512 * 8)?;
            if entry & PRESENT == 0 {
                return None;
            }
            if level == 1 || entry & IS_PAGE != 0 && level <= 3 {
                return Some(entry & ADDRESS & !(covers - 1) | at & (covers - 1));
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// For each entry of the root table in the upper half: the lowest linear address mapped through
    /// its first present entries, and its physical address. An entry whose first tables lead
    /// nowhere is skipped.
    pub fn upper_half(&self, read: impl Fn(u64) -> Option<u64>) -> Vec<(u64, u64)> {
        let covers = Self::covers(self.levels);
        let unused = 64 - (12 + 9 * self.levels);
        let sign = |at: u64| ((at << unused) as i64 >> unused) as u64;
        let first = |index: u64| {
            let (mut table, mut at) = (self.root & ADDRESS, 0);
            for level in (1..=self.levels).rev() {
                let here = if level == self.levels { index..index + 1 } else { 0..512 };
                let entries = here.filter_map(|index| Some((index, read(table + index * 8)?)));
                let (index, entry) = entries.into_iter().find(|(_, entry)| entry & PRESENT != 0)?;
                at += index * Self::covers(level);
                if level == 1 || entry & IS_PAGE != 0 && level <= 3 {
                    return Some((sign(at), entry & ADDRESS & !(Self::covers(level) - 1)));
                }
                table = entry & ADDRESS;
            }
            None
        };
        debug_assert!(covers.is_power_of_two());
        (256..512).filter_map(first).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Tables that map 0xffff888000000000 to 0 with a 1 GiB page, and 0xffffffff81000000 to
    /// 0x2000000 with a 2 MiB and a 4 KiB page.
    fn tables() -> HashMap<u64, u64> {
        HashMap::from([
            (0x1000 + 273 * 8, 0x2003),
            (0x2000, 0x83),
            (0x1000 + 511 * 8, 0x3003),
            (0x3000 + 510 * 8, 0x4003),
            (0x4000 + 8 * 8, 0x200_0083),
            (0x4000 + 9 * 8, 0x5003),
            (0x5000, 0x8000_0000_0700_0063),
        ])
    }

    #[test]
    fn pages_of_every_size_are_found() {
        let map = tables();
        let read = |at: u64| map.get(&at).copied().or(Some(0));
        let tables = Tables { root: 0x1fff, levels: 4 };
        for (at, physical) in [
            (0xffff_8880_0000_1234, Some(0x1234)),
            (0xffff_8880_3fff_ffff, Some(0x3fff_ffff)),
            (0xffff_8880_4000_0000, None),
            (0xffff_ffff_8112_3456, Some(0x212_3456)),
            (0xffff_ffff_8120_0fff, Some(0x700_0fff)),
            (0xffff_ffff_8120_1000, None),
            (0x1000, None),
            (0x8880_0000_1234, None),
            (0x7fff_8880_0000_1234, None),
        ] {
            assert_eq!(tables.walk(at, read), physical, "{at:#x}");
        }
        assert_eq!(
            tables.upper_half(read),
            [(0xffff_8880_0000_0000, 0), (0xffff_ffff_8100_0000, 0x200_0000)]
        );
    }

    #[test]
    fn tables_that_lead_into_themselves_end() {
        let all = |at: u64| Some(at & !0xfff | 3);
        let tables = Tables { root: 0x1000, levels: 5 };
        assert_eq!(tables.walk(0x1234, all), Some(0x1234));
        assert!(tables.upper_half(all).len() <= 256);
        assert_eq!(tables.walk(0x1234, |_| None), None);
    }
}
