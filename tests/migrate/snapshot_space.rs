//! A file system that is full at any write of a snapshot, memory above 4 GiB, and pages in wrong
//! places: nothing is lost, or the loss is noticed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use support::env::TestEnv;
use support::hosts::{kvm, real};
use support::{Completion, Failed, LIMIT, Tests, ensure, eventually, test};
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE};

use crate::snapshot::points;
use crate::{ends_with, every_page_is_right, succeeds, with};

/// The granularity of a tmpfs: one page.
const STEP: u64 = 4096;

/// A tmpfs whose size can be changed.
struct Small<'a>(&'a Path);

impl<'a> Small<'a> {
    /// `None` if this process may not mount.
    fn mount(at: &'a Path) -> Result<Option<Self>, Failed> {
        fs::create_dir(at)?;
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "none"]).arg(at).stderr(Stdio::null()).status();
        Ok(mounted.is_ok_and(|status| status.success()).then_some(Self(at)))
    }

    fn used(&self) -> Result<u64, Failed> {
        let stat = rustix::fs::statvfs(self.0)?;
        Ok((stat.f_blocks - stat.f_bfree) * stat.f_frsize)
    }

    fn resize(&self, bytes: u64) -> Result<(), Failed> {
        let size = format!("remount,size={bytes}");
        succeeds(&Command::new("mount").args(["-o", &size]).arg(self.0).output()?)
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

/// Tries to write a point of a chain with room for one page more each time, until it succeeds.
/// Returns whether every page of each point is right, or `None` if this process may not mount.
fn survives_each_write(mistake: Option<&'static str>) -> Result<Option<bool>, Failed> {
    let env = TestEnv::planted(mistake)?;
    let at = env.path("small");
    let Some(small) = Small::mount(&at)? else { return Ok(None) };
    small.resize(64 << 20)?;
    let json = env.path("first.json");
    let workload = "--passes 0 --workload write,order=random,rate=500";
    let here = env.run("here", &format!("run --memory 1m {workload} --json {}", json.display()))?;
    let dir = at.join("snap");
    let snapshot =
        || env.vellum(&format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display()));
    let mut written = 600;
    env.has_written("here", written)?;
    succeeds(&snapshot()?)?;
    written += 50;
    env.has_written("here", written)?;
    // Each try has the same pages to write.
    succeeds(&env.vellum("ctl here pause")?)?;
    let (before, mut failed) = (small.used()?, 0);
    loop {
        small.resize(before + failed * STEP)?;
        let output = snapshot()?;
        if output.status.success() {
            break;
        }
        let said = String::from_utf8(with(output, 1)?.stderr)?;
        ensure(said.contains("No space left on device") && said.lines().count() == 1, || said.clone())?;
        // The machine closes its files asynchronously.
        eventually(LIMIT, "nothing is left", || Ok((small.used()? == before).then_some(())))?;
        ensure(env.standing("here").as_deref() == Some("paused"), || "it does not stay paused".into())?;
        failed += 1;
    }
    eprintln!("{failed} tries failed");
    ensure(failed > 3, || format!("{failed} tries failed"))?;
    small.resize(64 << 20)?;
    succeeds(&env.vellum("ctl here resume")?)?;
    env.has_written("here", written + 50)?;
    succeeds(&snapshot()?)?;
    let full: Vec<bool> = points(&env, &dir)?.iter().map(|point| point["full"] == true).collect();
    ensure(full == [true, false, false], || format!("{full:?}"))?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&json)?;
    let mut right = true;
    for point in 0..3 {
        let again = env.restore("again", &format!("{} --at {point}", dir.display()))?;
        succeeds(&env.vellum("ctl again stop")?)?;
        right &= again.end()?.status.success();
    }
    Ok(Some(right))
}

#[test(real())]
fn a_disk_that_is_full_at_any_write_loses_nothing_of_the_next_point() -> Result<Completion, Failed> {
    match survives_each_write(None)? {
        Some(right) => ensure(right, || "a page is wrong".into()).map(|()| Completion::Completed),
        None => Ok(Completion::ignored_with("needs a tmpfs of its own: root, and mount(8)")),
    }
}

/// A guest writes one page in each mebibyte of 6 GiB, in several memslots. Each of two points is
/// restored and migrated in each way.
#[test(real())]
fn memory_above_four_gib_is_saved_and_comes_back_in_each_way() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let workload = "--passes 0 --workload write,order=random,stride=1m,rate=20000";
    let here = env.run("here", &format!("run --memory 6g,slots=3 {workload}"))?;
    env.has_written("here", 10_000)?;
    let dir = env.path("snap");
    let snapshot = |name: &str, more: &str| -> Result<(), Failed> {
        succeeds(&env.vellum(&format!("snapshot {name} {} --downtime 1m {more}", dir.display()))?)
    };
    snapshot("here", "--follow")?;
    env.has_written("here", 20_000)?;
    snapshot("here", "--stop")?;
    ends_with(here, 0)?;
    let ways = [("eager", "--verify"), ("map", "--mode postcopy"), ("demand", "--mode hybrid")];
    for (point, (memory, how)) in [0, 1].into_iter().flat_map(|point| ways.map(|way| (point, way))) {
        let json = env.path("end.json");
        let back = env.restore("back", &format!("{} --at {point} --memory {memory}", dir.display()))?;
        let there = env.receive("there", &format!("--json {}", json.display()))?;
        succeeds(&env.migrate("back", "there", &format!("--downtime 1m {how}"))?)?;
        ends_with(back, 15)?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        every_page_is_right(&json)?;
        fs::remove_file(json)?;
    }
    Ok(())
}

/// Whether a machine with several memslots is restored with every page right.
fn comes_back(mistake: Option<&'static str>) -> Result<Option<bool>, Failed> {
    let env = TestEnv::planted(mistake)?;
    let here =
        env.run("here", "run --memory 16m,slots=3 --passes 0 --workload write,order=random,rate=20000")?;
    env.has_written("here", 4096)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let Ok(again) = env.restore("again", &dir.display().to_string()) else { return Ok(Some(false)) };
    succeeds(&env.vellum("ctl again stop")?)?;
    Ok(Some(again.end()?.status.success()))
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    type Right = fn(Option<&'static str>) -> Result<Option<bool>, Failed>;
    let planted: [(&str, _, Right); 2] =
        [("owed-forgotten", real(), survives_each_write), ("layer-off-by-a-slot", kvm(), comes_back)];
    for (mistake, need, is_right) in planted {
        tests.add(format!("planted_{mistake}_is_caught_in_a_snapshot"), need, move || {
            if !POSSIBLE {
                return Ok(Completion::ignored_with(IMPOSSIBLE));
            }
            match is_right(Some(mistake))? {
                Some(right) => ensure(!right, || "nobody notices".into()).map(|()| Completion::Completed),
                None => Ok(Completion::ignored_with("needs a tmpfs of its own: root, and mount(8)")),
            }
        });
    }
}
