//! A limit on the size of files (`ulimit -f`) is an error like a full disk, and no end of a machine.

use std::fs;
use std::process::{Command, Output, Stdio};

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::kvm;
use support::{Failed, ensure, test};

use crate::VELLUM;

/// `vellum ARGUMENTS` where a file may have so many blocks (of 512 bytes or 1 KiB, as this shell counts).
fn limited(env: &TestEnv, blocks: u32, arguments: &str) -> Command {
    let mut command = Command::new("sh");
    // What is added to it comes behind the arguments.
    command.args(["-c", &format!("ulimit -f {blocks} && exec {VELLUM} {arguments} \"$@\""), "sh"]);
    command.env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
    command
}

/// One line that names the cause.
fn is_refused(output: &Output) -> Result<(), Failed> {
    let said = String::from_utf8_lossy(&output.stderr);
    let good =
        output.status.code().is_some_and(|code| code < 128 && code != 0) && said.contains("File too large");
    ensure(good, || format!("{output:?}"))
}

#[test(kvm())]
fn memory_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    is_refused(&limited(&env, 1000, "run --memory 16m,backing=memfd --passes 1").output()?)
}

#[test(kvm())]
fn a_result_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let arguments = format!("run --memory 16m --passes 1 --json {}", env.path("result").display());
    is_refused(&limited(&env, 0, &arguments).output()?)
}

#[test(kvm())]
fn a_snapshot_fails_and_the_machine_goes_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine =
        env.start("limited", &mut limited(&env, 1000, "run --memory 64m --workload write --passes 0"))?;
    let path = env.path("snapshot");
    is_refused(&env.vellum(&format!("snapshot limited {}", path.display()))?)?;
    env.ctl("limited status")?;
    is_refused(&limited(&env, 1000, &format!("snapshot limited {}", path.display())).output()?)?;
    env.ctl("limited status")?;
    drop(machine);
    Ok(())
}

/// A guest without an end, whose log is full after its first bytes.
#[test(kvm())]
fn a_log_that_is_full_does_not_end_the_machine() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().print("V").spin().elf64())?;
    let (log, kernel) = (env.path("log"), kernel.display());
    let arguments = format!("run -m 16m -k {kernel} --serial file={}", log.display());
    let mut limited = limited(&env, 0, &arguments);
    let machine = env.start("full", &mut limited)?;
    env.ctl("full status")?;
    drop(machine);
    Ok(())
}
