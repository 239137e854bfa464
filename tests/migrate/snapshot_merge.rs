//! `vellum snapshot merge`: a chain becomes one point while its machine runs on, completely or not
//! at all.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::env::TestEnv;
use support::hosts::real;
use support::{Completion, Failed, LIMIT, ensure, eventually, test};

use crate::snapshot::{files, points};
use crate::{ends_with, every_page_is_right, succeeds, with};

/// Checks that a restored point of `dir` has every page right.
fn is_right_at(env: &TestEnv, dir: &Path, point: u64) -> Result<(), Failed> {
    let json = env.path(&format!("{point}.json"));
    let again = env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json)
}

/// A guest whose snapshot has a full point and `more` points that continue it.
fn chain(env: &TestEnv, dir: &Path, memory: &str, more: u64) -> Result<support::env::Machine, Failed> {
    let write = "--workload write,order=random,rate=1000";
    let here = env.run("here", &format!("run --memory {memory},slots=3 --passes 0 {write}"))?;
    for point in 0..=more {
        env.has_written("here", 500 + 500 * point)?;
        succeeds(
            &env.vellum(&format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display()))?,
        )?;
    }
    Ok(here)
}

#[test(real())]
fn a_chain_that_was_merged_goes_on_where_it_was() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = env.path("snap");
    let here = chain(&env, &dir, "32m", 3)?;
    let merged = env.vellum(&format!("snapshot merge {} --to 2", dir.display()))?;
    succeeds(&merged)?;
    let said = String::from_utf8(merged.stdout)?;
    ensure(said.starts_with("points 0 to 2 are point 2 now: "), || said.clone())?;
    // The machine does not know of the merge. Its tracking continues the newest point.
    succeeds(&env.vellum(&format!("snapshot here {} --follow --downtime 1s", dir.display()))?)?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    let kinds: Vec<_> =
        points(&env, &dir)?.iter().map(|point| (point["number"].as_u64(), point["full"] == true)).collect();
    ensure(kinds == [(Some(2), true), (Some(3), false), (Some(4), false)], || format!("{kinds:?}"))?;
    succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
    for point in 2..5 {
        is_right_at(&env, &dir, point)?;
    }
    succeeds(&env.vellum(&format!("snapshot merge {}", dir.display()))?)?;
    ensure(files(&dir)? == ["manifest.json", "map-4.1", "ram-4.1", "state-4"], || {
        format!("{:?}", files(&dir))
    })?;
    is_right_at(&env, &dir, 4)
}

/// A merge that is killed anywhere leaves the old chain or the new one. Its other files are removed
/// by the next writer.
#[test(real())]
fn a_merge_that_is_killed_leaves_a_whole_chain() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let first = env.path("snap");
    let here = chain(&env, &first, "8m", 2)?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    let merge = |dir: &Path| format!("snapshot merge {}", dir.display());
    let copy = |name: &str| -> Result<_, Failed> {
        let to = env.path(name);
        succeeds(&Command::new("cp").args(["-r", "--sparse=always"]).args([&first, &to]).output()?)?;
        Ok(to)
    };
    let whole = copy("whole")?;
    let began = Instant::now();
    succeeds(&env.vellum(&merge(&whole))?)?;
    let took = began.elapsed();
    let (mut old, mut new) = (0, 0);
    for part in 0..12u32 {
        let dir = copy(&format!("part{part}"))?;
        let mut client = env.migration_client(&merge(&dir))?;
        let since = Instant::now();
        // Where in the merge this ends depends on the host. Any place will do.
        while since.elapsed() < took * part / 10 {
            std::thread::sleep(Duration::from_micros(50));
        }
        client.kill()?;
        client.wait()?;
        match points(&env, &dir)?.len() {
            1 => new += 1,
            3 => old += 1,
            other => return Err(format!("{other} points are left").into()),
        }
        succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
        if part % 4 == 3 {
            is_right_at(&env, &dir, 2)?;
        }
        // The killed process may hold the directory's lock until the kernel has cleaned up.
        eventually(LIMIT, "it can be merged", || {
            let again = env.vellum(&merge(&dir))?;
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

/// A tmpfs of a limited number of pages.
struct Small<'a>(&'a Path);

impl Small<'_> {
    fn has(&self, how: &str, pages: u64) -> bool {
        let size = format!("{how}size={}", pages * 4096);
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "none"]).arg(self.0).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        // It may not be mounted.
        let _ = Command::new("umount").arg(self.0).stderr(Stdio::null()).status();
    }
}

/// A file system that is full at any point of the merge leaves the old chain and no other file.
/// With enough room the chain is merged.
#[test(real())]
fn a_merge_without_room_leaves_the_chain_as_it_was() -> Result<Completion, Failed> {
    let env = TestEnv::new()?;
    let first = env.path("snap");
    let here = chain(&env, &first, "8m", 2)?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    // In pages. The kernel counts eighths of them.
    let used = |dir: &Path, name: &str| -> Result<u64, Failed> {
        Ok(fs::metadata(dir.join(name))?.blocks().div_ceil(8))
    };
    let path = env.path("small");
    fs::create_dir(&path)?;
    let small = Small(&path);
    if !small.has("", 64 << 20 >> 12) {
        return Ok(Completion::ignored_with("needs a tmpfs of its own: root, and mount(8)"));
    }
    let dir = path.join("snap");
    let copy = || Command::new("cp").args(["-r", "--sparse=always"]).args([&first, &dir]).output();
    succeeds(&copy()?)?;
    let merge = format!("snapshot merge {}", dir.display());
    succeeds(&env.vellum(&merge)?)?;
    let pages = used(&dir, "ram-2.1")?;
    let map = used(&dir, "map-2.1")?;
    fs::remove_dir_all(&dir)?;
    succeeds(&copy()?)?;
    let before = files(&dir)?;
    let mut taken = 0;
    for name in &before {
        taken += used(&dir, name)?;
    }
    // Room for part of the pages, and then for part of the rest: the map, the list, the directory.
    let steps = [0, pages / 3, pages - 1].into_iter().chain(pages..pages + map + 4);
    let mut refused = 0;
    for room in steps {
        ensure(small.has("remount,", taken + room), || format!("no room for {room} pages more"))?;
        let output = env.vellum(&merge)?;
        if output.status.success() {
            break;
        }
        let said = String::from_utf8(with(output, 1)?.stderr)?;
        ensure(said.contains("No space left on device") && said.lines().count() == 1, || said.clone())?;
        ensure(files(&dir)? == before, || format!("{room} pages: {:?}", files(&dir)))?;
        ensure(points(&env, &dir)?.len() == 3, || format!("{room} pages: points are gone"))?;
        succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
        refused += 1;
    }
    // Three times the pages do not fit, and at least once the map does not.
    ensure(refused > 3, || format!("refused {refused} times"))?;
    ensure(files(&dir)? == ["manifest.json", "map-2.1", "ram-2.1", "state-2"], || {
        format!("{:?}", files(&dir))
    })?;
    is_right_at(&env, &dir, 2)?;
    Ok(Completion::Completed)
}
