//! Whether a test finds a mistake (`vellum_sys::plant`): it is run once more, by a process in which that is planted.

use std::process::Command;
use std::time::Duration;

use crate::{Completion, Failed, LIMIT, ensure};
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE, VARIABLE};

/// Plants what this process was asked to. Before any test of its program.
pub fn plant() {
    vellum::cli::plant().unwrap_or_else(|failure| panic!("{}", failure.message));
}

/// How long a test waits for what a mistake prevents.
pub fn limit() -> Duration {
    if std::env::var_os(VARIABLE).is_some() { Duration::from_secs(2) } else { LIMIT }
}

/// Passes where `test` of this program fails with `mistake` planted, and says `says` then.
pub fn caught(mistake: &str, test: &str, says: &str) -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    let mut again = Command::new(std::env::current_exe()?);
    again.args(["--exact", test]).env(VARIABLE, mistake).env_remove(crate::record::VARIABLE);
    let output = again.output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let found = !output.status.success() && said.contains(says);
    ensure(found, || format!("{mistake} is not caught, {}: {said}", output.status))?;
    Ok(Completion::Completed)
}
