//! The directory of machines' sockets belongs to the user alone. Commands that only look for
//! machines do not create it. A name is free once its machine is gone.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::process::Command;

use support::env::TestEnv;
use support::hosts::real;
use support::{Failed, Need, ensure, test};
use vellum_sys::identity;

use crate::VELLUM;

fn root() -> Need {
    if identity::effective().0 == 0 { Ok(()) } else { Err("needs root, to act as another user".into()) }
}

/// Every command that asks or looks for a machine.
const READERS: [&str; 6] =
    ["list", "ctl m status", "exec m -- true", "dump m core", "snapshot m dir", "migrate m --to unix:x"];

#[test]
fn commands_that_read_make_nothing() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for line in READERS {
        let output = env.command(line).current_dir(env.dir()).output()?;
        let fits = if line == "list" { output.status.success() } else { output.status.code() == Some(2) };
        ensure(fits, || format!("{line}: {output:?}"))?;
        let left: Vec<_> = fs::read_dir(env.dir())?.flatten().collect();
        ensure(left.is_empty(), || format!("{line} leaves {left:?}"))?;
    }
    // Nor if the directory cannot be created at all.
    let nowhere = Command::new(VELLUM).arg("list").env("XDG_RUNTIME_DIR", "/proc/nowhere").output()?;
    ensure(nowhere.status.success() && nowhere.stderr.is_empty(), || format!("{nowhere:?}"))
}

/// A directory in which others can create sockets is not used.
#[test]
fn a_directory_that_others_may_write_to_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = env.path("vellum");
    fs::create_dir(&dir)?;
    for mode in [0o777, 0o1777, 0o770] {
        fs::set_permissions(&dir, Permissions::from_mode(mode))?;
        for line in READERS.into_iter().chain(["run --name m --memory 8m", "receive --name m"]) {
            let output = env.command(line).current_dir(env.dir()).output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let named = said.contains(&format!("mode {mode:04o}")) && said.contains("chmod 700");
            ensure(output.status.code() == Some(2) && named && said.lines().count() == 1, || {
                format!("{mode:o}: {line}: {output:?}")
            })?;
        }
    }
    Ok(())
}

/// Root with another user's environment neither uses nor creates anything in that user's runtime
/// directory.
#[test(root())]
fn a_runtime_directory_of_another_user_is_not_used() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    chown(env.dir(), Some(1000), Some(1000))?;
    for line in ["list", "ctl m status"] {
        env.vellum(line)?;
        ensure(fs::read_dir(env.dir())?.next().is_none(), || format!("{line} leaves something"))?;
    }
    // The user's directory is ignored. Root's own one is used.
    fs::create_dir(env.path("vellum"))?;
    let _listener = UnixListener::bind(env.socket("theirs"))?;
    let list = env.vellum("list")?;
    let all = [list.stdout, list.stderr].concat();
    ensure(!String::from_utf8_lossy(&all).contains("theirs"), || "another user's machine is listed".into())
}

/// A socket on which another user's process listens is not trusted, and nothing is handed to it.
#[test(root())]
fn a_socket_of_another_user_is_not_believed() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let dir = env.path("vellum");
    fs::create_dir(&dir)?;
    fs::set_permissions(env.dir(), Permissions::from_mode(0o711))?;
    fs::set_permissions(&dir, Permissions::from_mode(0o777))?;
    let socket = env.socket("m");
    let path = socket.clone();
    let listener = std::thread::spawn(move || {
        // SAFETY: takes numbers only. Unlike the C library's function it changes this thread alone.
        let becomes = unsafe { libc::syscall(libc::SYS_setresuid, -1, 1000, -1) };
        assert_eq!(becomes, 0, "root may");
        // Clients see this thread's user as the listener's (SO_PEERCRED).
        UnixListener::bind(path)
    });
    let _theirs = listener.join().map_err(|_| "it cannot be another user")??;
    fs::set_permissions(&dir, Permissions::from_mode(0o700))?;
    for line in ["ctl m status", "list", "dump m core"] {
        let output = env.command(line).current_dir(env.dir()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(said.contains("a process of user 1000 listens there") && said.lines().count() == 1, || {
            format!("{line}: {output:?}")
        })?;
    }
    Ok(())
}

/// A machine that has ended, by itself, by a signal or by SIGKILL, leaves its name free at once:
/// its guard does not keep its sockets open.
#[test(real())]
fn a_name_is_free_when_its_machine_has_ended() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let vsock = env.path("vsock");
    let kernel = env.path("kernel");
    fs::write(&kernel, support::guests::Code::default().print("V").power_off().elf64())?;
    for round in 0..60 {
        let line = match round % 3 {
            0 => "run --name n --memory 2m --passes 1".to_owned(),
            // The kernel is invalid, which is found after the sockets were bound.
            1 => format!("run --name n --memory 2m -k {} --vsock {}", kernel.display(), vsock.display()),
            _ => format!("run --name n --memory 100000g -k {} --vsock {}", kernel.display(), vsock.display()),
        };
        let output = env.vellum(&line)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(!said.contains("in use"), || format!("round {round}: {said}"))?;
    }
    Ok(())
}
