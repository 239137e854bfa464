//! Records how tests ended, for other programs: one [`Line`] of JSON each, in the file that
//! [`VARIABLE`] names.
//!
//! The last line has the number of tests. If it is missing or has another number, the program did
//! not finish.

use std::any::Any;
use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use libtest_mimic::{Completion, Failed};
use serde::{Deserialize, Serialize};

/// The environment variable that names the file.
pub const VARIABLE: &str = "VELLUM_TEST_RECORD";

/// The environment variable with the tests that passed on another host, as `PROGRAM::TEST` and
/// separated by blanks. They are skipped on this one.
pub const PASSED: &str = "VELLUM_TEST_PASSED";

/// A line of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// A test ended.
    Test {
        /// The name.
        name: String,
        /// How it ended.
        outcome: Outcome,
        /// How many milliseconds it took by its host's clock. 0 for what is not a test of a program.
        #[serde(default)]
        milliseconds: u64,
    },
    /// All tests have ended. This is their number.
    End(u64),
}

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The test passed.
    Passed,
    /// The test failed, for this reason.
    Failed(String),
    /// The test could not run, for this reason.
    Skipped(String),
}

/// The result of a test, or its panic.
type Ended = Result<Result<Completion, Failed>, Box<dyn Any + Send>>;

impl Outcome {
    pub(crate) fn of(ended: &Ended) -> Self {
        match ended {
            Ok(Ok(Completion::Completed)) => Self::Passed,
            Ok(Ok(Completion::Ignored { reason })) => {
                Self::Skipped(reason.clone().unwrap_or_else(|| "it says no reason".into()))
            }
            Ok(Err(failed)) => Self::Failed(failed.message().unwrap_or("it says no reason").to_owned()),
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
                Self::Failed(format!("it panicked: {}", text.unwrap_or("without a message")))
            }
        }
    }
}

/// The tests of this program that passed on another host, by [`PASSED`].
pub(crate) fn passed() -> HashSet<String> {
    let program = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let prefix = format!("{}::", program.file_name().unwrap_or_default().to_string_lossy());
    let all = std::env::var(PASSED).unwrap_or_default();
    all.split_whitespace().filter_map(|test| test.strip_prefix(&prefix)).map(str::to_owned).collect()
}

/// The lines of `text` up to the first that is malformed, and the error of that one.
pub fn parse(text: &str) -> (Vec<Line>, Result<(), String>) {
    let mut lines = Vec::new();
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(error) => return (lines, Err(format!("{line:?} is no line of a record: {error}"))),
        }
    }
    (lines, Ok(()))
}

/// The file of a record.
#[derive(Debug)]
pub struct Record(Option<Mutex<PathBuf>>);

impl Record {
    /// The record that [`VARIABLE`] asks for.
    pub fn from_env() -> Self {
        Self::new(std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from))
    }

    /// A record in `file`. Without one, lines are dropped.
    pub fn new(file: Option<PathBuf>) -> Self {
        Self(file.map(Mutex::new))
    }

    /// Whether there is a file.
    pub fn is_kept(&self) -> bool {
        self.0.is_some()
    }

    /// Adds a line.
    ///
    /// # Panics
    ///
    /// The file cannot be written. An unrecorded test would not be counted.
    pub fn write(&self, line: &Line) {
        let Some(path) = &self.0 else { return };
        let path = path.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let text = format!("{}\n", serde_json::to_string(line).expect("a line is plain data"));
        let written = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&*path)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        if let Err(error) = written {
            panic!("the record {} cannot be written: {error}", path.display());
        }
    }
}
