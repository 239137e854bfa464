//! The files that tasks leave in the shared directory, and reading them without trusting them. A
//! file has a one-line header, followed by the results of its runs. It appears atomically. Its name
//! identifies the task and is unique.

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

/// The largest file to read, in bytes.
pub const LARGEST: u64 = 16 << 20;

/// The tasks per directory. It bounds the number of file names in memory.
pub const SHARD: u64 = 1000;

/// The header line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`VERSION`].
    pub fleet: u32,
    /// The plan's digest.
    pub plan: String,
    /// Vellum's version, with its commit if known.
    pub vellum: String,
    /// The task's number.
    pub index: u64,
    /// The test's name.
    pub test: String,
    /// The repetition, from 0.
    pub round: u64,
    /// The first seed.
    pub first: u64,
    /// How often the batch system had started the task before.
    pub attempt: u64,
    /// The batch system's job.
    pub job: Option<String>,
    /// The host's name, from the batch system or from the host.
    pub node: String,
    /// The start in seconds since 1970.
    pub began: f64,
    /// The end in seconds since 1970.
    pub ended: f64,
    /// The runs in the order of their seeds. Each has a result after the header.
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

/// The path of a task's files without extension: `00012/00012345-0-1a2b3c`.
pub fn stem(results: &Path, index: u64, attempt: u64) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let unique = format!("{now:x}{:x}", std::process::id());
    shard(results, index / SHARD).join(format!("{index:08}-{attempt}-{unique}"))
}

/// The directory of tasks from `number` * [`SHARD`] on.
pub fn shard(results: &Path, number: u64) -> PathBuf {
    results.join(format!("{number:05}"))
}

/// Parses a file name: the task, the attempt, and whether it is a result or the mark of a started
/// attempt.
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

/// The tasks of a directory that have a result, judged by file names only.
pub fn ended(results: &Path, number: u64) -> BTreeSet<u64> {
    let names = fs::read_dir(shard(results, number)).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match named(&entry.file_name().to_string_lossy())? {
        (index, _, true) => Some(index),
        _ => None,
    };
    names.filter_map(of).collect()
}

/// Creates a file atomically. It is on disk when this returns.
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
        // Useless, and takes space on a full disk.
        let _ = fs::remove_file(&temporary);
        Error::file("written", path)(source)
    })
}

/// The content of a result file.
pub fn text(header: &Header, reports: &[Report]) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(header)?;
    text.push(b'\n');
    for report in reports {
        serde_json::to_writer(&mut text, report)?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Reads a file that anyone may have created. Follows no links, opens only regular files, and reads
/// no more than a result may have.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let file = open::for_reading(path, Kind::Unlinked).map_err(|error| error.to_string())?;
    let about = file.metadata().map_err(|error| error.to_string())?;
    if about.len() > LARGEST {
        return Err(format!("larger than {} MiB, the limit for results", LARGEST >> 20));
    }
    let mut bytes = Vec::with_capacity(about.len() as usize + 1);
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LARGEST {
        return Err(format!("larger than {} MiB, the limit for results", LARGEST >> 20));
    }
    Ok(bytes)
}

/// Parses a result file.
///
/// # Errors
/// The problem, without the file's name.
pub fn parse(bytes: &[u8]) -> Result<(Header, Vec<Report>), String> {
    let end = bytes.iter().position(|&b| b == b'\n').ok_or("cut short: the header is incomplete")?;
    let shown =
        |error: serde_json::Error| format!("not a result's header: {}", printable(&error.to_string()));
    #[derive(Deserialize)]
    struct Version {
        fleet: u32,
    }
    let version: Version = serde_json::from_slice(&bytes[..end]).map_err(shown)?;
    if version.fleet != VERSION {
        return Err(format!("task result version {}; this Vellum reads {VERSION}", version.fleet));
    }
    let header: Header = serde_json::from_slice(&bytes[..end]).map_err(shown)?;
    if !(header.began.is_finite() && header.ended.is_finite()) {
        return Err("not a result's header: a time is not finite".into());
    }
    if bytes.last() != Some(&b'\n') {
        return Err("cut short: the last line is incomplete".into());
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
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 3, "a temporary file is left");
        fs::remove_dir_all(dir).unwrap();
    }
}
