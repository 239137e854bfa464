//! Checks that a test notices a planted fault (`vellum_sys::plant`). The test runs again in a
//! process with the fault.

use std::process::Command;
use std::time::Duration;

use crate::{Completion, Failed, LIMIT, ensure};
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE, VARIABLE};

/// Plants the fault that the environment names. Called before the program's tests.
pub fn plant() {
    vellum::cli::plant().unwrap_or_else(|failure| panic!("{}", failure.message));
}

/// How long a test waits for something that a planted fault may prevent.
pub fn limit() -> Duration {
    if std::env::var_os(VARIABLE).is_some() { Duration::from_secs(2) } else { LIMIT }
}

/// Passes if `test` of this program fails with the fault `mistake` planted, and its output contains
/// `says`.
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
