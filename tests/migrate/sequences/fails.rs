//! Operations that fail, are cancelled or are cut. The machine runs on where it was, or is
//! recovered.

use std::fs;
use std::process::Command;

use support::env::Process;
use support::{Failed, LIMIT, ensure, eventually};

use super::machine::{Held, MIB, Run, cannot_be_upgraded, ends, is_in_another, script, slowly};
use crate::postcopy::Cutter;
use crate::relay::{RelayFault, relay};
use crate::{ends_with, succeeds, with};

/// Checks that an upgrade to `binary` fails and changes nothing.
fn is_not_upgraded(run: &mut Run, binary: &str) -> Result<(), Failed> {
    if run.memory == Held::ByProcess {
        return cannot_be_upgraded(run);
    }
    let before = run.pid()?;
    let output = run.does(&format!("ctl {} upgrade {binary}", run.name))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let stays = said.contains("stays in the process that it is in");
    ensure(output.status.code() == Some(1) && stays, || format!("{output:?}"))?;
    run.goes_on()?;
    let now = run.pid()?;
    ensure(now == before, || format!("it was in process {before} and is in {now}"))
}

/// A successor that cannot open enough descriptors to start.
pub fn upgrade_cannot_start(run: &mut Run) -> Result<(), Failed> {
    let limit = 10 + run.random.below(10);
    let build = script(run, &format!("ulimit -n {limit}"))?;
    is_not_upgraded(run, &build.display().to_string())
}

/// A successor that ends, or that closes the connection without a message.
pub fn upgrade_refused(run: &mut Run) -> Result<(), Failed> {
    let binary = run.choose(&["/bin/false", "/bin/true", "/bin/cat"]);
    is_not_upgraded(run, binary)
}

/// Cancels an upgrade before the successor has started, or as it starts, by a client or by a
/// signal.
pub fn upgrade_cancelled(run: &mut Run) -> Result<(), Failed> {
    if run.memory == Held::ByProcess {
        return cannot_be_upgraded(run);
    }
    let before = run.pid()?;
    let gate = run.env.path("gate");
    let _ = fs::remove_file(&gate);
    succeeds(&Command::new("mkfifo").arg(&gate).output()?)?;
    let build = script(run, &format!("read -r go <{}", gate.display()))?;
    let line = format!("ctl {} upgrade --downtime 1m {}", run.name, build.display());
    let client = run.env.migration_client(&line)?;
    eventually(LIMIT, "the upgrade is under way", || {
        Ok((run.env.standing(&run.name).as_deref() == Some("upgrading")).then_some(()))
    })?;
    let early = run.random.below(2) == 0;
    let (by_signal, opens) = (run.random.below(2) == 0, || fs::write(&gate, "go\n"));
    if !early {
        opens()?;
    }
    cancel(run, &client, by_signal)?;
    if early {
        opens()?;
    }
    let output = ends(&line, client)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        // The cancellation was too late. A client takes a while to react to a signal.
        Some(0) if !early || by_signal => {
            is_in_another(run, before)?;
            run.memory = Held::ByDescriptor;
            Ok(())
        }
        Some(1) if said.contains("stays in the process that it is in") => {
            run.goes_on()?;
            ensure(run.pid()? == before, || "it is in another process".into())
        }
        _ => Err(format!("{output:?}").into()),
    }
}

/// Cancels the operation, which may have ended by then.
fn cancel(run: &Run, client: &Process, by_signal: bool) -> Result<(), Failed> {
    if by_signal {
        succeeds(&Command::new("kill").args(["-INT", &client.id().to_string()]).output()?)
    } else {
        let output = run.does(&format!("ctl {} migrate-cancel", run.name))?;
        // An upgrade may have ended in between.
        let late = String::from_utf8_lossy(&output.stderr).contains("no migration");
        ensure(output.status.success() || late, || format!("{output:?}"))
    }
}

/// Checks that the migration failed, and that the machine stays.
fn stays(output: &std::process::Output) -> Result<(), Failed> {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("stays where it is"), || format!("{output:?}"))
}

pub fn migrate_misfit(run: &mut Run) -> Result<(), Failed> {
    let name = run.next();
    let there = run.env.receive(&name, "--rng")?;
    let to = run.env.path(&format!("{name}.in"));
    stays(&run.does(&format!("migrate {} --to unix:{}", run.name, to.display()))?)?;
    ends_with(there, 1).map(drop)
}

pub fn migrate_target_dies(run: &mut Run) -> Result<(), Failed> {
    let name = run.next();
    let there = run.receiver(&name)?;
    let client = slowly(run, &run.env.path(&format!("{name}.in")))?;
    eventually(LIMIT, "it is under way", || {
        Ok((run.env.standing(&name).as_deref() == Some("incoming")).then_some(()))
    })?;
    drop(there);
    stays(&ends("the migration", client)?)
}

/// Cuts the link in the first pass, before a hand-over is possible.
pub fn migrate_cut(run: &mut Run) -> Result<(), Failed> {
    let name = run.next();
    let there = run.receiver(&name)?;
    let [from, to] = ["relay", "in"].map(|end| run.env.path(&format!("{name}.{end}")));
    let after = (256 << 10) + run.random.below((MIB / 2) << 20);
    relay(from.clone(), to, RelayFault::Cut { back: false, after })?;
    let line = format!("migrate {} --liveness 5m --to unix:{}", run.name, from.display());
    stays(&run.does(&line)?)?;
    ends_with(there, 1).map(drop)
}

pub fn migrate_cancelled(run: &mut Run) -> Result<(), Failed> {
    let name = run.next();
    let there = run.receiver(&name)?;
    let client = slowly(run, &run.env.path(&format!("{name}.in")))?;
    // The client connects to the target before it asks the source.
    eventually(LIMIT, "both sides have begun", || {
        let stands = |name: &str, as_what| run.env.standing(name).as_deref() == Some(as_what);
        Ok((stands(&name, "incoming") && stands(&run.name, "migrating")).then_some(()))
    })?;
    let by_signal = run.random.below(2) == 0;
    cancel(run, &client, by_signal)?;
    stays(&ends("the migration", client)?)?;
    ends_with(there, 1).map(drop)
}

/// Cuts the link while the guest runs on the target without all of its memory, which then arrives
/// on a new connection. With one connection the guest runs and asks for pages. With several it is
/// paused, so that nothing asks for pages before the recovery.
pub fn postcopy_recovered(run: &mut Run, connections: u32) -> Result<(), Failed> {
    let name = run.next();
    let there = run.receiver(&name)?;
    let [from, to] = ["relay", "in"].map(|end| run.env.path(&format!("{name}.{end}")));
    let cutter = Cutter::between(&from, to)?;
    let paused = connections > 1;
    if paused {
        succeeds(&run.does(&format!("ctl {} pause", run.name))?)?;
    }
    cutter.after((1 << 20) + run.random.below((MIB / 2) << 20));
    let to = format!("--to unix:{}", from.display());
    let more = format!("--mode postcopy --connections {connections} --liveness 5m");
    let output = with(run.does(&format!("migrate {} {more} {to}", run.name))?, 1)?;
    ensure(String::from_utf8_lossy(&output.stderr).contains("--recover"), || format!("{output:?}"))?;
    eventually(LIMIT, "both sides know of the cut", || {
        let standings = [&run.name, &name].map(|name| run.env.standing(name));
        Ok(standings.iter().all(|state| state.as_deref() == Some("postcopy-paused")).then_some(()))
    })?;
    succeeds(&run.does(&format!("migrate {} --recover {to}", run.name))?)?;
    run.memory = Held::ByDescriptor;
    run.is_at(name, there, 15)?;
    if paused {
        succeeds(&run.does(&format!("ctl {} resume", run.name))?)?;
    }
    Ok(())
}
