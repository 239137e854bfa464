use std::io::{Cursor, Write};

use flate2::{Compression, write::GzEncoder};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::arch::fixed::{Parts, Uart, Virtio, VirtioMmio};
use crate::arch::irqchip::Mode;
use crate::arch::tables::Tables;

fn memory(mib: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(RAM_START), mib << 20)]).unwrap()
}

/// An Image with these fields and `len` ascending bytes.
fn image(text_offset: u64, image_size: u64, flags: u64, len: usize) -> Vec<u8> {
    let mut image: Vec<u8> = (0..len).map(|at| at as u8).collect();
    for (at, value) in [(8, text_offset), (16, image_size), (24, flags)] {
        image[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    image[56..60].copy_from_slice(b"ARM\x64");
    image
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zboot(payload: &[u8], compression: &[u8]) -> Vec<u8> {
    let mut zboot = vec![0; 128];
    zboot[..2].copy_from_slice(b"MZ");
    zboot[4..8].copy_from_slice(b"zimg");
    zboot[8..12].copy_from_slice(&128u32.to_le_bytes());
    zboot[12..16].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    zboot[24..24 + compression.len()].copy_from_slice(compression);
    zboot.extend_from_slice(payload);
    zboot
}

fn tables() -> Tables {
    let virtio = Virtio::Mmio(vec![VirtioMmio { base: 0xa00_0000, size: 0x1000, gsi: 2 }]);
    Tables {
        parts: Parts {
            cpus: 2,
            irqchip: Mode::Gicv3,
            uart: Uart::default(),
            virtio,
            vmgenid: Some(super::super::layout::VMGENID),
        },
    }
}

fn boot(memory: &GuestMemoryMmap, kernel: Vec<u8>, initrd: Option<Vec<u8>>) -> Result<Entry, Error> {
    boot_by(None, memory, kernel, initrd)
}

fn boot_by(
    protocol: Option<Protocol>,
    memory: &GuestMemoryMmap,
    kernel: Vec<u8>,
    initrd: Option<Vec<u8>>,
) -> Result<Entry, Error> {
    let tables = tables();
    let request = BootRequest { name: "k", cmdline: "console=ttyS0", protocol, tables: Some(&tables) };
    let mut initrd = initrd.map(Cursor::new);
    load(memory, &mut Cursor::new(kernel), initrd.as_mut(), &request)
}

#[test]
fn an_image_is_the_same_in_every_form() {
    let plain = image(0x8_0000, 3 << 20, 0b1010, 2_000_001);
    for kernel in [plain.clone(), gzip(&plain), zboot(&gzip(&plain), b"gzip")] {
        let memory = memory(64);
        let entry = boot(&memory, kernel, Some(vec![7; 100_000])).unwrap();
        assert_eq!(entry, Entry { pc: KERNEL + 0x8_0000, fdt: FDT });
        let mut there = vec![0; plain.len()];
        memory.read_slice(&mut there, GuestAddress(entry.pc)).unwrap();
        assert!(there == plain);
        let mut tree = [0; 4];
        memory.read_slice(&mut tree, GuestAddress(FDT)).unwrap();
        assert_eq!(tree, [0xd0, 0x0d, 0xfe, 0xed]);
        let initrd = (RAM_START + (64 << 20) - 100_000) & !0xffff;
        assert_eq!(memory.read_obj::<u8>(GuestAddress(initrd + 99_999)).unwrap(), 7);
    }
}

#[test]
fn what_is_no_kernel_or_does_not_fit_is_refused() {
    let refused = |kernel: Vec<u8>, initrd| boot(&memory(8), kernel, initrd).unwrap_err();
    assert!(matches!(refused(b"\x7fELF".to_vec(), None), Error::NotAKernel { .. }));
    assert!(matches!(refused(vec![], None), Error::NotAKernel { .. }));
    let bzimage = [&b"MZ"[..], &[0; 0x200], b"HdrS", &[0; 100]].concat();
    assert!(matches!(refused(bzimage, None), Error::OfX86));
    assert!(matches!(refused(gzip(&[0; 100]), None), Error::NotAKernel { .. }));
    assert!(matches!(refused(gzip(&image(0, 0, 0, 4096))[..60].to_vec(), None), Error::Malformed(_)));
    assert!(matches!(refused(zboot(b"x", b"lzma"), None), Error::Malformed(_)));
    assert!(matches!(refused(image(0, 1 << 20, 1, 4096), None), Error::Malformed(_)));
    assert!(matches!(refused(image(2 << 20, 1 << 20, 0, 4096), None), Error::Malformed(_)));
    assert!(matches!(refused(image(0, 7 << 20, 0, 4096), None), Error::Place { .. }));
    assert!(matches!(refused(image(0, u64::MAX, 0, 4096), None), Error::Place { .. }));
    // Its header claims a small size.
    assert!(matches!(refused(gzip(&image(0, 1 << 20, 0, 7 << 20)), None), Error::Place { .. }));
    let initrd = refused(image(0, 4 << 20, 0, 4096), Some(vec![0; 3 << 20]));
    assert!(matches!(initrd, Error::Load(load::Error::InitrdTooLarge { .. })), "{initrd}");
    assert!(matches!(boot(&memory(2), image(0, 0, 0, 64), None), Err(Error::TooLittleMemory)));
}

#[test]
fn a_flat_binary_has_its_device_tree_behind_it() {
    let flat =
        |memory: &GuestMemoryMmap, kernel, initrd| boot_by(Some(Protocol::Flat), memory, kernel, initrd);
    for initrd in [None, Some(vec![7; 100_000])] {
        let (memory, kernel) = (memory(64), vec![0xd5; 3_000_001]);
        let entry = flat(&memory, kernel.clone(), initrd).unwrap();
        assert_eq!(entry, Entry { pc: KERNEL + 0x8_0000, fdt: RAM_START + (62 << 20) });
        let mut there = vec![0; kernel.len() + 1];
        memory.read_slice(&mut there, GuestAddress(entry.pc)).unwrap();
        assert!(there[..kernel.len()] == kernel && there[kernel.len()] == 0);
        let mut tree = [0; 4];
        memory.read_slice(&mut tree, GuestAddress(entry.fdt)).unwrap();
        assert_eq!(tree, [0xd0, 0x0d, 0xfe, 0xed]);
    }
    let refused = |mib, len, initrd: Option<usize>| {
        flat(&memory(mib), vec![1; len], initrd.map(|len| vec![7; len])).unwrap_err()
    };
    assert!(matches!(refused(8, 0, None), Error::Empty));
    assert!(matches!(refused(8, 6 << 20, None), Error::Place { .. }), "it ends beyond RAM");
    assert!(matches!(refused(8, 5 << 20, None), Error::Place { .. }), "no room for the tree");
    assert!(matches!(refused(8, 1 << 20, Some(4 << 20)), Error::Place { .. }), "no room beside the initrd");
    // Without a header it is not an Image.
    assert!(matches!(boot(&memory(8), vec![1; 4096], None), Err(Error::NotAKernel { .. })));
}
