//! What a task leaves in the shared directory, and reading it again without trusting it: a header of one line, and the results of its runs
//! behind it. The file appears whole or not at all; its name says which task it is of, and no two tasks have one name.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Error;
use vellum_report::{Report, json, printable};
use vellum_sys::open::{self, Kind};

/// The version of the header.
pub const VERSION: u32 = 1;

/// The largest file that is read, in bytes.
pub const LARGEST: u64 = 16 << 20;

/// Tasks in one directory: so many names are in memory at once, however many tasks there are.
pub const SHARD: u64 = 1000;

/// The first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`VERSION`].
    pub fleet: u32,
    /// The plan's digest.
    pub plan: String,
    /// Vellum's version, with its commit where it knows it.
    pub vellum: String,
    /// The task's number.
    pub index: u64,
    /// The test's name.
    pub test: String,
    /// The how manieth time, from 0.
    pub round: u64,
    /// The first seed.
    pub first: u64,
    /// How often the batch system had begun the task before.
    pub attempt: u64,
    /// The batch system's name for it.
    pub job: Option<String>,
    /// The host, as the batch system or else itself calls it.
    pub node: String,
    /// Seconds since 1970 when it began.
    pub began: f64,
    /// And when it ended.
    pub ended: f64,
    /// Its runs, in the order of their seeds; each has a result below.
    pub runs: Vec<Run>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Its seed.
    pub seed: u64,
    /// Its exit status; 128 + n for signal n.
    pub exit: i32,
}

/// Where a task's files begin: `00012/00012345-0-1a2b3c`.
pub fn stem(results: &Path, index: u64, attempt: u64) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let unique = format!("{now:x}{:x}", std::process::id());
    shard(results, index / SHARD).join(format!("{index:08}-{attempt}-{unique}"))
}

/// The directory of the tasks from `number` times [`SHARD`] on.
pub fn shard(results: &Path, number: u64) -> PathBuf {
    results.join(format!("{number:05}"))
}

/// What the name of a task's file says: the task, the attempt, and whether it is a result or the mark of one that began.
pub fn named(name: &str) -> Option<(u64, u64, bool)> {
    let (stem, kind) = name.split_once('.')?;
    let ended = match kind {
        "json" => true,
        "begun" => false,
        _ => return None,
    };
    let mut parts = stem.split('-');
    let (index, attempt, unique) = (parts.next()?, parts.next()?, parts.next()?);
    let number = |text: &str| {
        let digits = (1..=12).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse::<u64>().ok()).flatten()
    };
    let right =
        parts.next().is_none() && unique.len() <= 40 && unique.bytes().all(|b| b.is_ascii_alphanumeric());
    right.then_some((number(index)?, number(attempt)?, ended))
}

/// The tasks that have a result, of those in the directory of this number; by the names of files alone.
pub fn ended(results: &Path, number: u64) -> BTreeSet<u64> {
    let names = fs::read_dir(shard(results, number)).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match named(&entry.file_name().to_string_lossy())? {
        (index, _, true) => Some(index),
        _ => None,
    };
    names.filter_map(of).collect()
}

/// Puts a file of this content there, whole or not at all, and on disk when this returns.
pub fn place(path: &Path, content: &[u8]) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(Error::file("made", parent))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = parent.join(format!(".{name}.{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(parent)?.sync_all()
    };
    write().map_err(|source| {
        // Of no use to anybody, and on a full disk in the way.
        let _ = fs::remove_file(&temporary);
        Error::file("written", path)(source)
    })
}

/// The bytes of a result.
pub fn text(header: &Header, reports: &[Report]) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(header)?;
    text.push(b'\n');
    for report in reports {
        serde_json::to_writer(&mut text, report)?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Reads a file that lies where anybody may have put it: no link is followed, nothing but a file is opened, and no more is read than a
/// result may have.
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let file = open::for_reading(path, Kind::Unlinked).map_err(|error| error.to_string())?;
    let about = file.metadata().map_err(|error| error.to_string())?;
    if about.len() > LARGEST {
        return Err(format!("larger than {} MiB, which no result is", LARGEST >> 20));
    }
    let mut bytes = Vec::with_capacity(about.len() as usize + 1);
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LARGEST {
        return Err(format!("larger than {} MiB, which no result is", LARGEST >> 20));
    }
    Ok(bytes)
}

/// The result that `bytes` are.
///
/// # Errors
/// What is wrong with them, without the file's name.
pub fn parse(bytes: &[u8]) -> Result<(Header, Vec<Report>), String> {
    let end = bytes.iter().position(|&b| b == b'\n').ok_or("cut short: it has no whole header")?;
    let shown =
        |error: serde_json::Error| format!("no header of a result: {}", printable(&error.to_string()));
    #[derive(Deserialize)]
    struct Version {
        fleet: u32,
    }
    let version: Version = serde_json::from_slice(&bytes[..end]).map_err(shown)?;
    if version.fleet != VERSION {
        return Err(format!("version {} of a task's result; this Vellum reads {VERSION}", version.fleet));
    }
    let header: Header = serde_json::from_slice(&bytes[..end]).map_err(shown)?;
    if !(header.began.is_finite() && header.ended.is_finite()) {
        return Err("no header of a result: a time is not finite".into());
    }
    if bytes.last() != Some(&b'\n') {
        return Err("cut short: its last line has no end".into());
    }
    let reports = match header.runs.is_empty() {
        true => Vec::new(),
        false => json::parse(&bytes[end + 1..], Path::new("")).map_err(|error| {
            let error = error.to_string();
            error.strip_prefix(": ").unwrap_or(&error).to_owned()
        })?,
    };
    match reports.len() == header.runs.len() {
        true => Ok((header, reports)),
        false => Err(format!("cut short: {} of {} runs", reports.len(), header.runs.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_host::Facts;

    pub(crate) fn header() -> Header {
        Header {
            fleet: VERSION,
            plan: "d".into(),
            vellum: "0".into(),
            index: 7,
            test: "a".into(),
            round: 0,
            first: 8,
            attempt: 0,
            job: None,
            node: "n1".into(),
            began: 1.0,
            ended: 2.0,
            runs: vec![Run { seed: 8, exit: 0 }],
        }
    }

    #[test]
    fn a_result_is_read_back_and_never_a_part_of_it() {
        let reports = vec![Report::new("test dirty-log", Facts::collect("off".into()))];
        let text = text(&header(), &reports).unwrap();
        assert_eq!(parse(&text).unwrap(), (header(), reports));
        for end in 0..text.len() - 1 {
            assert!(parse(&text[..end]).is_err(), "{end} of {} bytes", text.len());
        }
        let other = String::from_utf8(text).unwrap().replace("\"fleet\":1", "\"fleet\":2");
        assert!(parse(other.as_bytes()).unwrap_err().contains("version 2"));
    }

    #[test]
    fn names_say_which_task_it_is_and_others_are_none() {
        let stem = stem(Path::new("r"), 12_345, 2);
        assert_eq!(stem.parent(), Some(Path::new("r/00012")));
        let name = stem.file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(named(&format!("{name}.json")), Some((12_345, 2, true)));
        assert_eq!(named(&format!("{name}.begun")), Some((12_345, 2, false)));
        for other in [
            "x",
            ".json",
            "1-2.json",
            "1-2-../3.json",
            "-1-2-3.json",
            "1-2-3-4.json",
            "1-2-3.json.tmp",
            "1-2-\u{1b}.json",
        ] {
            assert_eq!(named(other), None, "{other}");
        }
    }

    #[test]
    fn links_pipes_and_what_is_too_large_are_not_read() {
        let dir = std::env::temp_dir().join(format!("vellum-fleet-read-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        place(&dir.join("file"), b"x").unwrap();
        std::os::unix::fs::symlink("file", dir.join("link")).unwrap();
        File::create(dir.join("large")).unwrap().set_len(LARGEST + 1).unwrap();
        let read = |name: &str| read_file(&dir.join(name));
        assert_eq!(read("file").unwrap(), b"x");
        assert!(read("link").unwrap_err().contains("symbolic link"));
        assert!(read("large").unwrap_err().contains("larger"));
        assert!(read_file(&dir).unwrap_err().contains("a directory"));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 3, "something temporary is left");
        fs::remove_dir_all(dir).unwrap();
    }
}
