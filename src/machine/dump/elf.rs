//! The file format for crash(8), makedumpfile(8), drgn and GDB: a 64-bit ELF core (elf(5)) with a
//! segment of notes and a segment for each range of RAM. The kernel's own /proc/vmcore has the same
//! form.

use vellum_kvm::arch::core::MACHINE;
use vellum_sys::mmap::PAGE_SIZE;

const HEADER: u64 = 64;
const SEGMENT: u64 = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_WRITE_EXECUTE: u32 = 7;
/// NT_PRSTATUS, in notes named `CORE`.
const PRSTATUS: u32 = 1;

/// A contiguous range of RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Its guest-physical address.
    pub physical: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The layout of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Everything before the first byte of memory.
    pub head: Vec<u8>,
    /// The file offset of each range.
    pub offsets: Vec<u64>,
    /// The length of the file in bytes.
    pub bytes: u64,
}

/// The notes: an NT_PRSTATUS for each vCPU, and `vmcoreinfo`, which is a complete note.
pub fn notes(statuses: &[Vec<u8>], vmcoreinfo: Option<&[u8]>) -> Vec<u8> {
    let mut notes = Vec::new();
    for status in statuses {
        [5, status.len() as u32, PRSTATUS].iter().for_each(|word| notes.extend(word.to_le_bytes()));
        notes.extend(b"CORE\0\0\0\0");
        notes.extend(status);
        notes.resize(notes.len().next_multiple_of(4), 0);
    }
    notes.extend(vmcoreinfo.into_iter().flatten());
    notes.resize(notes.len().next_multiple_of(4), 0);
    notes
}

/// Lays out a file with `stretches`. `direct` is the kernel's virtual address of physical address
/// 0, if known.
pub fn layout(notes: &[u8], stretches: &[Stretch], direct: Option<u64>) -> Layout {
    let segments = stretches.len() as u64 + 1;
    let at = HEADER + SEGMENT * segments;
    let mut offset = (at + notes.len() as u64).next_multiple_of(PAGE_SIZE);
    let mut head = Vec::new();
    // e_ident: 64 bits, little-endian, version 1. Then ET_CORE.
    head.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    head.extend(4u16.to_le_bytes());
    head.extend(MACHINE.to_le_bytes());
    head.extend(1u32.to_le_bytes());
    // Offsets of entry, segments and sections; flags; sizes and counts.
    [0, HEADER, 0].iter().for_each(|word: &u64| head.extend(word.to_le_bytes()));
    head.extend(0u32.to_le_bytes());
    [HEADER as u16, SEGMENT as u16, segments as u16, 0, 0, 0]
        .iter()
        .for_each(|half| head.extend(half.to_le_bytes()));
    let mut segment = |kind: u32, flags: u32, words: [u64; 5]| {
        head.extend(kind.to_le_bytes());
        head.extend(flags.to_le_bytes());
        // Offset, virtual address, physical address, size in the file and in memory. The alignment
        // is 0: crash recognizes this kind of dump by it.
        words.iter().for_each(|word| head.extend(word.to_le_bytes()));
        head.extend(0u64.to_le_bytes());
    };
    segment(PT_NOTE, 0, [at, 0, 0, notes.len() as u64, notes.len() as u64]);
    let mut offsets = Vec::new();
    for Stretch { physical, bytes } in stretches {
        let address = direct.map_or(0, |direct| direct.wrapping_add(*physical));
        segment(PT_LOAD, READ_WRITE_EXECUTE, [offset, address, *physical, *bytes, *bytes]);
        offsets.push(offset);
        offset += bytes;
    }
    head.extend(notes);
    Layout { head, offsets, bytes: offset }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_follow_each_other_at_pages() {
        let stretches =
            [Stretch { physical: 0, bytes: 0xa0000 }, Stretch { physical: 1 << 32, bytes: 1 << 20 }];
        let notes = notes(&[vec![7; 336], vec![8; 336]], Some(&[1, 2, 3]));
        assert_eq!(notes.len(), 2 * (12 + 8 + 336) + 4);
        let layout = layout(&notes, &stretches, Some(0xffff_8880_0000_0000));
        assert_eq!(layout.offsets, [0x1000, 0xa1000]);
        assert_eq!(
            (layout.bytes, layout.head.len() as u64),
            (0x1a1000, HEADER + 3 * SEGMENT + notes.len() as u64)
        );
        let word = |at: usize| u64::from_le_bytes(layout.head[at..at + 8].try_into().unwrap());
        // The second range's virtual and physical address.
        let third = (HEADER + 2 * SEGMENT) as usize;
        assert_eq!((word(third + 16), word(third + 24)), (0xffff_8881_0000_0000, 1 << 32));
    }
}
