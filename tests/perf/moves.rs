//! `cargo bench --bench moves` measures live migrations between processes, as users start them. The
//! speed of the socket is not the subject here.
//!
//! - A guest with 128 GiB that has touched 1 GiB against a guest with 1 GiB that has touched all of
//!   it. Both are paused first, so both send the same pages once.
//! - A guest of 1 GiB over a Unix socket against the same over loopback TCP.
//! - The downtime of a guest whose memory is handed over as a descriptor: 8 GiB against 256 MiB.
//!   Both guests have touched 256 MiB.
//! - The time from the death of the target during a migration until the source says that its guest
//!   runs on.
//!
//! The rivals take turns. The benchmark prints medians, and the median and quartiles of the ratio
//! in each round.

use std::net::TcpListener;
use std::time::Instant;

use serde_json::Value;
use support::env::{Machine, TestEnv};
use support::perf::floor::quartiles;
use support::{Failed, LIMIT, ensure, eventually};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_sys::mmap::PAGE_SIZE;

support::vellum!();

const ROUNDS: usize = 15;
/// How much the guests have touched, in a live migration and in a handover.
const TOUCHED: u64 = 1 << 30;
const HANDED: u64 = 256 << 20;

/// What connects source and target.
#[derive(Clone, Copy)]
enum Kind {
    Unix,
    Tcp,
}

fn receive(env: &TestEnv) -> Result<Machine, Failed> {
    let socket = env.path("there.in");
    env.start("there", &mut env.command(&format!("receive --listen unix:{}", socket.display())))
}

/// A guest with `memory` bytes that writes only to the first `bytes` of them, over and over. It has
/// written to all of these.
fn written(env: &TestEnv, bytes: u64, memory: u64, backing: &str, more: &str) -> Result<Machine, Failed> {
    let percent = bytes as f64 * 100.0 / memory as f64;
    let hot = if bytes < memory { format!(",hot={percent},share=100") } else { String::new() };
    let arguments = format!(
        "run --memory {}m{backing} --passes 0 --workload write,order=sequential{hot}{more}",
        memory >> 20
    );
    let here = env.start("here", &mut env.command(&arguments))?;
    let mut client = env.listen("here")?;
    eventually(LIMIT, "it has written enough", || {
        Ok((client.line()?["done"].as_u64() >= Some(bytes / PAGE_SIZE)).then_some(()))
    })?;
    Ok(here)
}

/// The downtime in milliseconds of a guest of `memory` that is handed over while it runs.
fn handed(memory: u64) -> Result<f64, Failed> {
    let env = TestEnv::new()?;
    let here = written(&env, HANDED, memory, ",backing=memfd", ",rate=100000")?;
    let there = receive(&env)?;
    let to = env.path("there.in");
    let line = format!("migrate here --link memfd --downtime 10s --json --to unix:{}", to.display());
    let moved = env.vellum(&line)?;
    ensure(moved.status.success(), || format!("{moved:?}"))?;
    let told: Vec<Value> =
        serde_json::Deserializer::from_slice(&moved.stdout).into_iter().collect::<Result<_, _>>()?;
    let stood = told.iter().find(|event| event["event"] == "moved").and_then(|event| event["us"].as_u64());
    here.end()?;
    env.ctl("there stop")?;
    there.end()?;
    Ok(stood.ok_or("nobody said for how long")? as f64 / 1e3)
}

/// The milliseconds that a paused guest of `memory` takes to move over a socket of `kind`, after it
/// has written to [`TOUCHED`] bytes.
fn moves(memory: u64, kind: Kind) -> Result<f64, Failed> {
    let env = TestEnv::new()?;
    let here = written(&env, TOUCHED, memory, "", "")?;
    env.ctl("here pause")?;
    let to = match kind {
        Kind::Unix => format!("unix:{}", env.path("there.in").display()),
        // The port is free again. Another process is unlikely to take it before the target listens.
        Kind::Tcp => format!("tcp:{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?),
    };
    let there = env.start("there", &mut env.command(&format!("receive --listen {to}")))?;
    let start = Instant::now();
    let moved = env.vellum(&format!("migrate here --to {to}"))?;
    let took = start.elapsed().as_secs_f64() * 1e3;
    ensure(moved.status.success(), || format!("{moved:?}"))?;
    here.end()?;
    env.ctl("there stop")?;
    there.end()?;
    Ok(took)
}

/// Milliseconds from the end of a migration's target until the source says that its guest runs on.
fn closed() -> Result<f64, Failed> {
    let env = TestEnv::new()?;
    let arguments = "run --memory 64m --passes 0 --workload write,rate=1000";
    let here = env.start("here", &mut env.command(arguments))?;
    let there = receive(&env)?;
    let to = env.path("there.in");
    let line = format!("migrate here --bandwidth 1m --to unix:{}", to.display());
    let migration = support::env::Process::spawn(env.command(&line).stderr(std::process::Stdio::piped()))?;
    let mut client = Client::connect(&env.socket("here"))?;
    let mut is = |state: &str| -> Result<bool, Failed> { Ok(client.ask(&Do::Status {})?["state"] == state) };
    eventually(LIMIT, "it is under way", || Ok(is("migrating")?.then_some(())))?;
    drop(there);
    let start = Instant::now();
    while !is("running")? {
        ensure(start.elapsed() < LIMIT, || "the source does not run on".into())?;
    }
    let took = start.elapsed().as_secs_f64() * 1e3;
    ensure(migration.output()?.status.code() == Some(1), || {
        "the migration client says that it has moved".into()
    })?;
    drop(here);
    Ok(took)
}

/// Measures the two rivals in turns. Returns the median and quartiles of `measure(true)`, of
/// `measure(false)`, and of the ratio in each round.
fn in_turn(measure: impl Fn(bool) -> Result<f64, Failed>) -> Result<[[f64; 3]; 3], Failed> {
    let [mut larges, mut smalls, mut ratios] = [const { Vec::new() }; 3];
    for round in 0..ROUNDS {
        let (mut large, mut small) = (0.0, 0.0);
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                large = measure(true)?;
            } else {
                small = measure(false)?;
            }
        }
        larges.push(large);
        smalls.push(small);
        ratios.push(large / small);
    }
    Ok([larges, smalls, ratios].map(quartiles))
}

fn main() -> Result<(), Failed> {
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let [[large, ..], [small, least, most], [ratio, low, high]] =
        in_turn(|large| handed(if large { 8 << 30 } else { HANDED }))?;
    println!(
        "handed over by memfd: 256 MiB {small:.1} ms (quartiles {least:.1} to {most:.1}), goal less than 20; 8 GiB {large:.1} ms; ratio \
         {ratio:.3} (quartiles {low:.3} to {high:.3}, {ROUNDS} rounds), goal 1.3 at most"
    );
    let [[large, ..], [small, ..], [ratio, low, high]] =
        in_turn(|large| moves(if large { 128 << 30 } else { TOUCHED }, Kind::Unix))?;
    println!(
        "128 GiB of which 1 GiB is touched: {large:.0} ms; 1 GiB: {small:.0} ms; ratio {ratio:.3} (quartiles {low:.3} to {high:.3}, \
         {ROUNDS} rounds); goal 1.5 at most"
    );
    let [[unix, ..], [tcp, ..], [ratio, low, high]] =
        in_turn(|unix| moves(TOUCHED, if unix { Kind::Unix } else { Kind::Tcp }))?;
    println!(
        "1 GiB over a Unix socket: {unix:.0} ms; over loopback TCP: {tcp:.0} ms; ratio {ratio:.3} (quartiles {low:.3} to {high:.3}, \
         {ROUNDS} rounds); goal 1 at most"
    );
    let all = (0..ROUNDS).map(|_| closed()).collect::<Result<Vec<_>, _>>()?;
    let [median, low, high] = quartiles(all);
    println!(
        "a target that ends, until the source runs on: {median:.1} ms (quartiles {low:.1} to {high:.1}, {ROUNDS} rounds); goal 100 at most"
    );
    Ok(())
}
