//! Compressed pages arrive unchanged over each kind of connection. A target that does not support
//! compression is named as a misfit. `ssh.rs` tests compression over `ssh:`.

use std::fs;
use std::net::TcpListener;

use support::env::TestEnv;
use support::hosts::real;
use support::{Failed, ensure, test};
use vellum_migration::message::{Message, VERSION};

use crate::VELLUM;
use crate::relay::{Part, changed};
use crate::{ends_with, every_page_is_right, moved, succeeds, with};

/// Migrates a busy guest over a unix socket, TCP, a command and several connections. Every page is
/// compared, and its stamp is checked at the end.
#[test(real())]
fn pages_come_as_they_were_over_each_kind_of_connection() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // A free port, chosen by the kernel.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    // A command is one word here, so it has no blanks.
    let script = env.path("relay.sh");
    fs::write(&script, format!("exec {VELLUM} receive --relay m3\n"))?;
    let [m1, m4] = ["m1.in", "m4.in"].map(|name| format!("unix:{}", env.path(name).display()));
    let tcp = format!("tcp:127.0.0.1:{port}");
    let hops = [
        (format!("--listen {m1}"), m1),
        (format!("--listen {tcp}"), tcp),
        (String::new(), format!("exec:.$IFS{}", script.display())),
        (format!("--listen {m4}"), format!("{m4} --connections 3")),
    ];
    let workload = "--passes 0 --workload write,order=random,rate=20000,write=80";
    let mut here = env.run("m0", &format!("run --cpus 2 --memory 32m,slots=3 {workload}"))?;
    env.has_written("m0", 2 * (32 << 20) / 4096)?;
    let json = env.path("json");
    for (at, (listen, to)) in hops.into_iter().enumerate() {
        let name = format!("m{}", at + 1);
        let there = env.run(&name, &format!("receive {listen} --liveness 5m --json {}", json.display()))?;
        let limits = "--liveness 5m --downtime 1m --timeout 10s,then=force";
        let line = format!("migrate m{at} --compress zstd --verify --json {limits} --to {to}");
        let output = env.vellum(&line)?;
        succeeds(&output)?;
        let left = &moved(&output)?["left"];
        let (sent, spared) = (left["bytes"].as_u64(), left["spared"].as_u64());
        // A page has a stamp that changes. Its rest does not.
        ensure(sent.is_some() && spared > sent, || format!("{to}: {spared:?} of {sent:?} bytes"))?;
        ends_with(here, 15)?;
        here = there;
    }
    succeeds(&env.vellum("ctl m4 stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&json)
}

/// A source that supports only the previous version: its guest migrates without compression.
#[test(real())]
fn a_source_of_the_version_before_is_understood() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 8m --passes 0 --workload write,rate=1000")?;
    let json = env.path("json");
    let there = env.receive("there", &format!("--json {}", json.display()))?;
    let relay = env.path("relay.in");
    changed(&relay, env.path("there.in"), |part| match part {
        Part::Message(Message::Hello { versions }) => *versions = [VERSION - 1; 2],
        Part::Message(Message::Config { compression, .. }) => *compression = None,
        _ => (),
    })?;
    let limits = "--liveness 5m --downtime 1s --timeout 3s,then=force";
    let line = format!("migrate here --verify {limits} --to unix:{}", relay.display());
    succeeds(&env.vellum(&line)?)?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&json)
}

/// A target of version 1, and one with another compression: the guest stays, and the reason is
/// printed.
#[test(real())]
fn a_target_without_the_compression_is_a_misfit() -> Result<(), Failed> {
    let old = |part: &mut Part| {
        if let Part::Message(Message::Hello { versions }) = part {
            *versions = [1, 1];
        }
    };
    let other = |part: &mut Part| {
        if let Part::Message(Message::Config { compression, .. }) = part {
            *compression = Some("lz77".into());
        }
    };
    for (says, is_old) in
        [("compression: zstd here, none there", true), ("compression: lz77 here, zstd there", false)]
    {
        let env = TestEnv::new()?;
        let here = env.run("here", "run --memory 8m --passes 0 --workload write,rate=1000")?;
        let there = env.receive("there", "")?;
        let relay = env.path("relay.in");
        changed(&relay, env.path("there.in"), move |part| if is_old { old(part) } else { other(part) })?;
        let line = format!("migrate here --liveness 5m --compress zstd --to unix:{}", relay.display());
        let said = String::from_utf8_lossy(&with(env.vellum(&line)?, 1)?.stderr).into_owned();
        ensure(said.contains(says) && said.lines().count() == 1, || said.clone())?;
        ends_with(there, 1)?;
        ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
        succeeds(&env.vellum("ctl here stop")?)?;
        ends_with(here, 0)?;
    }
    Ok(())
}
