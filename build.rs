//! Which commit this is built from: `VELLUM_COMMIT`, as it follows the version, and nothing where there is no clone; and how the program
//! is linked.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=VELLUM_COMMIT={}", commit().unwrap_or_default());
    // A position-independent program adds its address to some 7,000 pointers before main. A bit map of where they are (DT_RELR, which musl
    // reads since 1.2.4) is a hundredth of the size of a table with 24 bytes for each, and is read in fewer instructions. Programs for Arm
    // are linked by rust-lld, which takes no such argument of a C compiler.
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
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
