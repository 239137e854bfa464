//! `vellum judge run`: Vellum and QEMU in each scenario, the others by a server that answers their
//! documented API, any program by a command, and what a driver cannot do.

use std::fs;
use std::process::{Command, Stdio};

use support::env::{Process, TestEnv, process};
use support::{Failed, LIMIT, Need, ensure, eventually, test, tools};

use crate::{boots, emulator, succeeds};

/// A driver and what it says of each scenario, as KTAP.
fn driven(vmm: &str, scenarios: &[&str]) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut command = env.command(&format!("judge run --vmm {vmm} --memory 16m --format ktap"));
    // QEMU splits at commas, and shells at the others.
    command.arg("--logs").arg(env.path("o'dd, path"));
    for scenario in scenarios {
        command.args(["--scenario", scenario]);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let right = output.status.success() && scenarios.iter().all(|name| text.contains(&format!(" {name}\n")));
    ensure(right && !text.contains("not ok"), || format!("{output:?}"))
}

#[test(boots())]
fn a_driven_vellum_is_whole_in_each_scenario() -> Result<(), Failed> {
    driven(
        "vellum",
        &["boot", "pause", "snapshot", "snapshot-diff", "restore", "migrate", "migrate-postcopy", "fork"],
    )
}

#[test(emulator())]
fn a_driven_qemu_is_whole_in_each_scenario() -> Result<(), Failed> {
    driven("qemu", &["boot", "pause", "snapshot", "restore", "migrate"])
}

/// The options of the image whose log `whole.log` is.
const RECORDED: &str = "seed=3 passes=8";

/// A directory with a program of this name, which is `tests/data/fake-vmm.py`.
fn vmms(env: &TestEnv, name: &str) -> Result<std::path::PathBuf, Failed> {
    let vmms = env.path("vmms");
    fs::create_dir(&vmms)?;
    let program = if name == "kvmtool" { "lkvm" } else { name };
    std::os::unix::fs::symlink(fs::canonicalize("tests/data/fake-vmm.py")?, vmms.join(program))?;
    Ok(vmms)
}

/// A driver of a program that answers as the real one does by its documents
/// (`tests/data/fake-vmm.py`).
fn fake(env: &TestEnv, name: &str, scenario: &str) -> Result<Command, Failed> {
    let log = fs::canonicalize("tests/fuzz/corpus/judge/whole.log")?;
    let vmm = if name.starts_with("qemu") { "qemu" } else { name };
    let mut command = env.command(&format!("judge run --vmm {vmm} --scenario {scenario} --format ktap"));
    // Those of the recorded log.
    command.args(["-m", "16m", "-p", RECORDED]);
    command.env("VELLUM_VMMS", vmms(env, name)?).env("FAKE_LOG", log);
    command.env("FAKE_REQUESTS", env.path("requests"));
    if scenario == "boot" {
        command.env("FAKE_BOOTS", "1");
    }
    Ok(command)
}

/// A log with a fault in place of the recorded one.
fn lost_log(env: &TestEnv) -> Result<std::path::PathBuf, Failed> {
    let lost = env.path("lost.log");
    let fault = "# fault lost-write vcpu=1 address=0x200000 expected=0x3 found=0x2\r\n";
    let whole = fs::read_to_string("tests/fuzz/corpus/judge/whole.log")?;
    let lost_end = whole.replacen("1..", &format!("{fault}1.."), 1).replace("end WHOLE", "end LOST");
    fs::write(
        &lost,
        lost_end.replace("\nok 1 ", "\nnot ok 1 ").replace(" lost-write\r", " lost-write # 1 found\r"),
    )?;
    Ok(lost)
}

/// The first machine loses something and ends before it is asked for anything. That is the result,
/// and the round is not run again.
#[test(python())]
fn a_loss_before_a_move_is_the_result() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let lost = lost_log(&env)?;
    let mut command = env.command("judge run --vmm firecracker --scenario snapshot -p seed=3");
    command.env("VELLUM_VMMS", vmms(&env, "firecracker")?).env("FAKE_LOG", lost);
    let output = command.env("FAKE_REQUESTS", env.path("requests")).env("FAKE_BOOTS", "1").output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let starts = fs::read_to_string(env.path("requests"))?.matches("InstanceStart").count();
    let right = output.status.code() == Some(1) && said.contains("snapshot: LOST lost-write at 0x200000");
    ensure(right && starts == 1, || format!("{starts} starts: {output:?}"))
}

/// QEMU lacks a feature only if it says so. A QEMU that ends while it is asked has crashed. A round
/// that was LOST is not forgotten when a later one lacks the feature.
#[test(python())]
fn what_qemu_does_not_refuse_is_no_skip() -> Result<(), Failed> {
    for (capabilities, times, status, says) in [
        ("error", "1", 4, "no userfaultfd: allow userfaultfd"),
        ("close", "1", 1, "QEMU closed QMP during migrate-set-capabilities"),
        ("again", "2", 1, "migrate-postcopy: LOST lost-write at 0x200000, seen by vCPU 1 (round 1, "),
    ] {
        let env = TestEnv::new()?;
        let lost = lost_log(&env)?;
        let mut command = fake(&env, "qemu-system-x86_64", "migrate-postcopy")?;
        let output = command.env("FAKE_CAPABILITIES", capabilities).env("FAKE_COPY", lost);
        let output = output.args(["--times", times]).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{capabilities}: {output:?}"))?;
    }
    Ok(())
}

/// A copy that is started and prints nothing has no verdict, whatever the others print.
#[test(python())]
fn a_copy_without_a_console_is_a_crash() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let output = fake(&env, "crosvm", "restore")?.env("FAKE_SILENT", "fourth").output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = said.contains("restore: the copy printed nothing: no such snapshot (round 1, ");
    ensure(output.status.code() == Some(1) && right, || format!("{output:?}"))
}

/// A copy of an older state is named, however right its checksums are. One that ends before it has
/// compared its memory has no verdict.
#[test(python())]
fn a_copy_that_is_older_or_over_does_not_pass() -> Result<(), Failed> {
    for (vmm, scenario, moved, says) in [
        (
            "crosvm",
            "snapshot",
            "back",
            "LOST went-back: access 0 of phase 0 of pass 1 came after access 0 of",
        ),
        ("kvmtool", "pause", "back", "LOST went-back: access 0 of phase 0 of pass 1 came after access 0 of"),
        ("crosvm", "snapshot", "over", "ended before it had run for a pass after its move"),
        ("kvmtool", "pause", "over", "ended before it had run for a pass after its move"),
    ] {
        let env = TestEnv::new()?;
        let output = fake(&env, vmm, scenario)?.env("FAKE_MOVED", moved).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(1) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{vmm} {scenario} {moved}: {output:?}"))?;
    }
    Ok(())
}

/// The image on another machine checks less, which the result says; and what it ran on, with which
/// options.
#[test(emulator())]
fn what_a_machine_cannot_show_is_noted() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let mut command = env.command("judge run --vmm qemu --memory 16m --scenario boot --json");
    let output = command.arg(&json).arg("--vmm-arg=-cpu").arg("--vmm-arg=max,-kvmclock").output()?;
    let text = fs::read_to_string(&json)?;
    let accelerator = if support::hosts::kvm().is_ok() { "KVM" } else { "TCG" };
    let right = text.contains("kvmclock-back was not judged: there is no kvmclock")
        && text.contains("boot: the image's options in round 1: passes=3 report=50ms seed=")
        && text.contains(&format!(", {accelerator}\""));
    ensure(output.status.success() && right, || format!("{output:?}: {text}"))
}

fn python() -> Need {
    tools::program("python3")
}

/// Each driver sends what the documents of its VMM say, in this order, and reads both consoles.
/// `DIR` is the round's.
#[test(python())]
fn drivers_of_rest_apis_send_what_is_documented() -> Result<(), Failed> {
    let machine = [
        r#"PUT /machine-config {"mem_size_mib":16,"track_dirty_pages":true,"vcpu_count":2}"#,
        r#"PUT /boot-source {"boot_args":"CMDLINE","kernel_image_path":"judge.kernel"}"#,
        r#"PUT /drives/disk {"drive_id":"disk","is_read_only":true,"is_root_device":false,"path_on_host":"judge.raw"}"#,
        r#"PUT /actions {"action_type":"InstanceStart"}"#,
    ];
    let [paused, resumed] = [r#"PATCH /vm {"state":"Paused"}"#, r#"PATCH /vm {"state":"Resumed"}"#];
    let full =
        r#"PUT /snapshot/create {"mem_file_path":"saved","snapshot_path":"state","snapshot_type":"Full"}"#;
    let diff =
        r#"PUT /snapshot/create {"mem_file_path":"diff","snapshot_path":"state","snapshot_type":"Diff"}"#;
    let load = r#"PUT /snapshot/load {"mem_backend":{"backend_path":"saved","backend_type":"File"},"resume_vm":true,"snapshot_path":"state"}"#;
    let (whole, merged) = (format!("{load} AAAA"), format!("{load} AABA"));
    let [pause, resume] = ["PUT /api/v1/vm.pause", "PUT /api/v1/vm.resume"];
    let snapshot = r#"PUT /api/v1/vm.snapshot {"destination_url":"file://DIR/saved"}"#;
    let restore = r#"PUT /api/v1/vm.restore {"source_url":"file://DIR/saved"}"#;
    for (vmm, scenario, expected) in [
        ("firecracker", "boot", &[][..]),
        ("firecracker", "pause", &[paused, resumed]),
        ("firecracker", "snapshot", &[paused, full, &whole]),
        ("firecracker", "snapshot-diff", &[paused, full, resumed, paused, diff, &merged]),
        ("firecracker", "restore", &[paused, full, &whole, &whole, &whole]),
        ("cloud-hypervisor", "boot", &[]),
        ("cloud-hypervisor", "pause", &[pause, resume]),
        ("cloud-hypervisor", "snapshot", &[pause, snapshot, restore, resume]),
        (
            "cloud-hypervisor",
            "restore",
            &[pause, snapshot, restore, resume, restore, resume, restore, resume],
        ),
        (
            "cloud-hypervisor",
            "migrate",
            &[
                r#"PUT /api/v1/vm.receive-migration {"memory_mode":"Precopy","receiver_url":"unix:DIR/socket"}"#,
                r#"PUT /api/v1/vm.send-migration {"destination_url":"unix:DIR/socket","local":false,"memory_mode":"Precopy"}"#,
            ],
        ),
        (
            "cloud-hypervisor",
            "migrate-postcopy",
            &[
                r#"PUT /api/v1/vm.receive-migration {"memory_mode":"Postcopy","receiver_url":"unix:DIR/socket"}"#,
                r#"PUT /api/v1/vm.send-migration {"destination_url":"unix:DIR/socket","local":false,"memory_mode":"Postcopy"}"#,
            ],
        ),
    ] {
        let sent = sent(vmm, scenario)?;
        let mut sent: Vec<&str> = sent.lines().collect();
        // Who is asked to receive answers when it has.
        sent.sort_by_key(|line| line.contains("send-migration"));
        let start = if vmm == "firecracker" { &machine[..] } else { &[] };
        ensure(sent == [start, expected].concat(), || format!("{vmm} {scenario}: {sent:#?}"))?;
    }
    Ok(())
}

/// What a driver asks the VMM in a scenario, which is whole. `DIR` is the round's.
fn sent(vmm: &str, scenario: &str) -> Result<String, Failed> {
    let env = TestEnv::new()?;
    let logs = env.path("logs");
    let output = fake(&env, vmm, scenario)?.arg("--logs").arg(&logs).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let right = output.status.success() && text.contains(&format!("ok 1 {scenario}\n"));
    ensure(right, || format!("{vmm} {scenario}: {output:?}"))?;
    let dir = format!("{}/{scenario}-1", fs::canonicalize(&logs)?.display());
    let requests = fs::read_to_string(env.path("requests")).unwrap_or_default().replace(&dir, "DIR");
    let cmdline = if scenario == "boot" { "passes=3" } else { "passes=32 rate=30000 verify=end late=2s" };
    Ok(requests.replace(&format!("{cmdline} report=50ms seed=3 {RECORDED}"), "CMDLINE"))
}

/// The same of VMMs that are driven by their own commands.
#[test(python())]
fn drivers_of_commands_ask_as_is_documented() -> Result<(), Failed> {
    let crosvm = |name: &str, more: &str| {
        format!(
            "run --disable-sandbox --socket {name}.sock --cpus 2 --mem 16 --no-usb --serial \
             type=file,path={name}.log,hardware=serial,num=1,console=true --block path=judge.raw,ro=true \
             --params CMDLINE{more} judge.kernel\n"
        )
    };
    let first = crosvm("first", "");
    let suspended = format!("{first}suspend first.sock --full\n");
    let restored = |name| format!("{}resume {name}.sock --full\n", crosvm(name, " --restore saved"));
    let saved = format!("{suspended}snapshot take saved first.sock\n");
    let lkvm = "run --name first -k judge.kvmtool -c 2 -m 16 -p CMDLINE --console serial --network mode=none \
                --disk judge.raw,ro\n";
    for (vmm, scenario, expected) in [
        ("kvmtool", "boot", lkvm.to_owned()),
        ("kvmtool", "pause", format!("{lkvm}pause --name first\nresume --name first\n")),
        ("crosvm", "boot", first),
        ("crosvm", "pause", format!("{suspended}resume first.sock --full\n")),
        ("crosvm", "snapshot", format!("{saved}{}", restored("second"))),
        ("crosvm", "restore", [saved, restored("second"), restored("third"), restored("fourth")].concat()),
    ] {
        let sent = sent(vmm, scenario)?;
        ensure(sent == expected, || format!("{vmm} {scenario}: {sent}"))?;
    }
    Ok(())
}

/// A version without what a scenario needs is skipped: it would do something else.
#[test(python())]
fn a_version_without_postcopy_is_skipped() -> Result<(), Failed> {
    for (version, status) in [("v53.0.0", 4), ("v54.0.0", 0), ("v55.0-12-g0123abc", 0)] {
        let env = TestEnv::new()?;
        let output =
            fake(&env, "cloud-hypervisor", "migrate-postcopy")?.env("FAKE_VERSION", version).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status)
            && said.contains("Cloud Hypervisor 53 has no postcopy") == (status != 0);
        ensure(right, || format!("{version}: {output:?}"))?;
    }
    Ok(())
}

/// Further arguments reach a VMM that starts a machine.
#[test(python())]
fn further_arguments_reach_the_vmm() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut command = fake(&env, "kvmtool", "boot")?;
    let output = command.args(["--vmm-arg=--debug", "--vmm-arg", "-x y"]).output()?;
    let sent = fs::read_to_string(env.path("requests"))?;
    let right = output.status.success() && sent.contains("judge.raw,ro --debug -x y\n");
    ensure(right, || format!("{sent}: {output:?}"))
}

/// A VMM that answers something else is a crash, in one line.
#[test(python())]
fn an_answer_that_is_none_is_one_line() -> Result<(), Failed> {
    for (vmm, answer, says) in [
        ("firecracker", "nonsense\n", "PUT /machine-config: the answer is not HTTP"),
        ("cloud-hypervisor", "HTTP/1.1 500 No\n\n", "PUT /api/v1/vm.pause: status 500"),
        ("cloud-hypervisor", "HTTP/1.1 204 Yes\nno colon\n", "PUT /api/v1/vm.pause: the answer is not HTTP"),
        ("firecracker", "HTTP/1.1 400 No\nContent-Length: 4\n\nwhy?", "status 400: why?"),
        ("firecracker", "HTTP/1.1 400 No\nContent-Length: 8\n\n\u{1b}[2Jwhy?", "status 400: [2Jwhy?"),
        ("firecracker", "endless", "PUT /machine-config: no answer within 10 s"),
    ] {
        let env = TestEnv::new()?;
        let mut command = fake(&env, vmm, "pause")?;
        if answer == "endless" {
            command.args(["--limit", "10s"]);
        }
        let output = command.env("FAKE_ANSWER", answer).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(1) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{vmm} {answer}: {output:?}"))?;
    }
    Ok(())
}

#[test]
fn what_a_driver_cannot_do_is_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (arguments, path, status, says) in [
        ("--vmm nonsense", None, 2, "nonsense"),
        ("--vmm qemu --scenario nonsense", None, 2, "snapshot-diff"),
        ("", None, 2, "--vmm"),
        ("--vmm qemu -- true {elf}", None, 2, "--vmm"),
        ("-- true", None, 2, "{bzimage}"),
        ("-- /nonexistent/vmm {elf}", None, 1, "/nonexistent/vmm"),
        ("--scenario fork -- true {elf}", None, 4, "nothing but boot"),
        ("--vmm qemu --scenario fork", None, 4, "QEMU does not fork machines"),
        ("--vmm qemu", Some("/nonexistent"), 4, "apt-get install qemu-system-x86"),
        ("--vmm firecracker", Some("/nonexistent"), 4, "VELLUM_VMMS"),
        ("--vmm cloud-hypervisor", Some("/nonexistent"), 4, "VELLUM_VMMS"),
        ("--vmm crosvm", Some("/nonexistent"), 4, "VELLUM_VMMS"),
        ("--vmm kvmtool", Some("/nonexistent"), 4, "VELLUM_VMMS"),
    ] {
        let mut command = env.command(&format!("judge run {arguments}"));
        if let Some(path) = path {
            command.env("PATH", path);
        }
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{arguments}: {output:?}"))?;
    }
    Ok(())
}

/// A VMM that ends at once is a crash, with its last line as the reason. One that does not answer
/// what its version is, or fails then, is not driven at all.
#[test]
fn what_a_vmm_says_before_it_ends_is_the_reason() -> Result<(), Failed> {
    for (script, says) in [
        (
            "echo 1\n[ $# -gt 1 ] || exit 0\necho begins >&2\necho no such machine >&2\nexit 1",
            "QMP socket: no such machine",
        ),
        ("echo 1\necho no such library >&2\nexit 3", "its version: exit status: 3: no such library"),
        ("exit 0", "--version says nothing"),
        ("while :; do read line < /dev/zero; done", "its version did not come"),
    ] {
        let env = TestEnv::new()?;
        let qemu = env.path("qemu-system-x86_64");
        support::executable(&qemu, format!("#!/bin/sh\n{script}\n").as_bytes())?;
        let limit = if script.contains("while") { "2s" } else { "2m" };
        let mut command = env.command(&format!("judge run --vmm qemu --scenario boot --limit {limit}"));
        let output = command.env("PATH", env.dir()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(1) && said.contains(says) && said.lines().count() == 1;
        ensure(right, || format!("{script}: {output:?}"))?;
    }
    Ok(())
}

/// `judge run` of a shell's script, which has a log that is whole as $WHOLE and one that is LOST as
/// $LOST, and $DIR for itself.
fn script(env: &TestEnv, script: &str, arguments: &[&str]) -> Result<Command, Failed> {
    let whole = fs::canonicalize("tests/fuzz/corpus/judge/whole.log")?;
    let fault = "# fault lost-write vcpu=1 address=0x200000 expected=0x3 found=0x2\r\n1..";
    let lost = env.path("lost.log");
    fs::write(&lost, fs::read_to_string(&whole)?.replacen("1..", fault, 1))?;
    let mut command = env.command("judge run");
    command.args(arguments).env("WHOLE", whole).env("LOST", lost).env("DIR", env.dir());
    command.args(["--", "sh", "-c", script, "{elf}"]);
    Ok(command)
}

/// A log of another machine does not pass: another seed, number of passes or of vCPUs. What a
/// command does not pass on is not compared.
#[test]
fn a_log_of_another_machine_does_not_pass() -> Result<(), Failed> {
    for (arguments, words, says) in [
        (["-p", "seed=3 passes=8"], "{cmdline} {cpus}", ""),
        (["-p", "seed=1 passes=1 seed=3 passes=8"], "{cmdline}", ""),
        (["-c", "4"], "", ""),
        (["-p", "passes=8"], "{cmdline}", "boot: the log is of another machine: seed=3, and not "),
        (["-p", "seed=4 passes=8"], "{cmdline}", "boot: the log is of another machine: seed=3, and not 4"),
        (["-p", "seed=3"], "{cmdline}", "boot: the log is of another machine: passes=8, and not 3"),
        (["-m", "20m"], "{memory}", "boot: 4 MiB of the memory are neither judged nor left out"),
        (["-m", "16m"], "{memory}", ""),
        (["-c", "1"], "{cpus}", "boot: the log is of another machine: vcpus=2, and not 1"),
    ] {
        let env = TestEnv::new()?;
        let mut command = script(&env, "cat $WHOLE", &arguments)?;
        let output = command.args(words.split_whitespace()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let status = i32::from(!says.is_empty());
        let right = output.status.code() == Some(status) && said.contains(says);
        ensure(right && said.lines().count() == status as usize, || format!("{arguments:?}: {output:?}"))?;
    }
    Ok(())
}

/// Any program is a VMM. A console of nonsense, or none, is one line, and so is a program that does
/// not end.
#[test]
fn a_command_boots_the_image_and_its_standard_output_is_the_console() -> Result<(), Failed> {
    let first_line = "boot: the image's first line is missing";
    for (text, status, says) in [
        ("test -s $0 && cat $WHOLE", 0, ""),
        (r"printf '\033[2J\033c\377\376\007\000\r\n'; cat $WHOLE; printf '\033]0;title\007\n'", 0, ""),
        ("cat $LOST", 1, "boot: LOST lost-write at 0x200000"),
        ("head -c 200000 /dev/urandom; printf '\\033[31m# judge'", 1, first_line),
        ("exit 3", 1, first_line),
        ("exec >&-; exit 0", 1, first_line),
        ("kill -SEGV $$", 1, first_line),
        ("sed /end/d $WHOLE", 1, "boot: the log ends without a verdict"),
        ("echo 'Bail out! too little memory'", 1, "boot: too little memory"),
        ("cat $WHOLE; sleep 1000 & wait", 1, "nothing for 2 s: the machine's end did not come"),
        ("exec cat /dev/zero", 1, "its console has over 64 MiB"),
    ] {
        let env = TestEnv::new()?;
        let output =
            script(&env, text, if text.contains("sleep") { &["--limit", "2s"] } else { &[] })?.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines = usize::from(status != 0);
        let right =
            output.status.code() == Some(status) && said.contains(says) && said.lines().count() == lines;
        ensure(right, || format!("{text}: {output:?}"))?;
    }
    Ok(())
}

/// Too little memory for the image, in a real machine.
#[test(boots())]
fn too_little_memory_is_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let output = env.vellum("judge run --vmm vellum --scenario boot -c 8 -m 4m")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = said.contains("boot: too little memory") && said.lines().count() == 1;
    ensure(output.status.code() == Some(1) && right, || format!("{output:?}"))
}

/// A VMM that listens and accepts nothing. The kernel keeps one connection waiting for it.
#[test(python())]
fn a_vmm_that_accepts_no_connection_hangs() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let vmms = env.path("vmms");
    fs::create_dir(&vmms)?;
    let text = "#!/usr/bin/env python3\nimport signal, socket, sys\n\
        if '--version' in sys.argv: sys.exit(print('cloud-hypervisor v54.0.0'))\n\
        listener = socket.socket(socket.AF_UNIX)\n\
        listener.bind(sys.argv[sys.argv.index('--api-socket') + 1])\n\
        listener.listen(0)\nsignal.pause()\n";
    let program = vmms.join("cloud-hypervisor");
    support::executable(&program, text.as_bytes())?;
    let line = "judge run --vmm cloud-hypervisor --scenario boot --limit 1s";
    let output = env.command(line).env("VELLUM_VMMS", vmms).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(1) && said.lines().count() == 1 && said.contains("boot: ");
    ensure(right, || format!("{output:?}"))
}

/// What a VMM has started ends with it, and with its driver.
#[test]
fn nothing_of_a_vmm_is_left_running() -> Result<(), Failed> {
    for (text, signal) in [
        // It ends and leaves something; it does not end, and the driver is interrupted.
        ("sleep 1000 & echo $! > $DIR/pid.new; mv $DIR/pid.new $DIR/pid", None),
        ("sleep 1000 & echo $! > $DIR/pid.new; mv $DIR/pid.new $DIR/pid; wait", Some("-INT")),
    ] {
        let env = TestEnv::new()?;
        let mut command = script(&env, text, &["--limit", "10m"])?;
        let driver = Process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        let pid = eventually(LIMIT, "it has started", || Ok(fs::read_to_string(env.path("pid")).ok()))?;
        let pid: u32 = pid.trim().parse().map_err(|_| "no process")?;
        if let Some(signal) = signal {
            succeeds(Command::new("kill").args([signal, &driver.id().to_string()]).output()?)?;
        }
        let output = driver.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let status = if signal.is_some() { 130 } else { 1 };
        ensure(output.status.code() == Some(status) && said.lines().count() == 1, || format!("{output:?}"))?;
        eventually(LIMIT, "what it has started ends", || Ok(process(pid).is_none().then_some(())))?;
    }
    Ok(())
}

/// An interrupt is noticed between rounds that are whole. It says how far they were.
#[test]
fn an_interrupt_says_what_it_broke_off() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let json = env.path("json");
    let arguments = ["--times", "1000000", "--json", &json.display().to_string()];
    let mut command = script(&env, "cat $WHOLE; echo >> $DIR/rounds", &arguments)?;
    let driver = Process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    eventually(LIMIT, "a round is over", || Ok(fs::read(env.path("rounds")).ok()))?;
    succeeds(Command::new("kill").args(["-INT", &driver.id().to_string()]).output()?)?;
    let output = driver.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let result = fs::read_to_string(&json)?;
    let right = said.lines().count() == 1
        && said.contains("ended by signal 2; no machine is left")
        && result.contains("ended by signal 2 after ")
        && result.contains(" of 1000000 rounds of boot");
    ensure(output.status.code() == Some(130) && right, || format!("{output:?}: {result}"))
}

/// Of a round without a verdict and one that is LOST, the latter decides, whichever came first.
#[test]
fn what_is_lost_is_worse_than_what_has_no_verdict() -> Result<(), Failed> {
    for order in ["test -e $DIR/again && cat $LOST", "test -e $DIR/again || cat $LOST"] {
        let env = TestEnv::new()?;
        let output =
            script(&env, &format!("{order}; touch $DIR/again"), &["--times", "2", "--format", "ktap"])?
                .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = said.contains("boot: LOST lost-write at 0x200000, seen by vCPU 1 (round ");
        ensure(output.status.code() == Some(1) && right, || format!("{order}: {output:?}"))?;
    }
    Ok(())
}
