//! A writing guest migrates from process to process with each tracker. Every page is checked at the
//! end.
//!
//! With `VELLUM_MIGRATION=all` it migrates there and back fifty times with 512 MiB and three times
//! with 2 GiB, over a link of 400 MiB/s, and writes half of that rate. Each tracker is then a test
//! of its own, and prints the downtimes beside the limit.

use std::process::Output;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use support::env::TestEnv;
use support::hosts::kvm;
use support::{Failed, Tests, ensure, test};
use vellum_host::Facts;

use crate::{ends_with, every_page_is_right, moved, succeeds};

/// A tracker, and the option that the machine needs for it.
type Way = (&'static str, &'static str);

/// The smallest ring is full many times in a pass, and its vCPU empties it. A large one is emptied
/// only by collections.
const WAYS: [Way; 5] = [
    ("bitmap", ""),
    ("manual-protect", ""),
    ("initially-set", ""),
    ("ring", "--dirty-ring=1024"),
    ("ring", "--dirty-ring"),
];

/// The number of migrations and the load.
#[derive(Clone, Copy)]
struct Trips {
    mib: u32,
    hops: usize,
    /// Pages that each vCPU writes per second.
    rate: u32,
    limits: &'static str,
    /// The maximum bytes of the last pass: what the link carries in the allowed downtime. Unlimited
    /// if the link has no cap.
    last: u64,
}

/// Adds the long tests.
pub fn add_long(tests: &mut Tests) {
    if !std::env::var("VELLUM_MIGRATION").is_ok_and(|value| value == "all") {
        return;
    }
    for way in WAYS {
        // Two vCPUs write 100 MiB per second each.
        let half_of_the_link = 100 * 256;
        for (mib, hops) in [(512, 100), (2048, 6)] {
            let limits = "--bandwidth 400m --downtime 300ms --timeout 120s,then=cancel";
            let trips = Trips { mib, hops, rate: half_of_the_link, limits, last: (400 << 20) * 3 / 10 };
            let name = format!(
                "{hops}_moves_with_{mib}_mib_and_{}{}_lose_nothing",
                way.0,
                way.1.replace("--dirty-", "_")
            );
            tests.add(name, kvm(), move || {
                // One after the other: two CPUs with the vCPUs of several guests cannot keep such a
                // link busy.
                static LINK: Mutex<()> = Mutex::new(());
                let _link = LINK.lock().unwrap_or_else(PoisonError::into_inner);
                go(way, trips)
            });
        }
    }
}

/// There and back under load, with each tracker.
#[test(kvm())]
fn a_guest_that_writes_moves_and_loses_nothing() -> Result<(), Failed> {
    let limits = "--downtime 1s --timeout 3s,then=force";
    // An emulated CPU needs as long for a page as others for a hundred. One migration shows as much
    // there as many.
    let trips = match Facts::collect(String::new()).emulated {
        true => Trips { mib: 8, hops: 1, rate: 2000, limits, last: u64::MAX },
        false => Trips { mib: 256, hops: 2, rate: 20_000, limits, last: u64::MAX },
    };
    WAYS.into_iter().try_for_each(|way| go(way, trips))
}

fn go((tracker, ring): Way, Trips { mib, hops, rate, limits, last }: Trips) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let write = format!("--workload write,order=random,rate={rate},write=80");
    let mut here =
        env.run("m0", &format!("run --cpus 2 --memory {mib}m,slots=3 --passes 0 {write} {ring}"))?;
    let mut stood = Vec::new();
    for hop in 0..hops {
        let (from, to) = (format!("m{hop}"), format!("m{}", hop + 1));
        let json = env.path("last.json");
        let there = env.receive(&to, &format!("--json {} {ring}", json.display()))?;
        // A machine with a ring uses it by default.
        let asked = if hop == 1 && tracker == "ring" { "" } else { &format!("--tracker {tracker}") };
        let output = env.migrate(&from, &to, &format!("{asked} {limits} --json"))?;
        succeeds(&output).map_err(|error| Failed::from(format!("hop {hop}: {error:?}")))?;
        ends_with(here, 15)?;
        let moved = moved(&output)?;
        ensure(moved["tracker"] == *tracker, || moved.to_string())?;
        ensure(env.standing(&to).as_deref() == Some("running"), || format!("{:?}", env.standing(&to)))?;
        let bytes = last_pass(&output)?;
        ensure(bytes <= last, || format!("hop {hop}: its last pass has {bytes} bytes, of {last} at most"))?;
        stood.push(moved["us"].as_u64().unwrap_or(u64::MAX) as f64 / 1000.0);
        here = there;
    }
    succeeds(&env.vellum(&format!("ctl m{hops} stop"))?)?;
    ends_with(here, 0)?;
    stood.sort_unstable_by(f64::total_cmp);
    let at = |part: usize| stood[(stood.len() - 1) * part / 2];
    eprintln!(
        "{mib} MiB, {tracker} {ring}: {hops} moves with {limits}: stood still for {:.1} to {:.1} ms, median {:.1}",
        at(0),
        at(2),
        at(1)
    );
    every_page_is_right(&env.path("last.json"))
}

/// The bytes of the last pass of a migration.
fn last_pass(output: &Output) -> Result<u64, Failed> {
    let said = std::str::from_utf8(&output.stdout)?;
    let passes = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut last = passes.filter(|event| event["event"] == "pass" && event["last"] == true);
    let bytes = last.next().and_then(|pass| pass["bytes"].as_u64());
    bytes.ok_or_else(|| format!("it had no last pass: {said}").into())
}
