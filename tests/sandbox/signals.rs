//! What the processes of a machine do with each signal.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use support::env::TestEnv;
use support::hosts::kvm;
use support::{Failed, ensure, test};

/// What becomes of a machine's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// It ends in order: its terminal and files are as they should be, its status is 128 and the signal's number.
    Ends,
    /// Nothing.
    Goes,
    /// The kernel ends it: nobody can do anything about it, or it is a mistake of its own.
    Dies,
    /// Rust's handler, which looks for the end of a stack, gives the signal back to the kernel; the sandbox ends it for that.
    Traps,
}
use Becomes::*;

/// Every signal of a program with musl but those that stop a process (STOP, TSTP, TTIN, TTOU) and CONT, which end none.
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
        (libc::SIGSTKFLT, Ends),
        (libc::SIGCHLD, Goes),
        (libc::SIGURG, Goes),
        (libc::SIGXCPU, Ends),
        (libc::SIGXFSZ, Goes),
        (libc::SIGVTALRM, Ends),
        (libc::SIGPROF, Ends),
        (libc::SIGWINCH, Goes),
        (libc::SIGIO, Ends),
        (libc::SIGPWR, Ends),
        // Its handler is the sandbox's.
        (libc::SIGSYS, Ends),
        // Of the C library's threads; no program can handle them.
        (32, Dies),
        (33, Dies),
        (34, Dies),
        // By which vCPUs are interrupted.
        (35, Goes),
    ];
    standard.into_iter().chain((36..=64).map(|signal| (signal, Ends))).collect()
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

/// Its work begins when the machine has ended.
#[test(kvm())]
fn a_guard_goes_on_whatever_it_is_sent() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut machine = env.endless("guarded")?;
    let guard = machine.started("vellum-guard").ok_or("it has no guard")?;
    // Nor can it block those of the C library.
    for signal in table().into_keys().filter(|signal| ![libc::SIGKILL, 32, 33, 34].contains(signal)) {
        send(signal, guard)?;
    }
    ensure(env.socket("guarded").exists(), || "no socket".into())?;
    machine.child.kill()?;
    support::eventually(support::LIMIT, "the guard removes the socket", || {
        Ok((!env.socket("guarded").exists()).then_some(()))
    })
}
