//! `cargo bench --bench moves`: live migrations between processes, as users start them, where the speed of a socket is not what counts.
//!
//! - A guest with 128 GiB of which it has touched 1 GiB moves beside one that has 1 GiB and has touched all of it. Both are paused
//!   first, so that both send the same pages, once.
//! - The target of a migration that is under way is killed: how long until the source says that its guest runs on.
//!
//! The rivals take turns; printed are medians, and the median of the ratios of each round's two, with quartiles.

#[path = "../home/mod.rs"]
mod home;

use std::time::Instant;

use harness::{Failed, LIMIT, ensure, eventually};
use home::{Home, Machine};
use vellum::control::Do;
use vellum::control::client::Client;
use vellum::sys::mmap::PAGE_SIZE;

const ROUNDS: usize = 15;
/// What the guests have touched.
const TOUCHED: u64 = 1 << 30;

/// A median and its quartiles.
fn quartiles(mut samples: Vec<f64>) -> [f64; 3] {
    samples.sort_by(f64::total_cmp);
    [samples[samples.len() / 2], samples[samples.len() / 4], samples[samples.len() - 1 - samples.len() / 4]]
}

fn receive(home: &Home) -> Result<Machine, Failed> {
    let socket = home.0.join("there.in");
    home.start("there", &mut home.command(&format!("receive --listen unix:{}", socket.display())))
}

/// Milliseconds that a paused guest of `memory` takes to move, once it has written to [`TOUCHED`] bytes.
fn moves(memory: &str) -> Result<f64, Failed> {
    let home = Home::new()?;
    let arguments = format!("run --memory {memory} --passes 0 --workload write,order=sequential");
    let here = home.start("here", &mut home.command(&arguments))?;
    let mut client = Client::connect(&home.socket("here"))?;
    client.ask(&Do::Events {})?;
    eventually(LIMIT, "it has written enough", || {
        Ok((client.line()?["done"].as_u64() >= Some(TOUCHED / PAGE_SIZE)).then_some(()))
    })?;
    home.ctl("here pause")?;
    let there = receive(&home)?;
    let start = Instant::now();
    let to = home.0.join("there.in");
    let moved = home.vellum(&format!("migrate here --to unix:{}", to.display()))?;
    let took = start.elapsed().as_secs_f64() * 1e3;
    ensure(moved.status.success(), || format!("{moved:?}"))?;
    here.end()?;
    home.ctl("there stop")?;
    there.end()?;
    Ok(took)
}

/// Milliseconds from the end of the target of a migration until the source says that its guest runs on.
fn closed() -> Result<f64, Failed> {
    let home = Home::new()?;
    let arguments = "run --memory 64m --passes 0 --workload write,rate=1000";
    let here = home.start("here", &mut home.command(arguments))?;
    let there = receive(&home)?;
    let to = home.0.join("there.in");
    let line = format!("migrate here --bandwidth 1m --to unix:{}", to.display());
    let courier = home::Process::spawn(home.command(&line).stderr(std::process::Stdio::piped()))?;
    let mut client = Client::connect(&home.socket("here"))?;
    let mut is = |state: &str| -> Result<bool, Failed> { Ok(client.ask(&Do::Status {})?["state"] == state) };
    eventually(LIMIT, "it is under way", || Ok(is("migrating")?.then_some(())))?;
    drop(there);
    let start = Instant::now();
    while !is("running")? {
        ensure(start.elapsed() < LIMIT, || "the source does not run on".into())?;
    }
    let took = start.elapsed().as_secs_f64() * 1e3;
    ensure(courier.output()?.status.code() == Some(1), || "the courier says that it has moved".into())?;
    drop(here);
    Ok(took)
}

fn main() -> Result<(), Failed> {
    // `cargo test --benches` asks every benchmark whether it works.
    if let Err(error) = vellum::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let (mut sparse, mut dense, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let (mut large, mut small) = (0.0, 0.0);
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                large = moves("128g")?;
            } else {
                small = moves("1g")?;
            }
        }
        sparse.push(large);
        dense.push(small);
        ratios.push(large / small);
    }
    let ([large, ..], [small, ..], [ratio, low, high]) =
        (quartiles(sparse), quartiles(dense), quartiles(ratios));
    println!(
        "128 GiB of which 1 GiB is touched: {large:.0} ms; 1 GiB: {small:.0} ms; ratio {ratio:.3} (quartiles {low:.3} to {high:.3}, \
         {ROUNDS} rounds); goal 1.5 at most"
    );
    let all = (0..ROUNDS).map(|_| closed()).collect::<Result<Vec<_>, _>>()?;
    let [median, low, high] = quartiles(all);
    println!(
        "a target that ends, until the source runs on: {median:.1} ms (quartiles {low:.1} to {high:.1}, {ROUNDS} rounds); goal 100 at most"
    );
    Ok(())
}
