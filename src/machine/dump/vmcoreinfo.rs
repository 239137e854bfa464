//! What a Linux kernel leaves in its memory for whoever reads a dump of it: VMCOREINFO, an ELF note with text
//! (Documentation/admin-guide/kdump/vmcoreinfo.rst). It is found by its beginning, at the beginning of a page, and believed where the
//! guest's page tables say what it says: they map the kernel's text where the note's own figures (phys_base, the address of the first table)
//! have it. A note of a kernel that ran before, or one that somebody has made up, is passed over.
//!
//! A guest may have put anything anywhere: nothing here is longer than a note may be, and a note costs a few walks.

use vellum_kvm::arch::core::IMAGE;
use vellum_kvm::arch::paging::Tables;
use vellum_sys::mmap::PAGE_SIZE;

/// The note's name with its zero, its padding, and the three words before it: lengths of name and text, type 0.
const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
const NAME_LEN: u32 = 11;
const HEAD: usize = 12 + NAME.len();
/// What every text begins with.
const BEGINS: &[u8] = b"OSRELEASE=";
/// The kernel keeps the text in one page (VMCOREINFO_BYTES).
const MAX_NOTE: u32 = PAGE_SIZE as u32;

/// How much of a page's beginning [`length`] looks at.
pub const LOOK: usize = HEAD + BEGINS.len() + 6;

/// How long the note is that a page with this beginning may be the beginning of, header included.
pub fn length(start: &[u8]) -> Option<usize> {
    let word = |at: usize| Some(u32::from_le_bytes(start.get(at..at + 4)?.try_into().ok()?));
    let (name, text, kind) = (word(0)?, word(4)?, word(8)?);
    let is_one = name == NAME_LEN && kind == 0 && start.get(12..HEAD)? == NAME;
    let begins = start.get(HEAD..HEAD + BEGINS.len())? == BEGINS;
    (is_one && begins && text <= MAX_NOTE && text as usize >= BEGINS.len()).then_some(HEAD + text as usize)
}

/// A note, and what of it the page tables have confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmcoreinfo {
    /// All of it, as it goes into a dump.
    pub note: Vec<u8>,
    /// The kernel's release.
    pub release: String,
    /// By how much the kernel's image lies elsewhere than it was linked to.
    pub phys_base: u64,
    /// By how much its addresses were moved at random.
    pub kaslr: u64,
    /// The kernel's own tables.
    pub tables: Tables,
    /// The address of its text.
    pub text: u64,
}

impl Vmcoreinfo {
    /// Reads a note; `None` where it says too little.
    pub fn parse(note: &[u8]) -> Option<Self> {
        let len = length(note)?;
        let note = note.get(..len)?;
        let text = &note[HEAD..];
        let text = std::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()?;
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let hex = |key: &str| u64::from_str_radix(value(key)?.trim_start_matches("0x"), 16).ok();
        let phys_base = value("NUMBER(phys_base)")?.parse::<i64>().ok()? as u64;
        let root = hex("SYMBOL(swapper_pg_dir)").or_else(|| hex("SYMBOL(init_top_pgt)"))?;
        let levels = if value("NUMBER(pgtable_l5_enabled)") == Some("1") { 5 } else { 4 };
        Some(Self {
            note: note.to_vec(),
            release: value("OSRELEASE")?.chars().filter(|c| !c.is_control()).take(64).collect(),
            phys_base,
            kaslr: hex("KERNELOFFSET").unwrap_or(0),
            tables: Tables { root: root.wrapping_sub(IMAGE).wrapping_add(phys_base), levels },
            text: hex("SYMBOL(_stext)")?,
        })
    }

    /// Whether the kernel's own tables, and one of `current`, map its text where its figures have it.
    pub fn holds(&self, current: &[Tables], read: impl Fn(u64) -> Option<u64>) -> bool {
        let place = self.text.wrapping_sub(IMAGE).wrapping_add(self.phys_base);
        let agrees = |tables: &Tables| tables.walk(self.text, &read) == Some(place);
        self.text >= IMAGE && agrees(&self.tables) && current.iter().any(agrees)
    }

    /// The address at which the kernel sees physical address 0: the beginning of its direct mapping, which a random number may have
    /// moved too. `known` are physical addresses that it certainly maps.
    pub fn direct_mapping(&self, known: &[u64], read: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        // It begins at a multiple of what an entry of the third level covers (arch/x86/mm/kaslr.c).
        const ALIGNED: u64 = 1 << 30;
        let candidates = self.tables.upper_half(&read).into_iter();
        let candidates = candidates.map(|(at, physical)| at.wrapping_sub(physical));
        let is_it = |start: &u64| {
            let maps =
                |physical: &u64| self.tables.walk(start.wrapping_add(*physical), &read) == Some(*physical);
            start.is_multiple_of(ALIGNED) && *start < IMAGE && known.iter().all(maps)
        };
        candidates.into_iter().find(is_it)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn note(text: &str) -> Vec<u8> {
        let words = [NAME_LEN, text.len() as u32, 0].map(u32::to_le_bytes).concat();
        [&words, &NAME[..], text.as_bytes()].concat()
    }

    /// A kernel that was loaded 16 MiB higher, and whose addresses were moved by 32 MiB.
    const TEXT: &str = "OSRELEASE=6.1.0-test\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff83001000\n\
        SYMBOL(_stext)=ffffffff83000000\nNUMBER(phys_base)=-33554432\nNUMBER(pgtable_l5_enabled)=0\nKERNELOFFSET=2000000\n";

    /// The text at 0x1000000, its first table at 0x1001000.
    fn tables(root: u64) -> HashMap<u64, u64> {
        HashMap::from([
            (root + 511 * 8, 0x3003),
            (0x3000 + 510 * 8, 0x4003),
            (0x4000 + 24 * 8, 0x100_0083),
            (root + 300 * 8, 0x5003),
            (0x5000 + 7 * 8, 0x83),
        ])
    }

    #[test]
    fn a_note_is_believed_where_the_tables_say_what_it_says() {
        let info = Vmcoreinfo::parse(&note(TEXT)).unwrap();
        assert_eq!(
            (info.release.as_str(), info.kaslr, info.tables.root),
            ("6.1.0-test", 0x200_0000, 0x100_1000)
        );
        let map: HashMap<u64, u64> = tables(0x100_1000).into_iter().chain(tables(0x9000)).collect();
        let read = |at: u64| map.get(&at).copied().or(Some(0));
        let current = [Tables { root: 0x9000, levels: 4 }];
        assert!(info.holds(&current, read));
        assert!(!info.holds(&[Tables { root: 0x8000, levels: 4 }], read), "no vCPU has that text");
        assert!(
            !info.holds(&current, |at| if at >= 0x100_0000 { Some(0) } else { read(at) }),
            "its own tables do not"
        );
        let moved = TEXT.replace("-33554432", "-31457280");
        assert!(!Vmcoreinfo::parse(&note(&moved)).unwrap().holds(&current, read), "another phys_base");
        let start = info.direct_mapping(&[0x100_0000, 0x5000], read);
        assert_eq!(start, Some(0xffff_9601_c000_0000));
        assert_eq!(info.direct_mapping(&[1 << 30], read), None);
    }

    #[test]
    fn what_is_no_note_is_none() {
        let good = note(TEXT);
        assert_eq!(length(&good), Some(good.len()));
        assert_eq!(length(&good[..LOOK]), Some(good.len()));
        for at in [0, 4 + 2, 8, 12, 22, HEAD] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(length(&bad), None, "byte {at}");
        }
        for cut in 0..HEAD {
            assert_eq!(length(&good[..cut]), None);
        }
        assert!(Vmcoreinfo::parse(&good[..good.len() - 1]).is_none(), "it is cut short");
        for missing in ["_stext", "phys_base", "swapper_pg_dir"] {
            assert!(Vmcoreinfo::parse(&note(&TEXT.replace(missing, "x"))).is_none(), "{missing}");
        }
    }
}
