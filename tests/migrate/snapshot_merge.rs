//! `vellum snapshot merge`: a chain becomes one point while its machine goes on, whole or not at all.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{Failed, LIMIT, ensure, eventually, trial};

use crate::bed::real;
use crate::home::Home;
use crate::snapshot::{files, points};
use crate::{ends_with, every_page_is_right, succeeds};

/// A point of `dir` that is restored has every page right.
fn is_right_at(home: &Home, dir: &Path, point: u64) -> Result<(), Failed> {
    let json = home.path(&format!("{point}.json"));
    let again =
        home.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
    succeeds(&home.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json)
}

/// A guest whose snapshot has a full point and `more` that continue it.
fn chain(home: &Home, dir: &Path, memory: &str, more: u64) -> Result<crate::home::Machine, Failed> {
    let write = "--workload write,order=random,rate=1000";
    let here = home.run("here", &format!("run --memory {memory},slots=3 --passes 0 {write}"))?;
    for point in 0..=more {
        home.has_written("here", 500 + 500 * point)?;
        succeeds(
            &home.vellum(&format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display()))?,
        )?;
    }
    Ok(here)
}

#[trial(real())]
fn a_chain_that_was_merged_goes_on_where_it_was() -> Result<(), Failed> {
    let home = Home::new()?;
    let dir = home.path("snap");
    let here = chain(&home, &dir, "32m", 3)?;
    let merged = home.vellum(&format!("snapshot merge {} --to 2", dir.display()))?;
    succeeds(&merged)?;
    let said = String::from_utf8(merged.stdout)?;
    ensure(said.starts_with("points 0 to 2 are point 2 now: "), || said.clone())?;
    // The machine does not know of it, and what it has followed since is enough.
    succeeds(&home.vellum(&format!("snapshot here {} --follow --downtime 1s", dir.display()))?)?;
    succeeds(&home.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    let kinds: Vec<_> =
        points(&home, &dir)?.iter().map(|point| (point["number"].as_u64(), point["full"] == true)).collect();
    ensure(kinds == [(Some(2), true), (Some(3), false), (Some(4), false)], || format!("{kinds:?}"))?;
    succeeds(&home.vellum(&format!("snapshot verify {}", dir.display()))?)?;
    for point in 2..5 {
        is_right_at(&home, &dir, point)?;
    }
    succeeds(&home.vellum(&format!("snapshot merge {}", dir.display()))?)?;
    ensure(files(&dir)? == ["manifest.json", "map-4.1", "ram-4.1", "state-4"], || {
        format!("{:?}", files(&dir))
    })?;
    is_right_at(&home, &dir, 4)
}

/// Killed anywhere, it leaves the old chain or the new one, and nothing more once somebody else has written.
#[trial(real())]
fn a_merge_that_is_killed_leaves_a_whole_chain() -> Result<(), Failed> {
    let home = Home::new()?;
    let first = home.path("snap");
    let here = chain(&home, &first, "8m", 2)?;
    succeeds(&home.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    let merge = |dir: &Path| format!("snapshot merge {}", dir.display());
    let copy = |name: &str| -> Result<_, Failed> {
        let to = home.path(name);
        succeeds(&Command::new("cp").args(["-r", "--sparse=always"]).args([&first, &to]).output()?)?;
        Ok(to)
    };
    let whole = copy("whole")?;
    let began = Instant::now();
    succeeds(&home.vellum(&merge(&whole))?)?;
    let took = began.elapsed();
    let (mut old, mut new) = (0, 0);
    for part in 0..12u32 {
        let dir = copy(&format!("part{part}"))?;
        let mut client = home.courier(&merge(&dir))?;
        let since = Instant::now();
        // Anywhere will do: where in it that is depends on the host.
        while since.elapsed() < took * part / 10 {
            std::thread::sleep(Duration::from_micros(50));
        }
        client.kill()?;
        client.wait()?;
        match points(&home, &dir)?.len() {
            1 => new += 1,
            3 => old += 1,
            other => return Err(format!("{other} points are left").into()),
        }
        succeeds(&home.vellum(&format!("snapshot verify {}", dir.display()))?)?;
        if part % 4 == 3 {
            is_right_at(&home, &dir, 2)?;
        }
        // The one that was killed may hold the directory until the kernel has cleared it away.
        eventually(LIMIT, "it can be merged", || {
            let again = home.vellum(&merge(&dir))?;
            let said = String::from_utf8_lossy(&again.stderr).into_owned();
            let done = again.status.success() || said.contains("nothing to join");
            Ok(done.then_some(()))
        })?;
        ensure(files(&dir)? == files(&whole)?, || format!("{:?}", files(&dir)))?;
        fs::remove_dir_all(dir)?;
    }
    println!("killed in {took:?}: {old} old, {new} new");
    Ok(())
}
