//! Many moves of one machine of Vellum, and a large machine. `VELLUM_JUDGE=all` makes a thousand
//! moves, and fills 8 GiB.

use std::fs;

use support::env::{Machine, TestEnv};
use support::hosts::real;
use support::{Completion, Failed, LIMIT, ensure, eventually, test};
use vellum_judge::read::read;

use crate::qemu::unfinished;
use crate::{boots, boots_under_vellum, disk, ends, has_passed, is_long, line, succeeds};

/// How the machine moves, in turn: two migrations, and a snapshot with each way to restore memory.
const WAYS: [&str; 5] = ["precopy", "postcopy", "eager", "map", "demand"];

/// The image moves from process to process. It has no end, because how many passes the moves take
/// depends on the host. Between two moves it compares and writes each page.
#[test(boots().and(real()))]
fn an_image_that_moves_many_times_is_whole() -> Result<(), Failed> {
    let moves = if is_long() { 1000 } else { 2 * WAYS.len() };
    let env = TestEnv::new()?;
    let cmdline = "passes=0 rate=30000 seed=11 report=100ms";
    let mut command = line(&env, 2, "16m,backing=memfd", cmdline, "0.log")?;
    let mut machine = env.start("m0", command.args(disk(&env)?.split(' ')))?;
    has_passed(&env, "0.log")?;
    let mut before = Vec::new();
    for (at, way) in (0..moves).zip(WAYS.into_iter().cycle()) {
        is_compared(&env, at, &before)?;
        machine = moved(&env, machine, at, way).map_err(|error| format!("move {at}, {way}: {error:?}"))?;
        let console = env.path(&format!("{at}.log"));
        before.extend(fs::read(&console)?);
        fs::remove_file(console)?;
    }
    is_compared(&env, moves, &before)?;
    succeeds(env.vellum(&format!("ctl m{moves} stop"))?)?;
    ends(machine, 0)
}

/// Waits until the image, which had printed `before`, has compared each page since it is in process
/// `at`. Nothing is wrong.
fn is_compared(env: &TestEnv, at: usize, before: &[u8]) -> Result<(), Failed> {
    let console = env.path(&format!("{at}.log"));
    let mut begins = None;
    eventually(LIMIT, "a pass is over", || {
        let printed = fs::read(&console)?;
        let log = read(&[before, &printed].concat());
        let right = log.faults.is_empty() && log.verdict() == unfinished();
        ensure(right, || format!("after {at} moves: {:x?}, {:?}", log.faults, log.verdict()))?;
        // The second report: the first may be one that was begun before the move.
        if printed.iter().filter(|byte| **byte == b'\n').count() > 1 && begins.is_none() {
            begins = log.pass;
        }
        Ok(begins.filter(|pass| log.pass > Some(pass + 1)).map(drop))
    })
}

/// Moves the machine from process `at` to the next one.
fn moved(env: &TestEnv, machine: Machine, at: usize, way: &str) -> Result<Machine, Failed> {
    let (from, to) = (format!("m{at}"), format!("m{}", at + 1));
    let serial = format!("--serial file={} {}", env.path(&format!("{}.log", at + 1)).display(), disk(env)?);
    if ["precopy", "postcopy"].contains(&way) {
        let there = env.receive(&to, &serial)?;
        let mode =
            if way == "precopy" { "--downtime 1s --timeout 10s,then=force" } else { "--mode postcopy" };
        let output = env.migrate(&from, &to, mode)?;
        if !output.status.success() {
            let console = fs::read_to_string(env.path(&format!("{}.log", at + 1))).unwrap_or_default();
            return Err(format!("{output:?}; there: {:?}, {console}", there.end()).into());
        }
        ends(machine, 15)?;
        return Ok(there);
    }
    let dir = env.path("snapshot");
    succeeds(env.vellum(&format!("snapshot {from} {} --paused", dir.display()))?)?;
    succeeds(env.vellum(&format!("ctl {from} stop"))?)?;
    ends(machine, 0)?;
    let restored = env.restore(&to, &format!("{} --memory {way} {serial}", dir.display()))?;
    // It was saved while paused.
    succeeds(env.vellum(&format!("ctl {to} resume"))?)?;
    fs::remove_dir_all(dir)?;
    Ok(restored)
}

/// Eight GiB are whole.
#[test(boots().and(real()))]
fn four_vcpus_and_8g_are_whole() -> Result<Completion, Failed> {
    if !is_long() {
        return Ok(Completion::ignored_with("fills 8 GiB; VELLUM_JUDGE=all has it run"));
    }
    let available = vellum_host::topology::memory().available >> 30;
    if available < 10 {
        return Ok(Completion::ignored_with(format!(
            "needs 10 GiB of available memory, and {available} are"
        )));
    }
    boots_under_vellum(4, "8g", "pvh").map(|()| Completion::Completed)
}
