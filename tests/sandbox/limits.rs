//! A limit on the size of files (`ulimit -f`) causes an error, as a full disk does. It does not end
//! a machine.

use std::fs;
use std::process::{Command, Output, Stdio};

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::kvm;
use support::{Failed, ensure, test};

use crate::VELLUM;

/// `vellum ARGUMENTS` with a limit of `blocks` on the size of files. A block has 512 bytes or 1
/// KiB, which depends on the shell.
fn limited(env: &TestEnv, blocks: u32, arguments: &str) -> Command {
    let mut command = Command::new("sh");
    // Arguments that the caller adds come after `arguments`.
    command.args(["-c", &format!("ulimit -f {blocks} && exec {VELLUM} {arguments} \"$@\""), "sh"]);
    command.env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
    command
}

/// Fails unless the command failed with an error that names the cause.
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

/// The guest runs forever. Its log reaches the limit after the first bytes.
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
