//! The server of a shared directory, as the process that it is. What a guest's kernel would do with it this host's does: it mounts the
//! directory by /dev/fuse. Requests that no kernel makes are made by hand.

mod at_once;
mod attributes;
mod by_hand;
mod escapes;
mod file;
mod mounted;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// A directory of a test's own, which goes with it.
struct Directory(PathBuf);

impl Directory {
    fn new() -> std::io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vellum-share-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
