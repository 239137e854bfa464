//! `vellum restore --memory map`: memory that maps the files of a snapshot.

use std::fs;
use std::path::Path;

use support::env::TestEnv;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, is_caught, test};

use crate::{ends_with, every_page_is_right, kib, succeeds, with};

/// Each point of a chain is right, with memslots that do not begin where layers do. The machine is
/// then migrated, saved and restored again.
#[test(real())]
fn memory_that_shows_files_is_right_and_moves_and_is_saved() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let write = "--workload write,order=random,rate=20000,write=80";
    let here = env.run("here", &format!("run --cpus 2 --memory 32m,slots=3 --passes 0 {write}"))?;
    let dir = env.path("snap");
    for point in 0..3u64 {
        env.has_written("here", 20_000 + 4000 * point)?;
        succeeds(
            &env.vellum(&format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display()))?,
        )?;
    }
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    for point in 0..3 {
        let json = env.path(&format!("{point}.json"));
        let host = format!("{} --at {point} --memory map --json {}", dir.display(), json.display());
        let again = env.restore("again", &host)?;
        let merged = env.vellum(&format!("snapshot merge {}", dir.display()))?;
        let said = String::from_utf8(with(merged, 2)?.stderr)?;
        ensure(said.contains("shows it as memory"), || said.clone())?;
        if point == 0 {
            // Stopped at once: most of its pages were not touched.
            succeeds(&env.vellum("ctl again stop")?)?;
            ends_with(again, 0)?;
            every_page_is_right(&json)?;
            continue;
        }
        if point == 1 {
            env.has_written("again", 30_000)?;
        }
        let there = env.receive("there", "")?;
        succeeds(&env.migrate("again", "there", "--verify --downtime 1s --timeout 3s,then=force")?)?;
        ends_with(again, 15)?;
        let last = env.path(&format!("last{point}"));
        succeeds(&env.vellum(&format!("snapshot there {} --stop", last.display()))?)?;
        ends_with(there, 0)?;
        let third = env.restore("third", &format!("{} --memory map", last.display()))?;
        let more = env.path(&format!("more{point}"));
        succeeds(&env.vellum(&format!("snapshot third {} --stop", more.display()))?)?;
        ends_with(third, 0)?;
        let end = env.path(&format!("end{point}.json"));
        let fourth = env.restore(
            "fourth",
            &format!("{} --memory map,backing=thp --json {}", more.display(), end.display()),
        )?;
        env.has_written("fourth", 40_000)?;
        succeeds(&env.vellum("ctl fourth stop")?)?;
        ends_with(fourth, 0)?;
        every_page_is_right(&end)?;
    }
    Ok(())
}

/// The KiB of mappings of `file` in process `pid`: its proportional share, and its private pages.
fn shown(pid: u32, file: &Path) -> Result<[u64; 2], Failed> {
    let (mut sum, mut is_of_file) = ([0; 2], false);
    for line in fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
        // A mapping begins with a line that has its addresses and ends with its file.
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_of_file = line.ends_with(&file.display().to_string());
        }
        let values = ["Pss:", "Anonymous:"].map(|name| kib(line, name).filter(|_| is_of_file).unwrap_or(0));
        sum = [sum[0] + values[0], sum[1] + values[1]];
    }
    Ok(sum)
}

/// Ten machines restored from one snapshot each write to some of their memory. Each adds only the
/// pages that it wrote to the host's memory, and all share one copy of the files' pages. The
/// machine has 64 MiB, or 1 GiB with `VELLUM_MIGRATION=all`.
#[test(real())]
fn ten_clones_add_to_memory_what_they_write() -> Result<(), Failed> {
    const CLONES: u64 = 10;
    /// Pages that devices and KVM write, or that are written while the others are counted.
    const BESIDE: u64 = 64;
    let mib: u64 =
        if std::env::var("VELLUM_MIGRATION").is_ok_and(|value| value == "all") { 1024 } else { 64 };
    let pages = mib << 8;
    let env = TestEnv::new()?;
    // In order and once: each write is to a new page.
    let write = "--workload write,order=sequential,rate=2000,warm";
    let here = env.run("here", &format!("run --memory {mib}m --passes 0 {write}"))?;
    env.has_written("here", pages)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --paused --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let ram = dir.join("ram-0");
    let names: Vec<String> = (0..CLONES).map(|number| format!("clone{number}")).collect();
    let mut clones = Vec::new();
    for name in &names {
        clones.push(env.restore(name, &format!("{} --memory map --paused", dir.display()))?);
    }
    let (mut sum, mut own_sum) = (0, 0);
    for (at, (name, clone)) in (1..).zip(names.iter().zip(&clones)) {
        let before = env.done(name)?;
        succeeds(&env.vellum(&format!("ctl {name} resume"))?)?;
        env.has_written(name, before + 50 * at)?;
        succeeds(&env.vellum(&format!("ctl {name} pause"))?)?;
        let written = env.done(name)? - before;
        let [_, own] = shown(clone.child.id(), &ram)?;
        eprintln!("{name}: {written} pages written, {own} KiB of its own");
        ensure((own / 4).abs_diff(written) <= BESIDE, || {
            format!("{written} pages written, {own} KiB of its own")
        })?;
    }
    for clone in &clones {
        let [share, own] = shown(clone.child.id(), &ram)?;
        (sum, own_sum) = (sum + share, own_sum + own);
    }
    eprintln!("{sum} KiB in all, {own_sum} of them their own, of {} KiB that the snapshot has", pages * 4);
    ensure(sum <= own_sum + pages * 4 + CLONES * 4, || {
        format!("{sum} KiB in all, {own_sum} of them their own")
    })?;
    for (name, clone) in names.iter().zip(clones) {
        succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
        ends_with(clone, 0)?;
    }
    Ok(())
}

/// A layer that becomes shorter while a machine maps it ends the machine. The message names the
/// file.
#[test(real())]
fn a_layer_that_becomes_shorter_is_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 32m --passes 0 --workload write,rate=20000")?;
    env.has_written("here", 8192)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let mut again = env.restore("again", &format!("{} --memory map --paused", dir.display()))?;
    fs::File::options().write(true).open(dir.join("ram-0"))?.set_len(0)?;
    succeeds(&env.vellum("ctl again resume")?)?;
    eventually(LIMIT, "it ends", || Ok(again.child.try_wait()?))?;
    let said = String::from_utf8(with(again.end()?, 1)?.stderr)?;
    let line = "ram-0 became shorter while it was mapped: the guest's memory is gone";
    ensure(said.contains(line), || said.clone())
}

/// Requires a limit on mappings that the machine below exceeds.
fn few_mappings() -> Need {
    real()?;
    let most = fs::read_to_string(MAX_MAP_COUNT).map_err(|error| format!("{MAX_MAP_COUNT}: {error}"))?;
    match most.trim().parse::<u64>() {
        Ok(most) if most <= 2 * PIECES => Ok(()),
        _ => Err(format!("needs vm.max_map_count of {} at most: sysctl vm.max_map_count=65530", 2 * PIECES)),
    }
}

const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";
/// The number of pages with a gap behind each.
const PIECES: u64 = 33_000;

/// A machine has written to every second page, so that its snapshot would take more mappings than a
/// process may have.
#[test(few_mappings())]
fn more_pieces_than_mappings_are_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let line = format!("run --memory {}k --passes 0 --workload write,stride=8k", PIECES * 8);
    let here = env.run("here", &line)?;
    env.has_written("here", PIECES)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --paused --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let refused = with(env.vellum(&format!("restore {} --memory map", dir.display()))?, 2)?;
    let said = String::from_utf8(refused.stderr)?;
    ensure(said.lines().count() == 1 && said.contains("raise vm.max_map_count by "), || said.clone())?;
    // With eager memory it is restored.
    let again = env.restore("again", &format!("{} --json {}", dir.display(), env.path("json").display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&env.path("json"))
}

/// Whether a machine that maps files migrates at once with every page right.
fn moves(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let here = env.run("here", "run --memory 16m --passes 0 --workload write,rate=20000,warm")?;
    env.has_written("here", 8192)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --paused --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let again = env.restore("again", &format!("{} --memory map --paused", dir.display()))?;
    let there = env.receive("there", "")?;
    succeeds(&env.migrate("again", "there", "--downtime 1s --timeout 3s,then=force")?)?;
    ends_with(again, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    Ok(there.end()?.status.success())
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    tests.add("planted_shown-left-out_is_caught", kvm(), || {
        ensure(moves(None)?, || "it goes wrong without it".into())?;
        is_caught(|| moves(Some("shown-left-out")))
    });
}
