//! The list of a directory's points, as JSON that is parsed strictly.

use serde::{Deserialize, Serialize};

use super::Error;
use vellum_control::{Disk, WrittenPoint};

/// The name of the file.
pub const NAME: &str = "manifest.json";
/// The maximum size of the file in bytes.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
/// The version that is written. Version 1 has no disks and can be read.
const VERSION: u32 = 2;
/// The value of the field `format`.
const FORMAT: &str = "vellum-snapshot";

/// The points of one directory, oldest first. Numbers of merged points are not reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// The identity of the directory.
    pub chain: String,
    /// Its points, with ascending numbers.
    pub points: Vec<Point>,
}

/// One point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Its number, from 0.
    pub number: u32,
    /// When the machine was paused for it, in nanoseconds since 1970.
    pub taken: u64,
    /// Whether its files have all of its pages. If not, a page that is not in its map is in the
    /// point before.
    pub full: bool,
    /// The number of pages of the machine.
    pub pages: u64,
    /// The number of pages with content in its `ram` file.
    pub present: u64,
    /// The number of zero pages.
    pub zero: u64,
    /// The CRC32C of its `map` file.
    pub map_crc: u32,
    /// The size of its `state` file in bytes.
    pub state_bytes: u64,
    /// The CRC32C of its `state` file.
    pub state_crc: u32,
    /// How many times points were merged into it. Each merge gives it new `ram` and `map` files.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub merged: u32,
    /// The disks of its machine, which are not part of the point.
    #[serde(default)]
    pub disks: Vec<Disk>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Point {
    /// Point `number`, which has all pages if it is `full`.
    pub fn of(number: u32, full: bool, written: WrittenPoint) -> Self {
        let WrittenPoint { taken, pages, present, zero, map_crc, state_bytes, state_crc, disks } = written;
        Self { number, taken, full, pages, present, zero, map_crc, state_bytes, state_crc, merged: 0, disks }
    }

    /// The suffix of its `ram` and `map` files' names.
    pub fn label(&self) -> String {
        match self.merged {
            0 => self.number.to_string(),
            merged => format!("{}.{merged}", self.number),
        }
    }
}

impl Manifest {
    /// An empty list. `chain` identifies the directory.
    pub fn new(chain: String) -> Self {
        Self { format: FORMAT.into(), version: VERSION, chain, points: Vec::new() }
    }

    /// Parses the contents of the file `file`.
    ///
    /// # Errors
    /// It is not a manifest, has an unknown version, or is inconsistent.
    pub fn parse(bytes: &[u8], file: &str) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let unfit = |what: String| Error::Unfit { file: file.into(), what };
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|error| unfit(format!("no manifest of a snapshot: {error}")))?;
        if head.format != FORMAT {
            return Err(unfit(format!("format {:?}: {FORMAT:?} is expected", head.format)));
        }
        if !(1..=VERSION).contains(&head.version) {
            return Err(unfit(format!("version {}: this program knows 1 to {VERSION}", head.version)));
        }
        let mut manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| unfit(format!("{error}; it is damaged")))?;
        // Adding a point upgrades the manifest to this version.
        manifest.version = VERSION;
        let mut before: Option<&Point> = None;
        for point in &manifest.points {
            let number = point.number;
            let damaged = |what: &str| Err(unfit(format!("point {number} {what}; it is damaged")));
            if number == u32::MAX || point.merged == u32::MAX {
                return damaged("has a number that has no next");
            }
            if before.is_some_and(|before| before.number >= number) {
                return damaged("stands behind one that is as new or newer");
            }
            let continues = |before: &Point| (before.number + 1, before.pages) == (number, point.pages);
            if !point.full && !before.is_some_and(continues) {
                return damaged("continues one that is not there, or of another size");
            }
            if point.present.checked_add(point.zero).is_none_or(|told| told > point.pages) {
                return damaged("has more pages than its machine");
            }
            before = Some(point);
        }
        Ok(manifest)
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        bytes.push(b'\n');
        bytes
    }

    /// Point `number`, or the newest, and the points that it depends on, from the full one on.
    ///
    /// # Errors
    /// There is no such point.
    pub fn chain(&self, number: Option<u32>) -> Result<&[Point], Error> {
        let asked = number.or(self.points.last().map(|point| point.number));
        let last = self.points.iter().position(|point| Some(point.number) == asked);
        let Some(last) = last else {
            return Err(Error::NoPoint { asked: number.unwrap_or(0), there: self.numbers() });
        };
        let first = self.points[..=last].iter().rposition(|point| point.full);
        let first = first.ok_or_else(|| Error::Unfit {
            file: NAME.into(),
            what: format!("point {} has no full point before it; it is damaged", self.points[last].number),
        })?;
        Ok(&self.points[first..=last])
    }

    /// The numbers of all points, in words.
    fn numbers(&self) -> String {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for Point { number, .. } in &self.points {
            match runs.last_mut() {
                Some((_, end)) if *end + 1 == *number => *end = *number,
                _ => runs.push((*number, *number)),
            }
        }
        let run = |(first, end): &(u32, u32)| match end - first {
            0 => first.to_string(),
            _ => format!("{first} to {end}"),
        };
        match &runs[..] {
            [] => "there is none".into(),
            [(one, end)] if one == end => format!("there is {one} alone"),
            all => format!("there are {}", all.iter().map(run).collect::<Vec<_>>().join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(number: u32, full: bool) -> Point {
        Point {
            number,
            taken: 1,
            full,
            pages: 64,
            present: 3,
            zero: 2,
            map_crc: 7,
            state_bytes: 10,
            state_crc: 8,
            merged: 0,
            disks: vec![Disk {
                name: "disk0".into(),
                path: "/a.img".into(),
                bytes: 512,
                changed: Some(-1),
                clone_changed: None,
            }],
        }
    }

    fn manifest(full: &[bool]) -> Manifest {
        let points = (0..).zip(full).map(|(number, full)| point(number, *full)).collect();
        Manifest { points, ..Manifest::new("c0ffee".into()) }
    }

    #[test]
    fn what_is_written_is_read() {
        let written = manifest(&[true, false]);
        assert_eq!(Manifest::parse(&written.bytes(), NAME).unwrap(), written);
    }

    /// The first version's bytes, as committed with it.
    #[test]
    fn a_list_of_the_version_before_is_read() {
        let bytes = include_bytes!("../../../tests/golden/manifest-1.json");
        let read = Manifest::parse(bytes, NAME).unwrap();
        assert_eq!(read.points.iter().map(|point| point.full).collect::<Vec<_>>(), [true, false]);
        assert!(read.points.iter().all(|point| point.disks.is_empty()));
        let again = String::from_utf8(read.bytes()).unwrap();
        assert!(again.contains("\"version\": 2") && Manifest::parse(again.as_bytes(), NAME).unwrap() == read);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let says = |change: &dyn Fn(&mut Manifest)| {
            let mut planted = manifest(&[true, false]);
            change(&mut planted);
            Manifest::parse(&planted.bytes(), NAME).unwrap_err().to_string()
        };
        assert!(says(&|m| m.version = 3).contains("version 3: this program knows 1 to 2"));
        assert!(says(&|m| m.version = 0).contains("version 0: "));
        assert!(says(&|m| m.format = "tar".into()).contains("format \"tar\""));
        assert!(says(&|m| m.points[1].number = 4).contains("point 4 continues one that is not there"));
        assert!(
            says(&|m| (m.points[1].number, m.points[1].full) = (0, true)).contains("point 0 stands behind")
        );
        assert!(says(&|m| m.points[1].merged = u32::MAX).contains("no next"));
        assert!(says(&|m| m.points[1].pages = 65).contains("another size"));
        assert!(says(&|m| m.points[0].full = false).contains("another size"));
        assert!(says(&|m| m.points[0].zero = u64::MAX).contains("more pages than"));
        let text = String::from_utf8(manifest(&[true]).bytes()).unwrap();
        let more = text.replacen("\"version\"", "\"fan\": 1, \"version\"", 1);
        assert!(Manifest::parse(more.as_bytes(), NAME).unwrap_err().to_string().contains("fan"));
        assert!(Manifest::parse(b"{", NAME).unwrap_err().to_string().contains("no manifest"));
    }

    #[test]
    fn a_point_is_restored_from_the_full_one_before_it() {
        let all = manifest(&[true, false, true, false, false]);
        let numbers = |at: Option<u32>| -> Vec<u32> {
            all.chain(at).unwrap().iter().map(|point| point.number).collect()
        };
        assert_eq!(numbers(None), [2, 3, 4]);
        assert_eq!(numbers(Some(1)), [0, 1]);
        assert_eq!(numbers(Some(2)), [2]);
        assert!(all.chain(Some(5)).unwrap_err().to_string().contains("there are 0 to 4"));
        let mut merged = all.clone();
        merged.points.drain(2..4);
        merged.points[2].full = true;
        assert_eq!(merged.chain(None).unwrap().len(), 1);
        assert!(merged.chain(Some(2)).unwrap_err().to_string().contains("there are 0 to 1, 4"));
        assert!(manifest(&[]).chain(None).unwrap_err().to_string().contains("there is none"));
    }
}
