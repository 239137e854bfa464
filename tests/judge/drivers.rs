//! `vellum judge run`: Vellum and QEMU in each scenario, the others by a server that answers their
//! documented API, and what a driver cannot do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use support::env::TestEnv;
use support::{Failed, Need, ensure, test, tools};

use crate::{boots, emulator};

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
    driven("vellum", &["boot", "pause", "snapshot", "snapshot-diff", "migrate", "migrate-postcopy"])
}

#[test(emulator())]
fn a_driven_qemu_is_whole_in_each_scenario() -> Result<(), Failed> {
    driven("qemu", &["boot", "pause", "snapshot", "migrate"])
}

/// A directory with a program of this name that answers as the real one does by its documents
/// (`tests/data/fake-vmm.py`).
fn fake(env: &TestEnv, name: &str, scenario: &str) -> Result<Command, Failed> {
    let vmms = env.path("vmms");
    fs::create_dir(&vmms)?;
    let [script, log] = ["tests/data/fake-vmm.py", "tests/fuzz/corpus/judge/whole.log"].map(fs::canonicalize);
    std::os::unix::fs::symlink(script?, vmms.join(name))?;
    let mut command = env.command(&format!("judge run --vmm {name} --scenario {scenario} --format ktap"));
    command.env("VELLUM_VMMS", vmms).env("FAKE_LOG", log?).env("FAKE_REQUESTS", env.path("requests"));
    if scenario == "boot" {
        command.env("FAKE_BOOTS", "1");
    }
    Ok(command)
}

fn python() -> Need {
    tools::program("python3")
}

/// Each driver sends what the documents of its VMM say, in this order, and reads both consoles.
/// `DIR` is the round's.
#[test(python())]
fn drivers_of_rest_apis_send_what_is_documented() -> Result<(), Failed> {
    let machine = [
        r#"PUT /machine-config {"mem_size_mib":64,"track_dirty_pages":true,"vcpu_count":2}"#,
        r#"PUT /boot-source {"boot_args":"CMDLINE","kernel_image_path":"judge.elf"}"#,
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
    for (vmm, scenario, expected) in [
        ("firecracker", "boot", &[][..]),
        ("firecracker", "pause", &[paused, resumed]),
        ("firecracker", "snapshot", &[paused, full, &whole]),
        ("firecracker", "snapshot-diff", &[paused, full, resumed, paused, diff, &merged]),
        ("cloud-hypervisor", "boot", &[]),
        ("cloud-hypervisor", "pause", &[pause, resume]),
        (
            "cloud-hypervisor",
            "snapshot",
            &[
                pause,
                r#"PUT /api/v1/vm.snapshot {"destination_url":"file://DIR/saved"}"#,
                r#"PUT /api/v1/vm.restore {"source_url":"file://DIR/saved"}"#,
                resume,
            ],
        ),
        (
            "cloud-hypervisor",
            "migrate",
            &[
                r#"PUT /api/v1/vm.receive-migration {"receiver_url":"unix:DIR/socket"}"#,
                r#"PUT /api/v1/vm.send-migration {"destination_url":"unix:DIR/socket","local":false}"#,
            ],
        ),
    ] {
        let env = TestEnv::new()?;
        let logs = env.path("logs");
        let output = fake(&env, vmm, scenario)?.arg("--logs").arg(&logs).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let right = output.status.success() && text.contains(&format!("ok 1 {scenario}\n"));
        ensure(right, || format!("{vmm} {scenario}: {output:?}"))?;
        let dir = format!("{}/{scenario}-1", fs::canonicalize(&logs)?.display());
        let requests = fs::read_to_string(env.path("requests")).unwrap_or_default().replace(&dir, "DIR");
        let cmdline = if scenario == "boot" { "passes=3" } else { "passes=16 rate=30000" };
        let requests = requests.replace(&format!("{cmdline} report=50ms seed=1 "), "CMDLINE");
        let mut sent: Vec<&str> = requests.lines().collect();
        // Who is asked to receive answers when it has.
        sent.sort_by_key(|line| line.contains("send-migration"));
        let start = if vmm == "firecracker" { &machine[..] } else { &[] };
        ensure(sent == [start, expected].concat(), || format!("{vmm} {scenario}: {sent:#?}"))?;
    }
    Ok(())
}

/// A VMM that answers something else is a crash, in one line.
#[test(python())]
fn an_answer_that_is_none_is_one_line() -> Result<(), Failed> {
    for (vmm, answer, says) in [
        ("firecracker", "nonsense\n", "PUT /machine-config: the answer is not HTTP"),
        ("cloud-hypervisor", "HTTP/1.1 500 No\n\n", "PUT /api/v1/vm.pause: status 500"),
        ("cloud-hypervisor", "HTTP/1.1 204 Yes\nno colon\n", "PUT /api/v1/vm.pause: the answer is not HTTP"),
        ("firecracker", "HTTP/1.1 400 No\nContent-Length: 4\n\nwhy?", "status 400: why?"),
    ] {
        let env = TestEnv::new()?;
        let output = fake(&env, vmm, "pause")?.env("FAKE_ANSWER", answer).output()?;
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
        ("--vmm qemu --scenario fork", None, 2, "fork"),
        ("--vmm qemu", Some("/nonexistent"), 4, "apt-get install qemu-system-x86"),
        ("--vmm firecracker", Some("/nonexistent"), 4, "VELLUM_VMMS"),
        ("--vmm cloud-hypervisor", Some("/nonexistent"), 4, "VELLUM_VMMS"),
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

/// A VMM that ends at once is a crash, with its last line as the reason.
#[test]
fn what_a_vmm_says_before_it_ends_is_the_reason() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let qemu = env.path("qemu-system-x86_64");
    fs::write(&qemu, "#!/bin/sh\necho begins >&2\necho no such machine >&2\nexit 1\n")?;
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755))?;
    let mut command = env.command("judge run --vmm qemu --scenario boot");
    let output = command.env("PATH", env.dir()).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = output.status.code() == Some(1) && said.contains("QMP socket: no such machine");
    ensure(right && said.lines().count() == 1, || format!("{output:?}"))
}
