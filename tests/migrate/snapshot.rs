//! `vellum snapshot` and `vellum restore`: a restored machine is the one that was written,
//! completely or not at all.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::env::{Machine, TestEnv};
use support::hosts::{kvm, real};
use support::{Completion, Failed, LIMIT, ensure, eventually, test};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, MigrateRequest};
use vellum_kvm::arch::layout;

use crate::{counting, ends_with, every_page_is_right, has_counted, succeeds, with};

pub fn files(dir: &Path) -> Result<Vec<String>, Failed> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Saves a writing guest with each tracker. The machine and each restored point have every page
/// right. A restored machine can be migrated and saved again.
#[test(real())]
fn a_guest_that_writes_is_restored_at_each_of_its_points() -> Result<(), Failed> {
    let ways = [("bitmap", ""), ("manual-protect", ""), ("initially-set", ""), ("ring", "--dirty-ring=1024")];
    for (tracker, ring) in ways {
        let env = TestEnv::new()?;
        let write = "--workload write,order=random,rate=20000,write=80";
        let json = env.path("first.json");
        let line =
            format!("run --cpus 2 --memory 32m,slots=3 --passes 0 {write} {ring} --json {}", json.display());
        let here = env.run("here", &line)?;
        let dir = env.path("snap");
        let snapshot = |more: &str| {
            env.vellum(&format!("snapshot here {} --downtime 1s --timeout 3s {more}", dir.display()))
        };
        env.has_written("here", 20_000)?;
        succeeds(&snapshot(&format!("--tracker {tracker}"))?)?;
        ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
        env.has_written("here", 30_000)?;
        succeeds(&snapshot("")?)?;
        succeeds(&env.vellum("ctl here stop")?)?;
        ends_with(here, 0)?;
        every_page_is_right(&json)?;
        succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
        for point in 0..2 {
            let json = env.path(&format!("{point}.json"));
            let host = format!("{} --at {point} --json {} {ring}", dir.display(), json.display());
            let again = env.restore("again", &host)?;
            env.has_written("again", 40_000)?;
            if point == 0 {
                succeeds(&env.vellum("ctl again stop")?)?;
                ends_with(again, 0)?;
                every_page_is_right(&json)?;
                continue;
            }
            let there = env.receive("there", ring)?;
            succeeds(&env.migrate("again", "there", "--downtime 1s --timeout 3s,then=force")?)?;
            ends_with(again, 15)?;
            let last = env.path("last");
            succeeds(&env.vellum(&format!("snapshot there {} --stop", last.display()))?)?;
            ends_with(there, 0)?;
            let end = env.path("end.json");
            let again = env.restore("last", &format!("{} --json {}", last.display(), end.display()))?;
            succeeds(&env.vellum("ctl last stop")?)?;
            ends_with(again, 0)?;
            every_page_is_right(&end)?;
        }
    }
    Ok(())
}

/// A chain of points. Each except the first has only the changes. One fails on the way, and its
/// changes are in the next one. Each point is restored with every page right. After a migration the
/// next point is full.
#[test(real())]
fn what_has_changed_is_enough_for_a_point() -> Result<(), Failed> {
    for (tracker, ring) in [("initially-set", ""), ("ring", "--dirty-ring=1024")] {
        let env = TestEnv::new()?;
        // Most of the memory is not written between two points.
        let write = "--workload write,order=random,rate=1000";
        let json = env.path("first.json");
        let line = format!("run --memory 32m,slots=3 --passes 0 {write} {ring} --json {}", json.display());
        let here = env.run("here", &line)?;
        let dir = env.path("snap");
        let line = format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display());
        let snapshot = |more: &str| env.vellum(&format!("{line} {more}"));
        env.has_written("here", 500)?;
        succeeds(&snapshot(&format!("--tracker {tracker}"))?)?;
        for point in 1..5u64 {
            env.has_written("here", 500 + 500 * point)?;
            if point == 2 {
                // All files are written, and nothing is named.
                let asked = vellum_control::Snapshot {
                    downtime_ms: 1000,
                    timeout_ms: 3000,
                    tracker: None,
                    loses: Default::default(),
                    stop: false,
                    chain: chain(&env, &dir)?,
                    number: 2,
                    after: list(&env, &dir)?["points"][1]["taken"].as_u64(),
                    follow: true,
                    clones: 0,
                };
                let files = [(); 3].map(|()| vellum_sys::mmap::memfd(c"nameless", 0, None));
                let [ram, map, state] = files;
                let (ram, map, state) = (ram?, map?, state?);
                env.has_written("here", 0)?;
                let mut events = env.listen("here")?;
                let mut machine = Client::connect(&env.socket("here"))?;
                machine.ask_with(&Do::Snapshot(asked), &[ram.as_fd(), map.as_fd(), state.as_fd()])?;
                let written = eventually(LIMIT, "it is written", || {
                    let event = events.line()?;
                    Ok((event["event"] == "snapshot").then_some(event))
                })?;
                ensure(written["full"] == false && written["present"].as_u64() > Some(0), || {
                    written.to_string()
                })?;
                machine.ask(&Do::SnapshotCancel { of: None })?;
                eventually(LIMIT, "it is given up", || {
                    Ok((events.line()?["event"] == "no-snapshot").then_some(()))
                })?;
            }
            succeeds(&snapshot("")?)?;
        }
        let kinds = |from: usize| -> Result<Vec<bool>, Failed> {
            let list = points(&env, &dir)?;
            Ok(list[from..].iter().map(|point| point["full"] == true).collect())
        };
        ensure(kinds(0)? == [true, false, false, false, false], || format!("{:?}", kinds(0)))?;
        let there = env.receive("there", ring)?;
        succeeds(&env.migrate("here", "there", "--downtime 1s --timeout 3s,then=force")?)?;
        ends_with(here, 15)?;
        let line = format!("snapshot there {} --follow --downtime 1s --timeout 3s", dir.display());
        let output = env.vellum(&line)?;
        succeeds(&output)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(said.contains("whole, because no changes were followed"), || said.clone())?;
        succeeds(&env.vellum("snapshot end there")?)?;
        succeeds(&env.vellum(&line)?)?;
        ensure(kinds(5)? == [true, true], || format!("{:?}", kinds(5)))?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
        for point in 0..7 {
            let json = env.path(&format!("{point}.json"));
            let host = format!("{} --at {point} --json {} {ring}", dir.display(), json.display());
            let again = env.restore("again", &host)?;
            succeeds(&env.vellum("ctl again stop")?)?;
            ends_with(again, 0)?;
            every_page_is_right(&json)?;
        }
    }
    Ok(())
}

fn list(env: &TestEnv, dir: &Path) -> Result<Value, Failed> {
    let output = env.vellum(&format!("snapshot list {} --json", dir.display()))?;
    succeeds(&output)?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

pub fn points(env: &TestEnv, dir: &Path) -> Result<Vec<Value>, Failed> {
    Ok(list(env, dir)?["points"].as_array().cloned().unwrap_or_default())
}

fn chain(env: &TestEnv, dir: &Path) -> Result<String, Failed> {
    Ok(list(env, dir)?["chain"].as_str().unwrap_or_default().to_owned())
}

/// The dirty log is off after a snapshot, and on with `--follow`. While it is on, a writing guest
/// fills its rings.
#[test(kvm())]
fn the_log_is_on_for_no_longer_than_somebody_asks() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let line = "run --memory 32m --passes 0 --workload write,order=random,rate=20000 --dirty-ring=1024";
    let here = env.run("here", line)?;
    let full = || -> Result<u64, Failed> {
        let status = Client::connect(&env.socket("here"))?.ask(&Do::Status {})?;
        Ok(status["dirty_ring"]["full"].as_u64().unwrap_or(0))
    };
    // These writes reach most of the memory, which is several times what a ring takes.
    let filled = || -> Result<bool, Failed> {
        let before = full()?;
        env.has_written("here", env.done("here")? + 20_000)?;
        Ok(full()? > before)
    };
    let snapshot = |more: &str| env.vellum(&format!("snapshot here {} {more}", env.path("snap").display()));
    for (more, on) in [("", false), ("--follow", true), ("", false)] {
        succeeds(&snapshot(more)?)?;
        ensure(filled()? == on, || format!("{more:?}: rings are filled: {}", !on))?;
    }
    succeeds(&snapshot("--follow")?)?;
    succeeds(&env.vellum("snapshot end here")?)?;
    ensure(!filled()?, || "rings are filled after the end".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// A machine that was restored from a copy of a directory takes the next point there. The machine
/// that follows its writes since the same point of the original does not continue the other's.
#[test(real())]
fn a_copy_of_a_directory_with_a_point_of_another_machine_is_not_continued() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let line = format!("run --memory 8m --passes 0 --workload write,rate=1000 --json {}", json.display());
    let here = env.run("here", &line)?;
    env.has_written("here", 2048)?;
    let (own, copy) = (env.path("own"), env.path("copy"));
    let snapshot = |machine: &str, dir: &Path| {
        env.vellum(&format!("snapshot {machine} {} --follow --downtime 1s --timeout 3s", dir.display()))
    };
    succeeds(&snapshot("here", &own)?)?;
    succeeds(&Command::new("cp").arg("-a").args([&own, &copy]).output()?)?;
    let other = env.restore("other", &copy.display().to_string())?;
    env.has_written("other", 4096)?;
    succeeds(&snapshot("other", &copy)?)?;
    succeeds(&env.vellum("ctl other stop")?)?;
    ends_with(other, 0)?;
    succeeds(&snapshot("here", &own)?)?;
    succeeds(&snapshot("here", &copy)?)?;
    let full = list(&env, &copy)?["points"].as_array().map(|points| points[2]["full"] == true);
    ensure(full == Some(true), || "its third point holds changes to another machine's second".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    let json = env.path("again.json");
    let again = env.restore("again", &format!("{} --json {}", copy.display(), json.display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json)
}

/// `snapshot end` during a snapshot with `--follow` stops dirty tracking too: the snapshot does not
/// return its log.
#[test(real())]
fn the_end_of_tracking_during_a_snapshot_is_the_end() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    env.has_written("here", 0)?;
    let mut events = env.listen("here")?;
    let mut next =
        |name: &str| eventually(LIMIT, name, || Ok((events.line()?["event"] == name).then_some(())));
    let asked = vellum_control::Snapshot {
        downtime_ms: 60_000,
        timeout_ms: 60_000,
        tracker: None,
        loses: Default::default(),
        stop: false,
        chain: "a directory".into(),
        number: 0,
        after: None,
        follow: true,
        clones: 0,
    };
    let mut client = Client::connect(&env.socket("here"))?;
    for ends in [false, true] {
        let files = (0..3).map(|_| vellum_sys::mmap::memfd(c"nameless", 0, None));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        client.ask_with(&Do::Snapshot(asked.clone()), &files.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
        next("snapshot")?;
        if ends {
            Client::connect(&env.socket("here"))?.ask(&Do::SnapshotEnd {})?;
        }
        client.ask(&Do::SnapshotNamed {})?;
        next("snapshot-over")?;
        let tracker = &client.ask(&Do::Status {})?["tracker"];
        ensure(tracker.is_null() == ends, || format!("ended: {ends}, tracker: {tracker}"))?;
    }
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// A migration that is refused leaves the log of the last snapshot on.
#[test(real())]
fn a_refused_migration_leaves_tracking_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    let line = format!("snapshot here {} --follow", env.path("snap").display());
    succeeds(&env.vellum(&line)?)?;
    let (_there, socket) = UnixStream::pair()?;
    let asked = MigrateRequest { tracker: Some("guesswork".into()), ..MigrateRequest::new(1000, 10_000) };
    let mut client = Client::connect(&env.socket("here"))?;
    let refused = client.ask_with(&Do::Migrate(asked), &[socket.as_fd()]);
    ensure(matches!(&refused, Err(Error::Refused(why)) if why.contains("no tracker guesswork")), || {
        format!("{refused:?}")
    })?;
    succeeds(&env.vellum(&line)?)?;
    let full: Vec<_> = points(&env, &env.path("snap"))?.iter().map(|point| point["full"] == true).collect();
    ensure(full == [true, false], || format!("full: {full:?}"))?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// A kernel that counts on its serial port continues where it was stopped: no byte is lost, and
/// none comes twice.
#[test(kvm())]
fn a_pc_goes_on_where_its_snapshot_stopped_it() -> Result<(), Failed> {
    for (irqchip, memory) in [("split", "eager"), ("kernel", "map"), ("split", "demand")] {
        let env = TestEnv::new()?;
        let kernel = counting(&env)?;
        let (out, far, dir) = (env.path("out"), env.path("far"), env.path("snap"));
        let line = format!(
            "run --kernel {} --memory 32m --irqchip {irqchip} --serial file={} --rng --balloon",
            kernel.display(),
            out.display()
        );
        let here = env.run("here", &line)?;
        eventually(LIMIT, "it has counted once round", || {
            Ok((fs::metadata(&out)?.len() > 256).then_some(()))
        })?;
        succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
        ends_with(here, 0)?;
        // A restore with other devices is refused, and they are named.
        let host = format!("--serial file={} --rng --balloon", far.display());
        let other = env.vellum(&format!("restore {} --serial null --rng", dir.display()))?;
        let said = String::from_utf8(with(other, 2)?.stderr)?;
        ensure(said.contains("balloon") && said.lines().count() == 1, || said.clone())?;
        let again = env.restore("again", &format!("{} --memory {memory} --paused {host}", dir.display()))?;
        ensure(env.standing("again").as_deref() == Some("paused"), || "it runs".into())?;
        ensure(fs::metadata(&far)?.len() == 0, || "it has run".into())?;
        succeeds(&env.vellum("ctl again resume")?)?;
        eventually(LIMIT, "it counts on", || Ok((fs::metadata(&far)?.len() > 256).then_some(())))?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(again, 0)?;
        has_counted(&[out, far])?;
    }
    Ok(())
}

/// A damaged or missing file is named in one line, with the place. Nothing runs.
#[test(real())]
fn a_damaged_snapshot_is_refused_by_file_and_place() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0 --workload write,rate=20000")?;
    env.has_written("here", 4096)?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    ensure(files(&dir)? == ["manifest.json", "map-0", "ram-0", "state-0"], || format!("{:?}", files(&dir)))?;
    let refused = |arguments: &str, says: &str| -> Result<(), Failed> {
        let mut machine = env.migration_client(&format!("restore {arguments}"))?;
        eventually(LIMIT, "it is refused", || Ok(machine.try_wait()?))?;
        let output = with(machine.output()?, 2)?;
        let said = String::from_utf8(output.stderr)?;
        ensure(said.contains(says) && said.lines().count() == 1, || format!("not {says:?}: {said}"))
    };
    let path = dir.display().to_string();
    refused(&format!("{path} --at 3"), "there is no point 3; there is 0 alone")?;
    refused(&env.dir().display().to_string(), "it holds no snapshot")?;
    for (name, offset, says) in [
        ("ram-0", 3 * 4096 + 7, "ram-0, byte 12288: page 3 of the machine is not the one that was written"),
        ("map-0", 8, "map-0, byte 0: its sum is"),
        ("state-0", 100, "state-0, byte 0: its sum is"),
        ("manifest.json", 1, "manifest.json: no manifest"),
    ] {
        let good = fs::read(dir.join(name))?;
        let mut planted = good.clone();
        planted[offset] ^= 0x10;
        fs::write(dir.join(name), &planted)?;
        refused(&path, says)?;
        // The last byte of JSON may be missing.
        fs::write(dir.join(name), &good[..good.len() - 2])?;
        refused(&path, name)?;
        fs::write(dir.join(name), &good)?;
    }
    // The files are restored.
    let json = env.path("end.json");
    let again = env.restore("again", &format!("{path} --json {}", json.display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json)?;
    fs::remove_file(dir.join("ram-0"))?;
    refused(&path, "ram-0: there is no such file")
}

/// A full file system does not disturb the guest, and no file is left.
#[test(real())]
fn a_full_disk_leaves_nothing_behind() -> Result<Completion, Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 32m --passes 0 --workload write,rate=20000")?;
    env.has_written("here", 8192)?;
    let small = env.path("small");
    fs::create_dir(&small)?;
    let mount = ["-t", "tmpfs", "-o", "size=8m", "none"];
    let mounted = Command::new("mount").args(mount).arg(&small).stderr(Stdio::null()).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return Ok(Completion::ignored_with("needs a tmpfs of its own: root, and mount(8)"));
    }
    let output = env.vellum(&format!("snapshot here {}/snap", small.display()));
    let left = files(&small);
    Command::new("umount").arg(&small).status()?;
    let said = String::from_utf8(with(output?, 1)?.stderr)?;
    ensure(said.contains("No space left on device") && said.lines().count() == 1, || said.clone())?;
    ensure(left?.is_empty(), || "something is left".into())?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    Ok(Completion::Completed)
}

/// A client that is killed or interrupted does not disturb the guest and leaves no file. The next
/// snapshot is complete.
#[test(real())]
fn a_snapshot_that_fails_leaves_nothing_behind() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 64m --passes 0")?;
    env.has_written("here", 16384)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run".into())?;
    let dir = env.path("snap");
    for signal in ["-KILL", "-INT"] {
        // The guest writes faster than passes finish, unless the host is so busy that it hardly runs.
        while !fails_by(signal, &env, &dir)? {
            fs::remove_dir_all(&dir)?;
        }
        eventually(LIMIT, "it runs on", || {
            Ok((env.standing("here").as_deref() == Some("running")).then_some(()))
        })?;
        let left = if dir.exists() { files(&dir)? } else { Vec::new() };
        ensure(left.is_empty(), || format!("{left:?} are left"))?;
    }
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    ensure(points(&env, &dir)?.len() == 1, || "one point is expected".into())?;
    let end = env.path("again.json");
    let again = env.restore("again", &format!("{} --json {}", dir.display(), end.display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&end)
}

/// Sends a signal to the client of a snapshot that is under way. Returns whether the snapshot failed
/// by it, and was not complete before.
fn fails_by(signal: &str, env: &TestEnv, dir: &Path) -> Result<bool, Failed> {
    let line = format!("snapshot here {} --downtime 1ms --timeout 1h", dir.display());
    let mut client = env.migration_client(&line)?;
    let is_under_way = eventually(LIMIT, "it is under way or complete", || {
        let is_under_way = env.standing("here").as_deref() == Some("snapshotting");
        Ok((is_under_way || client.try_wait()?.is_some()).then_some(is_under_way))
    })?;
    if !is_under_way {
        return with(client.output()?, 0).map(|_| false);
    }
    let other = env.path("other");
    let second = env.vellum(&format!("snapshot here {}", other.display()))?;
    succeeds(&Command::new("kill").args([signal, &client.id().to_string()]).output()?)?;
    if client.wait()?.success() {
        // The second one may have been taken, too.
        if other.exists() {
            fs::remove_dir_all(other)?;
        }
        return Ok(false);
    }
    ensure(String::from_utf8(with(second, 1)?.stderr)?.contains("is under way"), || "two at once".into())?;
    Ok(true)
}

/// Two restores of one snapshot and the original machine each have their own VM generation ID in
/// guest memory. A machine that migrates keeps its ID. The IDs are read from snapshots.
#[test(real())]
fn a_restored_machine_is_a_new_generation_and_one_that_moves_is_not() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = counting(&env)?;
    let line = format!("run --kernel {} --memory 32m --serial null", kernel.display());
    let dir = |name: &str| env.path(&format!("{name}.snap"));
    let ended = |name: &'static str, machine: Machine| -> Result<(&'static str, [u8; 16]), Failed> {
        succeeds(&env.vellum(&format!("snapshot {name} {} --stop", dir(name).display()))?)?;
        ends_with(machine, 0)?;
        let mut id = [0; 16];
        // The first memslot begins at address 0.
        File::open(dir(name).join("ram-0"))?.read_exact_at(&mut id, layout::VMGENID)?;
        Ok((name, id))
    };
    let mut ids = vec![ended("first", env.run("first", &line)?)?];
    for name in ["one", "two"] {
        let machine = env.restore(name, &format!("{} --serial null", dir("first").display()))?;
        ids.push(ended(name, machine)?);
    }
    let here = env.restore("here", &format!("{} --serial null --paused", dir("one").display()))?;
    succeeds(&env.vellum(&format!("snapshot here {}", dir("here").display()))?)?;
    let mut id = [0; 16];
    File::open(dir("here").join("ram-0"))?.read_exact_at(&mut id, layout::VMGENID)?;
    ids.push(("here", id));
    let there = env.receive("there", "--serial null")?;
    succeeds(&env.migrate("here", "there", "")?)?;
    ends_with(here, 15)?;
    ids.push(ended("there", there)?);
    for (at, (name, id)) in ids.iter().enumerate() {
        let same: Vec<_> = ids[..at].iter().filter(|(_, other)| other == id).map(|(name, _)| *name).collect();
        let expected: &[&str] = if *name == "there" { &["here"] } else { &[] };
        ensure(same == expected && *id != [0; 16], || format!("{name} has the ID of {same:?}: {ids:x?}"))?;
    }
    Ok(())
}
