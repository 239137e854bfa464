//! VMCOREINFO: an ELF note with text that a Linux kernel leaves in its memory for readers of its
//! dump (Documentation/admin-guide/kdump/vmcoreinfo.rst). It is found by its first bytes, at the
//! start of a page. A note is accepted only if the guest's page tables confirm it: they must map
//! the kernel's text to the place given by the note's own values (phys_base, the address of the
//! first table). So a note of an earlier kernel, or a forged one, is skipped.
//!
//! A guest may have put anything anywhere. The length of a note is limited here, and a note costs
//! only a few page table walks.

use vellum_kvm::arch::core::IMAGE;
use vellum_kvm::arch::paging::Tables;
use vellum_sys::mmap::PAGE_SIZE;

/// The note's name with its zero and padding. Before it are three words: the lengths of name and
/// text, and type 0.
const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
const NAME_LEN: u32 = 11;
const HEAD: usize = 12 + NAME.len();
/// The start of every note's text.
const BEGINS: &[u8] = b"OSRELEASE=";
/// The maximum length of the text: the kernel keeps it in one page (VMCOREINFO_BYTES).
const MAX_NOTE: u32 = PAGE_SIZE as u32;

/// The number of bytes of a page that [`length`] looks at.
pub const LOOK: usize = HEAD + BEGINS.len() + 6;

/// The length of the note, header included, if a page with this beginning may start one.
pub fn length(start: &[u8]) -> Option<usize> {
    let word = |at: usize| Some(u32::from_le_bytes(start.get(at..at + 4)?.try_into().ok()?));
    let (name, text, kind) = (word(0)?, word(4)?, word(8)?);
    let is_one = name == NAME_LEN && kind == 0 && start.get(12..HEAD)? == NAME;
    let begins = start.get(HEAD..HEAD + BEGINS.len())? == BEGINS;
    (is_one && begins && text <= MAX_NOTE && text as usize >= BEGINS.len()).then_some(HEAD + text as usize)
}

/// A note and its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmcoreinfo {
    /// The complete note, as it goes into a dump.
    pub note: Vec<u8>,
    /// The kernel's release.
    pub release: String,
    /// The offset of the kernel's image from the address that it was linked for.
    pub phys_base: u64,
    /// The offset by which KASLR moved the kernel's addresses.
    pub kaslr: u64,
    /// The kernel's own page tables.
    pub tables: Tables,
    /// The virtual address of its text.
    pub text: u64,
}

impl Vmcoreinfo {
    /// Parses a note; `None` if a value is missing.
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

    /// Whether the kernel's own tables, and one of `current`, map its text to the place that the
    /// note's values give.
    pub fn holds(&self, current: &[Tables], read: impl Fn(u64) -> Option<u64>) -> bool {
        let place = self.text.wrapping_sub(IMAGE).wrapping_add(self.phys_base);
        let agrees = |tables: &Tables| tables.walk(self.text, &read) == Some(place);
        self.text >= IMAGE && agrees(&self.tables) && current.iter().any(agrees)
    }

    /// The virtual address that the kernel maps physical address 0 to: the start of its direct
    /// mapping, which KASLR may have moved too. `known` are physical addresses that the kernel
    /// certainly maps.
    pub fn direct_mapping(&self, known: &[u64], read: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        // It starts at a multiple of the size that a third-level entry covers
        // (arch/x86/mm/kaslr.c).
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

    /// A kernel whose addresses KASLR moved by 32 MiB, and that was loaded with its text at 16 MiB.
    const TEXT: &str = "OSRELEASE=6.1.0-test\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff83001000\n\
        SYMBOL(_stext)=ffffffff83000000\nNUMBER(phys_base)=-33554432\nNUMBER(pgtable_l5_enabled)=0\nKERNELOFFSET=2000000\n";

    /// The text is at 0x1000000, and its first table at 0x1001000.
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
