//! The fuzz targets with coverage guidance. `cargo test` only runs them on their corpus.
//!
//! The targets are built as by `cargo fuzz` without a sanitizer, so no nightly compiler is needed:
//! Rust itself checks bounds and overflows. Inputs that reach new code are cached, and the next run
//! starts from them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::tally::Tally;
use super::{Options, here};
use crate::cache::Cache;
use crate::{Error, Result, artifacts, tool};

const HOST: &str = "fuzz";

/// Compiles libFuzzer's runtime.
pub const PROGRAMS: [&str; 1] = ["g++"];

/// Instruments for libFuzzer. tests/fuzz/Cargo.toml keeps the checks that a release build omits.
const RUSTFLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                         -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                         -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// libFuzzer's runtime is C++, for which rustup has no static library.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The part of tests/fuzz/Cargo.toml that is read.
#[derive(Deserialize)]
struct Manifest {
    bin: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// The default time for all targets together.
const TIME: Duration = Duration::from_secs(600);

/// Runs the targets in turn, each for the same share of the time.
pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let shell = artifacts::workspace().join("tests/fuzz");
    let named = |name: &String| options.arguments.is_empty() || options.arguments.contains(name);
    let targets: Vec<String> = targets(&shell)?.into_iter().filter(named).collect();
    if targets.is_empty() {
        return Err(Error::Usage(format!(
            "-- {}: no fuzz target is called that",
            options.arguments.join(" ")
        )));
    }
    let cache = Cache::open()?;
    let build = cache.dir("fuzz/target")?;
    eprintln!("lab: {HOST}: building {}", targets.join(", "));
    let mut cargo = Command::new(artifacts::cargo());
    cargo.current_dir(&shell).env("RUSTFLAGS", RUSTFLAGS).env("CARGO_TARGET_DIR", &build);
    cargo.args(["build", "--release", "--locked", "--target", TARGET]);
    for target in &targets {
        cargo.args(["--bin", target]);
    }
    tool::lines(&mut cargo, |_| ())?;
    let share = options.time.unwrap_or(TIME) / targets.len() as u32;
    for target in &targets {
        eprintln!("lab: {HOST}: {target} for {share:?}");
        let (found, failures) = (cache.dir(&format!("fuzz/corpus/{target}"))?, cache.dir("fuzz/failures")?);
        let program = build.join(TARGET).join("release").join(target);
        let (mut last, before) = (String::new(), names(&failures)?);
        let success = here::watched(
            &mut fuzzer(&program, share, &[&found, &shell.join("corpus").join(target)], &failures),
            |row| {
                // A line per new input is too much for a log. Only the last one and problems are
                // shown.
                match row.starts_with('#') {
                    true => row.clone_into(&mut last),
                    false => tally.show(row),
                }
            },
        )?;
        tally.show(&last);
        if success {
            tally.pass(HOST, target);
        } else {
            let new: Vec<_> = names(&failures)?.difference(&before).cloned().collect();
            let kept = match new.is_empty() {
                true => "it left no input".into(),
                false => format!("the input is {} in {}", new.join(", "), failures.display()),
            };
            tally.fail(HOST, &format!("{target}: {kept}"));
        }
    }
    Ok(())
}

/// The names of the files in `dir`.
fn names(dir: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// The targets in the manifest.
fn targets(shell: &Path) -> Result<Vec<String>> {
    let manifest = shell.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).map_err(Error::file("read", &manifest))?;
    let parsed: Manifest =
        toml::from_str(&text).map_err(|error| Error::Usage(format!("{}: {error}", manifest.display())))?;
    Ok(parsed.bin.into_iter().map(|bin| bin.name).collect())
}

/// Runs `program` for `time`. New inputs go to the first of `corpora`, failing inputs to
/// `failures`.
fn fuzzer(program: &Path, time: Duration, corpora: &[&PathBuf], failures: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(corpora).args([
        &format!("-max_total_time={}", time.as_secs().max(1)),
        &format!("-artifact_prefix={}/", failures.display()),
        // A frame's limit is 64 MiB. A target that needs seconds for one input is a hang for its
        // user.
        "-rss_limit_mb=1024",
        "-timeout=25",
        "-print_final_stats=1",
    ]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_its_corpus() {
        let shell = artifacts::workspace().join("tests/fuzz");
        let targets = targets(&shell).unwrap();
        for target in &targets {
            let inputs = fs::read_dir(shell.join("corpus").join(target)).unwrap().count();
            assert!(inputs > 0, "{target}");
        }
        assert!(targets.contains(&"migration".to_owned()), "{targets:?}");
    }
}
