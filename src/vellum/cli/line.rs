//! The whole command line, for those who look at one without running it: what is said of a wrong one, and the plans of `vellum fleet`.
//! The root of the command line, which knows all commands, hands it down.

use std::ffi::OsString;

/// The version, with the commit where this was built from a clone.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), env!("VELLUM_COMMIT"));

/// The whole command line.
#[derive(Clone, Copy)]
pub struct CommandLine {
    /// All commands, with their arguments.
    pub definition: fn() -> clap::Command,
    /// Reads the words of one, the program's name first.
    pub parse: fn(Vec<OsString>) -> Result<(), clap::Error>,
}

/// One of the words that this program was started with, as far as it is text.
pub(super) fn word(nth: usize) -> Option<String> {
    std::env::args_os().nth(nth).map(|word| word.to_string_lossy().into_owned())
}
