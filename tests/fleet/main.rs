//! Fleets on a real Slurm: Debian's slurm-wlm. Its daemons run for one test each, in namespaces of
//! their own that have only the loopback interface.
//!
//! A test starts this program again in the namespaces ([`outside`]). There it starts a [`cluster`]
//! and runs a function of [`scenarios`]. No service is started, and this machine's own Slurm
//! configuration is not read: SLURM_CONF names a file in the test's directory. When the first
//! process in the namespaces ends, the kernel ends all others in there.
//!
//! `cargo lab test --setup` unpacks Slurm into its cache and names the directory here. `cargo lab
//! test fleet` runs the long scenarios.

mod cluster;
mod hostile;
mod scenarios;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use support::hosts::kvm;
use support::{Failed, Need, Tests, ensure, test, tools};
use vellum_sys::signal;

/// The environment variable with the scenario that runs in the namespaces.
const SCENARIO: &str = "VELLUM_FLEET_SCENARIO";

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(SCENARIO) {
        return scenarios::run(&name);
    }
    let mut tests = Tests::from_args();
    // Each test has several nodes on this machine.
    tests.one_at_a_time();
    tests.run()
}

/// The directory into which `cargo lab test --setup` has unpacked Slurm.
fn directory() -> Result<PathBuf, String> {
    std::env::var_os("VELLUM_SLURM").map(PathBuf::from).filter(|dir| dir.is_dir()).ok_or_else(|| {
        format!("needs Debian's slurm-wlm, unpacked into the laboratory's cache: {}", tools::SETUP)
    })
}

fn slurm() -> Need {
    directory().map(drop)
}

/// Requires root in namespaces: Slurm's daemons set the user of each task, even if it is the same.
fn namespaces() -> Need {
    tools::program("ip")?;
    let tried =
        Command::new("unshare").args(["--net", "--uts", "--mount", "--pid", "--fork", "ip", "link"]).output();
    match tried {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!(
            "needs namespaces of its own, and so root: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
        Err(_) => Err(tools::lacks("unshare")),
    }
}

fn asked_for() -> Need {
    match std::env::var("VELLUM_FLEET").is_ok_and(|what| what == "all") {
        true => Ok(()),
        false => Err("takes minutes: cargo lab test fleet, or VELLUM_FLEET=all".into()),
    }
}

/// Runs a scenario in namespaces of its own.
fn outside(name: &str) -> Result<(), Failed> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fleet-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir)?;
    let slurm = directory()?;
    let libraries =
        ["usr/lib/x86_64-linux-gnu/slurm-wlm", "usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    let libraries = libraries.map(|part| slurm.join(part).to_string_lossy().into_owned()).join(":");
    // The shell is the first process in there and adopts orphans.
    let script = "ip link set lo up && ip addr add 192.0.2.1/32 dev lo && echo cluster >/proc/sys/kernel/hostname && \"$0\"; exit $?";
    let mut command = Command::new("unshare");
    command.args([
        "--net",
        "--uts",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child=KILL",
        "sh",
        "-c",
        script,
    ]);
    command.arg(std::env::current_exe()?);
    let path = std::env::var("PATH").unwrap_or_default();
    command
        .env(SCENARIO, name)
        .env("VELLUM_FLEET_DIR", &dir)
        .env("LD_LIBRARY_PATH", libraries)
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", slurm.join("usr/bin").display()))
        .env("SLURM_CONF", dir.join("slurm.conf"));
    signal::end_with_parent(&mut command);
    let output = command.output()?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    ensure(output.status.success(), || {
        format!("{}{}", String::from_utf8_lossy(&output.stderr), cluster::logs(&dir))
    })?;
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

#[test(slurm(), kvm(), namespaces())]
fn a_plan_runs_on_slurm_and_a_lost_page_is_named() -> Result<(), Failed> {
    outside("short")
}

#[test(asked_for(), slurm(), kvm(), namespaces())]
fn one_lost_page_among_a_thousand_tasks_is_found_and_tried_again_where_it_was() -> Result<(), Failed> {
    outside("thousand")
}

#[test(asked_for(), slurm(), kvm(), namespaces())]
fn daemons_that_die_and_nodes_that_go_lose_nothing_and_nothing_counts_twice() -> Result<(), Failed> {
    outside("deaths")
}

#[test(asked_for(), slurm(), kvm(), namespaces())]
fn a_full_disk_loses_nothing_for_good() -> Result<(), Failed> {
    outside("full")
}

/// `VELLUM_FLEET_PAGE` names a file for the page.
#[test(asked_for(), slurm(), kvm(), namespaces())]
fn the_oracle_over_all_trackers_and_backings_on_three_nodes() -> Result<(), Failed> {
    outside("oracle")
}
