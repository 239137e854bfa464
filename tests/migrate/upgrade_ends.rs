//! A machine keeps its terminal and its tap when it is upgraded.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;
use crate::upgrade::{pid, upgrade};
use crate::{counting, ends_with, has_counted, succeeds};

/// Requires the setsid of util-linux. That of busybox has no long options.
fn setsid() -> Need {
    let works =
        Command::new("setsid").args(["--wait", "true"]).output().is_ok_and(|out| out.status.success());
    if works { Ok(()) } else { Err(support::tools::lacks("setsid")) }
}

/// Every key except Ctrl-A x goes to the guest, before and after an upgrade. Ctrl-A x ends it, and
/// the terminal is restored.
#[test(real(), setsid())]
fn a_terminal_is_the_guests_in_another_build_too_and_then_as_it_was() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().print("V").echo().elf64())?;
    let (mut master, slave, name) = open_pty()?;
    let stty = |arguments: &[&str]| -> Result<String, Failed> {
        let output = Command::new("stty").args(["-F", &name]).args(arguments).output()?;
        Ok(String::from_utf8(output.stdout)?)
    };
    stty(&["sane"])?;
    let mut first = Command::new("setsid");
    first.args(["--ctty", "--wait", VELLUM, "run", "--name", "m", "--memory", "8m,backing=memfd", "-k"]);
    first.arg(&kernel).env("XDG_RUNTIME_DIR", env.dir());
    let mut first = first.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave).spawn()?;
    let mut says = |keys: &[u8], due: &[u8]| -> Result<(), Failed> {
        master.write_all(keys)?;
        let mut got = vec![0; due.len()];
        master.read_exact(&mut got)?;
        ensure(got == due, || format!("{keys:?} came back as {got:?}, not {due:?}"))
    };
    says(b"", b"V")?;
    for _ in 0..2 {
        says(b"a\x03\r\x01\x01", b"a\x03\r\x01")?;
        upgrade(&env, "m")?;
        let mode = stty(&["-a"])?;
        ensure(mode.contains("-icanon") && mode.contains("-isig"), || format!("it is not raw: {mode}"))?;
    }
    says(b"b\x03\x01\x01", b"b\x03\x01")?;
    master.write_all(b"\x01x")?;
    let status = eventually(LIMIT, "it ends", || Ok(first.try_wait()?))?;
    ensure(status.code() == Some(0), || format!("{status:?}"))?;
    let mode = stty(&["-a"])?;
    let sane = !["-echo ", "-icanon", "-isig"].iter().any(|raw| mode.contains(raw));
    ensure(sane, || format!("the terminal stays raw: {mode}"))
}

/// Requires the right to create a network namespace with a tap.
fn taps() -> Need {
    ["unshare", "ip"].into_iter().try_for_each(support::tools::program)?;
    let make = "ip tuntap add dev probe mode tap";
    let made = Command::new("unshare").args(["-n", "sh", "-c", make]).stderr(Stdio::null()).status();
    match made.is_ok_and(|status| status.success()) {
        true => Ok(()),
        false => Err("needs a tap in a network namespace: root, and /dev/net/tun".into()),
    }
}

/// The names of the taps that process `of` has open.
fn taps_of(of: u32) -> Result<Vec<String>, Failed> {
    let mut names = Vec::new();
    for entry in fs::read_dir(format!("/proc/{of}/fdinfo"))? {
        // The descriptor may have been closed meanwhile.
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        names.extend(text.lines().filter_map(|line| Some(line.strip_prefix("iff:")?.trim().to_owned())));
    }
    Ok(names)
}

/// The tap is in a network namespace that the starter of the other build is not in. Its descriptor
/// is handed over, and the old process closes it.
#[test(kvm(), taps())]
fn a_tap_goes_over_to_another_build() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, out) = (counting(&env)?, env.path("out"));
    let mut command = Command::new("unshare");
    command.args(["-n", VELLUM, "run", "--memory", "32m,backing=memfd", "--net", "tap=vt0,create", "-k"]);
    command.arg(&kernel).args(["--serial", &format!("file={}", out.display())]);
    command.env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
    let first = env.start("m", &mut command)?;
    let grows = || -> Result<(), Failed> {
        let was = fs::metadata(&out)?.len();
        eventually(LIMIT, "it counts", || Ok((fs::metadata(&out)?.len() > was + 512).then_some(())))
    };
    grows()?;
    let mut before = pid(&env, "m")?;
    let queues = taps_of(before)?;
    ensure(!queues.is_empty() && queues.iter().all(|name| name == "vt0"), || format!("{queues:?}"))?;
    for _ in 0..2 {
        let now = upgrade(&env, "m")?;
        ensure(taps_of(now)? == queues, || format!("{:?} are open, not {queues:?}", taps_of(now)))?;
        eventually(LIMIT, "the process before has no tap", || {
            // The process in between may have ended.
            Ok(taps_of(before).unwrap_or_default().is_empty().then_some(()))
        })?;
        grows()?;
        before = now;
    }
    succeeds(&env.vellum("ctl m stop")?)?;
    ends_with(first, 0)?;
    has_counted(&[out])
}
