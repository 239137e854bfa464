//! An operation ends with its client. The machine is then free at once, and other clients cannot
//! act for the one that is gone.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;

use serde_json::Value;
use support::env::{Machine, TestEnv};
use support::hosts::real;
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::{Client, Error};
use vellum_control::operation::CLIENT_GONE;
use vellum_sys::mmap::memfd;

use crate::{ends_with, every_page_is_right, succeeds};

/// A built-in guest that has written all of its memory, and a client that receives its events.
fn guest(env: &TestEnv, mib: u64) -> Result<(Machine, Client), Failed> {
    let json = env.path("json");
    let line = format!("run --memory {mib}m,backing=memfd --passes 0 --json {}", json.display());
    let machine = env.run("m", &line)?;
    env.has_written("m", (mib << 20) / 4096)?;
    let events = env.listen("m")?;
    Ok((machine, events))
}

/// Checks that the guest runs on and that every page is right.
fn goes_on(env: &TestEnv, machine: Machine) -> Result<(), Failed> {
    eventually(LIMIT, "it is free", || Ok((env.standing("m").as_deref() == Some("running")).then_some(())))?;
    let list = env.vellum("list")?;
    let said = String::from_utf8_lossy(&list.stdout).into_owned();
    ensure(said.contains("running") && said.lines().all(|line| !line.contains(" for process")), || {
        said.clone()
    })?;
    succeeds(&env.vellum("ctl m stop")?)?;
    ends_with(machine, 0)?;
    every_page_is_right(&env.path("json"))
}

fn files() -> Result<Vec<OwnedFd>, Failed> {
    Ok((0..3).map(|_| memfd(c"nameless", 0, None).map(OwnedFd::from)).collect::<Result<_, _>>()?)
}

fn snapshot() -> Do {
    Do::Snapshot(vellum_control::Snapshot {
        downtime_ms: 60_000,
        timeout_ms: 60_000,
        tracker: None,
        loses: Default::default(),
        stop: false,
        chain: "a directory".into(),
        number: 0,
        after: None,
        follow: false,
        clones: 0,
    })
}

/// The next event called `name`.
fn next(events: &mut Client, name: &str) -> Result<Value, Failed> {
    eventually(LIMIT, name, || {
        let event = events.line()?;
        Ok((event["event"] == name).then_some(event))
    })
}

/// A snapshot is written, but its client does not name the files. It ends when the client's
/// connection ends, not by a timeout. Until then `list` names the client, and other clients cannot
/// act for it.
#[test(real())]
fn a_snapshot_ends_with_its_client_although_all_of_it_is_written() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, mut events) = guest(&env, 16)?;
    let mut client = Client::connect(&env.socket("m"))?;
    let files = files()?;
    client.ask_with(&snapshot(), &files.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
    let id = client.last_id();
    let written = next(&mut events, "snapshot")?;
    ensure(written["id"].as_u64() == Some(id), || format!("not of request {id}: {written}"))?;

    let mut other = Client::connect(&env.socket("m"))?;
    let pid = format!("snapshot for process {}", std::process::id());
    for (what, says) in [
        (Do::SnapshotNamed {}, "another client's"),
        (Do::SnapshotCancel { of: Some(id ^ 1) }, "another one is under way"),
        (Do::MigrateCancel { of: None }, "no migration"),
        (Do::Lend { from: 0 }, &*pid),
    ] {
        let refused = other.ask(&what);
        ensure(matches!(&refused, Err(Error::Refused(why)) if why.contains(says)), || {
            format!("{what:?}: {refused:?}")
        })?;
    }
    let list = String::from_utf8(env.vellum("list")?.stdout)?;
    ensure(list.contains("snapshotting") && list.contains(&pid), || list.clone())?;

    drop(client);
    let over = next(&mut events, "no-snapshot")?;
    ensure(over["why"] == CLIENT_GONE && over["id"].as_u64() == Some(id), || over.to_string())?;
    goes_on(&env, machine)
}

/// A dump ends when its client is gone.
#[test(real())]
fn a_dump_ends_with_its_client() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // The dump takes several turns of the event loop (`dump::TURN`).
    let (machine, mut events) = guest(&env, 320)?;
    let file = memfd(c"nameless", 0, None)?;
    let stream = std::os::unix::net::UnixStream::connect(env.socket("m"))?;
    vellum_sys::socket::send(&stream, b"{\"id\":7,\"do\":\"dump\"}\n", &[file.as_fd()])?;
    drop(stream);
    let over = next(&mut events, "not-dumped")?;
    ensure(over["why"] == CLIENT_GONE && over["id"] == 7, || over.to_string())?;
    goes_on(&env, machine)
}

/// Events that a stopped client does not read are dropped, except the last one: when it continues,
/// it tells how the migration ended. It is not disconnected, which it would take for the end of the
/// machine.
#[test(real())]
fn a_migration_client_that_was_stopped_still_says_how_the_migration_ended() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, _) = guest(&env, 64)?;
    let there = env.receive("there", "")?;
    let to = env.path("there.in");
    let client =
        env.migration_client(&format!("migrate m --liveness 5m --bandwidth 1m --to unix:{}", to.display()))?;
    eventually(LIMIT, "it is under way", || {
        Ok((env.standing("m").as_deref() == Some("migrating")).then_some(()))
    })?;
    let signal = |signal: &str| Command::new("kill").args([signal, &client.id().to_string()]).output();
    succeeds(&signal("-STOP")?)?;
    let mut other = Client::connect(&env.socket("m"))?;
    // More than the buffer of a unix socket, which counts each message with more than 500 bytes.
    for _ in 0..500 {
        other.ask(&Do::Pause {})?;
        other.ask(&Do::Resume { force: false })?;
    }
    other.ask(&Do::MigrateSet { downtime_ms: Some(60_000), bandwidth: Some(1 << 30) })?;
    ends_with(machine, 15)?;
    succeeds(&signal("-CONT")?)?;
    let output = client.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure(output.status.success() && said.starts_with("MIGRATED  "), || format!("{output:?}"))?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0).map(drop)
}
