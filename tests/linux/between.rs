//! A Linux guest migrates to a host with another kernel and another CPU, by TCP, and back. Two
//! hosts run this at the same time. `cargo lab test pair` boots them with a network between them,
//! and sets `VELLUM_WIRE` to the end that each has.

use std::process::Command;
use std::time::Duration;

use support::env::TestEnv;
use support::{Failed, Need, ensure, eventually};

use crate::VELLUM;
use crate::guest::{Guest, Image, host, scratch};

/// How long one host waits for the other, which may have to boot a guest first.
const MOVE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// What runs in the guest while it migrates: a writer, and a check that the clock never goes back.
const WORKERS: &str = "\
    dd if=/dev/urandom of=/tmp/data bs=1M count=32 2>/dev/null && sha256sum /tmp/data > /tmp/sum
    (i=0; while :; do i=$((i+1)); dd if=/dev/zero of=/tmp/scratch bs=64k count=64 conv=notrunc 2>/dev/null
       echo $i > /tmp/rounds; done) > /dev/null 2>&1 &
    (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
       [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &";

/// This host's end of the network between two hosts.
fn end() -> Option<u8> {
    std::env::var("VELLUM_WIRE").ok()?.parse().ok().filter(|end| *end < 2)
}

/// Requires two hosts.
pub fn hosts() -> Need {
    end().map(drop).ok_or("needs two hosts with a network between them: cargo lab test pair".into())
}

/// Joins the network. Returns this host's end.
fn connected() -> Result<u8, Failed> {
    let end = end().ok_or("there is one host")?;
    // An earlier test may have added it.
    let _ = host(&["ip", "addr", "add", &format!("10.78.0.{}/24", end + 1), "dev", "eth0"]);
    host(&["ip", "link", "set", "eth0", "up"])?;
    Ok(end)
}

/// The address at which host `of` waits for the guest with number `at`.
fn address(of: u8, at: u8) -> String {
    format!("tcp:10.78.0.{}:{}", of + 1, 7000 + u16::from(at))
}

/// A guest with all features of its host's CPU does not migrate to a host that lacks some. The
/// features and the flag are named. The first host's CPU has more features than the second's.
pub fn stays_where_its_cpu_is() -> Result<(), Failed> {
    const AT: u8 = 9;
    let end = connected()?;
    let there = address(1, AT);
    if end == 1 {
        let waits = Command::new(VELLUM)
            .args(["receive", "--insecure-network", "--liveness", "5m", "--listen", &there])
            .output()?;
        return ensure(waits.status.code() == Some(1), || format!("{waits:?}"));
    }
    let env = TestEnv::new()?;
    let line = "run --memory 8m --passes 0 --workload write,rate=100";
    let guest = env.start("whole", &mut env.command(line))?;
    let said = eventually(MOVE_TIMEOUT, "the other host answers", || {
        let output = env.vellum(&format!("migrate whole --insecure-network --liveness 5m --to {there}"))?;
        ensure(output.status.code() == Some(1), || format!("{output:?}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((!said.contains("is `vellum receive` waiting there?")).then_some(said))
    })?;
    eprint!("{said}");
    let named = [
        "CPU features ",
        "avx2, ",
        ": present here, missing there",
        "the CPU model x86-64-v2",
        "vellum run --cpu x86-64-v2",
    ];
    ensure(named.iter().all(|part| said.contains(part)), || said.clone())?;
    ensure(env.ctl("whole status")?.contains("\"running\""), || "it does not run on".into())?;
    env.ctl("whole stop")?;
    let end = guest.end()?;
    ensure(end.status.success(), || format!("{end:?}"))
}

/// The guest `image` with number `at` begins on host `at` modulo 2, migrates to the other host and
/// comes back.
pub fn there_and_back(image: &Image, at: u8) -> Result<(), Failed> {
    let end = connected()?;
    let address = |of: u8| address(of, at);
    let step = |what: &str| eprintln!("linux {} between hosts: {what}", image.version);
    if end == at % 2 {
        step("boots");
        let mut guest =
            Guest::start(image, "", &["--cpus", "2", "--memory", "256m", "--rng", "--cpu", "x86-64-v2"])?;
        guest.ready()?;
        guest.shell(WORKERS)?;
        step("goes");
        goes(&mut guest, &address(1 - end))?;
        let mut guest = comes(&address(end))?;
        step("is back");
        works(&guest)?;
        guest.power_off()?.with(0).map(drop)
    } else {
        let mut guest = comes(&address(end))?;
        step("has come");
        works(&guest)?;
        goes(&mut guest, &address(1 - end))
    }
}

/// Migrates the guest to `address`, once a target waits there.
fn goes(guest: &mut Guest, address: &str) -> Result<(), Failed> {
    let moved = eventually(MOVE_TIMEOUT, "the other host takes it", || {
        let line = ["migrate", guest.name(), "--to", address, "--insecure-network", "--downtime", "5s"];
        let output = guest.vellum(&line)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let nobody = said.contains("is `vellum receive` waiting there?");
        ensure(output.status.success() || nobody, || format!("{output:?}"))?;
        Ok(output.status.success().then_some(output))
    })?;
    eprint!("{}", String::from_utf8_lossy(&moved.stdout));
    guest.wait()?.with(15).map(drop)
}

/// Waits until a guest has arrived at `address` and runs.
fn comes(address: &str) -> Result<Guest, Failed> {
    let flags = ["--insecure-network", "--serial", "null", "--rng", "--liveness", "5m"];
    let guest = Guest::to_come_by(scratch()?, address, &flags)?;
    eventually(MOVE_TIMEOUT, "a guest comes", || {
        Ok((guest.ctl(&["status"])?["state"] == "running").then_some(()))
    })?;
    Ok(guest)
}

/// Checks that the guest has its data, that its clock never went back, and that its writer works.
fn works(guest: &Guest) -> Result<(), Failed> {
    guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null")?;
    let rounds = || -> Result<u64, Failed> { Ok(guest.shell("cat /tmp/rounds")?.trim().parse()?) };
    let before = rounds()?;
    eventually(MOVE_TIMEOUT, "its writer goes on", || Ok((rounds()? > before).then_some(())))
}
