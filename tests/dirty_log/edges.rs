//! The directed test of huge pages' edges, `vellum test dirty-edges`, and the verdict of `vellum test`.

use std::process::{Command, ExitStatus};

use support::hosts::kvm;
use support::{Completion, Failed, ensure, test};
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_bench::oracle::soak::Config;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::Backing;
use vellum_report::answer::Outcome;
use vellum_report::json;

use crate::{config, has, held, interrupted, two_cpus};

/// The directed test gives the same result twice, and finds nothing worse than known faults.
#[test(kvm(), has(Method::InitiallySet))]
fn initially_set_keeps_the_edges_of_huge_pages() -> Result<Completion, Failed> {
    let found = edges::probe()?;
    let again = edges::probe()?;
    ensure(found == again, || format!("{found}, and then: {again}"))?;
    match found {
        EdgeVerdict::Kept => Ok(Completion::Completed),
        EdgeVerdict::Lost => Ok(Completion::ignored_with(format!(
            "{found}; kernel-patches/6.12/init-all-set-boundary fixes it"
        ))),
        EdgeVerdict::Untested(why) => Ok(Completion::ignored_with(why)),
        EdgeVerdict::Others(_) => Err(found.to_string().into()),
    }
}

/// On any kernel, the oracle finds in its first collections what a directed test finds.
#[test(kvm(), has(Method::InitiallySet))]
fn the_oracle_finds_lost_edges_at_once() -> Result<Completion, Failed> {
    let (slot_base, clear_chunk) = (Some(0x0100_1000), Some(64));
    let config = Config { slot_base, clear_chunk, events: 1, ..config(Method::InitiallySet, Backing::Thp) };
    let tally = held(&config)?;
    let found = edges::probe()?;
    let agree = match found {
        EdgeVerdict::Lost => tally.only_edges(),
        _ => tally.is_clean(),
    };
    ensure(agree, || format!("seed {}: {found}, but {:?}", config.seed, tally.names))?;
    match found {
        EdgeVerdict::Untested(why) => Ok(Completion::ignored_with(why)),
        _ => Ok(Completion::Completed),
    }
}

/// The command as a user enters it, with the tracker that works on every kernel.
#[test(kvm(), has(Method::ManualProtect))]
fn the_directed_test_writes_a_result_and_its_status_agrees() -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(&["--tracker", "manual-protect", "-s", "anonymous"])?;
    ensure(status.success() && lost == 0.0 && written > 0.0, || format!("{status}, lost {lost} of {written}"))
}

/// A kernel that loses pages of a ring with INITIALLY_SET is not Vellum's fault. A status that
/// hides it would be.
#[test(kvm(), has(Method::Ring))]
fn the_directed_test_of_a_ring_has_a_status_that_agrees() -> Result<(), Failed> {
    edges_agree(&["--tracker", "ring"])
}

/// The same for a kernel that loses pages if a signal ends a reset. `vellum doctor` reports it from
/// the same loop.
#[test(kvm(), has(Method::Ring))]
fn the_directed_test_of_interrupted_resets_agrees_with_the_doctor() -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(&["--tracker", "ring", "--interrupt"])?;
    ensure(status.code() == Some(i32::from(lost > 0.0)) && written > 0.0 && lost <= 64.0, || {
        format!("{status}, lost {lost} of {written}")
    })?;
    let doctor = Command::new(env!("CARGO_BIN_EXE_vellum")).arg("doctor").output()?;
    let said = String::from_utf8(doctor.stdout)?;
    let line = said.lines().find(|line| line.contains("dirty ring  ")).unwrap_or_default();
    ensure(line.starts_with(if lost > 0.0 { "warn" } else { "ok" }), || format!("lost {lost}: {said}"))
}

/// The same for a kernel that loses pages if the mode changes while the log is switched on.
#[test(kvm(), has(Method::InitiallySet), two_cpus())]
fn the_directed_test_of_a_race_has_a_status_that_agrees() -> Result<(), Failed> {
    edges_agree(&["--race", "-s", "anonymous"])
}

/// Both tests and one verdict. The worse one comes first, and the status agrees with it.
#[test(kvm(), has(Method::InitiallySet))]
fn both_tests_end_with_one_verdict() -> Result<(), Failed> {
    let scratch = support::Scratch::new()?;
    let file = scratch.path("both.json");
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args(["test", "--duration", "2s", "--seed", "7", "--json"]).arg(&file).output()?;
    let results = json::read(&file)?;
    let names: Vec<_> = results.iter().map(|result| result.name.as_str()).collect();
    ensure(names == ["test dirty-edges", "test dirty-log"], || format!("{names:?}"))?;
    ensure(results[1].asked["seed"] == 7, || format!("{:?}", results[1].asked))?;
    let lost = results[0].verdict().outcome == Some(Outcome::Fail);
    let shown = results[0]
        .answer
        .as_ref()
        .is_some_and(|answer| answer.figures.iter().any(|fact| fact.name == "shown by"));
    ensure(shown == lost, || format!("{:?}", results[0].answer))?;
    let worst = results.iter().map(|result| result.verdict().outcome).max().flatten();
    let worst = worst.ok_or("no verdict")?;
    let said = String::from_utf8(output.stdout)?;
    ensure(said.starts_with(&format!("{worst}  ")), || format!("{worst}: {said}"))?;
    let status = match worst {
        Outcome::Pass => 0,
        Outcome::Fail => 1,
        _ => 4,
    };
    ensure(output.status.code() == Some(status) && output.stderr.is_empty(), || {
        format!("{worst}: {}, {}", output.status, String::from_utf8_lossy(&output.stderr))
    })
}

/// A test that lost pages has failed in every form.
#[test(kvm(), has(Method::InitiallySet))]
fn the_directed_test_says_in_ktap_what_its_status_says() -> Result<(), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args("test dirty-edges --format ktap".split(' ')).output()?;
    let said = String::from_utf8(output.stdout)?;
    let last = said.lines().last().unwrap_or_default();
    ensure(last.starts_with("ok 1") == output.status.success() && last.contains("test_dirty-edges"), || {
        said.clone()
    })
}

fn edges_agree(arguments: &[&str]) -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(arguments)?;
    ensure(status.code() == Some(i32::from(lost > 0.0)) && written > 0.0, || {
        format!("{status}, lost {lost} of {written}")
    })
}

/// Two mebibytes that begin one page behind a boundary need two huge pages, at any address. If the
/// host has fewer, the message says how many it lacks.
#[test(kvm())]
fn the_directed_test_asks_for_no_more_huge_pages_than_it_uses() -> Result<(), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output =
        vellum.args("test dirty-edges -b 2m -s hugetlb-2m --tracker manual-protect".split(' ')).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let lacks = output.status.code() == Some(4) && said.contains(" 2 needed, ");
    ensure(lacks || output.status.success(), || format!("{output:?}"))
}

/// Runs `vellum test dirty-edges`. Returns its status, the pages lost, and the pages written.
fn edges_as_typed(arguments: &[&str]) -> Result<(ExitStatus, [f64; 2]), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args(["test", "dirty-edges", "-b", "2m", "--json", "-"]).args(arguments).output()?;
    let results = json::parse(&output.stdout, "standard output".as_ref())?;
    let [result] = results.as_slice() else { return Err(format!("{} results", results.len()).into()) };
    ensure(result.host.sandbox.starts_with("on"), || format!("sandbox {}", result.host.sandbox))?;
    let lost = String::from_utf8_lossy(&output.stderr).contains("this kernel's KVM loses pages");
    ensure(lost != output.status.success(), || format!("{output:?}"))?;
    let figure = |name: &str| {
        let found = result.figures.iter().find(|figure| figure.label.to_string() == name);
        found.map(|figure| figure.value()).ok_or_else(|| format!("no figure {name}"))
    };
    Ok((output.status, [figure("lost")?, figure("written")?]))
}

/// The signal comes when the vCPU is there: before the first chunk, or between two of many.
#[test(kvm())]
fn a_signal_ends_the_directed_test_and_it_says_so() -> Result<(), Failed> {
    let output = interrupted("test dirty-edges --tracker manual-protect -s anonymous -b 1g --json -", 1)?;
    let said = match json::parse(&output.stdout, "standard output".as_ref()) {
        Ok(results) => results[0].cut_short.clone().unwrap_or_default(),
        Err(_) => String::from_utf8(output.stderr)?,
    };
    let right = said.contains("interrupted by signal 2") || said.starts_with("ended by signal 2: ");
    ensure(right, || said)
}

#[test(kvm())]
fn the_directed_test_refuses_what_it_cannot_clear() -> Result<(), Failed> {
    for (arguments, remedy) in [
        (&["--tracker", "bitmap"][..], "manual-protect, initially-set and ring"),
        (&["--tracker", "ring,entries=4096"], "leave entries out"),
        (&["--tracker", "manual-protect", "--revoke"], "--revoke: only --tracker initially-set"),
        (&["--tracker", "ring", "--race"], "--race: only --tracker initially-set"),
        (&["--interrupt"], "--tracker ring would work"),
        (&["--tracker", "ring", "--interrupt", "-b", "64m"], "12m would work"),
        (&["--race", "--revoke"], "'--race' cannot be used with '--revoke'"),
    ] {
        let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
        let output = vellum.args(["test", "dirty-edges"]).args(arguments).output()?;
        let said = String::from_utf8(output.stderr)?;
        let right = output.status.code() == Some(2) && said.lines().count() == 1;
        ensure(right && said.contains("--") && said.contains(remedy), || {
            format!("{arguments:?}: {}: {said}", output.status)
        })?;
    }
    Ok(())
}
