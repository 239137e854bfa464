//! The server of a shared directory, as the process that it is. What a guest's kernel would do with it this host's does: it mounts the
//! directory by /dev/fuse. Requests that no kernel makes are made by hand.

mod at_once;
mod attributes;
mod by_hand;
mod escapes;
mod file;
mod mounted;

use std::process::ExitCode;

use support::Tests;
use support::share::mount;
use vellum_share::process;

fn main() -> ExitCode {
    let ended = match std::env::args().nth(1).as_deref() {
        Some(process::WORD) => process::serve().map_err(|error| error.to_string()),
        Some(mount::WORD) => mount::carry().map_err(|error| error.message().unwrap_or_default().to_owned()),
        _ => return Tests::from_args().run(),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("share: {error}");
            ExitCode::FAILURE
        }
    }
}
