//! Several connections of one migration: pages from all of them end up right, a cut of one cuts
//! all, and strangers cannot join.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use support::env::{Machine, TestEnv};
use support::hosts::{real, slow_if_emulated};
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_control::client::Client;
use vellum_control::{Do, MigrateRequest};
use vellum_migration::message::{Message, SessionId};
use vellum_migration::wire::Encoder;

use crate::relay::{RelayFault, relay};
use crate::{ends_with, every_page_is_right, succeeds, with};

/// Migrates a busy guest three times, over two connections and over four. Every page is checked at
/// the end.
#[test(slow_if_emulated())]
fn a_guest_that_writes_moves_over_several_connections() -> Result<(), Failed> {
    for connections in [2, 4] {
        let env = TestEnv::new()?;
        let workload = "--passes 0 --workload write,order=random,rate=20000,write=80";
        let mut here = env.run("m0", &format!("run --cpus 2 --memory 64m,slots=3 {workload}"))?;
        for hop in 0..3 {
            let (from, to) = (format!("m{hop}"), format!("m{}", hop + 1));
            let json = env.path("last.json");
            let there = env.receive(&to, &format!("--json {}", json.display()))?;
            let more = format!("--connections {connections} --verify --downtime 1s --timeout 10s,then=force");
            succeeds(&env.migrate(&from, &to, &more)?)?;
            ends_with(here, 15)?;
            ensure(env.standing(&to).as_deref() == Some("running"), || format!("{:?}", env.standing(&to)))?;
            here = there;
        }
        succeeds(&env.vellum("ctl m3 stop")?)?;
        ends_with(here, 0)?;
        every_page_is_right(&env.path("last.json"))?;
    }
    Ok(())
}

/// The test is the migration client. It starts a slow migration over these connections. Returns its
/// session.
fn under_way(env: &TestEnv, sockets: &[UnixStream]) -> Result<(Client, SessionId), Failed> {
    let mut machine = Client::connect(&env.socket("here"))?;
    let asked = Do::Migrate(MigrateRequest {
        bandwidth: Some(4 << 20),
        connections: sockets.len() as u32,
        ..MigrateRequest::new(300, 10_000)
    });
    let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    let answer = machine.ask_with(&asked, &sockets)?;
    let hex = answer["session"].as_str().ok_or("no session")?;
    let number = u128::from_str_radix(hex, 16)?;
    eventually(LIMIT, "it is under way", || {
        Ok((env.standing("there").as_deref() == Some("incoming")).then_some(()))
    })?;
    Ok((machine, SessionId(number.to_be_bytes())))
}

fn both(env: &TestEnv) -> Result<(Machine, Machine), Failed> {
    let here = env.run("here", "run --memory 64m --passes 0 --workload write,rate=20000")?;
    // All memory is written, so that there is something to send.
    env.has_written("here", 2 * (64 << 20) / 4096)?;
    Ok((here, env.receive("there", "")?))
}

#[test(real())]
fn the_cut_of_any_connection_is_the_cut_of_all() -> Result<(), Failed> {
    for cut in [0, 1] {
        let env = TestEnv::new()?;
        let (here, there) = both(&env)?;
        relay(env.path("relay.in"), env.path("there.in"), RelayFault::Cut { back: false, after: 1 << 20 })?;
        let through =
            |at: usize| UnixStream::connect(env.path(if at == cut { "relay.in" } else { "there.in" }));
        let mut events = env.listen("here")?;
        let sockets = [through(0)?, through(1)?];
        under_way(&env, &sockets)?;
        drop(sockets);
        let why = eventually(LIMIT, "it stays", || {
            let line = events.line()?;
            Ok((line["event"] == "stayed").then(|| line["why"].to_string()))
        })?;
        ensure(why.contains("the link was cut before the hand-over"), || why.clone())?;
        ends_with(there, 1)?;
        ensure(env.standing("here").as_deref() == Some("running"), || format!("{:?}", env.standing("here")))?;
        succeeds(&env.vellum("ctl here stop")?)?;
        ends_with(here, 0)?;
    }
    Ok(())
}

/// A connection of another session, with a number that is taken, with the first one's number, and
/// with one beyond the last: each is closed, and the migration goes on.
#[test(real())]
fn nobody_joins_who_does_not_belong() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there) = both(&env)?;
    let connect = || UnixStream::connect(env.path("there.in"));
    let (mut machine, session) = under_way(&env, &[connect()?, connect()?])?;
    let join = |session: SessionId, connection: u32| -> Result<(), Failed> {
        let mut stranger = connect()?;
        stranger.set_read_timeout(Some(LIMIT))?;
        stranger.write_all(&Encoder::new(session).message(&Message::Join { connection }))?;
        let mut answer = Vec::new();
        match stranger.read_to_end(&mut answer) {
            Ok(0) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
            other => Err(format!("connection {connection} of {session:?}: {other:?}, {answer:?}").into()),
        }
    };
    join(SessionId([7; 16]), 1)?;
    // A process that knows the session could join in place of a connection that has not joined yet.
    // The first pass begins when all have joined.
    let mut events = env.listen("here")?;
    eventually(LIMIT, "both connections have joined", || {
        Ok((events.line()?["pass"].as_u64() >= Some(1)).then_some(()))
    })?;
    for connection in [0, 1, 2, u32::MAX] {
        join(session, connection)?;
    }
    ensure(env.standing("here").as_deref() == Some("migrating"), || format!("{:?}", env.standing("here")))?;
    machine.ask(&Do::MigrateSet { downtime_ms: Some(5000), bandwidth: Some(1 << 40) })?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    Ok(())
}

/// Each connection of `exec:` is a process of its own. Too many connections are refused, and the
/// guest stays.
#[test(real())]
fn a_command_leads_there_once_for_each_connection() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    let script = env.path("relay.sh");
    std::fs::write(&script, format!("exec {} receive --relay there\n", crate::VELLUM))?;
    let refused = with(env.vellum("migrate here --connections 17 --to unix:nowhere")?, 2)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(said.contains("--connections") && said.contains("17"), || said.clone())?;
    let there = env.run("there", &format!("receive --json {}", env.path("json").display()))?;
    let line = format!("migrate here --connections 3 --to exec:.$IFS{}", script.display());
    succeeds(&env.vellum(&line)?)?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&env.path("json"))
}
