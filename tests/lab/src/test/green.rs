//! What a run leaves in the cache: its times, and the commit at which `--full` passed.

use std::fs;
use std::process::Command;

use clap::ValueEnum;

use super::Options;
use crate::cache::Cache;
use crate::{Error, Result, artifacts, tool};

/// The commit and time of the last run with `--full` that passed.
const FULL: &str = "test/full";
/// The times of the last run.
const TIMES: &str = "test/times";

/// The commit of this clone.
#[derive(PartialEq, Eq)]
pub struct Commit {
    name: String,
    /// Whether the tree is this commit's. Otherwise the commit does not identify it.
    is_whole: bool,
}

impl Commit {
    /// The commit as it is now. Prebuilt test programs run without a clone.
    pub fn now() -> Self {
        Self {
            name: commit().unwrap_or_else(|_| "of no clone".into()),
            is_whole: artifacts::is_uncommitted().is_ok_and(|uncommitted| !uncommitted),
        }
    }
}

/// Records the result of a run with `options` that began at the commit `began`.
pub fn keep(options: &Options, status: u8, times: &str, began: &Commit) -> Result<()> {
    let cache = Cache::open()?;
    cache.dir("test")?;
    let write = |name: &str, text: String| {
        let path = cache.path(name);
        fs::write(&path, text).map_err(Error::file("write", &path))
    };
    let commit = &began.name;
    write(TIMES, format!("{}\n{commit}\n{times}", asked_for(options)))?;
    // A run takes hours, in which the tree may change.
    if options.full && status == 0 && began.is_whole && *began == Commit::now() {
        let now = tool::text(Command::new("date").args(["-u", "+%F %R UTC"]))?;
        write(FULL, format!("{commit} {}", now.trim()))?;
    }
    Ok(())
}

/// When `--full` last passed here.
pub fn last_full(cache: &Cache) -> String {
    let kept = fs::read_to_string(cache.path(FULL)).unwrap_or_default();
    let Some((commit, when)) = kept.trim().split_once(' ') else {
        return "cargo lab test --full: has not passed here\n".into();
    };
    // In a clone without that commit, the distance is omitted.
    let since = git(&["rev-list", "--count", &format!("{commit}..HEAD")]);
    let since = since.map_or(String::new(), |count| format!(", {count} commits ago"));
    format!("cargo lab test --full: last passed at {commit} on {when}{since}\n")
}

fn git(arguments: &[&str]) -> Result<String> {
    let said = tool::text(Command::new("git").args(arguments).current_dir(artifacts::workspace()))?;
    Ok(said.trim().to_owned())
}

fn commit() -> Result<String> {
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn asked_for(options: &Options) -> String {
    let host = options.bed.and_then(|host| Some(format!(" {}", host.to_possible_value()?.get_name())));
    let host = host.unwrap_or_default();
    let full = if options.full { " --full" } else { "" };
    let loaded = options.loaded.map(|times| format!(" --loaded {times}")).unwrap_or_default();
    format!("cargo lab test{host}{full}{loaded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_never_passed_is_said_to_have_not_and_what_has_with_its_commit() {
        let dir = std::env::temp_dir().join(format!("vellum-lab-full-{}", std::process::id()));
        let cache = Cache::at(dir.clone()).unwrap();
        assert!(last_full(&cache).contains("has not passed here"));
        cache.dir("test").unwrap();
        fs::write(cache.path(FULL), "0123456789ab 2026-01-02 03:04 UTC").unwrap();
        let said = last_full(&cache);
        assert!(said.contains("at 0123456789ab on 2026-01-02 03:04 UTC"), "{said}");
        fs::remove_dir_all(dir).unwrap();
    }
}
