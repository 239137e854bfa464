//! Operations that save the machine, restore it, or inspect it.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Failed, LIMIT, ensure, eventually};
use vellum_control::client::Client;
use vellum_control::{Do, Snapshot};
use vellum_sys::mmap::memfd;

use super::machine::{Fork, Held, MIB, Run, ends};
use crate::VELLUM;
use crate::{succeeds, with};

const SOON: &str = "--downtime 1s --timeout 5s";

/// Saves the machine into `dir`.
fn save(run: &Run, dir: &Path, more: &str) -> Result<(), Failed> {
    succeeds(&run.does(&format!("snapshot {} {} {SOON} {more}", run.name, dir.display()))?)
}

fn fresh(run: &mut Run) -> PathBuf {
    let name = run.next();
    run.env.path(&format!("{name}.snap"))
}

pub fn full(run: &mut Run) -> Result<(), Failed> {
    let dir = fresh(run);
    save(run, &dir, "")?;
    run.saved.push(dir);
    Ok(())
}

/// Saves two points. The second has only the changes. Dirty tracking stays on.
pub fn incremental(run: &mut Run) -> Result<(), Failed> {
    let dir = fresh(run);
    save(run, &dir, "--follow")?;
    run.goes_on()?;
    save(run, &dir, "--follow")?;
    succeeds(&run.does(&format!("snapshot verify {}", dir.display()))?)?;
    run.saved.push(dir);
    Ok(())
}

/// Cancels a snapshot by a signal while it is written. It is complete or missing.
pub fn cancelled(run: &mut Run) -> Result<(), Failed> {
    let dir = fresh(run);
    let line = format!("snapshot {} {} {SOON}", run.name, dir.display());
    let mut client = run.env.migration_client(&line)?;
    eventually(LIMIT, "it is saved, or about to be", || {
        let saves = run.env.standing(&run.name).as_deref() == Some("snapshotting");
        Ok((saves || client.try_wait()?.is_some()).then_some(()))
    })?;
    // The client may have ended by now.
    let _ = Command::new("kill").args(["-INT", &client.id().to_string()]).output()?;
    if ends(&line, client)?.status.success() {
        run.saved.push(dir);
    }
    Ok(())
}

/// A client that is killed at any time, and one that leaves when all is written and nothing is
/// named.
pub fn client_dies(run: &mut Run) -> Result<(), Failed> {
    let dir = fresh(run);
    let mut client = run.env.migration_client(&format!("snapshot {} {} {SOON}", run.name, dir.display()))?;
    eventually(LIMIT, "it is saved, or about to be", || {
        let saves = run.env.standing(&run.name).as_deref() == Some("snapshotting");
        Ok((saves || client.try_wait()?.is_some()).then_some(()))
    })?;
    drop(client);
    run.goes_on()?;
    let asked = Snapshot {
        downtime_ms: 1000,
        timeout_ms: 5000,
        tracker: None,
        loses: Default::default(),
        stop: false,
        chain: "00000000000000000000000000000000".into(),
        number: 0,
        after: None,
        follow: false,
        clones: 0,
    };
    let [ram, map, state] = [(); 3].map(|()| memfd(c"nameless", 0, None));
    let (ram, map, state) = (ram?, map?, state?);
    let socket = run.env.socket(&run.name);
    let mut events = Client::connect(&socket)?;
    events.ask(&Do::Events {})?;
    let mut client = Client::connect(&socket)?;
    client.ask_with(&Do::Snapshot(asked), &[ram.as_fd(), map.as_fd(), state.as_fd()])?;
    eventually(LIMIT, "it is written", || Ok((events.line()?["event"] == "snapshot").then_some(())))?;
    drop(client);
    let given_up = eventually(LIMIT, "it is given up", || {
        let event = events.line()?;
        Ok((event["event"] == "no-snapshot").then_some(event))
    })?;
    let waited = given_up["why"].as_str().is_none_or(|why| why.contains("within"));
    ensure(!waited, || format!("nobody noticed that its client has gone: {given_up}"))
}

/// Saves the machine, ends it, and continues with the restored one.
pub fn restore(run: &mut Run, memory: &str) -> Result<(), Failed> {
    let dir = fresh(run);
    save(run, &dir, "--stop")?;
    let name = run.next();
    let json = run.json(&name);
    // Its name and files are free once it has ended.
    if let Some(machine) = run.machine.take() {
        with(machine.end()?, 0)?;
    }
    let line = format!("restore {} --memory {memory} --json {}", dir.display(), json.display());
    let machine = run.env.run(&name, &line)?;
    run.memory = if memory.contains("memfd") { Held::ByDescriptor } else { Held::ByProcess };
    run.is_at(name, machine, 0)
}

/// Forks the machine. The fork runs on, or waits, until the end.
pub fn fork(run: &mut Run) -> Result<(), Failed> {
    let (name, paused) = (run.next(), run.choose(&["", "--paused"]));
    let line = format!("fork {} --name {name} --json {} {paused}", run.name, run.json(&name).display());
    let output = run.does(&line)?;
    succeeds(&output)?;
    let said = String::from_utf8(output.stdout)?;
    let pid = said.split(", process ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
    run.forks.push(Fork { name, pid: pid.ok_or(said)? });
    run.memory = Held::AfterFork;
    Ok(())
}

pub fn dump(run: &mut Run) -> Result<(), Failed> {
    let name = run.next();
    let core = run.env.path(&format!("{name}.core"));
    succeeds(&run.does(&format!("dump {} {}", run.name, core.display()))?)?;
    let bytes = fs::metadata(&core)?.len();
    fs::remove_file(&core)?;
    ensure(bytes > MIB << 20, || format!("{bytes} bytes"))
}

/// Attaches and detaches a debugger.
pub fn gdb(run: &mut Run) -> Result<(), Failed> {
    let mut stream = UnixStream::connect(run.env.path("m0.gdb"))?;
    stream.set_read_timeout(Some(LIMIT))?;
    for (packet, due) in [("$?#3f", "$T05"), ("+$D#44", "$OK")] {
        stream.write_all(packet.as_bytes())?;
        let mut answer = Vec::new();
        let mut byte = [0];
        while !answer.ends_with(b"#") {
            stream.read_exact(&mut byte)?;
            answer.push(byte[0]);
        }
        stream.read_exact(&mut [0; 2])?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        ensure(answer.contains(due), || format!("{packet} is answered by {answer}"))?;
    }
    Ok(())
}

/// Checks that a machine that a debugger may attach to refuses `operation` and tells why, and that
/// nothing changes.
pub fn refused(run: &mut Run, operation: &str) -> Result<(), Failed> {
    let (name, before) = (run.name.clone(), run.pid()?);
    let nowhere = fresh(run).display().to_string();
    let line = match operation.split('-').next() {
        Some("upgrade") => format!("ctl {name} upgrade {VELLUM}"),
        Some("fork") => format!("fork {name} --name nobody"),
        Some("migrate" | "postcopy") => format!("migrate {name} --to unix:{nowhere}"),
        _ => format!("snapshot {name} {nowhere}"),
    };
    let output = run.does(&line)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code().is_some_and(|code| code != 0) && said.contains("debugger"), || {
        format!("{line}: {output:?}")
    })?;
    ensure(run.pid()? == before, || "it is in another process".into())
}
