//! Live migration between processes: `vellum migrate` and `vellum receive` as a whole, and the
//! guest's fate when one of them dies.

mod clock_pages;
mod commit_flag;
mod compressed;
mod connections;
mod cpu;
mod cuts;
mod disk;
mod faults;
mod fits;
mod memfd;
mod numbered;
mod owners;
mod pairs;
mod planted;
mod postcopy;
mod relay;
mod sequences;
mod snapshot;
mod snapshot_demand;
mod snapshot_disks;
mod snapshot_map;
mod snapshot_merge;
mod snapshot_space;
mod ssh;
mod trips;
mod typed;
mod upgrade;
mod upgrade_ends;
mod verify;

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use serde_json::Value;
use support::env::{Machine, Process, TestEnv};
use support::guests::Code;
use support::hosts::{kvm, real};
use support::results;
use support::{Failed, LIMIT, Tests, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_sys::mmap::PAGE_SIZE;

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    pairs::add(&mut tests);
    planted::add(&mut tests);
    clock_pages::add(&mut tests);
    postcopy::add(&mut tests);
    snapshot_demand::add(&mut tests);
    snapshot_disks::add(&mut tests);
    snapshot_map::add(&mut tests);
    snapshot_space::add(&mut tests);
    trips::add_long(&mut tests);
    sequences::add_long(&mut tests);
    tests.run()
}

fn ends_with(machine: Machine, status: i32) -> Result<Output, Failed> {
    with(machine.end()?, status)
}

fn with(output: Output, status: i32) -> Result<Output, Failed> {
    ensure(output.status.code() == Some(status), || format!("not status {status}: {output:?}"))?;
    Ok(output)
}

fn succeeds(output: &Output) -> Result<(), Failed> {
    ensure(output.status.success(), || format!("{output:?}"))
}

/// Checks the result of a built-in guest that has ended: there were pages, and all were right.
fn every_page_is_right(path: &Path) -> Result<(), Failed> {
    ensure(results::every_page_is_right(path)?, || format!("{}: a page is wrong", path.display()))
}

/// The KiB of `name` in a line of /proc.
fn kib(line: &str, name: &str) -> Option<u64> {
    line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok()
}

/// The event of a completed migration.
fn moved(output: &Output) -> Result<Value, Failed> {
    let mut events =
        output.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let moved = events.find(|event: &Value| event["event"] == "moved");
    Ok(moved.ok_or_else(|| format!("no word of it: {output:?}"))?)
}

/// How often a ring was full.
fn full(moved: &Value) -> u64 {
    moved["dirty_ring"]["full"].as_u64().unwrap_or(0)
}

/// A kernel that counts on its serial port for ever.
fn counting(env: &TestEnv) -> Result<PathBuf, Failed> {
    let kernel = env.path("kernel");
    // mov dx, 0x3f8; xor eax, eax
    // next: out dx, al; inc eax; mov ecx, 256; wait: dec ecx; jnz wait; jmp next
    let counts = [0x66, 0xba, 0xf8, 0x03, 0x31, 0xc0, 0xee, 0xff, 0xc0, 0xb9, 0, 1, 0, 0, 0xff, 0xc9]
        .into_iter()
        .chain([0x75, 0xfc, 0xeb, 0xf2]);
    fs::write(&kernel, Code::default().bytes(&counts.collect::<Vec<u8>>()).elf64())?;
    Ok(kernel)
}

/// Checks the output on all sides in order: no byte is missing, and none comes twice.
fn has_counted(outputs: &[PathBuf]) -> Result<(), Failed> {
    let counted = outputs.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?.concat();
    let wrong = counted.iter().enumerate().find(|(at, byte)| **byte != *at as u8);
    ensure(wrong.is_none(), || format!("byte {wrong:?} of {} is not the next", counted.len()))
}

/// A kernel that counts on its serial port continues after a migration: no byte is lost, and none
/// comes twice.
#[test(kvm())]
fn a_pc_moves_with_its_serial_port_and_its_registers() -> Result<(), Failed> {
    for irqchip in ["split", "kernel"] {
        let env = TestEnv::new()?;
        let kernel = counting(&env)?;
        let (out, far) = (env.path("out"), env.path("far"));
        let line = format!(
            "run --kernel {} --memory 32m --irqchip {irqchip} --serial file={} --rng --balloon",
            kernel.display(),
            out.display()
        );
        let here = env.run("here", &line)?;
        eventually(LIMIT, "it has counted once round", || {
            Ok((fs::metadata(&out)?.len() > 256).then_some(()))
        })?;
        let devices = format!("--serial file={} --rng --balloon", far.display());
        let there = env.receive("there", &devices)?;
        succeeds(&env.migrate("here", "there", "")?)?;
        ends_with(here, 15)?;
        eventually(LIMIT, "it counts on", || Ok((fs::metadata(&far)?.len() > 256).then_some(())))?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        has_counted(&[out, far])?;
    }
    Ok(())
}

/// A kernel writes to one page after the other, fills its rings, and checks that each page holds
/// what it wrote the last time. Its first migration is cancelled. The second one knows where KVM
/// continues in the rings.
#[test(kvm())]
fn a_pc_with_a_ring_moves_and_finds_every_page_as_it_left_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    // mov dx, 0x3f8; xor eax, eax; xor ebx, ebx; xor esi, esi
    let mut code = vec![0x66, 0xba, 0xf8, 0x03, 0x31, 0xc0, 0x31, 0xdb, 0x31, 0xf6];
    // next: out dx, al; inc eax; cmp [rbx + 8 MiB], esi; jne wrong; lea edi, [rsi + 1]
    // mov [rbx + 8 MiB], edi
    code.extend([0xee, 0xff, 0xc0, 0x39, 0xb3, 0, 0, 0x80, 0, 0x75, 0x1b, 0x8d, 0x7e, 1]);
    code.extend([0x89, 0xbb, 0, 0, 0x80, 0]);
    // add ebx, 4096; and ebx, 16 MiB - 4096; jnz next; inc esi; jmp next
    // wrong: ud2, which no table handles
    code.extend([
        0x81, 0xc3, 0, 0x10, 0, 0, 0x81, 0xe3, 0, 0xf0, 0xff, 0, 0x75, 0xde, 0xff, 0xc6, 0xeb, 0xda,
    ]);
    code.extend([0x0f, 0x0b]);
    fs::write(&kernel, Code::default().bytes(&code).elf64())?;
    let out = ["out", "far"].map(|name| env.path(name));
    let serial = |at: usize| format!("--serial file={} --dirty-ring=1024", out[at].display());
    let line = format!("run --kernel {} --memory 32m {}", kernel.display(), serial(0));
    let here = env.run("here", &line)?;
    let grows = |at: usize| -> Result<(), Failed> {
        let was = fs::metadata(&out[at])?.len();
        // Every page, twice.
        eventually(LIMIT, "it goes on", || Ok((fs::metadata(&out[at])?.len() > was + 8192).then_some(())))
    };
    grows(0)?;
    let nobody = env.receive("nobody", "--serial null")?;
    let to = env.path("nobody.in");
    let client = env
        .migration_client(&format!("migrate here --liveness 5m --bandwidth 4m --to unix:{}", to.display()))?;
    eventually(LIMIT, "a ring has been full", || {
        let status = Client::connect(&env.socket("here"))?.ask(&Do::Status {})?;
        Ok((status["tracker"] == "ring" && full(&status) > 1).then_some(()))
    })?;
    succeeds(&env.vellum("ctl here migrate-cancel")?)?;
    with(client.output()?, 1)?;
    ends_with(nobody, 1)?;
    grows(0)?;
    let before = Client::connect(&env.socket("here"))?.ask(&Do::Status {})?;
    let there = env.receive("there", &serial(1))?;
    let output =
        env.migrate("here", "there", "--bandwidth 100m --downtime 20ms --timeout 2s,then=force --json")?;
    succeeds(&output)?;
    ends_with(here, 15)?;
    let moved = moved(&output)?;
    ensure(moved["tracker"] == "ring" && full(&moved) >= full(&before), || format!("{before}, {moved}"))?;
    grows(1)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    has_counted(&out)
}

/// The default tracker is initially-set, unless this kernel is known to lose pages with it on this
/// machine's memslots. The result then tells why.
#[test(kvm())]
fn the_default_tracker_depends_on_what_the_host_is_known_to_lose() -> Result<(), Failed> {
    let doctor = String::from_utf8(TestEnv::new()?.vellum("doctor")?.stdout)?;
    let loses = doctor.contains("this kernel loses");
    // A single memslot begins at the start of memory, which is safe. A test of `dirty::log` covers
    // the others.
    for slots in 1..=5 {
        let env = TestEnv::new()?;
        let here = env.run("here", &format!("run --memory 8m,slots={slots} --passes 0"))?;
        let there = env.receive("there", "")?;
        let output = env.migrate("here", "there", "--json --downtime 1s --timeout 3s,then=force")?;
        succeeds(&output)?;
        ends_with(here, 15)?;
        let moved = moved(&output)?;
        let expected = match moved["tracker_why"].as_str() {
            Some(why) if loses && why.contains("vellum doctor") => "manual-protect",
            _ => "initially-set",
        };
        ensure(moved["tracker"] == expected, || format!("{slots}: {moved}"))?;
        ensure(slots > 1 || expected == "initially-set", || moved.to_string())?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
    }
    Ok(())
}

/// A machine has a dirty ring from its start, and only that or other trackers.
#[test(real())]
fn a_tracker_that_the_machine_does_not_have_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let _with = env.run("with", "run --memory 8m --passes 0 --dirty-ring")?;
    let _without = env.run("without", "run --memory 8m --passes 0")?;
    let _there = env.receive("there", "")?;
    for (machine, tracker, says) in [
        ("without", "ring", "--dirty-ring"),
        ("with", "bitmap", "ring would work"),
        ("with", "manual-protect", "ring would work"),
        ("with", "initially-set", "ring would work"),
    ] {
        let refused = with(env.migrate(machine, "there", &format!("--tracker {tracker}"))?, 2)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        let named = said.contains(&format!("--tracker {tracker}")) && said.contains(says);
        ensure(named && said.lines().count() == 1, || said.clone())?;
        ensure(env.standing(machine).as_deref() == Some("running"), || format!("{machine} is gone"))?;
    }
    for line in
        ["run --dirty-ring=1000", "run --dirty-ring=512", "receive --listen unix:nowhere --dirty-ring=3"]
    {
        let refused = with(env.vellum(line)?, 2)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure(said.contains("--dirty-ring=") && said.contains("a power of two from 1024"), || said.clone())?;
    }
    Ok(())
}

/// Each way to a target, including the relay of `ssh:`. Unencrypted TCP beyond loopback is refused
/// on both sides.
#[test(real())]
fn a_target_is_reached_by_tcp_by_a_command_and_by_the_relay() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // A free port, chosen by the kernel.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let tcp = format!("tcp:127.0.0.1:{port}");
    // A command is one word here, so it has no blanks.
    let script = env.path("relay.sh");
    fs::write(&script, format!("exec {} receive --relay m2\n", VELLUM))?;
    let mut here = env.run("m0", "run --memory 8m --passes 0 --workload write,rate=1000")?;
    let hops = [
        ("m1", format!("receive --listen {tcp}"), tcp),
        ("m2", "receive".to_owned(), format!("exec:.{}", script.display())),
    ];
    for (at, (name, receive, to)) in hops.into_iter().enumerate() {
        let json = env.path("json");
        let there = env.run(name, &format!("{receive} --json {}", json.display()))?;
        // `.` runs the script in the shell of the command. `$IFS` stands for a blank.
        let to = to.replace("exec:.", "exec:.$IFS");
        succeeds(&env.vellum(&format!("migrate m{at} --to {to}"))?)?;
        ends_with(here, 15)?;
        here = there;
        // Another target can then wait there.
        eventually(LIMIT, "the port is free", || {
            Ok(std::net::TcpListener::bind(("127.0.0.1", port)).ok().map(drop))
        })?;
    }
    succeeds(&env.vellum("ctl m2 stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&env.path("json"))?;
    let here = env.run("here", "run --memory 8m --passes 0")?;
    for line in ["migrate here --to tcp:192.0.2.1:1", "receive --listen tcp:0.0.0.0:0"] {
        let refused = with(env.vellum(line)?, 2)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure(said.contains("--insecure-network") && said.lines().count() == 1, || said.clone())?;
    }
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    drop(here);
    Ok(())
}

/// A paused guest arrives paused, and runs when it is resumed.
#[test(kvm())]
fn a_paused_guest_arrives_paused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    let there = env.receive("there", &format!("--json {}", env.path("json").display()))?;
    succeeds(&env.migrate("here", "there", "--paused")?)?;
    ends_with(here, 15)?;
    ensure(env.standing("there").as_deref() == Some("paused"), || format!("{:?}", env.standing("there")))?;
    succeeds(&env.vellum("ctl there resume")?)?;
    ensure(env.standing("there").as_deref() == Some("running"), || "it does not go on".into())?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&env.path("json"))
}

/// A guest writes all of its memory in each pass. It is throttled more and more until the downtime
/// limit is raised. A test of `workload` checks that vCPUs sleep as long as they are asked to.
#[test(real())]
fn time_is_asked_for_from_a_guest_that_is_faster_than_its_link() -> Result<(), Failed> {
    for (how, ring) in
        [("steps", ""), ("dirty-limit", ""), ("steps", "--dirty-ring=1024"), ("dirty-limit", "--dirty-ring")]
    {
        let env = TestEnv::new()?;
        let line = format!("run --memory 2m --passes 0 --workload write,rate=20000 {ring}");
        let here = env.run("here", &line)?;
        let there = env.receive("there", &format!("--json {}", env.path("json").display()))?;
        // A guest that has only started has little to send.
        env.has_written("here", 4 * (2 << 20) / PAGE_SIZE)?;
        let mut events = env.listen("here")?;
        let to = env.path("there.in");
        let limits = "--bandwidth 8m --downtime 10ms";
        let client = env.migration_client(&format!(
            "migrate here --liveness 5m --throttle {how} {limits} --to unix:{}",
            to.display()
        ))?;
        eventually(LIMIT, "time is taken from it", || {
            Ok((events.line()?["throttle_percent"].as_u64() >= Some(20)).then_some(()))
        })?;
        let moves = Do::MigrateSet { downtime_ms: Some(60_000), bandwidth: None };
        Client::connect(&env.socket("here"))?.ask(&moves)?;
        succeeds(&client.output()?)?;
        ends_with(here, 15)?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        every_page_is_right(&env.path("json"))?;
    }
    Ok(())
}

/// Starts a slow migration and waits until it is under way.
fn under_way(env: &TestEnv) -> Result<(Machine, Machine, Process), Failed> {
    let here = env.run("here", "run --memory 64m --passes 0 --workload write,rate=1000")?;
    let there = env.receive("there", "")?;
    let to = env.path("there.in");
    let line = format!("migrate here --liveness 5m --bandwidth 1m --to unix:{}", to.display());
    let client = env.migration_client(&line)?;
    eventually(LIMIT, "it is under way", || {
        let (here, there) = (env.standing("here"), env.standing("there"));
        Ok(((here.as_deref(), there.as_deref()) == (Some("migrating"), Some("incoming"))).then_some(()))
    })?;
    Ok((here, there, client))
}

fn stays(env: &TestEnv, here: Machine, client: Process) -> Result<(), Failed> {
    let output = with(client.output()?, 1)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("stays where it is") && said.lines().count() == 1, || said.clone())?;
    ensure(env.standing("here").as_deref() == Some("running"), || format!("{:?}", env.standing("here")))?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

#[test(real())]
fn a_target_that_dies_leaves_the_guest_where_it_is() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there, client) = under_way(&env)?;
    drop(there);
    stays(&env, here, client)
}

#[test(real())]
fn a_source_that_dies_leaves_no_machine_behind() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there, client) = under_way(&env)?;
    drop(here);
    let output = ends_with(there, 1)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("no machine has come"), || said.clone())?;
    with(client.output()?, 1).map(drop)
}

#[test(real())]
fn a_migration_is_cancelled_by_ctl_and_by_a_signal() -> Result<(), Failed> {
    for by_signal in [false, true] {
        let env = TestEnv::new()?;
        let (here, there, client) = under_way(&env)?;
        if by_signal {
            let pid = client.id().to_string();
            succeeds(&Command::new("kill").args(["-INT", &pid]).output()?)?;
        } else {
            succeeds(&env.vellum("ctl here migrate-cancel")?)?;
        }
        stays(&env, here, client)?;
        ends_with(there, 1)?;
    }
    Ok(())
}

/// A migration goes on if its client is killed. Its limits can still be changed, and another client
/// can follow it.
#[test(real())]
fn a_migration_client_that_is_killed_stops_nothing() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there, client) = under_way(&env)?;
    drop(client);
    ensure(env.standing("here").as_deref() == Some("migrating"), || "it has stopped".into())?;
    let second = env.migrate("here", "there", "")?;
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure(second.status.code() == Some(1) && said.contains("is under way"), || said.clone())?;
    let mut attached = env.migration_client("migrate here --attach --json")?;
    // The client follows the migration once it has printed something. The migration could end
    // before if its limit was raised now.
    let mut said = BufReader::new(attached.stdout.take().ok_or("it has no output")?);
    said.read_line(&mut String::new())?;
    succeeds(&env.vellum("ctl here migrate-set --bandwidth 1g")?)?;
    io::copy(&mut said, &mut io::sink())?;
    with(attached.output()?, 0)?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0).map(drop)
}

#[test(real())]
fn what_does_not_fit_is_named_and_nothing_is_left() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    let there = env.receive("there", "--rng")?;
    let output = env.migrate("here", "there", "")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("rng: a guest without devices here"), || {
        said.clone()
    })?;
    ends_with(there, 1)?;
    let huge = env.receive("huge", "--memory backing=hugetlb-1g")?;
    let output = env.migrate("here", "huge", "")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("memory: 16m here, 16m is too small"), || {
        said.clone()
    })?;
    ends_with(huge, 1)?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().spin().elf64())?;
    let line = format!("run --kernel {} --memory 32m --serial null --rng", kernel.display());
    let pc = env.run("pc", &line)?;
    let bare = env.receive("bare", "--serial null --balloon")?;
    let output = env.migrate("pc", "bare", "")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let both = said.contains("rng: present here, missing there") && said.contains("balloon: missing here");
    ensure(output.status.code() == Some(1) && both, || said.clone())?;
    ensure(env.standing("pc").as_deref() == Some("running"), || "it does not run on".into())?;
    ends_with(bare, 1)?;
    drop(pc);
    let output = env.migrate("here", "nobody", "")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("is `vellum receive` waiting there?"), || {
        said.clone()
    })?;
    ensure(env.standing("here").as_deref() == Some("running"), || format!("{:?}", env.standing("here")))?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// If a machine has a time limit, the client of a migration or snapshot says that the limit is not
/// carried over.
#[test(kvm())]
fn a_time_limit_that_does_not_move_is_told() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 8m --passes 0 --duration 1h")?;
    let output = env.vellum(&format!("snapshot here {}", env.path("snap").display()))?;
    succeeds(&output)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("--duration") && said.contains("is not in the snapshot"), || said.clone())?;
    let there = env.receive("there", "")?;
    let output = env.migrate("here", "there", "--downtime 1m")?;
    succeeds(&output)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(said.contains("--duration") && said.contains("does not move with it"), || said.clone())?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0).map(drop)
}

/// A peer that does not speak the protocol.
#[test(real())]
fn strangers_are_sent_away_and_a_source_still_comes() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let there = env.receive("there", "")?;
    for noise in
        [&b"GET / HTTP/1.1\r\nHost: there\r\nAccept: everything and more\r\n\r\n"[..], &[0; 100], b"VLMG"]
    {
        let mut stranger = UnixStream::connect(env.path("there.in"))?;
        stranger.write_all(noise)?;
        if noise.len() >= 48 {
            // The peer is sent away. Its unread bytes may make that a reset.
            let _ = stranger.read(&mut [0; 1]);
        }
    }
    // More than a target keeps. Each is silent, and may be for as long as a source.
    let silent: Vec<_> =
        (0..30).map(|_| UnixStream::connect(env.path("there.in"))).collect::<Result<_, _>>()?;
    let here = env.run("here", "run --memory 16m --passes 0")?;
    succeeds(&env.migrate("here", "there", "")?)?;
    ends_with(here, 15)?;
    drop(silent);
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0).map(drop)
}
