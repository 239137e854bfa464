//! 32 and 64 bit ELF files, as far as loading a kernel needs: the entry, the segments, and the PVH
//! note.
//!
//! linux-loader reads only 64-bit files, ignores `p_memsz` and reports every failure to place a
//! segment as a failed read. So the headers are read here and checked before the first byte is
//! copied.

use vm_memory::GuestMemoryBackend;

use super::{Error, Input, Placement, Source};

/// `PT_LOAD`, `PT_NOTE`, `EM_386`, `EM_X86_64` (the System V ABI).
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
/// More program headers than any kernel has.
const MAX_SEGMENTS: u16 = 256;
/// `XEN_ELFNOTE_PHYS32_ENTRY` (include/xen/interface/elfnote.h).
const PHYS32_ENTRY: u32 = 18;
/// More bytes of notes than any kernel has.
const MAX_NOTES: u64 = 1 << 20;

/// The relevant parts of an ELF file.
pub(super) struct Elf {
    /// `e_entry`.
    pub entry: u64,
    /// Whether it is a 64-bit class `EM_X86_64` file.
    pub is_64: bool,
    loads: Vec<Segment>,
    notes: Vec<Segment>,
}

struct Segment {
    offset: u64,
    file_size: u64,
    address: u64,
    memory_size: u64,
    align: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl Elf {
    /// Parses `kernel`; `None` if it is not an ELF file.
    pub fn parse(kernel: &mut Input<'_, impl Source>) -> Result<Option<Self>, Error> {
        if kernel.len < 20 || kernel.start()?[..4] != *b"\x7fELF" {
            return Ok(None);
        }
        let malformed = |what: String| Err(Error::Malformed(what));
        let mut ident = [0; 20];
        kernel.read_at("the ELF identification", 0, &mut ident)?;
        let is_64 = match (ident[4], ident[5]) {
            (1, 1) => false,
            (2, 1) => true,
            _ => return malformed("an ELF file that is not little-endian 32 or 64 bit".into()),
        };
        match (is_64, u16_at(&ident, 18)) {
            (false, EM_386) | (true, EM_X86_64) => {}
            (_, machine) => return malformed(format!("an ELF file for machine {machine}, not x86")),
        }
        let mut header = [0; 64];
        let header = &mut header[..if is_64 { 64 } else { 52 }];
        kernel.read_at("the ELF header", 0, header)?;
        let (entry, table, size, count) = if is_64 {
            (u64_at(header, 24), u64_at(header, 32), u16_at(header, 54), u16_at(header, 56))
        } else {
            let table = u64::from(u32_at(header, 28));
            (u64::from(u32_at(header, 24)), table, u16_at(header, 42), u16_at(header, 44))
        };
        let expected = if is_64 { 56 } else { 32 };
        if size != expected || count == 0 || count > MAX_SEGMENTS {
            return malformed(format!("{count} ELF program headers of {size} bytes"));
        }
        let mut bytes = vec![0; usize::from(size) * usize::from(count)];
        kernel.read_at("the ELF program headers", table, &mut bytes)?;
        let mut elf = Self { entry, is_64, loads: Vec::new(), notes: Vec::new() };
        for header in bytes.chunks_exact(usize::from(size)) {
            let segment = Segment::parse(header, is_64);
            match u32_at(header, 0) {
                PT_LOAD if segment.memory_size < segment.file_size => {
                    return malformed("an ELF segment larger in the file than in memory".into());
                }
                PT_LOAD if segment.memory_size != 0 => elf.loads.push(segment),
                PT_NOTE => elf.notes.push(segment),
                _ => {}
            }
        }
        if elf.loads.is_empty() {
            return malformed("an ELF file with nothing to load".into());
        }
        Ok(Some(elf))
    }

    /// Copies the segments to their physical addresses and returns the end of the last one. Memory
    /// of a segment beyond its bytes in the file stays zero, as guest memory is.
    pub fn load<M: GuestMemoryBackend>(
        &self,
        placement: &mut Placement<'_, M>,
        kernel: &mut Input<'_, impl Source>,
    ) -> Result<u64, Error> {
        let mut end = 0;
        for s in &self.loads {
            placement.claim("the kernel", s.address, s.memory_size)?;
            kernel.copy("an ELF segment", s.offset, s.file_size, placement.memory, s.address)?;
            end = end.max(s.address + s.memory_size);
        }
        Ok(end)
    }

    /// Whether a segment contains `address`.
    pub fn holds(&self, address: u64) -> bool {
        self.loads.iter().any(|s| address >= s.address && address - s.address < s.memory_size)
    }

    /// The 32-bit physical entry of a PVH kernel.
    pub fn pvh_entry(&self, kernel: &mut Input<'_, impl Source>) -> Result<Option<u32>, Error> {
        for note in &self.notes {
            if note.file_size > MAX_NOTES {
                return Err(Error::Malformed(format!("{} bytes of ELF notes", note.file_size)));
            }
            kernel.check("an ELF note segment", note.offset, note.file_size)?;
            let mut bytes = vec![0; note.file_size as usize];
            kernel.read_at("an ELF note segment", note.offset, &mut bytes)?;
            if let Some(entry) = find_pvh_note(&bytes, if note.align == 8 { 8 } else { 4 }) {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }
}

impl Segment {
    fn parse(header: &[u8], is_64: bool) -> Self {
        let field = |at_64: usize, at_32: usize| {
            if is_64 { u64_at(header, at_64) } else { u64::from(u32_at(header, at_32)) }
        };
        Self {
            offset: field(8, 4),
            address: field(24, 12),
            file_size: field(32, 16),
            memory_size: field(40, 20),
            align: field(48, 28),
        }
    }
}

/// Searches notes (name size, descriptor size, type, name, descriptor, each padded to `align`).
fn find_pvh_note(mut notes: &[u8], align: usize) -> Option<u32> {
    while notes.len() >= 12 {
        let (name_size, size, kind) =
            (u32_at(notes, 0) as usize, u32_at(notes, 4) as usize, u32_at(notes, 8));
        let at = 12usize.checked_add(name_size)?.checked_next_multiple_of(align)?;
        let end = at.checked_add(size)?;
        if kind == PHYS32_ENTRY && notes.get(12..12 + name_size)? == b"Xen\0" {
            // Four or eight bytes. The entry is 32-bit, so the first four suffice.
            return notes.get(at..end).filter(|d| d.len() >= 4).map(|d| u32_at(d, 0));
        }
        notes = notes.get(end.checked_next_multiple_of(align)?..)?;
    }
    None
}
