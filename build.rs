//! Sets `VELLUM_COMMIT`, the commit that follows the version (empty outside a clone), and the
//! options of the linker.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=VELLUM_COMMIT={}", commit().unwrap_or_default());
    // A position-independent program relocates some 7,000 pointers before main. A bitmap of their
    // places (DT_RELR, which musl supports since 1.2.4) is a hundredth of the size of a table with
    // 24 bytes for each, and takes fewer instructions to read. Programs for Arm are linked by
    // rust-lld, which does not take this argument of a C compiler.
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
        if is_dist() {
            println!("cargo::rerun-if-changed={ORDER}");
            if let Some(script) = order() {
                println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", script.display());
            }
        }
    }
}

/// Whether this is a build for packages or benchmarks. Cargo does not tell build scripts the name
/// of a custom profile: PROFILE is `release` for each profile that inherits from it. Of these only
/// `dist` and `bench` have line tables.
fn is_dist() -> bool {
    let is = |name, value| std::env::var(name).as_deref() == Ok(value);
    is("PROFILE", "release") && is("DEBUG", "true")
}

/// The functions that run before a guest's first byte.
const ORDER: &str = "resources/start-up.order";

/// A script for GNU ld that puts these functions together before all others. Otherwise they are
/// spread over nearly every 64 KiB of the program, and the kernel maps all of a 64 KiB block when
/// one function in it runs. Other linkers take no such script.
fn order() -> Option<PathBuf> {
    let linker = std::env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into());
    let version = Command::new(linker).arg("-Wl,--version").output().ok()?;
    if !String::from_utf8_lossy(&version.stdout).starts_with("GNU ld") {
        return None;
    }
    let list = std::fs::read_to_string(ORDER).ok()?;
    let names = list.lines().filter(|line| !line.starts_with('#'));
    let sections: String = names.map(|name| format!("    *(.text.{name})\n")).collect();
    let script =
        format!("SECTIONS\n{{\n  .text.start_up :\n  {{\n{sections}  }}\n}}\nINSERT BEFORE .text;\n");
    let path = Path::new(&std::env::var("OUT_DIR").ok()?).join("start-up.ld");
    std::fs::write(&path, script).ok()?;
    Some(path)
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn commit() -> Option<String> {
    let root = std::env::var("CARGO_MANIFEST_DIR").ok()?;
    // The enclosing clone may be of another project in which this source was unpacked.
    if Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?
        != Path::new(&root).canonicalize().ok()?
    {
        return None;
    }
    // Git writes these files whenever another commit is checked out or made.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"]).map(|commit| format!(" ({commit})"))
}
