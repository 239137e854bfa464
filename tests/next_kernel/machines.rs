//! Machines that outlive their host's kernel. At their ends, built-in guests report whether each page
//! has what they wrote, in all kernels that they ran in.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use support::env::{TestEnv, process};
use support::kexec::{self, KEPT};
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Random, ensure, eventually, test};
use vellum_control::client::Client;
use vellum_control::{Do, Event};
use vellum_launch::config::unpacked;
use vellum_migration::live_update::{self, HostSide, List, RECORD, Saved};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::liveupdate::{Orchestrator, Session};
use vellum_sys::mmap::memfd;
use vellum_sys::socket;

/// The machines of a test: their names and arguments.
const MACHINES: [(&str, &str); 3] = [
    ("small", "--memory 64m,backing=memfd --workload write,order=random,rate=1000,write=80"),
    ("slots", "--memory 256m,backing=memfd,slots=4 --cpus 2 --workload write,order=random,rate=1000"),
    ("large", "--memory 1g,backing=memfd --workload write,rate=1000"),
];

pub fn kept(name: &str) -> PathBuf {
    Path::new(KEPT).join(name)
}

/// Starts a machine whose result is kept.
fn run(env: &TestEnv, name: &str, line: &str) -> Result<(), Failed> {
    let json = kept(&format!("{name}.json"));
    // It ends with the kernel.
    std::mem::forget(env.run(name, &format!("run {line} --passes 0 --json {}", json.display()))?);
    env.has_written(name, 2000)
}

/// Runs a command that must succeed.
pub fn succeeds(env: &TestEnv, line: &str) -> Result<String, Failed> {
    let output = env.vellum(line)?;
    ensure(output.status.success(), || format!("{line}: {output:?}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Restores machines. An emulated host's kernel measures its TSC anew, and finds another frequency.
pub fn restore(which: &str) -> String {
    format!("live-update restore --tsc-mismatch allow {which}")
}

/// Checks that the command fails with `status` and says `what` in one line.
pub fn refuses(env: &TestEnv, line: &str, status: i32, what: &str) -> Result<(), Failed> {
    let output = env.vellum(line)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(status) && said.contains(what) && said.lines().count() == 1;
    ensure(right, || format!("{line}: not {status}, `{what}`: {output:?}"))
}

/// Ends a machine. All of its pages must be right.
fn ends_right(env: &TestEnv, name: &str) -> Result<(), Failed> {
    ensure(is_right(env, name)?, || format!("{name} has a page that is wrong"))
}

/// Ends a machine. Returns whether all of its pages are right.
fn is_right(env: &TestEnv, name: &str) -> Result<bool, Failed> {
    let status: Value = serde_json::from_str(&env.ctl(&format!("{name} status"))?)?;
    let pid = status["pid"].as_u64().ok_or("no process")? as u32;
    env.ctl(&format!("{name} stop"))?;
    eventually(LIMIT, "its process ends", || Ok(process(pid).is_none().then_some(())))?;
    every_page_is_right(&kept(&format!("{name}.json")))
}

/// Saves all machines, and starts the next kernel.
fn goes_to_the_next(env: &TestEnv) -> Result<(), Failed> {
    succeeds(env, "live-update save --all --detach")?;
    for (name, _) in MACHINES.iter().filter(|(name, _)| env.standing(name).is_some()) {
        fs::write(kept(&format!("{name}.done")), env.done(name)?.to_string())?;
    }
    Err(kexec::go_on())
}

/// The machine goes on from where it was saved.
fn goes_on(env: &TestEnv, name: &str) -> Result<(), Failed> {
    let before: u64 = fs::read_to_string(kept(&format!("{name}.done")))?.parse()?;
    let done = env.done(name)?;
    ensure(done >= before, || format!("{name}: {done} pages, and {before} when it was saved"))?;
    env.has_written(name, done + 2000)
}

/// Three machines outlive ten kexecs, between two kernels.
#[test(kexec::host())]
fn machines_outlive_ten_kernels() -> Result<(), Failed> {
    let (env, past) = (TestEnv::new()?, kexec::past());
    if past == 0 {
        for (name, line) in MACHINES {
            run(&env, name, line)?;
        }
    } else {
        let said = succeeds(&env, &restore(""))?;
        ensure(said.matches(" runs, process ").count() == MACHINES.len(), || said)?;
        MACHINES.iter().try_for_each(|(name, _)| goes_on(&env, name))?;
    }
    if past < 10 {
        return goes_to_the_next(&env);
    }
    MACHINES.iter().try_for_each(|(name, _)| ends_right(&env, name))
}

/// A save that is killed at any moment leaves the machines as they were. So does one that fails.
#[test(kexec::host())]
fn a_save_that_is_killed_or_fails_leaves_the_machines_running() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (name, line) in &MACHINES[..2] {
        run(&env, name, line)?;
    }
    let mut random = Random::new();
    for _ in 0..20 {
        let mut saving = env.migration_client("live-update save --all")?;
        std::thread::sleep(Duration::from_micros(random.below(2_000_000)));
        saving.kill()?;
        drop(saving.output()?);
        runs_on(&env)?;
    }
    // Two at the same time.
    let mut held = env.migration_client("live-update save small")?;
    eventually(LIMIT, "it is saved", || {
        Ok((env.standing("small").as_deref() == Some("live-updating")).then_some(()))
    })?;
    refuses(&env, "live-update save slots", 2, "--session vellum: a session of this name is there already")?;
    refuses(&env, "live-update save small --session other", 1, "another operation is under way")?;
    held.kill()?;
    drop(held.output()?);
    runs_on(&env)?;
    // Together they have more memory than the host, nearly all of it holes.
    let mib = (vellum_host::topology::memory().available >> 20) * 6 / 10;
    let holes = ["one", "two"];
    for name in holes {
        let line = format!("run --memory {mib}m,backing=memfd --passes 0 --workload write,rate=1");
        std::mem::forget(env.run(name, &line)?);
    }
    refuses(&env, "live-update save --all", 1, "were never written to")?;
    runs_on(&env)?;
    for name in holes {
        env.ctl(&format!("{name} stop"))?;
    }
    eventually(LIMIT, "they end", || {
        Ok(holes.iter().all(|name| env.standing(name).is_none()).then_some(()))
    })?;
    for (backing, says) in [("anonymous", "is anonymous"), ("shmem", "is shmem")] {
        let other = env.run("other", &format!("run --memory 16m,backing={backing} --passes 0"))?;
        refuses(&env, "live-update save --all", 2, says)?;
        env.ctl("other stop")?;
        other.end()?;
    }
    refuses(&env, "live-update restore", 2, "has handed over no such session")?;
    runs_on(&env)?;
    MACHINES[..2].iter().try_for_each(|(name, _)| ends_right(&env, name))
}

/// The first two machines run.
fn runs_on(env: &TestEnv) -> Result<(), Failed> {
    for (name, _) in &MACHINES[..2] {
        eventually(LIMIT, "it runs on", || {
            Ok((env.standing(name).as_deref() == Some("running")).then_some(()))
        })?;
        let done = env.done(name)?;
        env.has_written(name, done + 100)?;
    }
    Ok(())
}

/// A kernel with other versions, or a file that is none, is refused before a machine is looked for.
#[test(kexec::host())]
fn a_kernel_that_cannot_take_over_is_refused_before_anything() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    run(&env, MACHINES[0].0, MACHINES[0].1)?;
    // As on an installed host: the version of memfds is in the running kernel's image alone.
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    fs::create_dir_all("/boot")?;
    fs::copy(
        Path::new(kexec::KERNELS).join(kexec::running()?),
        Path::new("/boot").join(format!("vmlinuz-{}", release.trim())),
    )?;
    let name = kexec::next()?;
    kexec::load(&name)?;
    let kernel = Path::new(kexec::KERNELS).join(name);
    let image = fs::read(&kernel)?;
    let image = unpacked(&image).ok_or("the kernel cannot be unpacked")?;
    let other = kept("other");
    for (from, to, says) in [
        ("kho-v", "kho-x", "and that one takes none"),
        ("luo-v", "luo-x", "and that one takes none"),
        ("memfd-v", "memfd-x", "that kernel takes no memfd"),
    ] {
        let mut changed = image.clone();
        let starts = |at: &usize| changed[*at..].starts_with(from.as_bytes());
        let places: Vec<usize> = (0..changed.len()).filter(starts).collect();
        ensure(!places.is_empty(), || format!("the kernel has no {from}"))?;
        places.into_iter().for_each(|at| changed[at..at + to.len()].copy_from_slice(to.as_bytes()));
        fs::write(&other, changed)?;
        refuses(&env, &format!("live-update save nobody --kernel {}", other.display()), 2, says)?;
    }
    let mut changed = image;
    let at = changed.windows(5).position(|window| window == b"luo-v").ok_or("no luo")?;
    let (here, there) = (changed[at + 5], changed[at + 5] ^ 1);
    changed[at + 5] = there;
    fs::write(&other, changed)?;
    let says = format!("in luo-v{}, and that one takes luo-v{}", char::from(here), char::from(there));
    refuses(&env, &format!("live-update save --all --kernel {}", other.display()), 2, &says)?;
    fs::write(&other, b"#!/bin/sh\n")?;
    for (file, says) in
        [(other.as_path(), "cannot be unpacked, or is no kernel"), (Path::new(KEPT), "not a file")]
    {
        refuses(&env, &format!("live-update save --all --kernel {}", file.display()), 2, says)?;
    }
    // It runs as it did, and the right kernel is taken.
    env.has_written("small", env.done("small")? + 100)?;
    let mut held = env.migration_client(&format!("live-update save small --kernel {}", kernel.display()))?;
    eventually(LIMIT, "it is saved", || {
        Ok((env.standing("small").as_deref() == Some("live-updating")).then_some(()))
    })?;
    held.kill()?;
    drop(held.output()?);
    eventually(LIMIT, "it runs on", || {
        Ok((env.standing("small").as_deref() == Some("running")).then_some(()))
    })?;
    ends_right(&env, "small")
}

/// Another process holds what is saved: first it gives that up, and then it keeps it for the kexec.
#[test(kexec::host())]
fn what_is_handed_over_is_held_by_its_receiver() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    if kexec::past() > 0 {
        succeeds(&env, &restore(""))?;
        return MACHINES[..2].iter().try_for_each(|(name, _)| {
            goes_on(&env, name)?;
            ends_right(&env, name)
        });
    }
    for (name, line) in &MACHINES[..2] {
        run(&env, name, line)?;
    }
    kexec::load(&kexec::next()?)?;
    let path = env.path("holder");
    let listener = UnixListener::bind(&path)?;
    let received = || -> Result<Vec<OwnedFd>, Failed> {
        succeeds(&env, &format!("live-update save --all --hand-over {}", path.display()))?;
        let (mut line, mut all) = ([0; 64], Vec::new());
        let (stream, _) = listener.accept()?;
        let count = socket::receive(&stream, &mut line, &mut all)?;
        ensure(&line[..count] == b"vellum live-update\n" && all.len() == 3, || format!("{all:?}"))?;
        for (name, _) in &MACHINES[..2] {
            let standing = env.standing(name);
            ensure(standing.as_deref() == Some("live-updating"), || format!("{name} is {standing:?}"))?;
        }
        Ok(all)
    };
    // The session first, and then the connections.
    received()?.into_iter().for_each(drop);
    runs_on(&env)?;
    refuses(&env, "live-update save --all --hand-over /nobody", 2, "--hand-over /nobody")?;
    runs_on(&env)?;
    std::mem::forget(received()?);
    for (name, _) in &MACHINES[..2] {
        fs::write(kept(&format!("{name}.done")), env.done(name)?.to_string())?;
    }
    Err(kexec::go_on())
}

/// A machine whose process stands still cannot be paused. It is named, and all run on.
#[test(kexec::host())]
fn a_machine_that_cannot_pause_is_named_and_nothing_is_saved() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (name, line) in &MACHINES[..2] {
        run(&env, name, line)?;
    }
    kexec::load(&kexec::next()?)?;
    let status: Value = serde_json::from_str(&env.ctl("slots status")?)?;
    let pid = status["pid"].as_u64().ok_or("no process")?;
    let signal = |name: &str| {
        let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status()?;
        ensure(sent.success(), || format!("kill -{name} {pid}"))
    };
    let mut random = Random::new();
    // Before the save, and then at some time while it is made.
    for at in [0, 200_000, 400_000, 800_000] {
        let told = env.path("told");
        if at == 0 {
            signal("STOP")?;
        }
        let mut saving =
            env.migration_client(&format!("live-update save --all --json {}", told.display()))?;
        let after = random.below(at + 1);
        if at > 0 {
            std::thread::sleep(Duration::from_micros(after));
            signal("STOP")?;
        }
        let is_saved = eventually(LIMIT, "it is saved or fails", || {
            let has_failed = saving.try_wait()?.is_some();
            // The file is there from the start, and is written at the end.
            let is_told = fs::metadata(&told).is_ok_and(|file| file.len() > 0);
            Ok((has_failed || is_told).then_some(!has_failed))
        })?;
        ensure(!is_saved || at > 0, || "a machine that was stopped before was saved".into())?;
        if is_saved {
            saving.kill()?;
        }
        let output = saving.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        eprintln!("stopped after {after} us: {}", if is_saved { "it was saved" } else { said.trim_end() });
        let is_one = output.status.code() == Some(1) && said.lines().count() == 1 && said.contains("slots");
        ensure(is_saved || is_one, || format!("{output:?}"))?;
        signal("CONT")?;
        let _ = fs::remove_file(told);
        runs_on(&env)?;
    }
    MACHINES[..2].iter().try_for_each(|(name, _)| ends_right(&env, name))
}

/// A kexec without a save. Then clients and the keeper are killed while machines are restored.
#[test(kexec::host())]
fn a_restore_that_is_killed_loses_no_machine_that_runs() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    match kexec::past() {
        0 => Err(kexec::go_on()),
        1 => {
            refuses(&env, "live-update restore", 2, "has handed over no such session")?;
            for (name, line) in MACHINES {
                run(&env, name, line)?;
            }
            goes_to_the_next(&env)
        }
        2 => {
            // A keeper that cannot listen retrieves nothing.
            let mut command = env.command(&restore("small"));
            let output = command.env("XDG_RUNTIME_DIR", env.path(&"long/".repeat(30))).output()?;
            ensure(!output.status.success(), || format!("{output:?}"))?;
            // A client may end at any moment: the keeper does what it was asked for.
            let mut client = env.migration_client(&restore("small"))?;
            std::thread::sleep(Duration::from_micros(Random::new().below(500_000)));
            client.kill()?;
            drop(client.output()?);
            let small = env.vellum(&restore("small"))?;
            let said = String::from_utf8_lossy(&small.stderr).into_owned();
            ensure(
                small.status.success() || said.contains("small: no machine of this name is kept"),
                || format!("{small:?}"),
            )?;
            goes_on(&env, "small")?;
            refuses(&env, "live-update restore small", 2, "small: no machine of this name is kept")?;
            let lines = succeeds(&env, "live-update restore --print")?;
            ensure(lines.lines().count() == 2 && lines.contains("slots: "), || lines)?;
            // What is wrong with the command line does not lose the machine.
            refuses(&env, &restore("slots --rng"), 2, "kept: large, slots")?;
            succeeds(&env, &restore("slots"))?;
            goes_on(&env, "slots")?;
            // With the keeper, the memory of what does not run is lost, and nothing else.
            let keeper = keeper()?.ok_or("no keeper runs")?;
            ensure(Command::new("kill").args(["-KILL", &keeper.to_string()]).status()?.success(), || {
                "kill".into()
            })?;
            eventually(LIMIT, "it ends", || Ok(process(keeper).is_none().then_some(())))?;
            refuses(&env, "live-update restore", 2, "has handed over no such session")?;
            goes_on(&env, "small")?;
            goes_on(&env, "slots")?;
            // The name is free again, and memory of the last session can be preserved.
            goes_to_the_next(&env)
        }
        _ => {
            succeeds(&env, &restore("small --name renamed"))?;
            succeeds(&env, &restore(""))?;
            eventually(LIMIT, "the keeper ends", || Ok(keeper()?.is_none().then_some(())))?;
            ensure(env.standing("small").is_none() && env.standing("renamed").is_some(), || {
                "the name".into()
            })?;
            ends_right(&env, "slots")
        }
    }
}

/// The keeper's process.
fn keeper() -> Result<Option<u32>, Failed> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.split(|byte| *byte == 0).any(|word| word == b"--keeper") {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// What a test saves by itself.
struct Own {
    _client: Client,
    memory: File,
    saved: Saved,
    files: Files,
}

/// Saves the machine `name` as `vellum live-update save` does, without a session.
fn save(env: &TestEnv, name: &str) -> Result<Own, Failed> {
    let mut client = env.listen(name)?;
    let [ram, map, state] = [memfd(c"pages", 0, None)?, memfd(c"map", 0, None)?, memfd(c"state", 0, None)?];
    client.ask_with(&Do::LiveUpdate {}, &[&ram, &map, &state].map(AsFd::as_fd))?;
    let (_, memory) = Client::borrow(&env.socket(name), &Do::LiveUpdateMemory {})?;
    let memory = memory.into_iter().next().ok_or("no memory came")?.into();
    let (memory, position) = live_update::marked(&memory)?;
    client.ask(&Do::LiveUpdatePause {})?;
    let point = eventually(LIMIT, "it is saved", || match serde_json::from_value(client.event_of(None)?)? {
        Event::Preserved { written, .. } => Ok(Some(Point::of(0, false, written))),
        Event::NotPreserved { why } => Err(why.into()),
        _ => Ok(None),
    })?;
    let host = HostSide { serial: "null".into(), sandbox: "on".into(), ..HostSide::default() };
    let saved =
        Saved { name: name.into(), line: Vec::new(), host, position, point, files: Default::default() };
    Ok(Own { _client: client, memory, saved, files: Files { ram, map, state, clones: Vec::new() } })
}

/// A session of this name with what is saved, where `change` damages it: the list, the record, or
/// the order of memory.
fn session(
    name: &str,
    saved: &[Own],
    change: impl FnOnce(&mut List, &mut Vec<usize>),
) -> Result<(Session, File), Failed> {
    let session = Orchestrator::open()?.create(&match name {
        "version" => format!("{name}.v{}", live_update::VERSION + 1),
        _ => live_update::session(name),
    })?;
    let mut list =
        List { vellum: "test".into(), machines: saved.iter().map(|own| own.saved.clone()).collect() };
    let mut order: Vec<usize> = (0..saved.len()).collect();
    change(&mut list, &mut order);
    let copy = |file: &File| file.try_clone();
    let files = saved.iter().map(|own| {
        let Files { ram, map, state, .. } = &own.files;
        Ok(Files { ram: copy(ram)?, map: copy(map)?, state: copy(state)?, clones: Vec::new() })
    });
    let files: Vec<Files> = files.collect::<std::io::Result<_>>()?;
    let record = memfd(c"record", 0, None)?;
    live_update::write(&record, &mut list, &files)?;
    session.preserve(&record, RECORD)?;
    for (token, at) in order.into_iter().enumerate() {
        session.preserve(&saved[at].memory, live_update::token(token))?;
    }
    Ok((session, record))
}

/// Records that are damaged, of another version, with memory that is missing or of another machine.
#[test(kexec::host())]
fn what_is_damaged_is_refused_and_never_run() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let names = ["swapped", "missing", "state", "record", "version"];
    if kexec::past() == 0 {
        let mut held = Vec::new();
        for name in names {
            let machines = ["a", "b"].map(|which| format!("{name}-{which}"));
            for machine in &machines {
                run(&env, machine, "--memory 16m,backing=memfd --workload write,rate=1000")?;
            }
            let saved = machines.iter().map(|machine| save(&env, machine)).collect::<Result<Vec<_>, _>>()?;
            let (session, record) = session(name, &saved, |list, order| match name {
                "swapped" => order.reverse(),
                "missing" => drop(order.pop()),
                "state" => list.machines[0].point.state_crc ^= 1,
                _ => {}
            })?;
            if name == "record" {
                record.write_all_at(b"\0", 60)?;
            }
            held.push((session, saved));
        }
        return Err(kexec::go_on());
    }
    for (name, status, says) in [
        ("swapped", 1, "swapped-a is lost: the memory that came under its token is not its own"),
        ("missing", 1, "missing-b is lost: No such file or directory"),
        ("record", 2, "the checksum of its list is wrong; it is damaged"),
        ("version", 2, "a Vellum with another format of saved machines has saved it"),
    ] {
        refuses(&env, &restore(&format!("--session {name}")), status, says)?;
    }
    // It was not retrieved. A Vellum of its version could.
    Orchestrator::open()?.retrieve(&format!("version.v{}", live_update::VERSION + 1))?;
    ensure(env.standing("missing-a").is_some(), || "one that is lost has taken another with it".into())?;
    let output = env.vellum(&restore("--session state"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_told = said.contains("it is damaged; kept: state-a");
    ensure(!output.status.success() && is_told && env.standing("state-a").is_none(), || {
        format!("{output:?}")
    })?;
    ensure(env.standing("state-b").is_some(), || "the other one does not run".into())?;
    succeeds(&env, "live-update restore state-a --session state --give-up")?;
    eventually(LIMIT, "the keeper ends", || Ok(keeper()?.is_none().then_some(())))
}
