//! The files of a snapshot: the list of points, a map, a state, and a working set; and the record of
//! a live update. They may be manipulated.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vellum_migration::live_update;
use vellum_migration::snapshot::layer::{Layers, Reader, sum};
use vellum_migration::snapshot::manifest::{self, Manifest};
use vellum_migration::snapshot::state;
use vellum_migration::snapshot::working_set::WorkingSet;
use vellum_sys::mmap::{PAGE_SIZE, memfd};

/// The number of the machine's pages.
const PAGES: u64 = 16;

fn file(bytes: &[u8], len: u64) -> File {
    let file = memfd(c"fuzz", len, None).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// The target.
pub fn snapshot(data: &[u8]) {
    if let Ok(manifest) = Manifest::parse(data, manifest::NAME) {
        for number in [None, Some(0), Some(u32::MAX)] {
            if let Ok(chain) = manifest.chain(number) {
                assert!(chain[0].full && !chain[1..].iter().any(|point| point.full));
            }
        }
        assert_eq!(Manifest::parse(&manifest.bytes(), manifest::NAME).unwrap(), manifest);
    }
    if let Ok((machine, sections)) = state::parse(data, "state-0") {
        let written = state::bytes(&machine, &sections).unwrap();
        assert_eq!(state::parse(&written, "state-0").unwrap(), (machine, sections));
    }
    if let Ok(list) = live_update::parse(data, 0..1 << 40) {
        let bytes = serde_json::to_vec(&list).unwrap();
        assert_eq!(live_update::parse(&bytes, 0..1 << 40), Ok(list));
    }
    let record = file(data, data.len() as u64);
    if let Ok(list) = live_update::read(&record) {
        list.machines.iter().for_each(|saved| drop(saved.files(&record)));
    }
    // As it is, and with a correct checksum.
    let summed = [data, &sum(data).to_le_bytes()].concat();
    for bytes in [data, &summed] {
        if let Ok(set) = WorkingSet::parse(bytes, PAGES) {
            assert!(set.firsts.iter().all(|first| *first < PAGES) && set.bytes() == bytes);
        }
    }
    let entries = &data[..data.len().min(PAGES as usize * 8)];
    let map = file(entries, PAGES * 8);
    let mut whole = entries.to_vec();
    whole.resize(PAGES as usize * 8, 0);
    let ram = file(data, (PAGES * PAGE_SIZE).max(data.len() as u64));
    ram.set_len(PAGES * PAGE_SIZE).unwrap();
    let Ok(reader) = Reader::new(ram, &map, "0", PAGES, sum(&whole)) else { return };
    let _ = reader.verify();
    let layers = Layers(vec![reader]);
    let (mut at, mut buffer) = (0, vec![0; (PAGES * PAGE_SIZE) as usize]);
    while let Some((run, from)) = layers.next(at..PAGES) {
        assert!(run.start >= at && !run.is_empty() && run.end <= PAGES);
        at = run.end;
        if let Some(layer) = from {
            let _ = layer.read(run.clone(), &mut buffer[..((run.end - run.start) * PAGE_SIZE) as usize]);
        }
    }
}
