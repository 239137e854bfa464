//! How the processes of a machine react to each signal.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use support::env::TestEnv;
use support::hosts::kvm;
use support::{Failed, ensure, test};

use crate::VELLUM;

/// How a machine's process reacts to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// It ends in order: it restores its terminal and files, and its status is 128 plus the number
    /// of the signal.
    Ends,
    /// It continues.
    Goes,
    /// The kernel ends it. The signal cannot be handled, or it reports a fault in the process.
    Dies,
    /// Rust's handler looks for a stack overflow, and then restores the default action of the
    /// signal. The sandbox forbids that and ends the process.
    Traps,
}
use Becomes::*;

/// Every signal of a program with musl, except those that stop a process (STOP, TSTP, TTIN, TTOU)
/// and CONT, which do not end it.
fn table() -> BTreeMap<i32, Becomes> {
    let standard = [
        (libc::SIGHUP, Ends),
        (libc::SIGINT, Ends),
        (libc::SIGQUIT, Ends),
        (libc::SIGILL, Dies),
        (libc::SIGTRAP, Dies),
        (libc::SIGABRT, Dies),
        (libc::SIGBUS, Traps),
        (libc::SIGFPE, Dies),
        (libc::SIGKILL, Dies),
        (libc::SIGUSR1, Ends),
        (libc::SIGSEGV, Traps),
        (libc::SIGUSR2, Ends),
        (libc::SIGPIPE, Goes),
        (libc::SIGALRM, Ends),
        (libc::SIGTERM, Ends),
        // It interrupts vCPUs.
        (libc::SIGSTKFLT, Goes),
        (libc::SIGCHLD, Goes),
        (libc::SIGURG, Goes),
        (libc::SIGXCPU, Ends),
        (libc::SIGXFSZ, Goes),
        (libc::SIGVTALRM, Ends),
        (libc::SIGPROF, Ends),
        (libc::SIGWINCH, Goes),
        (libc::SIGIO, Ends),
        (libc::SIGPWR, Ends),
        // The sandbox handles it.
        (libc::SIGSYS, Ends),
        // The C library uses these for threads. A program cannot handle them.
        (32, Dies),
        (33, Dies),
        (34, Dies),
    ];
    standard.into_iter().chain((35..=64).map(|signal| (signal, Ends))).collect()
}

fn send(signal: i32, pid: u32) -> Result<(), Failed> {
    let sent = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status()?;
    ensure(sent.success(), || format!("kill -{signal} {pid}"))
}

#[test(kvm())]
fn a_machine_does_with_each_signal_what_the_table_says() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (signal, becomes) in table() {
        let mut child = env.endless("signalled")?.child;
        send(signal, child.id())?;
        if becomes == Goes {
            env.ctl("signalled status")?;
            ensure(child.try_wait()?.is_none(), || format!("signal {signal} has ended it"))?;
            child.kill()?;
        }
        let output = child.output()?;
        let good = match becomes {
            Ends => output.status.code() == Some(128 + signal),
            Goes => output.status.signal() == Some(libc::SIGKILL),
            Traps => output.status.code() == Some(vellum_sandbox::EXIT_STATUS),
            Dies => output.status.signal() == Some(signal),
        };
        ensure(good, || format!("signal {signal}: {becomes:?} is expected: {output:?}"))?;
    }
    Ok(())
}

/// The kernel queues no signal for a user whose processes have too many of them already. A vCPU is
/// interrupted all the same.
#[test(kvm())]
fn a_machine_whose_user_may_queue_no_signal_pauses() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut command = Command::new("prlimit");
    command.args(["--sigpending=0", VELLUM, "run", "--memory", "16m", "--passes", "0"]);
    command.env("XDG_RUNTIME_DIR", env.dir());
    let machine = env.start("unqueued", &mut command)?;
    env.ctl("unqueued pause")?;
    env.ctl("unqueued stop")?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

/// The guard's work begins when the machine has ended.
#[test(kvm())]
fn a_guard_goes_on_whatever_it_is_sent() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut machine = env.endless("guarded")?;
    let guard = machine.started("vellum-guard").ok_or("it has no guard")?;
    // The guard cannot block the C library's signals either.
    for signal in table().into_keys().filter(|signal| ![libc::SIGKILL, 32, 33, 34].contains(signal)) {
        send(signal, guard)?;
    }
    ensure(env.socket("guarded").exists(), || "no socket".into())?;
    machine.child.kill()?;
    support::eventually(support::LIMIT, "the guard removes the socket", || {
        Ok((!env.socket("guarded").exists()).then_some(()))
    })
}
