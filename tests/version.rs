//! The version contains the commit if the program was built from a clone of its repository, and not
//! otherwise.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The output of the build script for the package in `dir`.
fn says(script: &Path, dir: &Path) -> String {
    let output = Command::new(script).current_dir(dir).env("CARGO_MANIFEST_DIR", dir).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("cargo::rustc-env=VELLUM_COMMIT="));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

fn git(dir: &Path, arguments: &[&str]) -> String {
    let identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"];
    let output = Command::new("git").args(identity).args(arguments).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_clone_has_its_commit_and_a_tarball_has_none() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("version");
    let _ = fs::remove_dir_all(&dir);
    let (clone, tarball) = (dir.join("clone"), dir.join("tarball"));
    fs::create_dir_all(&clone).unwrap();
    let script = dir.join("script");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(rustc)
        .args(["--edition", "2024", "-o"])
        .arg(&script)
        .arg(Path::new(ROOT).join("build.rs"))
        .output()
        .unwrap();
    assert!(built.status.success(), "{built:?}");
    git(&clone, &["init", "--quiet"]);
    fs::write(clone.join("file"), "x").unwrap();
    git(&clone, &["add", "file"]);
    git(&clone, &["commit", "--quiet", "--message", "m"]);
    let commit = git(&clone, &["rev-parse", "--short=12", "HEAD"]);
    assert_eq!(says(&script, &clone), format!(" ({commit})"));
    // If it is unpacked inside a clone of another project, the commit of that clone is not used.
    let inside = clone.join("unpacked");
    for dir in [&tarball, &inside] {
        fs::create_dir_all(dir).unwrap();
    }
    assert_eq!(says(&script, &inside), "");
    // The target directory of this crate is inside its own clone. That commit is not used either.
    assert_eq!(says(&script, &tarball), "");
    fs::remove_dir_all(dir).unwrap();
}
