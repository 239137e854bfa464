//! `vellum ctl NAME upgrade`: a machine continues in another process, and the process that was
//! started first stands for it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use support::env::{TestEnv, children, process};
use support::hosts::{kvm, real, slow_if_emulated};
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;

use crate::VELLUM;
use crate::{counting, ends_with, every_page_is_right, has_counted, succeeds, with};

const WORKLOAD: &str = "--passes 0 --workload write,order=random,rate=20000,write=80";

/// The process ID of the machine `name`.
pub fn pid(env: &TestEnv, name: &str) -> Result<u32, Failed> {
    let status = Client::connect(&env.socket(name))?.ask(&Do::Status {})?;
    Ok(status["pid"].as_u64().ok_or("no pid")? as u32)
}

/// Upgrades `name` to a build at another path. Returns the new process ID.
pub fn upgrade(env: &TestEnv, name: &str) -> Result<u32, Failed> {
    let (before, build) = (pid(env, name)?, env.path("other-build"));
    if !build.exists() {
        symlink(VELLUM, &build)?;
    }
    succeeds(&env.vellum(&format!("ctl {name} upgrade --downtime 1m {}", build.display()))?)?;
    let now = eventually(LIMIT, "it answers in the new process", || {
        Ok(pid(env, name).ok().filter(|now| *now != before))
    })?;
    Ok(now)
}

fn kill(pid: u32, signal: &str) -> Result<(), Failed> {
    succeeds(&Command::new("kill").args([signal, &pid.to_string()]).output()?)
}

/// Upgrades twice, with snapshots in between. Every page is right. The first process, which has no
/// guest memory any longer, ends with the status of the last one.
#[test(slow_if_emulated())]
fn a_guest_goes_on_in_another_build_and_its_first_process_ends_with_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let line =
        format!("run --cpus 2 --memory 32m,slots=3,backing=memfd {WORKLOAD} --json {}", json.display());
    let first = env.run("m", &line)?;
    env.has_written("m", 2 * (32 << 20) / 4096)?;
    let second = upgrade(&env, "m")?;
    // The client hears of the upgrade before the old process has freed its machine.
    eventually(LIMIT, "the first process has none of its memory", || {
        let maps = fs::read_to_string(format!("/proc/{}/maps", first.child.id()))?;
        Ok((!maps.contains("vellum-guest")).then_some(()))
    })?;
    let dir = env.path("snap");
    let saved = env.vellum(&format!("snapshot m {} --follow {}", dir.display(), crate::memfd::SOON))?;
    succeeds(&saved)?;
    let third = upgrade(&env, "m")?;
    eventually(LIMIT, "the one in between ends", || Ok(process(second).is_none().then_some(())))?;
    let saved = env.vellum(&format!("snapshot m {} --follow {}", dir.display(), crate::memfd::SOON))?;
    succeeds(&saved)?;
    // Dirty tracking does not continue after an upgrade.
    ensure(String::from_utf8_lossy(&saved.stdout).contains("whole"), || format!("{saved:?}"))?;
    ensure(process(third).is_some() && process(first.child.id()).is_some(), || "one has ended".into())?;
    succeeds(&env.vellum("ctl m stop")?)?;
    ends_with(first, 0)?;
    every_page_is_right(&json)?;
    ensure(!env.socket("m").exists(), || "its control socket is still there".into())?;
    for point in 0..2 {
        let json = env.path(&format!("{point}.json"));
        let again =
            env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
        succeeds(&env.vellum("ctl again stop")?)?;
        ends_with(again, 0)?;
        every_page_is_right(&json)?;
    }
    Ok(())
}

/// A disk with its lock, a serial port, a vsock and a console are handed over. The guest counts on
/// without a gap.
#[test(kvm())]
fn a_pc_goes_on_with_all_that_it_has_open() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = counting(&env)?;
    let [out, disk, vsock] = ["out", "disk", "vsock"].map(|name| env.path(name));
    fs::write(&disk, [0; 4096])?;
    let devices = format!(
        "--serial file={} --disk {} --vsock {} --console pty --rng --balloon",
        out.display(),
        disk.display(),
        vsock.display()
    );
    let line = format!("run --kernel {} --memory 32m,backing=memfd {devices}", kernel.display());
    let first = env.run("m", &line)?;
    let grows = || -> Result<(), Failed> {
        let was = fs::metadata(&out)?.len();
        eventually(LIMIT, "it counts", || Ok((fs::metadata(&out)?.len() > was + 512).then_some(())))
    };
    grows()?;
    for _ in 0..2 {
        upgrade(&env, "m")?;
        grows()?;
        ensure(vsock.exists(), || "its vsock is gone".into())?;
        // The lock of the disk was handed over.
        let second =
            format!("run --kernel {} --memory 32m --serial null --disk {}", kernel.display(), disk.display());
        let refused = with(env.vellum(&second)?, 2)?;
        ensure(String::from_utf8_lossy(&refused.stderr).contains("in use"), || format!("{refused:?}"))?;
    }
    succeeds(&env.vellum("ctl m stop")?)?;
    ends_with(first, 0)?;
    ensure(!vsock.exists() && !env.socket("m").exists(), || "a socket is left behind".into())?;
    has_counted(&[out])
}

/// A signal to the first process ends the guest in the second one, which writes the result. Killing
/// the first process ends the second. If the second is killed, the first ends with an error.
#[test(real())]
fn signals_and_ends_go_from_one_process_to_the_other() -> Result<(), Failed> {
    for (of_first, signal, status) in
        [(true, "-TERM", Some(128 + 15)), (true, "-KILL", None), (false, "-KILL", Some(1))]
    {
        let env = TestEnv::new()?;
        let json = env.path("json");
        let line = format!("run --memory 8m,backing=memfd {WORKLOAD} --json {}", json.display());
        let first = env.run("m", &line)?;
        let second = upgrade(&env, "m")?;
        kill(if of_first { first.child.id() } else { second }, signal)?;
        let output = first.child.output()?;
        ensure(output.status.code() == status, || format!("{signal}: {output:?}"))?;
        eventually(LIMIT, "the other ends", || Ok(process(second).is_none().then_some(())))?;
        if signal == "-TERM" {
            every_page_is_right(&json)?;
        }
    }
    Ok(())
}

/// Memory without a descriptor, a path without a program, and a program that is not Vellum: the
/// machine runs on where it was.
#[test(real())]
fn an_upgrade_that_cannot_be_leaves_the_machine_as_it_was() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let _anonymous = env.run("anonymous", "run --memory 8m --passes 0")?;
    let memfd = format!("run --memory 8m,backing=memfd {WORKLOAD} --json {}", json.display());
    let machine = env.run("memfd", &memfd)?;
    let before = pid(&env, "memfd")?;
    for (name, binary, status, says) in [
        ("anonymous", VELLUM, 2, "--memory SIZE,backing=memfd"),
        ("memfd", "/nonexistent/vellum", 2, "/nonexistent/vellum"),
        ("memfd", "/bin/false", 1, "stays in the process that it is in"),
        ("memfd", "/bin/cat", 1, "stays in the process that it is in"),
    ] {
        let refused = with(env.vellum(&format!("ctl {name} upgrade {binary}"))?, status)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure(said.contains(says) && said.lines().count() == 1, || said.clone())?;
        ensure(env.standing(name).as_deref() == Some("running"), || format!("{name} does not run on"))?;
    }
    ensure(pid(&env, "memfd")? == before, || "it is another process".into())?;
    env.has_written("memfd", 4 * (8 << 20) / 4096)?;
    succeeds(&env.vellum("ctl memfd stop")?)?;
    ends_with(machine, 0)?;
    every_page_is_right(&json)
}

/// A machine that has dropped root says what it has open. Root opens none of that by its paths with
/// more rights than the machine's user has.
#[test(kvm(), root())]
fn what_a_machine_that_has_dropped_root_names_is_opened_as_its_user() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let shared = env.path("shared");
    fs::create_dir(&shared)?;
    fs::set_permissions(&shared, Permissions::from_mode(0o700))?;
    let kernel = counting(&env)?;
    let share = format!("--share {}:data,as-root", shared.display());
    let line = format!("run --kernel {} --memory 16m,backing=memfd --serial null {share}", kernel.display());
    for (more, is_upgraded) in [("--user 65534:65533", false), ("", true)] {
        let machine = env.run("m", &format!("{line} {more}"))?;
        let before = pid(&env, "m")?;
        let output = env.vellum(&format!("ctl m upgrade --downtime 1m {VELLUM}"))?;
        if is_upgraded {
            succeeds(&output)?;
        } else {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let stays = said.contains("stays in the process that it is in");
            ensure(output.status.code() == Some(1) && stays, || format!("{output:?}"))?;
            ensure(pid(&env, "m")? == before, || "it is another process".into())?;
            let running = env.standing("m");
            ensure(running.as_deref() == Some("running"), || format!("{running:?}"))?;
        }
        succeeds(&env.vellum("ctl m stop")?)?;
        let ended = machine.end_with(&["vellum-guard", "vellum-share"])?;
        // The process that was to take over has said why it does not.
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let names_it = said.contains(&*shared.to_string_lossy());
        ensure(names_it != is_upgraded, || format!("{more}: {said}"))?;
    }
    Ok(())
}

/// The guard of a machine that has dropped root removes the names of its sockets as root before an
/// upgrade. After it, the machine has said these names, and only the control socket's is known to be
/// right.
#[test(kvm(), root())]
fn root_removes_no_name_that_a_machine_without_root_has_chosen() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, vsock) = (counting(&env)?, env.path("vsock"));
    let line = format!("run --kernel {} --memory 16m,backing=memfd --serial null", kernel.display());
    let machine = env.run("m", &format!("{line} --vsock {} --user 65534:65533", vsock.display()))?;
    succeeds(&env.vellum(&format!("ctl m upgrade --downtime 1m {VELLUM}"))?)?;
    let pid = pid(&env, "m")?;
    // A guard drops root after it has been started.
    eventually(LIMIT, "one of two guards drops root", || {
        let mut users = Vec::new();
        for child in children(pid)? {
            let status = fs::read_to_string(format!("/proc/{child}/status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
            users.push(line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        }
        users.sort();
        Ok((users == [vec!["0"; 4], vec!["65534"; 4]]).then_some(()))
    })?;
    succeeds(&env.vellum("ctl m stop")?)?;
    machine.end_with(&["vellum-guard"])?;
    eventually(LIMIT, "the control socket is removed", || Ok((!env.socket("m").exists()).then_some(())))
}

fn root() -> Need {
    if vellum_sys::host::is_root() { Ok(()) } else { Err("needs root: sudo -E cargo test".into()) }
}

/// A program that runs `script`. `exec vellum "$@"` at its end makes it Vellum.
fn build(env: &TestEnv, name: &str, script: &str) -> Result<PathBuf, Failed> {
    let path = env.path(name);
    let script = script.replace("exec vellum", &format!("exec {VELLUM}"));
    support::executable(&path, format!("#!/bin/sh\n{script}\n").as_bytes())?;
    Ok(path)
}

/// A process that took over has the supervisor socket of the first one, and its own successors get
/// it too. A successor that gets no machine must not end the first process. Upgrades fail in each
/// way, before and after a successful one.
#[test(real())]
fn an_upgrade_that_fails_after_one_that_succeeded_leaves_the_guest_where_it_is() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let line = format!("run --memory 8m,backing=memfd {WORKLOAD} --json {}", json.display());
    let first = env.run("m", &line)?;
    let ways =
        [("false", "exit 1"), ("few", "ulimit -n 14; exec vellum \"$@\""), ("other", "exec vellum list")];
    for _ in 0..3 {
        let now = pid(&env, "m")?;
        for (name, script) in ways {
            let path = build(&env, name, script)?;
            let refused = with(env.vellum(&format!("ctl m upgrade {}", path.display()))?, 1)?;
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            ensure(said.contains("m stays in the process that it is in"), || format!("{name}: {said}"))?;
        }
        // The successor becomes Vellum only after the upgrade was cancelled or its client was
        // killed.
        for how in ["migrate-cancel", "-INT", "-KILL"] {
            let gate = env.path("gate");
            succeeds(&Command::new("mkfifo").arg(&gate).output()?)?;
            let script = format!("read -r _ < {}; exec vellum \"$@\"", gate.display());
            let client =
                env.migration_client(&format!("ctl m upgrade {}", build(&env, how, &script)?.display()))?;
            eventually(LIMIT, "it is under way", || {
                Ok((env.standing("m").as_deref() == Some("upgrading")).then_some(()))
            })?;
            match how {
                "migrate-cancel" => succeeds(&env.vellum("ctl m migrate-cancel")?)?,
                signal => kill(client.id(), signal)?,
            }
            eventually(LIMIT, "it is over", || {
                Ok((env.standing("m").as_deref() == Some("running")).then_some(()))
            })?;
            fs::write(&gate, "go\n")?;
            let status = if how == "-KILL" { None } else { Some(1) };
            let output = client.output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure(output.status.code() == status && (how == "-KILL" || said.contains("m stays")), || {
                said.clone()
            })?;
            fs::remove_file(&gate)?;
        }
        ensure(pid(&env, "m")? == now, || "it is in another process".into())?;
        upgrade(&env, "m")?;
    }
    env.has_written("m", 4 * (8 << 20) / 4096)?;
    succeeds(&env.vellum("ctl m stop")?)?;
    ends_with(first, 0)?;
    every_page_is_right(&json)
}
