//! Loaders with hand-made images: no toolchain, no KVM.

use std::io::Cursor;

use linux_loader::loader::{
    bootparam::{boot_params, setup_header},
    start_info::hvm_start_info,
};
use vm_memory::{ByteValued, Bytes, GuestMemoryMmap};

use super::*;
use crate::arch::tables::Tables;

const ORIGIN: u64 = 0x10_0000;
const CODE: [u8; 4] = [0xf4, 0xeb, 0xfd, 0x90];

fn memory(bytes: usize) -> GuestMemoryMmap<()> {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap()
}

fn boot(memory: &GuestMemoryMmap<()>, kernel: &[u8], initrd: Option<&[u8]>) -> Result<Entry, Error> {
    boot_as(memory, kernel, initrd, None, "a=b")
}

fn boot_as(
    memory: &GuestMemoryMmap<()>,
    kernel: &[u8],
    initrd: Option<&[u8]>,
    protocol: Option<Protocol>,
    cmdline: &str,
) -> Result<Entry, Error> {
    let request =
        BootRequest { name: "k", cmdline, protocol, tables: Some(&Tables { rsdp: 0xe_0000, ecam: None }) };
    load(memory, &mut Cursor::new(kernel), initrd.map(Cursor::new).as_mut(), &request)
}

fn read<const N: usize>(memory: &GuestMemoryMmap<()>, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

fn word(memory: &GuestMemoryMmap<()>, at: u64) -> u32 {
    u32::from_le_bytes(read(memory, at))
}

/// A 64-bit ELF file with `code` at [`ORIGIN`], and optionally a PVH note.
fn elf64(code: &[u8], pvh: bool) -> Vec<u8> {
    let note = [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), ORIGIN as u32].map(u32::to_le_bytes);
    let note = if pvh { note.as_flattened() } else { &[] };
    let headers: u64 = 64 + 2 * 56;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2u16, 62, 1, 0] {
        file.extend(half.to_le_bytes());
    }
    for word in [ORIGIN, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    for half in [0u16, 0, 64, 56, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let mut header = |kind: u64, offset: u64, address: u64, size: u64, memory: u64, align: u64| {
        for word in [kind, offset, address, address, size, memory, align] {
            file.extend(word.to_le_bytes());
        }
    };
    let len = code.len() as u64;
    header(1, headers, ORIGIN, len, len + 0x1000, 0x1000);
    header(4, headers + len, 0, note.len() as u64, note.len() as u64, 4);
    file.extend(code);
    file.extend(note);
    file
}

/// A flat multiboot image with address fields.
fn multiboot_flat() -> Vec<u8> {
    let (at, flags) = (ORIGIN as u32, 1u32 << 16);
    let words =
        [0x1bad_b002, flags, 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags), at, at, 0, 0, at + 32];
    let mut image = words.map(u32::to_le_bytes).as_flattened().to_vec();
    image.extend(CODE);
    image
}

/// A bzImage: one setup sector beyond the first, `size` bytes of kernel for 1 MiB.
fn bzimage(size: usize) -> Vec<u8> {
    let header = setup_header {
        setup_sects: 1,
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        version: 0x20f,
        loadflags: 1,
        xloadflags: 1,
        initrd_addr_max: 0x7fff_ffff,
        cmdline_size: 2047,
        pref_address: ORIGIN,
        init_size: 0x20_0000,
        ..setup_header::default()
    };
    let mut image = vec![0; 1024];
    image[0x1f1..][..size_of::<setup_header>()].copy_from_slice(header.as_slice());
    image.resize(1024 + size, 0x90);
    image
}

#[test]
fn a_bzimage_is_entered_in_64_bit_mode_with_its_zero_page() {
    let memory = memory(8 << 20);
    let entry = boot(&memory, &bzimage(0x1000), Some(b"initrd")).unwrap();
    assert_eq!(entry, Entry::Long { rip: ORIGIN + 0x200, rsi: INFO });
    let params: boot_params = memory.read_obj(GuestAddress(INFO)).unwrap();
    let (header, rsdp) = (params.hdr, params.acpi_rsdp_addr);
    let (magic, cmdline, start, size) =
        (header.header, header.cmd_line_ptr, header.ramdisk_image, header.ramdisk_size);
    assert_eq!((magic, rsdp, header.type_of_loader), (0x5372_6448, 0xe_0000, 0xff));
    assert_eq!(&read::<4>(&memory, cmdline.into()), b"a=b\0");
    // The highest page of memory, above the kernel's init_size.
    assert_eq!((start, size), ((8 << 20) - 0x1000, 6));
    assert_eq!(&read::<6>(&memory, start.into()), b"initrd");
    let map: Vec<_> = params.e820_table[..usize::from(params.e820_entries)]
        .iter()
        .map(|e| (e.addr, e.size, e.r#type))
        .collect();
    let expected = [(0, 0x9_fc00, 1), (0x9_fc00, 0x6_0400, 2), (0x10_0000, (8 << 20) - 0x10_0000, 1)];
    assert_eq!(map, expected);
    // The identity map reaches the last 2 MiB below 4 GiB.
    let last = u64::from_le_bytes(read(&memory, PAGE_TABLES + 0x5ff8));
    assert_eq!(last, 0xffe0_0083);
}

#[test]
fn the_first_protocol_that_an_image_offers_is_taken_and_another_may_be_asked_for() {
    let memory = memory(8 << 20);
    let pvh = elf64(&CODE, true);
    let protected = Entry::Protected { eip: ORIGIN as u32, eax: 0, ebx: INFO as u32 };
    assert_eq!(boot(&memory, &pvh, None).unwrap(), protected);
    let long = Entry::Long { rip: ORIGIN, rsi: INFO };
    assert_eq!(boot_as(&memory, &pvh, None, Some(Protocol::Linux64), "").unwrap(), long);
    assert_eq!(boot(&memory, &elf64(&CODE, false), None).unwrap(), long);
    let error = boot_as(&memory, &elf64(&CODE, false), None, Some(Protocol::Pvh), "").unwrap_err();
    assert!(error.to_string().contains("entered by pvh; it offers linux64"), "{error}");
    let error = boot_as(&memory, &multiboot_flat(), None, Some(Protocol::Pvh), "").unwrap_err();
    assert!(error.to_string().contains("by pvh; it offers multiboot"), "{error}");
    let error = boot_as(&memory, &bzimage(0x1000), None, Some(Protocol::Pvh), "").unwrap_err();
    assert!(error.to_string().contains("offers linux64"), "{error}");
}

#[test]
fn pvh_describes_memory_modules_and_tables() {
    let memory = memory(8 << 20);
    boot(&memory, &elf64(&CODE, true), Some(b"mod")).unwrap();
    let info: hvm_start_info = memory.read_obj(GuestAddress(INFO)).unwrap();
    assert_eq!((info.magic, info.version, info.nr_modules, info.memmap_entries), (0x336e_c578, 1, 1, 3));
    assert_eq!(info.rsdp_paddr, 0xe_0000);
    let module = u64::from_le_bytes(read(&memory, info.modlist_paddr));
    assert_eq!(&read::<3>(&memory, module), b"mod");
    assert_eq!(u64::from_le_bytes(read(&memory, info.memmap_paddr + 24)), 0x9_fc00);
    assert_eq!(read(&memory, ORIGIN), CODE);
}

#[test]
fn multiboot_by_address_fields_and_by_elf_headers() {
    let memory = memory(8 << 20);
    let flat = Entry::Protected { eip: ORIGIN as u32 + 32, eax: 0x2bad_b002, ebx: INFO as u32 };
    assert_eq!(boot(&memory, &multiboot_flat(), Some(b"NR_CPUS=2")).unwrap(), flat);
    assert_eq!(read(&memory, ORIGIN + 32), CODE);
    assert_eq!(word(&memory, INFO) & 0x4d, 0x4d);
    assert_eq!(word(&memory, INFO + 8), 7 << 10);
    assert_eq!(&read::<6>(&memory, word(&memory, INFO + 16).into()), b"k a=b\0");
    let module = word(&memory, INFO + 24);
    assert_eq!(u64::from(word(&memory, module.into())), ORIGIN + 0x1000);
    assert_eq!(&read::<9>(&memory, ORIGIN + 0x1000), b"NR_CPUS=2");

    let header = [0x1bad_b002u32, 0, 0u32.wrapping_sub(0x1bad_b002)].map(u32::to_le_bytes);
    let elf = elf64(header.as_flattened(), false);
    let entry = boot(&memory, &elf, None).unwrap();
    assert_eq!(entry, Entry::Protected { eip: ORIGIN as u32, eax: 0x2bad_b002, ebx: INFO as u32 });
}

/// Patches `file` and returns the message with which it is refused.
fn refused(mut file: Vec<u8>, patch: impl FnOnce(&mut Vec<u8>)) -> String {
    patch(&mut file);
    boot(&memory(4 << 20), &file, None).expect_err("a hostile image was accepted").to_string()
}

fn put(at: usize, value: u64) -> impl FnOnce(&mut Vec<u8>) {
    move |file| file[at..at + 8].copy_from_slice(&value.to_le_bytes())
}

#[test]
fn hostile_elf_headers_are_refused_before_anything_is_copied() {
    let elf = || elf64(&CODE, false);
    const LOAD: usize = 64;
    assert!(refused(elf(), put(LOAD + 40, u64::MAX)).contains("wraps around"));
    assert!(refused(elf(), put(LOAD + 40, 1 << 40)).contains("not all RAM"));
    assert!(refused(elf(), put(LOAD + 40, 1)).contains("larger in the file"));
    let linked_at = |address| {
        move |file: &mut Vec<u8>| {
            put(24, address)(file);
            put(LOAD + 24, address)(file);
        }
    };
    assert!(refused(elf(), linked_at(0x7000)).contains("overlaps boot information"));
    assert!(refused(elf(), linked_at(0xf_0000)).contains("overlaps the ROM area"));
    assert!(refused(elf(), linked_at(1 << 32)).contains("not all RAM"));
    assert!(refused(elf(), linked_at(u64::MAX - 0x800)).contains("wraps around"));
    assert!(refused(elf(), put(LOAD + 8, u64::MAX)).contains("truncated"));
    assert!(refused(elf(), put(LOAD + 8, 1 << 20)).contains("truncated"));
    assert!(refused(elf(), put(32, u64::MAX - 3)).contains("truncated"));
    assert!(refused(elf(), put(24, 0x40_0000)).contains("outside its segments"));
    assert!(refused(elf(), |f| f[56] = 0).contains("0 ELF program headers"));
    assert!(refused(elf(), |f| f[18] = 183).contains("machine 183"));
    assert!(refused(elf(), |f| f[5] = 2).contains("little-endian"));
    assert!(refused(elf(), |f| f.truncate(40)).contains("truncated"));
    assert!(refused(elf64(&CODE, true), put(LOAD + 56 + 32, 1 << 40)).contains("ELF notes"));
    assert!(refused(elf64(&CODE, true), put(LOAD + 56 + 8, u64::MAX)).contains("truncated"));
}

#[test]
fn a_multiboot_image_may_lie_where_only_a_64_bit_entry_needs_room() {
    let mut image = multiboot_flat();
    for at in [12, 16, 28] {
        let address = u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) - ORIGIN as u32 + 0x8000;
        image[at..at + 4].copy_from_slice(&address.to_le_bytes());
    }
    let entry = boot(&memory(16 << 20), &image, None).unwrap();
    assert!(matches!(entry, Entry::Protected { eip, .. } if eip >> 12 == 8), "{entry:?}");
    assert!(
        refused(elf64(&CODE, false), |file| {
            put(24, 0x9000)(file);
            put(64 + 24, 0x9000)(file);
        })
        .contains("overlaps the kernel")
    );
}

#[test]
fn hostile_bzimages_and_multiboot_headers_are_refused() {
    let bz = || bzimage(0x1000);
    let header = |at: usize| 0x1f1 + at;
    // Offsets as in boot.rst: pref_address 0x258, init_size 0x260, xloadflags 0x236, setup_sects
    // 0x1f1.
    assert!(refused(bz(), put(0x258, u64::MAX - 0x100)).contains("wraps around"));
    assert!(refused(bz(), put(0x258, 0x1000)).contains("for address 0x1000"));
    assert!(refused(bz(), |f| f[0x263] = 0x7f).contains("not all RAM"));
    assert!(refused(bz(), |f| f[0x236] = 0).contains("64-bit entry"));
    assert!(refused(bz(), |f| f[header(0)] = 200).contains("real-mode part"));
    assert!(refused(bz(), |f| f.truncate(0x230)).contains("setup header"));
    // syssize, 0x1f4: the size of the protected-mode kernel divided by 16.
    assert!(refused(bz(), put(0x1f4, 0x101)).contains("protected-mode kernel"));
    assert!(refused(multiboot_flat(), |f| f[12..16].fill(0)).contains("address fields"));
    assert!(
        refused(multiboot_flat(), |f| f[20..24].copy_from_slice(&0x10_1000u32.to_le_bytes()))
            .contains("truncated")
    );
    assert!(refused(multiboot_flat(), |f| f[20..24].fill(0xff)).contains("not all RAM"));
    assert!(refused(multiboot_flat(), |f| f[28..32].fill(0)).contains("address fields"));
    assert!(refused(multiboot_flat(), |f| f[24..28].fill(0xff)).contains("not all RAM"));
    assert!(refused(multiboot_flat(), |f| f.truncate(20)).contains("cut off"));
    assert!(refused(b"#!/bin/sh\n".to_vec(), |_| ()).contains("not a kernel (it starts with [23, 21"));
    assert!(refused(Vec::new(), |_| ()).contains("not a kernel"));
    let arm = [&b"MZ"[..], &[0; 54], b"ARM\x64", &[0; 100]].concat();
    assert!(refused(arm, |_| ()).contains("a kernel for arm64"));
}

#[test]
fn what_does_not_fit_names_its_field() {
    let field = |result: Result<Entry, Error>| {
        let error = result.unwrap_err();
        (error.field().unwrap(), error.to_string())
    };
    let (name, text) = field(boot(&memory(4 << 20), &bzimage(0x1000), Some(&vec![0; 4 << 20])));
    assert_eq!(name, Field::Initrd);
    assert!(text.contains("4194304 bytes do not fit"), "{text}");
    // More memory would not help if the initrd exceeds the kernel's limit.
    let mut vast = vellum_sys::mmap::memfd(c"initrd", 3 << 30, None).unwrap();
    let request = BootRequest { name: "k", cmdline: "", protocol: None, tables: None };
    let (name, text) =
        field(load(&memory(4 << 20), &mut Cursor::new(&bzimage(0x1000)), Some(&mut vast), &request));
    assert_eq!(name, Field::Initrd);
    assert!(text.contains("3221225472 bytes") && text.contains("more memory would not help"), "{text}");
    let (name, _) = field(boot(&memory(4 << 20), &bzimage(0x1000), Some(&vec![0; 2 << 20])));
    assert_eq!(name, Field::Initrd, "the initrd would overlap the kernel's init_size");
    let long = "x".repeat(2048);
    let (name, text) = field(boot_as(&memory(4 << 20), &bzimage(0x1000), None, None, &long));
    assert_eq!(
        (name, text.contains("2048 bytes are too long for this kernel, which takes 2047")),
        (Field::Cmdline, true)
    );
    let (name, _) = field(boot_as(&memory(4 << 20), &bzimage(0x1000), None, None, "a\0b"));
    assert_eq!(name, Field::Cmdline);
    let (name, _) = field(boot(&memory(1 << 20), &bzimage(0x1000), None));
    assert_eq!(name, Field::Memory);
    let (name, text) = field(boot(&memory(2 << 20), &bzimage(0x1000), None));
    assert_eq!(name, Field::Kernel, "{text}");
}
