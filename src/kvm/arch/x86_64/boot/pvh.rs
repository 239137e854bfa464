//! PVH (xen/include/public/arch-x86/hvm/start_info.h): an ELF file entered in 32-bit protected
//! mode, with the address of `hvm_start_info` in EBX.

use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{ByteValued, GuestMemoryBackend};

use super::{
    BootRequest, Entry, Error, INFO, Input, LINUX_CMDLINE, LISTS, Placement, Source, elf::Elf, memory_map,
};

/// `XEN_HVM_START_MAGIC_VALUE`: "xEn3".
const MAGIC: u32 = 0x336e_c578;
/// The memory map, after the list of modules, which has one entry.
const MEMORY_MAP: u64 = LISTS + 0x40;

pub(super) fn load<M: GuestMemoryBackend>(
    placement: &mut Placement<'_, M>,
    kernel: &mut Input<'_, impl Source>,
    elf: &Elf,
    entry: u32,
    initrd: Option<Input<'_, impl Source>>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    if !elf.holds(entry.into()) {
        return Err(Error::Malformed(format!("its PVH entry {entry:#x} lies outside its segments")));
    }
    elf.load(placement, kernel)?;
    let initrd = placement.load_initrd(initrd, 1 << 32, None)?;
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        cmdline_paddr: placement.write_cmdline(request.cmdline, LINUX_CMDLINE - 1)?,
        rsdp_paddr: request.tables.map_or(0, |tables| tables.rsdp),
        memmap_paddr: MEMORY_MAP,
        ..hvm_start_info::default()
    };
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.end - initrd.start,
            ..hvm_modlist_entry::default()
        };
        placement.write(LISTS, module.as_slice())?;
        (info.nr_modules, info.modlist_paddr) = (1, LISTS);
    }
    for (i, entry) in (0u64..).zip(memory_map(placement.memory, request.reserved())) {
        let entry = hvm_memmap_table_entry {
            addr: entry.start,
            size: entry.size,
            type_: entry.kind as u32,
            ..hvm_memmap_table_entry::default()
        };
        placement.write(MEMORY_MAP + i * size_of::<hvm_memmap_table_entry>() as u64, entry.as_slice())?;
        info.memmap_entries += 1;
    }
    placement.write(INFO, info.as_slice())?;
    Ok(Entry::Protected { eip: entry, eax: 0, ebx: INFO as u32 })
}
