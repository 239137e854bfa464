//! The JSON form of results. It is laid out for diff and grep. Reading trusts nothing in a file.
//!
//! Start at [`parse`]: it accepts a result only after [`check`]. `resources/report.schema.json` is
//! the schema for other tools. [`super::output`] opens and writes the files.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::Formatter;

use super::{Label, OLDEST, Report, SCHEMA};
use vellum_sys::open;

/// The largest file to read. A result with one point per millisecond for an hour has a tenth of
/// this size.
pub const LIMIT: u64 = 64 << 20;

/// Why a result cannot be read. Each message is one line and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is missing, is not a file, or belongs to another user.
    #[error("{}: cannot read: {source}; name a JSON result written by Vellum", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is a directory: a file is needed, or the directory has no results.
    #[error("{}: a directory {what}", path.display())]
    Directory {
        /// The path as given.
        path: PathBuf,
        /// The problem and the remedy.
        what: &'static str,
    },
    /// The file is too large. It is rejected before it fills the memory.
    #[error("{}: larger than {} MiB, the limit for results; name a JSON result written by Vellum", path.display(), LIMIT >> 20)]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The content is not a result.
    #[error("{}: not a Vellum result: {why}; name a JSON result written by Vellum", path.display())]
    NoResult {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The result has an unsupported schema version.
    #[error("{}: schema version {found}, written by Vellum {by}; this is Vellum {}, which reads versions {OLDEST} to {SCHEMA}: use the Vellum that wrote it, or measure again", path.display(), env!("CARGO_PKG_VERSION"))]
    OtherSchema {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The version of Vellum named in it.
        by: String,
    },
}

/// Serializes `results`, one after another.
pub fn text(results: &[Report]) -> serde_json::Result<Vec<u8>> {
    let mut text = Vec::new();
    for result in results {
        debug_assert_eq!(check(result), Ok(()), "an invalid result");
        result.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Lines::default()))?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Reads the results in `path`, at least one; `-` is standard input.
pub fn read(path: &Path) -> Result<Vec<Report>, Error> {
    let failed = |source| Error::Open { path: path.into(), source };
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().take(LIMIT + 1).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        if path.is_dir() {
            return Err(Error::Directory {
                path: path.into(),
                what: "but a result file is needed; name the files in it",
            });
        }
        bytes = open::read(path, LIMIT).map_err(failed)?;
    }
    if bytes.len() as u64 > LIMIT {
        return Err(Error::TooLarge { path: path.into() });
    }
    parse(&bytes, path)
}

/// Reads a set of results. `path` is a file with one or more results, or a directory whose `*.json`
/// files are read in name order.
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
        let what = "without .json files; name a directory with JSON results";
        return Err(Error::Directory { path: path.into(), what });
    }
    files.sort();
    let mut results = Vec::new();
    for file in files {
        results.extend(read(&file)?);
    }
    Ok(results)
}

/// The fields that are read before all others.
#[derive(Deserialize)]
struct Header {
    schema: Option<Value>,
    vellum: Option<Value>,
}

/// Parses the results in `bytes`, with or without white space between them. `path` is for messages.
///
/// Time and memory are linear in the length of any input (serde_json limits nesting to 128 levels).
/// A valid result is parsed once. An invalid one is parsed again for the reason.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<Report>, Error> {
    let no_result = |why: String| Error::NoResult { path: path.into(), why };
    let mut results: Vec<Report> = Vec::new();
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Report>();
    let mut start = 0;
    loop {
        start += bytes[start..].iter().take_while(|b| b.is_ascii_whitespace()).count();
        match bytes.get(start) {
            None if results.is_empty() => {
                return Err(no_result("it is empty; the run that writes it did not finish".into()));
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
        // Version 3 only added cases to version 2, so the result is read as version 3.
        result.schema = SCHEMA;
        check(&result).map_err(|e| no_result(format!("result {which} in it: {}", super::printable(&e))))?;
        results.push(result);
        start = stream.byte_offset();
    }
}

/// Why object number `which` (from 1) is not a result. The header is checked first, because another
/// version may have any fields.
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
                    Ok(_) => no_result(format!("{before} results in it can be read, the rest cannot")),
                }
            }
            Some(Value::Number(n)) => {
                let by = header.vellum.as_ref().and_then(Value::as_str).unwrap_or("(it does not say)");
                let by = super::printable(by).chars().take(40).collect();
                Error::OtherSchema { path: path.into(), found: n.to_string(), by }
            }
            Some(_) => no_result("its `schema` is not a number".into()),
        },
        Some(Err(error)) => no_result(format!("not valid JSON: {error}")),
        None => no_result("it ends where a result should begin".into()),
    }
}

/// Checks what serde cannot: unique labels, finite values, ordered points and buckets, sums that do
/// not overflow.
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
            return Err(format!("figure `{label}`: its resolution is not in [0, 1)"));
        }
    }
    finite("at", [result.at])?;
    let mut names = std::collections::HashSet::new();
    for case in &result.cases {
        if !names.insert(case.name.as_str()) {
            return Err(format!("two cases are called `{}`", case.name));
        }
        if case.seconds.is_some_and(|seconds| !(0.0..=f64::MAX).contains(&seconds)) {
            return Err(format!("case `{}`: its seconds are invalid", case.name));
        }
    }
    if let Some(headline) = result.headline.as_ref().filter(|headline| !labels.contains(headline)) {
        return Err(format!("its headline `{headline}` is not one of its figures"));
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
            return Err(format!("histogram `{name}`: its bounds are not in order"));
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

/// An index in the name would make two different labels print the same.
fn named(label: &Label) -> Result<(), String> {
    match label.name.contains(['[', ']']) {
        true => Err(format!("`{}` has an index in its name; use the field `index`", label.name)),
        false => Ok(()),
    }
}

/// Writes one figure, counter or series a line, for grep and diff.
#[derive(Default)]
struct Lines {
    depth: usize,
    filled: bool,
}

/// The nesting levels that are spread over lines: the result, and the lists and tables in it.
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
