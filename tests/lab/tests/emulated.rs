//! The laboratory's promises about an emulated host: exit codes, output and files come back whole, and a host that
//! hangs or dies is ended with its serial tail. These boot hosts, so plain `cargo test` leaves them out.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use harness::{Failed, Need, Trials, ensure, trial};
use lab::Error;
use lab::artifacts::{Kernel, Programs};
use lab::bed::{self, BEDS, Emulated, HostKernel, Outcome, Request};
use lab::cache::Cache;

fn main() -> ExitCode {
    let mut trials = Trials::from_args();
    // An emulator takes a CPU for itself.
    trials.one_at_a_time();
    trials.run()
}

/// The bed that the laboratory runs these for.
fn asked() -> Result<Emulated, String> {
    let asked = std::env::var("VELLUM_LAB_BOOTS").unwrap_or_default();
    let bed = BEDS.into_iter().find(|bed| bed.name() == asked);
    bed.ok_or_else(|| "boots an emulated host: cargo lab test svm".into())
}

fn bed() -> Need {
    asked().map(drop)
}

/// A bed whose second stage is a module's parameter.
fn switch() -> Need {
    match asked()?.parameters(true).is_empty() {
        true => Err("KVM of such hosts has no module, and its second stage no switch".into()),
        false => Ok(()),
    }
}

fn boot(change: impl FnOnce(&mut Request), script: &str) -> Result<Outcome, Error> {
    let cache = Cache::open()?;
    let bed = asked().map_err(Error::Usage)?;
    let kernel = HostKernel::Debian(Kernel::debian_for(&cache, bed.architecture(), "6.1")?);
    let mut request = Request { bed, ..Request::new(kernel) };
    request.commands.push(["sh", "-c", script].map(str::to_owned).to_vec());
    change(&mut request);
    bed::run(&cache, &Programs::build_for(bed.architecture())?, &request, |_| ())
}

/// Bytes that a console would have changed, and a kernel that talks on the console meanwhile. What was sent along is there, and
/// what was sent to /tmp does not make that smaller.
#[trial(bed())]
fn results_come_back_whole() -> Result<(), Failed> {
    let script = r"cmp /tmp/deep/er/sent /sent && : > /tmp/new && : > /tmp/deep/er/new || exit 1
        mkdir sub; i=0; while [ $i -lt 300 ]; do printf '\r\n\000\377\033[31m' >> sub/bytes; echo noise > /dev/kmsg; i=$((i+1)); done
        cat sub/bytes; echo complaint >&2; : > empty; seq 40000 > long
        # What is left behind holds the output open; it must not hold the host.
        sleep 1000000 & exit 42";
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let send = |request: &mut Request| {
        request.files.extend(["/sent", "/tmp/deep/er/sent"].map(|to| (manifest.clone(), to.to_owned())));
    };
    let outcome = boot(send, script)?;
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
    Ok(())
}

#[trial(bed(), switch())]
fn nested_paging_is_what_was_asked_for() -> Result<(), Failed> {
    let bed = asked()?;
    for (second_stage, wanted) in [(true, "Y"), (false, "N")] {
        let mode = bed.mode(second_stage);
        let (parameter, _) = mode.split_once('=').ok_or("no switch")?;
        let script = format!("cat /sys/module/{}/parameters/{parameter}; echo $VELLUM_BED", bed.modules()[0]);
        let outcome = boot(|request| request.second_stage = second_stage, &script)?;
        let said = String::from_utf8_lossy(&outcome.ran[0].stdout).into_owned();
        ensure(said == format!("{wanted}\n{}\n", bed.name()), || format!("{mode}: {said:?}"))?;
    }
    Ok(())
}

#[trial(bed(), switch())]
fn a_parameter_that_is_not_in_force_is_refused() -> Result<(), Failed> {
    let bed = asked()?;
    // The kernel takes the later of two, so that what the request itself wants is not in force.
    let contrary = bed.parameters(false).remove(0);
    for (parameter, why) in
        [("kvm.no_such_thing=1", "has no such parameter"), (&contrary, "it is N"), ("kvm=1", "the form is")]
    {
        match boot(|request| request.parameters.push(parameter.to_owned()), "true") {
            Err(error) if error.to_string().contains(why) => (),
            other => return Err(format!("{parameter}: {other:?}").into()),
        }
    }
    let same = bed.parameters(true).remove(0).replace('_', "-");
    boot(|request| request.parameters.push(same), "true")?;
    Ok(())
}

#[trial(bed())]
fn busy_and_idle_time_are_told_apart() -> Result<(), Failed> {
    for (script, idle) in [("sleep 2", true), ("sha256sum /bin/busybox /bin/vellum", false)] {
        let outcome = boot(|_| (), script)?;
        let exit = outcome.ran[0].exit.clone().ok_or("no exit came back")?;
        let right = if idle { exit.idle > 0.9 && exit.seconds > 1.9 } else { exit.idle < 0.05 };
        ensure(right, || format!("`{script}`: {exit:?}"))?;
    }
    Ok(())
}

#[trial(bed())]
fn a_host_that_hangs_is_ended() -> Result<(), Failed> {
    let limit = |request: &mut Request| request.time_limit = Duration::from_secs(45);
    match boot(limit, "while :; do :; done") {
        Err(error @ Error::Bed { timed_out: true, .. }) => {
            ensure(error.exit_code() == 124, || error.to_string())
        }
        other => Err(format!("it was not ended by its limit: {other:?}").into()),
    }
}

#[trial(bed())]
fn a_host_that_panics_leaves_its_tail() -> Result<(), Failed> {
    match boot(|_| (), "echo c > /proc/sysrq-trigger") {
        Err(Error::Bed { tail, timed_out: false, .. }) => {
            ensure(tail.contains("sysrq triggered crash"), || format!("the tail says nothing of it: {tail}"))
        }
        other => Err(format!("the host lived: {other:?}").into()),
    }
}
