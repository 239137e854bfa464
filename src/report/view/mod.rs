//! Output formats: KTAP, JUnit and KCIDB for other programs, which are views of the cases of a
//! [`Report`], and Markdown. [`super::json`] writes the JSON form, which has everything.
//!
//! Names may come from someone else's result. Line ends, control characters and the format's own
//! syntax are therefore replaced or escaped.

mod junit;
mod kcidb;
mod ktap;

use super::terminal::{self, Extent, Form};
use super::{Report, json};

/// The format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// KTAP version 1 (Documentation/dev-tools/ktap.rst), nested.
    Ktap,
    /// JUnit XML.
    Junit,
    /// A KCIDB submission.
    Kcidb {
        /// The submitter, as agreed with the operators of the database.
        origin: String,
    },
    /// Vellum's own JSON.
    Json,
    /// Markdown, to paste into a mail.
    Markdown,
}

impl View {
    /// Renders `results` in this format.
    ///
    /// # Errors
    /// Fails if a serializer refuses a value, which is a bug in Vellum.
    pub fn render(&self, results: &[Report]) -> Result<String, String> {
        match self {
            Self::Ktap => Ok(ktap::render(results)),
            Self::Junit => junit::render(results).map_err(|error| error.to_string()),
            Self::Kcidb { origin } => kcidb::render(results, origin).map_err(|error| error.to_string()),
            Self::Markdown => Ok(terminal::render(results, Form::Markdown, Extent::Whole)),
            Self::Json => {
                let text = json::text(results).map_err(|error| error.to_string())?;
                Ok(String::from_utf8_lossy(&text).into_owned())
            }
        }
    }
}

/// Converts `seconds` since 1970 to a date in UTC.
fn date(seconds: f64) -> Option<chrono::DateTime<chrono::Utc>> {
    chrono::DateTime::from_timestamp_millis((seconds * 1e3) as i64)
}
