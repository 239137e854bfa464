//! Results of built-in guests, as `--json` writes them.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{Failed, ensure};

/// Whether each page has what the guest wrote, by the result of a guest that has ended.
///
/// # Errors
/// It is no result, or no page was checked.
pub fn every_page_is_right(path: &Path) -> Result<bool, Failed> {
    let text = fs::read_to_string(path)?;
    let result: Value = serde_json::from_str(&text)?;
    let figure = |name: &str| {
        let figures = result["figures"].as_array()?;
        figures.iter().find(|figure| figure["name"] == name)?["value"].as_f64()
    };
    ensure(figure("pages_checked") > Some(0.0), || text.clone())?;
    Ok(figure("wrong_stamps") == Some(0.0))
}
