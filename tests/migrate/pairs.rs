//! Pairs of operations of a machine, by two clients at the same time. One client, or none, is
//! killed at a random moment. Afterwards every file is complete or missing, a successful client has
//! done its work, `vellum list` explains the machine's state, and the guest runs on with every page
//! right.
//!
//! Each pair runs twice, or twenty times with `VELLUM_MIGRATION=all`. `VELLUM_SEED` repeats the
//! choices but not the scheduling.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::thread;
use std::time::Duration;

use support::Random;
use support::env::{Machine, TestEnv};
use support::hosts::real;
use support::{Failed, LIMIT, Tests, ensure, eventually};
use vellum_control::operation::Kind;
use vellum_control::{MachineState, Status};

use crate::VELLUM;
use crate::upgrade::upgrade;
use crate::{ends_with, every_page_is_right, succeeds};

/// A live update takes a host that can replace its kernel.
const KINDS: [Kind; 5] = [Kind::Snapshot, Kind::Fork, Kind::Dump, Kind::Migration, Kind::Upgrade];
const MEMORY: u64 = 16 << 20;
/// The time after the start of both clients in which one is killed.
const WINDOW_US: u64 = 150_000;

pub fn add(tests: &mut Tests) {
    let rounds = if std::env::var("VELLUM_MIGRATION").is_ok_and(|value| value == "all") { 20 } else { 2 };
    let mut random = Random::new();
    for first in KINDS {
        for second in KINDS {
            let mut random = random.split();
            let name = format!("{}_and_{}_at_once_lose_nothing", first.name(), second.name());
            tests.add(name, real(), move || {
                (0..rounds).try_for_each(|round| {
                    at_once([first, second], &mut random).map_err(|error| {
                        Failed::from(format!("round {round}: {}", error.message().unwrap_or("?")))
                    })
                })
            });
        }
    }
}

/// The command line of client `at`, with files and a target of its own.
fn line(env: &TestEnv, kind: Kind, at: usize) -> String {
    match kind {
        Kind::Snapshot => {
            format!("snapshot m {} --downtime 1s --timeout 3s", env.path(&format!("s{at}")).display())
        }
        Kind::Dump => format!("dump m {}", env.path(&format!("d{at}")).display()),
        Kind::Fork => format!("fork m --name f{at} --json {}", env.path(&format!("f{at}.json")).display()),
        Kind::LiveUpdate => "live-update save m".into(),
        Kind::Upgrade => format!("ctl m upgrade --downtime 1m {VELLUM}"),
        Kind::Migration => {
            let to = env.path(&format!("t{at}.in"));
            format!(
                "migrate m --to unix:{} {}",
                to.display(),
                support::env::patient("--bandwidth 200m --timeout 3s,then=force")
            )
        }
    }
}

fn at_once(kinds: [Kind; 2], random: &mut Random) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = |name: &str| env.path(&format!("{name}.json"));
    let line_of_m = format!(
        "run --memory 16m,backing=memfd --passes 0 --workload write,rate=20000 --json {}",
        json("m").display()
    );
    let m = env.run("m", &line_of_m)?;
    env.has_written("m", MEMORY / 4096)?;
    let whole = env.path("whole");
    succeeds(&env.vellum(&format!("dump m {}", whole.display()))?)?;
    let whole = pages(&whole)?;
    // A process that took over from another reports the end of its last successor.
    if random.below(2) == 0 {
        upgrade(&env, "m")?;
    }
    let mut targets: Vec<(String, Machine)> = Vec::new();
    for (at, _) in kinds.iter().enumerate().filter(|(_, kind)| **kind == Kind::Migration) {
        let name = format!("t{at}");
        let target = env.receive(&name, &format!("--json {}", json(&name).display()))?;
        targets.push((name, target));
    }
    let mut events = env.listen("m")?;

    let mut clients = Vec::new();
    for (at, kind) in kinds.iter().enumerate() {
        clients.push(env.migration_client(&line(&env, *kind, at))?);
    }
    let (victim, moment) = (random.below(3) as usize, Duration::from_micros(random.below(WINDOW_US)));
    thread::sleep(moment);
    if let Some(victim) = clients.get_mut(victim) {
        victim.kill()?;
    }
    is_explained(&env)?;
    let mut ended = Vec::new();
    for client in clients {
        ended.push(client.output()?);
    }
    let context = format!("{kinds:?}, killed {victim} after {moment:?}: {ended:?}");
    let wrong = |what: String| Failed::from(format!("{what}; {context}"));

    // The name of the machine that runs the guest in the end.
    let place = eventually(LIMIT, &context, || {
        is_explained(&env)?;
        let names = ["m"].into_iter().chain(targets.iter().map(|(name, _)| name.as_str()));
        let runs = names.filter(|name| env.standing(name).as_deref() == Some("running"));
        Ok(runs.map(str::to_owned).next())
    })?;
    let mut told = Vec::new();
    events.wait_within(Duration::from_millis(1));
    while let Ok(event) = events.line() {
        told.push(event.to_string());
    }
    // The end of a client is noticed at once, and not by a timeout.
    ensure(!told.iter().any(|event| event.contains("files were not named")), || context.clone())?;
    for (at, (kind, output)) in kinds.iter().zip(&ended).enumerate() {
        let done = output.status.success();
        let said = String::from_utf8_lossy(&output.stderr);
        if let Some(1..) = output.status.code() {
            ensure(said.trim_end().lines().count() == 1, || format!("more than a line; {context}"))?;
        }
        match kind {
            Kind::Migration if victim != at => {
                let there = place == format!("t{at}");
                ensure(done == there, || format!("its guest is in {place}; {context}"))?;
            }
            Kind::Snapshot => is_whole(&env, &format!("s{at}"), done)
                .map_err(|error| wrong(format!("snapshot {at}: {}", error.message().unwrap_or("?"))))?,
            Kind::Fork => forked_is_right(&env, &format!("f{at}"), done)
                .map_err(|error| wrong(format!("fork {at}: {}", error.message().unwrap_or("?"))))?,
            Kind::Dump => {
                let path = env.path(&format!("d{at}"));
                ensure(path.exists() || !done, || format!("no dump; {context}"))?;
                let found = if path.exists() { pages(&path)? } else { whole };
                ensure(found >= whole, || format!("{found} pages of {whole} are in the dump; {context}"))?;
            }
            _ => {}
        }
    }
    env.has_written(&place, 2 * MEMORY / 4096)?;
    succeeds(&env.vellum(&format!("ctl {place} stop"))?)
        .map_err(|_| wrong(format!("{place} does not obey")))?;
    ends_with(m, if place == "m" { 0 } else { 15 })?;
    // The target writes its result when it ends.
    if let Some(at) = targets.iter().position(|(name, _)| *name == place) {
        ends_with(targets.swap_remove(at).1, 0)?;
    }
    every_page_is_right(&json(&place))
}

/// Checks every page of a machine that was forked. If its client was killed, nothing may be left.
fn forked_is_right(env: &TestEnv, name: &str, done: bool) -> Result<(), Failed> {
    let stopped = env.vellum(&format!("ctl {name} stop"))?;
    ensure(stopped.status.success() || !done, || format!("{stopped:?}"))?;
    eventually(LIMIT, "it ends", || Ok((!env.socket(name).exists()).then_some(())))?;
    if done { every_page_is_right(&env.path(&format!("{name}.json"))) } else { Ok(()) }
}

/// The number of pages of a dump that are not zero.
fn pages(dump: &Path) -> Result<usize, Failed> {
    let mut bytes = Vec::new();
    File::open(dump)?.read_to_end(&mut bytes)?;
    ensure(bytes.starts_with(b"\x7fELF") && bytes.len() as u64 > MEMORY, || {
        format!("{} bytes", bytes.len())
    })?;
    Ok(bytes.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count())
}

/// Checks that every point in the directory is complete and can be restored. After a successful
/// snapshot there must be a point.
fn is_whole(env: &TestEnv, name: &str, done: bool) -> Result<(), Failed> {
    let dir = env.path(name);
    let points = fs::read_dir(&dir).is_ok_and(|mut files| {
        files.any(|file| file.is_ok_and(|file| file.file_name().to_string_lossy().starts_with("manifest")))
    });
    ensure(points || !done, || "it has no point".into())?;
    if !points {
        return Ok(());
    }
    succeeds(&env.vellum(&format!("snapshot verify {}", dir.display()))?)?;
    let json = env.path(&format!("{name}.json"));
    let again = env.restore("again", &format!("{} --json {}", dir.display(), json.display()))?;
    succeeds(&env.vellum("ctl again stop")?)?;
    ends_with(again, 0)?;
    every_page_is_right(&json)
}

/// Checks that each machine's state and operation agree.
fn is_explained(env: &TestEnv) -> Result<(), Failed> {
    let list = env.vellum("list --json")?;
    ensure(list.status.success(), || format!("{list:?}"))?;
    for line in String::from_utf8_lossy(&list.stdout).lines() {
        let status: Status = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
        let told = status.operation.map(|operation| operation.kind.state());
        let busy = KINDS.map(Kind::state).contains(&status.state);
        let unconfirmed = status.state == MachineState::HandoverUnconfirmed;
        let fits = unconfirmed || told == busy.then_some(status.state);
        ensure(fits, || format!("not explained: {line}"))?;
    }
    Ok(())
}
