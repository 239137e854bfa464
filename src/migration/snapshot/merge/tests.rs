use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::snapshot::{layer::AT_ONCE, state};
use vellum_sys::mmap::PAGE_SIZE;

const PAGES: u64 = 600;

/// A directory that is removed on drop.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-merge-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    /// Adds a point with these pages, each filled with a byte.
    fn add(&self, full: bool, pages: &[(u64, u8)]) {
        let store = Store::open(&self.0).unwrap();
        let files = store.unnamed(0).unwrap();
        let mut writer = Writer::of_pages(files.ram.try_clone().unwrap(), PAGES).unwrap();
        for (page, byte) in pages {
            let run = *page..page + 1;
            writer.buffer(&run).fill(*byte);
            writer.store(run).unwrap();
        }
        let written = writer.finish(&files.map).unwrap();
        let state = state::bytes(&serde_json::json!({"kind": "pc"}), &[]).unwrap();
        files.state.write_all_at(&state, 0).unwrap();
        let point = Point {
            number: 0,
            taken: 1,
            full,
            pages: PAGES,
            present: written.present,
            zero: written.zero,
            map_crc: written.map_crc,
            state_bytes: state.len() as u64,
            state_crc: layer::sum(&state),
            merged: 0,
            disks: Vec::new(),
        };
        store.add(&files, point).unwrap();
    }

    /// The memory of a machine restored at `number`, a byte per page.
    fn read(&self, number: u32) -> Result<Vec<u8>, String> {
        let chosen = Source::open(&self.0).and_then(|source| source.choose(Some(number)));
        let layers = chosen.map_err(|error| error.to_string())?.layers.into_iter();
        let readers =
            layers.map(|(of, files)| Reader::new(files.ram, &files.map, &of.label(), PAGES, of.map_crc));
        let layers = Layers(readers.collect::<Result<_, _>>().map_err(|error| error.to_string())?);
        let (mut all, mut at) = (vec![0; PAGES as usize], 0);
        let mut buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        while let Some((run, from)) = layers.next(at..PAGES) {
            at = run.end;
            let bytes = &mut buffer[..((run.end - run.start) * PAGE_SIZE) as usize];
            bytes.fill(0);
            if let Some(layer) = from {
                layer.read(run.clone(), bytes).map_err(|error| error.to_string())?;
            }
            let (pages, _) = bytes.as_chunks::<{ PAGE_SIZE as usize }>();
            run.zip(pages).for_each(|(page, content)| all[page as usize] = content[0]);
        }
        Ok(all)
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A full point and four that continue it.
    fn chain(name: &str) -> Self {
        let dir = Self::new(name);
        let all: Vec<(u64, u8)> = (0..500).map(|page| (page, 1 + (page % 7) as u8)).collect();
        dir.add(true, &all);
        dir.add(false, &[(3, 0), (4, 0x44)]);
        dir.add(false, &[(3, 0x33), (599, 0x59), (4, 0)]);
        dir.add(false, &[(0, 0x10), (599, 0)]);
        dir.add(false, &[(1, 0x11)]);
        dir
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_merged_point_is_what_it_was_and_is_continued() {
    let dir = Dir::chain("same");
    let before: Vec<_> = (0..5).map(|point| dir.read(point).unwrap()).collect();
    let (first, point) = merge(&dir.0, Some(2)).unwrap();
    assert_eq!((first, point.number, point.full, point.merged, point.present), (0, 2, true, 1, 500));
    let kept = [
        "manifest.json",
        "map-2.1",
        "map-3",
        "map-4",
        "ram-2.1",
        "ram-3",
        "ram-4",
        "state-2",
        "state-3",
        "state-4",
    ];
    assert_eq!(dir.files(), kept);
    assert!(dir.read(1).unwrap_err().contains("there is no point 1; there are 2 to 4"));
    for point in 2..5 {
        assert!(dir.read(point).unwrap() == before[point as usize], "point {point}");
    }
    dir.add(false, &[(2, 0x22)]);
    let (first, point) = merge(&dir.0, None).unwrap();
    assert_eq!((first, point.number), (2, 5));
    assert_eq!(dir.files(), ["manifest.json", "map-5.1", "ram-5.1", "state-5"]);
    let mut expected = before[4].clone();
    expected[2] = 0x22;
    assert!(dir.read(5).unwrap() == expected);
    let said = merge(&dir.0, None).unwrap_err().to_string();
    assert!(said.ends_with("point 5 is full, and there is nothing to join it with"), "{said}");
}

/// Wherever a writer dies, either all of the old or all of the new point is there. The next writer
/// removes the rest.
#[test]
fn what_a_writer_left_that_died_changes_nothing() {
    let (dir, merged) = (Dir::chain("old"), Dir::chain("new"));
    let before = dir.read(3).unwrap();
    merge(&merged.0, Some(3)).unwrap();
    let old = dir.files();
    // Before the rename of the manifest: one or both files have their names, and then the new
    // manifest has its temporary name.
    for name in ["ram-3.1", "map-3.1", "manifest.json"] {
        let to = if name == "manifest.json" { ".manifest.json.new" } else { name };
        fs::copy(merged.0.join(name), dir.0.join(to)).unwrap();
        assert!(dir.read(3).unwrap() == before && dir.read(1).is_ok());
    }
    // After the rename: the merged points' files still have their names.
    fs::rename(dir.0.join(".manifest.json.new"), dir.0.join("manifest.json")).unwrap();
    assert!(old.iter().all(|name| dir.files().contains(name)));
    assert!(dir.read(3).unwrap() == before && dir.read(4).is_ok() && dir.read(1).is_err());
    drop(Store::open(&dir.0).unwrap());
    assert_eq!(dir.files(), merged.files());
    assert!(dir.read(3).unwrap() == before && dir.read(4).is_ok());
}

#[test]
fn nothing_is_merged_that_is_damaged_or_in_use() {
    let dir = Dir::chain("refused");
    let before = (dir.files(), dir.read(4).unwrap());
    let says = || merge(&dir.0, None).unwrap_err().to_string();
    let reader = Source::open(&dir.0).unwrap();
    assert!(
        says().ends_with("a machine is being made of it, or shows it as memory; merge it when that is over")
    );
    drop(reader);
    let writer = Store::open(&dir.0).unwrap();
    assert!(says().ends_with("another process writes a snapshot there"));
    drop(writer);
    let ram = fs::read(dir.0.join("ram-1")).unwrap();
    let mut planted = ram.clone();
    planted[4 * PAGE_SIZE as usize] ^= 1;
    fs::write(dir.0.join("ram-1"), &planted).unwrap();
    // Point 2 has its own page 4.
    merge(&dir.0, Some(1)).unwrap_err();
    assert_eq!(dir.files(), before.0);
    fs::write(dir.0.join("ram-1"), &ram).unwrap();
    assert!(dir.read(4).unwrap() == before.1);
    let none = Dir::new("none");
    merge(&none.0, None).unwrap_err();
    assert!(!none.0.exists());
}
