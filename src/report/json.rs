//! The JSON face: results written so that people can diff them, and read without trusting what others may have written.
//!
//! Start reading at [`parse`] for what is believed of a file: nothing until [`check`] has passed. The schema that other tools
//! read is `resources/report.schema.json`; the files themselves are [`super::output`]'s.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::Formatter;

use super::{Label, OLDEST, Report, SCHEMA};
use vellum_sys::open;

/// The largest file that is read. A result with a point each millisecond for an hour is a tenth of it.
pub const LIMIT: u64 = 64 << 20;

/// Why a result could not be read. Each is one line, complete with what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    #[error("{}: schema version {found}, written by Vellum {by}; this is Vellum {}, which reads versions {OLDEST} to {SCHEMA}: read it with the Vellum that wrote it, or measure again", path.display(), env!("CARGO_PKG_VERSION"))]
    OtherSchema {
        /// Which file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// Who says that they wrote it.
        by: String,
    },
}

/// `results` as text, one after another.
pub fn text(results: &[Report]) -> serde_json::Result<Vec<u8>> {
    let mut text = Vec::new();
    for result in results {
        debug_assert_eq!(check(result), Ok(()), "a result that no reader would accept");
        result.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Lines::default()))?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Reads the results in `path`, or on standard input for `-`; one at least.
pub fn read(path: &Path) -> Result<Vec<Report>, Error> {
    let failed = |source| Error::Open { path: path.into(), source };
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().take(LIMIT + 1).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        if path.is_dir() {
            return Err(Error::Directory {
                path: path.into(),
                what: "where a result file is needed; name the files in it",
            });
        }
        bytes = open::read(path, LIMIT).map_err(failed)?;
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
/// Whatever the bytes are, this ends in time and memory linear in their length (serde_json stops at 128 levels). What is a result is gone
/// over once; only what is none is looked at again, for the reason.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<Report>, Error> {
    let no_result = |why: String| Error::NoResult { path: path.into(), why };
    let mut results: Vec<Report> = Vec::new();
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Report>();
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
        let which = results.len() + 1;
        let mut result = match stream.next() {
            Some(Ok(result)) if (OLDEST..=SCHEMA).contains(&result.schema) => result,
            _ => return Err(why_none(bytes, which, path)),
        };
        // Version 2 had no cases, and nothing else has changed: what is read is as if it had been written today.
        result.schema = SCHEMA;
        check(&result).map_err(|e| no_result(format!("result {which} in it: {}", super::printable(&e))))?;
        results.push(result);
        start = stream.byte_offset();
    }
}

/// Why the object of that number, from 1 on, is no result: by its header first, because one of another version may have any fields.
fn why_none(bytes: &[u8], which: usize, path: &Path) -> Error {
    let no_result = |why: String| Error::NoResult { path: path.into(), why };
    let of_it = |error: &serde_json::Error| {
        no_result(format!("result {which} in it: {}", super::printable(&error.to_string())))
    };
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Header>();
    let before = stream.by_ref().take(which - 1).count();
    let start = stream.byte_offset();
    match stream.next() {
        Some(Ok(header)) => match header.schema {
            None => no_result("it has no `schema`".into()),
            Some(Value::Number(n))
                if n.as_u64().is_some_and(|n| (OLDEST.into()..=SCHEMA.into()).contains(&n)) =>
            {
                match serde_json::from_slice::<Report>(&bytes[start..stream.byte_offset()]) {
                    Err(error) => of_it(&error),
                    Ok(_) => {
                        no_result(format!("{before} results in it can be read, and what follows cannot"))
                    }
                }
            }
            Some(Value::Number(n)) => {
                let by = header.vellum.as_ref().and_then(Value::as_str).unwrap_or("(it does not say)");
                let by = super::printable(by).chars().take(40).collect();
                Error::OtherSchema { path: path.into(), found: n.to_string(), by }
            }
            Some(_) => no_result("its `schema` is not a number".into()),
        },
        Some(Err(error)) => no_result(format!("not JSON as it should be: {error}")),
        None => no_result("it ends where a result was to begin".into()),
    }
}

/// What serde cannot say of a result but every face of it relies on: names that tell figures apart, spreads and
/// buckets in order, sums that fit.
pub fn check(result: &Report) -> Result<(), String> {
    let mut labels = std::collections::HashSet::new();
    for figure in &result.figures {
        let label = &figure.label;
        named(label)?;
        if !labels.insert(label) {
            return Err(format!("two figures are called `{label}`"));
        }
        finite(&label.to_string(), figure.values())?;
        if !(0.0..1.0).contains(&figure.resolution) {
            return Err(format!("figure `{label}`: its resolution is no share"));
        }
    }
    finite("at", [result.at])?;
    let mut names = std::collections::HashSet::new();
    for case in &result.cases {
        if !names.insert(case.name.as_str()) {
            return Err(format!("two cases are called `{}`", case.name));
        }
        if case.seconds.is_some_and(|seconds| !(0.0..=f64::MAX).contains(&seconds)) {
            return Err(format!("case `{}`: its seconds are none", case.name));
        }
    }
    if let Some(headline) = result.headline.as_ref().filter(|headline| !labels.contains(headline)) {
        return Err(format!("its headline `{headline}` is none of its figures"));
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
        finite(&mark.name, [mark.start, mark.end])?;
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
        finite(name, histogram.max)?;
        let total = histogram.buckets.iter().try_fold(0u64, |sum, &(_, n)| sum.checked_add(n));
        if total.is_none() {
            return Err(format!("histogram `{name}`: it counts more than 2^64"));
        }
    }
    Ok(())
}

fn finite(name: &str, values: impl IntoIterator<Item = f64>) -> Result<(), String> {
    match values.into_iter().all(f64::is_finite) {
        true => Ok(()),
        false => Err(format!("`{name}`: a value is not finite")),
    }
}

/// A name with an index in it would be another figure's, and nothing could tell them apart.
fn named(label: &Label) -> Result<(), String> {
    match label.name.contains(['[', ']']) {
        true => Err(format!("`{}` has an index in its name, which is a field of its own", label.name)),
        false => Ok(()),
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
