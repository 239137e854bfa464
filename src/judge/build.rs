//! Builds the images from `guest/`, with the compiler and the linker of all other crates. It needs
//! the targets with musl of both architectures, which are in rust-toolchain.toml. Of their
//! libraries, only `core` is used.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for source in ["build.rs", "guest", "dtb", "schedule.rs", "sectors.rs", "words.rs"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (arch, options) in [("x86_64", X86_64), ("aarch64", AARCH64)] {
        if let Err(error) = build(arch, options, &out.join(format!("{arch}.elf"))) {
            println!("cargo::error={error}");
            std::process::exit(1);
        }
    }
}

/// A static executable at a fixed address.
const X86_64: &[&str] = &["relocation-model=static", "link-arg=-no-pie"];
/// An executable at any address, which relocates itself. The registers that the loop owns are not
/// the compiler's.
const AARCH64: &[&str] = &[
    "relocation-model=pie",
    "link-arg=-pie",
    "link-arg=--no-dynamic-linker",
    "link-arg=-znorelro",
    "target-feature=-outline-atomics,+reserve-x9,+reserve-x10,+reserve-x11,+reserve-x12,+reserve-x13,+reserve-x14,+reserve-x15,+reserve-x20,+reserve-x21,+reserve-x22,+reserve-x23,+reserve-x24,+reserve-x25,+reserve-x26,+reserve-x27,+reserve-x28",
];

fn build(arch: &str, options: &[&str], out: &Path) -> Result<(), String> {
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
    command.arg("--error-format=short");
    let common = [
        "panic=abort",
        "opt-level=s",
        "overflow-checks=off",
        "codegen-units=1",
        "strip=symbols",
        // Without libraries besides `core`.
        "linker=rust-lld",
        "linker-flavor=ld.lld",
        "link-self-contained=no",
        "default-linker-libraries=no",
        "link-arg=-nostdlib",
        "link-arg=--gc-sections",
        "link-arg=-zmax-page-size=4096",
    ];
    for option in common.iter().chain(options) {
        command.args(["-C", option]);
    }
    command.args(["-C", &format!("link-arg={script}"), "guest/main.rs", "-o"]).arg(out);
    let output = command.output().map_err(|error| format!("rustc does not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        // Warnings are no errors, because a later compiler may have new lints.
        // rustc passes these features on to LLVM, and says so.
        let is_known = |line: &str| {
            ["`reserve-x", "`outline-atomics`", "warnings emitted"].iter().any(|known| line.contains(known))
        };
        let told = said.lines().filter(|line| !is_known(line));
        told.for_each(|line| println!("cargo::warning={line}"));
        return Ok(());
    }
    Err(format!(
        "the image of `vellum judge` for {arch} is not built; where its target is missing, `rustup target add {target}` helps: {}",
        said.replace('\n', " / ")
    ))
}
