//! The laboratory's promises about an emulated host: exit codes, output and files are returned
//! complete, and a host that hangs or dies is ended with the tail of its serial log. These tests
//! boot hosts, so plain `cargo test` leaves them out.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use lab::Error;
use lab::artifacts::{Kernel, Programs};
use lab::cache::Cache;
use lab::hosts::{self, Emulated, HOSTS, HostKernel, Outcome, Pace, Request};
use support::{Failed, Need, Tests, ensure, test};

fn main() -> ExitCode {
    // One host keeps one CPU busy, so as many run in parallel as there are CPUs.
    Tests::from_args().run()
}

/// The test host that the laboratory runs these tests for.
fn asked() -> Result<Emulated, String> {
    let asked = std::env::var("VELLUM_LAB_BOOTS").unwrap_or_default();
    let host = HOSTS.into_iter().find(|host| host.name() == asked);
    host.ok_or_else(|| "boots an emulated host: cargo lab test svm".into())
}

fn host() -> Need {
    asked().map(drop)
}

/// A test host with a module parameter for its second stage.
fn switch() -> Need {
    match asked()?.parameters(true).is_empty() {
        true => Err("KVM of such hosts has no module, and its second stage no switch".into()),
        false => Ok(()),
    }
}

/// A test host that can run in real time.
fn real_time() -> Need {
    asked()?.has_pace(Pace::Real).map_err(Into::into)
}

fn boot(change: impl FnOnce(&mut Request), script: &str) -> Result<Outcome, Error> {
    let cache = Cache::open()?;
    let host = asked().map_err(Error::Usage)?;
    let kernel = HostKernel::Debian(Kernel::debian_for(&cache, host.architecture(), "6.1")?);
    let mut request = Request { host, ..Request::new(kernel) };
    request.commands.push(["sh", "-c", script].map(str::to_owned).to_vec());
    change(&mut request);
    hosts::run(&cache, &Programs::build_for(host.architecture())?, &request, |_| ())
}

/// The output has bytes that a console would change, and the kernel prints to the console
/// meanwhile. Files sent to the host exist, and those in /tmp do not make it smaller. The later
/// commands check idle times and the host's name. A parameter that is set anyway is accepted.
#[test(host())]
fn results_come_back_whole() -> Result<(), Failed> {
    let script = r"cmp /tmp/deep/er/sent /sent && : > /tmp/new && : > /tmp/deep/er/new || exit 1
        mkdir sub; i=0; while [ $i -lt 300 ]; do printf '\r\n\000\377\033[31m' >> sub/bytes; echo noise > /dev/kmsg; i=$((i+1)); done
        cat sub/bytes; echo complaint >&2; : > empty; seq 40000 > long
        # What is left behind holds the output open; it must not hold the host.
        sleep 1000000 & exit 42";
    let host = asked()?;
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let more = |request: &mut Request| {
        request.files.extend(["/sent", "/tmp/deep/er/sent"].map(|to| (manifest.clone(), to.to_owned())));
        request.parameters.extend(host.parameters(true).first().map(|same| same.replace('_', "-")));
        for script in ["sleep 2", "sha256sum /bin/busybox /bin/vellum", &says_its_mode(host, true)] {
            request.commands.push(["sh", "-c", script].map(str::to_owned).to_vec());
        }
    };
    let outcome = boot(more, script)?;
    let wanted = b"\r\n\0\xff\x1b[31m".repeat(300);
    let ran = &outcome.ran[0];
    ensure(ran.stdout == wanted, || format!("{} of {} bytes of output", ran.stdout.len(), wanted.len()))?;
    ensure(ran.stderr == b"complaint\n", || format!("{:?}", String::from_utf8_lossy(&ran.stderr)))?;
    ensure(outcome.code() == 42, || format!("exit code {}", outcome.code()))?;
    let long: String = (1..=40000).map(|n| format!("{n}\n")).collect();
    let files = [("empty", Vec::new()), ("long", long.into_bytes()), ("sub/bytes", wanted)];
    for (name, content) in files {
        let got = outcome.files.get(name);
        ensure(got == Some(&content), || {
            format!("{name}: {:?} of {} bytes", got.map(Vec::len), content.len())
        })?;
    }
    for (command, idle) in [(1, true), (2, false)] {
        let exit = outcome.ran[command].exit.clone().ok_or("no exit came back")?;
        let right = if idle { exit.idle > 0.9 && exit.seconds > 1.9 } else { exit.idle < 0.05 };
        ensure(right, || format!("command {command}: {exit:?}"))?;
    }
    is_its_mode(host, true, &outcome.ran[3].stdout)
}

/// A script that prints KVM's setting of the second stage and the test host's name.
fn says_its_mode(host: Emulated, second_stage: bool) -> String {
    let mode = host.mode(second_stage);
    let parameter = mode.split_once('=').map(|(parameter, _)| parameter);
    let module = host.modules().first().zip(parameter);
    let shown = module.map(|(module, name)| format!("cat /sys/module/{module}/parameters/{name}; "));
    shown.unwrap_or_default() + "echo $VELLUM_BED"
}

fn is_its_mode(host: Emulated, second_stage: bool, said: &[u8]) -> Result<(), Failed> {
    let switch = match (host.parameters(true).is_empty(), second_stage) {
        (true, _) => "",
        (false, true) => "Y\n",
        (false, false) => "N\n",
    };
    let said = String::from_utf8_lossy(said);
    ensure(said == format!("{switch}{}\n", host.name()), || format!("{}: {said:?}", host.mode(second_stage)))
}

#[test(host(), switch())]
fn a_host_without_nested_paging_has_none() -> Result<(), Failed> {
    let host = asked()?;
    let outcome = boot(|request| request.second_stage = false, &says_its_mode(host, false))?;
    is_its_mode(host, false, &outcome.ran[0].stdout)
}

#[test(host(), switch())]
fn a_parameter_that_is_not_in_force_is_refused() -> Result<(), Failed> {
    let host = asked()?;
    // The kernel uses the later of two settings, so the request's own is not in force.
    let contrary = host.parameters(false).remove(0);
    let refused = ["kvm.no_such_thing=1", &contrary, "kvm=1"].map(str::to_owned);
    match boot(|request| request.parameters.extend(refused), "true") {
        Err(error) => {
            let said = error.to_string();
            let all = ["has no such parameter", "it is N", "the form is"];
            ensure(all.iter().all(|why| said.contains(why)), || said)
        }
        other => Err(format!("it is taken: {other:?}").into()),
    }
}

#[test(host())]
fn a_host_that_hangs_is_ended() -> Result<(), Failed> {
    let limit = |request: &mut Request| request.time_limit = Duration::from_secs(30);
    match boot(limit, "while :; do :; done") {
        Err(error @ Error::Host { timed_out: true, .. }) => {
            ensure(error.exit_code() == 124, || error.to_string())
        }
        other => Err(format!("it was not ended by its limit: {other:?}").into()),
    }
}

#[test(host())]
fn a_host_that_panics_leaves_its_tail() -> Result<(), Failed> {
    match boot(|_| (), "echo c > /proc/sysrq-trigger") {
        Err(Error::Host { tail, timed_out: false, .. }) => {
            ensure(tail.contains("sysrq triggered crash"), || format!("the tail says nothing of it: {tail}"))
        }
        other => Err(format!("the host lived: {other:?}").into()),
    }
}

/// Such a host may lose its timer's interrupt. Another one has the emulator look again.
#[test(host(), real_time())]
fn a_silent_host_in_real_time_receives_bytes() -> Result<(), Failed> {
    let script = "until grep -q ' rx:[1-9]' /proc/tty/driver/serial; do sleep 1; done";
    let outcome = boot(|request| request.pace = Pace::Real, script)?;
    ensure(outcome.code() == 0, || format!("exit code {}", outcome.code()))
}
