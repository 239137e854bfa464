//! Hosts where KVM is missing or inaccessible, made with namespaces and a filter for one ioctl.
//! Commands print a remedy and end.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Output};

use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter};
use support::{Failed, Need, Tests, test};
use vellum_sys::{host, seccomp};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// An empty /dev.
const NO_NODE: &str = "mount -t tmpfs none /dev";
/// A node of another driver.
const OTHER_NODE: &str =
    "mount -t tmpfs none /dev && touch /dev/kvm && mount --bind /proc/self/comm /dev/kvm";
/// A node for a group that the user is not in.
const GROUP_NODE: &str =
    "mount -t tmpfs none /dev && mknod /dev/kvm c 10 232 && chgrp 1 /dev/kvm && chmod 660 /dev/kvm";

/// Makes this program a helper: KVM_CREATE_VM fails with EBUSY in the command that follows.
const BUSY: &str = "--where-kvm-is-busy";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    if let [_, flag, command, arguments @ ..] = &words[..]
        && flag == BUSY
    {
        make_kvm_busy();
        let error = Command::new(command).args(arguments).exec();
        panic!("{command}: {error}");
    }
    Tests::from_args().run()
}

fn namespace() -> Need {
    within(NO_NODE, &["true"]).map(drop)
}

fn container() -> Need {
    in_container(NO_NODE, &["true"]).map(drop)
}

fn kvm() -> Need {
    vellum_kvm::vm::open().map(drop).map_err(|error| format!("needs KVM: {error}"))
}

fn root() -> Need {
    if !host::is_root() {
        return Err("needs root to make a device node: run the tests with sudo".into());
    }
    support::tools::program("setpriv")
}

/// Runs a command in a mount namespace of its own, after `prepare` has changed its /dev.
fn within(prepare: &str, command: &[&str]) -> Result<Output, String> {
    let mut unshare = Command::new("unshare");
    // An ordinary user becomes root of a user namespace, which suffices to mount.
    unshare.args(if host::is_root() { &["--mount"][..] } else { &["--mount", "--map-root-user"][..] });
    unshare.args(["sh", "-c", &format!("{prepare} && exec \"$@\""), "sh"]).args(command);
    let output = unshare.output().map_err(|_| support::tools::lacks("unshare"))?;
    if command == ["true"] && !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("needs a mount namespace: run as root, or allow user namespaces: {said}"));
    }
    Ok(output)
}

/// Like [`within`], in a PID namespace of its own, which identifies a container.
fn in_container(prepare: &str, command: &[&str]) -> Result<Output, String> {
    within(prepare, &[&["unshare", "--pid", "--fork", "--mount-proc"], command].concat()).and_then(|output| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let refused = said.contains("unshare: ") || command == ["true"] && !output.status.success();
        if refused { Err(format!("needs a PID namespace: {said}")) } else { Ok(output) }
    })
}

/// Another hypervisor is noticed only when a VM is created: then KVM cannot enable the CPU's
/// virtualization.
fn make_kvm_busy() {
    const KVM_CREATE_VM: u32 = 0xae01;
    let instruction = |code: u32, jf: u8, k: u32| sock_filter { code: code as u16, jt: 0, jf, k };
    // struct seccomp_data: the number, then the architecture, the instruction's address and the
    // arguments.
    let (load, equal) = (BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K);
    let filter = [
        instruction(load, 0, 0),
        instruction(equal, 3, libc::SYS_ioctl as u32),
        instruction(load, 0, 16 + 8),
        instruction(equal, 1, KVM_CREATE_VM),
        instruction(BPF_RET | BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EBUSY as u32),
        instruction(BPF_RET | BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    seccomp::no_new_privileges().unwrap();
    seccomp::install(&filter).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Fails with the whole output unless `holds`.
fn expect(holds: bool, output: &Output) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(format!("{output:#?}").into()) }
}

/// Whether the line has one of the remedies for a missing node. The host's state decides which.
fn names_a_remedy(line: &str) -> bool {
    ["mknod -m 666 /dev/kvm c ", "modprobe kvm_", "--device /dev/kvm", "at EL2"]
        .iter()
        .any(|way| line.contains(way))
}

#[test(namespace())]
fn run_names_the_remedy_and_the_lab() -> Result<(), Failed> {
    let output = within(NO_NODE, &[VELLUM, "run"])?;
    let stderr = text(&output.stderr);
    expect(
        output.status.code() == Some(1) && output.stdout.is_empty() && stderr.lines().count() == 1,
        &output,
    )?;
    let lab = if cfg!(target_arch = "x86_64") { "svm" } else { "arm64" };
    let lab = format!("`cargo lab run {lab} -- vellum run`");
    let start = "vellum: /dev/kvm does not exist: ";
    expect(stderr.starts_with(start) && names_a_remedy(&stderr) && stderr.contains(&lab), &output)
}

#[test(namespace())]
fn doctor_examines_the_rest_and_fails() -> Result<(), Failed> {
    let output = within(NO_NODE, &[VELLUM, "doctor"])?;
    let stdout = text(&output.stdout);
    expect(output.status.code() == Some(1) && output.stderr.is_empty(), &output)?;
    let first = stdout.lines().next().unwrap_or_default();
    expect(first.starts_with("FAIL  /dev/kvm ") && names_a_remedy(first), &output)?;
    let looked_at =
        ["THP", "userfaultfd", "RLIMIT_MEMLOCK", "/dev/net/tun", "seccomp", "Landlock", "CPUs", "memory"];
    expect(looked_at.iter().all(|name| stdout.lines().any(|line| line[6..].starts_with(name))), &output)
}

#[test(namespace())]
fn doctor_json_carries_verdict_and_remedy() -> Result<(), Failed> {
    let output = within(NO_NODE, &[VELLUM, "doctor", "--json"])?;
    expect(output.status.code() == Some(1), &output)?;
    let diagnosis: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let node = &diagnosis["checks"][0];
    expect(diagnosis["ok"] == false && node["name"] == "/dev/kvm" && node["verdict"] == "fail", &output)?;
    expect(node["remedy"].as_str().is_some_and(names_a_remedy), &output)
}

#[test(container())]
fn a_container_is_to_get_the_node() -> Result<(), Failed> {
    for command in [&["run"][..], &["doctor"]] {
        let output = in_container(NO_NODE, &[&[VELLUM], command].concat())?;
        let said = text(&output.stdout) + &text(&output.stderr);
        expect(output.status.code() == Some(1), &output)?;
        expect(
            said.contains("/dev/kvm") && said.contains("start the container with --device /dev/kvm"),
            &output,
        )?;
        // Remedies that a container cannot apply are not printed.
        expect(!said.contains("mknod") && !said.contains("modprobe"), &output)?;
    }
    Ok(())
}

#[test(kvm())]
fn kvm_that_another_hypervisor_holds_names_whose_guests_to_end() -> Result<(), Failed> {
    for command in [&["run"][..], &["run", "--kernel", VELLUM], &["doctor"]] {
        let output = Command::new(std::env::current_exe()?).args([BUSY, VELLUM]).args(command).output()?;
        let said = text(&output.stdout) + &text(&output.stderr);
        let line = said.lines().find(|line| line.contains("/dev/kvm")).unwrap_or_default();
        let good = line.contains("busy") && line.contains("VirtualBox") && line.contains("modprobe -r");
        expect(output.status.code() == Some(1) && good, &output)?;
    }
    Ok(())
}

#[test(namespace())]
fn another_node_is_not_taken_for_kvm() -> Result<(), Failed> {
    let output = within(OTHER_NODE, &[VELLUM, "run"])?;
    let stderr = text(&output.stderr);
    expect(output.status.code() == Some(1) && stderr.starts_with("vellum: /dev/kvm is not KVM: "), &output)
}

#[test(namespace(), root())]
fn no_permission_names_the_group_to_join() -> Result<(), Failed> {
    let user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", VELLUM];
    let output = within(GROUP_NODE, &[&user[..], &["run"]].concat())?;
    let stderr = text(&output.stderr);
    let start = "vellum: /dev/kvm may not be opened by this user: sudo usermod -aG ";
    expect(output.status.code() == Some(1) && stderr.starts_with(start), &output)?;
    let output = within(GROUP_NODE, &[&user[..], &["doctor"]].concat())?;
    expect(output.status.code() == Some(1) && text(&output.stdout).contains("sudo usermod -aG "), &output)
}
