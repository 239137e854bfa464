//! `vellum restore --memory demand`: pages are read on demand. With `--record=1h` no others are
//! read.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use support::env::{Machine, TestEnv};
use support::hosts::{huge_pages, kvm, real};
use support::{Completion, Failed, LIMIT, Tests, ensure, eventually, is_caught, test, tools};
use vellum_migration::snapshot::working_set::{self, WorkingSet};
use vellum_sys::host::is_root;
use vellum_sys::mmap::PAGE_SIZE;

use crate::VELLUM;
use crate::{ends_with, every_page_is_right, numbered, succeeds, with};

/// A snapshot of a guest that has written all of its memory. The machine ends with the snapshot.
fn taken(env: &TestEnv, memory: &str, write: &str) -> Result<PathBuf, Failed> {
    let here =
        env.run("here", &format!("run --cpus 2 --memory {memory} --passes 0 --workload write,{write}"))?;
    env.has_written("here", 20_000)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop --downtime 1s --timeout 3s", dir.display()))?)?;
    ends_with(here, 0)?;
    Ok(dir)
}

/// Whether the machine has a userfaultfd.
fn has_userfaultfd(machine: &Machine) -> Result<bool, Failed> {
    let mut links = fs::read_dir(format!("/proc/{}/fd", machine.child.id()))?
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    Ok(links.any(|link| link.to_string_lossy().contains("userfaultfd")))
}

/// Whether the machine runs and has closed its userfaultfd. A process that is ending has no
/// descriptors either, but does not answer, so it is asked last.
fn runs_with_all_there(env: &TestEnv, name: &str, machine: &Machine) -> Result<bool, Failed> {
    Ok(!has_userfaultfd(machine)? && env.standing(name).as_deref() == Some("running"))
}

fn is_all_there(machine: &Machine) -> Result<(), Failed> {
    eventually(LIMIT, "all of it is there", || Ok((!has_userfaultfd(machine)?).then_some(())))
}

/// Restores on this backing and stops at once, stops when all pages are there, migrates at once,
/// and saves at once.
fn is_right_on(backing: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = taken(&env, "32m,slots=3", "order=random,rate=20000,write=80,warm")?;
    let json = |name: &str| env.path(&format!("{name}.json"));
    let restore = |name: &str, dir: &Path, more: &str| {
        let memory = format!("--memory demand,backing={backing} --json {}", json(name).display());
        env.restore(name, &format!("{} {memory} {more}", dir.display()))
    };
    let stop = |name: &str, machine: Machine| -> Result<(), Failed> {
        succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
        ends_with(machine, 0)?;
        every_page_is_right(&json(name))
    };
    let asked = restore("asked", &dir, "--record=1h")?;
    ensure(has_userfaultfd(&asked)?, || "it came unasked".into())?;
    stop("asked", asked)?;
    let whole = restore("whole", &dir, "")?;
    is_all_there(&whole)?;
    env.has_written("whole", 21_000)?;
    stop("whole", whole)?;
    let moves = restore("moves", &dir, "--record=1h")?;
    let receive = format!("--memory backing={backing} --json {}", json("there").display());
    let there = env.receive("there", &receive)?;
    succeeds(&env.migrate("moves", "there", "--verify --downtime 1s --timeout 3s,then=force")?)?;
    ends_with(moves, 15)?;
    stop("there", there)?;
    let saves = restore("saves", &dir, "--record=1h")?;
    let again = env.path("again.snap");
    succeeds(&env.vellum(&format!("snapshot saves {} --stop --downtime 1s --timeout 3s", again.display()))?)?;
    ends_with(saves, 0)?;
    let last = restore("last", &again, "")?;
    stop("last", last)
}

#[test(real())]
fn anonymous_memory_that_comes_on_demand_is_right() -> Result<(), Failed> {
    is_right_on("anonymous")
}

#[test(real())]
fn transparent_huge_pages_that_come_on_demand_are_right() -> Result<(), Failed> {
    is_right_on("thp")
}

#[test(real())]
fn shared_memory_that_comes_on_demand_is_right() -> Result<(), Failed> {
    is_right_on("shmem")?;
    is_right_on("memfd")
}

#[test(real(), huge_pages(2 << 20, 16))]
fn huge_pages_that_come_on_demand_are_right() -> Result<(), Failed> {
    is_right_on("hugetlb-2m")
}

/// Tests demand paging on every KVM: the guest, its devices' state and the VMM's own writes find
/// their pages.
#[test(kvm())]
fn a_guest_finds_its_pages_on_demand() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = taken(&env, "8m", "order=random,warm")?;
    let json = env.path("end.json");
    let host = format!("{} --memory demand --json {}", dir.display(), json.display());
    for more in ["", "--record=1h"] {
        let again = env.restore("again", &format!("{host} {more}"))?;
        succeeds(&env.vellum("ctl again pause")?)?;
        succeeds(&env.vellum("ctl again resume")?)?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(again, 0)?;
        every_page_is_right(&json)?;
    }
    Ok(())
}

/// A disk's thread, its rings and the restore of its device wait for pages as vCPUs do. The guest's
/// numbers are consecutive.
#[test(real())]
fn a_disk_finds_its_pages_on_demand() -> Result<(), Failed> {
    for memory in ["anonymous,lock", "shmem"] {
        let env = TestEnv::new()?;
        let here = numbered::here(&env)?;
        let dir = env.path("snap");
        succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
        ends_with(here, 0)?;
        let host = format!("--memory demand,{memory} --record=1h {}", numbered::devices(&env, "far"));
        let again = env.restore("again", &format!("{} {host}", dir.display()))?;
        numbered::has_printed(&env, "far")?;
        ensure(has_userfaultfd(&again)?, || "it came unasked".into())?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(again, 0)?;
        numbered::go_on(&env)?;
    }
    Ok(())
}

/// A restore records which pages it wanted, and the next one reads them first. Invalid combinations
/// are refused.
#[test(real())]
fn what_is_wanted_is_recorded_and_prefetched() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = taken(&env, "32m", "order=random,hot=10,share=100,rate=20000,warm")?;
    let path = dir.display().to_string();
    let refused = |arguments: &str, says: &str| -> Result<(), Failed> {
        let said = String::from_utf8(with(env.vellum(&format!("restore {path} {arguments}"))?, 2)?.stderr)?;
        ensure(said.contains(says) && said.lines().count() == 1, || format!("not {says:?}: {said}"))
    };
    refused("--prefetch", "--prefetch: it goes with --memory demand alone")?;
    refused("--record --memory map", "--record: it goes with --memory demand alone")?;
    refused("--memory demand --prefetch", "snap was recorded: --record does that")?;
    let recorded = dir.join(working_set::NAME);
    let machine = env.restore("records", &format!("{path} --memory demand --record=500ms"))?;
    eventually(LIMIT, "it is recorded", || Ok(recorded.exists().then_some(())))?;
    is_all_there(&machine)?;
    succeeds(&env.vellum("ctl records stop")?)?;
    ends_with(machine, 0)?;
    let bytes = fs::read(&recorded)?;
    ensure(fs::metadata(&recorded)?.permissions().mode() & 0o777 == 0o600, || "others may read it".into())?;
    // The machine has as many pages as a layer.
    let pages = fs::metadata(dir.join("ram-0"))?.len() / PAGE_SIZE;
    let set = WorkingSet::parse(&bytes, pages)?;
    let some = (1..=pages as usize).contains(&set.firsts.len());
    ensure(set.unit == 1 && some, || format!("{} entries", set.firsts.len()))?;
    for backing in ["anonymous", "memfd"] {
        let json = env.path("end.json");
        let more = format!("--memory demand,backing={backing} --prefetch --json {}", json.display());
        let machine = env.restore("again", &format!("{path} {more}"))?;
        is_all_there(&machine)?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(machine, 0)?;
        every_page_is_right(&json)?;
    }
    // The record is replaced as a whole, and a damaged one is refused.
    let mut planted = bytes.clone();
    planted[40] ^= 1;
    fs::write(&recorded, &planted)?;
    refused("--memory demand --prefetch", "working-set, byte ")?;
    let machine = env.restore("records", &format!("{path} --memory demand --record=1ms"))?;
    eventually(LIMIT, "it is replaced", || {
        Ok(WorkingSet::parse(&fs::read(&recorded)?, pages).is_ok().then_some(()))
    })?;
    succeeds(&env.vellum("ctl records stop")?)?;
    ends_with(machine, 0)?;
    let names = crate::snapshot::files(&dir)?;
    ensure(names == ["manifest.json", "map-0", "ram-0", "state-0", "working-set"], || format!("{names:?}"))
}

/// Whether a damaged page that is found while the guest runs ends the machine, with the file and
/// the place.
fn ends_by_a_damaged_page(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let dir = taken(&env, "16m", "order=random,warm")?;
    let file = fs::File::options().read(true).write(true).open(dir.join("ram-0"))?;
    // A byte of the page outside of its stamp.
    let (page, mut byte) = (1000, [0]);
    file.read_exact_at(&mut byte, page * PAGE_SIZE + 4000)?;
    file.write_all_at(&[byte[0] ^ 1], page * PAGE_SIZE + 4000)?;
    let mut machine = env.run("again", &format!("restore {} --memory demand", dir.display()))?;
    let mut ended = None;
    eventually(LIMIT, "it ends, or all is there", || {
        ended = machine.child.try_wait()?;
        let there = ended.is_none() && runs_with_all_there(&env, "again", &machine)?;
        Ok((ended.is_some() || there).then_some(()))
    })?;
    if ended.is_none() {
        return Ok(false);
    }
    let said = String::from_utf8(with(machine.end()?, 1)?.stderr)?;
    let line = format!("ram-0, byte {}: page {page} of the machine is not the one", page * PAGE_SIZE);
    ensure(said.contains(&line) && said.lines().count() == 1, || said.clone())?;
    Ok(true)
}

#[test(real())]
fn a_damaged_page_is_given_to_nobody() -> Result<(), Failed> {
    ensure(ends_by_a_damaged_page(None)?, || "it runs on".into())
}

/// A file that becomes shorter is named.
#[test(real())]
fn a_file_that_becomes_shorter_is_named_on_demand() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = taken(&env, "16m", "order=random,rate=20000,warm")?;
    let restore = format!("{} --memory demand --record=1h --paused", dir.display());
    let mut again = env.restore("again", &restore)?;
    fs::File::options().write(true).open(dir.join("ram-0"))?.set_len(0)?;
    // The machine may end before it answers.
    env.vellum("ctl again resume")?;
    eventually(LIMIT, "it ends", || Ok(again.child.try_wait()?))?;
    let said = String::from_utf8(with(again.end()?, 1)?.stderr)?;
    ensure(said.contains("ram-0, byte ") && said.contains("it has become shorter"), || said.clone())
}

/// A user who may not use userfaultfd is told the remedy, before anything starts.
#[test(real())]
fn who_may_have_no_userfaultfd_is_told_the_remedy() -> Result<Completion, Failed> {
    let env = TestEnv::new()?;
    let dir = taken(&env, "8m", "rate=20000")?;
    for (path, mode) in [(env.dir(), 0o755), (&dir, 0o755)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    }
    for entry in fs::read_dir(&dir)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o644))?;
    }
    // If all users may use it, there is nothing to test.
    let free = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups", VELLUM, "restore"]).arg(&dir);
    let output = nobody.args(["--memory", "demand"]).output();
    if free.trim() != "0" || !is_root() || tools::find("setpriv").is_none() {
        return Ok(Completion::ignored_with("needs root, setpriv(1), and vm.unprivileged_userfaultfd=0"));
    }
    let output = output?;
    ensure(output.status.code() == Some(2), || format!("{output:?}"))?;
    let said = String::from_utf8(output.stderr)?;
    let named = said.contains("--memory demand: ") && said.contains("vm.unprivileged_userfaultfd=1");
    ensure(named && said.lines().count() == 1, || said.clone())?;
    Ok(Completion::Completed)
}

/// Whether a machine with no page read yet migrates with every page right.
fn moves(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let dir = taken(&env, "16m", "rate=20000,warm")?;
    let again = env.restore("again", &format!("{} --memory demand --record=1h --paused", dir.display()))?;
    let there = env.receive("there", "")?;
    succeeds(&env.migrate("again", "there", "--downtime 1s --timeout 3s,then=force")?)?;
    ends_with(again, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    Ok(there.end()?.status.success())
}

/// Whether a restore on huge pages completes with every page right.
fn comes_on_huge_pages(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let dir = taken(&env, "16m", "order=random,warm")?;
    let json = env.path("end.json");
    let memory = format!("--memory demand,backing=hugetlb-2m --json {}", json.display());
    let mut machine = env.run("again", &format!("restore {} {memory}", dir.display()))?;
    let over = eventually(LIMIT, "it ends, or all is there", || {
        let ended = machine.child.try_wait()?.is_some();
        Ok((ended || runs_with_all_there(&env, "again", &machine)?).then_some(ended))
    })?;
    if over {
        return Ok(false);
    }
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(machine, 0)?;
    every_page_is_right(&json).map(|()| true)
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    type Right = fn(Option<&'static str>) -> Result<bool, Failed>;
    let planted: [(&str, _, Right); 3] = [
        ("sums-unchecked", kvm(), ends_by_a_damaged_page),
        ("shown-left-out", kvm(), moves),
        ("small-copy", kvm().and_then(|()| huge_pages(2 << 20, 8)), comes_on_huge_pages),
    ];
    for (mistake, need, is_right) in planted {
        tests.add(format!("planted_{mistake}_is_caught_on_demand"), need, move || {
            ensure(is_right(None)?, || "it goes wrong without it".into())?;
            is_caught(|| is_right(Some(mistake)))
        });
    }
}
