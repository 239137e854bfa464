//! Multiboot 1 (the GNU Multiboot Specification 0.6.96), as kvm-unit-tests use it. An image is
//! placed by the header's address fields or by its ELF headers. It is entered in 32-bit protected
//! mode, with the information's address in EBX.

use vm_memory::GuestMemoryBackend;

use super::{
    BootRequest, CMDLINE_AREA, Entry, Error, INFO, Input, LISTS, Placement, RangeKind, Source, elf::Elf,
    memory_map,
};

/// The header lies entirely within the first 8 KiB, 4-byte aligned (3.1).
const SEARCH: u64 = 8192;
const HEADER_MAGIC: u32 = 0x1bad_b002;
/// The value of EAX at the entry (3.2).
pub const LOADER_MAGIC: u32 = 0x2bad_b002;
/// Header flags (3.1.2): those that a loader must understand. Page alignment and memory information
/// are always supported.
const MUST_UNDERSTAND: u32 = 0xffff;
const PAGE_ALIGN: u32 = 1;
const MEMORY_INFO: u32 = 1 << 1;
const ADDRESS_FIELDS: u32 = 1 << 16;
/// Flags of the information (3.3): memory, command line, modules, memory map.
const INFO_MEMORY: u32 = 1;
const INFO_CMDLINE: u32 = 1 << 2;
const INFO_MODULES: u32 = 1 << 3;
const INFO_MAP: u32 = 1 << 6;
/// The memory map, after the list of modules.
const MEMORY_MAP: u64 = LISTS + 0x40;
/// The module's command line, an empty string.
const MODULE_STRING: u64 = LISTS + 0x20;

/// A multiboot header and its offset.
pub(super) struct Header {
    at: u64,
    flags: u32,
    /// header_addr, load_addr, load_end_addr, bss_end_addr, entry_addr; zero unless the flags
    /// declare them.
    addresses: [u32; 5],
}

impl Header {
    /// Looks for a header with a correct checksum.
    pub fn find(kernel: &mut Input<'_, impl Source>) -> Result<Option<Self>, Error> {
        let mut bytes = vec![0; kernel.len.min(SEARCH) as usize];
        kernel.read_at("its first 8 KiB", 0, &mut bytes)?;
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let found = words
            .windows(3)
            .position(|w| w[0] == HEADER_MAGIC && w[0].wrapping_add(w[1]).wrapping_add(w[2]) == 0);
        let Some(i) = found else { return Ok(None) };
        let (flags, mut addresses) = (words[i + 1], [0; 5]);
        if flags & ADDRESS_FIELDS != 0 {
            let Some(fields) = words.get(i + 3..i + 8) else {
                return Err(Error::Malformed("a multiboot header cut off in its address fields".into()));
            };
            addresses.copy_from_slice(fields);
        }
        Ok(Some(Self { at: i as u64 * 4, flags, addresses }))
    }

    /// Copies the image by the header's address fields. Returns the entry and the image's end.
    fn load<M: GuestMemoryBackend>(
        &self,
        placement: &mut Placement<'_, M>,
        kernel: &mut Input<'_, impl Source>,
    ) -> Result<(u32, u64), Error> {
        let [header, load, load_end, bss_end, entry] = self.addresses.map(u64::from);
        let malformed = || Error::Malformed(format!("multiboot address fields {:08x?}", self.addresses));
        // The header lies `header - load` bytes after the first byte to load.
        let offset = header.checked_sub(load).and_then(|d| self.at.checked_sub(d)).ok_or_else(malformed)?;
        let size = match load_end {
            0 => kernel.len - offset,
            end => end.checked_sub(load).ok_or_else(malformed)?,
        };
        let end = match bss_end {
            0 => load + size,
            end if end >= load + size => end,
            _ => return Err(malformed()),
        };
        if entry < load || entry >= end {
            return Err(malformed());
        }
        placement.claim("the kernel", load, end - load)?;
        kernel.copy("the multiboot image", offset, size, placement.memory, load)?;
        Ok((entry as u32, end))
    }
}

pub(super) fn load<M: GuestMemoryBackend>(
    placement: &mut Placement<'_, M>,
    kernel: &mut Input<'_, impl Source>,
    header: &Header,
    elf: Option<&Elf>,
    initrd: Option<Input<'_, impl Source>>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    let unknown = header.flags & MUST_UNDERSTAND & !(PAGE_ALIGN | MEMORY_INFO);
    if unknown != 0 {
        return Err(Error::Malformed(format!("a multiboot header that demands features {unknown:#x}")));
    }
    let (eip, end) = match elf {
        _ if header.flags & ADDRESS_FIELDS != 0 => header.load(placement, kernel)?,
        Some(elf) if elf.holds(elf.entry) && elf.entry <= u32::MAX.into() => {
            (elf.entry as u32, elf.load(placement, kernel)?)
        }
        Some(elf) => return Err(Error::Malformed(format!("its entry {:#x} lies outside it", elf.entry))),
        None => {
            return Err(Error::Malformed("a multiboot header without addresses outside an ELF file".into()));
        }
    };
    // Modules follow the image, as with other loaders: kvm-unit-tests need them away from the top
    // of memory.
    let module = placement.load_initrd(initrd, 1 << 32, Some(end.max(super::HIGH)))?;
    let cmdline = match request.cmdline {
        "" => request.name.to_owned(),
        arguments => format!("{} {arguments}", request.name),
    };
    let cmdline = placement.write_cmdline(&cmdline, CMDLINE_AREA - 1)?;

    let map = memory_map(placement.memory, request.reserved());
    let mut entries = Vec::new();
    for entry in &map {
        // The size field does not count itself.
        entries.extend_from_slice(&20u32.to_le_bytes());
        entries.extend_from_slice(&entry.start.to_le_bytes());
        entries.extend_from_slice(&entry.size.to_le_bytes());
        entries.extend_from_slice(&(entry.kind as u32).to_le_bytes());
    }
    placement.write(MEMORY_MAP, &entries)?;

    let mut info = [0u32; 13];
    info[0] = INFO_MEMORY | INFO_CMDLINE | INFO_MAP;
    // mem_lower and mem_upper: KiB from 0, and from 1 MiB to the first hole.
    let ram = |start| {
        map.iter().find(|e| e.start == start && e.kind == RangeKind::Ram).map_or(0, |e| (e.size >> 10) as u32)
    };
    (info[1], info[2]) = (ram(0), ram(super::HIGH));
    info[4] = cmdline as u32;
    if let Some(module) = module {
        info[0] |= INFO_MODULES;
        (info[5], info[6]) = (1, LISTS as u32);
        let module = [module.start as u32, module.end as u32, MODULE_STRING as u32, 0];
        placement.write(LISTS, module.map(u32::to_le_bytes).as_flattened())?;
        placement.write(MODULE_STRING, &[0])?;
    }
    (info[11], info[12]) = (entries.len() as u32, MEMORY_MAP as u32);
    placement.write(INFO, info.map(u32::to_le_bytes).as_flattened())?;
    Ok(Entry::Protected { eip, eax: LOADER_MAGIC, ebx: INFO as u32 })
}
