//! Tests of the server of a shared directory, as a real process. This host's kernel takes the place
//! of a guest's: it mounts the directory through /dev/fuse. Requests that no kernel makes are built
//! by hand.

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
