use std::io::Write;
use std::sync::Arc;

use super::*;
use vellum_kvm::memory::Slot;
use vellum_sys::mmap::{Mapping, Source};

const PAGES: u64 = 700;

/// Two memslots of one mapping, as in a machine with a hole.
fn slots() -> [Slot; 2] {
    let mapping = Arc::new(Mapping::new(PAGES * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
    let cut = 600 * PAGE_SIZE;
    [
        Slot::new(0, 0, &mapping, 0..cut).unwrap(),
        Slot::new(1, 1 << 32, &mapping, cut..PAGES * PAGE_SIZE).unwrap(),
    ]
}

fn file() -> File {
    vellum_sys::mmap::memfd(c"layer", 0, None).unwrap()
}

fn put(slot: &Slot, page: u64, byte: u8) {
    slot.mapping().copy_from(slot.offset() + page * PAGE_SIZE, &[byte; PAGE]);
}

/// Both files of a layer, and the result.
fn written(slots: &[Slot; 2], runs: &[(usize, Range<u64>)]) -> (File, File, Written) {
    let (ram, map) = (file(), file());
    let mut writer = Writer::new(ram.try_clone().unwrap(), slots).unwrap();
    for (region, run) in runs {
        writer.write(*region, &slots[*region], run.clone()).unwrap();
    }
    let written = writer.finish(&map).unwrap();
    (ram, map, written)
}

fn reader((ram, map, written): &(File, File, Written), number: u32) -> Result<Reader, Error> {
    Reader::new(ram.try_clone().unwrap(), map, &number.to_string(), PAGES, written.map_crc)
}

#[test]
fn pages_come_back_from_the_newest_layer_that_has_them() {
    let slots = slots();
    (0..300).for_each(|page| put(&slots[0], page, 1 + (page % 100) as u8));
    put(&slots[1], 99, 0x99);
    let old = written(&slots, &[(0, 0..400), (1, 99..100)]);
    assert_eq!(old.2, Written { pages: PAGES, present: 301, zero: 100, map_crc: old.2.map_crc });
    put(&slots[0], 5, 0);
    put(&slots[0], 6, 0x66);
    let new = written(&slots, &[(0, 5..7)]);
    let layers = Layers(vec![reader(&old, 0).unwrap(), reader(&new, 1).unwrap()]);
    let mut there = vec![0xee; (PAGES * PAGE_SIZE) as usize];
    let (mut at, mut told) = (0, 0);
    while let Some((run, layer)) = layers.next(at..PAGES) {
        let bytes = &mut there[(run.start * PAGE_SIZE) as usize..(run.end * PAGE_SIZE) as usize];
        match layer {
            Some(layer) => layer.read(run.clone(), bytes).unwrap(),
            None => bytes.fill(0),
        }
        told += run.end - run.start;
        at = run.end;
    }
    assert_eq!(told, 401);
    for page in 0..PAGES {
        let expected = match page {
            5 => 0,
            6 => 0x66,
            0..300 => 1 + (page % 100) as u8,
            300..400 => 0,
            699 => 0x99,
            _ => 0xee,
        };
        let found = &there[(page * PAGE_SIZE) as usize..][..PAGE];
        assert!(found.iter().all(|byte| *byte == expected), "page {page}: {} for {expected}", found[0]);
    }
}

#[test]
fn a_page_that_has_become_zero_takes_no_space() {
    let slots = slots();
    (0..256).for_each(|page| put(&slots[0], page, 7));
    let (ram, map) = (file(), file());
    let mut writer = Writer::new(ram.try_clone().unwrap(), &slots).unwrap();
    assert_eq!(writer.write(0, &slots[0], 0..256).unwrap(), 256 * PAGE_SIZE);
    (0..128).for_each(|page| put(&slots[0], page, 0));
    assert_eq!(writer.write(0, &slots[0], 0..128).unwrap(), 0);
    let told = writer.finish(&map).unwrap();
    assert_eq!((told.present, told.zero), (128, 128));
    let mut begin = vec![1; 128 * PAGE];
    ram.read_exact_at(&mut begin, 0).unwrap();
    assert!(begin.iter().all(|byte| *byte == 0));
    use std::os::unix::fs::MetadataExt;
    assert_eq!(ram.metadata().unwrap().blocks() * 512, 128 * PAGE_SIZE);
}

#[test]
fn damage_is_named_with_file_and_offset() {
    let slots = slots();
    (0..10).for_each(|page| put(&slots[0], page, 3));
    let good = written(&slots, &[(0, 0..10)]);
    let layer = reader(&good, 4).unwrap();
    let mut bytes = vec![0; 10 * PAGE];
    layer.read(0..10, &mut bytes).unwrap();
    good.0.write_all_at(&[4], 7 * PAGE_SIZE + 5).unwrap();
    let said = layer.read(0..10, &mut bytes).unwrap_err().to_string();
    assert_eq!(
        said,
        "ram-4, byte 28672: page 7 of the machine is not the one that was written; it is damaged"
    );
    good.1.write_all_at(&[9], 20).unwrap();
    let said = reader(&good, 4).unwrap_err().to_string();
    assert!(said.starts_with("map-4, byte 0: its sum is"), "{said}");
    (&good.1).write_all(&[0; 8]).unwrap();
    good.1.set_len(PAGES * ENTRY - 1).unwrap();
    assert!(reader(&good, 4).unwrap_err().to_string().contains("map-4, byte 5599: it has 5599 bytes"));
    good.0.set_len(PAGES * PAGE_SIZE - 1).unwrap();
    assert!(reader(&good, 4).unwrap_err().to_string().contains("ram-4"));
    // A correct checksum over invalid entries.
    let (ram, map) = (file(), file());
    ram.set_len(PAGES * PAGE_SIZE).unwrap();
    let entries: Vec<u8> =
        (0..PAGES).flat_map(|page| if page == 3 { 5u64 << 32 } else { 0 }.to_le_bytes()).collect();
    map.write_all_at(&entries, 0).unwrap();
    let said = Reader::new(ram, &map, "0", PAGES, sum(&entries)).unwrap_err().to_string();
    assert!(said.starts_with("map-0, byte 24: 0x500000000 is no entry"), "{said}");
}

/// Checksums are read with their pages.
#[test]
fn a_map_that_becomes_shorter_is_named() {
    let slots = slots();
    (0..10).for_each(|page| put(&slots[0], page, 3));
    let good = written(&slots, &[(0, 0..10)]);
    let layer = reader(&good, 4).unwrap();
    good.1.set_len(5 * ENTRY).unwrap();
    let said = layer.read(0..10, &mut vec![0; 10 * PAGE]).unwrap_err().to_string();
    assert_eq!(said, "map-4, byte 0: it has become shorter; it is damaged");
    layer.read(0..5, &mut vec![0; 5 * PAGE]).unwrap();
}

/// A manifest may state any number of pages, and a sparse file may have any size.
#[test]
fn a_machine_whose_maps_would_take_all_memory_is_refused() {
    check_room("manifest.json", 1 << 18).unwrap();
    for pages in [1 << 40, u64::MAX / 4096, u64::MAX] {
        let error = check_room("manifest.json", pages).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("manifest.json: it tells of a machine of {pages} pages: it takes")),
            "{error}"
        );
    }
}
