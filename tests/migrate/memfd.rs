//! Memory that is handed over between two processes of this host. It is not copied, and is used by
//! the process that has the guest.

use std::fs;
use std::path::PathBuf;

use support::env::TestEnv;
use support::hosts::{huge_pages, kvm, real};
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;

use crate::commit_flag::cut_at_commit;
use crate::relay::{RelayFault, relay};
use crate::{counting, ends_with, every_page_is_right, has_counted, moved, succeeds, with};

const WORKLOAD: &str = "--passes 0 --workload write,order=random,rate=20000,write=80";

/// Options of a snapshot that may take its time.
pub const SOON: &str = "--downtime 1s --timeout 3s";

/// Options that work even if this host is busy.
const PATIENT: &str = "--link memfd --downtime 1m";

#[test(kvm())]
fn memory_is_handed_over_and_its_machine_moves_on_and_is_saved() -> Result<(), Failed> {
    goes_on_and_on("memfd")
}

#[test(kvm(), huge_pages(2 << 20, 16))]
fn huge_pages_are_handed_over_and_their_machine_moves_on_and_is_saved() -> Result<(), Failed> {
    goes_on_and_on("shared-hugetlb-2m")
}

/// Hands memory over twice, then migrates at once over a stream, with a snapshot in between. Every
/// page of the guest and of the restored snapshot is right.
fn goes_on_and_on(backing: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut here =
        env.run("m0", &format!("run --cpus 2 --memory 32m,slots=3,backing={backing} {WORKLOAD}"))?;
    env.has_written("m0", 2 * (32 << 20) / 4096)?;
    let json = |name: &str| env.path(&format!("{name}.json"));
    for (at, how) in [PATIENT, PATIENT, "--downtime 1s --timeout 10s,then=force"].into_iter().enumerate() {
        let next = format!("m{}", at + 1);
        let there = env.receive(&next, &format!("--json {}", json(&next).display()))?;
        let output = env.migrate(&format!("m{at}"), &next, &format!("--verify --json {how}"))?;
        succeeds(&output)?;
        let moved = moved(&output)?;
        let sent = moved["left"]["bytes"].as_u64();
        // The guest's own code, tables and journal are sent.
        let little = sent.is_some_and(|bytes| bytes < 8 << 20) && moved["tracker"].is_null();
        ensure(little || how != PATIENT, || format!("{moved}"))?;
        ends_with(here, 15)?;
        here = there;
        if at == 1 {
            let dir = env.path("snap");
            succeeds(&env.vellum(&format!("snapshot m2 {} --follow {SOON}", dir.display()))?)?;
        }
    }
    succeeds(&env.vellum("ctl m3 stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&json("m3"))?;
    let again =
        env.restore("again", &format!("{} --json {}", env.path("snap").display(), json("again").display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json("again"))
}

/// Dirty tracking for snapshots does not continue after a hand-over. The next snapshot has all
/// pages, and says so.
#[test(real())]
fn the_snapshot_after_a_hand_over_is_whole() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("m0", &format!("run --memory 16m,backing=memfd {WORKLOAD}"))?;
    let dir = env.path("snap");
    let snapshot = |name: &str| -> Result<String, Failed> {
        let output = env.vellum(&format!("snapshot {name} {} --follow {SOON}", dir.display()))?;
        succeeds(&output)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let said = [snapshot("m0")?, snapshot("m0")?];
    let there = env.receive("m1", "")?;
    succeeds(&env.migrate("m0", "m1", PATIENT)?)?;
    ends_with(here, 15)?;
    let said = [&said[..], &[snapshot("m1")?, snapshot("m1")?]].concat();
    let full: Vec<bool> = said.iter().map(|said| said.contains("whole")).collect();
    ensure(full == [true, false, true, false], || format!("{said:?}"))?;
    succeeds(&env.vellum("ctl m1 stop")?)?;
    ends_with(there, 0)?;
    for point in 0..4 {
        let json = env.path("json");
        let again =
            env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(again, 0)?;
        every_page_is_right(&json)?;
        fs::remove_file(&json)?;
    }
    Ok(())
}

#[test(kvm())]
fn a_pc_is_handed_over_with_its_serial_port() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = counting(&env)?;
    let outputs: Vec<PathBuf> = (0..3).map(|at| env.path(&format!("out{at}"))).collect();
    let grows = |at: usize| {
        eventually(LIMIT, "it counts", || Ok((fs::metadata(&outputs[at])?.len() > 256).then_some(())))
    };
    let devices = |at: usize| format!("--serial file={} --rng --balloon", outputs[at].display());
    let line = format!("run --kernel {} --memory 32m,backing=memfd {}", kernel.display(), devices(0));
    let mut here = env.run("m0", &line)?;
    grows(0)?;
    for at in 1..3 {
        let there = env.receive(&format!("m{at}"), &devices(at))?;
        succeeds(&env.migrate(&format!("m{}", at - 1), &format!("m{at}"), PATIENT)?)?;
        ends_with(here, 15)?;
        here = there;
        grows(at)?;
    }
    succeeds(&env.vellum("ctl m2 stop")?)?;
    ends_with(here, 0)?;
    has_counted(&outputs)
}

/// Refusals are one line with the flag that would help. They come before anything changes: the
/// target still waits.
#[test(real())]
fn what_cannot_be_handed_over_is_refused_before_anything_changes() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let _there = env.receive("there", "")?;
    let refused = |line: &str, says: &[&str]| -> Result<(), Failed> {
        let output = with(env.migrate("here", "there", line)?, 2)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(says.iter().all(|says| said.contains(says)) && said.lines().count() == 1, || said.clone())?;
        let standing = ["here", "there"].map(|name| env.standing(name));
        let as_before =
            standing.each_ref().map(|standing| standing.as_deref()) == [Some("running"), Some("waiting")];
        ensure(as_before, || format!("{standing:?}"))
    };
    for backing in ["anonymous", "thp", "shmem"] {
        let _here = env.run("here", &format!("run --memory 8m,backing={backing} --passes 0"))?;
        refused("--link memfd", &["--link memfd", backing, "--memory SIZE,backing=memfd"])?;
        // The machine also refuses a request that does not come from the command line.
        let mut here = Client::connect(&env.socket("here"))?;
        let asked = serde_json::json!({
            "do": "migrate", "downtime_ms": 1000, "liveness_ms": 1000, "link": "memfd", "fence": true
        });
        let asked: Do = serde_json::from_value(asked)?;
        let (socket, other) = std::os::unix::net::UnixStream::pair()?;
        let sockets = [&socket, &other].map(std::os::fd::AsFd::as_fd);
        let said = here.ask_with(&asked, &sockets).err().map(|error| error.to_string());
        ensure(said.as_ref().is_some_and(|said| said.contains("which no other process can map")), || {
            format!("{said:?}")
        })?;
    }
    let _here = env.run("here", "run --memory 8m,backing=memfd --passes 0")?;
    for flag in
        ["--connections 2", "--compress zstd", "--bandwidth 1m", "--throttle steps", "--tracker bitmap"]
    {
        refused(&format!("--link memfd {flag}"), &["--link memfd", flag.split(' ').next().unwrap_or(flag)])?;
    }
    let output = with(env.vellum("migrate here --link memfd --to tcp:127.0.0.1:1")?, 2)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("--to unix:PATH") && said.lines().count() == 1, || said.clone())
}

/// Through a relay that carries only bytes nothing is handed over, and the guest stays.
#[test(real())]
fn without_its_descriptors_a_guest_stays() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let here =
        env.run("here", &format!("run --memory 8m,backing=memfd {WORKLOAD} --json {}", json.display()))?;
    let there = env.receive("there", "")?;
    relay(env.path("relay.in"), env.path("there.in"), RelayFault::None)?;
    let output = with(env.migrate("here", "relay", PATIENT)?, 1)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("has not got the descriptors") && said.lines().count() == 1, || said.clone())?;
    ends_with(there, 1)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&json)
}

/// The link is cut when both sides have the memory and the source sends COMMIT, with or without one
/// side dying. The guest runs on one side, and every page is right.
#[test(real())]
fn memory_that_both_have_is_run_by_one_of_them_whatever_is_cut() -> Result<(), Failed> {
    for (deliver, dies) in [(false, None), (true, None), (false, Some("here")), (false, Some("there"))] {
        let env = TestEnv::new()?;
        let json = |name: &str| env.path(&format!("{name}.json"));
        let here =
            format!("run --cpus 2 --memory 8m,backing=memfd {WORKLOAD} --json {}", json("here").display());
        let here = env.run("here", &here)?;
        let there = env.receive("there", &format!("--json {}", json("there").display()))?;
        let victim = match dies {
            Some("here") => Some(here.child.id()),
            Some(_) => Some(there.child.id()),
            None => None,
        };
        cut_at_commit(&env, deliver, victim)?;
        let moved =
            env.migrate("here", "relay", &format!("--liveness 1h {PATIENT}"))?.status.code() == Some(0);
        let (name, other, status, machine) = match (moved || dies == Some("here"), dies) {
            (true, _) => ("there", here, 15, there),
            (false, _) => ("here", there, 1, here),
        };
        match dies {
            Some(_) => drop(other),
            None => drop(ends_with(other, status)?),
        }
        eventually(LIMIT, "the other runs it", || {
            Ok((env.standing(name).as_deref() == Some("running")).then_some(()))
        })?;
        env.has_written(name, 4 * (8 << 20) / 4096)?;
        succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
        ends_with(machine, 0)?;
        every_page_is_right(&json(name))?;
    }
    Ok(())
}
