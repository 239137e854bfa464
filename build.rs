//! Which commit this is built from: `VELLUM_COMMIT`, as it follows the version, and nothing where there is no clone.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=VELLUM_COMMIT={}", commit().unwrap_or_default());
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn commit() -> Option<String> {
    let root = std::env::var("CARGO_MANIFEST_DIR").ok()?;
    // A clone of something else, in which this has been unpacked, says nothing of it.
    if Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?
        != Path::new(&root).canonicalize().ok()?
    {
        return None;
    }
    // Each of these is written whenever another commit is checked out or made.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"]).map(|commit| format!(" ({commit})"))
}
