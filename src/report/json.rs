//! The JSON face: results written to a file or to standard output, and read back from files that anyone may have written.
//!
//! A [`Writer`] is opened before the run, so that a path that cannot be written is found before an hour is spent and
//! the sandbox never has to open one. Start reading at [`parse`] for what is believed of a file: nothing until
//! [`check`] has passed. The schema that other tools read is `resources/report.schema.json`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::Formatter;

use super::{Figure, Report, SCHEMA};

/// The largest file that is read. A result with a point each millisecond for an hour is a tenth of it.
pub const LIMIT: u64 = 64 << 20;

/// Why a result could not be written or read. Each is one line, complete with what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path given to `--json` or `--html`.
    #[error("{}: cannot be written: {source}; name a file in a directory that you may write to, or `-` for standard output", path.display())]
    Create {
        /// What was asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file was opened, but the result does not fit into it.
    #[error("{}: the result could not be written: {source}; free space there, or write to another file system", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file to be read is not there, is no file, or is another user's.
    #[error("{}: cannot be read: {source}; name a result that Vellum wrote as JSON", path.display())]
    Open {
        /// What was asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A directory, where a file is needed or where no result lies in it.
    #[error("{}: a directory {what}", path.display())]
    Directory {
        /// What was asked for.
        path: PathBuf,
        /// What is wrong with that, and the remedy.
        what: &'static str,
    },
    /// Refused before it could fill the memory.
    #[error("{}: larger than {} MiB, which no result is; name a result that Vellum wrote as JSON", path.display(), LIMIT >> 20)]
    TooLarge {
        /// Which file.
        path: PathBuf,
    },
    /// The content is something else.
    #[error("{}: no Vellum result: {why}; name a result that Vellum wrote as JSON", path.display())]
    NoResult {
        /// Which file.
        path: PathBuf,
        /// What it has or lacks.
        why: String,
    },
    /// A result of another time.
    #[error("{}: schema version {found}, written by Vellum {by}; this is Vellum {}, which reads version {SCHEMA}: read it with the Vellum that wrote it, or measure again", path.display(), env!("CARGO_PKG_VERSION"))]
    OtherSchema {
        /// Which file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// Who says that they wrote it.
        by: String,
    },
}

/// Where results go, open from before the run until its end.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    /// `None`: standard output.
    file: Option<File>,
    created: bool,
    /// A pipe or a device cannot be cut to length.
    regular: bool,
}

impl Writer {
    /// Opens `path`, or standard output for `-`. An earlier result in the file stays until there is a new one.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if path == Path::new("-") {
            return Ok(Self { path: "standard output".into(), file: None, created: false, regular: false });
        }
        let failed = |source| Error::Create { path: path.into(), source };
        let (file, created) = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                (OpenOptions::new().write(true).open(path).map_err(failed)?, false)
            }
            Err(e) => return Err(failed(e)),
        };
        let regular = file.metadata().map_err(failed)?.is_file();
        Ok(Self { path: path.into(), file: Some(file), created, regular })
    }

    /// Whether the terminal's tables would end up in the same place.
    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    /// Writes `results` one after another. Makes no system call but `write` and `ftruncate`.
    pub fn write(mut self, results: &[Report]) -> Result<(), Error> {
        let mut text = Vec::new();
        for result in results {
            debug_assert_eq!(check(result), Ok(()), "a result that no reader would accept");
            let mut json = serde_json::Serializer::with_formatter(&mut text, Lines::default());
            result
                .serialize(&mut json)
                .map_err(|e| Error::Write { path: self.path.clone(), source: e.into() })?;
            text.push(b'\n');
        }
        let written = match &mut self.file {
            None => allow_broken_pipe(io::stdout().lock().write_all(&text)),
            Some(file) => file
                .write_all(&text)
                .and_then(|()| if self.regular { file.set_len(text.len() as u64) } else { Ok(()) }),
        };
        written.map_err(|source| Error::Write { path: self.path, source })
    }

    /// Leaves nothing behind where the run never started: removes the file if [`open`](Self::open) made it. To be
    /// called before the sandbox closes the file system.
    pub fn discard(self) {
        if self.created {
            // The file is empty and nobody waits for it: a failure to remove it is not worth hiding the reason why
            // the run did not start.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A reader that has seen enough (`| head`) is no error.
pub fn allow_broken_pipe(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(e) })
}

/// Reads the results in `path`, or on standard input for `-`; one at least.
pub fn read(path: &Path) -> Result<Vec<Report>, Error> {
    let failed = |source| Error::Open { path: path.into(), source };
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().take(LIMIT + 1).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(Error::Directory {
                path: path.into(),
                what: "where a result file is needed; name the files in it",
            });
        }
        file.take(LIMIT + 1).read_to_end(&mut bytes).map_err(failed)?;
    }
    if bytes.len() as u64 > LIMIT {
        return Err(Error::TooLarge { path: path.into() });
    }
    parse(&bytes, path)
}

/// Reads a set of results: a file with one or several, or a directory whose `*.json` files are read in the order of
/// their names.
pub fn read_set(path: &Path) -> Result<Vec<Report>, Error> {
    if !path.is_dir() {
        return read(path);
    }
    let failed = |source| Error::Open { path: path.into(), source };
    let mut files = Vec::new();
    for entry in path.read_dir().map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|e| e == "json") {
            files.push(file);
        }
    }
    if files.is_empty() {
        let what = "without a single .json file; name one that results were written into as JSON";
        return Err(Error::Directory { path: path.into(), what });
    }
    files.sort();
    let mut results = Vec::new();
    for file in files {
        results.extend(read(&file)?);
    }
    Ok(results)
}

/// What is looked at before anything else is believed.
#[derive(Deserialize)]
struct Header {
    schema: Option<Value>,
    vellum: Option<Value>,
}

/// The results in `bytes`, one after another with or without white space between; `path` is for the messages.
///
/// Whatever the bytes are, this ends in time and memory linear in their length (serde_json stops at 128 levels).
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<Report>, Error> {
    let no_result = |why: String| Error::NoResult { path: path.into(), why };
    let mut results = Vec::new();
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Header>();
    let mut start = 0;
    loop {
        start += bytes[start..].iter().take_while(|b| b.is_ascii_whitespace()).count();
        match bytes.get(start) {
            None if results.is_empty() => {
                return Err(no_result("it is empty; the run that was to fill it did not end".into()));
            }
            None => return Ok(results),
            Some(b'{') => {}
            Some(_) => return Err(no_result(format!("no JSON object begins at byte {start}"))),
        }
        let Some(header) = stream.next() else { return Ok(results) };
        let header = header.map_err(|e| no_result(format!("not JSON as it should be: {e}")))?;
        let end = stream.byte_offset();
        match header.schema {
            None => return Err(no_result("it has no `schema`".into())),
            Some(Value::Number(n)) if n.as_u64() == Some(SCHEMA.into()) => {}
            Some(Value::Number(n)) => {
                let by = header.vellum.as_ref().and_then(Value::as_str).unwrap_or("(it does not say)");
                let by = super::printable(by).chars().take(40).collect();
                return Err(Error::OtherSchema { path: path.into(), found: n.to_string(), by });
            }
            Some(_) => return Err(no_result("its `schema` is not a number".into())),
        }
        let which = results.len() + 1;
        let result: Report = serde_json::from_slice(&bytes[start..end])
            .map_err(|e| no_result(format!("result {which} in it: {}", super::printable(&e.to_string()))))?;
        check(&result).map_err(|e| no_result(format!("result {which} in it: {}", super::printable(&e))))?;
        results.push(result);
        start = end;
    }
}

/// What serde cannot say of a result but every face of it relies on: names that tell figures apart, spreads and
/// buckets in order, sums that fit.
pub fn check(result: &Report) -> Result<(), String> {
    let mut names = std::collections::HashSet::new();
    for figure in &result.figures {
        if !names.insert(figure.name()) {
            return Err(format!("two figures are called `{}`", figure.name()));
        }
        match figure {
            Figure::Single { name, value, .. } => finite(name, &[*value])?,
            Figure::Spread { name, median, min, max, count, samples, .. } => {
                finite(name, &[*median, *min, *max])?;
                finite(name, samples)?;
                if !(min <= median && median <= max) {
                    return Err(format!("figure `{name}`: its median is not between its min and its max"));
                }
                if *count == 0 || (!samples.is_empty() && samples.len() as u64 != *count) {
                    return Err(format!("figure `{name}`: its count is not that of its samples"));
                }
            }
        }
    }
    for series in &result.series {
        if series.points.iter().any(|(t, v)| !t.is_finite() || !v.is_finite()) {
            return Err(format!("series `{}`: a point is not finite", series.name));
        }
        if !series.points.is_sorted_by(|a, b| a.0 <= b.0) {
            return Err(format!("series `{}`: its points are not in order", series.name));
        }
    }
    for mark in &result.marks {
        finite(&mark.name, &[mark.start, mark.end])?;
        if mark.start > mark.end {
            return Err(format!("mark `{}`: it ends before it starts", mark.name));
        }
    }
    for histogram in &result.histograms {
        let name = &histogram.name;
        if histogram.buckets.iter().any(|(bound, _)| !bound.is_finite()) {
            return Err(format!("histogram `{name}`: a bound is not finite"));
        }
        if !histogram.buckets.is_sorted_by(|a, b| a.0 < b.0) {
            return Err(format!("histogram `{name}`: its bounds do not rise"));
        }
        let total = histogram.buckets.iter().try_fold(0u64, |sum, &(_, n)| sum.checked_add(n));
        if total.is_none() {
            return Err(format!("histogram `{name}`: it counts more than 2^64"));
        }
    }
    Ok(())
}

fn finite(name: &str, values: &[f64]) -> Result<(), String> {
    match values.iter().all(|v| v.is_finite()) {
        true => Ok(()),
        false => Err(format!("`{name}`: a value is not finite")),
    }
}

/// One figure, one counter, one series a line: what people grep and diff.
#[derive(Default)]
struct Lines {
    depth: usize,
    filled: bool,
}

/// Levels that are spread over lines: the result, and the lists and tables in it.
const OPEN_LEVELS: usize = 2;

impl Lines {
    fn enter(&mut self, w: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        w.write_all(bracket)
    }

    fn item(&mut self, w: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        if self.depth <= OPEN_LEVELS {
            w.write_all(if first { b"\n" } else { b",\n" })?;
            return (0..self.depth).try_for_each(|_| w.write_all(b"  "));
        }
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn leave(&mut self, w: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.depth < OPEN_LEVELS && self.filled {
            w.write_all(b"\n")?;
            (0..self.depth).try_for_each(|_| w.write_all(b"  "))?;
        }
        self.filled = true;
        w.write_all(bracket)
    }
}

impl Formatter for Lines {
    fn begin_array<W: Write + ?Sized>(&mut self, w: &mut W) -> io::Result<()> {
        self.enter(w, b"[")
    }
    fn end_array<W: Write + ?Sized>(&mut self, w: &mut W) -> io::Result<()> {
        self.leave(w, b"]")
    }
    fn begin_array_value<W: Write + ?Sized>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }
    fn end_array_value<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
    fn begin_object<W: Write + ?Sized>(&mut self, w: &mut W) -> io::Result<()> {
        self.enter(w, b"{")
    }
    fn end_object<W: Write + ?Sized>(&mut self, w: &mut W) -> io::Result<()> {
        self.leave(w, b"}")
    }
    fn begin_object_key<W: Write + ?Sized>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }
    fn begin_object_value<W: Write + ?Sized>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
    fn end_object_value<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}
