//! `vellum run` without a kernel, as a user enters it: its output, its exit status, and its errors.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};

use support::env::TestEnv;
use support::hosts;
use support::hosts::{kvm, slow_if_emulated};
use support::{Completion, Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_judge::image::{Format, image};
use vellum_judge::read::{Verdict, read};
use vellum_judge::sectors;
use vellum_report::{Report, json};

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    for backing in ["anonymous", "thp", "shmem", "memfd", "anonymous_thp"] {
        tests.add(format!("backing_{backing}"), kvm(), move || {
            succeed(&format!("--cpus 4 --memory 64m,backing={backing}"))
        });
    }
    for (backing, page, count) in
        [("hugetlb-2m", 2 << 20, 32), ("shared-hugetlb-2m", 2 << 20, 32), ("hugetlb-1g", 1 << 30, 1)]
    {
        let need = kvm().and(hosts::huge_pages(page, count));
        tests.add(format!("backing_{backing}_is_mapped_huge"), need, move || {
            let size = (page * count) >> 20;
            let result = report(&format!("--cpus 4 --memory {size}m,backing={backing} --passes 1"))?;
            let huge = figure(&result, "mapped_2m")? + figure(&result, "mapped_1g")?;
            ensure(huge > 0.0 && result.invalid.is_empty(), || {
                format!("{huge} huge pages, {:?}", result.invalid)
            })
        });
    }
    tests.run()
}

/// The judge's image for this architecture, with its disk on either transport.
#[test(kvm())]
fn a_machine_is_whole_by_the_judge_s_image() -> Result<(), Failed> {
    let format = if cfg!(target_arch = "x86_64") { Format::Elf } else { Format::Image };
    let env = TestEnv::new()?;
    let [kernel, disk, console] = ["judge", "disk", "console"].map(|name| env.path(name));
    fs::write(&kernel, image(format))?;
    fs::write(&disk, (0..2048).flat_map(sectors::sector).collect::<Vec<u8>>())?;
    for transport in ["mmio", "pci"] {
        let line = format!(
            "run --kernel {} --cpus 2 --memory 16m --transport {transport} --disk {},readonly --serial file={}",
            kernel.display(),
            disk.display(),
            console.display()
        );
        let output = env.command(&line).args(["--cmdline", "passes=1 seed=7"]).output()?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let log = read(&fs::read(&console)?);
        let start = log.start.as_ref().ok_or("no first line")?;
        let is_asked = (&*start.arch, start.vcpus, start.timer) == (std::env::consts::ARCH, 2, true);
        let is_whole = log.verdict() == Verdict::Whole && log.disks == [(transport.into(), 2048)];
        ensure(is_asked && is_whole, || format!("{transport}: {log:?}"))?;
    }
    Ok(())
}

#[test(kvm())]
fn four_kilobyte_guest_pages() -> Result<(), Failed> {
    succeed("--memory 16m --workload write,page=4k")
}

#[test(kvm())]
fn six_gibibytes_with_writes_above_four() -> Result<(), Failed> {
    succeed("--memory 6g --workload write,stride=1m")
}

#[test(kvm())]
fn preallocated_and_locked() -> Result<(), Failed> {
    succeed("--memory 16m,prealloc,lock")
}

/// A memory control group of 64 MiB for this test. The error says why there is none.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let why =
            |error: std::io::Error| format!("needs a memory control group that this user may make: {error}");
        let root = Path::new("/sys/fs/cgroup");
        let (parent, limit) = match root.join("memory").exists() {
            true => (root.join("memory"), "memory.limit_in_bytes"),
            false => (root.to_owned(), "memory.max"),
        };
        let group = Self(parent.join(format!("vellum-test-{}", std::process::id())));
        fs::create_dir(&group.0).map_err(why)?;
        fs::write(group.0.join(limit), (64 << 20).to_string()).map_err(why)?;
        Ok(group)
    }

    fn vellum(&self, arguments: &str) -> Result<Output, Failed> {
        let enter = format!("echo $$ > {}/cgroup.procs && exec {VELLUM} {arguments}", self.0.display());
        Ok(Command::new("sh").args(["-c", &enter]).output()?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test(kvm())]
fn memory_beyond_the_control_groups_limit() -> Result<Completion, Failed> {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return Ok(Completion::ignored_with(why)),
    };
    for flag in ["prealloc", "lock"] {
        let output = group.vellum(&format!("run --memory 256m,{flag} --passes 1"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let says = [&*format!("--memory {flag}: 256m is more than the"), "control group", "leave it off"];
        let good = output.status.code() == Some(2) && said.lines().count() == 1;
        ensure(good && says.iter().all(|part| said.contains(part)), || format!("{output:?}"))?;
    }
    // The workload touches one page in each MiB, 256 in all.
    let output = group.vellum("run --memory 256m --workload write,stride=1m --passes 1")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let warned = said.lines().count() == 1 && said.contains("256m of guest memory is more than the");
    ensure(output.status.success() && warned, || format!("{output:?}"))?;
    let doctor = String::from_utf8(group.vellum("doctor")?.stdout)?;
    let memory = doctor.lines().find(|line| line.contains(" memory ")).unwrap_or_default();
    ensure(memory.contains(" MiB of it available under /sys/fs/cgroup"), || doctor.clone())?;
    Ok(Completion::Completed)
}

/// Tests the limit at each descriptor that a machine needs.
#[test(kvm())]
fn too_few_descriptors_are_named_with_the_remedy() -> Result<(), Failed> {
    for limit in 6..=10 {
        let words = format!("ulimit -n {limit}; exec {VELLUM} run --memory 16m --passes 1");
        let output = Command::new("sh").args(["-c", &words]).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let good =
            output.status.code() == Some(1) && said.lines().count() == 1 && said.contains("(ulimit -n)");
        ensure(good, || format!("{limit}: {output:?}"))?;
    }
    Ok(())
}

/// Vellum reports KVM's limit on a memslot before KVM fails with "invalid argument".
#[test(kvm())]
fn a_memslot_that_kvm_does_not_take_is_refused() -> Result<(), Failed> {
    let output = Command::new(VELLUM).args(["run", "-m", "20t", "--passes", "1"]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let good = output.status.code() == Some(2) && said.lines().count() == 1;
    ensure(good && said.contains("--memory slots=1 is too few") && said.contains("so 3 would work"), || {
        format!("{output:?}")
    })
}

/// Tests words that are not UTF-8: as the first argument, as another argument, and as the name of
/// the program.
#[test]
fn words_that_are_no_text_are_bad_input() -> Result<(), Failed> {
    let odd = OsStr::from_bytes(b"o\xff");
    for (name, words) in [
        ("vellum".as_ref(), &[odd][..]),
        ("vellum".as_ref(), &["run".as_ref(), odd]),
        (odd, &["run".as_ref(), "--memory".as_ref(), odd]),
        (odd, &["rnu".as_ref()]),
    ] {
        let output = Command::new(VELLUM).arg0(name).args(words).output()?;
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        ensure(output.status.code() == Some(2) && lines == 1, || format!("{words:?}: {output:?}"))?;
    }
    Ok(())
}

#[test(kvm(), root())]
fn a_user_other_than_root() -> Result<(), Failed> {
    succeed("--memory 16m --user 65534:65534")
}

fn root() -> Need {
    if vellum_sys::host::is_root() { Ok(()) } else { Err("needs root: sudo -E cargo test".into()) }
}

fn vellum(arguments: &str) -> Command {
    let mut command = Command::new(VELLUM);
    command.arg("run").args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn expect(output: &Output, status: i32) -> Result<(), Failed> {
    let what = || format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
    ensure(output.status.code() == Some(status), what)
}

fn report(arguments: &str) -> Result<Report, Failed> {
    let output = vellum(arguments).args(["--json", "-"]).output()?;
    expect(&output, 0)?;
    let mut reports = json::parse(&output.stdout, "standard output".as_ref())?;
    ensure(reports.len() == 1, || format!("{} results", reports.len()))?;
    Ok(reports.remove(0))
}

fn figure(report: &Report, name: &str) -> Result<f64, Failed> {
    let found = report.figures.iter().find(|figure| figure.label.to_string() == name);
    found.map(|figure| figure.value()).ok_or_else(|| format!("no figure {name}").into())
}

/// Writes twice to one path that is not UTF-8. The second run replaces the result of the first,
/// from a confined process.
#[test(kvm())]
fn a_result_is_replaced_whatever_its_name() -> Result<(), Failed> {
    let name = [format!("vellum-run-{}-", std::process::id()).as_bytes(), b"\xff.json"].concat();
    let path = std::env::temp_dir().join(OsString::from_vec(name));
    let mut read = Vec::new();
    for passes in ["5", "1"] {
        let output = vellum("--memory 16m --passes").arg(passes).arg("--json").arg(&path).output()?;
        expect(&output, 0)?;
        read.push(json::read(&path).map_err(|error| error.to_string()));
    }
    std::fs::remove_file(&path)?;
    for (result, passes) in read.into_iter().zip([5, 1]) {
        let result = result?;
        ensure(result.len() == 1 && result[0].asked["passes"] == passes, || format!("{result:?}"))?;
        ensure(result[0].command.iter().any(|word| word.contains('\u{fffd}')), || {
            format!("{:?}", result[0].command)
        })?;
    }
    Ok(())
}

fn succeed(arguments: &str) -> Result<(), Failed> {
    let result = report(arguments)?;
    ensure(figure(&result, "wrong_stamps")? == 0.0, || format!("{:?}", result.invalid))?;
    ensure(figure(&result, "pages_checked")? > 0.0, || "nothing was checked".into())
}

#[test]
fn bad_input_is_one_line_and_status_2() -> Result<(), Failed> {
    for (arguments, remedy) in [
        ("--cpus 0", "from 1 to"),
        ("--cpus -1", ""),
        ("--cpus many", "from 1 to"),
        ("--cpus 2,pin=0", "name one for each"),
        ("--cpus 1,pin=[4000]", "may use"),
        ("--cpus 1,pin=[0", "brackets"),
        ("--memory 0", "the least is"),
        ("--memory 4k", "the least is"),
        ("--memory 1048577b", "the next size up"),
        ("--memory lots", "512m"),
        ("--memory 99999999t", "the most is"),
        ("--memory 1g,baking=thp", "did you mean 'backing'"),
        ("--memory 1g,backing=tph", "did you mean"),
        ("--memory 1g,prealloc=maybe", "on or off"),
        ("--memory 1g,slots=0", "from 1 to"),
        ("--memory 1g,slots=9,slots=8", "twice"),
        ("--memory 9000t,backing=hugetlb-2m", ""),
        ("--workload wirte", "did you mean 'write'"),
        ("--workload write,hto=10", "did you mean 'hot'"),
        ("--workload write,hot=100", "below 100"),
        ("--workload write,share=10", "hot="),
        ("--workload write,order=up", "sequential"),
        ("--workload write,stride=100", "multiple of 4096"),
        ("--workload write,rate=0", "from 1 to"),
        ("--passes x", ""),
        ("--duration 0", "30s"),
        ("--duration soon", "30s"),
        ("--json /nonexistent/result.json", "directory"),
        ("--sandbox maybe", "on, log and off"),
        ("--user root", "UID:GID"),
        ("--memroy 1g", "--memory"),
    ] {
        let output = vellum(arguments).output()?;
        let said = text(&output.stderr);
        let flag = arguments.split(' ').next().unwrap_or("");
        let good = output.status.code() == Some(2)
            && said.lines().count() == 1
            && (said.contains(flag) || said.contains("nonexistent"))
            && said.contains(remedy)
            && output.stdout.is_empty();
        ensure(good, || format!("{arguments}: {}: {said}", output.status))?;
    }
    Ok(())
}

#[test(kvm())]
fn nothing_is_left_of_a_run_that_did_not_start() -> Result<(), Failed> {
    let directory = std::env::temp_dir().join(format!("vellum-run-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let file = directory.join("result.json");
    let output = vellum("--memory 1048577b --json").arg(&file).output()?;
    let left = std::fs::read_dir(&directory)?.count();
    std::fs::remove_dir_all(&directory)?;
    expect(&output, 2)?;
    ensure(left == 0, || format!("{left} files left"))
}

#[test(kvm())]
fn a_run_says_what_it_did() -> Result<(), Failed> {
    let output = vellum("--memory 16m").output()?;
    expect(&output, 0)?;
    let said = text(&output.stdout);
    let first = said.starts_with("PASS  4,096 pages checked, 0 wrong\n  first pass ");
    ensure(first && said.contains("warm passes") && !said.contains("write_latency"), || said.to_string())?;
    let output = vellum("--memory 16m -v").output()?;
    expect(&output, 0)?;
    let said = text(&output.stdout);
    ensure(said.starts_with("PASS  4,096 pages checked, 0 wrong\n"), || said.to_string())?;
    for part in ["run write", "pages_per_second", "write_latency", "p99", "exits", "kvm", "sandbox on", "16m"]
    {
        ensure(said.contains(part), || format!("no {part} in:\n{said}"))?;
    }
    ensure(output.stderr.is_empty(), || format!("quiet in a pipe, but: {}", text(&output.stderr)))?;
    let output = vellum("--memory 16m --format markdown").output()?;
    expect(&output, 0)?;
    let said = text(&output.stdout);
    ensure(said.starts_with("**PASS** 4,096 pages checked") && said.contains("| wrong_stamps | 0 |"), || {
        said.to_string()
    })
}

#[test(kvm())]
fn json_is_all_that_standard_output_carries() -> Result<(), Failed> {
    let result = report("--memory 16m --passes 2 --workload write,seed=9")?;
    ensure(result.asked["seed"] == 9 && result.asked["passes"] == 2, || format!("{:?}", result.asked))?;
    ensure(figure(&result, "accesses")? == 2.0 * 4096.0, || format!("{:?}", result.figures))?;
    let rate = result.figures.iter().find(|figure| figure.label.to_string() == "pages_per_second_per_vcpu");
    ensure(rate.is_some_and(|rate| rate.unit == "pages/s"), || format!("{rate:?}"))
}

#[test(slow_if_emulated())]
fn a_duration_ends_the_workload() -> Result<(), Failed> {
    // The workload has no end of its own, so only the duration can end it.
    let result = report("--memory 16m --duration 200ms --cpus 2")?;
    ensure(result.asked["passes"] == 0, || format!("{:?}", result.asked))?;
    ensure(figure(&result, "wrong_stamps")? == 0.0, || format!("{:?}", result.invalid))
}

/// Waits until the guest runs, which is when a thread of a vCPU has its name.
fn wait_until_it_runs(child: &Child) -> Result<(), Failed> {
    let tasks = format!("/proc/{}/task", child.id());
    eventually(LIMIT, "there is a vCPU's thread", || {
        let mut names = std::fs::read_dir(&tasks)?
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        Ok(names.any(|name| name.starts_with("vcpu")).then_some(()))
    })
}

#[test(kvm())]
fn ctrl_c_ends_cleanly_with_the_results_so_far() -> Result<(), Failed> {
    let mut child = vellum("--memory 16m --passes 0").stdout(Stdio::piped()).spawn()?;
    wait_until_it_runs(&child)?;
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
    ensure(kill.success(), || "cannot send SIGINT".into())?;
    let mut said = String::new();
    if let Some(stdout) = &mut child.stdout {
        stdout.read_to_string(&mut said)?;
    }
    let status = child.wait()?;
    ensure(status.code() == Some(130) && status.signal().is_none(), || format!("{status}"))?;
    ensure(said.starts_with("CUT OFF  ended by signal 2") && said.contains(", 0 wrong"), || said)
}

/// At this time, signals are blocked for the event loop that starts later.
#[test(kvm())]
fn ctrl_c_ends_populating_too() -> Result<(), Failed> {
    let mut child = vellum("--memory 2g,prealloc --passes 0").stderr(Stdio::piped()).spawn()?;
    let status = format!("/proc/{}/status", child.id());
    eventually(LIMIT, "memory is populated", || {
        // Signals are blocked, and a part of the memory is populated.
        let status = std::fs::read_to_string(&status)?;
        let field =
            |name| status.lines().find_map(|line: &str| line.strip_prefix(name)?.split_whitespace().next());
        let number = |name, radix| u64::from_str_radix(field(name)?, radix).ok();
        let blocked = number("SigBlk:", 16).is_some_and(|signals| signals >> 1 & 1 == 1);
        let resident = number("VmRSS:", 10).is_some_and(|kib| kib > 16 << 10);
        Ok((blocked && resident).then_some(()))
    })?;
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
    ensure(kill.success(), || "cannot send SIGINT".into())?;
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        stderr.read_to_string(&mut said)?;
    }
    let status = child.wait()?;
    ensure(status.code() == Some(130) && status.signal().is_none(), || format!("{status}"))?;
    ensure(said.contains("interrupted by signal 2 while memory was populated"), || said)
}

#[test(kvm())]
fn a_pipe_that_closes_early_is_no_error() -> Result<(), Failed> {
    let mut child = vellum("--memory 16m").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let first = child.stdout.take().map(|out| BufReader::new(out).lines().next());
    ensure(matches!(first, Some(Some(Ok(_)))), || format!("{first:?}"))?;
    expect(&child.wait_with_output()?, 0)
}

#[test(kvm())]
fn guest_memory_larger_than_the_host_s() -> Result<(), Failed> {
    let host = vellum_sys::host::total_memory();
    let more = (host * 2).next_multiple_of(1 << 30) >> 30;
    succeed(&format!("--memory {more}g --passes 1 --workload write,stride=1g"))
}
