//! Results as other programs read them: KTAP, JUnit, KCIDB. All are views of the cases of a [`Report`]; JSON, which has everything, is
//! [`super::json`]'s.
//!
//! Whoever reads one of these never meets a name as it is in a result: line ends, control characters and what the format itself uses are
//! replaced or escaped, because results may come from elsewhere.

mod junit;
mod kcidb;
mod ktap;

use super::{Report, json};

/// In which form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// KTAP version 1 (Documentation/dev-tools/ktap.rst), nested.
    Ktap,
    /// JUnit's XML.
    Junit,
    /// A submission to KCIDB, of this origin.
    Kcidb {
        /// Who submits, as agreed with the operators of the database.
        origin: String,
    },
    /// Vellum's own JSON.
    Json,
}

impl View {
    /// `results` in this form.
    ///
    /// # Errors
    /// Where a serializer refuses a value, which is a mistake of Vellum's.
    pub fn render(&self, results: &[Report]) -> Result<String, String> {
        match self {
            Self::Ktap => Ok(ktap::render(results)),
            Self::Junit => junit::render(results).map_err(|error| error.to_string()),
            Self::Kcidb { origin } => kcidb::render(results, origin).map_err(|error| error.to_string()),
            Self::Json => {
                let text = json::text(results).map_err(|error| error.to_string())?;
                Ok(String::from_utf8_lossy(&text).into_owned())
            }
        }
    }
}

/// `seconds` since 1970 as a date, in the proleptic Gregorian calendar and UTC.
fn date(seconds: f64) -> Option<chrono::DateTime<chrono::Utc>> {
    chrono::DateTime::from_timestamp_millis((seconds * 1e3) as i64)
}
