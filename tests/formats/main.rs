//! Output for other programs, checked by the programs that read it: the kernel's kunit.py, tap.py,
//! junitparser, kcidb-io. The files in `resources/ci/` are checked with lava-common's schema and
//! run by tmt.
//!
//! `cargo lab test --setup` fetches pinned versions of them into its cache and names the directory
//! here.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use serde_json::{Value, json};
use support::{Failed, Need, Tests, ensure, test, tools};
use vellum_host::Facts;
use vellum_report::view::View;
use vellum_report::{Case, Label, Report, Status};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn main() -> ExitCode {
    Tests::from_args().run()
}

/// The directory into which `cargo lab test --setup` has put them.
fn directory() -> Result<PathBuf, String> {
    std::env::var_os("VELLUM_READERS").map(PathBuf::from).filter(|dir| dir.is_dir()).ok_or_else(|| {
        format!(
            "needs the readers of other projects (PyPI, Debian and the kernel's source): {}",
            tools::SETUP
        )
    })
}

fn readers() -> Need {
    directory().map(drop)
}

fn kvm() -> Need {
    vellum_kvm::vm::open().map(drop).map_err(|error| format!("needs KVM: {error}"))
}

/// What the reader of `form` finds in `file`.
fn read(form: &str, file: &Path) -> Result<Value, Failed> {
    let dir = directory()?;
    let output = Command::new(dir.join("venv/bin/python"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats/readers.py"))
        .arg(form)
        .arg(file)
        .env("KUNIT", dir.join("kunit"))
        .env("LAVA", dir.join("lava/usr/lib/python3/dist-packages"))
        .output()?;
    ensure(output.status.success(), || format!("{form}: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// A test with every kind of end, and with names that are not valid in any of the forms, and a
/// benchmark.
fn results() -> Vec<Report> {
    let mut test = Report::new("test x", Facts::collect("off".into()));
    test.host.cpu = "<b>&\u{1b}[2J # SKIP".into();
    test.cases = vec![
        Case { seconds: Some(1.5), seed: Some(u64::MAX), ..Case::new("ring/thp", Status::Pass) },
        Case::new("ring/shmem", Status::Skip).because("no <shmem>").mended_by("mount one"),
        Case::new("bitmap/thp", Status::Fail).because("2 pages\nok 9 planted # SKIP"),
        Case::new("crash", Status::Crash).because("signal 11 ]]>"),
        Case::new("late", Status::Timeout).because("30 s"),
        Case::new("a # SKIP \u{1b}[2J<x>&\"'\nnot ok 1 b", Status::Pass),
        Case::new("..//é", Status::Pass),
    ];
    test.figure(Label::of("events", "ring/thp"), "events", 12.0);
    let mut bench = Report::new("bench y", Facts::collect("off".into()));
    bench.figure("rate", "pages/s", 1.5e6);
    vec![test, bench]
}

fn written(view: &View, name: &str) -> Result<PathBuf, Failed> {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("formats-{name}"));
    std::fs::write(&file, view.render(&results())?)?;
    Ok(file)
}

#[test(readers())]
fn the_kernels_kunit_py_reads_ktap() -> Result<(), Failed> {
    let found = read("kunit", &written(&View::Ktap, "ktap")?)?;
    let cases = found["cases"].as_object().ok_or("no cases")?;
    let of = |name: &str| cases.get(name).and_then(Value::as_str).unwrap_or("absent").to_owned();
    assert_eq!(cases.len(), 8, "{found}");
    assert_eq!(found["errors"], 0, "{found}");
    for (name, status) in [
        ("test_x/ring/thp", "SUCCESS"),
        ("test_x/ring/shmem", "SKIPPED"),
        ("test_x/bitmap/thp", "FAILURE"),
        ("test_x/crash", "FAILURE"),
        ("test_x/late", "FAILURE"),
        ("bench_y", "SUCCESS"),
    ] {
        assert_eq!(of(name), status, "{name}: {found}");
    }
    Ok(())
}

#[test(readers())]
fn tap_py_reads_the_top_level_of_ktap() -> Result<(), Failed> {
    let found = read("tap", &written(&View::Ktap, "tap")?)?;
    assert_eq!(found["plan"], json!([2]), "{found}");
    assert_eq!(found["tests"][0][1], false, "{found}");
    assert_eq!(found["tests"][1], json!(["bench_y", true, false]), "{found}");
    Ok(())
}

#[test(readers())]
fn junitparser_reads_junit() -> Result<(), Failed> {
    let found = read("junit", &written(&View::Junit, "junit")?)?;
    assert_eq!(found.as_object().map_or(0, |all| all.len()), 8, "{found}");
    for (name, end, kind) in [
        ("ring/shmem", "Skipped", Value::Null),
        ("bitmap/thp", "Failure", "fail".into()),
        ("crash", "Error", "crash".into()),
        ("late", "Error", "timeout".into()),
    ] {
        let ends = &found[format!("test x: {name}")];
        assert_eq!((&ends[0][0], &ends[0][1]), (&end.into(), &kind), "{found}");
    }
    assert_eq!(found["test x: ring/shmem"][0][2], "no <shmem>: mount one");
    assert_eq!((&found["test x: ring/thp"], &found["bench y: bench y"]), (&json!([]), &json!([])), "{found}");
    Ok(())
}

#[test(readers())]
fn kcidb_io_takes_a_submission() -> Result<(), Failed> {
    let found = read("kcidb", &written(&View::Kcidb { origin: "example_lab".into() }, "kcidb")?)?;
    for (path, status) in [
        ("vellum.test.x.ring.thp", "PASS"),
        ("vellum.test.x.ring.shmem", "SKIP"),
        ("vellum.test.x.bitmap.thp", "FAIL"),
        ("vellum.test.x.crash", "ERROR"),
        ("vellum.test.x.late", "ERROR"),
        ("vellum.bench.y", "PASS"),
    ] {
        assert_eq!(found[path][0], status, "{path}: {found}");
    }
    let rate = &found["vellum.bench.y.figures.rate"];
    assert_eq!(rate, &json!(["DONE", {"value": 1.5e6, "unit": "pages/s"}]), "{found}");
    // The example in resources/ci is valid too.
    read("kcidb", &Path::new(env!("CARGO_MANIFEST_DIR")).join("resources/ci/kcidb.json"))?;
    Ok(())
}

#[test(readers())]
fn lava_common_takes_the_job() -> Result<(), Failed> {
    let found = read("lava", &Path::new(env!("CARGO_MANIFEST_DIR")).join("resources/ci/lava.yaml"))?;
    ensure(found["planted"].as_str().is_some_and(|why| why.contains("extra keys")), || found.to_string())
}

const SHORT: &str = "--events 3000 -b 8m -s anonymous --tracker bitmap";

fn tmt(arguments: &str) -> Result<String, Failed> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("formats-tmt");
    let output = Command::new(directory()?.join("venv/bin/python"))
        .args(["-m", "tmt", "--feeling-safe", "run", "--scratch", "--id"])
        .arg(&dir)
        .args([
            "-e",
            &format!("VELLUM={VELLUM}"),
            "-e",
            &format!("VELLUM_ARGUMENTS=\"{arguments}\""),
            "--all",
        ])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("resources/ci/tmt"))
        .output()?;
    Ok(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// tmt calls rsync.
#[test(readers(), kvm(), tools::program("rsync"))]
fn tmt_runs_the_plan_and_hears_how_it_ended() -> Result<(), Failed> {
    let said = tmt(SHORT)?;
    ensure(said.contains("total: 1 test passed"), || said)?;
    let said = tmt(&format!("{SHORT} --inject lose=3"))?;
    ensure(said.contains("total: 1 test failed"), || said)
}

fn vellum(arguments: &str) -> Result<Output, Failed> {
    Ok(Command::new(VELLUM).args(arguments.split(' ')).output()?)
}

#[test(kvm())]
fn a_test_says_how_it_ended_in_every_form_and_by_its_status() -> Result<(), Failed> {
    for (more, status, kselftest) in [("", 0, 0), (" --inject lose=3", 1, 1)] {
        let lossy = vellum(&format!("test dirty-log {SHORT}{more} --format ktap"))?;
        let text = String::from_utf8_lossy(&lossy.stdout);
        let line = if status == 0 { "\nok 1 test_dirty-log\n" } else { "\nnot ok 1 test_dirty-log\n" };
        ensure(lossy.status.code() == Some(status) && text.contains(line), || format!("{lossy:?}"))?;
        let output = vellum(&format!("test dirty-log {SHORT}{more} --format json --exit kselftest"))?;
        let result: Report = serde_json::from_slice(&output.stdout)?;
        assert_eq!(output.status.code(), Some(kselftest));
        assert_eq!(result.status().is_bad(), status != 0);
        assert_eq!(result.cases[0].name, "bitmap/anonymous");
        ensure(result.cases[0].seed.is_some() && result.cases[0].seconds.is_some(), || {
            format!("{result:?}")
        })?;
    }
    let bench = vellum("bench dirty-log -b 4m --format kcidb --origin me")?;
    let submission: Value = serde_json::from_slice(&bench.stdout)?;
    ensure(submission["tests"][0]["path"] == "vellum.bench.dirty-log", || format!("{bench:?}"))
}

/// Checks that a test which did not run completely says so in every form and by its status.
fn is_not_ok(words: &str, directive: &str, why: &str, kselftest: i32) -> Result<(), Failed> {
    let run = |more: &str, status| {
        let output = vellum(&format!("{words} {more}"))?;
        let line = String::from_utf8_lossy(&output.stderr).lines().count() == 1;
        ensure(output.status.code() == Some(status) && line, || format!("{words} {more}: {output:?}"))?;
        Ok::<_, Failed>(String::from_utf8(output.stdout)?)
    };
    let text = run("--format ktap", 4)?;
    let last = text.lines().last().unwrap_or_default();
    let start = format!("not ok 1 test_dirty-log # {directive} ");
    ensure(last.starts_with(&start) && last.contains(why), || text.clone())?;
    let result: Report = serde_json::from_str(&run("--format json --exit kselftest", kselftest)?)?;
    ensure(result.status() != Status::Pass, || format!("{result:?}"))?;
    let junit = run("--format junit", 4)?;
    ensure(junit.contains(r#"<testcase name="test dirty-log""#) && junit.contains(why), || junit.clone())?;
    let kcidb: Value = serde_json::from_str(&run("--format kcidb --origin me", 4)?)?;
    let tests = kcidb["tests"].as_array().ok_or("no tests")?;
    let whole = tests.iter().find(|test| test["path"] == "vellum.test.dirty-log").ok_or("no whole")?;
    let told = whole["status"] != "PASS" && whole["comment"].as_str().is_some_and(|said| said.contains(why));
    ensure(told, || kcidb.to_string())
}

#[test(kvm())]
fn a_test_whose_time_was_over_first_is_not_ok() -> Result<(), Failed> {
    let words = "test dirty-log --duration 1ms -b 8m -s anonymous --tracker bitmap --tracker manual-protect";
    is_not_ok(words, "TIMEOUT", "the time limit expired before", 1)?;
    // A test with injected losses has tested nothing if none were injected.
    let words = "test dirty-log --duration 1ms -b 8m -s anonymous --tracker bitmap --inject lose=1000000";
    is_not_ok(words, "TIMEOUT", "before 1000000 bits were removed with bitmap", 1)
}

fn no_huge_pages() -> Need {
    match vellum_host::hugepages::check(1 << 30, 1 << 30) {
        Ok(()) => Err("needs a host without a free huge page of 1 GiB".into()),
        Err(_) => Ok(()),
    }
}

/// The backings that this host has are still tested.
#[test(kvm(), no_huge_pages())]
fn a_backing_that_is_missing_is_not_ok_and_skips_no_other() -> Result<(), Failed> {
    let words = format!("test dirty-log {SHORT} -s hugetlb-1g");
    is_not_ok(&words, "SKIP", "hugetlb-1g: ", 4)?;
    let output = vellum(&format!("{words} --format json"))?;
    let result: Report = serde_json::from_slice(&output.stdout)?;
    let ended: Vec<_> = result.cases.iter().map(|case| (&case.name[..], case.status)).collect();
    assert_eq!(ended, [("bitmap/anonymous", Status::Pass), ("bitmap/hugetlb-1g", Status::Skip)]);
    for bench in ["dirty-log -s hugetlb-1g", "demand-paging -s hugetlb-1g", "fork -s shared-hugetlb-1g"] {
        let output = vellum(&format!("bench {bench} --exit kselftest"))?;
        ensure(output.status.code() == Some(4), || format!("{bench}: {output:?}"))?;
    }
    // Alone, everything is skipped.
    let output = vellum("test dirty-log -s hugetlb-1g --format ktap")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.code() == Some(4) && text.contains("\nok 1 test_dirty-log # SKIP "), || {
        format!("{output:?}")
    })
}

/// A host without KVM: a mount namespace hides the device.
#[test()]
fn what_this_host_lacks_is_a_skip_and_bad_input_is_not() -> Result<support::Completion, Failed> {
    let hidden = |words: &str| -> Result<Output, Failed> {
        let script = format!("mount -t tmpfs none /dev && exec {VELLUM} {words}");
        Ok(Command::new("unshare").args(["--mount", "--map-root-user", "sh", "-c", &script]).output()?)
    };
    let output = hidden("test dirty-log --format ktap --exit kselftest")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if text.is_empty() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Ok(support::Completion::ignored_with(format!(
            "needs a mount namespace: run as root: {said}"
        )));
    }
    ensure(output.status.code() == Some(4), || format!("{output:?}"))?;
    ensure(text.contains("ok 1 test_dirty-log # SKIP /dev/kvm does not exist"), || text.to_string())?;
    let output = hidden("bench dirty-log --format junit")?;
    ensure(output.status.code() == Some(4), || format!("{output:?}"))?;
    ensure(String::from_utf8_lossy(&output.stdout).contains("<skipped message="), || format!("{output:?}"))?;
    for (words, status) in [
        ("test dirty-log --exit kselftest --memroy 1g", 1),
        ("test dirty-log --memroy 1g", 2),
        ("test dirty-log --format kcidb", 2),
        ("test dirty-log --format kcidb --origin Me", 2),
        ("test dirty-log --format ktap --json -", 2),
        ("test dirty-log --exit kselftest --help", 0),
    ] {
        let output = vellum(words)?;
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        assert_eq!(
            (output.status.code(), lines),
            (Some(status), usize::from(status != 0)),
            "{words}: {output:?}"
        );
    }
    Ok(support::Completion::Completed)
}

#[test(kvm())]
fn a_long_test_gives_signs_of_life() -> Result<(), Failed> {
    let output = vellum(
        "test dirty-log -b 8m -s anonymous --tracker bitmap --duration 3s --heartbeat 1s --format ktap",
    )?;
    let said = String::from_utf8_lossy(&output.stderr);
    let beats =
        said.lines().filter(|line| line.starts_with("vellum: ") && line.contains("s: bitmap: ")).count();
    ensure(output.status.success() && beats >= 1, || format!("{output:?}"))
}
