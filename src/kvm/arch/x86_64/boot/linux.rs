//! Linux's 64-bit boot protocol (Documentation/arch/x86/boot.rst): a bzImage, or an ELF vmlinux
//! entered the same way.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{ByteValued, GuestMemoryBackend};

use super::{
    BootRequest, Entry, Error, HIGH, INFO, Input, LINUX_CMDLINE, PAGE_TABLES, Placement, Source, elf::Elf,
    memory_map,
};

/// The offset of the setup header in a bzImage, and its magic.
const SETUP_HEADER: u64 = 0x1f1;
const HDRS: u32 = 0x5372_6448;
/// `boot_flag` of every setup header.
const BOOT_FLAG: u16 = 0xaa55;
/// Protocol 2.12: the first with `xloadflags`.
const VERSION_XLOADFLAGS: u16 = 0x020c;
/// `loadflags`: loaded at 1 MiB or above.
const LOADED_HIGH: u8 = 1;
/// `xloadflags`: there is a 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
/// `type_of_loader`: no assigned ID.
const LOADER_UNDEFINED: u8 = 0xff;
/// The offset of the 64-bit entry in the protected-mode kernel.
const ENTRY_64: u64 = 0x200;
/// The limit of an initrd if the header does not tell: the value in all kernels since protocol
/// 2.03.
const INITRD_MAX: u64 = 0x7fff_ffff;
/// Page table entries: present and writable; large page.
const PTE_PRESENT_RW: u64 = 0b11;
const PTE_LARGE: u64 = 1 << 7;

/// The setup header, if `kernel` is a bzImage.
pub(super) fn setup_header(kernel: &mut Input<'_, impl Source>) -> Result<Option<setup_header>, Error> {
    // The header must reach to the end of its magic.
    if kernel.len < 0x206 {
        return Ok(None);
    }
    let mut magic = [0; 8];
    kernel.read_at("the boot sector", 0x1fe, &mut magic)?;
    if magic[4..] != HDRS.to_le_bytes() || magic[..2] != BOOT_FLAG.to_le_bytes() {
        return Ok(None);
    }
    let mut header = setup_header::default();
    kernel.read_at("the setup header", SETUP_HEADER, header.as_mut_slice())?;
    Ok(Some(header))
}

pub(super) fn load_bzimage<M: GuestMemoryBackend>(
    placement: &mut Placement<'_, M>,
    kernel: &mut Input<'_, impl Source>,
    header: setup_header,
    initrd: Option<Input<'_, impl Source>>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    let (version, xloadflags) = (header.version, header.xloadflags);
    if version < VERSION_XLOADFLAGS || xloadflags & XLF_KERNEL_64 == 0 || header.loadflags & LOADED_HIGH == 0
    {
        let what = format!(
            "a bzImage without a 64-bit entry (boot protocol {}.{:02}, xloadflags {xloadflags:#x})",
            version >> 8,
            version & 0xff
        );
        return Err(Error::Malformed(what));
    }
    // boot.rst: 0 means 4, for very old kernels.
    let setup_sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    let setup_size = (setup_sectors + 1) * 512;
    kernel.check("the real-mode part", 0, setup_size)?;
    // In paragraphs. More bytes may follow, for example a signature.
    kernel.check("the protected-mode kernel", setup_size, u64::from(header.syssize) * 16)?;
    let size = kernel.len - setup_size;
    let start = header.pref_address;
    // The kernel writes to init_size bytes before it looks at the memory map: it decompresses
    // itself there.
    let claimed = size.max(u64::from(header.init_size));
    if start < HIGH || size <= ENTRY_64 {
        return Err(Error::Malformed(format!("a bzImage of {size} bytes for address {start:#x}")));
    }
    placement.claim("the kernel", start, claimed)?;
    kernel.copy("the protected-mode kernel", setup_size, size, placement.memory, start)?;

    let cmdline_max = match header.cmdline_size {
        0 => LINUX_CMDLINE - 1,
        size => size as usize,
    };
    let initrd_max = match header.initrd_addr_max {
        0 => INITRD_MAX,
        max => u64::from(max),
    };
    enter(placement, header, start + ENTRY_64, initrd_max, cmdline_max, initrd, request)
}

pub(super) fn load_elf<M: GuestMemoryBackend>(
    placement: &mut Placement<'_, M>,
    kernel: &mut Input<'_, impl Source>,
    elf: &Elf,
    initrd: Option<Input<'_, impl Source>>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    if !elf.is_64 {
        return Err(Error::Malformed("a 32-bit ELF file without a multiboot header or a PVH note".into()));
    }
    if !elf.holds(elf.entry) {
        return Err(Error::Malformed(format!("its entry {:#x} lies outside its segments", elf.entry)));
    }
    elf.load(placement, kernel)?;
    // A vmlinux has no setup header. These are the fields that every boot loader sets.
    let header = setup_header {
        boot_flag: BOOT_FLAG,
        header: HDRS,
        version: VERSION_XLOADFLAGS,
        ..setup_header::default()
    };
    enter(placement, header, elf.entry, INITRD_MAX, LINUX_CMDLINE - 1, initrd, request)
}

/// The common part: zero page, initrd, command line and identity page tables.
fn enter<M: GuestMemoryBackend>(
    placement: &mut Placement<'_, M>,
    header: setup_header,
    rip: u64,
    initrd_max: u64,
    cmdline_max: usize,
    initrd: Option<Input<'_, impl Source>>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    placement.claim("the boot page table", PAGE_TABLES, PAGE_TABLES_SIZE)?;
    let mut params = boot_params { hdr: header, ..boot_params::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = placement.write_cmdline(request.cmdline, cmdline_max)? as u32;
    if let Some(initrd) = placement.load_initrd(initrd, initrd_max + 1, None)? {
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    }
    params.acpi_rsdp_addr = request.tables.map_or(0, |tables| tables.rsdp);
    let map = memory_map(placement.memory, request.reserved());
    params.e820_entries = map.len() as u8;
    for (slot, entry) in params.e820_table.iter_mut().zip(&map) {
        *slot = boot_e820_entry { addr: entry.start, size: entry.size, r#type: entry.kind as u32 };
    }
    placement.write(INFO, params.as_slice())?;
    write_page_tables(placement)?;
    Ok(Entry::Long { rip, rsi: INFO })
}

/// PML4, PDPT and four page directories.
const PAGE_TABLES_SIZE: u64 = 6 * 0x1000;

/// Maps the first 4 GiB one to one with 2 MiB pages. Kernel, zero page, command line and initrd all
/// lie there.
fn write_page_tables<M: GuestMemoryBackend>(placement: &Placement<'_, M>) -> Result<(), Error> {
    // One page at a time: all six on the stack would need stack pages that nothing else uses.
    let table = |number: u64, entry: &dyn Fn(u64) -> u64| {
        let entries: [[u8; 8]; 512] = std::array::from_fn(|i| entry(i as u64).to_le_bytes());
        placement.write(PAGE_TABLES + number * 0x1000, entries.as_flattened())
    };
    table(0, &|i| if i == 0 { (PAGE_TABLES + 0x1000) | PTE_PRESENT_RW } else { 0 })?;
    table(1, &|i| if i < 4 { (PAGE_TABLES + 0x2000 + i * 0x1000) | PTE_PRESENT_RW } else { 0 })?;
    (0..4).try_for_each(|gib| table(2 + gib, &|i| (gib << 30 | i << 21) | PTE_PRESENT_RW | PTE_LARGE))
}
