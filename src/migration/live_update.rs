//! What a live update of the host's kernel preserves: the memfd of each machine's RAM, and one more
//! with everything else, the *record*. [`preserving`](super::preserving) has the machine's side.
//!
//! ```text
//! token 0     the record
//! token N     the RAM of machine N, from 1
//! ```
//!
//! The record begins with a line of text: its format, its version, the checksum and the length of
//! the list of machines. The list follows as JSON, and then the files of each machine, at the places
//! that the list has for them.
//!
//! A token says nothing about the file behind it. So the position of each memfd of RAM, which a
//! kernel preserves too, is set to a random number, and the list has that number.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::snapshot::layer::{ENTRY, sum};
use crate::snapshot::manifest::Point;
use crate::snapshot::{Error, Files};
use vellum_control::ChildDevice;
use vellum_sys::mmap::{PAGE_SIZE, memfd};
use vellum_sys::{file, pagemap, random};

/// The name of the kernel's session for what the user calls `name`. It has the version, so that a
/// Vellum of another version does not retrieve it: a session that is retrieved and closed is lost.
pub fn session(name: &str) -> String {
    format!("{name}.v{VERSION}")
}

/// The token of the record.
pub const RECORD: u64 = 0;

/// The token of a machine's RAM.
pub fn token(machine: usize) -> u64 {
    machine as u64 + 1
}

/// The name in messages of the record.
const NAME: &str = "the record of the live update";

/// The first word of the record.
const FORMAT: &str = "vellum-live-update";

/// The version of the format. It is the only one that is read.
pub const VERSION: u32 = 1;

/// The longest first line, and the longest list, in bytes.
const MAX_LINE: usize = 100;
const MAX_LIST: usize = 64 << 20;

/// The machines of a live update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// The version of the Vellum that saved them.
    pub vellum: String,
    /// The machines, by their tokens.
    pub machines: Vec<Saved>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// Its name.
    pub name: String,
    /// The words that its process was started with.
    pub line: Vec<String>,
    /// What its process had of the host.
    pub host: HostSide,
    /// The position of the file of its RAM.
    pub position: u64,
    /// What is in its files.
    pub point: Point,
    /// Where its files are: the content of each, one piece after another.
    pub files: [Vec<Piece>; 3],
}

/// A part of a file that has content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The offset in the record.
    pub at: u64,
    /// The offset in the file.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// What a machine's process had of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSide {
    /// Where its serial port led, as in `--serial`.
    pub serial: String,
    /// As in `--sandbox`.
    pub sandbox: String,
    /// The user and group that root was dropped for.
    pub user: Option<(u32, u32)>,
    /// The remaining time limit in milliseconds.
    pub limit_ms: Option<u64>,
    /// The file for its result.
    pub result: Option<PathBuf>,
    /// Whether its memory is locked.
    pub lock: bool,
    /// The number of entries of each vCPU's dirty ring.
    pub dirty_ring: Option<u32>,
    /// The CPU of the host that each vCPU is pinned to.
    pub pins: Option<Vec<usize>>,
    /// Its virtio devices.
    pub devices: Vec<ChildDevice>,
}

/// Opens the memfd `ram` anew, with a random number as its position. Returns both.
///
/// # Errors
/// The host has no random numbers, or no descriptor is left.
pub fn marked(ram: &File) -> io::Result<(File, u64)> {
    let mut bytes = [0; 8];
    random::fill(&mut bytes)?;
    // The machine uses the position of its own open file.
    let mut opened = File::options().read(true).write(true).open(file::path_of(ram))?;
    // The kernel takes a position below 2^63, wherever the file ends.
    let position = opened.seek(SeekFrom::Start(u64::from_le_bytes(bytes) >> 2))?;
    Ok((opened, position))
}

/// The parts of a file that have content.
fn content(file: &File) -> io::Result<Vec<Piece>> {
    let len = file.metadata()?.len();
    let mut pieces = Vec::new();
    pagemap::data(file, 0, len.div_ceil(PAGE_SIZE), |run| {
        let (offset, end) = (run.start * PAGE_SIZE, len.min(run.end * PAGE_SIZE));
        pieces.push(Piece { at: 0, offset, len: end - offset });
    })?;
    Ok(pieces)
}

/// Writes the record of `list` to the empty `record`. `files` are those of each machine. Their
/// pieces are added to the list.
///
/// # Errors
/// No memory is left for it.
pub fn write(record: &File, list: &mut List, files: &[Files]) -> io::Result<()> {
    let mut pieces = 0;
    for (saved, Files { ram, map, state, .. }) in list.machines.iter_mut().zip(files) {
        for (file, own) in [ram, map, state].into_iter().zip(&mut saved.files) {
            *own = content(file)?;
            pieces += own.len();
        }
    }
    // The list's length depends on the places, and these on its length: each takes 20 digits at most.
    let room = serde_json::to_vec(list)?.len() + pieces * 20;
    let mut at = (MAX_LINE + room) as u64;
    let mut buffer = vec![0; 1 << 20];
    for (saved, Files { ram, map, state, .. }) in list.machines.iter_mut().zip(files) {
        for (file, own) in [ram, map, state].into_iter().zip(&mut saved.files) {
            for piece in own {
                piece.at = at;
                for done in (0..piece.len).step_by(buffer.len()) {
                    let part = &mut buffer[..(piece.len - done).min(1 << 20) as usize];
                    file.read_exact_at(part, piece.offset + done)?;
                    record.write_all_at(part, at + done)?;
                }
                at += piece.len;
            }
        }
    }
    let bytes = serde_json::to_vec(list)?;
    let line = format!("{FORMAT} {VERSION} {:08x} {}\n", sum(&bytes), bytes.len());
    record.write_all_at(&bytes, line.len() as u64)?;
    record.write_all_at(line.as_bytes(), 0)
}

/// Reads the list of a record.
///
/// # Errors
/// It is not one, has another version, or is damaged.
pub fn read(record: &File) -> Result<List, Error> {
    let unfit = |what: String| Error::Unfit { file: NAME.into(), what };
    let io = |error: io::Error| unfit(error.to_string());
    let size = record.metadata().map_err(io)?.len();
    let mut line = vec![0; MAX_LINE.min(size as usize)];
    record.read_exact_at(&mut line, 0).map_err(io)?;
    let end = line.iter().position(|byte| *byte == b'\n').unwrap_or(0);
    let (crc, len) = parse_line(&line[..end]).map_err(unfit)?;
    let start = end as u64 + 1;
    if len > MAX_LIST || start + len as u64 > size {
        return Err(unfit(format!("a list of {len} bytes; it is damaged")));
    }
    let mut bytes = vec![0; len];
    record.read_exact_at(&mut bytes, start).map_err(io)?;
    if sum(&bytes) != crc {
        return Err(unfit("the checksum of its list is wrong; it is damaged".into()));
    }
    parse(&bytes, start + len as u64..size).map_err(unfit)
}

/// The checksum and the length of the list, from the first line.
fn parse_line(line: &[u8]) -> Result<(u32, usize), String> {
    let line = std::str::from_utf8(line).map_err(|_| "it is not one of Vellum's".to_owned())?;
    let words: Vec<&str> = line.split(' ').collect();
    let [FORMAT, version, crc, len] = words[..] else { return Err("it is not one of Vellum's".into()) };
    if version.parse() != Ok(VERSION) {
        return Err(format!("version {version}: this program reads {VERSION}"));
    }
    let crc = u32::from_str_radix(crc, 16).map_err(|error| format!("{error}; it is damaged"))?;
    Ok((crc, len.parse().map_err(|error| format!("{error}; it is damaged"))?))
}

/// Parses a list whose files are within `places` of the record.
///
/// # Errors
/// It is damaged.
pub fn parse(bytes: &[u8], places: std::ops::Range<u64>) -> Result<List, String> {
    let list: List = serde_json::from_slice(bytes).map_err(|error| format!("{error}; it is damaged"))?;
    let mut left = places.end.saturating_sub(places.start);
    for piece in list.machines.iter().flat_map(|saved| &saved.files).flatten() {
        let end = piece.at.checked_add(piece.len);
        if piece.at < places.start
            || end.is_none_or(|end| end > places.end)
            || piece.offset.checked_add(piece.len).is_none()
        {
            return Err(format!("a piece of {} bytes at {}; it is damaged", piece.len, piece.at));
        }
        // Pieces lie one after another.
        left = left.checked_sub(piece.len).ok_or("pieces that overlap; it is damaged")?;
    }
    Ok(list)
}

impl Saved {
    /// Copies of the machine's files.
    ///
    /// # Errors
    /// The record cannot be read, or no memory is left.
    pub fn files(&self, record: &File) -> io::Result<Files> {
        let copy = |pieces: &[Piece], len: u64| -> io::Result<File> {
            let file = memfd(c"vellum-live-update", len, None)?;
            let mut buffer = vec![0; 1 << 20];
            for Piece { at, offset, len } in pieces {
                for done in (0..*len).step_by(buffer.len()) {
                    let part = &mut buffer[..(len - done).min(1 << 20) as usize];
                    record.read_exact_at(part, at + done)?;
                    file.write_all_at(part, offset + done)?;
                }
            }
            Ok(file)
        };
        let [ram, map, state] = &self.files;
        // The file of pages and its map have holes for what is preserved. If all is, neither has a piece.
        let all = |each: u64| self.point.pages.saturating_mul(each);
        let (ram, map) = (copy(ram, all(PAGE_SIZE))?, copy(map, all(ENTRY))?);
        Ok(Files { ram, map, state: copy(state, 0)?, clones: Vec::new() })
    }

    /// Checks that `ram` is the file of this machine's RAM.
    ///
    /// # Errors
    /// It is another one.
    pub fn check(&self, mut ram: &File) -> Result<(), String> {
        match ram.stream_position() {
            Ok(position) if position == self.position => Ok(()),
            Ok(_) => Err("the memory that came under its token is not its own".into()),
            Err(error) => Err(format!("its memory: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use vellum_control::{Disk, WrittenPoint};

    fn saved(name: &str) -> Saved {
        let written = WrittenPoint {
            taken: 5,
            pages: 7,
            present: 1,
            zero: 0,
            map_crc: 1,
            state_bytes: 2,
            state_crc: 3,
            disks: Vec::new(),
        };
        Saved {
            name: name.into(),
            line: vec!["vellum".into(), "run".into()],
            host: HostSide { serial: "null".into(), sandbox: "on".into(), ..HostSide::default() },
            position: 77,
            point: Point::of(0, false, written),
            files: Default::default(),
        }
    }

    fn file(parts: &[(u64, &[u8])]) -> File {
        let file = memfd(c"vellum-test", 0, None).unwrap();
        for (offset, bytes) in parts {
            file.write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    fn record() -> (File, List) {
        let page = vec![9; 4096];
        let files = |state: &[u8]| Files {
            // A hole, a page and the rest of a hole.
            ram: file(&[(1 << 30, &page)]),
            map: file(&[(0, b"map")]),
            state: file(&[(0, state)]),
            clones: Vec::new(),
        };
        let mut list = List { vellum: "1".into(), machines: vec![saved("a"), saved("b")] };
        let record = memfd(c"vellum-test", 0, None).unwrap();
        write(&record, &mut list, &[files(b"one"), files(&vec![3; 3 << 20])]).unwrap();
        (record, list)
    }

    #[test]
    fn files_come_back_as_they_were_and_holes_take_nothing() {
        let (record, list) = record();
        assert_eq!(read(&record).unwrap(), list);
        assert!(record.metadata().unwrap().len() < 4 << 20);
        let Files { ram, map, state, .. } = list.machines[1].files(&record).unwrap();
        assert_eq!(ram.metadata().unwrap().len(), (1 << 30) + 4096);
        let mut bytes = vec![0; 4096];
        ram.read_exact_at(&mut bytes, 1 << 30).unwrap();
        assert_eq!(bytes, [9; 4096]);
        assert_eq!(map.metadata().unwrap().len(), 7 * ENTRY);
        let mut bytes = vec![0; 3 << 20];
        state.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 3));
    }

    /// A list in which every field has a value.
    fn full() -> List {
        let mut machine = saved("web");
        machine.host = HostSide {
            serial: "file=/a.log".into(),
            sandbox: "on".into(),
            user: Some((1, 2)),
            limit_ms: Some(3),
            result: Some("/a.json".into()),
            lock: true,
            dirty_ring: Some(4096),
            pins: Some(vec![2, 3]),
            devices: vec![ChildDevice { kind: "rng".into(), config: serde_json::json!({}) }],
        };
        machine.files[2].push(Piece { at: 4096, offset: 0, len: 2 });
        machine.point.disks.push(Disk {
            name: "disk0".into(),
            path: "/a.img".into(),
            bytes: 512,
            changed: Some(-1),
            clone_changed: None,
        });
        List { vellum: "0.1.0".into(), machines: vec![machine] }
    }

    /// A list of this version that is not read frees the memory of all guests. The version keeps other
    /// programs from retrieving it. `VELLUM_GOLDEN=PATH cargo test -p vellum-migration golden` writes the
    /// file of a new version.
    #[test]
    fn the_golden_list_is_read_and_written_as_its_version_has_it() {
        let bytes = serde_json::to_vec_pretty(&full()).unwrap();
        if let Some(path) = std::env::var_os("VELLUM_GOLDEN") {
            std::fs::write(path, &bytes).unwrap();
        }
        let golden = include_bytes!("../../tests/golden/live-update-1.json");
        assert_eq!(serde_json::from_slice::<List>(golden).expect("it is read"), full());
        let same = bytes == golden.trim_ascii_end();
        assert!(same, "the list is written otherwise: raise live_update::VERSION, and add its file");
    }

    #[test]
    fn files_of_pages_that_are_all_preserved_have_their_lengths() {
        let [ram, map] = [PAGE_SIZE, ENTRY].map(|each| memfd(c"vellum-test", 7 * each, None).unwrap());
        let files = Files { ram, map, state: file(&[(0, b"state")]), clones: Vec::new() };
        let mut list = List { vellum: "1".into(), machines: vec![saved("a")] };
        let record = memfd(c"vellum-test", 0, None).unwrap();
        write(&record, &mut list, &[files]).unwrap();
        let Files { ram, map, .. } = list.machines[0].files(&record).unwrap();
        assert_eq!([ram, map].map(|file| file.metadata().unwrap().len()), [7 * PAGE_SIZE, 7 * ENTRY]);
    }

    #[test]
    fn a_record_that_is_damaged_is_refused_with_what_is_wrong() {
        let says = |at: u64, byte: &[u8]| {
            let (record, _) = record();
            record.write_all_at(byte, at).unwrap();
            read(&record).expect_err("it is damaged").to_string()
        };
        assert!(says(0, b"x").contains("not one of Vellum's"));
        assert!(says(19, b"2").contains("version 2: this program reads 1"));
        assert!(says(60, b"\0").contains("checksum"));
        assert!(read(&file(&[])).is_err() && read(&file(&[(0, b"vellum")])).is_err());
        let (_, list) = record();
        let bytes = serde_json::to_vec(&list).unwrap();
        assert!(parse(&bytes, 0..1 << 40).is_ok());
        assert!(parse(&bytes, 0..4096).unwrap_err().contains("damaged"));
    }

    #[test]
    fn memory_is_told_apart() {
        let file = memfd(c"vellum-test", 4096, None).unwrap();
        let [(a, position), (b, _)] = [(); 2].map(|()| marked(&file).unwrap());
        let saved = Saved { position, ..saved("a") };
        assert_eq!(saved.check(&a), Ok(()));
        assert!(saved.check(&b).unwrap_err().contains("not its own"));
    }
}
