//! The command line as a value, for code that checks one without running it: messages about a wrong
//! one, and the plans of `vellum fleet`. The root module, which knows all commands, passes it down.

use std::ffi::OsString;

/// The version, with the commit if this was built from a clone.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), env!("VELLUM_COMMIT"));

/// The command line.
#[derive(Clone, Copy)]
pub struct CommandLine {
    /// Builds all commands with their arguments.
    pub definition: fn() -> clap::Command,
    /// Parses words. The first is the program's name.
    pub parse: fn(Vec<OsString>) -> Result<(), clap::Error>,
}

/// The `nth` word that this program was started with. Bytes that are not UTF-8 are replaced.
pub(super) fn word(nth: usize) -> Option<String> {
    std::env::args_os().nth(nth).map(|word| word.to_string_lossy().into_owned())
}
