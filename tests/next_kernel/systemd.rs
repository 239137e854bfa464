//! A host with systemd, which is set up as docs/src/how-to/live-update.md says. Its units save the
//! machines before a kexec and restore them after it, and nobody helps them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::kexec::{self, KEPT, KERNELS};
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;

/// What an operator copies.
const RESOURCES: [(&str, &str); 4] = [
    (
        "vellum-live-update-save.service",
        include_str!("../../resources/systemd/vellum-live-update-save.service"),
    ),
    (
        "vellum-live-update-restore.service",
        include_str!("../../resources/systemd/vellum-live-update-restore.service"),
    ),
    ("session-.scope.d/vellum-login.conf", include_str!("../../resources/systemd/vellum-login.conf")),
    ("one.service.d/vellum-machine.conf", include_str!("../../resources/systemd/vellum-machine.conf")),
];

/// The drop-in of a template, in which `%p` would be the template's name.
const TEMPLATE: (&str, &str) =
    ("vm@.service.d/vellum-machine.conf", include_str!("../../resources/systemd/vellum-machine.conf"));

/// The machines: those with units, the second an instance of a template, and the one that root has
/// started after a login.
const WITH_UNITS: [&str; 2] = ["one", "two"];
const OF_MACHINES: [&str; 2] = ["one", "vm@two"];
const BY_HAND: &str = "hand";
const ALL: [&str; 3] = ["one", "two", "hand"];

const UNITS: &str = "/etc/systemd/system";
const SAVE: &str = "vellum-live-update-save";
const RESTORE: &str = "vellum-live-update-restore";

/// A host whose first process is systemd.
fn host() -> Need {
    kexec::host()?;
    match fs::read_to_string("/proc/1/comm") {
        Ok(name) if name == "systemd\n" => Ok(()),
        _ => Err("needs a host with systemd: cargo lab test live-update".into()),
    }
}

/// Runs a line of a shell.
fn sh(line: &str) -> Result<Output, Failed> {
    let mut command = Command::new("sh");
    command.args(["-c", line]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env_remove("XDG_RUNTIME_DIR");
    Ok(command.output()?)
}

/// Runs a line that must succeed. Returns its output.
fn succeeds(line: &str) -> Result<String, Failed> {
    let output = sh(line)?;
    ensure(output.status.success(), || format!("{line}: {output:?}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Ends this boot by a line. systemd ends this program, and the test begins anew in the next boot.
fn leaves(line: &str) -> Failed {
    let left = succeeds(line).and_then(|_| eventually(LIMIT, "systemd ends this boot", || Ok(None::<()>)));
    left.err().unwrap_or_else(|| "it did not end".into())
}

/// The command line of a machine whose result is kept.
fn run(name: &str) -> String {
    format!(
        "/usr/bin/vellum run --name {name} --memory 64m,backing=memfd --workload write,order=random,rate=1000,write=80 \
         --passes 0 --json {}",
        result(name).display()
    )
}

fn result(name: &str) -> PathBuf {
    Path::new(KEPT).join(format!("{name}.json"))
}

/// What a machine says of itself.
fn status(name: &str) -> Result<Value, Failed> {
    Ok(Client::connect(Path::new(&format!("/run/vellum/{name}.sock")))?.ask(&Do::Status {})?)
}

/// The pages that a machine's guest has accessed.
fn done(name: &str) -> Result<u64, Failed> {
    let status = status(name)?;
    Ok(status["done"].as_u64().ok_or_else(|| format!("{name}: {status}"))?)
}

/// Waits until a machine's guest has accessed more than `pages`.
fn has_written(name: &str, pages: u64) -> Result<(), Failed> {
    eventually(LIMIT, "the guest has written enough", || {
        Ok(done(name).ok().filter(|&done| done > pages).map(drop))
    })
}

/// A property of a unit.
fn property(unit: &str, name: &str) -> Result<String, Failed> {
    succeeds(&format!("systemctl show --property {name} --value {unit}"))
}

/// What a unit has said in the boot before this one (-1) or in this one (0).
fn journal(boot: i32, unit: &str) -> Result<String, Failed> {
    succeeds(&format!("journalctl --boot {boot} --unit {unit} --output cat"))
}

/// Checks what a unit has said.
fn said(boot: i32, unit: &str, what: &str, times: usize) -> Result<(), Failed> {
    let journal = journal(boot, unit)?;
    ensure(journal.matches(what).count() == times, || {
        format!("{unit} in boot {boot}: not {times} times `{what}`: {journal}")
    })
}

/// The boot is over, and no unit has failed.
fn is_up() -> Result<(), Failed> {
    let state = sh("systemctl is-system-running --wait")?;
    ensure(state.stdout == b"running\n", || {
        let failed = sh("systemctl --failed --no-legend; journalctl --boot 0 --priority warning --no-pager");
        format!("{state:?}: {failed:?}")
    })
}

/// No machine waits for a kernel.
fn nothing_is_saved() -> Result<(), Failed> {
    let status = sh("vellum live-update status")?;
    let said = String::from_utf8_lossy(&status.stdout).into_owned();
    let notes = fs::read_dir("/var/lib/vellum").map_or(0, Iterator::count);
    ensure(status.status.success() && !said.contains("saved before") && notes == 0, || {
        format!("{notes} notes: {status:?}")
    })
}

/// Writes a file of systemd's.
fn write(path: &str, content: &str) -> Result<(), Failed> {
    let path = Path::new(UNITS).join(path);
    fs::create_dir_all(path.parent().unwrap_or(Path::new(UNITS)))?;
    Ok(fs::write(path, content)?)
}

/// As the page says, with units for two machines.
fn set_up() -> Result<(), Failed> {
    for (name, unit) in [("one", "one"), ("%i", "vm@")] {
        let content = format!("[Service]\nExecStart={}\n[Install]\nWantedBy=multi-user.target\n", run(name));
        write(&format!("{unit}.service"), &content)?;
    }
    for (path, content) in RESOURCES {
        write(path, content)?;
    }
    write(TEMPLATE.0, &TEMPLATE.1.replace("%p", "%i"))?;
    // An emulated host's kernel measures its TSC anew, and finds another frequency.
    write(
        &format!("{RESTORE}.service.d/tsc.conf"),
        "[Service]\nExecStart=\nExecStart=/usr/bin/vellum live-update restore --if-any --tsc-mismatch allow\n",
    )?;
    succeeds("systemctl daemon-reload")?;
    succeeds(&format!("systemctl enable --now {SAVE} {RESTORE} {}", OF_MACHINES.join(" ")))?;
    // A login's session is such a scope (pam_systemd(8)), which has no other order at the shutdown.
    succeeds(&format!(
        "systemd-run --scope --unit session-9 --slice user-0.slice {} < /dev/null > /dev/null 2>&1 &",
        run(BY_HAND)
    ))?;
    has_written(BY_HAND, 0)?;
    let cgroup = cgroup(BY_HAND)?;
    ensure(cgroup.contains("session-9.scope"), || format!("{BY_HAND} is in {cgroup}"))
}

/// The control group of a machine's process.
fn cgroup(name: &str) -> Result<String, Failed> {
    Ok(fs::read_to_string(format!("/proc/{}/cgroup", status(name)?["pid"]))?)
}

/// Loads the next kernel.
fn load() -> Result<(), Failed> {
    let past = kexec::past();
    // The kernels take turns, so that after the next one is the one that runs.
    let [own, next] = [kexec::after(past + 1)?, kexec::after(past)?].map(|name| format!("{KERNELS}/{name}"));
    succeeds(&format!(
        "ln -sf {own} /boot/vmlinuz-$(uname -r) && kexec --kexec-file-syscall --load {next} --initrd {KEPT}/initrd \
         --reuse-cmdline"
    ))
    .map(drop)
}

/// Has systemd start the next kernel.
fn goes_to_the_next() -> Result<(), Failed> {
    for name in ALL {
        has_written(name, done(name)? + 2000)?;
    }
    load()?;
    succeeds("vellum live-update save --all --check")?;
    for name in ALL {
        fs::write(Path::new(KEPT).join(name), done(name)?.to_string())?;
    }
    Err(leaves("systemctl kexec"))
}

/// All machines go on from where they were saved, and none was started anew.
fn all_go_on() -> Result<(), Failed> {
    said(-1, SAVE, " is saved, and had stood still for ", ALL.len())?;
    said(0, RESTORE, " runs, process ", ALL.len())?;
    for name in ALL {
        let before: u64 = fs::read_to_string(Path::new(KEPT).join(name))?.parse()?;
        let done = done(name)?;
        ensure(done >= before, || format!("{name}: {done} pages, and {before} when it was saved"))?;
        has_written(name, done + 2000)?;
        let cgroup = cgroup(name)?;
        ensure(cgroup.contains(RESTORE), || format!("{name} is in {cgroup}"))?;
    }
    for (name, unit) in WITH_UNITS.into_iter().zip(OF_MACHINES) {
        is_skipped(name, unit)?;
        let before = status(name)?["pid"].clone();
        succeeds(&format!("systemctl start {unit}"))?;
        is_skipped(name, unit)?;
        ensure(status(name)?["pid"] == before, || format!("{name} was started anew"))?;
    }
    nothing_is_saved()
}

/// A machine's unit has left the restored machine alone.
fn is_skipped(name: &str, unit: &str) -> Result<(), Failed> {
    let [state, result] = [property(unit, "ActiveState")?, property(unit, "Result")?];
    ensure(state == "inactive" && result == "exec-condition", || format!("{unit} is {state}, {result}"))?;
    let journal = journal(0, unit)?;
    ensure(journal.contains(&format!("{name} runs\n")), || journal)
}

/// Ends a machine. All of its pages must be right.
fn ends_right(name: &str) -> Result<(), Failed> {
    let pid = status(name)?["pid"].clone();
    succeeds(&format!("vellum ctl {name} stop"))?;
    eventually(LIMIT, "its process ends", || {
        Ok((!Path::new(&format!("/proc/{pid}")).exists()).then_some(()))
    })?;
    ensure(every_page_is_right(&result(name))?, || format!("{name} has a page that is wrong"))
}

/// The units have started their machines anew, as after any boot.
fn are_new() -> Result<(), Failed> {
    for (name, unit) in WITH_UNITS.into_iter().zip(OF_MACHINES) {
        has_written(name, 0)?;
        let [state, pid] = [property(unit, "ActiveState")?, property(unit, "MainPID")?];
        let own = status(name)?["pid"].to_string();
        ensure(state == "active" && pid == own, || format!("{name} is {state}: {pid}, and not {own}"))?;
    }
    ensure(status(BY_HAND).is_err(), || format!("{BY_HAND} runs"))?;
    nothing_is_saved()
}

/// Machines outlive two kernels. Then one cannot be saved, and at last the host reboots.
#[test(host())]
fn systemd_saves_machines_before_a_kexec_and_restores_them() -> Result<(), Failed> {
    is_up()?;
    match kexec::past() {
        0 => {
            set_up()?;
            goes_to_the_next()
        }
        1 => {
            all_go_on()?;
            goes_to_the_next()
        }
        2 => {
            all_go_on()?;
            for name in ALL {
                ends_right(name)?;
            }
            succeeds(&format!("systemctl start {}", OF_MACHINES.join(" ")))?;
            succeeds(
                "systemd-run --unit other vellum run --name other --memory 16m,backing=anonymous --passes 0",
            )?;
            for name in WITH_UNITS.iter().chain(&["other"]) {
                has_written(name, 2000)?;
            }
            load()?;
            let check = sh("vellum live-update save --all --check")?;
            let said = String::from_utf8_lossy(&check.stderr).into_owned();
            ensure(
                check.status.code() == Some(2) && said.contains("other: its memory is anonymous"),
                || said,
            )?;
            // Who goes on all the same has machines that end as by any other end.
            Err(leaves("systemctl kexec"))
        }
        3 => {
            let why = journal(-1, SAVE)?;
            ensure(why.contains("other: its memory is anonymous"), || why)?;
            said(-1, SAVE, " is saved, ", 0)?;
            are_new()?;
            Err(leaves("systemctl reboot"))
        }
        _ => {
            said(-1, SAVE, " is saved, ", 0)?;
            are_new()?;
            for (name, unit) in WITH_UNITS.into_iter().zip(OF_MACHINES) {
                succeeds(&format!("systemctl stop {unit}"))?;
                ensure(every_page_is_right(&result(name))?, || format!("{name} has a page that is wrong"))?;
            }
            is_up()
        }
    }
}
