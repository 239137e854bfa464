//! Builds the image from `guest/`, with the compiler and the linker of all other crates. It needs
//! the target x86_64-unknown-linux-musl, which is in rust-toolchain.toml. Of its libraries, only
//! `core` is used.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for source in ["build.rs", "guest", "schedule.rs", "sectors.rs", "words.rs"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = build("x86_64", &out.join("x86_64.elf")) {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}

fn build(arch: &str, out: &Path) -> Result<(), String> {
    let rustc = std::env::var_os("RUSTC").ok_or("cargo sets RUSTC")?;
    let target = format!("{arch}-unknown-linux-musl");
    let script = format!("-Tguest/{arch}/link.ld");
    let mut command = Command::new(rustc);
    command.args([
        "--edition",
        "2024",
        "--crate-name",
        "judge_image",
        "--crate-type",
        "bin",
        "--target",
        &target,
    ]);
    for option in [
        "panic=abort",
        "opt-level=s",
        "overflow-checks=off",
        "codegen-units=1",
        "strip=symbols",
        // A static executable at a fixed address, without libraries besides `core`.
        "relocation-model=static",
        "linker=rust-lld",
        "linker-flavor=ld.lld",
        "link-self-contained=no",
        "default-linker-libraries=no",
        "link-arg=-no-pie",
        "link-arg=-nostdlib",
        "link-arg=--gc-sections",
        "link-arg=-zmax-page-size=4096",
    ] {
        command.args(["-C", option]);
    }
    command.args(["-C", &format!("link-arg={script}"), "guest/main.rs", "-o"]).arg(out);
    let output = command.output().map_err(|error| format!("rustc does not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        // Warnings are no errors, because a later compiler may have new lints.
        said.lines().for_each(|line| println!("cargo::warning={line}"));
        return Ok(());
    }
    Err(format!(
        "the image of `vellum judge` for {arch} is not built; where its target is missing, `rustup target add {target}` helps: {}",
        said.replace('\n', " / ")
    ))
}
